"""The verification rules by enumeration, and what samples from distributions."""

import itertools

import pytest
import torch

from eval.decoding import verification
from eval.decoding.verification import (
    Sampling,
    acceptance,
    agreement,
    argmax,
    inverse_cdf,
    sample,
    verify,
    verify_greedy,
    warp,
)


def conditionals(vocab, depth, seed):
    """Distributions [vocab] after every text of less than `depth` + 1 tokens, some with zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for length in range(depth + 1):
        for text in itertools.product(range(vocab), repeat=length):
            logits = 1.5 * torch.randn(vocab, generator=generator, dtype=torch.float64)
            if len(found) % 3 == 0:
                logits[int(torch.randint(vocab, (1,), generator=generator))] = float("-inf")
            found[text] = logits.softmax(-1)
    return found


def enumerate_draft(p, q, length, rule):
    """The joint distribution of the first length + 1 tokens, and the expected accepted count.

    Every draft, acceptance and next token is gone through; after them p goes on.
    """
    vocab = len(p[()])
    found, expected = torch.zeros([vocab] * (length + 1), dtype=torch.float64), 0.0
    for draft in itertools.product(range(vocab), repeat=length):
        weight = float(torch.stack([q[draft[:i]][draft[i]] for i in range(length)]).prod())
        if weight == 0:
            continue
        chances, residual = acceptance(
            torch.stack([p[draft[:i]] for i in range(length + 1)]),
            torch.stack([q[draft[:i]] for i in range(length)]),
            torch.tensor(draft),
            rule,
        )
        for n, chance in enumerate(chances.tolist()):
            expected += weight * chance * n
            if chance > 0:
                after = residual[n] / residual[n].sum()
                for token in range(vocab):
                    text = (*draft[:n], token)
                    part = weight * chance * float(after[token])
                    for rest in itertools.product(range(vocab), repeat=length - n):
                        whole = (*text, *rest)
                        tail = [p[whole[:i]][whole[i]] for i in range(n + 1, length + 1)]
                        found[whole] += part * float(torch.stack(tail).prod() if tail else 1)
    return found, expected


def test_both_rules_are_exact_and_blocks_accept_no_less():
    more = []
    for seed in range(3):
        p, q = conditionals(3, 3, seed), conditionals(3, 2, seed + 100)
        accepted = {}
        for rule in ("block", "token"):
            found, accepted[rule] = enumerate_draft(p, q, 3, rule)
            for text in itertools.product(range(3), repeat=4):
                alone = torch.stack([p[text[:i]][text[i]] for i in range(4)]).prod()
                assert abs(found[text] - alone) < 1e-12
        more.append(accepted["block"] / accepted["token"])
    assert min(more) > 1 - 1e-12
    assert max(more) > 1.01


def test_without_a_draft_the_next_token_is_of_p(monkeypatch):
    """And not of a residual, which lacks what a draft would have had."""
    given = []
    monkeypatch.setattr(verification, "sample", lambda p, _: given.append(p) or torch.tensor(0))
    logits, sampling = torch.tensor([[2.0, 1.0, 0.5]]), Sampling(1.0)
    nothing = torch.zeros(0, dtype=torch.long)
    accepted, _ = verify(logits, nothing, torch.zeros(0, 3), sampling, torch.Generator(), "block")
    assert int(accepted) == 0
    assert torch.equal(given[-1], warp(logits[0], sampling))


@pytest.mark.parametrize("rule", ["block", "token"])
def test_equal_distributions_accept_everything(rule):
    p = torch.randn(3, 50, generator=torch.Generator().manual_seed(3)).softmax(-1)
    chances, residual = acceptance(p, p[:2], torch.tensor([7, 8]), rule)
    assert chances.tolist() == [0, 0, 1]
    assert torch.equal(residual[2], p[2])


@pytest.mark.parametrize(
    ("target", "draft", "accepted", "following"),
    [
        ([1, 2, 3], [1, 2], 2, 3),
        ([1, 2, 3], [1, 9], 1, 2),
        ([1, 2, 3], [9, 2], 0, 1),
        ([7], [], 0, 7),
    ],
)
def test_greedy_cases(target, draft, accepted, following):
    n, token = verify_greedy(torch.tensor(target), torch.tensor(draft, dtype=torch.long))
    assert (int(n), int(token)) == (accepted, following)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.7, None, 1.0), (1.3, 7, 1.0), (1.0, None, 0.8), (0.6, 9, 0.5)],
)
def test_warping_is_that_of_transformers(temperature, top_k, top_p):
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    torch.manual_seed(0)
    logits = 3 * torch.randn(6, 40)
    expected = TemperatureLogitsWarper(temperature)(None, logits)
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    found = warp(logits, Sampling(temperature, top_k, top_p))
    torch.testing.assert_close(found, expected.softmax(-1), atol=1e-6, rtol=0)


def test_greedy_is_one_hot_and_agreement_counts_equal_choices():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 1.0, 0.0]])
    one_hot = warp(logits, Sampling())
    assert one_hot.tolist() == [[0, 1, 0], [1, 0, 0]]
    assert agreement(one_hot, one_hot.flip(0)).tolist() == [0, 0]


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_k": 0}, {"top_p": 0}, {"top_p": 1.5}])
def test_impossible_sampling_is_refused(bad):
    with pytest.raises(ValueError, match="use"):
        Sampling(**({"temperature": 1.0} | bad))


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53, 1.0])
def test_the_ends_of_the_uniform_interval_are_possible_tokens(monkeypatch, uniform):
    p = torch.tensor([0.0, 0.0, 0.3, 0.7, 0.0, 0.0])
    monkeypatch.setattr(
        "torch.rand", lambda size, generator, **how: torch.full(size, uniform, **how)
    )
    assert int(sample(p, torch.Generator())) == (2 if uniform == 0 else 3)


def test_the_tail_of_a_large_vocabulary_gets_its_share():
    p = torch.full((1, 150_000), 1e-6)
    p[0, 0] = 1 - p[0, 1:].sum()
    drawn = sample(p.expand(400, -1), torch.Generator().manual_seed(5))
    tail = drawn[drawn > 0]
    # 15% of 400 draws, spread over the tail: its last half gets half of them
    assert 30 <= len(tail) <= 95
    assert 0.25 < float((tail > 75_000).float().mean()) < 0.75


@pytest.mark.parametrize("size", [5, 256, 1000])
def test_ids_are_found_as_in_the_sums_of_all(size):
    generator = torch.Generator().manual_seed(7)
    p = torch.randn(3000, size, generator=generator).mul(3).softmax(-1)
    uniform = torch.rand(3000, 1, dtype=torch.float64, generator=generator)
    assert inverse_cdf(0.25 * p, uniform).equal(inverse_cdf(p, uniform))  # as of a residual
    cdf = p.double().cumsum(-1)
    wanted = torch.searchsorted(cdf, uniform * cdf[:, -1:], right=True)[:, 0]
    # but for numbers that fall on an id's edge: the sum of a run is taken in fp32
    assert int((inverse_cdf(p, uniform) != wanted).sum()) <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_equal_logits_the_first_is_the_argmax(dtype):
    logits = torch.zeros(3, 2, 5000, dtype=dtype)
    logits[..., [17, 900, 4999]] = 2.0
    assert (argmax(logits) == 17).all()
    torch.manual_seed(0)
    drawn = torch.randn(40, 5000).to(dtype)  # in bf16 the largest is often not alone
    first = [int((row == row.max()).nonzero()[0]) for row in drawn]
    assert argmax(drawn).tolist() == first


def test_almost_equal_distributions_leave_chances_that_are_chances():
    """What is left of p over q is then far below 1's last digit, and must not be lost beside it."""
    q, p = torch.full((2, 1000), 1e-3), torch.full((3, 1000), 1e-3)
    p[:, 0] += 2e-10
    chances, _ = acceptance(p, q, torch.tensor([999, 999]), "block")
    torch.testing.assert_close(chances.sum(), torch.tensor(1.0))
    assert (chances >= 0).all()
