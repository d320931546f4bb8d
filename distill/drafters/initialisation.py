"""For drafts that are made from the target: a frozen embedding and the least-squares fit.

Legend: N rows of a fit, I inputs and O outputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

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


def least_squares(pieces: Iterable[tuple[Tensor, Tensor]], ridge: float = RIDGE) -> Tensor:
    """The matrix M [O, I], in fp32, with the smallest |M x - y|^2 over all rows of the pieces.

    pieces: x [N, I] and y [N, O] each, at least one. ridge: relative to the mean diagonal of the
    inputs' products.
    """
    gram = cross = torch.zeros(1, 1, dtype=torch.float64)
    for x, y in pieces:
        # summed on the device of x: copying I x I values takes longer than their product
        gram = gram.to(x.device) + x.T @ x
        cross = cross.to(x.device) + x.T @ y.to(x.device)
    gram, cross = gram.cpu(), cross.cpu()
    scaled = ridge * gram.diagonal().mean() * torch.eye(len(gram), dtype=torch.float64)
    return torch.linalg.solve(gram + scaled, cross).T.float()
