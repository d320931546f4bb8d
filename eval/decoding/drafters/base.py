"""What decoding, timing and reports need of a drafter, whatever kind it is.

A kind is one file of this folder. A drafter may have ids of its own, read the target's hidden
states, or draft nothing at all; what it proposes is always in the target's ids. Legend: B rows, G
drafted tokens, R answer tokens, V the target's vocabulary, H its hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eval.decoding.forward import Decoder, HiddenStates
from eval.decoding.verification import Sampling, argmax, warp


class Proposal(NamedTuple):
    """tokens: in the target's ids [B, G].

    q: the very distributions that they were sampled from, over the target's ids [B, G, V]; None
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


class Doubt:
    """How sure a draft is of its tokens so far, and whether another is drafted (`DraftLength`).

    On a GPU the host learns how sure it is of a token while the next one is drafted: the device
    never waits. What was drafted beyond the doubt is taken back (`standing`), so that the draft is
    the same.
    """

    def __init__(self, stop_below: float, device: torch.device) -> None:
        self.stop_below, self.late = stop_below, tokens_late(device)
        self.product = torch.ones((), device=device)
        self.reached: list[Tensor] = []  # before each token [B]
        self.means: list[Callable[[], float]] = []  # after each

    def add(self, probabilities: Tensor) -> None:
        """The draft's own of the tokens it has just chosen [B]."""
        self.reached.append(self.product.expand(len(probabilities)))
        self.product = self.product * probabilities
        self.means.append(on_its_way(self.product.mean()))

    def stops(self) -> bool:
        """Whether no further token is drafted, as far as the host knows."""
        known = len(self.means) - self.late
        return known > 0 and self.means[known - 1]() < self.stop_below

    def standing(self) -> int:
        """How many of the tokens drafted stand."""
        sure = (at for at, mean in enumerate(self.means[:-1], 1) if mean() < self.stop_below)
        return next(sure, len(self.means))


def tokens_late(device: torch.device) -> int:
    """How many tokens the host lets a device draft ahead of what it knows."""
    return 0 if device.type == "cpu" else 1


def on_its_way(number: Tensor) -> Callable[[], float]:
    """A number's value; whoever asks waits until a GPU has sent it, and for nothing later."""
    if number.device.type != "cuda":
        return lambda: float(number)
    here = number.to("cpu", non_blocking=True)
    sent = torch.cuda.Event()
    sent.record()

    def value() -> float:
        sent.synchronize()
        return float(here)

    return value


@dataclass(kw_only=True)
class Drafter(ABC):
    """A drafter as loaded.

    vocab_size: V. vocabulary: how its own relates to the target's. form: which of its saved forms
    runs, full_form_bytes: what the form for other engines weighs. bytes: its own in memory, what it
    shares with the target not counted. layers: the target's hidden states it reads, numbered as in
    forward.py. alike: every token of a draft is drafted as the first one, so that `teacher_forced`
    tells of all of them. one_form: its folder is itself the form for other engines, which
    otherwise lies one level up.
    """

    vocab_size: int
    path: str = ""
    form: str = "full"
    vocabulary: Mapping[str, Any]
    bytes: int = 0
    full_form_bytes: int | None = None
    kv_bytes_per_token: int = 0
    layers: tuple[int, ...] = ()
    alike: bool = True
    one_form: bool = False

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

    def block(self, context_length: int) -> Callable[[], None] | None:
        """What a draft of any number of tokens takes besides, once, to be timed; None for nothing.

        So a draft of gamma tokens takes as long as this and gamma times `step`.
        """
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


class GroupedRows(Session):
    """Sessions side by side, each on rows of the batch that are its own."""

    def __init__(self, sessions: list[Session], rows: list[list[int]] | None = None) -> None:
        """rows: of each session; None where each is on one row."""
        self.sessions = sessions
        self.rows = [[row] for row in range(len(sessions))] if rows is None else rows

    def propose(self, count: int, stop_below: float) -> Proposal:
        made = [session.propose(count, stop_below) for session in self.sessions]
        if len(made) == 1:
            return made[0]
        return merged(made, self.rows, sum(map(len, self.rows)), stop_below)

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        for session, rows in zip(self.sessions, self.rows, strict=True):
            at = _index(rows)
            own = {layer: None if v is None else v[at] for layer, v in states.items()}
            session.commit([emitted[i] for i in rows], [accepted[i] for i in rows], own)

    def keep(self, rows: list[int]) -> None:
        left = []
        for session, own in zip(self.sessions, self.rows, strict=True):
            if kept := [row for row in rows if row in own]:
                session.keep([own.index(row) for row in kept])
                left.append((session, [rows.index(row) for row in kept]))
        self.sessions, self.rows = [one for one, _ in left], [own for _, own in left]


def _index(rows: list[int]) -> slice | list[int]:
    """The same rows as an index: a list has to go to a GPU first, a slice has not."""
    whole = slice(rows[0], rows[-1] + 1)
    return whole if rows == list(range(whole.start, whole.stop)) else rows


def merged(
    made: Sequence[Proposal], places: Sequence[list[int]], rows: int, stop_below: float
) -> Proposal:
    """One proposal of several. places: the rows of each; a later one replaces what stands there."""
    lengths = [0] * rows
    for one, own in zip(made, places, strict=True):
        width = one.tokens.shape[1]
        counts = [width] * len(own) if one.counts is None else one.counts.tolist()
        for row, length in zip(own, counts, strict=True):
            lengths[row] = length
    size = rows, max(lengths)
    tokens = made[0].tokens.new_zeros(size)
    certainty = torch.ones(size, device=tokens.device) if stop_below else None
    q = None
    for one, at in zip(made, map(_index, places), strict=True):
        width = min(one.tokens.shape[1], size[1])
        tokens[at, :width] = one.tokens[:, :width]
        if certainty is not None and one.certainty is not None:
            certainty[at, :width] = one.certainty[:, :width]
        if one.q is not None:
            q = one.q.new_zeros((*size, one.q.shape[2])) if q is None else q
            q[at, :width] = one.q[:, :width]
    return Proposal(tokens, q, torch.tensor(lengths, device=tokens.device), certainty=certainty)


def timed_choice(logits: Callable[[], Tensor], sampling: Sampling) -> Callable[[], None]:
    """A step to be timed: what computes the logits, and the choice of a token."""

    def run() -> None:
        found = logits()
        (argmax(found) if sampling.greedy else warp(found, sampling)).sum().item()

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
