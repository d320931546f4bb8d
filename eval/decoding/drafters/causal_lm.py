"""A draft that is a causal LM over the target's ids (its head may lack some of them).

Legend: B rows, T positions, R answer tokens, V the target's vocabulary, K rows of the draft's head
that may be drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.decoding.drafters.drafter import (
    DecoderDrafter,
    HeadDrafter,
    Logits,
    Proposal,
    Session,
    Texts,
)
from eval.decoding.forward import PIECE, Decoder, HiddenStates, in_pieces, starts


@dataclass(kw_only=True)
class CausalLMDrafter(DecoderDrafter, HeadDrafter):
    most: int | None = None  # tokens of a draft that it has learnt

    def read(self, ids: Sequence[int], begins: bool = False) -> list[int]:
        """Target ids as the draft's own; begins: they are the beginning of a text."""
        return list(ids)

    def own_slots(self, slots: int) -> int:
        """How many of its own tokens a text of `slots` target tokens may have."""
        return slots

    def to_own_ids(self, rows: Tensor) -> Tensor:
        """What the draft reads after it has drafted these rows."""
        return self.to_target_ids(rows)

    def start(self, texts: Texts) -> Session:
        return TokenSession(self, texts)

    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        pieces = [self.read(ids, begins=True), *(self.read([i]) for i in text[:-1])]
        ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0) - 1
        # where its own ids outrun its context a draft proposes nothing
        context, prompt = self.decoder.context_length, len(pieces[0])
        fits = int((ends < context).sum())
        read = [i for piece in pieces[: max(1, fits)] for i in piece][:context]
        logits = teacher_forced_logits(self.decoder, read, prompt)
        return logits[:, (ends[:fits] - prompt + 1).to(logits.device)], 0

    @torch.inference_mode()
    def probe(self, ids: list[int]) -> Tensor:
        draft_ids = [i % self.decoder.embedding.shape[0] for i in ids][
            : self.decoder.context_length
        ]
        return teacher_forced_logits(self.decoder, draft_ids, 1)


def teacher_forced_logits(
    decoder: Decoder, ids: Sequence[int], prompt_length: int, states: HiddenStates | None = None
) -> Tensor:
    """Logits [1, R, V] after the prompt and after each later token of `ids`.

    states: as of Decoder.forward, at every one of the ids.
    """
    tokens = torch.tensor([ids], device=decoder.device)
    cache = decoder.new_cache(1, len(ids))
    prompt = dict.fromkeys(states or ())
    *_, logits = in_pieces(decoder, tokens[:, :prompt_length], 0, cache, states=prompt)
    if len(ids) > prompt_length:
        tail = decoder.forward(tokens[:, prompt_length:], prompt_length, cache, states=states)
        logits = torch.cat([logits, tail], dim=1)
        for layer, state in prompt.items():
            prompt[layer] = torch.cat([state, states[layer]], dim=1)  # type: ignore[index,list-item]
    if states:
        states.update(prompt)
    return logits


class TokenSession(Session):
    """A batch in progress: `texts` in the draft's ids, `in_cache` how much of each it has read."""

    def __init__(self, drafter: CausalLMDrafter, texts: Texts) -> None:
        self.drafter, self.sampling, self.generator = drafter, texts.sampling, texts.generator
        self.texts = [drafter.read(text, begins=True) for text in texts.ids]
        self.in_cache = [0] * len(self.texts)
        self.slots = drafter.own_slots(texts.slots)
        self.cache = drafter.decoder.new_cache(len(self.texts), self.slots)
        if len(self.texts) > 1 or len(self.texts[0]) > PIECE:
            self.read_alone()

    def read_alone(self) -> None:
        """Every row reads its own text, all but the newest token."""
        for row, text in enumerate(self.texts):
            if new := text[self.in_cache[row] : -1]:
                tokens = torch.tensor([new], device=self.drafter.decoder.device)
                decoder, cache = self.drafter.decoder, self.cache.row(row)
                list(in_pieces(decoder, tokens, self.in_cache[row], cache))
                self.in_cache[row] = len(text) - 1

    def propose(self, count: int, stop_below: float) -> Proposal:
        drafter, device = self.drafter, self.drafter.decoder.device
        lengths = [len(text) for text in self.texts]
        # no more than it has room to read, or has learnt
        count = min(count, self.slots - max(lengths) + 1, drafter.most or count)
        # a row has one new token, two after a full acceptance, more where prompt lookup drafted for
        # it (lookup.py); all rows read as many, or one each where a text is shorter
        width = max(length - read for length, read in zip(lengths, self.in_cache, strict=True))
        if width > min(lengths):
            self.read_alone()
            width = 1
        step = torch.tensor([text[-width:] for text in self.texts], device=device)
        start = starts([length - width for length in lengths])
        if count < 1:
            return Proposal(step.new_zeros((len(lengths), 0)))
        logits = self.drafts(step, start, count)
        return drafter.in_turn(logits, count, stop_below, self.sampling, self.generator)

    def drafts(self, step: Tensor, start: int | Tensor, count: int) -> Logits:
        """Its logits after `step`, the newest tokens [B, T], and after each that it drafts."""
        lengths = [len(text) for text in self.texts]

        def logits(depth: int, before: Tensor | None) -> Tensor:
            nonlocal step, start
            if before is not None:
                step = self.drafter.to_own_ids(before)[:, None]
            scores = self.logits(step, start, depth)
            start = start + step.shape[1]
            self.in_cache = [length + depth for length in lengths]
            return scores

        return logits

    def logits(self, step: Tensor, start: int | Tensor, drafted: int) -> Tensor:
        """The draft's [B, K] after `step`, its newest tokens [B, T]; `drafted` in this block."""
        return self.drafter.decoder.forward(step, start, self.cache, last_only=True)[:, -1]

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        for row, (text, new, n) in enumerate(zip(self.texts, emitted, accepted, strict=True)):
            # what it read of its own beyond the accepted tokens is stale and will be overwritten
            valid = min(self.in_cache[row], len(text) + n)
            text += self.drafter.read(new)
            # where the new tokens are nothing in its own ids, it reads its last one again
            self.in_cache[row] = min(valid, len(text) - 1)

    def keep(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.in_cache = [self.in_cache[row] for row in rows]
        self.cache = self.cache.keep_rows(torch.tensor(rows, device=self.drafter.decoder.device))
