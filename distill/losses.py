"""The loss that pulls the draft q towards the target p, from the target's cached distributions.

Legend: N response positions, V rows of the draft's head, H hidden size, C cached tokens a position.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 1024  # response positions whose logits exist at once


def coarse_forward_kl(
    logits: Tensor, cached_ids: Tensor, cached_logprobs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """KL(p || q) [N], both merged into C + 1 buckets: each cached token, and all the rest.

    logits: the draft's [N, V]. cached_ids: the target's most likely tokens as rows of the draft's
    head [N, C], -1 where the draft has no such row. cached_logprobs: their log p [N, C], natural
    log.

    p is first restricted to tokens in the draft's head: the mass of cached tokens without a row
    is dropped and the remainder renormalised. The bucket of the rest is what keeps the loss from
    inflating q on the cached tokens (a renormalised top-k teaches p/P_S; arXiv 2503.16870). Merging
    buckets can only lower a KL divergence, so this is a lower bound of KL over the full vocabulary,
    and tight when the cached tokens hold nearly all mass.

    Returns the divergences, whether argmax q is the target's most likely token that the draft has
    [N, bool], and the gradient of each divergence in its logits [N, V], in closed form: q - p on a
    cached token, q (1 - p_rest / q_rest) on any other. Positions whose cached tokens all lack a
    row have nothing but the rest: loss and gradient are 0.
    """
    top, best = logits.max(-1, keepdim=True)
    shifted = logits.float() - top.float()  # both converted first: mixed dtypes subtract slowly
    known = cached_ids >= 0
    ids = cached_ids.clamp_min(0)
    log_q = shifted.gather(1, ids)
    q = shifted.exp_()
    normaliser = q.sum(-1, keepdim=True)
    log_q -= normaliser.log()
    q /= normaliser

    p = cached_logprobs.float().exp()
    p_rest = (1 - p.sum(-1)).clamp_min(0)
    p = p.masked_fill(~known, 0)
    kept = p.sum(-1) + p_rest
    # what fp16 storage leaves of a position without any token of the draft's head is rounding error
    share = torch.where(kept > 1e-3, 1 / kept, 0)
    p, p_rest = p * share[:, None], p_rest * share

    q_cached = log_q.exp().masked_fill(~known, 0)
    q_rest = 1 - q_cached.sum(-1).clamp_max(1 - 1e-6)
    cross = (p * log_q.masked_fill(~known, 0)).sum(-1) + p_rest * q_rest.log()
    entropy = torch.special.entr(p).sum(-1) + torch.special.entr(p_rest)
    best_known = cached_logprobs.float().masked_fill(~known, float("-inf")).argmax(-1, keepdim=True)
    agreed = (best == ids.gather(1, best_known))[:, 0] & known.any(-1)

    pull = (p_rest / q_rest)[:, None]
    gradient = q.mul_((p.sum(-1) + p_rest)[:, None] - pull)
    gradient.scatter_add_(1, ids, (q_cached * pull - p).masked_fill_(~known, 0))
    return -cross - entropy, agreed, gradient


def sharpen(logprobs: Tensor, temperature: float) -> Tensor:
    """Cached log p [N, C], best first, after p ** (1 / temperature); what they lack of 1 is rest.

    The powers of the rest, of mass r, are not known, but none of its tokens is likelier than the
    last cached one, p_C. So they sum to at most r min(r, p_C) ** (1 / temperature - 1), which is
    what the rest gets here: never too little, so that q is not inflated on the cached tokens, and
    little, since p_C is. temperature: at most 1. Above, the sum has no useful bound.
    """
    assert 0 < temperature <= 1, temperature
    power = 1 / temperature
    logprobs = logprobs.float()
    log_rest = (1 - logprobs.exp().sum(-1, keepdim=True)).clamp_min(0).log()
    bound = log_rest + (power - 1) * torch.minimum(log_rest, logprobs[:, -1:])
    powers = power * logprobs
    return powers - torch.cat([powers, bound], dim=-1).logsumexp(-1, keepdim=True)


class _HeadLoss(torch.autograd.Function):
    """The head and its loss in one: gradients are taken while a chunk's logits exist.

    Neither are [N, V] logits ever whole, nor is the head computed a second time in the backward
    pass (2410.10989 fuses cross-entropy in this way).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, cached_ids: Tensor, cached_logprobs: Tensor
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = hidden.dtype
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        hidden_needs, weight_needs = ctx.needs_input_grad[:2]
        hidden_gradient = torch.zeros_like(hidden) if hidden_needs else None
        weight_gradient = torch.zeros_like(weight) if weight_needs else None
        total = torch.zeros((), device=hidden.device)
        agreed = torch.zeros((), dtype=torch.long, device=hidden.device)
        with torch.autocast(device, enabled=False):
            head = weight.to(dtype)
            for at in range(0, len(hidden), CHUNK):
                part = slice(at, at + CHUNK)
                states = hidden[part].to(dtype)
                loss, same, gradient = coarse_forward_kl(
                    F.linear(states, head), cached_ids[part], cached_logprobs[part]
                )
                total += loss.sum()
                agreed += same.sum()
                gradient = gradient.to(dtype)
                if hidden_gradient is not None:
                    hidden_gradient[part] = gradient @ head
                if weight_gradient is not None:
                    weight_gradient += gradient.T @ states
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        ctx.mark_non_differentiable(agreed)
        return total, agreed

    @staticmethod
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (part if part is None else part * scale for part in ctx.saved_tensors)
        return (*gradients, None, None)


def head_loss(
    hidden: Tensor, weight: Tensor, cached_ids: Tensor, cached_logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """The summed `coarse_forward_kl` of the logits `hidden @ weight.T`, and how many agreed.

    hidden: what the head reads at response positions [N, H]. weight: the head [V, H]. The products
    run in autocast's dtype where that is on. Differentiable once, in hidden and weight.
    """
    return _HeadLoss.apply(hidden, weight, cached_ids, cached_logprobs)
