"""The decoder of Llama-like models. Legend: as in forward.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from eval.decoding import cpu_bits
from eval.decoding.forward import (
    HiddenStates,
    KVCache,
    causal_bias,
    embedded,
    empty_cache,
    nested_bytes,
)
from eval.decoding.weights import Fp32Product, Product

BATCHED_ROWS = 8  # from so many rows on, attention is two batched products on a CPU


class _Layer(NamedTuple):
    input_norm: Tensor
    qkv: Product
    query_norm: Tensor | None  # only Qwen3 has them
    key_norm: Tensor | None
    output: Product
    post_norm: Tensor
    gate_up: Product
    down: Product


class _Places(NamedTuple):
    """Where the new positions of a forward are: their rotary angles, and what puts keys or values
    [B, key heads, T, D] into a cache's tensor.
    """

    cos: Tensor
    sin: Tensor
    write: Callable[[Tensor, Tensor], None]


_Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # as of LeanDecoder._attention


def _put(held: Tensor, at: slice, new: Tensor) -> None:
    held[:, :, at] = new


class LeanDecoder:
    """The weights of a Llama-like model with q/k/v and gate/up fused and no module overhead.

    Same arithmetic as the stock model in the same dtype up to the order of sums (tests compare
    them). Where the model's layers lie on several devices, each computes on its own; logits and
    states come back to the embedding's.
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
        self.together = self.device.type == "cpu" and cpu_bits.sums_alike(
            self.group, self.head_size, self.dtype
        )
        self.product = partial(product.of, int8=int8)
        self.layers = [self._layer(layer) for layer in body.layers]
        self.final_norm = self._scale(body.norm)
        head = model.get_output_embeddings()
        tied = head.weight is body.embed_tokens.weight and not int8
        self.head = product(self.embedding, head.bias) if tied else self.product(head)
        self.devices = [layer.input_norm.device for layer in self.layers]
        positions = torch.arange(context_length, device=self.device)[None]
        cos, sin = body.rotary_emb(self.embedding[:1, :1].to(self.dtype), positions)
        half = self.head_size // 2
        # rotate_half(x) * sin == roll(x) * signed sin: one copy less for every layer
        sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        self.angles = {home: (cos[0].to(home), sin.to(home)) for home in {*self.devices}}

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

    def _scale(self, norm: Any) -> Tensor:
        weight: Tensor = norm.weight.detach()
        # a copy: one tensor of a mapped file would keep in memory all that was read of it
        return weight.to(self.dtype, copy=True)

    def own_bytes(self) -> int:
        tied = self.head.weight is self.embedding
        head = self.head.bias if tied else self.head
        return nested_bytes((*self.layers, self.final_norm, head, self.masks))

    def new_cache(self, rows: int, slots: int) -> KVCache:
        shape = (rows, self.key_heads, cpu_bits.whole_blocks(slots), self.head_size)
        return empty_cache(shape, self.dtype, self.devices)

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

        def on(device: torch.device) -> tuple[_Places, _Attend]:
            attend = self._attention(rows, width, start, cache.slots, device)
            return self._places(start, rows, width, device), attend

        return self._through_layers(tokens, cache, on, last_only, states)

    @torch.inference_mode()
    def static_forward(
        self,
        tokens: Tensor,
        start: Tensor,
        cache: KVCache,
        length: int,
        last_only: bool,
        states: HiddenStates,
    ) -> Tensor:
        """As `forward`, attending over the first `length` slots, whatever is in them.

        start: on the device [B]. Nothing is read by the host, and no shape depends on a number on
        the device: what was recorded once (graphs.py) is right for any other tokens and start. For
        a model on one device.
        """
        rows, width = tokens.shape
        mask = causal_bias(start, width, length, self.dtype).repeat(1, self.group, 1)[:, None]
        attend = self._grouped(F.scaled_dot_product_attention, rows, width, length, mask)
        places = self._places(start, rows, width, self.device)
        return self._through_layers(tokens, cache, lambda _: (places, attend), last_only, states)

    def _places(self, start: int | Tensor, rows: int, width: int, device: torch.device) -> _Places:
        cos, sin = self.angles[device]
        if isinstance(start, int):
            at = slice(start, start + width)
            return _Places(cos[at], sin[at], lambda held, new: _put(held, at, new))
        positions = start.to(device)[:, None] + torch.arange(width, device=device)
        row_index = torch.arange(rows, device=device)[:, None]

        def write(held: Tensor, new: Tensor) -> None:
            held[row_index, :, positions] = new.transpose(1, 2)

        return _Places(cos[positions][:, None], sin[positions][:, None], write)

    def _through_layers(
        self,
        tokens: Tensor,
        cache: KVCache,
        on: Callable[[torch.device], tuple[_Places, _Attend]],
        last_only: bool,
        states: HiddenStates | None,
    ) -> Tensor:
        """on: what the layers on a device share."""
        rows, width = tokens.shape
        x = self._embedded(tokens).to(self.dtype)
        size = (x.shape[-1],)
        turned = self.heads + self.key_heads
        home = None
        for number, (layer, keys, values, device) in enumerate(
            zip(self.layers, cache.keys, cache.values, self.devices, strict=True)
        ):
            if states and number in states:
                states[number] = x.to(self.device)
            if device != home:
                home = device
                (cos, sin, write), attend = on(home)
                x = x.to(home)
            h = F.rms_norm(x, size, layer.input_norm, self.eps)
            qkv = layer.qkv(h).view(rows, width, -1, self.head_size).transpose(1, 2)
            qk, v = qkv[:, :turned], qkv[:, turned:]
            if layer.query_norm is not None and layer.key_norm is not None:
                q = F.rms_norm(qk[:, : self.heads], (self.head_size,), layer.query_norm, self.eps)
                k = F.rms_norm(qk[:, self.heads :], (self.head_size,), layer.key_norm, self.eps)
                qk = torch.cat([q, k], dim=1)
            qk = qk * cos + torch.roll(qk, self.head_size // 2, -1) * sin
            q, k = qk[:, : self.heads], qk[:, self.heads :]
            write(keys, k)
            write(values, v)
            h = attend(q, keys, values).reshape(rows, width, self.heads * self.head_size)
            x = x + layer.output(h)
            h = F.rms_norm(x, size, layer.post_norm, self.eps)
            gate, up = layer.gate_up(h).chunk(2, dim=-1)
            x = x + layer.down(F.silu(gate) * up)
        last = len(self.layers)
        if last_only and not (states and last in states):
            x = x[:, -1:]
        x = F.rms_norm(x.to(self.final_norm.device), size, self.final_norm, self.eps)
        if states and last in states:
            states[last] = x.to(self.device)
        x = x[:, -1:] if last_only else x
        return self.head(x.to(self.head.device)).to(self.device)

    def _embedded(self, tokens: Tensor) -> Tensor:
        table = self.embedding
        return embedded(tokens, lambda ids: F.embedding(ids, table), len(table), self.masks)

    def _attention(
        self, rows: int, width: int, start: int | Tensor, slots: int, device: torch.device
    ) -> _Attend:
        """The attention of one forward, from q [B, heads, T, D], keys and values [B, key heads, S,
        D] to what reshapes to [B, T, heads * D].
        """
        on_cpu = device.type == "cpu"
        many = rows >= BATCHED_ROWS and on_cpu
        if isinstance(start, int):
            end = start + width
            first = torch.tensor([start], device=device)
        else:
            # products of whole tensors copy no slice, and generate_batched keeps `slots` tight
            end = slots if many else int(start.max()) + width
            first = start.to(device)
        length = min(cpu_bits.whole_blocks(end), slots) if on_cpu else end
        mask = None
        if many or width > 1 or length > end or not isinstance(start, int) or self.together:
            mask = causal_bias(first, width, length, self.dtype)
        if rows == 1 and 1 < width <= cpu_bits.WIDEST and on_cpu:
            assert mask is not None
            return cpu_bits.BlockAttention(mask, end - width, slots, self.group, self.together)
        attention: Any = batched_attention if many else F.scaled_dot_product_attention
        if mask is not None:
            mask = mask.repeat(1, self.group, 1)[:, None]
            if many:
                mask = mask.expand(rows, self.key_heads, -1, -1).flatten(0, 1)
            elif self.together:
                mask = cpu_bits.enough_rows(mask)
                attention = cpu_bits.alike
        return self._grouped(attention, rows, width, length, mask)

    def _grouped(
        self, attention: Any, rows: int, width: int, length: int, mask: Tensor | None
    ) -> _Attend:
        """What `_attention` returns, over the first `length` slots."""

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # heads that share a key head are folded into the query length: no repeated keys
            folded = q.reshape(rows, self.key_heads, self.group * width, self.head_size)
            h = attention(folded, keys[:, :, :length], values[:, :, :length], mask)
            return h.reshape(rows, self.heads, width, self.head_size).transpose(1, 2)

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
