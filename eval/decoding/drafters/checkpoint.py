"""A draft that is a causal LM over the target's ids (its head may lack some of them).

Legend: B rows, G drafted tokens, R answer tokens, V the target's vocabulary, K rows of the draft's
head that may be drafted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.decoding.drafters.base import DecoderDrafter, Doubt, Proposal, Session, Texts
from eval.decoding.forward import Decoder, HiddenStates, starts
from eval.decoding.verification import Sampling, argmax, sample, warp


@dataclass(kw_only=True)
class CheckpointDrafter(DecoderDrafter):
    """token_ids: target id of each head row [K], None where head row i is target id i.

    The logits are cut *before* any warper, so that q is exactly what is sampled from.
    """

    token_ids: Tensor | None = None

    @property
    def q_rows(self) -> int:
        if self.token_ids is not None:
            return len(self.token_ids.unique())
        return self.rows or self.vocab_size

    def read(self, ids: Sequence[int], begins: bool = False) -> list[int]:
        """Target ids as the draft's own; begins: they are the beginning of a text."""
        return list(ids)

    def own_slots(self, slots: int) -> int:
        """How many of its own tokens a text of `slots` target tokens may have."""
        return slots

    def certainty(self, logits: Tensor, chosen: Tensor, q: Tensor | None) -> Tensor:
        """The draft's own probability [B] of the rows it chose, after the warpers if sampled."""
        probabilities = self.cut(logits).float().softmax(-1) if q is None else q
        return probabilities.gather(-1, chosen[:, None])[:, 0]

    def to_target_ids(self, rows: Tensor) -> Tensor:
        return rows if self.token_ids is None else self.token_ids[rows]

    def to_own_ids(self, rows: Tensor) -> Tensor:
        """What the draft reads after it has drafted these rows."""
        return self.to_target_ids(rows)

    def over_target_ids(self, q: Tensor) -> Tensor:
        """q [..., K] over the target's vocabulary [..., V]."""
        return over_target_ids(q, self.token_ids, self.vocab_size)

    def start(self, texts: Texts) -> Session:
        return TokenSession(self, texts)

    def teacher_forced(
        self, ids: list[int], text: list[int], samplings: Sequence[Sampling], states: HiddenStates
    ) -> Iterator[Tensor]:
        pieces = [self.read(ids, begins=True), *(self.read([i]) for i in text[:-1])]
        ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0) - 1
        # where its own ids outrun its context a draft proposes nothing
        fits = int((ends < self.decoder.context_length).sum())
        if fits == 0:
            for _ in samplings:
                yield torch.zeros((1, len(text), self.vocab_size), device=self.decoder.device)
            return
        read = [i for piece in pieces[:fits] for i in piece]
        logits = teacher_forced_logits(self.decoder, read, len(pieces[0]))
        logits = logits[:, (ends[:fits] - len(pieces[0]) + 1).to(logits.device)]
        for sampling in samplings:
            q = self.over_target_ids(warp(self.cut(logits), sampling))
            yield F.pad(q, (0, 0, 0, len(text) - fits))

    @torch.inference_mode()
    def probe(self, ids: list[int]) -> Tensor:
        own = [i % self.decoder.embedding.shape[0] for i in ids][: self.decoder.context_length]
        return teacher_forced_logits(self.decoder, own, 1)


def over_target_ids(q: Tensor, token_ids: Tensor | None, vocab_size: int) -> Tensor:
    """q [..., K] over the target's vocabulary [..., V], zero where the draft has no row.

    Rows of one target id (tokens of the same bytes) add up.
    """
    if token_ids is None:
        missing = vocab_size - q.shape[-1]
        assert missing >= 0
        return F.pad(q, (0, missing)) if missing else q
    full = torch.zeros((*q.shape[:-1], vocab_size), dtype=q.dtype, device=q.device)
    return full.scatter_add_(-1, token_ids.expand(q.shape), q)


def teacher_forced_logits(
    decoder: Decoder, ids: Sequence[int], prompt_length: int, states: HiddenStates | None = None
) -> Tensor:
    """Logits [1, R, V] after the prompt and after each later token of `ids`.

    states: as of Decoder.forward, at every one of the ids.
    """
    tokens = torch.tensor([ids], device=decoder.device)
    cache = decoder.new_cache(1, len(ids))
    prompt = dict.fromkeys(states or ())
    logits = decoder.forward(tokens[:, :prompt_length], 0, cache, True, prompt)
    if len(ids) > prompt_length:
        rest = decoder.forward(tokens[:, prompt_length:], prompt_length, cache, states=states)
        logits = torch.cat([logits, rest], dim=1)
        for layer, state in prompt.items():
            prompt[layer] = torch.cat([state, states[layer]], dim=1)  # type: ignore[index,list-item]
    if states:
        states.update(prompt)
    return logits


class TokenSession(Session):
    """A batch in progress: `texts` in the draft's ids, `seen` how much of each is in its cache."""

    def __init__(self, drafter: CheckpointDrafter, texts: Texts) -> None:
        self.drafter, self.sampling, self.generator = drafter, texts.sampling, texts.generator
        self.texts = [drafter.read(text, begins=True) for text in texts.ids]
        self.seen = [0] * len(self.texts)
        self.slots = drafter.own_slots(texts.slots)
        self.cache = drafter.decoder.new_cache(len(self.texts), self.slots)
        if len(self.texts) > 1:
            self.read_alone()

    def read_alone(self) -> None:
        """Every row reads its own text, all but the newest token."""
        for row, text in enumerate(self.texts):
            if new := text[self.seen[row] : -1]:
                tokens = torch.tensor([new], device=self.drafter.decoder.device)
                self.drafter.decoder.forward(tokens, self.seen[row], self.cache.row(row), True)
                self.seen[row] = len(text) - 1

    def propose(self, count: int, stop_below: float) -> Proposal:
        drafter, device = self.drafter, self.drafter.decoder.device
        lengths = [len(text) for text in self.texts]
        count = min(count, self.slots - max(lengths) + 1)  # no more than it has room to read
        # what is new to a row is one token, two after a full acceptance, more where others drafted
        # for it (lookup_first.py); all read as many, or where a row has not as many, one each
        width = max(length - seen for length, seen in zip(lengths, self.seen, strict=True))
        if width > min(lengths):
            self.read_alone()
            width = 1
        step = torch.tensor([text[-width:] for text in self.texts], device=device)
        start = starts([length - width for length in lengths])
        doubt = Doubt(stop_below, device)
        drafted: list[Tensor] = []
        qs: list[Tensor] = []
        while len(drafted) < count and not doubt.stops():
            logits = self.logits(step, start, len(drafted))
            start = start + step.shape[1]
            q = None
            if self.sampling.greedy:
                chosen = argmax(drafter.cut(logits))
            else:
                q = warp(drafter.cut(logits), self.sampling)
                chosen = sample(q, self.generator)
                qs.append(q)
            if stop_below:
                doubt.add(drafter.certainty(logits, chosen, q))
            drafted.append(drafter.to_target_ids(chosen)[:, None])
            step = drafter.to_own_ids(chosen)[:, None]
        if not drafted:
            return Proposal(step.new_zeros((len(lengths), 0)))
        self.seen = [length + len(drafted) - 1 for length in lengths]
        stand = doubt.standing() if stop_below else len(drafted)
        q = drafter.over_target_ids(torch.stack(qs[:stand], dim=1)) if qs else None
        sure = torch.stack(doubt.reached[:stand], dim=1) if stop_below else None
        return Proposal(torch.cat(drafted[:stand], dim=1), q, certainty=sure)

    def logits(self, step: Tensor, start: int | Tensor, drafted: int) -> Tensor:
        """The draft's [B, K] after `step`, its newest tokens [B, T]; `drafted` in this block."""
        return self.drafter.decoder.forward(step, start, self.cache, last_only=True)[:, -1]

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        for row, (text, new, n) in enumerate(zip(self.texts, emitted, accepted, strict=True)):
            # what it read of its own beyond the accepted tokens is stale and will be overwritten
            seen = min(self.seen[row], len(text) + n)
            text += self.drafter.read(new)
            # where the new tokens are nothing in its own ids, it reads its last one again
            self.seen[row] = min(seen, len(text) - 1)

    def keep(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.seen = [self.seen[row] for row in rows]
        self.cache = self.cache.keep_rows(torch.tensor(rows, device=self.drafter.decoder.device))
