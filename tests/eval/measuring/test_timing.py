"""Texts in turns, step costs and draft lengths, on tiny models whose answers are known."""

import dataclasses
from types import SimpleNamespace

import pytest

from eval.decoding.build import build_decoder
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring import metrics, timing
from eval.measuring.replay import best_length, places
from eval.measuring.runs import StepCosts
from eval.measuring.timing import (
    ALONE,
    decode_in_turns,
    in_turns,
    over_stock_generate,
    step_costs,
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


def test_costs_are_those_of_every_width_after_the_warm_up(target, own, monkeypatch):
    clock, timed = 0.0, []

    def step(width):
        calls = 0

        def run():
            nonlocal clock, calls
            calls += 1
            timed.append(width)
            clock += width * (9 if calls <= 3 else 1)  # slower the first three times

        return run

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock))
    monkeypatch.setattr(timing, "timed_step", lambda target, width, *_: step(width))
    monkeypatch.setattr(type(own), "step", lambda *_: step(0.5))
    both = step_costs(target.decoder, [own, own], 30, 3, Sampling(), repeats=2)
    quiet = StepCosts(0.5, 1.0, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0}, 30)
    # the target's steps are timed once for both drafts
    assert [dataclasses.replace(costs, rounds=[]) for costs in both] == [quiet] * 2
    assert both[0].rounds == [quiet] * 2
    assert timed == [1, 0.5, 2, 0.5, 3, 4] * 5


@pytest.mark.parametrize(("verify", "gamma"), [(0.0, 3), (9.0, 1)])
def test_the_draft_length_is_the_fastest_on_what_was_measured(target, own, verify, gamma):
    """All is accepted: long drafts pay where a wide call costs no more, else the shortest do."""
    costs = StepCosts(0.1, 1.0, {width: 1 + verify * (width - 1) for width in range(1, 5)}, 30)
    replayed = places(target, own, SET, GREEDY, 3)
    assert best_length(replayed, costs, 3) == DraftLength(gamma)


def test_contenders_take_turns_at_being_first(journal):
    calls = []

    def contender(which):
        return lambda row: calls.append(which) or f"{which} on {row}"

    rows = [("a",), ("b",), ("c",)]
    found = in_turns([contender(which) for which in range(3)], rows, journal, "stage", str)
    assert calls == [0, 1, 2, 1, 2, 0, 2, 0, 1]
    assert found == [[f"{which} on {row}" for (row,) in rows] for which in range(3)]


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
