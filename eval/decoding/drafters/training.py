"""What kinds of draft share while they are started from the target and trained.

Legend: B rows, T positions, N response positions of a batch, C cached tokens at each, P prompt
tokens, R response tokens, L layers read, H hidden size, V the target's vocabulary, K rows of the
draft's head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

WIDTH = 16  # divides a batch's: of each width oneDNN keeps 5 MB for good (losses.rounded)
RIDGE = 1e-4  # relative to the mean diagonal: only keeps a solve well conditioned


class TrainingBatch(NamedTuple):
    """B rows padded to T tokens, N response positions in all.

    input_ids: [B, T], padded behind. positions: in the flattened batch, where the next token is
    predicted [N]. top_ids, top_logprobs: the target's most likely tokens there [N, C]. states: its
    hidden states [B, T, L, H], zeros where a text has ended. seeds: of each row's random numbers
    [B].
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


class HeadInput(NamedTuple):
    """What the head of a draft reads for M of its tokens, and which positions teach them.

    states: [M, H]. entries: of the batch's N positions, those whose distributions the tokens are to
    have [M]. weight: of these tokens in the loss.
    """

    states: Tensor
    entries: Tensor | slice = slice(None)
    weight: float = 1.0


class AnsweredText(NamedTuple):
    """A prompt [P], the target's answer [R], and its states at all tokens but the last
    [P + R - 1, L, H], None for a draft that reads none.
    """

    prompt_ids: Tensor
    response_ids: Tensor
    states: Tensor | None = None


@dataclass(frozen=True)
class Start:
    """What a draft is started from.

    token_ids: of a trimmed head [K], None for a head over all of V. texts: what it is fitted on;
    without any it has its shape alone, to be timed. layers: the target's states it reads. mask: the
    id of its mask, of kinds that have one.
    """

    target: PreTrainedModel
    token_ids: Tensor | None
    texts: Sequence[AnsweredText]
    num_layers: int
    max_gamma: int
    layers: tuple[int, ...]
    mask: int | None = None

    def head(self) -> Tensor:
        """The target's own head, its rows for `token_ids` [K, H]."""
        weight = self.target.get_output_embeddings().weight.detach()
        return weight.clone() if self.token_ids is None else weight[self.token_ids]


class FrozenEmbedding(nn.Embedding):
    """An embedding that is not trained: it keeps its dtype in a model that is trained in fp32.

    Its rows in fp32 are those very numbers.
    """

    def __init__(self, weight: Tensor) -> None:
        rows, size = weight.shape
        super().__init__(rows, size, _weight=weight, _freeze=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenEmbedding:
        # an empty slice tells the device: converting all rows would copy them twice
        return super()._apply(lambda tensor: tensor.to(fn(tensor[:0]).device), recurse)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


class LeastSquares:
    """The matrix M that minimises |M x - y|^2 over all rows x [N, I] and y [N, O] added."""

    def __init__(self, inputs: int, outputs: int, ridge: float = RIDGE) -> None:
        """ridge: relative to the mean diagonal of the inputs' products."""
        self.ridge = ridge
        self.gram = torch.zeros(inputs, inputs, dtype=torch.float64)
        self.cross = torch.zeros(inputs, outputs, dtype=torch.float64)

    def add(self, x: Tensor, y: Tensor) -> None:
        self.gram += (x.T @ x).cpu()
        self.cross += (x.T @ y.to(x.device)).cpu()

    def solution(self) -> Tensor:
        """M [O, I] in fp32."""
        scale = self.ridge * self.gram.diagonal().mean()
        ridge = scale * torch.eye(len(self.gram), dtype=torch.float64)
        return torch.linalg.solve(self.gram + ridge, self.cross).T.float()


def states_before(batch: TrainingBatch) -> Tensor:
    """The target's states when a token is drafted [N, L, H]: it has not read the newest token."""
    shifted = F.pad(batch.states, (0, 0, 0, 0, 1, 0))[:, :-1]
    return shifted.flatten(0, 1)[batch.positions]


def drawn_depths(positions: Tensor, width: int, seeds: Tensor, most: int, deeper: float) -> Tensor:
    """How many tokens of a draft are trained from each response position [N].

    d or more with probability deeper ** (d - 1), and no more than `most`. positions: in the
    flattened batch of that width. seeds: of each row's random numbers.
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
    """How many `drawn_depths` draws on average.

    Losses are divided by this and not by what was drawn, which differs from process to process.
    """
    return float(sum(deeper**depth for depth in range(most)))
