"""A language model that drafts all its tokens in one pass, from masks (PARD, arXiv 2504.18583).

Masks follow the newest token: the newest token predicts the first token of a draft, each mask a
later one. The mask is a token that occurs in no text; engines read its id from `pard_token` in
config.json. The model is a sibling, or the target's first layers; it is loaded as any sibling.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eval.decoding.drafters.causal_lm import CausalLMDrafter, TokenSession
from eval.decoding.drafters.drafter import Logits, Session, Text, timed_step
from eval.decoding.drafters.formats import DraftFormat
from eval.decoding.verification import Sampling


class Pard(DraftFormat):
    def longest(self, config: Mapping[str, Any]) -> int | None:
        return config.get("pard_tokens")


FORMAT = Pard()


@dataclass(kw_only=True)
class PardDrafter(CausalLMDrafter):
    mask: int  # the mask's token id

    def start(self, text: Text) -> Session:
        return PardSession(self, text)

    def draft_at_once(
        self, context_length: int, sampling: Sampling, count: int
    ) -> Callable[[], None]:
        cache = self.decoder.new_cache(1, context_length + count)
        return timed_step(self.decoder, cache, count, context_length, sampling, self.cut)


class PardSession(TokenSession):
    drafter: PardDrafter

    def __init__(self, drafter: PardDrafter, text: Text) -> None:
        super().__init__(drafter, text)
        if self.in_cache == 0:
            self.read_ahead()

    def drafts(self, count: int) -> Logits:
        """The logits of all drafted tokens, from one forward of the new tokens and the masks."""
        decoder, new = self.drafter.decoder, self.text[self.in_cache :]
        read = torch.tensor([[*new, *[self.drafter.mask] * (count - 1)]], device=decoder.device)
        scores = decoder.forward(read, self.in_cache, self.cache)[:, len(new) - 1 :]
        # the masks' slots in the cache will be overwritten
        self.in_cache = len(self.text)
        return lambda depth, _: scores[:, depth]
