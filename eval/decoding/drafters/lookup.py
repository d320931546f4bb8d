"""N-gram speculation (prompt lookup), alone or before a draft model.

The last 5 tokens, else the last 4, 3, 2 or 1, are searched earlier in the text. The tokens after
their latest occurrence are drafted (arXiv 2304.04487 drafts from references in this way; in
transformers it is `prompt_lookup_num_tokens`). Without a match, `prompt-lookup` drafts nothing;
`lookup-first:SPEC` uses the draft model if fewer than SHORTEST_FIRST tokens match. A match of two
tokens is right as often as a small draft, a longer match far more often, a match of one token less
often (figures: docs/lab-notes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from itertools import takewhile

import torch
from torch import Tensor

from eval.decoding.drafters import LOOKUP, LOOKUP_FIRST
from eval.decoding.drafters.drafter import Drafter, Proposal, Session, Text
from eval.decoding.forward import HiddenStates
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

LONGEST = 5  # the longest n-gram that is searched; longer ones gain little
AFTER_ONE = 2  # the most tokens drafted after a match of one token; more cost more than they gain
SHORTEST_FIRST = 2  # the shortest match that replaces a draft model's proposal


class TextIndex:
    """A text with the last position of each n-gram, so that a search does not read the text.

    stops: tokens that end a turn. They are never drafted, because a stop token saves no step (the
    target adds a token to every draft), and copies from the end of a prompt are seldom right.
    """

    def __init__(self, tokens: Iterable[int], stops: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.stops = stops
        self._after: dict[tuple[int, ...], int] = {}  # n-gram: position of the token after it
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            # entered when the next token is known, so that an n-gram never matches itself
            for ngram in self._last() if token not in self.stops else ():
                self._after[ngram] = len(self.tokens)
            self.tokens.append(token)

    def following(self, count: int, shortest: int = 1) -> list[int]:
        """Up to `count` tokens after the last occurrence of the text's end; [] without a match.

        If the copy reaches the end of the text, it repeats itself: `a b a b` is continued with
        `a b a b` and so on. After a match of one token, at most AFTER_ONE tokens are copied.
        shortest: the fewest tokens that must match.
        """
        for ngram in self._last(shortest):
            start = self._after.get(ngram)
            if start is not None:
                period = len(self.tokens) - start
                drafted = count if len(ngram) > 1 else min(count, AFTER_ONE)
                copy = (self.tokens[start + i % period] for i in range(drafted))
                return list(takewhile(lambda token: token not in self.stops, copy))
        return []

    def _last(self, shortest: int = 1) -> Iterator[tuple[int, ...]]:
        """The n-grams at the end of the text, the longest first."""
        for n in range(min(LONGEST, len(self.tokens)), shortest - 1, -1):
            yield tuple(self.tokens[-n:])


def looked_up(
    ids: list[int], text: list[int], stops: frozenset[int], shortest: int = 1
) -> tuple[list[int], list[int]]:
    """Positions in `text`, after the prompt `ids`, that have a match; the drafted token at each."""
    index = TextIndex(ids, stops)
    positions: list[int] = []
    tokens: list[int] = []
    for position, token in enumerate(text):
        if guess := index.following(1, shortest):
            positions.append(position)
            tokens += guess
        index.extend([token])
    return positions, tokens


@dataclass(kw_only=True)
class PromptLookup(Drafter):
    device: torch.device
    stops: frozenset[int]

    def start(self, text: Text) -> Session:
        return LookupSession(self.device, text.ids, self.stops)

    def teacher_forced(
        self, ids: list[int], text: list[int], sampling: Sampling, states: HiddenStates
    ) -> Tensor:
        q = torch.zeros((len(text), self.vocab_size), device=self.device)
        positions, tokens = looked_up(ids, text, self.stops)
        q[positions, tokens] = 1
        return q

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        # all tokens differ, because a search without a match takes longest
        session = LookupSession(self.device, range(context_length), self.stops)

        def run() -> None:
            session.propose(1)
            session.commit([len(session.index.tokens)], 0, {})

        return run


class LookupSession(Session):
    def __init__(self, device: torch.device, ids: Iterable[int], stops: frozenset[int]) -> None:
        self.device, self.index = device, TextIndex(ids, stops)

    def propose(self, count: int) -> Proposal:
        tokens = self.index.following(count)
        return Proposal(torch.tensor(tokens, dtype=torch.long, device=self.device))

    def commit(self, emitted: list[int], accepted: int, states: HiddenStates) -> None:
        self.index.extend(emitted)


def prompt_lookup(target: Target) -> PromptLookup:
    return PromptLookup(
        vocab_size=target.decoder.embedding.shape[0],
        path=LOOKUP,
        form="no model",
        vocabulary={"relation": "identical", "strategy": "prompt lookup", "coverage": 1.0},
        device=target.decoder.device,
        stops=target.stops,
    )


@dataclass(kw_only=True)
class LookupFirst(Drafter):
    draft: Drafter
    stops: frozenset[int]

    def start(self, text: Text) -> Session:
        return LookupFirstSession(self.draft.start(text), text, self.stops)

    def teacher_forced(
        self, ids: list[int], text: list[int], sampling: Sampling, states: HiddenStates
    ) -> Tensor:
        q = self.draft.teacher_forced(ids, text, sampling, states)
        positions, tokens = looked_up(ids, text, self.stops, SHORTEST_FIRST)
        q[positions] = 0
        q[positions, tokens] = 1
        return q

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        return self.draft.step(context_length, sampling)

    def draft_at_once(
        self, context_length: int, sampling: Sampling, count: int
    ) -> Callable[[], None] | None:
        return self.draft.draft_at_once(context_length, sampling, count)


class LookupFirstSession(Session):
    def __init__(self, session: Session, text: Text, stops: frozenset[int]) -> None:
        self.session, self.device = session, text.generator.device
        self.index = TextIndex(text.ids, stops)

    def propose(self, count: int) -> Proposal:
        if match := self.index.following(count, SHORTEST_FIRST):
            return Proposal(torch.tensor(match, device=self.device), free=True)
        return self.session.propose(count)

    def commit(self, emitted: list[int], accepted: int, states: HiddenStates) -> None:
        self.index.extend(emitted)
        self.session.commit(emitted, accepted, states)


def lookup_first(draft: Drafter, stops: frozenset[int]) -> LookupFirst:
    """N-gram speculation before that draft. stops: the target's stop tokens."""
    about = {field.name: getattr(draft, field.name) for field in fields(Drafter)}
    about |= {"path": f"{LOOKUP_FIRST}{draft.path}", "most": None}  # n-grams have any length
    return LookupFirst(draft=draft, stops=stops, **about)
