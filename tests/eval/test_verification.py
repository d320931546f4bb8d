"""The verification rules, by chi-square on joint distributions; broken variants must be caught."""

import pytest
import torch
from scipy.stats import chi2

from eval.verification import (
    likeliest,
    sample,
    verify_sampled,
)

ROWS = 200_000


def distributions(vocab, seed):
    """p [G+1, V] and q [G, V], far apart, with tokens that one of them never says."""
    generator = torch.Generator().manual_seed(seed)
    p = (1.5 * torch.randn(3, vocab, generator=generator)).softmax(-1)
    q = (1.5 * torch.randn(2, vocab, generator=generator)).softmax(-1)
    p[:, 0], q[:, 1] = 0, 0
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def outcome(p, q, verify, seed, drawn_from=None):
    """First two emitted tokens [ROWS, 2] and accepted counts; positions do not depend on tokens."""
    generator = torch.Generator().manual_seed(seed)
    many_q = q.expand(ROWS, *q.shape)
    drafted = sample(
        (drawn_from if drawn_from is not None else q).expand(ROWS, *q.shape), generator
    )
    accepted, following = verify(p.expand(ROWS, *p.shape), many_q, drafted, generator)
    first = torch.where(accepted > 0, drafted[:, 0], following)
    second = torch.where(accepted > 1, drafted[:, 1], following)
    # after a rejection at the first place the second token comes from the next call: p itself
    fresh = sample(p[1].expand(ROWS, -1), generator)
    return torch.stack([first, torch.where(accepted > 0, second, fresh)], 1), accepted


def p_value(tokens, p):
    vocab = p.shape[-1]
    counts = torch.bincount(tokens[:, 0] * vocab + tokens[:, 1], minlength=vocab**2).double()
    expected = ROWS * (p[0][:, None] * p[1][None]).flatten().double()
    if counts[expected == 0].sum() > 0:
        return 0.0
    common = expected >= 5  # rarer cells are merged into one
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum()
    rest_counts, rest = counts[~common].sum(), expected[~common].sum()
    if rest > 5:
        statistic = statistic + (rest_counts - rest) ** 2 / rest
    return float(chi2.sf(float(statistic), int(common.sum()) - 1 + int(rest > 5)))


@pytest.mark.parametrize("vocab", [5, 50])
def test_emitted_tokens_have_the_targets_joint_distribution(vocab):
    p, q = distributions(vocab, seed=vocab)
    tokens, accepted = outcome(p, q, verify_sampled, seed=1)
    assert p_value(tokens, p) > 1e-4
    assert set(accepted.unique().tolist()) == {0, 1, 2}


def no_residual(p, q, drafted, generator):
    accepted, _ = verify_sampled(p, q, drafted, generator)
    rows = torch.arange(len(p))
    return accepted, sample(p[rows, accepted], generator)


def wrong_bonus(p, q, drafted, generator):
    accepted, following = verify_sampled(p, q, drafted, generator)
    late = sample(q[:, -1], generator)
    return accepted, torch.where(accepted == 1, late, following)


def always_accept(p, q, drafted, generator):
    accepted, following = verify_sampled(p, q, drafted, generator)
    return torch.full_like(accepted, 2), following


@pytest.mark.parametrize("mutant", [no_residual, wrong_bonus, always_accept])
def test_broken_rules_are_caught(mutant):
    p, q = distributions(5, seed=5)
    tokens, _ = outcome(p, q, mutant, seed=1)
    assert p_value(tokens, p) < 1e-4


def test_a_q_that_was_not_sampled_from_is_caught():
    p, q = distributions(5, seed=5)
    unwarped = (q.clamp_min(1e-9).log() / 2).softmax(-1)
    tokens, _ = outcome(p, q, verify_sampled, seed=1, drawn_from=unwarped)
    assert p_value(tokens, p) < 1e-4


def test_a_token_the_target_never_says_is_never_accepted(monkeypatch):
    p = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    q = torch.tensor([[[1.0, 0.0]]])
    monkeypatch.setattr(
        "torch.rand", lambda size, generator, **how: torch.full(size, uniform, **how)
    )
    assert int(sample(p)) == (2 if uniform == 0 else 3)


def test_the_tail_of_a_large_vocabulary_gets_its_share():
    p = torch.full((1, 150_000), 1e-7)
    p[0, 0] = 1 - p[0, 1:].sum()
    drawn = sample(p.expand(4000, -1), torch.Generator().manual_seed(5))
    tail = drawn[drawn > 0]
    # 1.5% of 4000 draws, spread over the tail: its last half gets half of them
    assert 30 <= len(tail) <= 95
    assert 0.25 < float((tail > 75_000).float().mean()) < 0.75


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_logits_the_first_is_the_likeliest(dtype):
    logits = torch.zeros(3, 2, 5000, dtype=dtype)
    logits[..., [17, 900, 4999]] = 2.0
    assert (likeliest(logits) == 17).all()
    torch.manual_seed(0)
    drawn = torch.randn(40, 5000).to(dtype)  # in bf16 the largest is often not alone
    first = [int((row == row.max()).nonzero()[0]) for row in drawn]
    assert likeliest(drawn).tolist() == first
