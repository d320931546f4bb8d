"""Logged outputs: read, tested, taught."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch

from align.checkpoint import Checkpoint
from align.files import read_json
from distill.held_out import held_out_curve
from distill.prompt_sets import collect_prompts
from distill.teacher.answers import top_logprobs, with_own
from distill.teacher.logged import Log, read_outputs
from distill.teacher.store import Answers, Store, name_of
from distill.train import run
from eval.decoding.build import build_decoder
from eval.decoding.generation import generate_batched
from eval.decoding.loop import Decoding
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.prompts import Prompt, PromptSet
from tests.distill.conftest import WORDS

TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }}"
    "{% if m.role == 'assistant' %}</s>{% endif %} {% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)
ASKED = [" ".join(WORDS.split()[i : i + 5]) for i in range(14)]
LONGEST = 40


@pytest.fixture(scope="module")
def chatting(folder, tmp_path_factory):
    """The folder of the tiny target, with a chat template."""
    place = tmp_path_factory.mktemp("chatting") / "target"
    shutil.copytree(folder / "target", place)
    tokenizer = Checkpoint.open(place).tokenizer
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def target(chatting):
    return load_target(Checkpoint.open(chatting), torch.float32, "cpu", 128)


@pytest.fixture(scope="module")
def vocabulary(chatting):
    return Checkpoint.open(chatting).vocabulary


def messages_of(text):
    return [{"role": "user", "content": text}]


def given_by(target, prompts, temperature, seed=0):
    """The target's outputs to these prompts (token ids), in their order."""
    decoding = Decoding(Sampling(temperature), target.stops, LONGEST)
    seeds = range(seed, seed + len(prompts))
    made = generate_batched(target.decoder, prompts, decoding, 4, seeds)
    return [output.tokens for output in sorted(made, key=lambda output: output.index)]


def rendered(target, texts=ASKED):
    return [
        target.checkpoint.tokenizer.apply_chat_template(
            messages_of(text), add_generation_prompt=True, return_dict=False
        )
        for text in texts
    ]


@pytest.fixture(scope="module")
def log(target, tmp_path_factory):
    """A file of greedy outputs with their token ids, and these outputs; two are edited."""
    prompts = rendered(target)
    outputs = given_by(target, prompts, 0.0)
    for ids in (outputs[4], outputs[5]):
        ids[1] = (ids[1] + 40) % 299 + 1
    rows = [
        {
            "messages": [
                *messages_of(text),
                {"role": "assistant", "content": target.checkpoint.tokenizer.decode(ids)},
            ],
            "token_ids": ids,
        }
        for text, ids in zip(ASKED, outputs, strict=True)
    ]
    path = tmp_path_factory.mktemp("log") / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path, dict(zip(map(tuple, prompts), outputs, strict=True))


def test_a_read_output_has_the_distributions_of_the_target(target):
    texts = [([3], [4, 5, 6]), ([7, 8, 9], [10]), ([11, 12], [13, 14, 15, 16])]
    answers = read_outputs(target.decoder, texts, 6)
    for (prompt, output), answer in zip(texts, answers, strict=True):
        assert answer.prompt_ids.tolist() == prompt
        assert answer.response_ids.tolist() == output
        with torch.no_grad():
            logits = target.model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
        ids, logprobs = top_logprobs(logits, 6)
        own = logits.log_softmax(-1).gather(1, answer.response_ids[:, None])[:, 0]
        ids, logprobs = with_own(ids, logprobs, answer.response_ids, own)
        assert (ids == answer.response_ids[:, None]).any(1).all()
        assert torch.equal(answer.top_ids, ids)
        torch.testing.assert_close(answer.top_logprobs, logprobs, atol=1e-4, rtol=1e-4)


def test_a_run_teaches_logged_outputs_and_generates_none(
    job, chatting, log, tmp_path, monkeypatch, capsys
):
    path, outputs = log
    monkeypatch.setattr("distill.teacher.answers.generate_batched", None)
    keys = {"target": str(chatting), "train_prompts": str(path), "answers": "logged"}
    keys |= {"draft": None, "num_draft_layers": 1, "max_steps": 4, "answer_max_new_tokens": LONGEST}
    assert run(job(tmp_path / "run", **keys)) == 0
    used = read_json(tmp_path / "run" / "answers.json")
    texts = {name_of([*prompt, *ids]) for prompt, ids in outputs.items()}
    assert {name.partition("-")[0] for name in Store(Path(used["store"]))} <= texts
    assert used["count"] == 11  # of 14, two are near-duplicates and one is for tuning
    assert sum(used["left out"].values()) == 2
    shutil.rmtree(tmp_path / "run" / "draft")
    capsys.readouterr()
    assert run(job(tmp_path / "run", **keys)) == 0  # trained again, as a run that was interrupted
    assert "0 of 11 read" in capsys.readouterr().out
    assert read_json(tmp_path / "run" / "answers.json") == used


def test_outputs_are_left_out_of_every_set_of_prompts(
    job, chatting, log, tmp_path, followed, monkeypatch
):
    monkeypatch.setattr("distill.prepare.domain_mass", None)  # no head is trimmed
    rows = [json.loads(line) for line in log[0].read_text().splitlines()]
    for row in rows[::2]:
        row["token_ids"] = [(row["token_ids"][0] + 40) % 299 + 1, *row["token_ids"][1:]]
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    keys = {"target": str(chatting), "train_prompts": str(path), "answers": "logged"}
    keys |= {"draft": None, "num_draft_layers": 1, "max_steps": 4, "answer_max_new_tokens": LONGEST}
    recipe = job(tmp_path / "run", **keys)
    assert run(recipe, measured=False) == 0
    held_out = collect_prompts(recipe, Checkpoint.open(recipe.target)).held_out
    curve = held_out_curve(recipe.folder)
    assert (len(held_out.ids), {point.alpha.n for point in curve.points}) == (2, {1})
    used = read_json(recipe.folder / "answers.json")
    assert (used["count"], sum(used["left out"].values())) == (9, 5)


@pytest.fixture
def left_out(target, vocabulary, tmp_path):
    """Reads outputs as a log has them, and counts faults."""

    def read(prompts, outputs, temperature):
        logged = [
            Prompt(
                str(i), messages=[], logged_output={"token_ids": ids, "temperature": temperature}
            )
            for i, ids in enumerate(outputs)
        ]
        log = Log([PromptSet("", logged, prompts)], 0.0, vocabulary)
        store, names = Store(tmp_path / "store", {}), log.names(prompts)
        texts = list(zip(prompts, outputs, strict=True))
        answers = read_outputs(target.decoder, texts, 100)
        packed = [answer.packed(target.vocab_size) for answer in answers]
        store.append(dict(zip(names, packed, strict=True)), "local")
        return log.own(Answers(store, names)).left_out

    return read


@pytest.fixture(scope="module")
def other(target, chatting):
    """Another model with the same tokens."""
    model = Checkpoint.open(chatting).load(torch.float32)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    return dataclasses.replace(target, model=model, decoder=build_decoder(model, 128))


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_outputs_are_used_if_the_target_can_have_given_them(
    left_out, target, other, temperature, capsys
):
    prompts = rendered(target)
    assert not left_out(prompts, given_by(target, prompts, temperature), temperature)
    assert "Warning" not in capsys.readouterr().out
    assert sum(left_out(prompts, given_by(other, prompts, temperature), temperature).values()) == 14
    assert "Warning" in capsys.readouterr().out


def test_edited_and_cut_outputs_are_left_out(left_out, target, capsys):
    prompts = rendered(target)
    own = given_by(target, prompts, 0.0)
    long = [i for i, ids in enumerate(own) if len(ids) == LONGEST]
    edited = [[*own[i][:20], (own[i][20] + 40) % 299 + 1, *own[i][21:]] for i in long]
    cut = [[*own[i][:12], *target.stops] for i in long]
    prompts = [prompts[i] for i in long]
    whole = [own[i] for i in long]
    reason = "edited, or tokenised otherwise than emitted"
    assert left_out(prompts * 2, edited + whole, 0.0) == {reason: len(long)}
    assert left_out(prompts * 2, cut + whole, 0.0) == {"cut off": len(long)}
    assert "Warning" not in capsys.readouterr().out  # the others are of this target
