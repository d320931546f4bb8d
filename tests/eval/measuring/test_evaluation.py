"""What an interrupted evaluation is known again by: all that its rows depend on."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from eval.decoding.build import build_decoder
from eval.decoding.loop import Decoding
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring import evaluation
from eval.measuring.evaluation import Plan, _begin, _Stages
from eval.measuring.runs import PromptRun
from eval.prompts import Prompt, PromptSet

VOCAB = 40
HOW = Decoding(Sampling(0.7), frozenset({3}), 20, seed=1)
PROMPTS = PromptSet("made up", [Prompt("a", prompt="x"), Prompt("b", prompt="y")], [[3, 1], [9]])


@pytest.fixture(scope="module")
def key(tiny_llama, drafter):
    """What the journal is begun with, of this evaluation with some parts changed."""

    class Begun:
        def begin(self, *what):
            self.what = what

    model = tiny_llama(vocab_size=VOCAB)
    target = Target("tiny", model, None, build_decoder(model, 60), HOW.stops)
    other = drafter(build_decoder(tiny_llama(1, vocab_size=VOCAB), 60), VOCAB)

    def make(target=target, draft=other, prompts=PROMPTS, how=HOW, plan=Plan(2, 3, 2)):  # noqa: B008
        journal = Begun()
        with torch.inference_mode():
            _begin(journal, target, {"draft": draft}, (prompts, PROMPTS), how, plan)
        return journal.what

    make.target = target
    return make


@pytest.mark.parametrize(
    "changes",
    [
        {"how": dataclasses.replace(HOW, sampling=Sampling(0.8))},
        {"how": dataclasses.replace(HOW, sampling=Sampling(0.7, top_k=5))},
        {"how": dataclasses.replace(HOW, stops=frozenset({4}))},
        {"how": dataclasses.replace(HOW, max_new_tokens=21)},
        {"how": dataclasses.replace(HOW, seed=2)},
        {"how": dataclasses.replace(HOW, rule="token")},
        {"prompts": dataclasses.replace(PROMPTS, ids=[[3, 1], [8]])},
        {"prompts": dataclasses.replace(PROMPTS, prompts=PROMPTS.prompts[::-1])},
        {"plan": Plan(3, 3, 2)},
    ],
)
def test_another_evaluation_has_another_key(key, changes):
    assert key() == key()
    assert key(**changes) != key()


def test_other_models_have_another_key(key, drafter):
    assert key(draft=drafter(key.target.decoder, VOCAB)) != key()


def test_models_are_known_by_the_first_tokens_of_a_long_prompt(key, monkeypatch):
    monkeypatch.setattr(evaluation, "PROBED_TOKENS", 4)  # logits of 8,192 tokens are gigabytes
    prompts, changed = (
        dataclasses.replace(PROMPTS, ids=[[3, 1, 4, 1, last], [9]]) for last in (5, 6)
    )
    by_models, *rest = key(prompts=prompts)
    assert key(prompts=changed)[0] == by_models
    assert key(prompts=changed)[1:] != tuple(rest)


def timed(speedups, seconds=1.0):
    """Runs [batches][contenders][1]: without a draft, and with one of these speed-ups."""

    def run(number, took):
        return [PromptRun(str(number), None, 3, [1, 2], took / 2, [took / 2], [1], [0], [0], False)]

    return [[run(i, seconds), run(i, seconds / speedup)] for i, speedup in enumerate(speedups)]


@pytest.mark.parametrize(
    ("speedups", "seconds", "enough"),
    [
        ([2.0, 2.02] * 6, 1e9, True),  # the interval is narrow
        ([1.0, 4.0] * 6, 1e9, False),
        ([1.0, 4.0] * 6, 20.0, True),  # four more would take longer
        ([2.0, 2.02] * 4, 0.0, False),  # too few
        ([2.0, 2.02] * 7, 0.0, False),  # looked at after every fourth prompt alone
        ([2.0, 2.02] * 6, None, False),  # all are timed
    ],
)
def test_prompts_are_timed_until_the_speedups_are_known_or_time_is_up(speedups, seconds, enough):
    how = dataclasses.replace(HOW, sampling=Sampling())
    stages = SimpleNamespace(plan=Plan(2, 3, 40, seconds=seconds), decoding=how)
    assert _Stages.enough(stages, timed(speedups)) is enough


def test_where_texts_are_sampled_they_are_decoded_twice():
    plan = Plan(2, 3, 40, seconds=30.0)
    greedy = dataclasses.replace(HOW, sampling=Sampling())
    once, twice = (SimpleNamespace(plan=plan, decoding=how) for how in (greedy, HOW))
    assert not _Stages.enough(once, timed([1.0, 4.0] * 6))
    assert _Stages.enough(twice, timed([1.0, 4.0] * 6))
