"""What decoding, timing and reports need of a drafter, whatever kind it is.

A drafter may have ids of its own, read the target's hidden states, or draft nothing at all; what it
proposes is always in the target's ids. Legend: G drafted tokens, R output tokens, V the target's
vocabulary, K vocabulary entries of the draft's head, H hidden size, L layers read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.decoding.forward import Decoder, HiddenStates, KVCache
from eval.decoding.verification import Sampling, argmax, sample, warp

# [1, K] of the drafted token at a depth from 0 on, after the entry of the head that was drafted
# before it [1], None for the first
Logits = Callable[[int, Tensor | None], Tensor]


class Proposal(NamedTuple):
    """tokens: in the target's ids [G].

    q: the distributions that they were sampled from, over the target's ids [G, V]; None when
    greedy, and where they are not known (`verify`). free: the tokens took no step of a model.
    """

    tokens: Tensor
    q: Tensor | None = None
    free: bool = False


def no_draft(device: torch.device) -> Proposal:
    """A proposal of no token."""
    return Proposal(torch.zeros(0, dtype=torch.long, device=device))


class Text(NamedTuple):
    """A text, prompt and first token, as a drafter gets it.

    ids: the target's. slots: how many tokens the text may have in the end. generator: for the
    random numbers that drafts are sampled with. states: the target's hidden states at all tokens
    but the last [1, T, H].
    """

    ids: list[int]
    slots: int
    sampling: Sampling
    generator: torch.Generator
    states: HiddenStates


class Session(ABC):
    """A drafter at work on a text."""

    @abstractmethod
    def propose(self, count: int) -> Proposal:
        """At most `count` tokens that follow the text."""

    @abstractmethod
    def commit(self, emitted: list[int], accepted: int, states: HiddenStates) -> None:
        """The text goes on by the `emitted` ids; the first `accepted` of them were proposed, by
        this session or by n-gram speculation in its place.

        states: the target's at the last token before and at each token proposed [1, G+1, H] a
        layer; they are valid up to the number of accepted tokens.
        """


@dataclass(kw_only=True)
class Drafter(ABC):
    """A drafter as loaded.

    vocab_size: V. vocabulary: how its vocabulary relates to the target's. form: which of its
    checkpoints runs. full_form_bytes: size of the full-vocabulary checkpoint for other engines.
    bytes: in memory, without what it shares with the target. layers: the target's hidden states
    that it reads, numbered as in forward.py.
    """

    vocab_size: int
    path: str = ""
    form: str = "full"
    vocabulary: Mapping[str, Any]
    bytes: int = 0
    full_form_bytes: int | None = None
    kv_bytes_per_token: int = 0
    layers: tuple[int, ...] = ()

    @abstractmethod
    def start(self, text: Text) -> Session:
        """A session on this text."""

    @abstractmethod
    def teacher_forced(
        self, ids: list[int], text: list[int], sampling: Sampling, states: HiddenStates
    ) -> Tensor:
        """q [R, V] before each token of `text` [R] after the prompt `ids`.

        q is zero where nothing would be proposed. states: the target's at every token but the last
        of `text`.
        """

    @abstractmethod
    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        """What drafts one token after so many others, to be timed."""

    def block(
        self, context_length: int, sampling: Sampling, count: int
    ) -> Callable[[], None] | None:
        """What drafts so many tokens at once, to be timed; None where each takes a step."""
        return None

    def side_by_side(self, states: HiddenStates, dtype: torch.dtype) -> Tensor:
        """The layers it reads, of the target's [1, T, H] each, in its own order [1, T, L * H]."""
        return torch.cat([states[k] for k in self.layers], -1).to(dtype)  # type: ignore[misc]


@dataclass(kw_only=True)
class HeadDrafter(Drafter):
    """A drafter whose head's entries stand for target ids, its tokens chosen one after the other.

    token_ids: target id of each entry [K], None where entry i is target id i. The logits are cut
    *before* any logits processor, so that q is exactly what is sampled from.
    """

    token_ids: Tensor | None = None

    def cut(self, logits: Tensor) -> Tensor:
        """Logits [..., K] over what may be drafted, of the head's."""
        return logits

    def to_target_ids(self, entries: Tensor) -> Tensor:
        return entries if self.token_ids is None else self.token_ids[entries]

    def over_target_ids(self, q: Tensor) -> Tensor:
        """q [..., K] over the target's vocabulary [..., V], zero where the draft has no entry.

        Entries of one target id (tokens of the same bytes) add up.
        """
        if self.token_ids is None:
            missing = self.vocab_size - q.shape[-1]
            assert missing >= 0
            return F.pad(q, (0, missing)) if missing else q
        full = torch.zeros((*q.shape[:-1], self.vocab_size), dtype=q.dtype, device=q.device)
        return full.scatter_add_(-1, self.token_ids.expand(q.shape), q)

    @abstractmethod
    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        """[N, K] before N tokens of `text`, and which is the first of them (`teacher_forced`).

        Before the others nothing would be proposed.
        """

    def teacher_forced(
        self, ids: list[int], text: list[int], sampling: Sampling, states: HiddenStates
    ) -> Tensor:
        logits, first = self.text_logits(ids, text, states)
        q = self.over_target_ids(warp(self.cut(logits), sampling))
        lacking = len(text) - len(q)
        return F.pad(q, (0, 0, first, lacking - first)) if lacking else q

    def in_turn(
        self, logits: Logits, count: int, sampling: Sampling, generator: torch.Generator
    ) -> Proposal:
        """`count` tokens, at least one. logits: before they are cut."""
        before: Tensor | None = None
        drafted: list[Tensor] = []
        qs: list[Tensor] = []
        for depth in range(count):
            scores = self.cut(logits(depth, before))
            if sampling.greedy:
                before = argmax(scores)
            else:
                qs.append(warp(scores, sampling))
                before = sample(qs[-1], generator)
            drafted.append(before)
        return Proposal(
            self.to_target_ids(torch.cat(drafted)),
            self.over_target_ids(torch.cat(qs)) if qs else None,
        )


def on_target_ids(token_ids: Tensor | None, embedding: Tensor) -> dict[str, Any]:
    """Fields of a trimmed-vocabulary drafter for the target with this embedding [V, H].

    token_ids: see HeadDrafter.
    """
    coverage = 1.0 if token_ids is None else len(token_ids) / len(embedding)
    return {
        "vocab_size": len(embedding),
        "form": "compact",
        "vocabulary": {"relation": "identical", "strategy": "direct", "coverage": coverage},
        "token_ids": token_ids,
    }


def timed_choice(logits: Callable[[], Tensor], sampling: Sampling) -> Callable[[], None]:
    """A step to be timed: it computes the logits and chooses a token."""

    def run() -> None:
        scores = logits()
        (argmax(scores) if sampling.greedy else warp(scores, sampling)).sum().item()

    return run


def timed_step(
    decoder: Decoder,
    cache: KVCache,
    width: int,
    position: int,
    sampling: Sampling,
    cut: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> Callable[[], None]:
    """A step on `width` tokens at a position as decoding takes it: forward, choice of a token."""
    # different tokens, because in a mixture of experts each brings its experts' weights
    numbers = torch.arange(width, device=decoder.device)[None]
    tokens = (1 + 997 * numbers) % len(decoder.embedding)
    return timed_choice(lambda: cut(decoder.forward(tokens, position, cache)), sampling)
