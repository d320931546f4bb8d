"""A training batch, the number of draft tokens that each position trains, and slots for them.

Legend: B rows, T positions, N response positions of a batch, C cached tokens at each, L layers
read, H hidden size, M draft tokens that a batch trains, S slots of all rows, Q slots of a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

WIDTH = 16  # divides T: a step of a new T leaves 5 MB in oneDNN (losses.rounded: per product)


class TrainingBatch(NamedTuple):
    """B rows padded to T tokens, N response positions in all.

    input_ids: [B, T], padded at the end. positions: where the next token is predicted, in the
    flattened batch [N]. top_ids, top_logprobs: the target's most likely tokens there, as entries of
    the draft's head or -1 [N, C]. states: the target's hidden states [B, T, L, H], zeros after a
    text. seeds: a random seed for each row [B].
    """

    input_ids: Tensor
    positions: Tensor
    top_ids: Tensor
    top_logprobs: Tensor
    states: Any = None
    seeds: Any = None

    @property
    def width(self) -> int:
        """T."""
        return self.input_ids.shape[1]

    @property
    def position_numbers(self) -> Tensor:
        """The numbers 0 to N - 1 of the response positions [N]."""
        return torch.arange(len(self.positions), device=self.positions.device)


class HeadInput(NamedTuple):
    """Inputs of the draft's LM head for all M draft tokens that a batch trains.

    states: [M, H]. For a model that is not in training mode, the first N are for the first token of
    a draft at each position. learned: the number of the position (0 to N - 1) whose distribution
    each token learns [M]. weight: the factor on each of the M losses [M], or on all. All states are
    one input of one head, because each product with a head keeps a gradient as large as the head
    until the backward pass.
    """

    states: Tensor
    learned: Tensor
    weight: Tensor | float = 1.0


def drawn_depths(positions: Tensor, width: int, seeds: Tensor, most: int, deeper: float) -> Tensor:
    """The number of draft tokens that each response position trains [N].

    The number is d or more with probability deeper ** (d - 1), and at most `most`.
    positions: in the flattened batch of rows of `width`. seeds: a random seed for each row.
    """
    counts = (positions // width).bincount(minlength=len(seeds)).tolist()
    uniform = torch.cat(
        [
            torch.rand(count, generator=torch.Generator().manual_seed(seed))
            for count, seed in zip(counts, seeds.tolist(), strict=True)
        ]
    )
    drawn = 1 + uniform.clamp_min(1e-9).log() / math.log(deeper)
    return drawn.long().clamp(max=most).to(positions.device)


def mean_depth(most: int, deeper: float) -> float:
    """The mean of what `drawn_depths` draws.

    Losses are divided by this mean, because the number that is drawn differs between processes.
    """
    return float(sum(deeper**depth for depth in range(most)))


def followed(positions: Tensor, chosen: Tensor, later: int) -> Tensor:
    """The numbers of the chosen response positions whose text has another one `later` tokens on.

    positions: as in TrainingBatch. chosen: whether a position is chosen [N].
    """
    numbers = chosen[: max(0, len(chosen) - later)].nonzero()[:, 0]
    return numbers[positions[numbers + later] == positions[numbers] + later]


def recomputed(layer: Any, function: Callable[..., Tensor], *inputs: Any) -> Tensor:
    """function(*inputs), a part of the layer. With activation checkpointing the backward pass
    computes it again; transformers does so for whole layers that are called as modules only.
    """
    if layer.gradient_checkpointing and layer.training:
        return checkpoint(function, *inputs, use_reentrant=False)
    return function(*inputs)


def additive(visible: Tensor, like: Tensor) -> Tensor:
    """The mask `visible` as scores to add, in the dtype in which attention computes on `like`.

    Attention makes such a mask of a boolean one, and keeps it for each layer.
    """
    device = like.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else like.dtype
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, torch.finfo(dtype).min)


def unrolled_input(batch: TrainingBatch, steps: Iterable[Tensor], share: float) -> HeadInput:
    """The HeadInput of a draft that reads its own states in several steps.

    steps: for each step of a draft, the LM head's inputs at each token [B, T, H]. The loss of a
    step has `share` times the weight of the step before; the weights of the steps sum to 1.
    """
    positions = batch.positions
    states, learned, weights = [], [], []
    for step, y in enumerate(steps):
        numbers = step + followed(positions, positions >= 0, step)
        states.append(y.flatten(0, 1)[positions[numbers]])
        learned.append(numbers)
        weights.append(torch.full(numbers.shape, share**step, device=y.device))
    total = mean_depth(len(weights), share)
    return HeadInput(torch.cat(states), torch.cat(learned), torch.cat(weights) / total)


class Slots(NamedTuple):
    """What a draft reads beside the texts: slots that belong to anchors, sorted by row, [S] each.

    rows: the row of the batch. slots: the number of slots before it in the row. anchors: the number
    of its anchor among the N positions. depths: tokens from the anchor to the slot. shape: B and Q;
    WIDTH divides Q.
    """

    rows: Tensor
    slots: Tensor
    anchors: Tensor
    depths: Tensor
    shape: tuple[int, int]

    @classmethod
    def of(cls, batch: TrainingBatch, anchors: Tensor, depths: Tensor) -> Slots:
        """Slots with these anchors and depths [S]; within a row they keep their order."""
        rows, order = (batch.positions[anchors] // batch.width).sort(stable=True)
        counts = rows.bincount(minlength=len(batch.input_ids))
        slots = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[rows]
        most = max(1, int(counts.max()))
        shape = len(counts), -(-most // WIDTH) * WIDTH
        return cls(rows, slots, anchors[order], depths[order], shape)

    def placed(self, values: Tensor, filler: int) -> Tensor:
        """The slots' values [S] by row [B, Q], `filler` where there is no slot."""
        table = torch.full(self.shape, filler, device=values.device)
        table[self.rows, self.slots] = values
        return table
