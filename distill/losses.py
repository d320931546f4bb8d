"""Losses that pull the draft q towards the target p: pure functions of logits, cached targets.

Legend: N response positions, V the draft's vocabulary, C cached tokens a position.
"""

from __future__ import annotations

import torch
from torch import Tensor


def coarse_forward_kl(
    logits: Tensor, cached_ids: Tensor, cached_logprobs: Tensor
) -> tuple[Tensor, Tensor]:
    """KL(p || q) [N], both merged into C + 1 buckets: each cached token, and all the rest.

    logits: the draft's [N, V]. cached_ids: the target's most likely tokens as rows of the draft's
    head [N, C], -1 where the draft has no such row. cached_logprobs: their log p [N, C], natural
    log.

    p is first restricted to what the draft can say: the mass of cached tokens it has no row for is
    dropped and the remainder renormalised. The bucket of the rest is what keeps the loss from
    inflating q on the cached tokens (a renormalised top-k teaches p/P_S; arXiv 2503.16870). Merging
    buckets can only lower a KL divergence, so this is a lower bound of KL over the full vocabulary,
    and tight when the cached tokens hold nearly all mass.

    Returns the divergences and whether argmax q is the target's most likely token that the draft
    has [N, bool]. Positions whose cached tokens all lack a row still learn to keep out of nowhere:
    their only bucket is the rest, and their loss is 0.
    """
    logits = logits.float()
    log_normaliser = logits.logsumexp(-1, keepdim=True)
    known = cached_ids >= 0
    ids = cached_ids.clamp_min(0)
    log_q = (logits.gather(1, ids) - log_normaliser).masked_fill(~known, float("-inf"))
    p = cached_logprobs.float().exp()
    p_rest = (1 - p.sum(-1)).clamp_min(0)
    p = p.masked_fill(~known, 0)
    kept = p.sum(-1) + p_rest
    # fp16 storage can push a sum of logprobs a hair above 1; nothing is kept of a position only
    # when every cached token lacks a row and they hold all the mass
    kept = kept.clamp_min(torch.finfo(torch.float16).tiny)
    p, p_rest = p / kept[:, None], p_rest / kept

    q_cached = log_q.exp().sum(-1).clamp_max(1 - 1e-6)
    log_q_rest = torch.log1p(-q_cached)
    cross = (p * log_q.masked_fill(~known, 0)).sum(-1) + p_rest * log_q_rest
    entropy = torch.special.entr(p).sum(-1) + torch.special.entr(p_rest)
    best = cached_logprobs.float().masked_fill(~known, float("-inf"))
    agreed = logits.argmax(-1) == ids.gather(1, best.argmax(-1, keepdim=True))[:, 0]
    return -cross - entropy, agreed & known.any(-1)
