import pytest
import torch

from distill.losses import coarse_forward_kl


def plain(logits, p, cached_ids, full_ids_of_rows):
    """KL between the merged distributions, one position at a time, over the target's vocabulary."""
    losses = []
    for row in range(len(logits)):
        q = logits[row].double().softmax(-1)
        buckets_p, buckets_q = [], []
        for token in cached_ids[row].tolist():
            where = (full_ids_of_rows == token).nonzero()
            if len(where):
                buckets_p.append(float(p[row, token]))
                buckets_q.append(float(q[where[0, 0]]))
        rest = 1 - float(p[row, cached_ids[row]].sum())
        buckets_p.append(rest)
        buckets_q.append(1 - sum(buckets_q))
        total = sum(buckets_p)
        pairs = zip(buckets_p, buckets_q, strict=True)
        losses.append(
            sum(a / total * torch.log(torch.tensor(a / total / b)) for a, b in pairs if a > 0)
        )
    return torch.tensor(losses)


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


def test_equals_a_plain_reference_on_a_trimmed_head(case):
    logits, p, top_ids, top_logp, row_ids, rows = case
    loss, _ = coarse_forward_kl(logits, rows[top_ids], top_logp)
    # fp32 sums of a few terms of size one
    torch.testing.assert_close(loss, plain(logits, p, top_ids, row_ids).float(), atol=1e-5, rtol=0)


def test_is_the_full_kl_when_everything_is_cached():
    torch.manual_seed(1)
    p = torch.randn(20, 12).softmax(-1)
    logits = torch.randn(20, 12)
    top_p, ids = p.topk(11, dim=-1)
    loss, _ = coarse_forward_kl(logits, ids, top_p.log())
    full = torch.nn.functional.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1)
    torch.testing.assert_close(loss, full, atol=1e-4, rtol=0)


def test_never_exceeds_the_full_kl():
    torch.manual_seed(2)
    p = torch.randn(200, 30).softmax(-1)
    logits = 2 * torch.randn(200, 30)
    full = torch.nn.functional.kl_div(logits.log_softmax(-1), p, reduction="none").sum(-1)
    for cached in (1, 3, 10):
        top_p, ids = p.topk(cached, dim=-1)
        loss, _ = coarse_forward_kl(logits, ids, top_p.log())
        assert (loss <= full + 1e-5).all()
        assert (loss >= -1e-5).all()


def test_is_zero_and_stationary_at_p():
    torch.manual_seed(3)
    logits = torch.randn(9, 15, requires_grad=True)
    top, ids = logits.detach().log_softmax(-1).topk(5, dim=-1)
    loss, agreed = coarse_forward_kl(logits, ids, top)
    loss.sum().backward()
    assert loss.abs().max() < 1e-5
    assert logits.grad.abs().max() < 1e-5
    assert agreed.all()


def test_gradient_is_that_of_finite_differences(case):
    logits, _, top_ids, top_logp, _, rows = case
    logits = logits[:4].double().requires_grad_()

    def total(values):
        return coarse_forward_kl(values, rows[top_ids[:4]], top_logp[:4])[0].sum()

    total(logits).backward()
    step = torch.zeros_like(logits)
    step[2, 7] = 1e-3
    with torch.no_grad():
        slope = (total(logits + step) - total(logits - step)) / 2e-3
    assert logits.grad[2, 7] == pytest.approx(float(slope), abs=1e-3)


def test_positions_whose_cached_tokens_all_lack_a_row_stay_finite():
    logits = torch.randn(2, 5, requires_grad=True)
    ids = torch.full((2, 3), -1)
    logp = torch.tensor([[0.5, 0.3, 0.1]] * 2).log()
    loss, agreed = coarse_forward_kl(logits, ids, logp)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logits.grad).all()
    assert not agreed.any()


def test_agreement_is_with_the_best_token_the_draft_has():
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    ids = torch.tensor([[-1, 1, 2]])
    _, agreed = coarse_forward_kl(logits, ids, torch.tensor([[0.6, 0.3, 0.1]]).log())
    assert agreed.tolist() == [True]
