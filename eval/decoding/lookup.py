"""Prompt lookup: a rival that needs no model. It drafts what followed the last tokens before.

The longest of the last 3, 2 or 1 tokens that stand earlier in the text are looked up, the latest
such place taken, and the token after it drafted (arXiv 2304.04487 drafts from references like
this). Where nothing was found the distribution is flat, which a draft that stops in doubt obeys.
It stands in the decoder loop as a draft like any other, so its output is the target's as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.decoding.drafting import Draft
from eval.decoding.drafts import Candidate, Target
from eval.decoding.forward import KVCache

LOOKUP = "prompt-lookup"  # what eval.run --draft calls it
LONGEST = 3


@dataclass
class LookupCache(KVCache):
    """The text of each row: all that a lookup has to remember."""

    texts: list[list[int]] = field(default_factory=list)

    def row(self, row: int) -> LookupCache:
        return LookupCache([], [], [self.texts[row]])

    def keep_rows(self, rows: Tensor) -> LookupCache:
        return LookupCache([], [], [self.texts[row] for row in rows.tolist()])


class LookupDecoder:
    """`Decoder` whose logits say which token followed the last ones before."""

    def __init__(self, target: Target) -> None:
        decoder = target.decoder
        self.embedding, self.device, self.dtype = decoder.embedding, decoder.device, torch.float32
        self.context_length = decoder.context_length

    def own_bytes(self) -> int:
        return 0

    def new_cache(self, rows: int, slots: int) -> KVCache:
        return LookupCache([], [], [[] for _ in range(rows)])

    def forward(
        self, tokens: Tensor, start: int | Tensor, cache: KVCache, last_only: bool = False
    ) -> Tensor:
        assert isinstance(cache, LookupCache)
        rows, width = tokens.shape
        starts = [start] * rows if isinstance(start, int) else start.tolist()
        first = width - 1 if last_only else 0
        vocab = self.embedding.shape[0]
        logits = torch.zeros((rows, width - first, vocab), device=self.device)
        for row, (text, new, at) in enumerate(
            zip(cache.texts, tokens.tolist(), starts, strict=True)
        ):
            text += [-1] * (at - len(text))  # a step that is only timed has no text before it
            text[at:] = new
            for i in range(first, width):
                token = following(text[: at + i + 1])
                if token is not None:
                    logits[row, i - first] = float("-inf")
                    logits[row, i - first, token] = 0.0
        return logits


def following(text: list[int]) -> int | None:
    """The token after the latest earlier place of the last tokens of `text`; None without one."""
    for length in range(min(LONGEST, len(text) - 1), 0, -1):
        last = text[-length:]
        for i in range(len(text) - length - 1, -1, -1):
            if text[i : i + length] == last:
                return text[i + length]
    return None


def lookup_candidate(name: str, target: Target) -> Candidate:
    """Prompt lookup as a draft to be measured."""
    return Candidate(
        name=name,
        path=LOOKUP,
        form="no model",
        vocabulary={"relation": "identical", "strategy": "prompt lookup", "coverage": 1.0},
        draft=Draft(LookupDecoder(target)),
        draft_bytes=0,
        full_form_bytes=None,
    )
