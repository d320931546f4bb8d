"""Drafts, and what each does for one text: draft the next tokens, then take in what became of them.

A draft may have ids of its own; what it proposes is always in the target's. Legend: V the target's
vocabulary, K rows of the draft's head that may be drafted, G drafted tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from align.side import Side
from align.token_bytes import unfinished
from align.vocab_map import Reader
from eval.decoding.forward import Decoder
from eval.decoding.verification import Sampling, likeliest, sample, warp

# What a string-level draft reads anew each block, in target tokens: enough for the cuts to settle.
REREAD = 16
# Draft tokens behind the proposal whose first target token counts for a string-level alpha.
ALPHA_STEPS = 3


class Proposal(NamedTuple):
    """tokens: in target ids [1, G].

    q: the very distributions that they were sampled from, over target ids [1, G, V]; None when
    greedy, and where nobody knows them (verify_without_q).
    """

    tokens: Tensor
    q: Tensor | None


class Session(Protocol):
    """One draft at work on one text."""

    def propose(self, count: int, stop_below: float = 0.0) -> Proposal:
        """At most `count` tokens, and no more once the draft doubts them (DraftLength)."""
        ...

    def extend(self, emitted: list[int], accepted: int) -> None:
        """The text goes on by `emitted` target ids, the first `accepted` of them as proposed."""
        ...


@dataclass(frozen=True)
class Draft:
    """A draft that proposes token by token: over the target's ids, or by a map.

    token_ids: target id of each row that may be drafted [K], None when rows are ids. rows: the
    head's rows that may be drafted, the first so many or these [K]; None for all. Both together cut
    the logits *before* any warper, so that q is exactly what is sampled from. reader: how the draft
    reads target ids, None when they are its own; feed: what it reads for each such row [K].
    """

    decoder: Decoder
    token_ids: Tensor | None = None
    rows: int | Tensor | None = None
    reader: Reader | None = None
    feed: Tensor | None = None

    def cut(self, logits: Tensor) -> Tensor:
        """Logits [..., K] over what may be drafted."""
        if isinstance(self.rows, Tensor):
            # torch selects in bf16 three times as slowly as it converts and selects in fp32
            return logits.float().index_select(-1, self.rows)
        return logits[..., : self.rows]

    def reach(self, logits: Tensor) -> float:
        """Share of the draft's own distribution (logits [1, D]) that may be drafted at all."""
        if not isinstance(self.rows, Tensor):
            return 1.0
        return float(self.cut(logits.float().softmax(-1)).sum())

    def to_target_ids(self, rows: Tensor) -> Tensor:
        return rows if self.token_ids is None else self.token_ids[rows]

    def over_target_ids(self, q: Tensor, vocab_size: int) -> Tensor:
        """q [..., K] over the target's vocabulary [..., V], zero where the draft has no row.

        Rows of one target id (tokens spelt alike) add up.
        """
        if self.token_ids is None:
            missing = vocab_size - q.shape[-1]
            assert missing >= 0
            return F.pad(q, (0, missing)) if missing else q
        full = torch.zeros((*q.shape[:-1], vocab_size), dtype=q.dtype, device=q.device)
        return full.scatter_add_(-1, self.token_ids.expand(q.shape), q)

    def start(
        self,
        ids: list[int],
        slots: int,
        vocab_size: int,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> TokenSession:
        """A session on the text `ids`, which will have at most `slots` target tokens."""
        return TokenSession(self, ids, slots, vocab_size, sampling, generator)

    def teacher_forced(
        self, ids: list[int], text: list[int], vocab_size: int, samplings: Sequence[Sampling]
    ) -> Iterator[Tensor]:
        """q [1, R, V] before each token of `text` [R], at each sampling, from one pass."""
        if self.reader is None:
            pieces = [ids, *([i] for i in text[:-1])]
        else:
            pieces = [self.reader.begin(ids), *(self.reader.pieces(i) for i in text[:-1])]
        ends = torch.tensor([len(piece) for piece in pieces]).cumsum(0) - 1
        # where its own ids outrun its context a draft has nothing to say
        fits = int((ends < self.decoder.context_length).sum())
        if fits == 0:
            for _ in samplings:
                yield torch.zeros((1, len(text), vocab_size), device=self.decoder.device)
            return
        read = [i for piece in pieces[:fits] for i in piece]
        prompt = len(pieces[0])
        cache = self.decoder.new_cache(1, len(read))
        tokens = torch.tensor([read], device=self.decoder.device)
        logits = self.decoder.forward(tokens[:, :prompt], 0, cache, last_only=True)
        if len(read) > prompt:
            rest = self.decoder.forward(tokens[:, prompt:], prompt, cache)
            logits = torch.cat([logits, rest], dim=1)
        logits = logits[:, (ends[:fits] - prompt + 1).to(logits.device)]
        for sampling in samplings:
            q = self.over_target_ids(warp(self.cut(logits), sampling), vocab_size)
            yield F.pad(q, (0, 0, 0, len(text) - fits))


def draw(
    logits: Tensor, sampling: Sampling, generator: torch.Generator | None
) -> tuple[Tensor, Tensor | None]:
    """A row [B] drafted from each of logits [B, K], and the q [B, K] it was drawn from.

    q is None when greedy.
    """
    if sampling.greedy:
        return likeliest(logits), None
    q = warp(logits, sampling)
    return sample(q, generator), q


def likelihood(chosen: Tensor, logits: Tensor, q: Tensor | None) -> Tensor:
    """The draft's own probability [B] of the rows that `draw` chose."""
    probabilities = logits.float().softmax(-1) if q is None else q
    return probabilities.gather(-1, chosen[:, None])[:, 0]


class TokenSession:
    """`context` is the text in the draft's ids, `seen` how much of it the draft has fed itself."""

    def __init__(
        self,
        draft: Draft,
        ids: list[int],
        slots: int,
        vocab_size: int,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> None:
        self.draft, self.vocab_size = draft, vocab_size
        self.sampling, self.generator = sampling, generator
        self.context = list(ids) if draft.reader is None else draft.reader.begin(ids)
        self.seen = 0
        # in its own ids a text may be longer than in the target's
        self.slots = slots if draft.reader is None else draft.decoder.context_length
        self.cache = draft.decoder.new_cache(1, self.slots)

    def propose(self, count: int, stop_below: float = 0.0) -> Proposal:
        draft, device = self.draft, self.draft.decoder.device
        greedy = self.sampling.greedy
        confidence = 1.0
        step = torch.tensor([self.context[self.seen :]], device=device)
        drafted: list[Tensor] = []
        q: list[Tensor] = []
        count = min(count, self.slots - len(self.context) + 1)  # no more than it has room to read
        while len(drafted) < count and confidence >= stop_below:
            whole = draft.decoder.forward(step, self.seen, self.cache, last_only=True)[:, -1]
            self.seen += step.shape[1]
            logits = draft.cut(whole)
            chosen, drawn_from = draw(logits, self.sampling, self.generator)
            if drawn_from is not None:
                q.append(drawn_from)
            if stop_below:
                confidence *= float(likelihood(chosen, logits, drawn_from)) * draft.reach(whole)
            drafted.append(draft.to_target_ids(chosen)[:, None])
            step = drafted[-1] if draft.feed is None else draft.feed[chosen][:, None]
        tokens = torch.cat(drafted, dim=1) if drafted else step.new_zeros((1, 0))
        if greedy:
            return Proposal(tokens, None)
        if not q:
            return Proposal(tokens, torch.zeros((1, 0, self.vocab_size), device=device))
        return Proposal(tokens, draft.over_target_ids(torch.stack(q, dim=1), self.vocab_size))

    def extend(self, emitted: list[int], accepted: int) -> None:
        # what it fed itself beyond the accepted tokens is stale and will be overwritten
        self.seen = min(self.seen, len(self.context) + accepted)
        self.context += emitted if self.draft.reader is None else self.draft.reader.read(emitted)
        # what it cannot spell adds nothing, and it needs a token to read for its next logits
        self.seen = min(self.seen, len(self.context) - 1)


@dataclass(frozen=True)
class StringDraft:
    """A draft that shares text with its target, and no ids: proposals are cut into target tokens.

    rows: how many of the head's first rows may be drafted (the rest is padding), None for all.
    """

    decoder: Decoder
    target: Side
    draft: Side
    rows: int | None = None

    @cached_property
    def special(self) -> dict[int, int]:
        """Draft id of each special token of the target that both have."""
        theirs = {key: i for i, key in enumerate(self.draft.keys) if key and key[0] == "special"}
        return {i: theirs[key] for i, key in enumerate(self.target.keys) if key in theirs}

    def cut(self, logits: Tensor) -> Tensor:
        """Logits [..., D] over what may be drafted."""
        return logits[..., : self.rows]

    def start(
        self,
        ids: list[int],
        slots: int,
        vocab_size: int,
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> StringSession:
        """A session on the text `ids`; `slots` and `vocab_size` are the target's."""
        return StringSession(self, ids, sampling, generator)

    def teacher_forced(
        self, ids: list[int], text: list[int], vocab_size: int, samplings: Sequence[Sampling]
    ) -> Iterator[Tensor]:
        """[1, R, V] at each sampling, one-hot at the token drafted before each of `text` [R].

        So sum min(p, .) is p of that token: the chance that `verify_without_q` accepts it.
        """
        for sampling in samplings:
            generator = torch.Generator(device=self.decoder.device).manual_seed(0)
            session = self.start(ids, 0, vocab_size, sampling, generator)
            found = torch.zeros((1, len(text), vocab_size), device=self.decoder.device)
            for i, token in enumerate(text):
                tokens = session.propose(ALPHA_STEPS).tokens[0, :1]
                found[0, i, tokens] = 1
                session.extend([token], 0)
            yield found


class StringSession:
    """The text in both tokenisations, aligned by byte offset.

    `target_ids` and `target_ends`: the text and where each token ends, in bytes. `ids` and `ends`:
    the same bytes in the draft's tokens, but for half a character at the end, which is `held`.
    `cached`: what the draft has fed itself.
    """

    def __init__(
        self,
        draft: StringDraft,
        ids: list[int],
        sampling: Sampling,
        generator: torch.Generator | None,
    ) -> None:
        self.draft, self.sampling, self.generator = draft, sampling, generator
        self.cache = draft.decoder.new_cache(1, draft.decoder.context_length)
        self.cached: list[int] = []
        self.same = 0  # so many tokens of both are known to agree
        self.target_ids: list[int] = []
        self.target_ends: list[int] = []
        self.ids = list(draft.draft.prefix)
        self.ends = [0] * len(self.ids)
        self.held = b""
        bos = draft.target.special_ids.get("bos_token")
        self.extend(ids[1:] if ids and ids[0] == bos else ids, 0)

    def extend(self, emitted: list[int], accepted: int) -> None:
        at = self.target_ends[-1] if self.target_ends else 0
        for i in emitted:
            at += len(self.draft.target.bytes_of([i]))
            self.target_ids.append(i)
            self.target_ends.append(at)
        # 1. Where both tokenisations end a token, some way back, nothing will change any more.
        settled = max(len(self.target_ids) - len(emitted) - REREAD, 0)
        while settled > 0 and not self._ends_at(self.target_ends[settled - 1]):
            settled -= 1
        offset = self.target_ends[settled - 1] if settled > 0 else 0
        kept = bisect_right(self.ends, offset)
        del self.ids[kept:], self.ends[kept:]
        self.same = min(self.same, kept)
        # 2. Cut the rest anew; half a character waits for its other half.
        self.held = b""
        rest = self.target_ids[settled:]
        for special, group in groupby(rest, key=self.draft.special.get):
            stretch = list(group)
            if special is not None:
                for i in stretch:
                    offset += len(self.draft.target.bytes_of([i]))
                    self.ids.append(special)
                    self.ends.append(offset)
                self.held = b""
                continue
            data = self.draft.target.bytes_of(stretch)
            whole = len(data) - unfinished(data)
            self.held = data[whole:]
            for i in self.draft.draft.encode(data[:whole]):
                offset += len(self.draft.draft.bytes_of([i]))
                self.ids.append(i)
                self.ends.append(offset)

    def _ends_at(self, offset: int) -> bool:
        at = bisect_right(self.ends, offset)
        return at > 0 and self.ends[at - 1] == offset

    def propose(self, count: int, stop_below: float = 0.0) -> Proposal:
        draft, device = self.draft, self.draft.decoder.device
        # 1. Go back to the last place where the cache holds the text as it is cut now.
        both = min(len(self.cached), len(self.ids))
        while self.same < both and self.cached[self.same] == self.ids[self.same]:
            self.same += 1
        seen = min(self.same, len(self.ids) - 1)  # the last token is fed again for its logits
        room = draft.decoder.context_length - len(self.ids) + 1
        drafted: list[int] = []
        confidence = 1.0
        step = self.ids[seen:]
        while step and len(drafted) < min(count, room) and confidence >= stop_below:
            tokens = torch.tensor([step], device=device)
            logits = draft.cut(
                draft.decoder.forward(tokens, seen, self.cache, last_only=True)[:, -1]
            )
            self.cached[seen:] = step
            seen += len(step)
            probabilities = None
            if self.sampling.greedy:
                chosen = likeliest(logits)
            else:
                probabilities = warp(logits, self.sampling)
                chosen = sample(probabilities, self.generator)
            if stop_below:
                if probabilities is None:
                    probabilities = logits.float().softmax(-1)
                confidence *= float(probabilities[0, chosen])
            step = chosen.tolist()
            drafted += step
            if step[0] in draft.draft.all_stops:
                break
        # 2. The new text, cut into target tokens; the ends of texts are one and the same.
        ended = bool(drafted) and drafted[-1] in draft.draft.all_stops
        text = draft.draft.bytes_of(drafted[:-1] if ended else drafted)
        if not text.startswith(self.held):
            return Proposal(torch.zeros((1, 0), dtype=torch.long, device=device), None)
        text = text[len(self.held) :]
        proposed = draft.target.encode(text[: len(text) - unfinished(text)])
        eos = draft.target.special_ids.get("eos_token")
        if ended and eos is not None:
            proposed.append(eos)
        return Proposal(torch.tensor([proposed[:count]], dtype=torch.long, device=device), None)
