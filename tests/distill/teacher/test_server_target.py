"""Answers by a server: a stand-in with a tiny model behind it, and every way it can fail."""

import dataclasses
import json
import re
import shlex
import shutil
import sys
import time

import pytest
import torch

from align.cache import cache_folder
from align.checkpoint import Checkpoint, weights_sha256
from distill.models import check_models, open_models
from distill.prompt_sets import collect_prompts
from distill.publish import main as publish_main
from distill.publish import publish
from distill.recipe_files import RecipeError
from distill.teacher import server_target as module
from distill.teacher.answers import LocalTarget, note_used, top_logprobs
from distill.teacher.logged import read_outputs
from distill.teacher.server_target import Request, ServerTarget
from distill.teacher.store import Store, names_of
from distill.teacher.vllm_target import answering_target
from distill.train import run
from eval import run as evaluation
from eval.decoding.build import build_decoder
from eval.decoding.generation import Kept, generate_batched
from eval.decoding.loop import Decoding
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.engines.server import API_KEY, ServerError
from eval.reporting.fields import read_report
from eval.reporting.files import write_report
from tests.fake_vllm import FakeVllm

SPECULATES = {"step": 3, "gamma": 2}


class StandIn(FakeVllm):
    """Answers with `target` (eval.decoding.target.Target).

    scaled: log-probabilities are taken after the temperature. swap: (number of answers, the model
    that takes over after them).
    """

    def __init__(self, target, **changes):
        self.target, self.scaled, self.swap = target, False, None
        self.tokenizer = target.checkpoint.tokenizer
        super().__init__(self, **changes)

    @property
    def answered(self):
        """How many completions of more than a token were asked for."""
        return sum(path == "/v1/completions" and b["max_tokens"] > 1 for path, b in self.requests)

    def ids(self, body):
        return self.tokenizer(body["prompt"])["input_ids"]

    def write(self, ids, body):
        if self.swap and self.answered > self.swap[0]:
            self.target = self.swap[1]
        answer = self.generate(ids, body)
        rows = [dict(zip(i.tolist(), p.tolist(), strict=True)) for i, p in answer.captured]
        stops = {*self.target.stops, *body.get("stop_token_ids", [])}
        return answer.tokens, rows, "stop" if answer.tokens[-1] in stops else "length"

    def read(self, ids):
        with torch.no_grad():
            logits = self.target.model(torch.tensor([ids])).logits[0, :-1]
        top = zip(*(part.tolist() for part in top_logprobs(logits, 6)), strict=True)
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
        return [
            {token: logprob} | dict(zip(*row, strict=True))
            for row, token, logprob in zip(top, ids[1:], chosen, strict=True)
        ]

    def generate(self, ids, body):
        """The answer with the top log-probabilities at each of its tokens."""
        scale = 1 / body["temperature"] if self.scaled and body["temperature"] else 1
        stops = {*self.target.stops, *body.get("stop_token_ids", [])}
        with self.lock:
            (answer,) = generate_batched(
                self.target.decoder,
                [ids],
                Decoding(Sampling(body["temperature"]), frozenset(stops), body["max_tokens"]),
                1,
                [body.get("seed", 0)],
                Kept(lambda logits: top_logprobs(logits * scale, body.get("logprobs", 1))),
            )
        return answer


@pytest.fixture(scope="module")
def target(folder):
    return load_target(Checkpoint.open(folder / "target"), torch.float32, "cpu", 128)


@pytest.fixture(scope="module")
def other(folder):
    """A fine-tuned one, of the same name and tokenizer."""
    model = Checkpoint.open(folder / "target").load(torch.float32)
    with torch.no_grad():
        model.lm_head.weight.add_(model.lm_head.weight.flip(0), alpha=0.3)
    made = load_target(Checkpoint.open(folder / "target"), torch.float32, "cpu", 128)
    return dataclasses.replace(made, model=model, decoder=build_decoder(model, 128))


@pytest.fixture
def stand_in(target):
    made = []

    def make(**changes):
        made.append(StandIn(target, **changes))
        return made[-1]

    yield make
    for server in made:
        server.stop()


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    hurried = ServerTarget.patience.new(total=3, backoff_factor=0.01, backoff_jitter=0.01)
    monkeypatch.setattr(ServerTarget, "patience", hurried)
    monkeypatch.setattr("distill.teacher.store.ANSWERS_PER_SHARD", 2)


@pytest.fixture
def served(job, folder, tmp_path):
    """Makes a recipe whose target is behind a stand-in: its folder holds no weights here."""
    bare = tmp_path / "bare"
    shutil.copytree(folder / "target", bare, ignore=shutil.ignore_patterns("*.safetensors"))

    def make(server, output="run", **changes):
        keys = {
            "target": str(bare),
            "draft": str(folder / "moved"),
            "answers": "server",
            "answer_url": server.url,
            "answer_batch_size": 4,
            "cache_top_k": 6,
            "answer_max_new_tokens": 12,
        }
        return job(tmp_path / output, **(keys | changes))

    return make


@pytest.fixture
def asked():
    """Makes the target of a recipe as it answers, after its check."""

    def make(recipe):
        pair = check_models(recipe, *open_models(recipe))
        made = answering_target(recipe, pair, collect_prompts(recipe, pair.target), None)
        made.check()
        return made

    return make


@pytest.fixture
def apart(asked, tmp_path, monkeypatch):
    """Makes the contents of a recipe's answers in a cache of their own."""

    def make(recipe):
        with monkeypatch.context() as patch:
            patch.setenv("DRAFTSMITH_CACHE", str(tmp_path / f"cache of {recipe.folder.name}"))
            return contents(all_of(asked(recipe)))

    return make


WHOLE = []


@pytest.fixture
def whole(stand_in, served, apart):
    """The contents of a recipe's greedy answers, made once."""
    if not WHOLE:
        WHOLE.append(apart(served(stand_in(), "whole")))
    return WHOLE[0]


def all_of(target):
    """The answers to all its prompts."""
    return target.answers(target.prompts)


def contents(answers):
    return [[part.tolist() for part in dataclasses.astuple(a)[1:]] for a in answers]


def shards():
    """The shards of all stores."""
    return {path: path.read_bytes() for path in cache_folder().glob("teacher/*/shard-*")}


def test_logged_outputs_are_read_as_the_weights_read_them(
    stand_in, served, asked, target, tmp_path
):
    server, log = stand_in(), tmp_path / "log.jsonl"
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    outputs = [[5, 6, 7, 8], [9, 10], [11, 12, 13]]
    rows = [
        {
            "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text}],
            "token_ids": ids,
            "temperature": 50.0,  # nothing is improbable
        }
        for text, ids in zip(["the cat", "sat on", "red barn", "old"], [[4], *outputs], strict=True)
    ]
    log.write_text("\n".join(map(json.dumps, rows)))
    recipe = served(server, answers="logged", train_prompts=str(log))
    tokenizer = Checkpoint.open(recipe.target).tokenizer
    tokenizer.chat_template = template
    tokenizer.save_pretrained(recipe.target)
    answers = all_of(asked(recipe))
    assert len(answers) == 3  # the fourth is for tuning
    for answer in answers:
        prompt, output = answer.prompt_ids.tolist(), answer.response_ids.tolist()
        (read,) = read_outputs(target.decoder, [(prompt, output)], 6)
        assert torch.equal(answer.top_ids, read.top_ids)
        torch.testing.assert_close(
            answer.top_logprobs.float(), read.top_logprobs, atol=5e-3, rtol=2e-3
        )
    assert not any(body["max_tokens"] > 1 for _, body in server.requests if body.get("echo"))
    before = len(server.requests)
    all_of(asked(recipe))
    assert len(server.requests) == before


def test_greedy_answers_are_those_of_the_weights(stand_in, served, asked, target, tmp_path):
    server = stand_in()
    made = asked(served(server))
    answers = all_of(made)
    assert [answer.prompt_ids.tolist() for answer in answers] == made.prompts
    assert len({len(answer.response_ids) for answer in answers}) > 1  # some end by themselves
    for answer, prompt in zip(answers, made.prompts, strict=True):  # one alone: bit by bit
        alone = server.generate(prompt, made.request().body(prompt))
        ids, logprobs = map(torch.stack, zip(*alone.captured, strict=True))
        assert answer.response_ids.tolist() == alone.tokens
        assert answer.top_ids.tolist() == ids.tolist()
        assert torch.equal(answer.top_logprobs, logprobs.half())
    local = LocalTarget(Store(tmp_path / "store"), made.settings, lambda: target)
    for answer, other in zip(answers, local.answers(made.prompts), strict=True):
        assert answer.response_ids.tolist() == other.response_ids.tolist()
        # fp32 sums in other batches may differ in the last bit of fp16
        torch.testing.assert_close(answer.top_logprobs, other.top_logprobs, atol=2e-5, rtol=2**-10)


def test_a_sampled_answer_depends_on_its_prompt_and_the_seed_alone(stand_in, served, asked, apart):
    server = stand_in()
    first = apart(served(server, "a", answer_temperature=0.8))
    again = asked(served(server, "b", answer_temperature=0.8, answer_batch_size=1))
    server.faults = [None, 500, "cut"]
    assert contents(all_of(again)) == first
    assert apart(served(server, "c", answer_temperature=0.8, seed=3)) != first
    for path, body in server.requests:  # whatever the server's defaults are
        if path == "/v1/completions" and body["max_tokens"] > 1:
            assert module.UNCHANGED.items() <= body.items()
            assert body["logprobs"] == 6
            assert body["return_tokens_as_token_ids"] is True
            assert all(isinstance(token, int) for token in body["prompt"])


def test_a_key_opens_the_server_and_is_written_nowhere(stand_in, served, asked, monkeypatch, capfd):
    secret = "sk-a9f3"
    recipe = served(stand_in(key=secret))
    with pytest.raises(ServerError, match=r"answered 401.*DRAFTSMITH_API_KEY"):
        asked(recipe)
    monkeypatch.setenv(API_KEY, f"{secret}\n")  # as a file has it
    monkeypatch.setattr(sys, "argv", ["train.py", f"--x=http://host/?api_key={secret}"])
    assert run(recipe) == 0
    assert secret not in "".join(capfd.readouterr())
    written = [path for path in recipe.folder.rglob("*") if path.is_file()]
    assert any(path.name == "provenance.json" for path in written)  # with the command
    assert not any(secret.encode() in path.read_bytes() for path in [*written, *shards()])


@pytest.mark.parametrize("fault", [(503, {"Retry-After": "1"}), 500, "cut", "hang"])
def test_a_fault_that_passes_is_waited_out(stand_in, served, asked, whole, fault):
    server = stand_in()
    made = asked(served(server))
    made.server.timeout = 5 if fault == "hang" else module.TIMEOUT
    server.faults, clock = [None, fault, fault], time.monotonic()
    assert contents(all_of(made)) == whole
    assert not server.faults
    if isinstance(fault, tuple):
        assert time.monotonic() - clock > 1


def renamed_after(count):
    """Gives the outputs after so many another model's name."""
    numbers = iter(range(10**6))

    def mangle(sent):
        if len(sent["choices"][0]["token_ids"]) > 1 and next(numbers) >= count:
            sent["model"] = "org/another"

    return mangle


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"faults": [None] * 6 + [400] * 99}, "answered 400"),
        ({"faults": [None] * 6 + ["cut"] * 99}, "broke off"),
        ({"mangle": renamed_after(6)}, "comes from model .*not stored"),
    ],
)
def test_a_fault_that_stays_loses_nothing(stand_in, served, asked, whole, changes, message):
    first = stand_in()
    recipe = served(first)
    made = asked(recipe)
    first.__dict__.update(changes)
    with pytest.raises(ServerError, match=message):
        all_of(made)
    kept = shards()
    assert kept
    first.stop()
    with pytest.raises(ServerError, match="cannot be reached"):
        asked(recipe)
    second = stand_in()
    answers = all_of(asked(served(second)))
    assert contents(answers) == whole
    assert kept.items() <= shards().items()
    assert 1 < second.answered < 11 + 1  # the check, and not all the prompts
    note_used(recipe.folder, answers)
    second.stop()
    assert len(all_of(asked(recipe))) == 11  # all there: no server is needed any more


def test_a_gateway_answers_under_another_name(stand_in, served, asked, whole):
    """It lists one model, takes requests under this name, and gives another in its responses."""
    server = stand_in(mangle=lambda sent: sent.update(model="org/another"))
    with pytest.raises(ServerError, match=r"org/another.*answer_model"):
        asked(served(server))
    assert contents(all_of(asked(served(server, "named", answer_model="org/another")))) == whole


@pytest.mark.parametrize(
    ("changes", "recipe", "named"),
    [
        ({}, {"answer_model": "org/another"}, "org/another"),
        ({"names": ["a", "b"]}, {}, "answer_model"),
        ({"max_model_len": 15}, {}, "answered 400 .*15 tokens"),
        ({"max_logprobs": 5}, {}, "answered 400 .*logprobs 6"),
        ({"scaled": True}, {"answer_temperature": 0.6}, "--logprobs-mode raw_logprobs"),
        ({"mangle": lambda sent: sent["choices"][0].pop("prompt_token_ids")}, {}, "token_ids"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_answer(
    stand_in, served, asked, changes, recipe, named
):
    recipe = served(stand_in(**changes), **recipe)
    with pytest.raises(ServerError, match=named):
        asked(recipe)
    assert not recipe.folder.exists()


def test_a_tokenizer_of_another_is_refused(stand_in, served, asked, folder):
    for other in ("draft", "moved"):
        strange = stand_in(tokenizer=Checkpoint.open(folder / other).tokenizer)
        with pytest.raises(ServerError, match="reads the prompt as tokens"):
            asked(served(strange))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_after_the_temperature_are_raw_at_1_and_when_greedy(
    stand_in, served, asked, temperature
):
    made = asked(served(stand_in(scaled=True), answer_temperature=temperature))
    assert len(made.witnesses) == module.WITNESSES


# --- one response

REQUEST = Request("org/target", 0.0, 3, 2, frozenset({9}), 50)


def response(tokens=(4, 5, 9), finish="stop"):
    rows = [{f"token_id:{token}": -0.1, f"token_id:{token + 20}": -2.5} for token in tokens]
    choice = {"finish_reason": finish, "token_ids": list(tokens), "prompt_token_ids": [1, 2]}
    choice["logprobs"] = {"top_logprobs": rows}
    return {"model": "org/target", "choices": [choice]}


def test_a_response_is_read_as_an_answer():
    for tokens, finish in (((4, 5, 9), "stop"), ((4, 5, 6), "length")):
        answer = REQUEST.read(response(tokens, finish), [1, 2])
        assert (answer.prompt_ids.tolist(), answer.response_ids.tolist()) == ([1, 2], [*tokens])
        assert answer.top_ids.tolist() == [[token, token + 20] for token in tokens]
        torch.testing.assert_close(answer.top_logprobs, torch.tensor([[-0.1, -2.5]] * 3))


def in_choice(change):
    """Changes a completion: change(its choice, its rows of log-probabilities)."""
    return lambda sent: change(sent["choices"][0], sent["choices"][0]["logprobs"]["top_logprobs"])


def value(number):
    return in_choice(lambda _, rows: rows[0].update({"token_id:24": number}))


def cut(choice, length=2, finish="length"):
    choice["finish_reason"] = finish
    del choice["token_ids"][length:], choice["logprobs"]["top_logprobs"][length:]


@pytest.mark.parametrize(
    ("mangle", "message"),
    [
        (lambda sent: sent.update(model="org/another"), "comes from model 'org/another'"),
        (in_choice(lambda choice, _: choice.update(prompt_token_ids=[1])), "reads the prompt"),
        (in_choice(lambda choice, _: choice.update(logprobs=None)), "logprobs"),
        (in_choice(lambda choice, _: choice.update(finish_reason="abort")), "finish_reason"),
        (in_choice(lambda _, rows: rows[0].update({" the": -9.0})), "as_token_ids"),
        (in_choice(lambda _, rows: rows.pop()), "3 tokens and 2 distributions"),
        (in_choice(lambda choice, _: cut(choice)), "ended by length"),
        (in_choice(lambda choice, _: cut(choice, finish="stop")), "leaves the stop token out"),
        (lambda sent: sent.update(response((4, 9, 9))), "goes on after stop token 9"),
        (in_choice(lambda _, rows: rows[0].popitem()), "cache_top_k"),
        (in_choice(lambda _, rows: rows[0].update({"token_id:4": -3.0})), "chosen greedily"),
        (
            in_choice(lambda _, rows: rows[0].update({"token_id:99": -2.4})),
            "beyond the target.s vocabulary of 50",
        ),
        *((value(bad), "raw_logprobs") for bad in (float("nan"), -9999.0, 0.5, -0.1)),
        (value(float("-inf")), "raw_logprobs"),
    ],
)
def test_a_response_that_was_not_asked_for_is_refused(mangle, message):
    sent = response()
    mangle(sent)
    with pytest.raises(ServerError, match=message):
        REQUEST.read(sent, [1, 2])


def test_a_long_answer_has_the_time_that_it_takes(stand_in, served):
    for tokens, seconds in ((12, 600), (16_000, 16_000)):
        settings = served(stand_in(), answer_max_new_tokens=tokens).answer_settings([0])
        assert module.open_server("http://localhost", None, settings).timeout == seconds


def test_another_model_under_the_same_name_is_found_out(
    stand_in, served, asked, whole, other, target
):
    server = stand_in()
    recipe = served(server, answer_batch_size=1)
    made = asked(recipe)
    server.swap = server.answered + 9, other
    with pytest.raises(ServerError, match="another model now"):
        all_of(made)
    kept = shards()
    assert kept
    with pytest.raises(ServerError, match="another model now"):
        asked(recipe)  # on the cached answers' own prompts
    assert shards() == kept
    server.swap, server.target = None, target
    assert contents(all_of(asked(recipe))) == whole


@pytest.mark.parametrize("changes", [{"names": ["org/newer"]}, {"root": "/models/newer"}])
def test_a_server_of_another_name_does_not_go_on(stand_in, served, asked, changes):
    server = stand_in()
    recipe = served(server)
    made = asked(recipe)
    server.faults = [None] * 6 + [400]
    with pytest.raises(ServerError, match="answered 400"):
        all_of(made)
    kept = shards()
    server.faults, before = [], server.answered
    server.__dict__.update(changes)
    assert len(all_of(asked(recipe))) == 11
    assert server.answered == before + 11 + 1
    assert kept.items() < shards().items()
    assert len({path.parent for path in shards()}) == 2


def test_another_run_asks_nothing_and_answers_of_other_settings_are_not_its(
    stand_in, served, asked
):
    server = stand_in()
    all_of(asked(served(server)))
    before = len(server.requests)
    assert len(all_of(asked(served(server, "other", learning_rate=1.0)))) == 11
    assert len(server.requests) == before
    sampled = asked(served(server, answer_temperature=0.5))
    assert len(sampled.store.missing(names_of(sampled.prompts))) == 11


def test_a_run_ends_in_a_draft_and_the_commands_that_serve_and_measure_it(stand_in, served, capsys):
    plain = stand_in()
    recipe = served(plain)
    assert run(recipe) == 0
    shown = capsys.readouterr().out
    folder = recipe.folder
    command = f"vllm serve {recipe.target} --served-model-name org/target --speculative-config "
    assert command in shown
    assert f'"model": "{folder.resolve() / "draft"}"' in shown
    assert (folder / "draft" / "model.safetensors").is_file()
    assert not (folder / "report").exists()
    assert json.loads((folder / "provenance.json").read_text())["hashes"]["target weights"] == (
        "served as org/target, root /models/target"
    )

    (command,) = re.findall("python -m eval.run (.*)", shown)
    drafting = stand_in(**SPECULATES)
    assert evaluation.main(shlex.split(command.replace("http://HOST:PORT", drafting.url))) == 0
    report = read_report(folder / "report" / "report.json")
    assert (report.target, report.engine) == ("org/target", "vllm")
    assert list(report.drafts) == ["tuned"]
    assert report.drafts["tuned"].speedup.n == 6
    assert report.drafts["tuned"].lossless.identical == 6
    assert report.prompts.overlap_with_training == 0
    publish(folder, licence="mit")  # only a check, and the card
    card = (folder / "draft" / "README.md").read_text()
    assert "speed-up" in card
    assert "{" not in re.sub(r"```.*?```", "", card, flags=re.DOTALL)
    assert "Not to be published" not in capsys.readouterr().out
    with pytest.raises(RecipeError, match="another recipe"):
        run(served(plain, max_steps=41))


def test_a_draft_measured_in_running_servers_is_published(stand_in, served, tmp_path, capsys):
    """The commands of docs/gpu.md, and what no one has stated."""
    plain, drafting = stand_in(), stand_in(**SPECULATES)
    recipe, there = served(plain), tmp_path / "served"
    assert run(recipe) == 0
    asked = ["--base_url", f"tuned={drafting.url}", "--baseline_url", plain.url]
    measure = ["--run", str(recipe.folder), *asked, "--gamma", "2", "--output_dir", str(there)]
    assert evaluation.main(measure) == 0
    report = read_report(there)
    assert report.drafts["tuned"].sha256 == weights_sha256(recipe.folder / "draft")
    publishing = [str(recipe.folder), "--report", str(there), "--license", "mit", "--to"]
    publish_main([*publishing, str(tmp_path / "draft")])
    assert (tmp_path / "draft" / "model.safetensors").is_file()

    report.drafts["tuned"].sha256 = None
    write_report(there / "report", report)
    with pytest.raises(SystemExit) as stopped:
        publish_main([*publishing, str(tmp_path / "again")])
    assert stopped.value.code == 2
    assert "which weights were served" in capsys.readouterr().err
    prompts = str(recipe.folder / "prompts" / "eval.jsonl")  # the Hub is not asked
    assert evaluation.main([*asked, "--draft", "mine=D", "--prompts", prompts]) == 2
    assert "mine" in capsys.readouterr().err


def test_of_a_target_on_the_hub_no_weights_are_fetched(stand_in, served, monkeypatch):
    fetched, recipe = [], served(stand_in(), target="org/target", max_steps=2)

    def download(spec, allow_patterns, **_):
        fetched.append((spec, allow_patterns))
        return str(recipe.folder.parent / "bare")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert run(recipe) == 0
    assert {spec for spec, _ in fetched} == {"org/target"}
    assert not any("safetensors" in pattern for _, patterns in fetched for pattern in patterns)


def test_a_dry_run_checks_the_server_and_makes_nothing(stand_in, served, capsys):
    recipe = served(stand_in(), dry_run=True)
    assert run(recipe) == 0
    assert "serves the target of this recipe" in capsys.readouterr().out
    assert not recipe.folder.exists()
    with pytest.raises(ServerError, match="maximum context length is 15 tokens"):
        run(served(stand_in(max_model_len=15), dry_run=True))
