"""Shared by kinds of draft at their start: the target's texts, frozen embedding, least squares.

Legend: P prompt tokens, R response tokens, L layers read, H hidden size, N rows of a fit, I inputs
and O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eval.decoding.forward import HiddenStates, in_pieces
from eval.decoding.target import Target

RIDGE = 1e-4  # relative to the mean diagonal: only keeps a solve well conditioned


class AnsweredText(NamedTuple):
    """A prompt [P], the target's response [R], and the target's states at all tokens but the last
    [P + R - 1, L, H]; None for a draft that reads none.
    """

    prompt_ids: Tensor
    response_ids: Tensor
    states: Tensor | None = None


class FrozenEmbedding(nn.Embedding):
    """An embedding that is not trained: it keeps its dtype in a model that is trained in fp32.

    Its output is in fp32 and has exactly the numbers of its rows.
    """

    def __init__(self, weight: Tensor) -> None:
        rows, size = weight.shape
        super().__init__(rows, size, _weight=weight, _freeze=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenEmbedding:
        # an empty slice tells the device: converting all rows would copy them twice
        return super()._apply(lambda tensor: tensor.to(fn(tensor[:0]).device), recurse)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


def read_states(target: Target, text: AnsweredText, layers: Sequence[int]) -> list[Tensor]:
    """The target's states of these layers at the text's tokens but the last [P + R - 1, H] each, in
    fp32. The layers are numbered as in eval/decoding/forward.py.
    """
    ids = torch.cat([text.prompt_ids, text.response_ids])[None, :-1].to(target.decoder.device)
    states: HiddenStates = dict.fromkeys(layers)
    for _ in in_pieces(target.decoder, ids, 0, target.decoder.new_cache(*ids.shape), states=states):
        pass
    return [state[0].float() for state in states.values() if state is not None]


def least_squares(pieces: Iterable[tuple[Tensor, Tensor]], ridge: float = RIDGE) -> Tensor:
    """The matrix M [O, I], in fp32, with the smallest |M x - y|^2 over all rows of the pieces.

    pieces: x [N, I] and y [N, O] each, at least one. ridge: relative to the mean diagonal of the
    inputs' products.
    """
    gram = cross = torch.zeros(1, 1, dtype=torch.float64)
    for x, y in pieces:
        gram = gram + (x.T @ x).cpu()
        cross = cross + (x.T @ y.to(x.device)).cpu()
    scaled = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    return torch.linalg.solve(gram + scaled, cross).T.float()
