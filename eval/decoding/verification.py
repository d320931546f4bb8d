"""Accept, reject, resample: the target's distribution stays (arXiv 2211.17192, 2403.10444).

Pure functions on tensors. Legend: G drafted tokens, V vocabulary, "…" dimensions in front that are
kept. p is the target's distribution and q the draft's, both after every logits processor, both over
the *target's* ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

# At a temperature above 0, how drafted tokens are judged: all as one block, or one after another.
# Both are exact; the block accepts as many tokens or more (arXiv 2403.10444).
Rule = Literal["block", "token"]

CDF_RUN = 256  # ids


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

    The order and the ties are those of transformers' logits processors: top-k keeps every token as
    likely as the k-th; top-p keeps the smallest set of the most likely tokens whose mass reaches
    top_p. Temperature 0 gives the one-hot distribution of the argmax.
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


def sample(probabilities: Tensor, generator: torch.Generator) -> Tensor:
    """One id for each row of [..., V], without leaving the device.

    One uniform number a row: exponential noise over V costs thirty times as much on a CPU.
    """
    shape, device = (*probabilities.shape[:-1], 1), probabilities.device
    uniform = torch.rand(shape, dtype=torch.float64, device=device, generator=generator)
    return inverse_cdf(probabilities, uniform)


def inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The id at which the sums of each row of [..., V] pass a number in [0, 1) [..., 1], fp64.

    First the run of CDF_RUN ids, then the id in it: all of V in fp64 takes six times as long.
    """
    lacking = -probabilities.shape[-1] % CDF_RUN
    whole = F.pad(probabilities, (0, lacking)) if lacking else probabilities
    runs = whole.unflatten(-1, (-1, CDF_RUN))
    # fp64, else the sums of 150k small terms would shift what the last tokens get
    sums = runs.sum(-1).double()
    number = uniform * sums.sum(-1, keepdim=True)
    run, before = _passed(sums, number)
    remainder = (number - before).clamp(min=0)
    terms = runs.gather(-2, run[..., None].expand(*run.shape, CDF_RUN))[..., 0, :].double()
    at, _ = _passed(terms, remainder)
    return (run * CDF_RUN + at)[..., 0]


def _passed(terms: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
    """Where the sums of terms [..., N] pass a number [..., 1], and the sum before that place."""
    cdf = terms.cumsum(-1)
    total = cdf[..., -1:]
    # strictly below the total, whatever rounding does: so the id found has a probability above 0
    below = torch.minimum(number, torch.nextafter(total, torch.zeros_like(total)))
    at = torch.searchsorted(cdf, below, right=True)
    return at, (cdf - terms).gather(-1, at)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The target's own choice of a token after each of [..., V]."""
    return argmax(logits) if sampling.greedy else sample(warp(logits, sampling), generator)


def verify(
    logits: Tensor,
    draft_tokens: Tensor,
    q: Tensor | None,
    sampling: Sampling,
    generator: torch.Generator,
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """How many of the drafted tokens [G] are accepted [], and the next token [].

    logits: the target's after the last token of the text and after each drafted one [G+1, V].
    q: the distributions that the draft tokens were sampled from [G, V]; None when greedy, and where
    they are not known. An unknown q is taken as one-hot at the drafted x: x is accepted with
    probability p(x), and else p without x is sampled. That is exact however x was found, as long
    as it depends on the past alone; the expected acceptance is sum q p, not sum min(q, p).
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
    """Accepted count [] and the next token [] when both models are greedy.

    target_tokens: argmax p at each of the G+1 positions [G+1]. draft_tokens: [G].
    """
    accepted = (target_tokens[:-1] == draft_tokens).long().cumprod(0).sum()
    return accepted, target_tokens.gather(0, accepted[None])[0]


def acceptance(p: Tensor, q: Tensor, draft_tokens: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
    """The chance that n drafted tokens are accepted [G+1], and what is sampled then [G+1, V].

    p: [G+1, V]. q: [G, V], exactly those that draft_tokens [G] were sampled from.

    "token" (arXiv 2211.17192): token x passes with a_i = min(1, p(x)/q(x)), as long as all before
    it did. After the first that does not, max(p - q, 0) is sampled.

    "block" (arXiv 2403.10444, algorithm 2): w_i = min(1, w_(i-1) p(x_i)/q(x_i)), w_0 = 1, weighs
    the first i tokens together. With r_i = max(w_i p - q, 0) after them and s_i its sum, the
    longest prefix is taken that passes with h_i = s_i / (s_i + 1 - w_i), or with w_i where it is
    the whole draft; then r_i is sampled. Its expected length is never below that of "token".

    Both sample p itself after the whole draft. How many tokens are drafted may depend on the text
    before them.
    """
    index = draft_tokens[:, None]
    tiny = torch.finfo(q.dtype).tiny  # 0 / 0 is 0: what p never says is never accepted
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
        # 0 / 0 where p = q: the next token passes in any case
        share = share.masked_fill((remaining == 0) & (weight == 1), 1)
        passes = torch.cat([share, weights[-1:]])
        fails = (1 - passes).flip(0).cumprod(0).flip(0)
        chances = F.pad(passes, (1, 0), value=1) * F.pad(fails, (0, 1), value=1)
    else:
        passes = ratio.clamp_max(1).cumprod(0)
        chances = F.pad(passes, (1, 0), value=1) - F.pad(passes, (0, 1))
    # where p = q up to rounding leaves nothing, p is right
    return chances, torch.where((mass <= 0)[:, None], p, residual)


def agreement(p: Tensor, q: Tensor) -> Tensor:
    """The acceptance rate at each position: sum_x min(p(x), q(x)) over [..., V] (1 - TV)."""
    return torch.minimum(p, q).sum(-1)
