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
from eval.measuring.evaluation import Plan, _begin, evaluate
from eval.prompts import Prompt, PromptSet
from eval.reporting.build import build_report

VOCAB = 40
HOW = Decoding(Sampling(0.7), frozenset({3}), 20, seed=1)
PROMPTS = PromptSet("made up", [Prompt("a", prompt="x"), Prompt("b", prompt="y")], [[3, 1], [9]])
CATEGORISED = Prompt("a", prompt="x", category="odd")


@pytest.fixture(scope="module")
def key(tiny_llama, drafter):
    """What the journal is begun with, of this evaluation with some parts changed."""

    class Begun:
        def begin(self, *what):
            self.what = what

    model = tiny_llama(vocab_size=VOCAB)
    target = Target("tiny", model, None, build_decoder(model, 60), HOW.stops)
    other = drafter(build_decoder(tiny_llama(1, vocab_size=VOCAB), 60), VOCAB)

    def make(
        target=target,
        draft=other,
        prompts=PROMPTS,
        tuning=PROMPTS,
        how=HOW,
        plan=Plan(2, 3, 2),  # noqa: B008
    ):
        journal = Begun()
        with torch.inference_mode():
            _begin(journal, target, {"draft": draft}, (prompts, tuning), how, plan)
        return journal.what

    make.target = target
    return make


@pytest.mark.parametrize(
    "changes",
    [
        {"how": dataclasses.replace(HOW, sampling=Sampling(0.8))},
        {"how": dataclasses.replace(HOW, stops=frozenset({4}))},
        {"how": dataclasses.replace(HOW, max_new_tokens=21)},
        {"how": dataclasses.replace(HOW, seed=2)},
        {"how": dataclasses.replace(HOW, rule="token")},
        {"how": dataclasses.replace(HOW, draft_sample_method="greedy")},
        {"prompts": dataclasses.replace(PROMPTS, ids=[[3, 1], [8]])},
        {"prompts": dataclasses.replace(PROMPTS, prompts=PROMPTS.prompts[::-1])},
        {"prompts": dataclasses.replace(PROMPTS, prompts=[CATEGORISED, PROMPTS.prompts[1]])},
        {"tuning": dataclasses.replace(PROMPTS, ids=[[3, 1], [8]])},
        {"plan": Plan(3, 3, 2)},
    ],
)
def test_another_evaluation_has_another_key(key, changes):
    assert key() == key()
    assert key(**changes) != key()


def test_other_models_have_another_key(key, drafter, tiny_llama):
    same, other = (build_decoder(tiny_llama(seed, vocab_size=VOCAB), 60) for seed in (1, 2))
    assert key(draft=drafter(same, VOCAB)) == key()
    assert key(draft=drafter(other, VOCAB)) != key()
    assert key(draft=drafter(same, VOCAB, path="lookup-first:draft")) != key()
    assert key(target=dataclasses.replace(key.target, decoder=other)) != key()


def test_models_are_known_by_the_first_tokens_of_a_long_prompt(key, monkeypatch):
    monkeypatch.setattr(evaluation, "PROBED_TOKENS", 4)  # logits of 8,192 tokens are gigabytes
    prompts, changed = (
        dataclasses.replace(PROMPTS, ids=[[3, 1, 4, 1, last], [9]]) for last in (5, 6)
    )
    by_models, *rest = key(prompts=prompts)
    assert key(prompts=changed)[0] == by_models
    assert key(prompts=changed)[1:] != tuple(rest)


@pytest.fixture
def evaluated(key, letters, journal, monkeypatch):
    """Evaluates so many prompts on a clock that timed prompts and each batch of responses move, by
    a second; the report.
    """
    clock = [0.0]
    monkeypatch.setattr(evaluation, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    decode_in_turns = evaluation.decode_in_turns

    def turns(target, contenders, prompts, journal, over):
        def ticking(measured):
            clock[0] = float(measured)
            return over(measured)

        return decode_in_turns(target, contenders, prompts, journal, ticking)

    monkeypatch.setattr(evaluation, "decode_in_turns", turns)
    target_texts = evaluation.target_texts

    def texts(*given):
        clock[0] += 1
        return target_texts(*given)

    monkeypatch.setattr(evaluation, "target_texts", texts)
    target = dataclasses.replace(key.target, tokenizer=letters(VOCAB))

    def make(drafter, count, seconds, tuning=None, how=HOW):
        prompts = [Prompt(str(i), prompt="x") for i in range(count)]
        shown = PromptSet("made up", prompts, [[i, 3, i] for i in range(count)])
        plan = Plan(None if tuning else 2, 3, count, seconds)
        relation = {"relation": "identical", "strategy": "direct", "coverage": 1.0}
        drafter = dataclasses.replace(drafter, vocabulary=relation)
        given = target, {"draft": drafter}, shown, tuning or shown, how, plan, journal, {}
        return build_report(*evaluate(*given))

    return make


@pytest.mark.parametrize(
    ("count", "seconds", "timed"),
    [
        (20, None, 20),  # all are timed
        (20, 15.0, 15),  # until time is over
        (20, 0.0, 12),  # but never fewer than the fewest
        (5, 0.0, 5),
    ],
)
def test_prompts_are_timed_until_time_is_over(key, drafter, evaluated, count, seconds, timed):
    report = evaluated(drafter(key.target.decoder, VOCAB), count, seconds)
    draft = report.drafts["draft"]
    assert draft.speedup.n == draft.lossless.prompts == timed
    assert draft.alpha.n == count  # on all evaluation prompts
    assert draft.lossless.identical == timed  # compared greedily, though tokens were sampled


def test_where_time_is_short_fewer_prompts_are_evaluated(key, drafter, evaluated, monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH", 4)
    report = evaluated(drafter(key.target.decoder, VOCAB), 20, 8.0)  # a quarter: two batches
    draft = report.drafts["draft"]
    assert draft.alpha.n == draft.speedup.n == report.prompts.n == 8


def test_an_interrupted_evaluation_goes_on_with_its_prompts(key, drafter, evaluated, monkeypatch):
    monkeypatch.setattr(evaluation, "BATCH", 4)
    draft = drafter(key.target.decoder, VOCAB)
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "over_stock_generate", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            evaluated(draft, 20, 8.0)
    report = evaluated(draft, 20, 80.0)  # these seconds would be enough for all 20 prompts
    assert report.drafts["draft"].alpha.n == report.prompts.n == 8


def test_outputs_of_one_token_have_a_report(key, drafter, evaluated):
    draft = drafter(key.target.decoder, VOCAB)
    how = dataclasses.replace(HOW, max_new_tokens=1)
    report = evaluated(draft, 4, None, how=how).drafts["draft"]
    assert report.itl_ms is None
    assert "itl_ms" in {missing.field for missing in report.missing}
    assert report.lossless.identical == 4


@pytest.mark.parametrize("shared", [[1, 3, 1], [99, 3, 99]])
def test_draft_lengths_are_not_chosen_on_evaluated_prompts(key, drafter, evaluated, shared):
    tuning = PromptSet("other", [Prompt("t", prompt="x")], [[i % VOCAB for i in shared]])
    draft = drafter(key.target.decoder, VOCAB)
    if shared[0] == 1:
        with pytest.raises(ValueError, match="'t' would choose the draft length and be evaluated"):
            evaluated(draft, 4, None, tuning)
    else:
        report = evaluated(draft, 4, None, tuning)
        assert report.decoding.gamma_policy == "fixed, fastest on 1 other prompts"


def test_the_time_that_is_left_makes_no_other_evaluation(key):
    assert key(plan=Plan(2, 3, 2, seconds=9.0)) == key(plan=Plan(2, 3, 2, seconds=4.0))
