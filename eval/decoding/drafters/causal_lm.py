"""A draft that is a causal LM over the target's ids; its head may lack some ids.

Legend: R output tokens, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.decoding.drafters.drafter import (
    HeadDrafter,
    Logits,
    Proposal,
    Session,
    Text,
    no_draft,
    timed_step,
)
from eval.decoding.forward import PIECE, Decoder, HiddenStates, in_pieces
from eval.decoding.verification import Sampling


@dataclass(kw_only=True)
class CausalLMDrafter(HeadDrafter):
    """entries: number of head entries that may be drafted; later ones are padding. None: all."""

    decoder: Decoder
    entries: int | None = None

    def __post_init__(self) -> None:
        self.kv_bytes_per_token = self.decoder.new_cache(1, 1).bytes_per_token()

    def cut(self, logits: Tensor) -> Tensor:
        return logits[..., : self.entries]

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        # with another tokenizer, the draft's context may be shorter than the target's
        position = min(context_length, self.decoder.context_length - 1)
        cache = self.decoder.new_cache(1, position + 1)
        return timed_step(self.decoder, cache, 1, position, sampling, self.cut)

    def read(self, ids: Sequence[int], begins: bool = False) -> list[int]:
        """Target ids as draft ids. begins: whether the ids begin a text."""
        return list(ids)

    def own_slots(self, slots: int) -> int:
        """The most draft tokens of a text of up to `slots` target tokens."""
        return slots

    def to_own_ids(self, entries: Tensor) -> Tensor:
        """The draft's ids of these entries of its head."""
        return self.to_target_ids(entries)

    def start(self, text: Text) -> Session:
        return TokenSession(self, text)

    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        pieces = [self.read(ids, begins=True), *(self.read([i]) for i in text[:-1])]
        ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0) - 1
        # a draft proposes nothing once the text in its ids is longer than its context
        context, prompt = self.decoder.context_length, len(pieces[0])
        fits = int((ends < context).sum())
        read = [i for piece in pieces[: max(1, fits)] for i in piece][:context]
        logits = teacher_forced_logits(self.decoder, read, prompt)[0]
        return logits[(ends[:fits] - prompt + 1).to(logits.device)], 0


def teacher_forced_logits(
    decoder: Decoder,
    ids: Sequence[int],
    prompt_length: int,
    states: HiddenStates | None = None,
) -> Tensor:
    """Logits [1, R, V] after the prompt and after each later token of `ids`.

    states: as in Decoder.forward, at all of the ids.
    """
    tokens = torch.tensor([ids], device=decoder.device)
    cache = decoder.new_cache(1, len(ids))
    prompt = dict.fromkeys(states or ())
    *_, logits = in_pieces(decoder, tokens[:, :prompt_length], 0, cache, states=prompt)
    if len(ids) > prompt_length:
        response, plain = tokens[:, prompt_length:], cache.unrecorded()
        tail = decoder.forward(response, prompt_length, plain, states=states)
        logits = torch.cat([logits, tail], dim=1)
        for layer, state in prompt.items():
            prompt[layer] = torch.cat([state, states[layer]], dim=1)  # type: ignore[index,list-item]
    if states:
        states.update(prompt)
    return logits


class TokenSession(Session):
    """`text`: the text in the draft's ids. `in_cache`: number of these ids in the cache."""

    def __init__(self, drafter: CausalLMDrafter, text: Text) -> None:
        self.drafter, self.sampling, self.generator = drafter, text.sampling, text.generator
        self.text = drafter.read(text.ids, begins=True)
        self.in_cache = 0
        self.slots = drafter.own_slots(text.slots)
        # with another tokenizer, a token of the target may become several here: the cache grows
        expected = len(self.text) + 2 * (text.slots - len(text.ids))
        self.cache = drafter.decoder.new_cache(1, min(self.slots, expected))
        if len(self.text) > PIECE:
            self.read_ahead()

    def read_ahead(self) -> None:
        """Read the text except its newest token, if the text fits into the cache."""
        if 1 < len(self.text) <= self.slots:
            decoder = self.drafter.decoder
            tokens = torch.tensor([self.text[:-1]], device=decoder.device)
            list(in_pieces(decoder, tokens, 0, self.cache))
            self.in_cache = len(self.text) - 1

    def propose(self, count: int) -> Proposal:
        # limited by the slots of the cache, and by the draft length of the training
        count = min(count, self.slots - len(self.text) + 1, self.drafter.most or count)
        if count < 1:
            return no_draft(self.drafter.decoder.device)
        return self.drafter.in_turn(self.drafts(count), count, self.sampling, self.generator)

    def drafts(self, count: int) -> Logits:
        """A function that returns the logits of each of `count` drafted tokens."""
        return self.logits

    def logits(self, depth: int, before: Tensor | None) -> Tensor:
        decoder = self.drafter.decoder
        if before is None:  # one new token; two if all were accepted; more after n-grams
            read = torch.tensor(self.text[self.in_cache :], device=decoder.device)
        else:
            read = self.drafter.to_own_ids(before)
        if (needed := self.in_cache + len(read)) > self.cache.slots:
            self.cache = self.cache.resized(min(2 * needed, self.slots))
        scores = decoder.forward(read[None], self.in_cache, self.cache, last_only=True)[:, -1]
        self.in_cache = len(self.text) + depth
        return scores

    def commit(self, emitted: list[int], accepted: int, states: HiddenStates) -> None:
        # slots of rejected tokens are stale and will be overwritten
        valid = min(self.in_cache, len(self.text) + accepted)
        self.text += self.drafter.read(emitted)
        # if the new tokens have no text in the draft's ids, the last token is read again
        self.in_cache = min(valid, len(self.text) - 1)
