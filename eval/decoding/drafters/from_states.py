"""Drafters that read the target's hidden states and no text but the newest token.

The target has read all but the newest token of a text; what they draft from is its states before
that one. They have no cache of keys and values. Legend: B rows, T positions, L layers read, H the
target's hidden size, K rows of the output head.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.decoding.drafters.base import Proposal, Session, Texts
from eval.decoding.drafters.in_turn import HeadDrafter, Logits
from eval.decoding.forward import HiddenStates
from eval.decoding.weights import Product


@dataclass(kw_only=True)
class StateDrafter(HeadDrafter):
    """embedding: the target's [V, H]. head: the output head. longest: how many tokens a draft has
    at most.
    """

    alike: bool = False
    one_form: bool = True
    embedding: Tensor
    head: Product
    longest: int

    @abstractmethod
    def first_logits(self, states: Tensor, newest: Tensor) -> Tensor:
        """[B, T, K] of a draft's first token; states: before the newest token [B, T, L * H]."""

    @abstractmethod
    def block_logits(self, states: Tensor, newest: Tensor) -> Logits:
        """Those of a whole draft, from the states [B, 1, L * H] before the newest token [B]."""

    def start(self, texts: Texts) -> Session:
        return StateSession(self, texts)

    @torch.inference_mode()
    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        """Of the first token of a draft: none where no token stands before the newest."""
        newest = torch.tensor([[*ids, *text][1:-1]], device=self.embedding.device)
        known = self.first_logits(self.side_by_side(states, self.embedding.dtype)[:, :-1], newest)
        known = known[:, max(0, len(ids) - 2) :]
        return known, len(text) - known.shape[1]


class StateSession(Session):
    """`states` [B, 1, L * H]: the target's before the newest token of each row; `newest` [B]."""

    def __init__(self, drafter: StateDrafter, texts: Texts) -> None:
        self.drafter, self.sampling, self.generator = drafter, texts.sampling, texts.generator
        dtype, device = drafter.embedding.dtype, drafter.embedding.device
        self.states = torch.cat([drafter.side_by_side(one, dtype)[:, -1:] for one in texts.states])
        self.newest = torch.tensor([text[-1] for text in texts.ids], device=device)

    @torch.inference_mode()
    def propose(self, count: int, stop_below: float) -> Proposal:
        drafter = self.drafter
        count = min(count, drafter.longest)
        if count < 1:
            return Proposal(self.newest.new_zeros((len(self.newest), 0)))
        logits = drafter.block_logits(self.states, self.newest)
        return drafter.in_turn(logits, count, stop_below, self.sampling, self.generator)

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        found = self.drafter.side_by_side(states, self.drafter.embedding.dtype)
        # of what was emitted the target has read all but the last, which is the newest now
        read = torch.tensor([len(new) - 1 for new in emitted], device=found.device)
        rows = torch.arange(len(emitted), device=found.device)
        self.states = found[rows, read][:, None]
        self.newest = torch.tensor([new[-1] for new in emitted], device=found.device)

    def keep(self, rows: list[int]) -> None:
        at = torch.tensor(rows, device=self.newest.device)
        self.states, self.newest = self.states[at], self.newest[at]
