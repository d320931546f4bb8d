"""Tokens chosen one after the other from logits that were computed for all of them at once.

A draft that computes several positions at once knows at none of them which token it drafts before.
A sequential head of low rank adds that: r numbers read by the token before, a product with them
written onto the logits (Hydra, arXiv 2402.05109; DSpark's Markov head, arXiv 2607.05147).
Legend: B rows, G drafted tokens, V the target's vocabulary, K rows of the draft's head, r the rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.decoding.drafters.base import Doubt, Proposal
from eval.decoding.drafters.checkpoint import over_target_ids
from eval.decoding.verification import Sampling, argmax, sample, warp

# [B, K] of the token at a depth from 0 on, after the tokens before it [B]: rows of the head, None
# where the first logits know the newest one
Logits = Callable[[int, Tensor | None], Tensor]


class SequentialHead(NamedTuple):
    """read [K+1, r]: of the token before, by its row of the head; write [K, r].

    A token that the head has no row for reads the last one, which is zero: it adds nothing.
    """

    read: Tensor
    write: Tensor

    def __call__(self, before: Tensor) -> Tensor:
        """What the tokens before, as rows of the head [...], add to the logits [..., K]."""
        return F.linear(self.read[before], self.write)


class TokensInTurn(NamedTuple):
    """How a draft's tokens are chosen, whatever computed their logits.

    token_ids: target id of each row of the head [K], None where row i is target id i. sequential:
    None for no such head.
    """

    vocab_size: int
    token_ids: Tensor | None
    sequential: SequentialHead | None

    def rows_of(self, ids: Tensor) -> Tensor:
        """Each target id's row of the head [...], the number of rows where it has none."""
        if self.token_ids is None:
            return ids
        rows = torch.full((self.vocab_size,), len(self.token_ids), device=ids.device)
        rows[self.token_ids] = torch.arange(len(self.token_ids), device=ids.device)
        return rows[ids]

    def ids_of(self, rows: Tensor) -> Tensor:
        """The target ids of rows of the head."""
        return rows if self.token_ids is None else self.token_ids[rows]

    def corrected(self, logits: Tensor, before: Tensor | None) -> Tensor:
        """Logits [..., K] after the tokens `before` [...], rows of the head."""
        if self.sequential is None or before is None:
            return logits
        return logits + self.sequential(before)

    def over_target_ids(self, q: Tensor) -> Tensor:
        return over_target_ids(q, self.token_ids, self.vocab_size)

    def propose(
        self,
        logits: Logits,
        before: Tensor | None,
        count: int,
        stop_below: float,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Proposal:
        """`count` tokens, at least one, and no more once the draft doubts them (Session.propose).

        before: the row of the newest token [B]; None where the first logits know it.
        """
        drafted: list[Tensor] = []
        qs: list[Tensor] = []
        doubt = Doubt(stop_below, generator.device)
        while len(drafted) < count and not doubt.stops():
            scores = self.corrected(logits(len(drafted), before), before)
            if sampling.greedy:
                before = argmax(scores)
                q = scores.float().softmax(-1) if stop_below else None
            else:
                q = warp(scores, sampling)
                before = sample(q, generator)
                qs.append(q)
            if stop_below:
                assert q is not None
                doubt.add(q.gather(-1, before[:, None])[:, 0])
            drafted.append(before)
        stand = doubt.standing() if stop_below else len(drafted)
        rows = torch.stack(drafted[:stand], dim=1)
        return Proposal(
            self.ids_of(rows),
            self.over_target_ids(torch.stack(qs[:stand], dim=1)) if qs else None,
            certainty=torch.stack(doubt.reached[:stand], dim=1) if stop_below else None,
        )
