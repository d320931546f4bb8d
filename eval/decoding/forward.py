"""One forward pass for all decoders: preallocated KV, rollback by position, ragged rows.

Legend: B rows, T new positions a row, S cache slots, H hidden size, V rows of the output head. A
layer's number is its place in transformers' `hidden_states`: 0 the embeddings, k the state after k
layers, the last one after the final norm.
A row's position is its slot in the cache, so rolling back is nothing but a smaller `start`: the
slots beyond it are masked and then overwritten.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from eval.decoding import cpu_bits
from eval.decoding.weights import Fp32Product, Product, in_fp32

# Families whose blocks are RMSNorm, rotary attention with grouped keys, SwiGLU, and nothing else.
LEAN_FAMILIES = ("llama", "qwen2", "qwen3")
# Rotary variants whose angles depend on the position alone, so that they can be tabulated once.
TABULATED_ROPE = ("default", "linear", "llama3", "yarn")

BATCHED_ROWS = 8  # from so many rows on, attention is two batched products on a CPU

INT8_TERMS = 16  # torch's kernel reads the terms of a product sixteen at a time, past the end too


@dataclass
class KVCache:
    """Keys and values of B rows: a list over layers of [B, key heads, S, head size] tensors."""

    keys: list[Tensor]
    values: list[Tensor]

    @property
    def slots(self) -> int:
        return self.keys[0].shape[2]

    @property
    def rows(self) -> int:
        return self.keys[0].shape[0]

    def bytes_per_token(self) -> int:
        """Bytes that one token of one row takes in this cache."""
        return sum(t[0, :, 0].nbytes for t in self.keys + self.values)

    def copy_row(self, row: int, other: KVCache, other_row: int, length: int) -> None:
        """Take the first `length` slots of a row of `other` as this cache's row `row`."""
        for mine, theirs in zip(self.keys + self.values, other.keys + other.values, strict=True):
            mine[row, :, :length] = theirs[other_row, :, :length]

    def row(self, row: int) -> KVCache:
        """That row as a cache of its own, in the same memory."""
        keys, values = ([t[row : row + 1] for t in held] for held in (self.keys, self.values))
        return KVCache(keys, values)

    def resized(self, slots: int) -> KVCache:
        """This cache, from now on with that many slots, the first ones as they were."""
        more = slots - self.slots
        return self._each(lambda tensor: F.pad(tensor, (0, 0, 0, more)))

    def keep_rows(self, rows: Tensor) -> KVCache:
        """This cache, from now on with only the given rows (indices [B']), in that order."""
        return self._each(lambda tensor: tensor[rows])

    def _each(self, change: Callable[[Tensor], Tensor]) -> KVCache:
        """Its tensors replaced one by one, so that no second cache is ever in memory."""
        for held in (self.keys, self.values):
            for layer in range(len(held)):
                held[layer] = change(held[layer])
        return self


def _empty_cache(
    layers: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> KVCache:
    # zeros, not empty: a masked slot still enters a product, and 0 * nan is nan
    keys, values = (
        [torch.zeros(shape, dtype=dtype, device=device) for _ in range(layers)] for _ in range(2)
    )
    return KVCache(keys, values)


def causal_bias(start: Tensor, width: int, length: int, dtype: torch.dtype) -> Tensor:
    """Added to attention scores [B, T=width, S=length]: 0 where a position may look, else -inf.

    start: first new position of each row [B]. Slots past a row's own position hold stale or
    unwritten keys and are masked.
    """
    positions = start[:, None] + torch.arange(width, device=start.device)
    hidden = torch.arange(length, device=start.device) > positions[..., None]
    return torch.zeros(hidden.shape, dtype=dtype, device=start.device).masked_fill_(
        hidden, float("-inf")
    )


def embedded(
    tokens: Tensor, table: Callable[[Tensor], Tensor], rows: int, masks: Tensor | None
) -> Tensor:
    """What a model reads for these ids [..., H]: of its table, and from id `rows` on of `masks`.

    table: looks ids below `rows` up. masks: embeddings of mask tokens [M, H], None for none.
    """
    if masks is None:
        return table(tokens)
    known = table(tokens.clamp(max=rows - 1))
    return torch.where((tokens >= rows)[..., None], masks[(tokens - rows).clamp(min=0)], known)


def input_embedding(model: PreTrainedModel) -> Tensor:
    """The input embedding [V, H] of a model, outside of autograd."""
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.detach()


def starts(positions: list[int]) -> int | Tensor:
    """`start` of Decoder.forward for rows at these positions; one row steps as it does alone."""
    return positions[0] if len(positions) == 1 else torch.tensor(positions)


HiddenStates = dict[int, Tensor | None]  # by layer; None until a forward has put them in


class Reader(Protocol):
    """What generation needs of a model, draft or target."""

    embedding: Tensor
    device: torch.device
    dtype: torch.dtype
    context_length: int

    def own_bytes(self) -> int:
        """Bytes of its weights as they are held, the embedding not counted."""
        ...

    def new_cache(self, rows: int, slots: int) -> KVCache:
        """An empty cache for `rows` rows of at most `slots` positions."""
        ...

    def forward(
        self,
        tokens: Tensor,
        start: int | Tensor,
        cache: KVCache,
        last_only: bool = False,
        states: HiddenStates | None = None,
    ) -> Tensor:
        """Logits [B, T, V] (or [B, 1, V], the last) of `tokens` [B, T] at start, start+1, …

        start: position of the first new token, one for all rows (int) or one a row [B], on the
        host (which then waits for no device) or the device. Their keys and values are written to
        `cache`. states: for each layer that is a key, its hidden states [B, T, H] are put in.
        """
        ...


class Decoder(Reader, Protocol):
    """A model whose layers can be exchanged."""

    def layer_bytes(self) -> int:
        """Of its own bytes, those of its layers."""
        ...

    def with_layers(self, model: PreTrainedModel) -> Self:
        """This decoder with the layers of another model of its shape; all else is shared."""
        ...


def build_decoder(
    model: PreTrainedModel,
    context_length: int,
    embedding: Tensor | None = None,
    int8: bool = False,
    fp32: bool = False,
    masks: Tensor | None = None,
) -> Decoder:
    """The fastest decoder this model can have; the model itself may be dropped afterwards.

    No weight is copied: the decoder reads the model's own, of which those it fuses become views.
    context_length: positions a row will ever have (prompt and answer). embedding: a tensor equal to
    the model's input embedding, shared instead of the model's own (a pruned draft reads its
    target's). int8: the layers and the head copied in eight bits where the lean decoder has kernels
    for their shapes; other logits than the model's, so for drafts only. fp32: computes in fp32, the
    model's weights converted a piece at a time as they are used. masks: as of `embedded`.
    """
    config = model.config.get_text_config()
    limit = config.max_position_embeddings
    if context_length > limit:
        raise ValueError(
            f"A context of {context_length} tokens was asked for, but the model has "
            f"{limit} positions; shorten max_new_tokens or the prompts."
        )
    if _is_lean(model):
        int8 = int8 and _fits_int8(model)
        return LeanDecoder(model, context_length, embedding, int8, fp32, masks)
    return StockDecoder(model, context_length, fp32, masks)


def _is_lean(model: PreTrainedModel) -> bool:
    config: Any = model.config
    if config.model_type not in LEAN_FAMILIES or config.hidden_act != "silu":
        return False
    full_attention = all(
        kind == "full_attention" for kind in getattr(config, "layer_types", None) or []
    )
    return full_attention and config.rope_parameters["rope_type"] in TABULATED_ROPE


def _fits_int8(model: PreTrainedModel) -> bool:
    """Whether every product sums a multiple of INT8_TERMS terms."""
    config: Any = model.config
    attention: Any = model.get_submodule("model.layers.0.self_attn")
    heads = config.num_attention_heads * attention.head_dim
    return all(k % INT8_TERMS == 0 for k in (config.hidden_size, heads, config.intermediate_size))


class _Layer(NamedTuple):
    input_norm: Tensor
    qkv: Product
    query_norm: Tensor | None  # only Qwen3 has them
    key_norm: Tensor | None
    output: Product
    post_norm: Tensor
    gate_up: Product
    down: Product


def _bytes(held: Any) -> int:
    """Bytes of the tensors in a nest of tuples."""
    if isinstance(held, Tensor):
        return held.nbytes
    return sum(map(_bytes, held or ()))


class LeanDecoder:
    """The weights of a Llama-like model with q/k/v and gate/up fused and no module overhead.

    Same arithmetic as the stock model in the same dtype up to the order of sums (tests compare
    them).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        context_length: int,
        embedding: Tensor | None = None,
        int8: bool = False,
        fp32: bool = False,
        masks: Tensor | None = None,
    ) -> None:
        config: Any = model.config
        body: Any = model.model
        self.context_length = context_length
        self.embedding = body.embed_tokens.weight.detach() if embedding is None else embedding
        self.masks = masks
        self.device = self.embedding.device
        self.dtype = torch.float32 if fp32 else self.embedding.dtype
        product = Product if self.dtype == self.embedding.dtype else Fp32Product
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.group = self.heads // self.key_heads
        self.eps = config.rms_norm_eps
        self.head_size = body.layers[0].self_attn.head_dim
        self.product = partial(product.of, int8=int8)
        self.layers = [self._layer(layer) for layer in body.layers]
        self.final_norm = self._scale(body.norm)
        head = model.get_output_embeddings()
        tied = head.weight is body.embed_tokens.weight and not int8
        self.head = product(self.embedding, head.bias) if tied else self.product(head)
        positions = torch.arange(context_length, device=self.device)[None]
        cos, sin = body.rotary_emb(self.embedding[:1, :1].to(self.dtype), positions)
        half = self.head_size // 2
        # rotate_half(x) * sin == roll(x) * signed sin: one copy less for every layer
        self.cos = cos[0]
        self.sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
        query_norm, key_norm = (None if n is None else self._scale(n) for n in norms)
        return _Layer(
            self._scale(layer.input_layernorm),
            self.product(attention.q_proj, attention.k_proj, attention.v_proj),
            query_norm,
            key_norm,
            self.product(attention.o_proj),
            self._scale(layer.post_attention_layernorm),
            self.product(mlp.gate_proj, mlp.up_proj),
            self.product(mlp.down_proj),
        )

    def with_layers(self, model: PreTrainedModel) -> Self:
        other = copy.copy(self)
        body: Any = model.model
        other.layers = [self._layer(layer) for layer in body.layers]
        return other

    def _scale(self, norm: Any) -> Tensor:
        weight: Tensor = norm.weight.detach()
        # a copy: one tensor of a mapped file would keep in memory all that was read of it
        return weight.to(self.dtype, copy=True)

    def own_bytes(self) -> int:
        tied = self.head.weight is self.embedding
        head = self.head.bias if tied else self.head
        return _bytes((*self.layers, self.final_norm, head, self.masks))

    def layer_bytes(self) -> int:
        return _bytes(tuple(self.layers))

    def new_cache(self, rows: int, slots: int) -> KVCache:
        shape = (rows, self.key_heads, cpu_bits.whole_blocks(slots), self.head_size)
        return _empty_cache(len(self.layers), shape, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        start: int | Tensor,
        cache: KVCache,
        last_only: bool = False,
        states: HiddenStates | None = None,
    ) -> Tensor:
        rows, width = tokens.shape
        if isinstance(start, int):
            cos, sin = self.cos[start : start + width], self.sin[start : start + width]
        else:
            positions = start.to(self.device)[:, None] + torch.arange(width, device=self.device)
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
            row_index = torch.arange(rows, device=self.device)[:, None]
        attend = self._attention(rows, width, start, cache.slots)

        x = self._embedded(tokens).to(self.dtype)
        size = (x.shape[-1],)
        turned = self.heads + self.key_heads
        for number, (layer, keys, values) in enumerate(
            zip(self.layers, cache.keys, cache.values, strict=True)
        ):
            if states and number in states:
                states[number] = x
            h = F.rms_norm(x, size, layer.input_norm, self.eps)
            qkv = layer.qkv(h).view(rows, width, -1, self.head_size).transpose(1, 2)
            qk, v = qkv[:, :turned], qkv[:, turned:]
            if layer.query_norm is not None and layer.key_norm is not None:
                q = F.rms_norm(qk[:, : self.heads], (self.head_size,), layer.query_norm, self.eps)
                k = F.rms_norm(qk[:, self.heads :], (self.head_size,), layer.key_norm, self.eps)
                qk = torch.cat([q, k], dim=1)
            qk = qk * cos + torch.roll(qk, self.head_size // 2, -1) * sin
            q, k = qk[:, : self.heads], qk[:, self.heads :]
            if isinstance(start, int):
                keys[:, :, start : start + width] = k
                values[:, :, start : start + width] = v
            else:
                keys[row_index, :, positions] = k.transpose(1, 2)
                values[row_index, :, positions] = v.transpose(1, 2)
            h = attend(q, keys, values).reshape(rows, width, self.heads * self.head_size)
            x = x + layer.output(h)
            h = F.rms_norm(x, size, layer.post_norm, self.eps)
            gate, up = layer.gate_up(h).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        last = len(self.layers)
        if last_only and not (states and last in states):
            x = x[:, -1:]
        x = F.rms_norm(x, size, self.final_norm, self.eps)
        if states and last in states:
            states[last] = x
        return self.head(x[:, -1:] if last_only else x)

    def _embedded(self, tokens: Tensor) -> Tensor:
        table = self.embedding
        return embedded(tokens, lambda ids: F.embedding(ids, table), len(table), self.masks)

    def _attention(
        self, rows: int, width: int, start: int | Tensor, slots: int
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The attention of one forward, from q [B, heads, T, D], keys and values [B, key heads, S,
        D] to what reshapes to [B, T, heads * D].
        """
        on_cpu = self.device.type == "cpu"
        many = rows >= BATCHED_ROWS and on_cpu
        if isinstance(start, int):
            end = start + width
            first = torch.tensor([start], device=self.device)
        else:
            # products of whole tensors copy no slice, and generate_batched keeps `slots` tight
            end = slots if many else int(start.max()) + width
            first = start.to(self.device)
        length = min(cpu_bits.whole_blocks(end), slots) if on_cpu else end
        mask = None
        if many or width > 1 or length > end or not isinstance(start, int):
            mask = causal_bias(first, width, length, self.dtype)
        if rows == 1 and 1 < width <= cpu_bits.APART and on_cpu:
            assert mask is not None
            return cpu_bits.SeparatePositions(mask, end - width, slots, self.group)
        if mask is not None:
            mask = mask.repeat(1, self.group, 1)[:, None]
            if many:
                mask = mask.expand(rows, self.key_heads, -1, -1).flatten(0, 1)
        attention: Any = batched_attention if many else F.scaled_dot_product_attention

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # heads that share a key head are folded into the query length: no repeated keys
            folded = q.reshape(rows, self.key_heads, self.group * width, self.head_size)
            h = attention(folded, keys[:, :, :length], values[:, :, :length], mask)
            return h.view(rows, self.heads, width, self.head_size).transpose(1, 2)

        return attend


def batched_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scaled dot-product attention of many rows as two batched products.

    q [B, heads, T, D], k and v [B, heads, S, D], mask [B * heads, T, S], added to the scores.
    torch's fused CPU kernel walks through the rows one by one: twice the time from about eight on.
    """
    scores = torch.baddbmm(
        mask, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=q.shape[-1] ** -0.5
    )
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(q.shape)


class _Slots:
    """Where the running forward of a StockDecoder writes: `start` as in Decoder.forward."""

    def __init__(self, start: int | Tensor, rows: int, width: int, device: torch.device) -> None:
        if isinstance(start, Tensor):
            self.first = start.to(device)
        else:
            self.first = torch.full((rows,), start, device=device)
        self.positions = self.first[:, None] + torch.arange(width, device=device)
        self.length = (int(start.max()) if isinstance(start, Tensor) else start) + width


class _SlotLayer(CacheLayerMixin):
    """One layer of a KVCache in the shape that transformers' attention modules write to."""

    def __init__(self, keys: Tensor, values: Tensor, slots: _Slots) -> None:
        super().__init__()
        self.keys, self.values, self.slots = keys, values, slots
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        raise AssertionError("the cache is allocated by StockDecoder.new_cache")

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        rows = torch.arange(self.keys.shape[0], device=self.keys.device)[:, None]
        self.keys[rows, :, self.slots.positions] = key_states.transpose(1, 2)
        self.values[rows, :, self.slots.positions] = value_states.transpose(1, 2)
        return self.keys[:, :, : self.slots.length], self.values[:, :, : self.slots.length]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.slots.length, 0

    def get_seq_length(self) -> int:
        return self.slots.length - self.slots.positions.shape[1]

    def get_max_length(self) -> int:
        assert self.keys is not None
        return self.keys.shape[2]


class StockDecoder:
    """Any causal LM of transformers behind the same interface, computed by its own modules."""

    def __init__(
        self,
        model: PreTrainedModel,
        context_length: int,
        fp32: bool = False,
        masks: Tensor | None = None,
    ) -> None:
        config: Any = model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or []
        if any("linear" in kind or "mamba" in kind for kind in kinds):
            raise ValueError(
                f"{config.model_type} has recurrent layers, whose state cannot be rolled back by "
                "position; use a target and a draft with attention layers only."
            )
        window = getattr(config, "sliding_window", None)
        # without layer_types (Mistral-v0.1, Phi-3-mini) every layer has the window
        slides = not kinds or any("sliding" in kind for kind in kinds)
        if slides and window and context_length > window:
            raise ValueError(
                f"A context of {context_length} tokens exceeds the sliding window of {window} of "
                f"{config.model_type}; shorten max_new_tokens or the prompts."
            )
        self.model, self.config = model, config
        self.embedding, self.masks = input_embedding(model), masks
        self.device = self.embedding.device
        self.dtype = torch.float32 if fp32 else self.embedding.dtype
        self.context_length = context_length

    def own_bytes(self) -> int:
        shared = self.embedding.data_ptr()
        own = sum(p.nbytes for p in self.model.parameters() if p.data_ptr() != shared)
        return own + _bytes(self.masks)

    def layer_bytes(self) -> int:
        tensors = self.model.state_dict(keep_vars=True).items()
        return sum(t.nbytes for name, t in tensors if ".layers." in name)

    def with_layers(self, model: PreTrainedModel) -> Self:
        other = copy.copy(self)
        other.model = model
        return other

    def new_cache(self, rows: int, slots: int) -> KVCache:
        config = self.config
        head_size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        shape = (rows, config.num_key_value_heads, slots, head_size)
        return _empty_cache(config.num_hidden_layers, shape, self.dtype, self.device)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        start: int | Tensor,
        cache: KVCache,
        last_only: bool = False,
        states: HiddenStates | None = None,
    ) -> Tensor:
        rows, width = tokens.shape
        slots = _Slots(start, rows, width, self.device)
        layers: Any = [
            _SlotLayer(k, v, slots) for k, v in zip(cache.keys, cache.values, strict=True)
        ]
        mask = causal_bias(slots.first, width, slots.length, self.dtype)[:, None]
        with in_fp32(self.model) if self.dtype != self.embedding.dtype else nullcontext():
            read: dict[str, Tensor] = {"input_ids": tokens}
            if self.masks is not None:
                table: Any = self.model.get_input_embeddings()
                rows = len(self.embedding)
                read = {"inputs_embeds": embedded(tokens, table, rows, self.masks)}
            output = self.model(
                **read,
                position_ids=slots.positions,
                attention_mask=mask,
                past_key_values=Cache(layers=layers),
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
                output_hidden_states=bool(states),
            )
        for layer in states or ():
            states[layer] = output.hidden_states[layer]  # type: ignore[index]
        return output.logits
