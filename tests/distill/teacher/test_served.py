"""Answers by a server: a stand-in with a tiny model behind it, and every way it can fail."""

import dataclasses
import json
import re
import shutil
import time

import pytest
import torch

from align.sources import cache_folder, load_model, load_tokenizer
from align.vocabulary import read_vocabulary
from distill import train
from distill.prompt_sets import collect_prompts
from distill.recipe import RecipeError
from distill.teacher import served as module
from distill.teacher.answers import answer_prompts, note_used, top_logprobs
from distill.teacher.served import ServedTarget
from distill.teacher.store import Store
from distill.train import run
from eval.decoding.build import build_decoder
from eval.decoding.generation import Kept, generate_batched
from eval.decoding.loop import Decoding
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.engines.server import API_KEY, ServerError
from eval.reporting.fields import read_report
from tests import fake_vllm
from tests.fake_vllm import FakeVllm

SPECULATES = {"step": 3, "gamma": 2}


class StandIn(FakeVllm):
    """Answers with `target` (eval.decoding.target.Target).

    scaled: log-probabilities are taken after the temperature. swap: (number of answers, the model
    that takes over after them).
    """

    def __init__(self, target, **changes):
        self.target, self.tokenizer, self.scaled, self.swap = target, target.tokenizer, False, None
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
                [body["seed"]],
                Kept(lambda logits: top_logprobs(logits * scale, body.get("logprobs", 1))),
            )
        return answer


@pytest.fixture(scope="module")
def target(folder):
    return load_target(str(folder / "target"), torch.float32, "cpu", 128)


@pytest.fixture(scope="module")
def other(folder):
    """A fine-tuned one, of the same name and tokenizer."""
    model = load_model(str(folder / "target"), torch.float32)
    with torch.no_grad():
        model.lm_head.weight.add_(model.lm_head.weight.flip(0), alpha=0.3)
    made = load_target(str(folder / "target"), torch.float32, "cpu", 128)
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
    hurried = ServedTarget.patience.new(total=3, backoff_factor=0.01, backoff_jitter=0.01)
    monkeypatch.setattr(ServedTarget, "patience", hurried)
    monkeypatch.setattr(module, "ANSWERS_PER_SHARD", 2)


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
    """Makes what a run asks with, after its check."""

    def make(recipe):
        vocabulary = read_vocabulary(recipe.target)
        made = ServedTarget(recipe, vocabulary, collect_prompts(recipe, vocabulary))
        made.check()
        return made

    return make


@pytest.fixture
def apart(asked, tmp_path, monkeypatch):
    """Makes the contents of a recipe's answers in a cache of their own."""

    def make(recipe):
        with monkeypatch.context() as patch:
            patch.setenv("DRAFTSMITH_CACHE", str(tmp_path / f"cache of {recipe.folder.name}"))
            return contents(asked(recipe).answers())

    return make


def contents(answers):
    return [[part.tolist() for part in dataclasses.astuple(a)[1:]] for a in answers]


def shards():
    """Of all stores."""
    return {path: path.read_bytes() for path in cache_folder().glob("teacher/*/shard-*")}


def test_greedy_answers_are_those_of_the_weights(stand_in, served, asked, job, target, tmp_path):
    server = stand_in()
    recipe = served(server)
    made = asked(recipe)
    answers = made.answers()
    assert [answer.index for answer in answers] == list(range(len(made.prompts)))
    assert len({len(answer.response_ids) for answer in answers}) > 1  # some end by themselves
    for answer, prompt in zip(answers, made.prompts, strict=True):  # one alone: bit by bit
        alone = server.generate(prompt, made._request().body(prompt))
        ids, logprobs = map(torch.stack, zip(*alone.captured, strict=True))
        assert answer.response_ids.tolist() == alone.tokens
        assert answer.top_ids.tolist() == ids.tolist()
        assert torch.equal(answer.top_logprobs, logprobs.half())
    keys = ("draft", "answer_max_new_tokens", "cache_top_k")
    local = job(tmp_path / "local", **{key: getattr(recipe, key) for key in keys})
    ours = answer_prompts(local, made.prompts, lambda: target, Store(tmp_path / "store"))
    for answer, other in zip(answers, ours, strict=True):
        assert answer.response_ids.tolist() == other.response_ids.tolist()
        # fp32 sums in batches, then fp16
        torch.testing.assert_close(answer.top_logprobs, other.top_logprobs, atol=2e-3, rtol=0)


def test_a_sampled_answer_depends_on_its_prompt_and_the_seed_alone(stand_in, served, asked, apart):
    server = stand_in()
    first = apart(served(server, "a", answer_temperature=0.8))
    again = asked(served(server, "b", answer_temperature=0.8, answer_batch_size=1))
    server.faults = [None, 500, "cut"]
    assert contents(again.answers()) == first
    assert apart(served(server, "c", answer_temperature=0.8, seed=3)) != first


def test_a_key_opens_the_server_and_is_written_nowhere(stand_in, served, asked, monkeypatch, capfd):
    secret = "sk-a9f3"
    server, drafting = stand_in(key=secret), stand_in(key=secret, **SPECULATES)
    recipe = served(server, speculative_url=drafting.url)
    with pytest.raises(ServerError, match=r"answered 401.*set DRAFTSMITH_API_KEY to a key"):
        asked(recipe)
    monkeypatch.setenv(API_KEY, f"{secret}-of-another")
    with pytest.raises(ServerError, match="Unauthorized: Bearer DRAFTSMITH_API_KEY") as wrong:
        asked(recipe)
    assert secret not in str(wrong.value)
    monkeypatch.setenv(API_KEY, "päss\nword")
    with pytest.raises(ServerError, match="DRAFTSMITH_API_KEY has characters that no request"):
        asked(recipe)
    monkeypatch.setenv(API_KEY, f"{secret}\n")  # as a file has it
    assert run(recipe) == 0
    assert secret not in "".join(capfd.readouterr())
    written = [path for path in recipe.folder.rglob("*") if path.is_file()]
    assert any(path.name == "report.json" for path in written)
    assert not any(secret.encode() in path.read_bytes() for path in [*written, *shards()])


def test_no_more_prompts_are_answered_than_wanted(stand_in, served, asked):
    server = stand_in()
    assert len(asked(served(server, max_answers=4)).answers()) == 4
    assert len(asked(served(server, max_answers=6)).answers()) == 6


def test_whatever_the_servers_defaults_are_the_distribution_is_as_it_is(stand_in, served, asked):
    server = stand_in()
    asked(served(server, answer_temperature=0.8)).answers()
    for path, body in server.requests:
        if path == "/v1/completions" and body["max_tokens"] > 1:
            assert module.UNCHANGED.items() <= body.items()
            assert body["logprobs"] == 6
            assert body["return_tokens_as_token_ids"] is True
            assert all(isinstance(token, int) for token in body["prompt"])


@pytest.mark.parametrize("fault", [429, (503, {"Retry-After": "1"}), 500, 502, "cut", "hang"])
def test_a_fault_that_passes_is_waited_out(stand_in, served, asked, apart, fault):
    server = stand_in()
    expected = apart(served(server, "whole"))
    made = asked(served(server))
    made.server.timeout = 3 if fault == "hang" else module.TIMEOUT
    server.faults, clock = [None, fault, fault], time.monotonic()
    assert contents(made.answers()) == expected
    assert not server.faults
    if isinstance(fault, tuple):
        assert time.monotonic() - clock > 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (429, "answered 429"),
        (500, "answered 500"),
        (400, "answered 400"),
        ("cut", "broke off"),
    ],
)
def test_a_fault_that_stays_loses_nothing(stand_in, served, asked, apart, fault, message):
    server = stand_in()
    expected = apart(served(server, "whole"))
    recipe = served(server)
    made, before = asked(recipe), server.answered
    server.faults = [None] * 6 + [fault] * 99
    with pytest.raises(ServerError, match=message):
        made.answers()
    kept = shards()
    assert kept
    server.faults, again = [], server.answered
    assert contents(asked(recipe).answers()) == expected
    assert kept.items() <= shards().items()
    assert server.answered - again < 11 + 2  # the check, and not all the prompts
    assert before < again


def test_a_server_that_dies_midway_and_another_that_goes_on(stand_in, served, asked):
    first = stand_in()
    recipe = served(first)
    made = asked(recipe)
    first.faults = [None] * 6 + ["cut"] * 99
    with pytest.raises(ServerError, match="cannot be reached or broke off"):
        made.answers()
    first.stop()
    with pytest.raises(ServerError, match="cannot be reached"):
        asked(recipe)
    second = stand_in()
    made = asked(served(second))
    note_used(recipe.folder, made.target, made.answers())
    assert second.answered < 11 + 2  # the check, and not all the prompts
    second.stop()
    assert len(asked(recipe).answers()) == 11  # all there: no server is needed any more


def in_choice(change):
    """Changes a completion: change(its choice, its rows of log-probabilities)."""
    return lambda sent: change(sent["choices"][0], sent["choices"][0]["logprobs"]["top_logprobs"])


def cut_to(choice, length):
    for part in (choice["token_ids"], *choice["logprobs"].values()):
        del part[length:]


fewer = in_choice(lambda _, rows: [row.popitem() for row in rows])
texts = in_choice(lambda choice, _: choice["logprobs"]["tokens"].__setitem__(0, " the"))
nothing = in_choice(lambda choice, _: choice.update(logprobs=None))
without_stop = in_choice(lambda choice, _: choice["finish_reason"] == "stop" and cut_to(choice, -1))
silent_about_prompts = in_choice(lambda choice, _: choice.pop("prompt_token_ids"))
flat = in_choice(lambda _, rows: [row.update(dict.fromkeys(row, -0.1)) for row in rows])


@in_choice
def penalised(_, rows):
    for row in rows:
        first, second, *_ = row
        row[first], row[second] = row[second], row[first]


def value(number):
    return in_choice(lambda _, rows: rows[0].update({list(rows[0])[-1]: number}))


@pytest.mark.parametrize(
    ("changes", "recipe", "named"),
    [
        ({}, {"answer_model": "org/another"}, "org/another"),
        ({"names": ["a", "b"]}, {}, "answer_model"),
        ({"max_model_len": 15}, {}, "answered 400 .*15 tokens"),
        ({"max_logprobs": 5}, {}, "answered 400 .*logprobs 6"),
        ({"mangle": fewer}, {}, "cache_top_k"),
        ({"mangle": texts}, {}, "return_tokens_as_token_ids"),
        ({"mangle": nothing}, {}, "logprobs"),
        ({"mangle": without_stop}, {}, "stop token"),
        ({"mangle": penalised}, {}, "chosen greedily"),
        ({"mangle": flat}, {}, "sum to 5.4"),
        ({"mangle": value(3.0)}, {}, "3.0 is no log-probability"),
        ({"scaled": True}, {"answer_temperature": 0.6}, "--logprobs-mode raw_logprobs"),
        ({"mangle": silent_about_prompts}, {}, "return_token_ids"),
    ],
)
def test_what_does_not_fit_is_refused_before_the_first_answer(
    stand_in, served, asked, changes, recipe, named
):
    recipe = served(stand_in(**changes), **recipe)
    with pytest.raises(ServerError, match=named):
        asked(recipe)
    assert not recipe.folder.exists()


def test_a_tokenizer_of_another_is_refused_and_the_targets_own_is_not(
    stand_in, served, asked, folder
):
    for other in ("draft", "moved"):
        strange = stand_in(tokenizer=load_tokenizer(str(folder / other)))
        with pytest.raises(ServerError, match="its ids mean other tokens"):
            asked(served(strange))
    assert asked(served(stand_in())).witnesses


def test_log_probabilities_after_the_temperature_are_raw_at_1_and_when_greedy(
    stand_in, served, asked
):
    for temperature in (0.0, 1.0):
        made = asked(served(stand_in(scaled=True), answer_temperature=temperature))
        assert len(made.witnesses) == module.WITNESSES


@in_choice
def duplicate(_, rows):
    first = next(iter(rows[-1]))
    rows[-1][first.replace(":", ":0")] = rows[-1].pop(list(rows[-1])[-1])


@in_choice
def cut_answer(choice, _):
    choice["finish_reason"] = "length"
    cut_to(choice, 5)


@in_choice
def other_ids(choice, _):
    choice["token_ids"][0] += 1


cut_lists = in_choice(lambda _, rows: rows.pop())
beyond = in_choice(lambda _, rows: rows[0].update({"token_id:9999": rows[0].popitem()[1]}))
aborted = in_choice(lambda choice, _: choice.update(finish_reason="abort"))


def renamed(sent):
    sent["model"] = "org/another"


@pytest.mark.parametrize(
    ("mangle", "message"),
    [
        (value(float("nan")), "nan is no log-probability"),
        (value(float("-inf")), "-inf is no log-probability"),
        (value(-9999.0), "-9999.0 is no log-probability"),
        (value(0.5), "0.5 is no log-probability"),
        (duplicate, "names an id twice"),
        (cut_lists, "it was cut: "),
        (cut_answer, "ended by length"),
        (other_ids, "or other token ids"),
        (renamed, "comes from model 'org/another'"),
        (beyond, "token 9999 is beyond the 300 rows"),
        (aborted, "finish_reason"),
    ],
)
def test_what_goes_wrong_midway_is_not_mixed_in(stand_in, served, asked, apart, mangle, message):
    server = stand_in()
    expected = apart(served(server, "whole"))
    recipe = served(server)
    made, number = asked(recipe), iter(range(10**6))

    def later(sent):
        if len(sent["choices"][0]["token_ids"]) > 1 and next(number) >= 6:
            mangle(sent)

    server.mangle = later
    with pytest.raises(ServerError, match=f"{message}.*Nothing of it was kept"):
        made.answers()
    server.mangle = None
    assert contents(asked(recipe).answers()) == expected


def test_a_key_that_stands_twice_is_refused(stand_in, served, asked, monkeypatch):
    reply = fake_vllm._Handler.reply

    def twice(handler, content, *others, **more):
        text = re.sub(r'("token_id:\d+": )', r"\1-1, \1", json.dumps(content))
        reply(handler, text, *others, **more)

    monkeypatch.setattr(fake_vllm._Handler, "reply", twice)
    with pytest.raises(ServerError, match="has a key twice"):
        asked(served(stand_in()))


def test_another_model_under_the_same_name_is_found_out(
    stand_in, served, asked, apart, other, target
):
    server = stand_in()
    expected = apart(served(server, "whole"))
    recipe = served(server, answer_batch_size=1)
    made = asked(recipe)
    server.swap = server.answered + 9, other
    with pytest.raises(ServerError, match="another model now"):
        made.answers()
    kept = shards()
    assert kept
    with pytest.raises(ServerError, match="another model now"):
        asked(recipe)  # on the cached answers' own prompts
    assert shards() == kept
    server.swap, server.target = None, target
    assert contents(asked(recipe).answers()) == expected


@pytest.mark.parametrize("changes", [{"names": ["org/newer"]}, {"root": "/models/newer"}])
def test_a_server_of_another_name_does_not_go_on(stand_in, served, asked, changes):
    server = stand_in()
    recipe = served(server)
    made = asked(recipe)
    server.faults = [None] * 6 + [400]
    with pytest.raises(ServerError, match="answered 400"):
        made.answers()
    kept = shards()
    server.faults, before = [], server.answered
    server.__dict__.update(changes)
    assert len(asked(recipe).answers()) == 11
    assert server.answered == before + 11 + 2
    assert kept.items() < shards().items()
    assert len({path.parent for path in shards()}) == 2


def test_another_run_asks_nothing_and_answers_of_other_settings_are_not_its(
    stand_in, served, asked
):
    server = stand_in()
    asked(served(server)).answers()
    before = len(server.requests)
    assert len(asked(served(server, "other", learning_rate=1.0)).answers()) == 11
    assert len(server.requests) == before
    assert len(asked(served(server, answer_temperature=0.5))._unanswered()) == 11


def test_answers_that_are_all_empty_are_an_error(stand_in, served, asked):
    made = asked(served(stand_in()))
    made.target.all_stops.update(range(300))
    with pytest.raises(ValueError, match=r"All 11 answers of .* are empty"):
        made.answers()


def test_a_run_ends_in_a_draft_then_in_a_report_and_never_sees_the_weights(
    stand_in, served, monkeypatch, capsys
):
    plain = stand_in()
    recipe = served(plain)
    assert run(recipe) == 0
    shown = capsys.readouterr().out
    folder = recipe.folder
    command = f"vllm serve {recipe.target} --served-model-name org/target --speculative-config "
    assert command in shown
    assert f'"model": "{folder.resolve() / "draft"}"' in shown
    assert "run the same command again" in shown
    assert (folder / "draft" / "model.safetensors").is_file()
    assert not (folder / "report").exists()
    assert json.loads((folder / "provenance.json").read_text())["hashes"]["target weights"] == (
        "served as org/target, root /models/target"
    )

    def never(*_):
        raise AssertionError("it was made already")

    monkeypatch.setattr(train, "distil_draft", never)
    down = stand_in(**SPECULATES)
    down.stop()
    with pytest.raises(ServerError, match=r"(?s)cannot be reached.*is made, and kept.*vllm"):
        run(served(plain, speculative_url=down.url))
    assert run(served(plain, speculative_url=stand_in(**SPECULATES).url)) == 0
    report = read_report(folder / "report" / "report.json")
    assert report.target == recipe.target
    assert report.engine == "vllm"
    assert list(report.drafts) == ["tuned"]
    assert report.drafts["tuned"].speedup.n == recipe.speed_prompts
    assert report.drafts["tuned"].lossless.identical == recipe.speed_prompts
    assert report.prompts.overlap_with_training == 0
    card = (folder / "draft" / "README.md").read_text()
    assert "speed-up" in card
    assert "{" not in re.sub(r"```.*?```", "", card, flags=re.DOTALL)
    with pytest.raises(RecipeError, match="another recipe"):
        run(served(plain, max_steps=41))


def test_of_a_target_on_the_hub_no_weights_are_fetched(stand_in, served, monkeypatch):
    fetched, recipe = [], served(stand_in(), target="org/target", max_steps=2)

    def download(spec, allow_patterns, **_):
        fetched.append((spec, allow_patterns))
        return str(recipe.folder.parent / "bare")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert run(recipe) == 0
    assert {spec for spec, _ in fetched} == {"org/target"}
    assert not any("safetensors" in pattern for _, patterns in fetched for pattern in patterns)


def test_a_server_that_fails_while_it_is_measured_leaves_what_was_measured(
    stand_in, served, capsys
):
    plain, drafting = stand_in(), stand_in(**SPECULATES)
    drafting.faults = [None, None, 500]  # after the warm-up and a prompt
    recipe = served(plain, speculative_url=drafting.url)
    with pytest.raises(ServerError, match="measured in part only, after 1 of 3 prompts"):
        run(recipe)
    assert read_report(recipe.folder / "report" / "report.json").prompts.n == 1


def test_a_dry_run_checks_the_server_and_makes_nothing(stand_in, served, capsys):
    recipe = served(stand_in(), dry_run=True)
    assert run(recipe) == 0
    assert "answers: 132 tokens at most" in capsys.readouterr().out
    assert not recipe.folder.exists()
    with pytest.raises(ServerError, match="maximum context length is 15 tokens"):
        run(served(stand_in(max_model_len=15), dry_run=True))
