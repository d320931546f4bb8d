"""The interface of all kinds of drafter for decoding, timing and reports.

A drafter may use another tokenizer, read the target's hidden states, or draft nothing. Proposals
are always in the target's ids. Legend: G drafted tokens, T tokens of a text, R output tokens, V the
target's vocabulary, K entries of the draft's head, H hidden size, L layers read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from align.errors import UserError
from eval.decoding.forward import Decoder, HiddenStates, KVCache
from eval.decoding.recurrent import StatefulCache
from eval.decoding.verification import Sampling, argmax, sample, warp

# (depth from 0, head entry [1] of the token drafted before; None at depth 0) -> logits [1, K]
Logits = Callable[[int, Tensor | None], Tensor]


class Proposal(NamedTuple):
    """Drafted tokens: target ids [G].

    q: the distributions over target ids that the tokens were sampled from [G, V]; None when greedy
    or unknown (`verify`). free: no step of a model was needed.
    """

    tokens: Tensor
    q: Tensor | None = None
    free: bool = False


def no_draft(device: torch.device) -> Proposal:
    """A proposal of no token."""
    return Proposal(torch.zeros(0, dtype=torch.long, device=device))


class Text(NamedTuple):
    """The text at the start of a session: prompt and first token.

    ids: target ids. slots: the most tokens that the text may grow to. generator: of the random
    numbers for drafts. states: the target's hidden states [1, T, H] at all tokens except the last.
    draft_length: the most tokens that a step drafts. cache: the target's; each verification writes
    to it from the last token on.
    """

    ids: list[int]
    slots: int
    sampling: Sampling
    generator: torch.Generator
    states: HiddenStates
    draft_length: int
    cache: KVCache | None = None


class Session(ABC):
    """A drafter's state for one text."""

    @abstractmethod
    def propose(self, count: int) -> Proposal:
        """At most `count` tokens that follow the text."""

    @abstractmethod
    def commit(self, emitted: list[int], accepted: int, states: HiddenStates) -> None:
        """Append the `emitted` ids to the text; the first `accepted` of them were drafted.

        Drafted by this session, or by n-gram speculation instead. states: by layer, the target's
        [1, G+1, H] at the text's last token and at each drafted token; valid for accepted tokens.
        """


@dataclass(kw_only=True)
class Drafter(ABC):
    """A loaded drafter.

    vocab_size: V. decoder: of its model; None: it has none. path: its spec. vocabulary:
    relation to the target's vocabulary and the mapping. form: `full`, a language model over all
    of V, or a kind whose head may be trimmed. bytes: in memory, without tensors shared with the
    target. layers: numbers (forward.py) of the target's hidden states that it reads. most: the
    longest draft that it was made for; None: any length. own_tokens: the first tokens of a
    draft that are the target's own choice; the acceptance rate is that of the token after them.
    """

    vocab_size: int
    decoder: Any = None
    path: str = ""
    form: str = "full"
    vocabulary: Mapping[str, Any]
    bytes: int = 0
    kv_bytes_per_token: int = 0
    layers: tuple[int, ...] = ()
    most: int | None = None
    own_tokens: int = 0

    @property
    def recorded(self) -> bool:
        """Whether a GPU replays its forwards as CUDA graphs; true if it has no forwards."""
        return self.decoder is None or bool(self.decoder.recorded)

    @abstractmethod
    def start(self, text: Text) -> Session:
        """A session on this text."""

    @abstractmethod
    def teacher_forced(
        self, ids: list[int], text: list[int], sampling: Sampling, states: HiddenStates
    ) -> Tensor:
        """q [R, V] at each token of the output `text` [R] to the prompt `ids`.

        q is zero if nothing would be proposed. states: the target's at all tokens except the last.
        """

    @abstractmethod
    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        """A function that drafts one token after `context_length` tokens, for timing."""

    def draft_at_once(
        self, context_length: int, sampling: Sampling, count: int
    ) -> Callable[[], None] | None:
        """A function that drafts `count` tokens at once, for timing; None if each takes a step."""
        return None

    def side_by_side(self, states: HiddenStates, dtype: torch.dtype) -> Tensor:
        """The target's states of the layers that it reads, joined in that order [1, T, L * H]."""
        return torch.cat([states[k] for k in self.layers], -1).to(dtype)  # type: ignore[misc]


@dataclass(kw_only=True)
class HeadDrafter(Drafter):
    """A drafter whose head entries stand for target ids; it chooses one token after the other.

    token_ids: target id of each entry [K]; None: entry i is target id i. The logits are cut
    *before* the logits processors, so that q is exactly the distribution sampled from.
    """

    token_ids: Tensor | None = None

    def cut(self, logits: Tensor) -> Tensor:
        """The logits [..., K] of the entries that may be drafted, from all of the head's."""
        return logits

    def to_target_ids(self, entries: Tensor) -> Tensor:
        return entries if self.token_ids is None else self.token_ids[entries]

    def over_target_ids(self, q: Tensor) -> Tensor:
        """q [..., K] as [..., V] over target ids, zero for ids without an entry.

        The probabilities of entries with the same target id (tokens of the same bytes) are added.
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
        """Logits [N, K] at N tokens of `text`, and the index of the first (`teacher_forced`).

        For all other tokens, nothing would be proposed.
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
        """A proposal of `count` >= 1 tokens. logits: not yet cut."""
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


def on_target_ids(token_ids: Tensor | None, embedding: Tensor, kind: str) -> dict[str, Any]:
    """Fields of a drafter of this kind for the target with this embedding [V, H].

    token_ids: see HeadDrafter. Raises UserError for ids that the target does not have.
    """
    if token_ids is not None and not 0 <= token_ids.min() <= token_ids.max() < len(embedding):
        raise UserError(
            f"TOK-015: d2t of the draft names target ids up to {int(token_ids.max())} of "
            f"{len(embedding)}: it has ids instead of offsets, or is of another target. Fetch or "
            "train the draft again."
        )
    coverage = 1.0 if token_ids is None else len(token_ids) / len(embedding)
    return {
        "vocab_size": len(embedding),
        "form": kind,
        "vocabulary": {"relation": "identical", "strategy": "direct", "coverage": coverage},
        "token_ids": token_ids,
    }


def timed_choice(logits: Callable[[], Tensor], sampling: Sampling) -> Callable[[], None]:
    """A step for timing: it computes the logits and chooses a token."""

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
    """A step for timing: a forward of `width` tokens at a position, and the choice of a token.

    With linear attention it includes the rollback of a draft of which half was rejected.
    """
    # different tokens, because in a mixture of experts each token may read other experts
    numbers = torch.arange(width, device=decoder.device)[None]
    tokens = (1 + 997 * numbers) % len(decoder.embedding)

    def logits() -> Tensor:
        if isinstance(cache, StatefulCache):
            cache.after_step(position, width)
        return cut(decoder.forward(tokens, position, cache))

    return timed_choice(logits, sampling)
