"""A training batch, and the plan of what a draft reads and learns from it.

Both are made on the host before the batch reaches the device (distill/training_set.py), so that a
step never waits for the device to count anything.

Legend: B rows, T tokens of a row, N response positions of a batch, C cached tokens at each, L
layers read, H hidden size, Q slots of a row, M draft tokens that a batch trains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

MULTIPLE = 64  # divides T and Q: a step of a new shape leaves memory in oneDNN (losses.rounded)


class Plan(NamedTuple):
    """What a draft reads beside the texts, and what it learns.

    anchors: for each slot the number (0 to N - 1) of the response position that it belongs to, or
    -1 without a slot [B, Q]. depths: tokens from the anchor to the slot [B, Q]. taken: which of the
    draft's flattened outputs are trained [M]. learned: the number of the position whose
    distribution each of them learns [M]. counts: the number of them that are the first, the second,
    … token of a draft; they have this order.
    """

    anchors: Tensor
    depths: Tensor
    taken: Tensor
    learned: Tensor
    counts: tuple[int, ...]


class TrainingBatch(NamedTuple):
    """Texts in B rows of T tokens, one after another. N response positions in all.

    input_ids: [B, T], 0 in the padding. texts: the number of each token's text in the batch, -1 in
    the padding [B, T]. position_ids: the number of each token in its text [B, T]. positions: where
    the next token is predicted, in the flattened batch, ascending [N]. top_ids, top_logprobs: the
    target's most likely tokens there, as entries of the draft's head or -1 [N, C]. states: the
    target's hidden states [B, T, L, H], zeros after a text. seeds: a random seed for each text.
    plan: what `DraftKind.plan` makes of the batch. packed: False if each row has one text.
    """

    input_ids: Tensor
    texts: Tensor
    position_ids: Tensor
    positions: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    states: Any = None
    seeds: Any = None
    plan: Any = None
    packed: bool = True

    @property
    def numbers(self) -> Tensor:
        """The number of each response position in its text [N]."""
        return self.position_ids.flatten()[self.positions]


def text_starts(sizes: Sequence[int], width: int, packed: bool) -> list[int]:
    """Where each text begins in a flattened batch.

    sizes: tokens of each text. width: of a row, which has one text if they are not packed.
    """
    return [0, *accumulate(sizes[:-1])] if packed else [row * width for row in range(len(sizes))]


class HeadInput(NamedTuple):
    """Inputs of the draft's LM head for all M draft tokens that a batch trains.

    states: [M, H]. If the plan is not made for training, the first N are for the first token of a
    draft at each position. learned: see Plan [M]. weight: the factor on each of the M losses [M],
    or on all. All states are one input of one head, because each product with a head keeps a
    gradient as large as the head until the backward pass.
    """

    states: Tensor
    learned: Tensor
    weight: Tensor | float = 1.0


def drawn_depths(batch: TrainingBatch, most: int, deeper: float, again: bool = False) -> Tensor:
    """The number of draft tokens that each response position trains [N].

    The number is d or more with probability deeper ** (d - 1), and at most `most`. It depends on
    the seed of the text alone. again: draw other random numbers.
    """
    counts = batch.texts.flatten()[batch.positions].bincount(minlength=len(batch.seeds)).tolist()
    seeds = ~batch.seeds if again else batch.seeds  # a generator reads the lowest 32 bits alone
    uniform = torch.cat(
        [
            torch.rand(count, generator=torch.Generator().manual_seed(seed))
            for count, seed in zip(counts, seeds.tolist(), strict=True)
        ]
    )
    drawn = 1 + uniform.clamp_min(1e-9).log() / math.log(deeper)
    return drawn.long().clamp(max=most)


def mean_depth(most: int, deeper: float) -> float:
    """The mean of what `drawn_depths` draws.

    Losses are divided by this mean, because the number that is drawn differs between processes.
    """
    return float(sum(deeper**depth for depth in range(most)))


def followed(positions: Tensor, later: int) -> Tensor:
    """Whether each response position has another one of the same text `later` tokens on [N]."""
    text_goes_on = torch.zeros_like(positions, dtype=torch.bool)
    ends = max(0, len(positions) - later)
    text_goes_on[:ends] = positions[later:] == positions[:ends] + later
    return text_goes_on


def slots(batch: TrainingBatch, anchors: Tensor, depths: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Slots by row: their anchors and depths [B, Q], and the index of each in the flat table [S].

    anchors, depths: of S slots. Within a row they keep their order.
    """
    rows, width = batch.input_ids.shape
    row_of = batch.positions[anchors] // width
    members = [(row_of == row).nonzero()[:, 0] for row in range(rows)]
    most = max(1, *map(len, members))
    tables = [
        pad_sequence([values[member] for member in members], True, filler)
        for values, filler in ((anchors, -1), (depths, 0))
    ]
    padding = (0, -most % MULTIPLE + most - tables[0].shape[1])
    of_anchors, of_depths = (
        torch.nn.functional.pad(table, padding, value=filler)
        for table, filler in zip(tables, (-1, 0), strict=True)
    )
    places = torch.empty_like(anchors)
    for row, member in enumerate(members):
        places[member] = row * of_anchors.shape[1] + torch.arange(len(member))
    return of_anchors, of_depths, places


def unrolled_plan(
    batch: TrainingBatch, places: Tensor, size: int, steps: int, by_draft: bool, **slots: Tensor
) -> Plan:
    """The plan of a draft that reads its own states in several steps.

    Step g + 1 of a draft learns the g-th position after the one where it begins. places: the place
    of each response position in the outputs of a step [N]. size: the number of these outputs.
    by_draft: whether the outputs of a draft have the place of its first position at each step, or
    that of the position that they learn.
    """
    none = torch.zeros(0, dtype=torch.long)
    taken, learned = [], []
    for step in range(steps):
        numbers = followed(batch.positions, step).nonzero()[:, 0]
        taken.append(step * size + places[numbers if by_draft else numbers + step])
        learned.append(numbers + step)
    tables = {"anchors": none, "depths": none} | slots
    counts = tuple(map(len, taken))
    return Plan(taken=torch.cat(taken), learned=torch.cat(learned), counts=counts, **tables)


def unrolled_input(outputs: Sequence[Tensor], plan: Plan, share: float) -> HeadInput:
    """The HeadInput of a draft that reads its own states.

    outputs: of each step, [B, …, H]. The loss of a step has `share` times the weight of the step
    before; the weights of the steps sum to 1.
    """
    size, total = outputs[0][..., 0].numel(), mean_depth(len(outputs), share)
    states = torch.stack(list(outputs)).flatten(0, -2)[plan.taken]
    weights = share ** (plan.taken // size).to(states.dtype) / total
    return HeadInput(states, plan.learned, weights)


def recomputed(layer: Any, function: Callable[..., Tensor], *inputs: Any, **keys: Any) -> Tensor:
    """function(*inputs, **keys), a part of the layer. With activation checkpointing the backward
    pass computes it again; transformers does so in the forward of a layer's class only.
    """
    if layer.gradient_checkpointing and layer.training:
        return checkpoint(function, *inputs, use_reentrant=False, **keys)
    return function(*inputs, **keys)
