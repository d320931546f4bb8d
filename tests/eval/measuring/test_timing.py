"""What is measured on a pair, on tiny models whose answers are known."""

import dataclasses
import math

import pytest
import torch

from eval.decoding.drafting import Draft
from eval.decoding.drafts import Candidate, Target
from eval.decoding.forward import build_decoder
from eval.decoding.loop import Decoding, DraftLength, decode_baseline
from eval.decoding.verification import Sampling
from eval.measuring import metrics
from eval.measuring.timing import (
    bits_per_token,
    choose_gamma,
    entropy_bits,
    interleave,
    interleave_batches,
    measure_agreement,
    over_stock_generate,
    rule_acceptance,
    step_costs,
    sweep_gamma,
    target_texts,
)
from eval.prompts import Prompt

VOCAB = 40
NEVER = frozenset({VOCAB + 1})
PROMPTS = [Prompt(f"p{i}", prompt="unused") for i in range(3)]
IDS = [[3, 14, 15], [9, 2], [6, 5, 35, 8]]
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


def baselines(target):
    return [
        decode_baseline(target.decoder, prompt, ids, GREEDY)
        for prompt, ids in zip(PROMPTS, IDS, strict=True)
    ]


def changed(run, at):
    tokens = list(run.tokens)
    tokens[at] = (tokens[at] + 1) % VOCAB
    return dataclasses.replace(run, tokens=tokens)


def test_texts_are_the_targets_own_whatever_the_batch(target):
    assert target_texts(target, IDS, GREEDY) == [run.tokens for run in baselines(target)]


def test_alpha_is_one_for_the_target_itself_and_counts_agreeing_positions(target, tiny, journal):
    texts = target_texts(target, IDS, GREEDY)
    other = build_decoder(tiny(1), 100)
    drafts = [Draft(target.decoder), Draft(other)]
    found, _ = measure_agreement(target, drafts, PROMPTS, IDS, texts, Sampling(), journal)
    assert [row.alpha_sum for row in found[0]] == [20.0] * 3
    for row, ids, text in zip(found[1], IDS, texts, strict=True):
        agreed = 0
        for at, token in enumerate(text):
            context = torch.tensor([ids + text[:at]])
            logits = other.forward(context, 0, other.new_cache(1, 100))[0, -1]
            agreed += int(logits.argmax()) == token
        assert row.alpha_sum == agreed
        assert row.positions == 20


def test_logits_that_are_no_numbers_in_one_answer_are_refused(target, journal):
    texts = target_texts(target, IDS, GREEDY)
    rare = next(token for token in texts[1][:-1] if token not in [*IDS[0], *texts[0]])

    class Poisoned:
        device, new_cache = target.decoder.device, target.decoder.new_cache

        @staticmethod
        def forward(tokens, *args, **kwargs):
            logits = target.decoder.forward(tokens, *args, **kwargs)
            return logits.where(tokens[:, -logits.shape[1] :, None] != rare, float("nan"))

    poisoned = dataclasses.replace(target, decoder=Poisoned())
    with pytest.raises(ValueError, match="no numbers in its answer to prompt p1"):
        measure_agreement(
            poisoned, [Draft(target.decoder)], PROMPTS, IDS, texts, Sampling(), journal
        )
    assert len(journal.taken["alpha"]) == 1


def test_sampled_alpha_is_the_overlap_of_the_distributions(target, tiny, journal):
    texts = target_texts(target, IDS, GREEDY)
    other = build_decoder(tiny(1), 100)
    (found,), _ = measure_agreement(
        target, [Draft(other)], PROMPTS, IDS, texts, Sampling(temperature=0.7), journal
    )
    ids, text = IDS[0], texts[0]
    overlap = 0.0
    for at in range(len(text)):
        context = torch.tensor([ids + text[:at]])
        p, q = (
            (d.forward(context, 0, d.new_cache(1, 100))[0, -1].double() / 0.7).softmax(-1)
            for d in (target.decoder, other)
        )
        overlap += float(torch.minimum(p, q).sum())
    assert found[0].alpha_sum == pytest.approx(overlap, abs=1e-4)


def test_the_log_of_alpha_keeps_positions_guesses_and_entropy(target, tiny, journal):
    texts = target_texts(target, IDS, GREEDY)
    other = build_decoder(tiny(1), 100)
    (found,), entropy = measure_agreement(
        target, [Draft(other)], PROMPTS, IDS, texts, Sampling(), journal
    )
    for row, bits, ids, text in zip(found, entropy, IDS, texts, strict=True):
        assert len(row.values) == len(row.guesses) == len(bits) == row.positions
        assert [value == 1 for value in row.values] == [
            guess == token for guess, token in zip(row.guesses, text, strict=True)
        ]
        logits = target.decoder.forward(
            torch.tensor([ids]), 0, target.decoder.new_cache(1, 100), last_only=True
        )
        p = logits[0, -1].double().softmax(-1)
        assert bits[0] == pytest.approx(float(-(p * p.log2()).sum()), abs=1e-4)


def test_entropy_of_known_distributions():
    impossible = float("-inf")
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [5.0, 5.0, impossible, impossible]])
    assert entropy_bits(logits).tolist() == pytest.approx([2.0, 1.0])
    sure = torch.tensor([[9.0, impossible, impossible]])
    assert entropy_bits(sure).tolist() == [0.0]


def test_three_rules_by_their_formulas():
    p = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.9, 0.0]])
    q = torch.tensor([[0.2, 0.6, 0.2], [0.0, 1.0, 0.0]])
    found = rule_acceptance(p, q)
    assert found["exact"] == pytest.approx(0.7 + 0.9)
    assert found["greedy_match"] == pytest.approx(0.3 + 0.9)
    assert found["target_probability"] == pytest.approx(0.1 + 0.18 + 0.04 + 0.9)


def test_rules_of_the_target_as_its_own_draft(target, journal):
    texts = target_texts(target, IDS, GREEDY)
    (found,), _ = measure_agreement(
        target, [Draft(target.decoder)], PROMPTS, IDS, texts, Sampling(), journal
    )
    for row in found:
        assert sorted(row.rules) == [0.0, 0.6, 1.0]
        for temperature, sums in row.rules.items():
            assert sums["exact"] == pytest.approx(row.positions, abs=1e-4)
            if temperature == 0:
                assert sums["greedy_match"] == sums["target_probability"] == row.positions
            else:
                assert 0 < sums["target_probability"] <= sums["greedy_match"] < sums["exact"]


def test_random_tokens_are_as_surprising_as_they_must_be(target):
    # a model that knows nothing: the bits of a uniform choice, exactly
    class Flat:
        device = target.decoder.device
        new_cache = staticmethod(target.decoder.new_cache)

        @staticmethod
        def forward(tokens, start, cache, last_only=False):
            return torch.zeros((1, 1 if last_only else tokens.shape[1], VOCAB))

    flat = dataclasses.replace(target, decoder=Flat())
    assert bits_per_token(flat, IDS) == pytest.approx(math.log2(VOCAB))
    own = [ids + text for ids, text in zip(IDS, target_texts(target, IDS, GREEDY), strict=True)]
    assert bits_per_token(target, own) < math.log2(VOCAB)


def test_a_sweep_measures_every_length(target, journal):
    own = Candidate("own", "unused", "full", {}, Draft(target.decoder), 0, None)
    points = sweep_gamma(target, own, PROMPTS, IDS, GREEDY, 3, journal)
    assert [point["gamma"] for point in points] == [1, 2, 3]
    # the target as its own draft: all is accepted, so gamma + 1 tokens a call
    assert [point["tau"]["mean"] for point in points] == [2, 3, 4]
    assert all(point["speedup"]["mean"] > 0 for point in points)


def test_costs_are_positive_and_hold_every_width(target):
    costs = step_costs(target.decoder, Draft(target.decoder), 30, 3, Sampling())
    assert sorted(costs.target_verify) == [1, 2, 3, 4]
    assert min(costs.target_verify.values()) > 0
    assert costs.draft_step > 0


def test_gamma_is_one_of_those_tried(target):
    chosen = choose_gamma(target, Draft(target.decoder), PROMPTS, IDS, GREEDY, 3)
    assert chosen.gamma in (1, 2, 3)
    assert chosen.stop_below == 0 or chosen.gamma == 3


def test_the_fastest_length_outlives_the_slower_halves(target, monkeypatch):
    timed = []

    def decode(_target, _draft, prompt, _ids, how, length):
        timed.append(length)
        seconds = 1 + abs(length.gamma - 4) + 10 * length.stop_below
        run = changed(baselines(target)[0], 0)
        return dataclasses.replace(run, prefill_seconds=seconds, block_seconds=[])

    monkeypatch.setattr("eval.measuring.timing.decode_speculative", decode)
    prompts = [Prompt(f"t{i}", prompt="unused") for i in range(8)]
    chosen = choose_gamma(target, Draft(target.decoder), prompts, [[1]] * 8, GREEDY, 6)
    assert chosen == DraftLength(4)
    after_warm_up = timed[1:]
    # two prompts with all nine, two with five, two with three, two with two
    assert len(after_warm_up) == 2 * (9 + 5 + 3 + 2)
    assert after_warm_up.count(DraftLength(4)) == 8


def test_every_prompt_is_decoded_by_everybody(target, tiny, journal):
    good, bad = Draft(target.decoder), Draft(build_decoder(tiny(1), 100))
    candidates = [
        Candidate(name, "unused", "full", {}, draft, 0, None)
        for name, draft in (("good", good), ("bad", bad))
    ]
    base, runs = interleave(target, candidates, PROMPTS, IDS, GREEDY, DraftLength(2), journal)
    expected = [run.tokens for run in baselines(target)]
    for decoded in (base, *runs):
        assert [run.tokens for run in decoded] == expected
        assert all(run.seconds > 0 for run in decoded)


def test_every_batch_is_decoded_by_everybody(target, tiny, journal):
    good, bad = Draft(target.decoder), Draft(build_decoder(tiny(1), 100))
    candidates = [
        Candidate(name, "unused", "full", {}, draft, 0, None)
        for name, draft in (("good", good), ("bad", bad))
    ]
    batches = [(PROMPTS[:2], IDS[:2]), (PROMPTS[2:], IDS[2:])]
    made = interleave_batches(target, candidates, batches, GREEDY, DraftLength(2), journal)
    expected = [run.tokens for run in baselines(target)]
    assert len(made) == 3
    for decoded in made:
        assert [[run.prompt_id for run in batch] for batch in decoded] == [["p0", "p1"], ["p2"]]
        assert [run.tokens for batch in decoded for run in batch] == expected
    _, good, bad = made
    assert metrics.tau(good[1])["mean"] == 3 > metrics.tau(bad[1])["mean"]


def test_stock_generate_is_timed_on_the_same_prompts(target):
    measured = over_stock_generate(target, PROMPTS, IDS, Decoding(Sampling(), frozenset({0}), 8))
    assert measured["n"] == 3
    assert measured["mean"] > 0
