"""Prompt lookup, which needs no model, and a draft behind it.

The longest of the last 5, 4, 3, 2 or 1 tokens that stand earlier in the text are looked up, the
latest such place taken, and the tokens after it drafted, over the text's end if need be (arXiv
2304.04487 drafts from references like this; transformers calls it `prompt_lookup_num_tokens`).
Without a match nothing is drafted (`prompt-lookup`), or a draft writes what is new
(`lookup-first:SPEC`): a match of two tokens is as often right as a small draft, a longer one far
more often, one of a single token less often (figures: docs/lab-notes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import torch
from torch import Tensor

from eval.decoding.drafters.drafter import Drafter, Proposal, RowByRow, Session, Texts, merged
from eval.decoding.forward import HiddenStates
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

LOOKUP = "prompt-lookup"  # its spec
LOOKUP_FIRST = "lookup-first:"  # of a draft's spec, to have lookup before it
LONGEST = 5  # tokens that are looked up; more bring little
AFTER_ONE = 2  # tokens that a match of one token drafts at most; more cost more than they bring
SHORTEST_FIRST = 2  # tokens that must match before a draft is not asked


class TextIndex:
    """A text and where each of its n-grams last stood, so that a lookup does not read the text.

    stops: tokens that end a turn, which are never drafted: the target adds a token of its own to
    every draft, so they save no call, and what ends a prompt seldom stands within an answer.
    """

    def __init__(self, tokens: Iterable[int], stops: frozenset[int]) -> None:
        self.tokens: list[int] = []
        self.stops = stops
        self._after: dict[tuple[int, ...], int] = {}  # n-gram: place of the token after it
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            # only now a token follows the last n-grams, so that none ever finds itself
            for ngram in self._last() if token not in self.stops else ():
                self._after[ngram] = len(self.tokens)
            self.tokens.append(token)

    def following(self, count: int, shortest: int = 1) -> list[int]:
        """`count` tokens after the latest earlier place of the last tokens, none without a match.

        Where the text ends before that, the copy goes on with what it has copied: `a b a b` goes on
        with `a b a b` for as long as is wanted. shortest: so many tokens, at least, match; where it
        is one alone, AFTER_ONE tokens at most are drafted.
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
        """The n-grams that end the text, the longest first."""
        for n in range(min(LONGEST, len(self.tokens)), shortest - 1, -1):
            yield tuple(self.tokens[-n:])


def looked_up(
    ids: list[int], text: list[int], stops: frozenset[int], shortest: int = 1
) -> tuple[list[int], list[int]]:
    """Where in `text` [R], after the prompt `ids`, a token is looked up, and these tokens."""
    index = TextIndex(ids, stops)
    places: list[int] = []
    tokens: list[int] = []
    for place, token in enumerate(text):
        if guess := index.following(1, shortest):
            places.append(place)
            tokens += guess
        index.extend([token])
    return places, tokens


@dataclass(kw_only=True)
class PromptLookup(Drafter):
    device: torch.device
    stops: frozenset[int]

    def start(self, texts: Texts) -> Session:
        return RowByRow([LookupSession(self.device, ids, self.stops) for ids in texts.ids])

    def teacher_forced(
        self, ids: list[int], text: list[int], samplings: Sequence[Sampling], states: HiddenStates
    ) -> Iterator[Tensor]:
        q = torch.zeros((1, len(text), self.vocab_size), device=self.device)
        places, tokens = looked_up(ids, text, self.stops)
        q[0, places, tokens] = 1
        for _ in samplings:
            yield q

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        # no token stands twice: without a match a lookup takes longest
        session = LookupSession(self.device, range(context_length), self.stops)

        def run() -> None:
            session.propose(1, 0.0)
            session.commit([[len(session.index.tokens)]], [0], {})

        return run


class LookupSession(Session):
    def __init__(self, device: torch.device, text: Iterable[int], stops: frozenset[int]) -> None:
        self.device, self.index = device, TextIndex(text, stops)

    def propose(self, count: int, stop_below: float) -> Proposal:
        tokens = self.index.following(count)
        return Proposal(torch.tensor([tokens], dtype=torch.long, device=self.device))

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        self.index.extend(emitted[0])

    def keep(self, rows: list[int]) -> None:
        assert rows == [0]


def prompt_lookup(target: Target) -> PromptLookup:
    return PromptLookup(
        vocab_size=target.decoder.embedding.shape[0],
        path=LOOKUP,
        form="no model",
        vocabulary={"relation": "identical", "strategy": "prompt lookup", "coverage": 1.0},
        full_form_bytes=None,
        device=target.decoder.device,
        stops=target.stops,
    )


@dataclass(kw_only=True)
class LookupFirst(Drafter):
    draft: Drafter
    stops: frozenset[int]

    @property
    def q_rows(self) -> int:
        return self.draft.q_rows

    def start(self, texts: Texts) -> Session:
        return LookupFirstSession(self.draft.start(texts), texts, self.stops)

    def teacher_forced(
        self, ids: list[int], text: list[int], samplings: Sequence[Sampling], states: HiddenStates
    ) -> Iterator[Tensor]:
        places, tokens = looked_up(ids, text, self.stops, SHORTEST_FIRST)
        for q in self.draft.teacher_forced(ids, text, samplings, states):
            q[0, places] = 0
            q[0, places, tokens] = 1
            yield q

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        return self.draft.step(context_length, sampling)

    def probe(self, ids: list[int]) -> Tensor:
        return self.draft.probe(ids)


class LookupFirstSession(Session):
    def __init__(self, session: Session, texts: Texts, stops: frozenset[int]) -> None:
        self.session = session
        self.device = texts.generator.device
        self.indexes = [TextIndex(text, stops) for text in texts.ids]
        self.replaced: list[int] = []  # rows whose draft gives way to a lookup

    def propose(self, count: int, stop_below: float) -> Proposal:
        matches = [index.following(count, SHORTEST_FIRST) for index in self.indexes]
        rows = [row for row, tokens in enumerate(matches) if tokens]
        proposals: list[Proposal] = []
        places: list[slice] = []
        self.replaced = []
        if len(rows) < len(matches):
            proposals, places = [self.session.propose(count, stop_below)], [slice(None)]
            self.replaced = rows
        if not rows:
            return proposals[0]
        proposals += [Proposal(torch.tensor([matches[row]], device=self.device)) for row in rows]
        places += [slice(row, row + 1) for row in rows]
        whole = merged(proposals, places, len(matches), stop_below)
        for row in rows:
            if whole.certainty is not None:
                whole.certainty[row] = 1
            if whole.q is not None:
                whole.q[row] = 0
                whole.q[row, range(len(matches[row])), matches[row]] = 1
        return whole._replace(free=rows)

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        for index, new in zip(self.indexes, emitted, strict=True):
            index.extend(new)
        # on a replaced row the draft has read tokens of its own that were not emitted
        as_drafted = [0 if row in self.replaced else n for row, n in enumerate(accepted)]
        self.session.commit(emitted, as_drafted, states)

    def keep(self, rows: list[int]) -> None:
        self.indexes = [self.indexes[row] for row in rows]
        self.session.keep(rows)


def lookup_first(draft: Drafter, stops: frozenset[int]) -> LookupFirst:
    """That draft behind prompt lookup. stops: of the target."""
    return LookupFirst(
        draft=draft,
        stops=stops,
        vocab_size=draft.vocab_size,
        path=f"{LOOKUP_FIRST}{draft.path}",
        form=draft.form,
        vocabulary=draft.vocabulary,
        bytes=draft.bytes,
        full_form_bytes=draft.full_form_bytes,
        kv_bytes_per_token=draft.kv_bytes_per_token,
        layers=draft.layers,
    )
