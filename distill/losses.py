"""The losses that pull the draft q towards the target p, from the target's cached distributions.

Legend: N response positions, K entries of the draft's head, H hidden size, C cached tokens at a
position. p and q are merged into C + 1 buckets: each cached token, and the rest (all other tokens).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 2**28  # bytes of logits, in fp32, that exist at once
ROWS = 64  # the rows of a product are padded to a multiple of this number (`rounded`)
P_FLOOR = 1e-6  # below this, fp16 storage cannot distinguish the rest's mass from 0

# A loss of p, q and log q [N, C + 1]: its values [N], and q times its derivative in q [N, C + 1].
LossFunction = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def forward_kl(p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || q) = sum p log(p / q): q must cover every token that is likely under p."""
    return torch.special.xlogy(p, p).sum(-1) - (p * log_q).sum(-1), -p


def reverse_kl(p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """KL(q || p) = sum q log(q / p): q avoids tokens unlikely under p (p >= `P_FLOOR`)."""
    ratio = log_q - p.clamp_min(P_FLOOR).log()
    return (q * ratio).sum(-1), q * (ratio + 1)


def jsd(p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """(KL(p || m) + KL(q || m)) / 2 with m = (p + q) / 2."""
    log_m = ((p + q) / 2).clamp_min(torch.finfo(q.dtype).tiny).log()
    to_m = log_q - log_m
    value = torch.special.xlogy(p, p).sum(-1) - (p * log_m).sum(-1) + (q * to_m).sum(-1)
    return value / 2, q * to_m / 2


def tv(p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """1 - alpha = 1 - sum min(p, q): the probability of a rejection (arXiv 2310.08461)."""
    return 1 - torch.minimum(p, q).sum(-1), -q * (q < p)


def log_alpha(p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """-log alpha, whose gradient does not fade where alpha is small (arXiv 2602.23881)."""
    alpha = torch.minimum(p, q).sum(-1).clamp_min(P_FLOOR)
    return -alpha.log(), -q * (q < p) / alpha[:, None]


def lk(p: Tensor, q: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
    """w KL(p || q) + (1 - w) TV, w = exp(-3 alpha) without gradient (arXiv 2602.23881)."""
    weight = (-3 * torch.minimum(p, q).sum(-1)).exp()
    (kl, kl_pull), (distance, tv_pull) = forward_kl(p, q, log_q), tv(p, q, log_q)
    pull = weight[:, None] * kl_pull + (1 - weight[:, None]) * tv_pull
    return weight * kl + (1 - weight) * distance, pull


LossName = Literal["forward_kl", "reverse_kl", "jsd", "tv", "log_alpha", "lk"]
LOSSES: dict[str, LossFunction] = {
    loss.__name__: loss for loss in (forward_kl, reverse_kl, jsd, tv, log_alpha, lk)
}


def rows_at_once(entries: int) -> int:
    """The number of positions whose logits over this number of entries exist at once."""
    return max(ROWS, CHUNK // (4 * entries) // ROWS * ROWS)


def coarse_loss(
    logits: Tensor,
    cached_ids: Tensor,
    cached_logprobs: Tensor,
    divergence: LossFunction,
    factors: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The loss of each position [N], p and q both merged into C + 1 buckets.

    logits: the draft's [N, K]. cached_ids: the target's most likely tokens as entries of the
    draft's head [N, C], -1 where it has none. cached_logprobs: their log p [N, C], natural log.
    factors: of each loss [N], or of all.

    p is first restricted to tokens in the draft's head: the mass of cached tokens without an entry
    is dropped and the remainder renormalised. The bucket of the rest is what keeps the loss from
    inflating q on the cached tokens (a renormalised top-k teaches p/P_S; arXiv 2503.16870). Merging
    buckets can only lower a KL, JSD or TV, so these are lower bounds of those over the full
    vocabulary, and tight when the cached tokens hold nearly all mass: alpha over the vocabulary is
    below the alpha of the buckets by min(p_rest, q_rest) at most.

    Returns the values times their factors, and the gradient of each in its logits [N, K], in closed
    form: with g = q dL/dq of a bucket and G their sum, g - q G on a cached token,
    q (g_rest / q_rest - G) on any other. If no cached token of a position has an entry, only the
    rest remains: then loss and gradient are 0.
    """
    has_entry = cached_ids >= 0
    ids = cached_ids.clamp_min(0)
    # two passes over [N, K]; the gradient takes one more
    log_q_all = logits.log_softmax(-1, dtype=torch.float32)
    log_q = log_q_all.gather(1, ids)
    q = log_q_all.exp_()

    p = cached_logprobs.float().exp()
    p_rest = (1 - p.sum(-1)).clamp_min(0)
    p = p.masked_fill(~has_entry, 0)
    kept = p.sum(-1) + p_rest
    # a smaller `kept` is rounding error of fp16 storage: the draft's head has no token of p
    teaches = ~(kept <= 1e-3) & has_entry.any(-1)  # `~` keeps NaN visible
    p = torch.cat([p, p_rest[:, None]], dim=1) / kept.clamp_min(1e-3)[:, None]

    q_cached = log_q.exp().masked_fill(~has_entry, 0)
    q_rest = 1 - q_cached.sum(-1, keepdim=True).clamp_max(1 - 1e-6)
    buckets = torch.cat([q_cached, q_rest], dim=1)
    logs = torch.cat([log_q.masked_fill(~has_entry, 0), q_rest.log()], dim=1)
    value, pull = divergence(p, buckets, logs)
    each = torch.as_tensor(factors, device=value.device)
    value = value.masked_fill(~teaches, 0) * each
    pull = pull.masked_fill(~teaches[:, None], 0) * each.unsqueeze(-1)

    on_rest = pull[:, -1:] / q_rest
    gradient = q.mul_(on_rest - pull.sum(-1, keepdim=True))
    gradient.scatter_add_(1, ids, (pull[:, :-1] - q_cached * on_rest).masked_fill_(~has_entry, 0))
    return value, gradient


def acceptance(
    logits: Tensor, cached_ids: Tensor, cached_logprobs: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """The acceptance rate at each position [N], a lower bound, and the bound's largest error [N].

    The arguments are those of `coarse_loss`; p is not restricted to the draft's head. At
    temperature 0 the value is exact: whether the two argmaxes agree. Else let S be the cached
    tokens and P_S, Q_S their mass. The value is sum_S min(p, q). The tokens that are not cached add
    at most min(1 - P_S, 1 - Q_S).
    """
    if temperature == 0:
        # a token without an entry is -1 and is never drafted
        return (logits.argmax(-1) == cached_ids[:, 0]).float(), logits.new_zeros(len(logits))
    has_entry = cached_ids >= 0
    q = (logits.float() / temperature).softmax(-1).gather(1, cached_ids.clamp_min(0))
    q = q.masked_fill(~has_entry, 0)
    if temperature == 1:
        p = cached_logprobs.float().exp()
        lacking = torch.minimum(1 - p.sum(-1), 1 - q.sum(-1))
    else:  # `sharpen` gives an upper bound of the mass of the rest
        p = sharpen(cached_logprobs, temperature).exp()
        lacking = 1 - p.sum(-1)
    return torch.minimum(p, q).sum(-1), lacking.clamp_min(0)


def sharpen(logprobs: Tensor, temperature: float) -> Tensor:
    """Cached log p [N, C], best first, of the normalised p ** (1 / temperature).

    The mass that they lack is that of the rest. Its powers are not known, but no token of the rest
    is likelier than the last cached one, p_C. So the powers of a rest of mass r sum to at most
    r min(r, p_C) ** (1 / temperature - 1). This bound is used, because a smaller value would
    inflate q on the cached tokens. temperature: at most 1, because else there is no useful bound.
    """
    assert 0 < temperature <= 1, temperature
    power = 1 / temperature
    logprobs = logprobs.float()
    log_rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(0).log()
    bound = log_rest + (power - 1) * torch.minimum(log_rest, logprobs[:, -1:])
    powers = power * logprobs
    return powers - torch.cat([powers, bound], dim=-1).logsumexp(-1, keepdim=True)


def rounded(rows: Tensor) -> Tensor:
    """Rows [N, H] with rows of zeros after them, up to a multiple of ROWS.

    oneDNN keeps 0.3 MB for each shape of a product until the process ends, and nearly every batch
    has another N (docs/lab-notes.md).
    """
    return F.pad(rows, (0, 0, 0, -len(rows) % ROWS))


def head_logits(states: Tensor, weight: Tensor) -> Tensor:
    """Logits [N, K] of a head with this weight [K, H] for the states [N, H]."""
    return F.linear(rounded(states), weight)[: len(states)]


class _HeadLoss(torch.autograd.Function):
    """Head and loss in one function. It computes gradients while a chunk's logits exist.

    So [N, K] logits are never in memory at once, and the backward pass does not compute the head
    again (arXiv 2410.10989 does this for cross-entropy).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        cached_ids: Tensor,
        cached_logprobs: Tensor,
        factors: Tensor,
        divergence: LossFunction,
    ) -> Tensor:
        device = hidden.device.type
        dtype = hidden.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        hidden_needs, weight_needs = ctx.needs_input_grad[:2]
        hidden_gradient = torch.zeros_like(hidden) if hidden_needs else None
        weight_gradient = torch.zeros_like(weight) if weight_needs else None
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(device, enabled=False):
            head = weight.to(dtype)
            rows = rows_at_once(len(weight))
            for start in range(0, len(hidden), rows):
                chunk = slice(start, start + rows)
                ids, states = cached_ids[chunk], hidden[chunk].to(dtype)
                cached = ids, cached_logprobs[chunk]
                logits = head_logits(states, head)
                loss, gradient = coarse_loss(logits, *cached, divergence, factors[chunk])
                total += loss.sum()
                states, gradient = rounded(states), rounded(gradient.to(dtype))
                if hidden_gradient is not None:
                    hidden_gradient[chunk] = (gradient @ head)[: len(ids)]
                if weight_gradient is not None:
                    weight_gradient += gradient.T @ states
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (saved if saved is None else saved * scale for saved in ctx.saved_tensors)
        return (*gradients, None, None, None, None)


def head_loss(
    hidden: Tensor,
    weight: Tensor,
    cached_ids: Tensor,
    cached_logprobs: Tensor,
    divergence: LossFunction = forward_kl,
    factors: Tensor | float = 1.0,
) -> Tensor:
    """The sum of the `coarse_loss` of the logits `hidden @ weight.T`, each with its factor.

    hidden: the head's inputs at response positions [N, H]. weight: the head [K, H]. factors: [N],
    or one for all. The products run in autocast's dtype where that is on. Differentiable once, in
    hidden and weight.
    """
    each = torch.as_tensor(factors, dtype=torch.float32, device=hidden.device).expand(len(hidden))
    total: Tensor = _HeadLoss.apply(hidden, weight, cached_ids, cached_logprobs, each, divergence)
    return total
