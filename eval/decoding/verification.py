"""Verification that keeps the target's distribution unchanged (arXiv 2211.17192, 2403.10444).

Pure functions on tensors. Legend: G drafted tokens, V the target's vocabulary, "…" any leading
dimensions. p is the target's distribution and q the draft's, both after all logits processors and
both over the *target's* ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from align.errors import UserError

# How sampled tokens are verified: all drafted tokens as one block, or one token after another.
# Both rules are exact; "block" never accepts fewer tokens in the mean (arXiv 2403.10444).
Rule = Literal["block", "token"]
# How a draft proposes tokens if tokens are sampled: its argmax, so that q is one-hot, or a sample
# of q. Names and values are those of vLLM.
SampleMethod = Literal["greedy", "probabilistic"]

CDF_RUN = 256  # number of ids whose probabilities are summed first


@dataclass(frozen=True)
class Sampling:
    """The deployed sampling; temperature 0 is greedy and ignores top_k and top_p."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise UserError(
                f"temperature {self.temperature} is not >= 0; use 0 for greedy decoding."
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k {self.top_k} keeps no token; use at least 1, or null for all.")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p} is not in (0, 1]; use 1 to keep every token.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def argmax(logits: Tensor) -> Tensor:
    """argmax over [..., V]; of equal logits, the first id. torch.argmax is 5x slower in bf16."""
    return logits.max(-1).indices


def warp(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities [..., V] in fp32: temperature, then top-k, then top-p, then softmax.

    Order and ties are those of transformers' logits processors: top-k keeps every token that is as
    likely as the k-th; top-p keeps the smallest set of likeliest tokens whose total probability
    reaches top_p. Temperature 0 gives the one-hot distribution of the argmax.
    """
    if sampling.greedy:
        best = argmax(logits)[..., None]
        return torch.zeros_like(logits, dtype=torch.float32).scatter_(-1, best, 1.0)
    scores = logits.float() / sampling.temperature
    if sampling.top_k is not None and sampling.top_k < scores.shape[-1]:
        kth = scores.topk(sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, float("-inf"))
    if sampling.top_p < 1:
        ordered, ids = scores.sort(dim=-1)
        outside = ordered.softmax(-1).cumsum(-1) <= 1 - sampling.top_p
        outside[..., -1] = False  # the likeliest token always stays
        scores = scores.masked_fill(
            torch.zeros_like(outside).scatter_(-1, ids, outside), float("-inf")
        )
    return scores.softmax(-1)


def sample(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One sampled id for each row of [..., V] -> [...]; nothing is transferred to the host.

    Each row takes one uniform number. Exponential noise over V would take 30x as long on a CPU.
    """
    shape, device = (*probabilities.shape[:-1], 1), probabilities.device
    uniform = torch.rand(shape, dtype=torch.float64, device=device, generator=generator)
    return inverse_cdf(probabilities, uniform)


def inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The id at which the cumulative probability of each row [..., V] passes `uniform` -> [...].

    uniform: numbers in [0, 1) in fp64 [..., 1]. The run of CDF_RUN ids is found first, then the id
    in it, because fp64 sums over all of V take six times as long.
    """
    lacking = -probabilities.shape[-1] % CDF_RUN
    whole = F.pad(probabilities, (0, lacking)) if lacking else probabilities
    runs = whole.unflatten(-1, (-1, CDF_RUN))
    # fp64, because errors in fp32 sums of 150k small terms would change the last tokens' shares
    sums = runs.sum(-1).double()
    number = uniform * sums.sum(-1, keepdim=True)
    run, before = _passed(sums, number)
    remainder = (number - before).clamp(min=0)
    terms = runs.gather(-2, run[..., None].expand(*run.shape, CDF_RUN))[..., 0, :].double()
    at, _ = _passed(terms, remainder)
    return (run * CDF_RUN + at)[..., 0]


def _passed(terms: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """The index at which the sum of terms [..., N] passes `number` [..., 1]; the sum before it."""
    cdf = terms.cumsum(-1)
    total = cdf[..., -1:]
    # strictly below the total in spite of rounding, so that the id has a probability above 0
    below = torch.minimum(number, torch.nextafter(total, torch.zeros_like(total)))
    at = torch.searchsorted(cdf, below, right=True)
    return at, (cdf - terms).gather(-1, at)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The target's choice of a token [...] from its logits [..., V]: argmax, or sampled."""
    return argmax(logits) if sampling.greedy else sample(warp(logits, sampling), generator)


def verify(
    logits: Tensor,
    draft_tokens: Tensor,
    q: Tensor | None,
    sampling: Sampling,
    generator: torch.Generator,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """The number of accepted drafted tokens [], and the next token [].

    logits: the target's, after the last token of the text and after each drafted token [G+1, V].
    q: the distributions that the drafted tokens [G] were sampled from [G, V]; None when greedy, or
    if q is unknown. An unknown q is replaced by a one-hot q at the drafted token x: x is accepted
    with probability p(x); otherwise p without x is sampled. This is exact if x depends only on
    earlier tokens. The expected acceptance rate is then sum q p instead of sum min(q, p).
    """
    if len(draft_tokens) == 0:
        return draft_tokens.new_zeros(()), choose(logits[-1], sampling, generator)
    if sampling.greedy:
        return verify_greedy(argmax(logits), draft_tokens)
    p = warp(logits, sampling)
    if q is None:
        q = torch.zeros_like(p[:-1]).scatter_(-1, draft_tokens[:, None], 1.0)
    chances, residual = acceptance(p, q, draft_tokens, rule)
    accepted = sample(chances, generator)
    return accepted, sample(residual.index_select(0, accepted[None])[0], generator)


def verify_greedy(target_tokens: Tensor, draft_tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The number of accepted tokens [] and the next token [] when both models are greedy.

    target_tokens: argmax p at each position [G+1]. draft_tokens: [G].
    """
    accepted = (target_tokens[:-1] == draft_tokens).long().cumprod(0).sum()
    return accepted, target_tokens.gather(0, accepted[None])[0]


def acceptance(p: Tensor, q: Tensor, draft_tokens: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """Probability that n = 0..G tokens are accepted [G+1], weights of the next token [G+1, V].

    p: [G+1, V]. q: [G, V], exactly the distributions that draft_tokens [G] were sampled from.

    "token" (arXiv 2211.17192): token x_i passes with probability min(1, p(x_i)/q(x_i)) if all
    tokens before it passed. At the first token that fails, max(p - q, 0) is sampled instead.

    "block" (arXiv 2403.10444, algorithm 2): w_i = min(1, w_(i-1) p(x_i)/q(x_i)), w_0 = 1, is the
    weight of the first i tokens, r_i = max(w_i p - q, 0) the residual after them, s_i its sum. The
    first i tokens pass with probability s_i / (s_i + 1 - w_i), the whole draft with w_G. The
    longest prefix that passes is accepted, and then r_i is sampled.

    After the whole draft, both sample p. The draft length may depend on the text before the draft.
    """
    index = draft_tokens[:, None]
    tiny = torch.finfo(q.dtype).tiny  # 0 / 0 becomes 0: a token with p = 0 is never accepted
    ratio = (p[:-1].gather(-1, index) / q.gather(-1, index).clamp_min(tiny))[:, 0]
    weights = torch.ones_like(p[:, 0])
    if rule == "block":
        for i in range(len(ratio)):
            weights[i + 1] = (weights[i] * ratio[i]).clamp_max(1)
    residual = torch.cat([(weights[:-1, None] * p[:-1] - q).clamp_min(0), p[-1:]])
    mass = residual.sum(-1)
    if rule == "block":
        weight, remaining = weights[1:-1], mass[1:-1]
        share = remaining / (remaining + (1 - weight))  # in this order: a small term is not lost
        # 0 / 0 if p = q: the next token passes in any case
        share = share.masked_fill((remaining == 0) & (weight == 1), 1)
        passes = torch.cat([share, weights[-1:]])
        fails = (1 - passes).flip(0).cumprod(0).flip(0)
        chances = F.pad(passes, (1, 0), value=1) * F.pad(fails, (0, 1), value=1)
    else:
        passes = ratio.clamp_max(1).cumprod(0)
        chances = F.pad(passes, (1, 0), value=1) - F.pad(passes, (0, 1))
    # if p = q up to rounding, the residual is empty, and p is the right distribution
    return chances, torch.where((mass <= 0)[:, None], p, residual)


def agreement(p: Tensor, q: Tensor) -> Tensor:
    """The acceptance rate [...]: sum_x min(p(x), q(x)) over [..., V], 1 - total variation."""
    return torch.minimum(p, q).sum(-1)
