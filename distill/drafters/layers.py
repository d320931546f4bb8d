"""A decoder layer as drafts train it: it may read more tokens than it computes outputs for.

Legend: B rows, K tokens read, M trained tokens, A heads, D size of a head, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer
from transformers.models.mistral.modeling_mistral import MistralDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from distill.drafters.attention import Rotary, rotated
from distill.drafters.batch import recomputed

# layers of one shape, and the number of tokens that a query sees at most (None: all)
PLAIN: dict[type, Callable[[Any], int | None]] = {
    LlamaDecoderLayer: lambda _: None,
    MistralDecoderLayer: lambda attention: attention.config.sliding_window,
    Qwen2DecoderLayer: lambda attention: attention.sliding_window,
    Qwen3DecoderLayer: lambda attention: attention.sliding_window,
}


def whole(weight: Tensor) -> Tensor:
    """A weight whose module is not called, so that FSDP does not gather it.

    Each process computes the gradient of its own part of the batch.
    """
    if not isinstance(weight, DTensor):
        return weight
    return weight.full_tensor(grad_placements=[Partial("avg")] * weight.device_mesh.ndim)


def normed(norm: Any, x: Tensor) -> Tensor:
    """The RMS norm of x [B, K, H], in the dtype of the products that read it.

    Converted once: autocast would convert it for each product.
    """
    weight = whole(norm.weight)
    # with values and weights of two dtypes torch has no fused kernel, and warns
    y = F.rms_norm(x.to(weight.dtype), weight.shape, weight, norm.variance_epsilon)
    return as_factor(y)


def as_factor(x: Tensor) -> Tensor:
    """x in the dtype in which autocast computes products, if it is on."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def rotary_of(body: Any, positions: Tensor) -> Rotary:
    """What turns queries and keys of a model at these positions [B, K]."""
    cos, sin = body.rotary_emb(positions.float(), positions)
    first, second = sin.chunk(2, -1)
    return as_factor(cos[:, None]), as_factor(torch.cat([-first, second], -1)[:, None])


def heads(attention: Any, name: str, inputs: Tensor) -> Tensor:
    """The queries ("q"), keys ("k") or values ("v") [B, A, K, D] of the inputs [B, K, …]."""
    project = getattr(attention, f"{name}_proj")
    split: Tensor = project(inputs).unflatten(-1, (-1, attention.head_dim))
    if name != "v" and hasattr(attention, "q_norm"):  # Qwen3 has norms of queries and keys
        split = normed(getattr(attention, f"{name}_norm"), split)
    return split.transpose(1, 2)


def plain_layers(model: PreTrainedModel) -> list[Any]:
    """The decoder layers of a model that has PLAIN layers; none of any other model."""
    return [module for module in model.modules() if isinstance(module, tuple(PLAIN))]


def give_layer_forward(model: PreTrainedModel) -> None:
    """Give PLAIN layers `layer_forward`. `loss_forward.take_loss_forward` undoes this."""
    layers = plain_layers(model)
    for layer in layers:
        window, last = PLAIN[type(layer)](layer.self_attn), layer is layers[-1]
        forward = partial(layer_forward, layer, window=window, last=last)
        layer.forward = partial(recomputed, layer, forward)


def trained_states(
    model: PreTrainedModel,
    x: Tensor,
    position_ids: Tensor,
    attention: Callable[..., Tensor],
    trained: Tensor,
) -> Tensor:
    """The last states of the trained tokens [M, H] of a model after `give_layer_forward`.

    x: the embedded tokens [B, K, H]. attention: an `Attention`, or a function like one. trained:
    indices of the flattened tokens [M].
    """
    body: Any = model.base_model
    rotary = rotary_of(body, position_ids)
    for layer in body.layers:
        x = layer(x, packed=attention, trained=trained, position_embeddings=rotary)
    return normed(body.norm, x)[0]


def layer_forward(
    layer: Any,
    x: Tensor,
    *,
    window: int | None,
    last: bool,
    packed: Callable[..., Tensor],
    trained: Tensor,
    position_embeddings: Rotary,
    **_: Any,
) -> Tensor:
    """The layer's output for x [B, K, H]. The last layer has it for the trained tokens [1, M, H].

    trained: their indices in the flattened tokens [M].
    """
    attention = layer.self_attn
    read = normed(layer.input_layernorm, x)
    q = rotated(heads(attention, "q", read), position_embeddings)
    k = rotated(heads(attention, "k", read), position_embeddings)
    attended = packed(q, k, heads(attention, "v", read), window=window).flatten(2)
    if last:
        attended, x = (values.flatten(0, 1)[trained][None] for values in (attended, x))
    x = x + attention.o_proj(attended)
    output: Tensor = x + layer.mlp(normed(layer.post_attention_layernorm, x))
    return output
