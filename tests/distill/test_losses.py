from typing import get_args

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from distill.losses import (
    LOSSES,
    LossName,
    coarse_loss,
    forward_kl,
    head_logits,
    head_loss,
    sharpen,
)


@pytest.fixture
def case():
    torch.manual_seed(0)
    vocab, kept, positions, cached = 40, 25, 30, 6
    row_ids = torch.randperm(vocab)[:kept].sort().values
    p = (3 * torch.randn(positions, vocab, dtype=torch.float64)).softmax(-1)
    top_p, top_ids = p.topk(cached, dim=-1)
    rows = torch.full((vocab,), -1)
    rows[row_ids] = torch.arange(kept)
    return torch.randn(positions, kept), p, top_ids, top_p.log(), row_ids, rows


def test_never_exceeds_the_full_kl():
    torch.manual_seed(2)
    p = torch.randn(200, 30).softmax(-1)
    logits = 2 * torch.randn(200, 30)
    full = torch.nn.functional.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1)
    for cached in (1, 3, 10):
        top_p, ids = p.topk(cached, dim=-1)
        loss, _ = coarse_loss(logits, ids, top_p.log(), forward_kl)
        assert (loss <= full + 1e-5).all()
        assert (loss >= -1e-5).all()


def dense(name, p, log_q):
    """Each loss over a whole vocabulary [N, V], written as in its paper, differentiable."""
    q, log_p = log_q.exp(), p.log()
    kl = (p * (log_p - log_q)).sum(-1)
    alpha = torch.minimum(p, q).sum(-1)
    distance = (p - q).abs().sum(-1) / 2
    middle = ((p + q) / 2).log()
    share = torch.exp(-3 * alpha).detach()
    return {
        "forward_kl": kl,
        "reverse_kl": (q * (log_q - log_p)).sum(-1),
        "jsd": (p * (log_p - middle)).sum(-1) / 2 + (q * (log_q - middle)).sum(-1) / 2,
        "tv": distance,
        "log_alpha": -alpha.log(),
        "lk": share * kl + (1 - share) * distance,
    }[name]


def test_every_loss_has_a_name():
    assert set(get_args(LossName)) == set(LOSSES)
    assert all(LOSSES[name].__name__ == name for name in LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_and_its_gradient_are_those_of_the_dense_one_in_fp64(name):
    """All tokens but one are cached, so the buckets are the vocabulary."""
    torch.manual_seed(7)
    p = (2 * torch.randn(60, 12, dtype=torch.float64)).softmax(-1)
    logits = (2 * torch.randn(60, 12, dtype=torch.float64)).requires_grad_()
    expected = dense(name, p, logits.log_softmax(-1))
    (wanted,) = torch.autograd.grad(expected.sum(), logits)
    top_p, ids = p.topk(11, dim=-1)
    value, gradient = coarse_loss(logits.detach(), ids, top_p.log(), LOSSES[name])
    # one fp32 pass against fp64; the rest is 1 minus a sum, so its smallest masses are the roughest
    torch.testing.assert_close(value.double(), expected.detach(), atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(gradient.double(), wanted, atol=2e-4, rtol=2e-3)


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"lk"}))  # whose weight is a constant
def test_the_gradient_of_every_loss_is_its_own_on_a_trimmed_head(case, name):
    """By central differences in the loss itself."""
    logits, _, top_ids, top_logp, _, rows = case
    logits = logits.double()

    def value(at):
        return coarse_loss(at.float(), rows[top_ids], top_logp, LOSSES[name])[0].double()

    _, gradient = coarse_loss(logits.float(), rows[top_ids], top_logp, LOSSES[name])
    generator = torch.Generator().manual_seed(8)
    for _ in range(12):
        way = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
        slope = (value(logits + 1e-3 * way) - value(logits - 1e-3 * way)) / 2e-3
        found = (gradient.double() * way).sum(-1)
        close = (found - slope).abs() < 5e-3 + 5e-3 * slope.abs()  # fp32 values, 1e-3 apart
        assert close.double().mean() > 0.95  # kinks of min(p, q) apart


@pytest.mark.parametrize("name", LOSSES)
def test_no_loss_has_a_gradient_without_a_cached_token_or_an_endless_one(name):
    ids = torch.tensor([[-1, -1, -1], [0, 1, -1], [0, 1, 2]])
    logp = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.3, 0.1], [1.0, 1e-9, 1e-12]]).log()
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 200.0, 0.0, 0.0], [-300.0, 0.0, 300.0, 0.0]])
    value, gradient = coarse_loss(logits, ids, logp, LOSSES[name])
    assert value[0] == 0
    assert (gradient[0] == 0).all()
    assert torch.isfinite(value).all()
    assert torch.isfinite(gradient).all()


def test_head_loss_has_the_gradients_of_autograd_through_the_logits(case, monkeypatch):
    _, _, top_ids, top_logp, row_ids, rows = case
    ids, logp = rows[top_ids], top_logp.float()
    hidden, weight = torch.randn(len(ids), 8), torch.randn(len(row_ids), 8)
    factors = torch.rand(len(ids))

    def through_logits(hidden, weight):
        log_q = (hidden @ weight.T).log_softmax(-1)
        known = ids >= 0
        p = logp.exp()
        rest = 1 - p.sum(-1)
        p = p * known
        total = p.sum(-1) + rest
        p, rest = p / total[:, None], rest / total
        log_q = log_q.gather(1, ids.clamp_min(0))
        q_rest = 1 - (log_q.exp() * known).sum(-1)
        cross = (p * log_q).sum(-1) + rest * q_rest.log()
        return -(cross + torch.special.entr(p).sum(-1) + torch.special.entr(rest)) @ factors

    leaves = [part.clone().requires_grad_() for part in (hidden, weight)]
    expected = through_logits(*leaves)
    (3 * expected).backward()
    monkeypatch.setattr("distill.losses.CHUNK", 7)
    ours = [part.clone().requires_grad_() for part in (hidden, weight)]
    loss = head_loss(*ours, ids, logp, factors=factors)
    (3 * loss).backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-4)
    for got, want in zip(ours, leaves, strict=True):
        torch.testing.assert_close(got.grad, want.grad, rtol=1e-4, atol=1e-4)
    frozen = [hidden.clone().requires_grad_(), weight]  # LoRA trains no head
    head_loss(*frozen, ids, logp, factors=factors).backward()
    torch.testing.assert_close(frozen[0].grad, leaves[0].grad / 3, rtol=1e-4, atol=1e-4)


def test_few_shapes_of_product_are_asked_for_however_many_positions_a_batch_has(case, monkeypatch):
    """Each of them takes memory for good (oneDNN)."""
    _, _, top_ids, top_logp, row_ids, rows = case
    shapes = set()

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                shapes.add(tuple(tuple(one.shape) for one in args[-2:]))
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr("distill.losses.CHUNK", 128)
    for count in range(1, 200, 7):
        at = torch.arange(count) % len(top_ids)
        hidden = torch.randn(count, 8, requires_grad=True)
        weight = torch.randn(len(row_ids), 8, requires_grad=True)
        with Seen():
            head_loss(hidden, weight, rows[top_ids[at]], top_logp[at].float()).backward()
            head_logits(hidden, weight)
    # the logits, the gradient by the states, that by the head: after 64 and 128 positions, and
    # those that are asked for all at once after 192 and 256
    assert len(shapes) <= 3 * 2 + 2


@pytest.mark.parametrize("temperature", [0.25, 0.5, 0.9])
@pytest.mark.parametrize("cached", [1, 3, 10, 29])
def test_sharpening_gives_the_rest_no_less_than_it_has(temperature, cached):
    torch.manual_seed(5)
    p = (2 * torch.randn(200, 30, dtype=torch.float64)).softmax(-1)
    exact = p ** (1 / temperature)
    exact /= exact.sum(-1, keepdim=True)
    top_p, ids = p.topk(cached, dim=-1)
    got = sharpen(top_p.log(), temperature).double().exp()
    rest, true_rest = 1 - got.sum(-1), 1 - exact.gather(1, ids).sum(-1)
    assert (rest >= true_rest - 1e-6).all()
    # among themselves the cached tokens are as they should be
    expected = exact.gather(1, ids)
    expected /= expected.sum(-1, keepdim=True)
    torch.testing.assert_close(got / got.sum(-1, keepdim=True), expected, rtol=1e-4, atol=1e-7)
    if cached == 29:  # a rest of one token: it is known
        torch.testing.assert_close(rest, true_rest, rtol=0, atol=1e-5)


def test_sharpening_by_nothing_changes_nothing():
    logp = torch.randn(20, 12).log_softmax(-1).topk(5, dim=-1).values
    torch.testing.assert_close(sharpen(logp, 1.0), logp)
