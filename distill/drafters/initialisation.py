"""For drafts made of the target: a frozen embedding, the target's states, least squares.

`read_states` also makes the states that distill/teacher/states.py keeps on disk.

Legend: T tokens of a text, H hidden size, N rows of a fit, I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn

from eval.decoding.forward import Decoder, HiddenStates, in_pieces

RIDGE = 1e-4  # relative to the mean diagonal; only for a well-conditioned solve


class FrozenEmbedding(nn.Embedding):
    """An embedding that is not trained: it keeps its dtype in a model that is trained in fp32.

    Its output is in fp32 and is exactly equal to the stored rows.
    """

    def __init__(self, weight: Tensor) -> None:
        rows, size = weight.shape
        super().__init__(rows, size, _weight=weight, _freeze=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenEmbedding:
        # an empty slice tells the device: converting all rows would copy them twice
        return super()._apply(lambda tensor: tensor.to(fn(tensor[:0]).device), recurse)

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


def read_states(decoder: Decoder, ids: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """The target's states of each layer [T - 1, H], at all tokens `ids` [T] but the last.

    The layers are numbered as in eval/decoding/forward.py.
    """
    read = ids[None, :-1].to(decoder.device)
    states: HiddenStates = dict.fromkeys(layers)
    for _ in in_pieces(decoder, read, 0, decoder.new_cache(*read.shape), states=states):
        pass
    return [state[0] for state in states.values() if state is not None]


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
