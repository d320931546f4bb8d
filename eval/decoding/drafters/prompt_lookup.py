"""Prompt lookup: a rival that needs no model. It drafts what followed the last tokens before.

The longest of the last 3, 2 or 1 tokens that stand earlier in the text are looked up, the latest
such place taken, and the tokens after it drafted (arXiv 2304.04487 drafts from references like
this; transformers calls it `prompt_lookup_num_tokens`). Without a match nothing is drafted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from eval.decoding.drafters.base import Drafter, GroupedRows, Proposal, Session, Texts
from eval.decoding.forward import HiddenStates
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

LONGEST = 3


@dataclass(kw_only=True)
class PromptLookup(Drafter):
    device: torch.device

    def start(self, texts: Texts) -> Session:
        return GroupedRows([LookupSession(self.device, ids) for ids in texts.ids])

    def teacher_forced(
        self, ids: list[int], text: list[int], samplings: Sequence[Sampling], states: HiddenStates
    ) -> Iterator[torch.Tensor]:
        found = torch.zeros((1, len(text), self.vocab_size), device=self.device)
        for i in range(len(text)):
            found[0, i, following([*ids, *text[:i]], 1)] = 1
        for _ in samplings:
            yield found

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        text = list(range(context_length))  # without a match it takes longest

        def run() -> None:
            following(text, 1)

        return run


class LookupSession(Session):
    def __init__(self, device: torch.device, text: list[int]) -> None:
        self.device, self.text = device, list(text)

    def propose(self, count: int, stop_below: float) -> Proposal:
        found = following(self.text, count)
        return Proposal(torch.tensor([found], dtype=torch.long, device=self.device))

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        self.text += emitted[0]

    def keep(self, rows: list[int]) -> None:
        assert rows == [0]


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


def load(spec: str, target: Target, strategy: str) -> Drafter:
    return PromptLookup(
        vocab_size=target.decoder.embedding.shape[0],
        path=spec,
        form="no model",
        vocabulary={"relation": "identical", "strategy": "prompt lookup", "coverage": 1.0},
        full_form_bytes=None,
        device=target.decoder.device,
    )
