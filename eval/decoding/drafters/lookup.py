"""Prompt lookup, which needs no model, and a draft behind it.

The longest of the last 3, 2 or 1 tokens that stand earlier in the text are looked up, the latest
such place taken, and the tokens after it drafted (arXiv 2304.04487 drafts from references like
this; transformers calls it `prompt_lookup_num_tokens`). Without a match nothing is drafted
(`prompt-lookup`), or a draft writes what is new (`lookup-first:SPEC`): a match of two tokens is as
often right as a small draft, a longer one far more often (figures: docs/lab-notes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.decoding.drafters.drafter import Drafter, Proposal, RowByRow, Session, Texts, merged
from eval.decoding.forward import HiddenStates
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

LOOKUP = "prompt-lookup"  # its spec
LOOKUP_FIRST = "lookup-first:"  # of a draft's spec, to have lookup before it
LONGEST = 3  # tokens that are looked up
SHORTEST_FIRST = 2  # of them, before a draft is asked


def following(text: list[int], count: int, shortest: int = 1) -> list[int]:
    """At most `count` tokens after the latest earlier place of the last tokens of `text`.

    shortest: so many tokens, at least, stand there as well.
    """
    for length in range(min(LONGEST, len(text) - 1), shortest - 1, -1):
        last = text[-length:]
        for i in range(len(text) - length - 1, -1, -1):
            if text[i : i + length] == last:
                return text[i + length : i + length + count]
    return []


@dataclass(kw_only=True)
class PromptLookup(Drafter):
    device: torch.device

    def start(self, texts: Texts) -> Session:
        return RowByRow([LookupSession(self.device, ids) for ids in texts.ids])

    def teacher_forced(
        self, ids: list[int], text: list[int], samplings: Sequence[Sampling], states: HiddenStates
    ) -> Iterator[Tensor]:
        q = torch.zeros((1, len(text), self.vocab_size), device=self.device)
        for i in range(len(text)):
            q[0, i, following([*ids, *text[:i]], 1)] = 1
        for _ in samplings:
            yield q

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        text = list(range(context_length))  # without a match it takes longest

        def run() -> None:
            following(text, 1)

        return run


class LookupSession(Session):
    def __init__(self, device: torch.device, text: list[int]) -> None:
        self.device, self.text = device, list(text)

    def propose(self, count: int, stop_below: float) -> Proposal:
        tokens = following(self.text, count)
        return Proposal(torch.tensor([tokens], dtype=torch.long, device=self.device))

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        self.text += emitted[0]

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
    )


@dataclass(kw_only=True)
class LookupFirst(Drafter):
    draft: Drafter

    @property
    def q_rows(self) -> int:
        return self.draft.q_rows

    def start(self, texts: Texts) -> Session:
        return LookupFirstSession(self.draft.start(texts), texts)

    def teacher_forced(
        self, ids: list[int], text: list[int], samplings: Sequence[Sampling], states: HiddenStates
    ) -> Iterator[Tensor]:
        matches = [following([*ids, *text[:i]], 1, SHORTEST_FIRST) for i in range(len(text))]
        rows = [i for i, tokens in enumerate(matches) if tokens]
        looked_up = [tokens[0] for tokens in matches if tokens]
        for q in self.draft.teacher_forced(ids, text, samplings, states):
            q[0, rows] = 0
            q[0, rows, looked_up] = 1
            yield q

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        return self.draft.step(context_length, sampling)

    def probe(self, ids: list[int]) -> Tensor:
        return self.draft.probe(ids)


class LookupFirstSession(Session):
    def __init__(self, session: Session, texts: Texts) -> None:
        self.session = session
        self.device = texts.generator.device
        self.texts = [list(text) for text in texts.ids]
        self.replaced: list[int] = []  # rows that were drafted, too, but looked up

    def propose(self, count: int, stop_below: float) -> Proposal:
        matches = [following(text, count, SHORTEST_FIRST) for text in self.texts]
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
        for text, new in zip(self.texts, emitted, strict=True):
            text += new
        # what the draft has read of its own on a replaced row is not what was emitted
        as_drafted = [0 if row in self.replaced else n for row, n in enumerate(accepted)]
        self.session.commit(emitted, as_drafted, states)

    def keep(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.session.keep(rows)


def lookup_first(draft: Drafter) -> LookupFirst:
    """That draft behind prompt lookup."""
    return LookupFirst(
        draft=draft,
        vocab_size=draft.vocab_size,
        path=f"{LOOKUP_FIRST}{draft.path}",
        form=draft.form,
        vocabulary=draft.vocabulary,
        bytes=draft.bytes,
        full_form_bytes=draft.full_form_bytes,
        kv_bytes_per_token=draft.kv_bytes_per_token,
        layers=draft.layers,
    )
