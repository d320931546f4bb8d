"""What decoding, timing and reports need of a drafter, whatever kind it is.

A drafter may have ids of its own, read the target's hidden states, or draft nothing at all; what it
proposes is always in the target's ids. Legend: B rows, G drafted tokens, R answer tokens, V the
target's vocabulary, K rows of the draft's head, H hidden size, L layers read.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.decoding.forward import Decoder, HiddenStates
from eval.decoding.verification import Sampling, argmax, sample, warp

# [B, K] of the token at a depth from 0 on, after the token drafted before it [B]: a row of the
# head, None for the first
Logits = Callable[[int, Tensor | None], Tensor]


class Proposal(NamedTuple):
    """tokens: in the target's ids [B, G].

    q: the distributions that they were sampled from, over the target's ids [B, G, V]; None
    when greedy, and where they are not known (`verify_without_q`). counts: how many tokens each row
    proposes [B], the rest being padding; None where all propose G. free: rows whose tokens took no
    step of a model. certainty: how sure the draft was when it went on to each token [B, G], the
    number that `stop_below` is held against; None where that was 0.
    """

    tokens: Tensor
    q: Tensor | None = None
    counts: Tensor | None = None
    free: Sequence[int] = ()
    certainty: Tensor | None = None


class Texts(NamedTuple):
    """The texts of a batch, prompt and first token each, as a drafter takes them up.

    ids: of the target, a list a text. slots: how many tokens a text may have in the end. generator:
    of the random numbers that drafts are sampled with. states: for each text the target's hidden
    states at all its tokens but the last [1, T, H].
    """

    ids: list[list[int]]
    slots: int
    sampling: Sampling
    generator: torch.Generator
    states: list[HiddenStates]


class Session(ABC):
    """A drafter at work on the texts of a batch."""

    @abstractmethod
    def propose(self, count: int, stop_below: float) -> Proposal:
        """At most `count` tokens a row, none included, and no more once the draft doubts them.

        stop_below: as in `DraftLength`; of a batch the rows' mean confidence counts.
        """

    @abstractmethod
    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        """Each text goes on by its `emitted` ids, the first `accepted` of them as proposed.

        states: the target's at the last token before and at each token proposed [B, G+1, H] a
        layer; a row's are valid up to its number of accepted tokens.
        """

    @abstractmethod
    def keep(self, rows: list[int]) -> None:
        """Only these rows go on, in this order."""


@dataclass(kw_only=True)
class Drafter(ABC):
    """A drafter as loaded.

    vocab_size: V. vocabulary: how its own relates to the target's. form: which of its saved forms
    runs, full_form_bytes: what the form for other engines weighs. bytes: its own in memory, what it
    shares with the target not counted. layers: the target's hidden states it reads, numbered as in
    forward.py.
    """

    vocab_size: int
    path: str = ""
    form: str = "full"
    vocabulary: Mapping[str, Any]
    bytes: int = 0
    full_form_bytes: int | None = None
    kv_bytes_per_token: int = 0
    layers: tuple[int, ...] = ()

    @property
    def q_rows(self) -> int:
        """How many probabilities of q go with a token that was sampled; 0 where q is not known, or
        is 1 at the token.
        """
        return 0

    @abstractmethod
    def start(self, texts: Texts) -> Session:
        """A session on these texts."""

    @abstractmethod
    def teacher_forced(
        self, ids: list[int], text: list[int], samplings: Sequence[Sampling], states: HiddenStates
    ) -> Iterator[Tensor]:
        """q [1, R, V] before each token of `text` [R] after the prompt `ids`, at each sampling.

        A row is zero where nothing would be proposed. states: the target's at every token but the
        last of `text`.
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
        """The layers it reads, of the target's [B, T, H] each, in its own order [B, T, L * H]."""
        return torch.cat([states[k] for k in self.layers], -1).to(dtype)  # type: ignore[misc]

    def probe(self, ids: list[int]) -> Tensor:
        """Numbers that this drafter computes from a text of target ids; finite if it is sound."""
        return torch.zeros(1)


@dataclass(kw_only=True)
class DecoderDrafter(Drafter):
    """A drafter with a model of its own.

    rows: only the head's first so many may be drafted (the rest is padding), None for all.
    """

    decoder: Decoder
    rows: int | None = None

    def __post_init__(self) -> None:
        self.kv_bytes_per_token = self.decoder.new_cache(1, 1).bytes_per_token()

    def cut(self, logits: Tensor) -> Tensor:
        """Logits [..., K] over what may be drafted, of the head's [..., D]."""
        return logits[..., : self.rows]

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        # in ids of its own its context may be shorter than the target's
        at = min(context_length, self.decoder.context_length - 1)
        return timed_step(self.decoder, 1, at, sampling, self.cut)


@dataclass(kw_only=True)
class HeadDrafter(Drafter):
    """A drafter whose head's rows stand for target ids, its tokens chosen one after the other.

    token_ids: target id of each head row [K], None where head row i is target id i. The logits are
    cut *before* any warper, so that q is exactly what is sampled from.
    """

    token_ids: Tensor | None = None

    @property
    def q_rows(self) -> int:
        return self.vocab_size if self.token_ids is None else len(self.token_ids.unique())

    def cut(self, logits: Tensor) -> Tensor:
        """Logits [..., K] over what may be drafted, of the head's."""
        return logits

    def certainty(self, q: Tensor, chosen: Tensor, logits: Tensor) -> Tensor:
        """The draft's own probability [B] of the rows it chose; logits: the head's, before the cut.

        q [B, K]: after the warpers if sampled.
        """
        return q.gather(-1, chosen[:, None])[:, 0]

    def to_target_ids(self, rows: Tensor) -> Tensor:
        return rows if self.token_ids is None else self.token_ids[rows]

    def over_target_ids(self, q: Tensor) -> Tensor:
        """q [..., K] over the target's vocabulary [..., V], zero where the draft has no row.

        Rows of one target id (tokens of the same bytes) add up.
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
        """[1, N, K] before N tokens of `text`, and which is the first of them (`teacher_forced`).

        Before the others nothing would be proposed.
        """

    def teacher_forced(
        self, ids: list[int], text: list[int], samplings: Sequence[Sampling], states: HiddenStates
    ) -> Iterator[Tensor]:
        logits, first = self.text_logits(ids, text, states)
        for sampling in samplings:
            q = self.over_target_ids(warp(self.cut(logits), sampling))
            lacking = len(text) - q.shape[1]
            yield F.pad(q, (0, 0, first, lacking - first)) if lacking else q

    def in_turn(
        self,
        logits: Logits,
        count: int,
        stop_below: float,
        sampling: Sampling,
        generator: torch.Generator,
    ) -> Proposal:
        """`count` tokens, at least one, and no more once the draft doubts them (Session.propose).

        logits: before they are cut.
        """
        before: Tensor | None = None
        drafted: list[Tensor] = []
        qs: list[Tensor] = []
        certainty: list[Tensor] = []  # before each token [B]
        product = torch.ones((), device=generator.device)
        while len(drafted) < count and not (drafted and float(product.mean()) < stop_below):
            head = logits(len(drafted), before)
            scores = self.cut(head)
            if sampling.greedy:
                before = argmax(scores)
                q = scores.float().softmax(-1) if stop_below else scores
            else:
                q = warp(scores, sampling)
                before = sample(q, generator)
                qs.append(q)
            if stop_below:
                certainty.append(product.expand(len(before)))
                product = product * self.certainty(q, before, head)
            drafted.append(before)
        return Proposal(
            self.to_target_ids(torch.stack(drafted, dim=1)),
            self.over_target_ids(torch.stack(qs, dim=1)) if qs else None,
            certainty=torch.stack(certainty, dim=1) if stop_below else None,
        )


def on_target_ids(token_ids: Tensor | None, embedding: Tensor) -> dict[str, Any]:
    """What is known of a draft made for the target of that embedding [V, H], in its compact form.

    token_ids: as of a HeadDrafter.
    """
    coverage = 1.0 if token_ids is None else len(token_ids) / len(embedding)
    return {
        "vocab_size": len(embedding),
        "form": "compact",
        "vocabulary": {"relation": "identical", "strategy": "direct", "coverage": coverage},
        "token_ids": token_ids,
    }


class RowByRow(Session):
    """A session for each row of the batch."""

    def __init__(self, sessions: list[Session]) -> None:
        self.sessions = sessions

    def propose(self, count: int, stop_below: float) -> Proposal:
        proposals = [session.propose(count, stop_below) for session in self.sessions]
        if len(proposals) == 1:
            return proposals[0]
        rows = range(len(proposals))
        return merged(proposals, [slice(i, i + 1) for i in rows], len(rows), stop_below)

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        for i, session in enumerate(self.sessions):
            of_row = {layer: None if h is None else h[i : i + 1] for layer, h in states.items()}
            session.commit([emitted[i]], [accepted[i]], of_row)

    def keep(self, rows: list[int]) -> None:
        self.sessions = [self.sessions[i] for i in rows]


def merged(
    proposals: Sequence[Proposal], places: Sequence[slice], rows: int, stop_below: float
) -> Proposal:
    """One proposal of several. places: the rows of each; a later one replaces what stands there."""
    lengths = [0] * rows
    for proposal, at in zip(proposals, places, strict=True):
        width, counts = proposal.tokens.shape[1], proposal.counts
        lengths[at] = [width] * len(proposal.tokens) if counts is None else counts.tolist()
    size = rows, max(lengths)
    tokens = proposals[0].tokens.new_zeros(size)
    certainty = torch.ones(size, device=tokens.device) if stop_below else None
    q = None
    for proposal, at in zip(proposals, places, strict=True):
        width = min(proposal.tokens.shape[1], size[1])
        tokens[at, :width] = proposal.tokens[:, :width]
        if certainty is not None and proposal.certainty is not None:
            certainty[at, :width] = proposal.certainty[:, :width]
        if proposal.q is not None:
            q = proposal.q.new_zeros((*size, proposal.q.shape[2])) if q is None else q
            q[at, :width] = proposal.q[:, :width]
    return Proposal(tokens, q, torch.tensor(lengths, device=tokens.device), certainty=certainty)


def timed_choice(logits: Callable[[], Tensor], sampling: Sampling) -> Callable[[], None]:
    """A step to be timed: what computes the logits, and the choice of a token."""

    def run() -> None:
        scores = logits()
        (argmax(scores) if sampling.greedy else warp(scores, sampling)).sum().item()

    return run


def timed_step(
    decoder: Decoder,
    width: int,
    context_length: int,
    sampling: Sampling,
    cut: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> Callable[[], None]:
    """A step on `width` tokens as decoding takes it: forward, head, the choice of a token."""
    tokens = torch.ones((1, width), dtype=torch.long, device=decoder.device)
    cache = decoder.new_cache(1, context_length + width)
    return timed_choice(lambda: cut(decoder.forward(tokens, context_length, cache)), sampling)
