"""Drafts whose head's rows stand for target ids, their tokens chosen one after the other.

A draft that computes several positions at once knows at none of them which token it drafts before.
A sequential head of low rank adds that: r numbers read by the token before, a product with them
written onto the logits (Hydra, arXiv 2402.05109; DSpark's Markov head, arXiv 2607.05147).
Legend: B rows, G drafted tokens, V the target's vocabulary, K rows of the draft's head, r the rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.decoding.drafters.base import Doubt, Drafter, Proposal
from eval.decoding.forward import HiddenStates
from eval.decoding.verification import Sampling, argmax, sample, warp

# [B, K] of the token at a depth from 0 on, after the tokens drafted before it [B]: rows of the
# head, None for the first
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


@dataclass(kw_only=True)
class HeadDrafter(Drafter):
    """token_ids: target id of each head row [K], None where head row i is target id i.

    sequential: corrects each token by the one before; None for no such head. The logits are cut
    *before* any warper, so that q is exactly what is sampled from.
    """

    token_ids: Tensor | None = None
    sequential: SequentialHead | None = None

    def cut(self, logits: Tensor) -> Tensor:
        """Logits [..., K] over what may be drafted, of the head's."""
        return logits

    def corrected(self, logits: Tensor, before: Tensor | None) -> Tensor:
        """Logits [..., K] after the tokens `before` [...], rows of the head."""
        if self.sequential is None or before is None:
            return logits
        return logits + self.sequential(before)

    def certainty(self, q: Tensor, chosen: Tensor, logits: Tensor) -> Tensor:
        """The draft's own probability [B] of the rows it chose; logits: the head's, before the cut.

        q [B, K]: after the warpers if sampled.
        """
        return q.gather(-1, chosen[:, None])[:, 0]

    def to_target_ids(self, rows: Tensor) -> Tensor:
        return rows if self.token_ids is None else self.token_ids[rows]

    def rows_of(self, ids: Tensor) -> Tensor:
        """Each target id's row of the head [...], the number of rows where it has none."""
        if self.token_ids is None:
            return ids
        rows = torch.full((self.vocab_size,), len(self.token_ids), device=ids.device)
        rows[self.token_ids] = torch.arange(len(self.token_ids), device=ids.device)
        return rows[ids]

    def over_target_ids(self, q: Tensor) -> Tensor:
        """q [..., K] over the target's vocabulary [..., V], zero where the draft has no row.

        Rows of one target id (tokens of the same bytes) add up.
        """
        if self.token_ids is None:
            missing = self.vocab_size - q.shape[-1]
            assert missing >= 0
            return F.pad(q, (0, missing)) if missing else q
        full = torch.zeros((*q.shape[:-1], self.vocab_size), dtype=q.dtype, device=q.device)
        return full.scatter_add_(-1, self.token_ids.expand(q.shape), q)

    @abstractmethod
    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        """[1, N, K] before N tokens of `text`, and which is the first of them (`teacher_forced`).

        Before the others nothing would be proposed.
        """

    def teacher_forced(
        self, ids: list[int], text: list[int], samplings: Sequence[Sampling], states: HiddenStates
    ) -> Iterator[Tensor]:
        logits, first = self.text_logits(ids, text, states)
        for sampling in samplings:
            q = self.over_target_ids(warp(self.cut(logits), sampling))
            yield F.pad(q, (0, 0, first, len(text) - first - q.shape[1]))

    def in_turn(
        self,
        logits: Logits,
        count: int,
        stop_below: float,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Proposal:
        """`count` tokens, at least one, and no more once the draft doubts them (Session.propose).

        logits: before they are cut.
        """
        before: Tensor | None = None
        drafted: list[Tensor] = []
        qs: list[Tensor] = []
        doubt = Doubt(stop_below, generator.device)
        while len(drafted) < count and not doubt.stops():
            found = logits(len(drafted), before)
            scores = self.corrected(self.cut(found), before)
            if sampling.greedy:
                before = argmax(scores)
                q = scores.float().softmax(-1) if stop_below else None
            else:
                q = warp(scores, sampling)
                before = sample(q, generator)
                qs.append(q)
            if stop_below:
                assert q is not None
                doubt.add(self.certainty(q, before, found))
            drafted.append(before)
        stand = doubt.standing() if stop_below else len(drafted)
        return Proposal(
            self.to_target_ids(torch.stack(drafted[:stand], dim=1)),
            self.over_target_ids(torch.stack(qs[:stand], dim=1)) if qs else None,
            certainty=torch.stack(doubt.reached[:stand], dim=1) if stop_below else None,
        )


def on_target_ids(token_ids: Tensor | None, embedding: Tensor) -> dict[str, Any]:
    """What is known of a draft made for the target of that embedding [V, H], in its compact form.

    token_ids: as of a HeadDrafter.
    """
    coverage = 1.0 if token_ids is None else len(token_ids) / len(embedding)
    return {
        "vocab_size": len(embedding),
        "form": "compact",
        "vocabulary": {"relation": "identical", "strategy": "direct", "coverage": coverage},
        "token_ids": token_ids,
    }
