"""Drafts with a vocabulary of their own: bridged token by token, or by text alone.

By map, the tokens that both vocabularies have are drafted. By text, what the draft writes is cut
into target tokens. Legend: B rows, G drafted tokens, R answer tokens, V the target's vocabulary, K
rows of the draft's head that may be drafted.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch
from torch import Tensor

from align.token_bytes import unfinished
from align.vocab_map import Retokenizer, build_map
from align.vocabulary import Vocabulary
from eval.decoding.drafters.causal_lm import (
    CausalLMDrafter,
    TokenSession,
    teacher_forced_logits,
)
from eval.decoding.drafters.drafter import DecoderDrafter, Proposal, RowByRow, Session, Texts
from eval.decoding.forward import HiddenStates
from eval.decoding.verification import Sampling, argmax, sample, warp

# What is tokenised anew each block, in target tokens: enough for the cuts to settle.
REREAD = 16
# Draft tokens behind the proposal whose first target token counts for alpha.
ALPHA_STEPS = 3


@dataclass(kw_only=True)
class MapDrafter(CausalLMDrafter):
    """Strategy `intersection`: reads the target's text in its own ids, drafts the tokens both have.

    Raises MapError when the two share no token.
    """

    target: Vocabulary
    draft: Vocabulary

    def __post_init__(self) -> None:
        super().__post_init__()
        vocab_map = build_map(self.target, self.draft)
        self.retokenizer = Retokenizer(vocab_map, self.target, self.draft)
        device = self.decoder.device
        token_ids = vocab_map.to_target[vocab_map.mapped]
        self.mapped = vocab_map.mapped.to(device)  # head rows that may be drafted [K]
        self.token_ids = token_ids.to(device)
        self.own_ids = vocab_map.to_draft[token_ids].to(device)  # what is read for each [K]

    def read(self, ids: Sequence[int], begins: bool = False) -> list[int]:
        return self.retokenizer.from_start(ids) if begins else self.retokenizer.continuation(ids)

    def own_slots(self, slots: int) -> int:
        return self.decoder.context_length  # in its own ids a text may be longer

    def cut(self, logits: Tensor) -> Tensor:
        # torch selects in bf16 three times as slowly as it converts and selects in fp32
        return logits.float().index_select(-1, self.mapped)

    def certainty(self, q: Tensor, chosen: Tensor, logits: Tensor) -> Tensor:
        """As of any draft, times the mass of what may be drafted at all."""
        share = self.cut(logits.float().softmax(-1)).sum(-1)
        return super().certainty(q, chosen, logits) * share

    def to_own_ids(self, rows: Tensor) -> Tensor:
        return self.own_ids[rows]

    def start(self, texts: Texts) -> Session:
        # in its own ids rows do not go on by as many tokens: each keeps to itself
        return RowByRow([TokenSession(self, texts._replace(ids=[i])) for i in texts.ids])


@dataclass(kw_only=True)
class TextDrafter(DecoderDrafter):
    """Strategy `string` of align/check.py."""

    target: Vocabulary
    draft: Vocabulary

    @cached_property
    def special(self) -> dict[int, int]:
        """Draft id of each special token of the target that both have."""
        theirs = {key: i for i, key in enumerate(self.draft.tokens) if key and key[0] == "special"}
        return {i: theirs[key] for i, key in enumerate(self.target.tokens) if key in theirs}

    def start(self, texts: Texts) -> Session:
        return RowByRow(
            [TextSession(self, ids, texts.sampling, texts.generator) for ids in texts.ids]
        )

    def teacher_forced(
        self, ids: list[int], text: list[int], samplings: Sequence[Sampling], states: HiddenStates
    ) -> Iterator[Tensor]:
        """One-hot at the token drafted before each of `text`.

        So sum min(p, .) is p of that token: the chance that `verify_without_q` accepts it.
        """
        for sampling in samplings:
            generator = torch.Generator(device=self.decoder.device).manual_seed(0)
            session = TextSession(self, ids, sampling, generator)
            one_hot = torch.zeros((1, len(text), self.vocab_size), device=self.decoder.device)
            for i, token in enumerate(text):
                tokens = session.propose(ALPHA_STEPS, 0.0).tokens[0, :1]
                one_hot[0, i, tokens] = 1
                session.extend([token])
            yield one_hot

    @torch.inference_mode()
    def probe(self, ids: list[int]) -> Tensor:
        draft_ids = self.draft.encode(self.target.bytes_of(ids)) or [0]
        return teacher_forced_logits(self.decoder, draft_ids[: self.decoder.context_length], 1)


class TextSession(Session):
    """The text in both tokenisations, aligned by byte offset.

    `target_ids` and `target_ends`: the text and where each token ends, in bytes. `ids` and `ends`:
    the same bytes in the draft's tokens, but for half a character at the end, which is `held`.
    `cached`: what the draft has read.
    """

    def __init__(
        self,
        drafter: TextDrafter,
        ids: list[int],
        sampling: Sampling,
        generator: torch.Generator,
    ) -> None:
        self.sampling, self.generator = sampling, generator
        self.drafter, self.target, self.draft = drafter, drafter.target, drafter.draft
        self.cache = drafter.decoder.new_cache(1, drafter.decoder.context_length)
        self.cached: list[int] = []
        self.same = 0  # so many tokens of both are known to agree
        self.target_ids: list[int] = []
        self.target_ends: list[int] = []
        self.ids = list(self.draft.prefix)
        self.ends = [0] * len(self.ids)
        self.held = b""
        bos = self.target.special_ids.get("bos_token")
        self.extend(ids[1:] if ids and ids[0] == bos else ids)

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        self.extend(emitted[0])

    def keep(self, rows: list[int]) -> None:
        assert rows == [0]

    def extend(self, emitted: list[int]) -> None:
        """The text goes on by these target ids."""
        at = self.target_ends[-1] if self.target_ends else 0
        for i in emitted:
            at += len(self.target.bytes_of([i]))
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
        # 2. Cut what follows anew; half a character waits for its other half.
        self.held = b""
        unread = self.target_ids[settled:]
        for special, group in groupby(unread, key=self.drafter.special.get):
            stretch = list(group)
            if special is not None:
                for i in stretch:
                    offset += len(self.target.bytes_of([i]))
                    self.ids.append(special)
                    self.ends.append(offset)
                self.held = b""
                continue
            data = self.target.bytes_of(stretch)
            whole = len(data) - unfinished(data)
            self.held = data[whole:]
            for i in self.draft.encode(data[:whole]):
                offset += len(self.draft.bytes_of([i]))
                self.ids.append(i)
                self.ends.append(offset)

    def _ends_at(self, offset: int) -> bool:
        at = bisect_right(self.ends, offset)
        return at > 0 and self.ends[at - 1] == offset

    def propose(self, count: int, stop_below: float) -> Proposal:
        drafter, device = self.drafter, self.drafter.decoder.device
        # 1. Go back to the last place where the cache holds the text as it is cut now.
        length = min(len(self.cached), len(self.ids))
        while self.same < length and self.cached[self.same] == self.ids[self.same]:
            self.same += 1
        in_cache = min(self.same, len(self.ids) - 1)  # the last token is read again for its logits
        room = drafter.decoder.context_length - len(self.ids) + 1
        drafted: list[int] = []
        ends: list[int] = []  # in bytes, of what was drafted
        reached: list[float] = []
        certainty = 1.0
        step = self.ids[in_cache:]
        while step and len(drafted) < min(count, room) and certainty >= stop_below:
            tokens = torch.tensor([step], device=device)
            logits = drafter.decoder.forward(tokens, in_cache, self.cache, last_only=True)[:, -1]
            logits = drafter.cut(logits)
            self.cached[in_cache:] = step
            in_cache += len(step)
            if self.sampling.greedy:
                q, chosen = logits.float().softmax(-1), argmax(logits)
            else:
                q = warp(logits, self.sampling)
                chosen = sample(q, self.generator)
            step = chosen.tolist()
            drafted += step
            reached.append(certainty)
            ends.append((ends[-1] if ends else 0) + len(self.draft.bytes_of(step)))
            certainty *= float(q[0, chosen])
            if step[0] in self.draft.all_stops:
                break
        # 2. The new text, cut into target tokens; the ends of texts are one and the same.
        ended = bool(drafted) and drafted[-1] in self.draft.all_stops
        text = self.draft.bytes_of(drafted[:-1] if ended else drafted)
        if not text.startswith(self.held):
            return Proposal(torch.zeros((1, 0), dtype=torch.long, device=device))
        text = text[len(self.held) :]
        proposed = self.target.encode(text[: len(text) - unfinished(text)])
        eos = self.target.special_ids.get("eos_token")
        if ended and eos is not None:
            proposed.append(eos)
        proposed = proposed[:count]
        # a token of the target's was reached when the draft's token that ends it was
        sure, end = [], len(self.held)
        for i in proposed:
            end += len(self.target.bytes_of([i]))
            sure.append(reached[min(bisect_left(ends, end), len(reached) - 1)])
        return Proposal(
            torch.tensor([proposed], dtype=torch.long, device=device),
            certainty=torch.tensor([sure], device=device) if stop_below else None,
        )
