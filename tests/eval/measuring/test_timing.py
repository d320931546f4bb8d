"""Texts in turns, step costs and draft lengths, on tiny models whose answers are known."""

import pytest

from eval.decoding.build import build_decoder
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring import metrics, timing
from eval.measuring.runs import StepCosts
from eval.measuring.timing import (
    ALONE,
    choose_gamma,
    decode_in_turns,
    over_stock_generate,
    step_costs,
    sweep_gamma,
)
from eval.prompts import Prompt, PromptSet

VOCAB = 40
NEVER = frozenset({VOCAB + 1})
PROMPTS = [Prompt(f"p{i}", prompt="unused") for i in range(3)]
IDS = [[3, 14, 15], [9, 2], [6, 5, 35, 8]]
SET = PromptSet("made up", PROMPTS, IDS)
GREEDY = Decoding(Sampling(), NEVER, 20)


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    return lambda seed: tiny_llama(
        seed, spread=4, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None
    )


@pytest.fixture(scope="module")
def target(tiny):
    model = tiny(0)
    return Target("tiny", model, None, build_decoder(model, 100), NEVER)


@pytest.fixture(scope="module")
def own(target, drafter):
    """The target as its own draft."""
    return drafter(target.decoder, VOCAB)


@pytest.fixture(scope="module")
def other(tiny, drafter):
    return drafter(build_decoder(tiny(1), 100), VOCAB)


def baselines(target):
    return [
        decode(target.decoder, None, *batch, GREEDY, DraftLength(0))[0] for batch in SET.batches(1)
    ]


def test_a_sweep_measures_every_length(target, own, journal):
    points = sweep_gamma(target, "own", own, SET, GREEDY, 3, journal)
    assert [point["gamma"] for point in points] == [1, 2, 3]
    # the target as its own draft: all is accepted, so gamma + 1 tokens a call
    assert [point["tau"].mean for point in points] == [2, 3, 4]
    assert all(point["speedup"].mean > 0 for point in points)


def test_costs_are_positive_and_hold_every_width(target, own):
    costs = step_costs(target.decoder, own, 30, 3, Sampling())
    assert sorted(costs.target_verify) == [1, 2, 3, 4]
    assert min(costs.target_verify.values()) > 0
    assert costs.draft_step > 0


@pytest.mark.parametrize(("draft_step", "gamma"), [(0.1, 3), (5.0, 1)])
def test_the_chosen_gamma_is_the_fastest(target, own, monkeypatch, draft_step, gamma):
    """The target as its own draft: longer ones pay where a step is cheap, none where it is dear."""
    costs = StepCosts(draft_step, 1.0, {1: 1.0, 2: 1.05, 3: 1.1, 4: 1.15}, 30)
    monkeypatch.setattr(timing, "step_costs", lambda *_: costs)
    assert choose_gamma(target, own, SET, GREEDY, 3) == DraftLength(gamma)


def test_who_begins_changes_from_row_to_row(journal):
    order = []
    decoders = [lambda row, name=name: order.append(name) or name + row for name in "abc"]
    results = timing.in_turns(decoders, [("1",), ("2",), ("3",)], journal, "stage", str)
    assert order == list("abcbcacab")
    assert results == [["a1", "a2", "a3"], ["b1", "b2", "b3"], ["c1", "c2", "c3"]]


@pytest.mark.parametrize("size", [1, 2])
def test_every_batch_is_decoded_by_everybody(target, own, other, journal, size):
    batches = [(PROMPTS[:2], IDS[:2]), (PROMPTS[2:], IDS[2:])] if size == 2 else SET.batches(1)
    contenders = [ALONE, (own, DraftLength(2)), (other, DraftLength(3))]
    made = decode_in_turns(target, contenders, batches, GREEDY, journal, "stage")
    expected = [run.tokens for run in baselines(target)]
    assert len(made) == 3
    for decoded in made:
        assert [len(batch) for batch in decoded] == [len(prompts) for prompts, _ in batches]
        assert [run.prompt_id for batch in decoded for run in batch] == ["p0", "p1", "p2"]
        assert [run.tokens for batch in decoded for run in batch] == expected
        assert all(run.seconds > 0 for batch in decoded for run in batch)
    _, first, second = ([run for batch in decoded for run in batch] for decoded in made)
    assert metrics.tau(first).mean == 3 > metrics.tau(second).mean
    assert max(second[0].drafted) == 3


def test_stock_generate_is_timed_on_the_same_prompts(target):
    rows = over_stock_generate(target, SET, Decoding(Sampling(), frozenset({0}), 8))
    assert len(rows) == 3
    assert all(min(row) > 0 for row in rows)
    assert [row[0] for row in rows] == [row[2] for row in rows]  # as many tokens
