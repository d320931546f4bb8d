"""Accept, reject, resample, keeping the target's distribution (arXiv 2211.17192, 2302.01318).

Pure functions on tensors. Legend: B rows, G drafted tokens, V vocabulary. p is the target's
distribution and q the draft's, both after every warper, both over the *target's* ids. counts [B]:
how many of its G tokens a row drafted, the rest being padding; None where all rows drafted G.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """The deployed sampling. temperature 0 is greedy, whatever top_k and top_p say."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(
                f"temperature {self.temperature} is not >= 0; use 0 for greedy decoding."
            )
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} keeps no token; use at least 1, or null for all.")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is not in (0, 1]; use 1 to keep every token.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def argmax(logits: Tensor) -> Tensor:
    """argmax over [..., V], the first of equals; torch's own takes five times as long in bf16."""
    return logits.max(-1).indices


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [..., V] in fp32: temperature, then top-k, then top-p, then softmax.

    The order and the ties are those of transformers' warpers: top-k keeps every token as likely as
    the k-th; top-p keeps the smallest set of the most likely tokens whose mass reaches top_p.
    Temperature 0 gives the one-hot distribution of the argmax.
    """
    if sampling.greedy:
        best = argmax(logits)[..., None]
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
    scores = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if sampling.top_p < 1:
        ordered, ids = scores.sort(dim=-1)  # ascending, so that the most likely one always stays
        outside = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        outside[..., -1] = False
        scores = scores.masked_fill(
            torch.zeros_like(outside).scatter_(-1, ids, outside), float("-inf")
        )
    return scores.softmax(-1)


def sample(probabilities: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """One id for each row of [..., V], without leaving the device.

    One uniform number a row: exponential noise over V costs thirty times as much on a CPU.
    """
    shape, device = (*probabilities.shape[:-1], 1), probabilities.device
    uniform = torch.rand(shape, dtype=torch.float64, device=device, generator=generator)
    return inverse_cdf(probabilities, uniform)


def inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The id at which the sums of each row of [..., V] pass a number in [0, 1) [..., 1], fp64."""
    # fp64, else the sums of 150k small terms would shift what the last tokens get
    cdf = probabilities.cumsum(-1, dtype=torch.float64)
    total = cdf[..., -1:]
    # strictly below the total also when rounding says otherwise: the id found then has p > 0
    below = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cdf, below, right=True)[..., 0]


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The target's own choice of a token after each of [..., V]."""
    return argmax(logits) if sampling.greedy else sample(warp(logits, sampling), generator)


def verify(
    logits: Tensor,
    draft_tokens: Tensor,
    q: Tensor | None,
    counts: Tensor | None,
    sampling: Sampling,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """How many of the drafted tokens [B, G] are accepted [B], and the next token [B].

    logits: the target's after the last token of the text and after each drafted one [B, G+1, V].
    q: the distributions that the draft tokens were sampled from [B, G, V]; None when greedy, and
    where they are not known (`verify_without_q`).
    """
    if draft_tokens.shape[1] == 0:
        return draft_tokens.new_zeros(len(logits)), choose(logits[:, -1], sampling, generator)
    if sampling.greedy:
        return verify_greedy(argmax(logits), draft_tokens, counts)
    p = warp(logits, sampling)
    if q is None:
        return verify_without_q(p, draft_tokens, generator, counts)
    return verify_sampled(p, q, draft_tokens, generator, counts)


def verify_greedy(
    target_tokens: Tensor, draft_tokens: Tensor, counts: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Accepted counts [B] and the next token [B] when both models are greedy.

    target_tokens: argmax p at each of the G+1 positions [B, G+1]. draft_tokens: [B, G].
    """
    agreed = target_tokens[:, :-1] == draft_tokens
    accepted = _leading(agreed, counts)
    return accepted, target_tokens.gather(1, accepted[:, None])[:, 0]


def _leading(passed: Tensor, counts: Tensor | None) -> Tensor:
    """How many tokens of each row [B, G] passed before the first that did not, padding left out."""
    if counts is not None:
        passed = passed & (torch.arange(passed.shape[1], device=passed.device) < counts[:, None])
    return passed.long().cumprod(dim=1).sum(dim=1)


def passes(p: Tensor, q: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Whether each token passes, given its p(x) and q(x) [...]: with probability min(1, p/q)."""
    uniform = torch.rand(p.shape, device=p.device, dtype=p.dtype, generator=generator)
    # strictly below: a token with p(x) = 0 must never pass, also when the uniform number is 0
    return uniform * q < p


def verify_sampled(
    p: Tensor,
    q: Tensor,
    draft_tokens: Tensor,
    generator: torch.Generator | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Accepted counts [B] and the next token [B] by exact rejection sampling.

    p: [B, G+1, V]; q: [B, G, V], the very distributions the draft tokens [B, G] were sampled from.
    Token x is accepted with probability min(1, p(x)/q(x)). At the first rejection the next token is
    drawn from max(p - q, 0) normalised; after a full acceptance from p (the bonus token). Each
    emitted token then has distribution p exactly, given the ones before it.
    """
    index = draft_tokens[..., None]
    p_drafted = p[:, :-1].gather(2, index)[..., 0]
    q_drafted = q.gather(2, index)[..., 0]
    accepted = _leading(passes(p_drafted, q_drafted, generator), counts)
    at = accepted[:, None, None].expand(-1, 1, p.shape[2])
    p_next = p.gather(1, at)[:, 0]
    q_next = torch.cat([q, torch.zeros_like(q[:, :1])], dim=1).gather(1, at)[:, 0]
    if counts is not None:  # a row that drafted no more has no q there: its bonus token
        q_next = q_next.masked_fill((accepted == counts)[:, None], 0)
    residual = (p_next - q_next).clamp_min_(0)
    # p = q up to rounding leaves no residual, and such a rejection has probability ~0: p is right
    # then
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_next)
    return accepted, sample(residual, generator)


def verify_without_q(
    p: Tensor,
    draft_tokens: Tensor,
    generator: torch.Generator | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `verify_sampled` for drafts whose distribution over target ids is not known.

    Token x is accepted with probability p(x); at the first rejection the next one is drawn from p
    without x, normalised. Exact however x was found, as long as it depends on the past alone: it is
    the rule for a q that is one-hot at x. Expected acceptance is sum q p, not sum min(q, p).
    """
    at_x = torch.zeros_like(p[:, :-1]).scatter_(2, draft_tokens[..., None], 1.0)
    return verify_sampled(p, at_x, draft_tokens, generator, counts)


def agreement(p: Tensor, q: Tensor) -> Tensor:
    """alpha at each position: sum_x min(p(x), q(x)) over [..., V], in fp32 (1 - TV)."""
    return torch.minimum(p, q).sum(-1)
