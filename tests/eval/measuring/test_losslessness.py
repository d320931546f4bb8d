"""Greedy texts compared, on tiny models whose answers are known."""

import copy
import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, OPTConfig

from align.checkpoint import Checkpoint
from eval.decoding.build import build_decoder
from eval.decoding.loop import decode
from eval.decoding.target import Target
from eval.measuring import losslessness
from eval.measuring.losslessness import LosslessCheck, tie
from eval.measuring.output_check import Ledger
from tests.eval.measuring.made_up import GREEDY, IDS, NEVER, PROMPTS, SET, VOCAB, baselines
from tests.mtp import mtp_config

LENGTH = 3


def changed(run, at):
    tokens = list(run.tokens)
    tokens[at] = (tokens[at] + 1) % VOCAB
    return dataclasses.replace(run, tokens=tokens)


def check(target, runs, draft):
    """The ledger of runs against the target alone."""
    made = LosslessCheck(target, GREEDY, str).ledger(draft, LENGTH, SET, baselines(target), runs)
    return Ledger(**made)


def test_identical_runs_are_identical(target, own):
    found = check(target, baselines(target), own)
    assert (found.prompts, found.identical, found.divergences) == (3, 3, [])


def test_another_token_where_nothing_ties_is_unexplained(target, own):
    base = baselines(target)
    other = changed(base[1], 7)
    found = check(target, [base[0], other, base[2]], own)
    (entry,) = found.divergences
    assert (found.identical, found.tie_divergences, found.unexplained) == (2, 0, 1)
    assert (entry.prompt, entry.position, entry.tie) == ("p1", 7, False)
    assert (entry.target, entry.drafted) == (str([base[1].tokens[7]]), str([other.tokens[7]]))
    assert entry.gap > entry.error >= 0


def test_a_text_that_is_cut_short_is_unexplained(target, own):
    first, *others = baselines(target)
    short = dataclasses.replace(first, tokens=first.tokens[:-1])
    assert check(target, [short, *others], own).unexplained == 1


class Duplicated:
    """A target whose logits for two tokens are always equal up to the noise of wide forwards."""

    recorded = False

    def __init__(self, decoder, noise):
        self.decoder, self.noise = decoder, noise
        self.device, self.context_length = decoder.device, decoder.context_length
        self.new_cache, self.dtype = decoder.new_cache, decoder.dtype

    def forward(self, tokens, start, cache, last_only=False, states=None):
        logits = self.decoder.forward(tokens, start, cache, last_only).clone()
        best = logits.argmax(-1, keepdim=True)
        partner = (best + 1) % VOCAB
        gap = self.noise if tokens.shape[1] > 1 else -self.noise  # the order depends on the width
        return logits.scatter(-1, partner, logits.gather(-1, best) + gap)


def test_a_tie_is_explained_only_when_fp32_agrees(target, own):
    tied = dataclasses.replace(target, decoder=Duplicated(target.decoder, 1e-3))
    base = baselines(tied)
    # the partner of the likeliest token, at a gap of 1e-3, in blocks of two
    wide = dataclasses.replace(changed(base[0], 5), drafted=[1] * 19)
    runs = [wide, *base[1:]]
    assert check(tied, runs, own).tie_divergences == 1
    # the same divergence, but an exact decoder that itself gives other tokens with a draft
    found = LosslessCheck(tied, GREEDY, str)
    found.exact = Duplicated(target.decoder, 1e-3)
    assert Ledger(**found.ledger(own, LENGTH, SET, base, runs)).unexplained == 1


def test_a_near_tie_says_that_the_memory_is_too_small_for_fp32(target, own, monkeypatch):
    monkeypatch.setattr(losslessness, "memory_left", lambda device: 10_000)
    tied = dataclasses.replace(
        target,
        model=copy.deepcopy(target.model).bfloat16(),
        decoder=Duplicated(target.decoder, 1e-3),
    )
    base = baselines(tied)
    runs = [dataclasses.replace(changed(base[0], 5), drafted=[1] * 19), *base[1:]]
    found = check(tied, runs, own)
    assert (found.tie_divergences, found.unexplained) == (1, 0)
    assert found.divergences[0].why == losslessness.NOT_IN_FP32["why"]


OPT = {"vocab_size": 61, "hidden_size": 32, "word_embed_proj_dim": 32, "num_hidden_layers": 2}
OPT |= {"num_attention_heads": 4, "ffn_dim": 48}


@pytest.mark.parametrize("family", ["llama", "opt", "qwen3_next", "qwen3_5_text"])
def test_near_ties_are_checked_by_a_copy_that_computes_in_fp32(tiny, family):
    """Modules that read the weights of others (a convolution of linear attention) do so, too."""
    if family == "llama":
        model = copy.deepcopy(tiny(0)).bfloat16()
    else:
        config = OPTConfig(**OPT) if family == "opt" else mtp_config(family)
        model = AutoModelForCausalLM.from_config(config).eval().bfloat16()
    target = Target(Checkpoint("tiny", Path()), model, build_decoder(model, 40), NEVER)
    exact = LosslessCheck(target, GREEDY, str).exact
    text = torch.randint(4, VOCAB, (1, 30))
    got = exact.forward(text, 0, exact.new_cache(1, 30))
    with torch.no_grad():
        want = copy.deepcopy(model).float()(text, use_cache=False).logits
    assert exact.dtype == got.dtype == torch.float32
    assert ((got - want).norm() / want.norm()) < 1e-5
    assert model.dtype == target.decoder.dtype == torch.bfloat16


def test_ties_that_time_does_not_check_are_left_out(target, own):
    tied = dataclasses.replace(target, decoder=Duplicated(target.decoder, 1e-3))
    base = baselines(tied)
    runs = [dataclasses.replace(changed(run, 5), drafted=[1] * 19) for run in base]
    runs[2] = changed(base[2], 5)  # a mismatch is never left out
    checked = LosslessCheck(tied, GREEDY, str).ledger(own, LENGTH, SET, base, runs, lambda _: True)
    ledger = Ledger(**checked)
    assert (ledger.prompts, ledger.tie_divergences, ledger.unexplained) == (2, 1, 1)


@pytest.mark.parametrize(
    ("gap", "error", "dtype", "is_tie"),
    [
        (0.25, 0.125, torch.bfloat16, True),  # one logit is off upwards, one downwards
        (0.26, 0.125, torch.bfloat16, False),
        (1.0, 4.0, torch.bfloat16, True),
        (1.1, 4.0, torch.bfloat16, False),  # a broken kernel's error is no rounding
        (0.3, 4.0, torch.float16, False),
        (0.02, 4.0, torch.float32, False),
    ],
)
def test_a_tie_is_a_gap_of_at_most_twice_the_error_below_a_cap(gap, error, dtype, is_tie):
    single = torch.tensor([5.0, 5.0 - gap, 0.0])
    wide = torch.tensor([5.0 - error, 5.0 - gap + error, 7.0])  # the third token has no say
    found = tie(single, wide, 0, 1, dtype)
    assert (found["error"], found["tie"]) == (pytest.approx(error), is_tie)


@pytest.mark.parametrize("draft_seed", [0, 1])
def test_replayed_steps_give_the_logits_that_were_decoded_with(target, tiny, drafter, draft_seed):
    """Bit by bit the same, whatever was accepted."""
    decoded = []

    class Watched(Duplicated):
        def forward(self, tokens, start, cache, last_only=False, states=None):
            logits = self.decoder.forward(tokens, start, cache, last_only)
            decoded.extend(logits[0])
            return logits

    draft = drafter(build_decoder(tiny(draft_seed), 100), VOCAB)
    watched = dataclasses.replace(target, decoder=Watched(target.decoder, 0))
    run = decode(watched.decoder, draft, PROMPTS[0], IDS[0], GREEDY, LENGTH)
    for position, token in enumerate(run.tokens):
        found = LosslessCheck(target, GREEDY, list)._logits_at(position, IDS[0], run, LENGTH)
        assert int(found.argmax()) == token
        assert any(found.equal(after) for after in decoded)
