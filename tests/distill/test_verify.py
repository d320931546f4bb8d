"""A published draft against the one that was trained, without an engine."""

import json
from types import SimpleNamespace

import pytest
import torch

from align.sources import load_model, load_tokenizer
from distill.verify import HERE, MISMATCH, _compare, accepted_by_position
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.target import load_target
from eval.prompts import Prompt, PromptSet
from tests.siblings import LARGE, save_sibling

GAMMA = 3
TEXTS = ["ab", "def a", "return b"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a draft that agrees with its target at times, and another draft beside it."""
    folder = tmp_path_factory.mktemp("run")
    save_sibling(folder / "target", LARGE, 1)
    for name, noise in (("draft", 0.15), ("published", 0.6)):
        model = load_model(str(folder / "target"), torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                weight += noise * weight.std() * torch.randn(weight.shape)
        model.save_pretrained(folder / name)
        load_tokenizer(str(folder / "target")).save_pretrained(folder / name)
    (folder / "vocab_check.json").write_text('{"used": "direct"}')
    return folder


@pytest.fixture(scope="module")
def target(run):
    return load_target(str(run / "target"), torch.float32, "cpu", 256)


@pytest.fixture(scope="module")
def prompts(target):
    ids = [target.tokenizer(text)["input_ids"] for text in TEXTS]
    return PromptSet("made up", [Prompt(text, prompt=text) for text in TEXTS], ids)


def accepted(run, target, prompts, name, new=40):
    drafter = load_drafter(str(run / name), target)
    return accepted_by_position(target, drafter, prompts, GAMMA, new)


def test_it_counts_as_a_plain_loop_does_with_whole_drafts_at_the_end(run, target, prompts):
    models = [load_model(str(run / name), torch.float32) for name in ("target", "draft")]

    def continued(model, ids, count):
        for _ in range(count):
            ids = [*ids, int(model(torch.tensor([ids])).logits[0, -1].argmax())]
        return ids

    drafts, counts = 0, [0] * GAMMA
    for ids in prompts.ids:
        text = continued(models[0], ids, 40 + GAMMA)
        assert not target.stops & set(text[len(ids) :])
        done = len(ids) + 1
        while done < len(ids) + 40:
            draft = continued(models[1], text[:done], GAMMA)
            same = next((i for i in range(GAMMA) if draft[done + i] != text[done + i]), GAMMA)
            counts = [count + (same > i) for i, count in enumerate(counts)]
            drafts, done = drafts + 1, done + same + 1
    shares = [count / drafts for count in counts]
    assert accepted(run, target, prompts, "draft") == pytest.approx(shares)
    assert 0.1 < shares[-1] < shares[0] < 0.9


def served(run, target, prompts, shares, dtype="float32", tokens=0, drafts=10_000):
    report = SimpleNamespace(
        dtype=dtype,
        tuned=("tuned", SimpleNamespace(payoff=None, gamma=GAMMA)),
    )
    rows = [
        SimpleNamespace(id=prompt.id, prompt_tokens=len(ids) + tokens)
        for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True)
    ]
    counters = SimpleNamespace(acceptance_per_position=shares, num_drafts=drafts)
    draft = SimpleNamespace(counters=counters, per_prompt=rows)
    recipe = {"target": str(run / "target"), "use_cpu": True}
    return _compare(run, report, recipe, run / "published", prompts, draft)


def test_a_draft_that_is_not_served_as_trained_has_its_likely_cause_named(run, target, prompts):
    own, other = (accepted(run, target, prompts, name, 64) for name in ("draft", "published"))
    assert served(run, target, prompts, own) == {HERE: own, MISMATCH: None}
    nearly = [share - 0.019 for share in own]
    assert served(run, target, prompts, nearly)[MISMATCH] is None
    further = [share - 0.026 for share in own]
    assert served(run, target, prompts, further)[MISMATCH]
    assert served(run, target, prompts, further, drafts=977)[MISMATCH] is None  # by chance
    found = served(run, target, prompts, other, tokens=5)[MISMATCH]
    assert found.startswith("the template: vLLM read 3 of 3 prompts otherwise ('ab' in ")
    assert served(run, target, prompts, other)[MISMATCH].startswith("q: of what was exported")
    (run / "vocab_check.json").write_text(json.dumps({"used": "intersection"}))
    assert served(run, target, prompts, other)[MISMATCH].startswith("the vocabulary")
    (run / "vocab_check.json").write_text(json.dumps({"used": "direct"}))


def test_what_is_left_is_the_dtype_or_the_engine(run, target, prompts, monkeypatch):
    own = accepted(run, target, prompts, "draft", 64)
    lower = [share / 2 for share in own]
    model = load_model(str(run / "draft"), torch.float32)
    model.save_pretrained(run / "published")
    assert served(run, target, prompts, lower)[MISMATCH].startswith("vLLM itself")
    config = SimpleNamespace(dtype=torch.bfloat16)
    monkeypatch.setattr("distill.verify.load_config", lambda _: config)
    found = served(run, target, prompts, lower)[MISMATCH]
    assert found == "the dtype: vLLM computes in torch.bfloat16, the run did in torch.float32"
