"""For drafts that are made from the target: shape, frozen embedding, scaled hidden states, and the
least-squares fit.

Legend: N rows of a fit, I inputs and O outputs of a matrix, B rows, T tokens, L layers read, H
hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from distill.drafters.kind import Origin

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
    gram: Any = None  # [I, I]: 6 GB for 27,648 inputs, so it is changed in place
    for x, y in pieces:
        # summed on the device of x: copying I x I values takes longer than their product
        products, with_y = x.T @ x, x.T @ y.to(x.device)
        if gram is None:
            gram, cross = products.double(), with_y.double()
        else:
            gram, cross = gram.add_(products), cross.add_(with_y)
    gram = gram.cpu()
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    # not by Cholesky, which raises where fp32 sums have made an eigenvalue negative
    return torch.linalg.solve(gram, cross.cpu()).T.float()


def shape_of(target: PreTrainedConfig) -> dict[str, Any]:
    """The keys of a config for layers in the target's shape, with an untied head."""
    kept = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "rms_norm_eps", "rope_parameters", "max_position_embeddings"),
    )
    text: Any = target
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    shape = {key: getattr(text, key) for key in kept}
    return {**shape, "head_dim": size, "tie_word_embeddings": False}


def to_train(model: Any, sizes: Tensor, embedding: Tensor) -> Any:
    """The model in fp32 with the target's frozen embedding, which divides states by `sizes` [L]."""
    model = model.float()
    model.set_input_embeddings(FrozenEmbedding(embedding))
    divide_states(model, sizes)
    return model


def usual_sizes(origin: Origin) -> Tensor:
    """The root mean square of each layer's states in the texts [L]; ones without texts."""
    if origin.states is None:
        return torch.ones(len(origin.layers))
    squares, count = torch.zeros(len(origin.layers), dtype=torch.float64), 0
    for states in map(origin.states, origin.texts):  # one text at a time is in memory
        squares += states.float().pow(2).sum((0, 2))
        count += states[:, 0].numel()
    return (squares / count).sqrt().float()


@torch.no_grad()
def divide_states(model: Any, sizes: Tensor) -> None:
    """Keep each layer's size [L] in the model for `scaled`; multiply the columns of `fc` by it.

    The output of `fc` on scaled states is what it was on the plain ones. Without scaling, layers
    with larger states would learn faster.
    """
    fc = model.model.fc.weight
    model.register_buffer("sizes", sizes.to(fc), persistent=False)
    fc.mul_(model.sizes.repeat_interleave(fc.shape[1] // len(sizes)))


def undivided(model: Any) -> Tensor:
    """The weight of `fc` for the plain states [H, L * H]."""
    fc: Tensor = model.model.fc.weight.detach()
    return (fc.unflatten(1, (len(model.sizes), -1)) / model.sizes[:, None]).flatten(1)


def scaled(model: PreTrainedModel, states: Tensor) -> Tensor:
    """The target's states [B, T, L, H], each layer divided by its size [B, T, L * H]."""
    return (states.float() / model.get_buffer("sizes")[:, None]).flatten(2)
