"""Texts in turns, step costs and draft lengths, on tiny models whose answers are known."""

from types import SimpleNamespace

import pytest
import torch
from transformers import GenerationConfig

from eval.decoding.drafters.lookup import lookup_first, prompt_lookup
from eval.decoding.loop import Decoding, decode
from eval.decoding.verification import Sampling
from eval.measuring import timing
from eval.measuring.cost import StepCosts
from eval.measuring.timing import (
    Contender,
    decode_in_turns,
    fastest_length,
    over_stock_generate,
    step_costs,
)
from eval.prompts import Prompt, PromptSet
from tests.eval.measuring.made_up import GREEDY, NEVER, PROMPTS, SET, VOCAB


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

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock / 1000))
    monkeypatch.setattr(timing, "timed_step", lambda target, cache, width, *_: step(width))
    monkeypatch.setattr(type(own), "step", lambda *_: step(0.5))
    both = step_costs(target.decoder, [own, own], 30, 3, GREEDY, 12)
    for costs in both:
        assert (costs.draft_step_ms, costs.target_step_ms) == pytest.approx((0.5, 1.0))
        assert costs.target_verify_ms == pytest.approx({1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0})
    # the target's steps are timed once for both drafts
    assert timed == [1, 0.5, 2, 0.5, 3, 4] * 15


def test_a_timed_step_reads_different_tokens():
    """In a mixture of experts equal tokens share their experts, and a wide call would look free."""
    read = []

    class Recorder:
        device, embedding = torch.device("cpu"), torch.zeros(VOCAB, 2)

        def forward(self, tokens, start, cache):
            read.append(tokens[0].tolist())
            return torch.zeros(1, tokens.shape[1], VOCAB)

    timing.timed_step(Recorder(), None, 7, 30, Sampling())()
    assert len(set(*read)) == 7


@pytest.mark.parametrize(
    ("step", "block", "token", "once"),
    [(2.0, 4.0, 1.0, 1.0), (1.0, 6.0, 2.0, 0.0), (3.0, 2.0, 0, 3.0)],
)
def test_no_part_of_a_parallel_draft_costs_less_than_nothing(
    target, own, monkeypatch, step, block, token, once
):
    """Drafts of 1 and 3 tokens are timed; noise may make either the dearer one."""
    clock = 0.0

    def taking(seconds):
        def run():
            nonlocal clock
            clock += seconds

        return run

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock / 1000))
    monkeypatch.setattr(timing, "timed_step", lambda *_: taking(1.0))
    monkeypatch.setattr(type(own), "step", lambda *_: taking(step))
    monkeypatch.setattr(type(own), "draft_at_once", lambda *_: taking(block))
    (costs,) = step_costs(target.decoder, [own], 30, 3, GREEDY, 3)
    assert (costs.draft_step_ms, costs.draft_block_ms) == pytest.approx((token, once))


def costs_of(draft, wider, block=0.0):
    """wider: what each token more to verify adds to a step of one second."""
    verify = {width: 1 + wider * (width - 1) for width in range(1, 8)}
    return StepCosts(draft, 1.0, verify, 30, block)


@pytest.mark.parametrize(("wider", "length"), [(0.0, 6), (9.0, 1)])
def test_the_draft_length_is_the_fastest_by_acceptance_and_costs(target, own, wider, length):
    """All is accepted: long drafts pay where a wide step costs no more, else the shortest do."""
    assert fastest_length(target, own, SET, GREEDY, costs_of(0.1, wider), 6) == (length, 3)


@pytest.mark.parametrize(("draft_step", "wider", "length"), [(0.15, 0.02, 3), (0.8, 0.2, 1)])
def test_every_draft_length_is_priced_as_it_decodes(target, other, draft_step, wider, length):
    """The length that is chosen decodes fastest at these costs."""
    prompts = [Prompt(f"p{i}", prompt="unused") for i in range(16)]
    many = PromptSet("made up", prompts, [[i, i + 1] for i in range(16)])
    how, costs = Decoding(Sampling(1.0), NEVER, 40, rule="token"), costs_of(draft_step, wider)

    def tokens_per_second(length):
        tokens = seconds = 0.0
        for prompt, ids in zip(many.prompts, many.ids, strict=True):
            run = decode(target.decoder, other, prompt, ids, how, length)
            for drafted, emitted in zip(run.drafted, run.block_tokens, strict=True):
                tokens += emitted
                seconds += float(costs.draft(drafted) + costs.verify(drafted + 1))
        return tokens / seconds

    rates = [tokens_per_second(length) for length in range(1, 4)]
    assert fastest_length(target, other, many, how, costs, 3) == (length, 16)
    assert rates[length - 1] == max(rates)


def test_what_n_gram_speculation_found_is_priced_as_free(target, other):
    repeating = PromptSet("made up", PROMPTS[:1], [[3, 1, 3, 1, 3, 1, 3, 1, 3, 1, 3, 1]])
    steps = []

    class Watched(StepCosts):
        def draft(self, tokens):
            steps.append(tokens)
            return super().draft(tokens)

    costs = Watched(**vars(costs_of(0.5, 0.01)))
    both = lookup_first(other, NEVER)
    fastest_length(target, both, repeating, GREEDY, costs, 1)
    run = decode(target.decoder, both, PROMPTS[0], repeating.ids[0], GREEDY, 1)
    assert sum(run.free) > 0
    taken = [n - free for n, free in zip(run.drafted, run.free, strict=True)]
    assert steps == taken[: run.whole_blocks]


def test_the_target_is_priced_by_the_tokens_that_it_verifies(target):
    """N-grams draft fewer tokens than they may, or none."""
    widths = []

    class Watched(StepCosts):
        def verify(self, tokens):
            widths.append(tokens)
            return super().verify(tokens)

    draft = prompt_lookup(target)
    fastest_length(target, draft, SET, GREEDY, Watched(**vars(costs_of(0.0, 0.01))), 2)
    runs = [
        decode(target.decoder, draft, prompt, ids, GREEDY, 2)
        for prompt, ids in zip(SET.prompts, SET.ids, strict=True)
    ]
    drafted = [n for run in runs for n in run.drafted[: run.whole_blocks]]
    assert {0, 2} <= {*drafted}
    assert widths == [min(n, length) + 1 for length in (1, 2) for n in drafted]


def test_contenders_warm_up_and_take_turns_at_being_first(target, own, journal, monkeypatch):
    decoded, undisturbed = [], timing.decode_undisturbed

    def recorded(decoder, contender, prompt, ids):
        decoded.append((contender.draft_length, contender.decoding.max_new_tokens))
        return undisturbed(decoder, contender, prompt, ids)

    monkeypatch.setattr(timing, "decode_undisturbed", recorded)
    timer = SimpleNamespace(round=lambda: decoded.append("steps"))
    contenders = {
        str(length): Contender(own if length else None, length, GREEDY) for length in range(3)
    }
    runs, rounds = decode_in_turns(target, contenders, SET, journal, ("own", timer))
    assert decoded[:3] == [(0, 8), (1, 8), (2, 8)]
    turns = ("steps", 0, 1, 2, "steps", 2, 1, 0, "steps", 1, 2, 0)
    assert decoded[3:] == [turn if turn == "steps" else (turn, 20) for turn in turns]
    assert len(rounds) == 3
    assert [[max(run.drafted) for run in each] for each in runs] == [[0] * 3, [1] * 3, [2] * 3]


def test_stock_generate_is_timed_on_the_same_prompts(target, monkeypatch):
    """As it comes: a checkpoint's own penalties, or its contrastive search, would slow it down."""
    odd = GenerationConfig(penalty_alpha=0.6, top_k=4, repetition_penalty=1.5)
    monkeypatch.setattr(target.model, "generation_config", odd)
    rows = over_stock_generate(target, SET, Decoding(Sampling(), frozenset({0}), 8))
    assert len(rows) == 3
    assert all(min(row) > 0 for row in rows)
    assert [row[0] for row in rows] == [row[2] for row in rows]  # as many tokens
