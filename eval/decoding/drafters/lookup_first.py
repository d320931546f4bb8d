"""Lookup first: a draft for what is new, prompt lookup for what the text repeats.

A row whose last SHORTEST tokens or more stand earlier in the text takes what followed them, at no
cost; the others are drafted by the draft (`lookup-first:SPEC`, SPEC as of any draft). The two
complete each other: on code a match of two tokens is as often right as a small draft, a longer one
far more often, and the draft is right where nothing matches (figures: docs/lab-notes.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.decoding.drafters.base import Drafter, Proposal, Session, Texts, merged
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.prompt_lookup import following
from eval.decoding.forward import HiddenStates
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

SHORTEST = 2


@dataclass(kw_only=True)
class LookupFirst(Drafter):
    draft: Drafter

    def start(self, texts: Texts) -> Session:
        return LookupFirstSession(self.draft.start(texts), texts)

    def teacher_forced(
        self, ids: list[int], text: list[int], samplings: Sequence[Sampling], states: HiddenStates
    ) -> Iterator[Tensor]:
        found = [following([*ids, *text[:i]], 1, SHORTEST) for i in range(len(text))]
        rows = [i for i, one in enumerate(found) if one]
        tokens = [one[0] for one in found if one]
        for q in self.draft.teacher_forced(ids, text, samplings, states):
            q[0, rows] = 0
            q[0, rows, tokens] = 1
            yield q

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        return self.draft.step(context_length, sampling)

    def block(self, context_length: int) -> Callable[[], None] | None:
        return self.draft.block(context_length)

    def probe(self, ids: list[int]) -> Tensor:
        return self.draft.probe(ids)


class LookupFirstSession(Session):
    def __init__(self, session: Session, texts: Texts) -> None:
        self.session = session
        self.device = texts.generator.device
        self.texts = [list(text) for text in texts.ids]
        self.replaced: list[int] = []  # rows that were drafted, too, but looked up

    def propose(self, count: int, stop_below: float) -> Proposal:
        found = [following(text, count, SHORTEST) for text in self.texts]
        rows = [row for row, tokens in enumerate(found) if tokens]
        made: list[Proposal] = []
        places: list[list[int]] = []
        self.replaced = []
        if len(rows) < len(found):
            made, places = [self.session.propose(count, stop_below)], [[*range(len(found))]]
            self.replaced = rows
        if not rows:
            return made[0]
        looked_up = [Proposal(torch.tensor([found[row]], device=self.device)) for row in rows]
        every = [*places, *([row] for row in rows)]
        whole = merged([*made, *looked_up], every, len(found), stop_below)
        for row in rows:
            if whole.certainty is not None:
                whole.certainty[row] = 1
            if whole.q is not None:
                whole.q[row] = 0
                whole.q[row, range(len(found[row])), found[row]] = 1
        return whole._replace(free=rows)

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        for text, new in zip(self.texts, emitted, strict=True):
            text += new
        # what the draft has read of its own on a replaced row is not what was emitted
        own = [0 if row in self.replaced else n for row, n in enumerate(accepted)]
        self.session.commit(emitted, own, states)

    def keep(self, rows: list[int]) -> None:
        self.texts = [self.texts[row] for row in rows]
        self.session.keep(rows)


def lookup_first(draft: Drafter) -> LookupFirst:
    """That draft behind prompt lookup."""
    return LookupFirst(
        draft=draft,
        vocab_size=draft.vocab_size,
        path=f"lookup-first:{draft.path}",
        form=draft.form,
        vocabulary=draft.vocabulary,
        bytes=draft.bytes,
        full_form_bytes=draft.full_form_bytes,
        kv_bytes_per_token=draft.kv_bytes_per_token,
        layers=draft.layers,
        alike=draft.alike,
    )


def load(spec: str, target: Target, strategy: str) -> Drafter:
    """Of `lookup-first:SPEC`."""
    return lookup_first(load_drafter(spec.partition(":")[2], target, strategy))
