"""The fused forward: the decoder of Llama-like models. Legend: as in forward.py; D head size."""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from eval.decoding import cpu_bits
from eval.decoding.forward import HiddenStates, KVCache, causal_bias, empty_cache
from eval.decoding.weights import Product

BATCHED_ROWS = 8  # from this number of rows on, attention on a CPU is two batched products

# Names of a layer's norms: before and after attention, before and after the MLP.
LLAMA_NORMS = ("input_layernorm", None, "post_attention_layernorm", None)
NORMS = {
    "gemma3_text": (
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
    "olmo2": (None, "post_attention_layernorm", None, "post_feedforward_layernorm"),
}
HEAD_NORMS = ("qwen3", "gemma3_text", "olmo2")
UNTURNED = "unturned"  # layers without rotary angles (some layers of SmolLM3)


class _Layer(NamedTuple):
    input_norm: Tensor | None
    qkv: Product
    head_norms: tuple[Tensor, Tensor] | None  # of queries and keys
    output: Product
    attention_norm: Tensor | None
    mlp_norm: Tensor | None
    gate_up: Product
    down: Product
    added_norm: Tensor | None


class _Kind(NamedTuple):
    """window: tokens that a position reads; None: all. rotary: the angles; None: the only ones."""

    device: torch.device
    window: int | None
    rotary: str | None


class Step(NamedTuple):
    """What the layers of a kind share in one forward.

    cos, sin: rotary angles of the new positions. write: puts keys or values [B, key heads, T, D]
    into a cache's tensor. attend: q [B, heads, T, D], keys and values [B, key heads, S, D] -> a
    tensor that reshapes to [B, T, heads * D].
    """

    cos: Tensor
    sin: Tensor
    write: Callable[[Tensor, Tensor], None]
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]


class FusedDecoder:
    """A Llama-like model with q/k/v and gate/up fused, without the overhead of modules.

    The arithmetic is that of transformers' modules, except for the order of sums.
    Layers may be on several devices; logits and states are returned on the embedding's device.
    """

    recorded = False

    def __init__(
        self, model: PreTrainedModel, context_length: int, embedding: Tensor | None = None
    ) -> None:
        config: Any = model.config
        body: Any = model.model
        self.context_length = context_length
        self.embedding = body.embed_tokens.weight.detach() if embedding is None else embedding
        self.device = self.embedding.device
        self.dtype = self.embedding.dtype
        self.heads, self.key_heads = config.num_attention_heads, config.num_key_value_heads
        self.group = self.heads // self.key_heads
        self.eps = config.rms_norm_eps
        self.head_size = body.layers[0].self_attn.head_dim
        self.together = self.device.type == "cpu" and cpu_bits.sums_alike(
            self.group, self.head_size, self.dtype
        )
        self.config = config
        gemma = config.model_type == "gemma3_text"
        self.activation = partial(F.gelu, approximate="tanh") if gemma else F.silu
        self.layers = [self._layer(layer) for layer in body.layers]
        self.final_norm = self._scale(body.norm)
        self.embedding_scale = self.residual_scale = self.logits_scale = 1.0
        if gemma:  # rounded to the dtype, as transformers' module does
            self.embedding_scale = body.embed_tokens.embed_scale.to(self.dtype).item()
        if config.model_type == "granite":
            self.embedding_scale = config.embedding_multiplier
            self.residual_scale = config.residual_multiplier
            self.logits_scale = 1 / config.logits_scaling
        usual, scale = self.head_size**-0.5, body.layers[0].self_attn.scaling
        self.query_scale = 1.0 if scale == usual else scale / usual
        head = model.get_output_embeddings()
        tied = head.weight is body.embed_tokens.weight
        self.head = Product(self.embedding, head.bias) if tied else Product.of(head)
        self.devices = [layer.qkv.weight.device for layer in self.layers]
        self.kinds = [self._kind(number) for number in range(len(self.layers))]
        self.angles = {kind: self._angles(body, kind) for kind in {*self.kinds}}

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        if self.config.model_type == "phi3":  # the checkpoint's products are fused already
            qkv, gate_up = Product.of(attention.qkv_proj), Product.of(mlp.gate_up_proj)
        else:
            qkv = Product.of(attention.q_proj, attention.k_proj, attention.v_proj)
            gate_up = Product.of(mlp.gate_proj, mlp.up_proj)
        before, after, mlp_before, mlp_after = (
            None if name is None else self._scale(layer.get_submodule(name))
            for name in NORMS.get(self.config.model_type, LLAMA_NORMS)
        )
        head_norms = None
        if self.config.model_type in HEAD_NORMS:
            head_norms = self._scale(attention.q_norm), self._scale(attention.k_norm)
        output, down = Product.of(attention.o_proj), Product.of(mlp.down_proj)
        return _Layer(before, qkv, head_norms, output, after, mlp_before, gate_up, down, mlp_after)

    def _kind(self, number: int) -> _Kind:
        config, rotary = self.config, None
        types = getattr(config, "layer_types", None)
        # without layer_types (Mistral-v0.1, Phi-3-mini) every layer has the window
        sliding = not types or types[number] == "sliding_attention"
        window = getattr(config, "sliding_window", None) if sliding else None
        if config.model_type == "gemma3_text":
            rotary = config.layer_types[number]
        if config.model_type == "smollm3" and not config.no_rope_layers[number]:
            rotary = UNTURNED
        return _Kind(self.devices[number], window, rotary)

    def _angles(self, body: Any, kind: _Kind) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of all positions [context, D], for a rotation by `roll`."""
        if kind.rotary == UNTURNED:
            cos = torch.ones(self.context_length, self.head_size, dtype=self.dtype)
            return cos.to(kind.device), torch.zeros_like(cos, device=kind.device)
        positions = torch.arange(self.context_length, device=self.device)[None]
        layer_type = () if kind.rotary is None else (kind.rotary,)
        cos, sin = body.rotary_emb(self.embedding[:1, :1], positions, *layer_type)
        half = self.head_size // 2
        # rotate_half(x) * sin == roll(x) * signed sin, which saves one copy per layer
        sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)
        return cos[0].to(kind.device), sin.to(kind.device)

    def _scale(self, norm: Any) -> Tensor:
        weight: Tensor = norm.weight.detach()
        if self.config.model_type == "gemma3_text":  # it stores weight - 1 and computes in fp32
            return weight.float() + 1
        # a copy, because a tensor of a mapped file keeps all pages that were read in memory
        return weight.to(self.dtype, copy=True)

    def _norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        if weight is None:
            return x
        if weight.dtype != x.dtype:
            return F.rms_norm(x.to(weight.dtype), weight.shape, weight, self.eps).to(x.dtype)
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _normed_heads(self, qkv: Tensor, norms: tuple[Tensor, Tensor]) -> Tensor:
        """qkv [B, T, heads * D] with queries and keys normalised: by head, in OLMo-2 together."""
        sizes = [heads * self.head_size for heads in (self.heads, self.key_heads, self.key_heads)]
        *turned, v = qkv.split(sizes, dim=-1)
        qk = (
            self._norm(x.unflatten(-1, (-1, len(norm))), norm).flatten(2)
            for x, norm in zip(turned, norms, strict=True)
        )
        return torch.cat([*qk, v], dim=-1)

    def new_cache(self, rows: int, slots: int) -> KVCache:
        shape = (rows, self.key_heads, cpu_bits.whole_blocks(slots), self.head_size)
        shapes = [shape] * len(self.layers)
        return empty_cache(shapes, shapes, self.dtype, self.devices)

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        start: int | Tensor,
        cache: KVCache,
        last_only: bool = False,
        states: HiddenStates | None = None,
        length: int | None = None,
    ) -> Tensor:
        """See Decoder.forward. length: the number of slots to attend over, used or not.

        A length needs `start` on the device [B] and the whole model on that device. Then the host
        reads no number from the device and all shapes are fixed. Therefore a recording (graphs.py)
        is valid for other tokens and another start.
        """
        rows, width = tokens.shape
        x = F.embedding(tokens, self.embedding)
        if self.embedding_scale != 1:
            x = x * self.embedding_scale

        @functools.cache
        def step_of(kind: _Kind) -> Step:
            return self._step(rows, width, start, cache.slots, kind, length)

        for number, (layer, keys, values, kind) in enumerate(
            zip(self.layers, cache.keys, cache.values, self.kinds, strict=True)
        ):
            if states and number in states:
                states[number] = x.to(self.device)
            x = x.to(kind.device)
            h = self._norm(x, layer.input_norm)
            x = self._through_layer(layer, h, x, keys, values, step_of(kind))
        last = len(self.layers)
        if last_only and not (states and last in states):
            x = x[:, -1:]
        x = self._norm(x.to(self.final_norm.device), self.final_norm)
        if states and last in states:
            states[last] = x.to(self.device)
        x = x[:, -1:] if last_only else x
        logits = self.head(x.to(self.head.weight.device)).to(self.device)
        return logits if self.logits_scale == 1 else logits * self.logits_scale

    def _through_layer(
        self, layer: _Layer, h: Tensor, x: Tensor, keys: Tensor, values: Tensor, step: Step
    ) -> Tensor:
        """The hidden states x [B, T, H] after a layer. h: the input of the q/k/v product."""
        h = self._norm(self._attended(layer, h, keys, values, step), layer.attention_norm)
        x = torch.add(x, h, alpha=self.residual_scale)
        h = self._norm(self._mlp(layer, self._norm(x, layer.mlp_norm)), layer.added_norm)
        return torch.add(x, h, alpha=self.residual_scale)

    def _attended(
        self, layer: _Layer, h: Tensor, keys: Tensor, values: Tensor, step: Step
    ) -> Tensor:
        """The attention's output [B, T, H]. h: the input of the q/k/v product."""
        rows, width = h.shape[:2]
        h, turned = layer.qkv(h), self.heads + self.key_heads
        if layer.head_norms is not None:
            h = self._normed_heads(h, layer.head_norms)
        qkv = h.view(rows, width, -1, self.head_size).transpose(1, 2)
        qk, v = qkv[:, :turned], qkv[:, turned:]
        qk = qk * step.cos + torch.roll(qk, self.head_size // 2, -1) * step.sin
        if qk.dtype != v.dtype:  # OLMo-2 rotates in fp32
            qk = qk.to(v.dtype)
        q, k = qk[:, : self.heads], qk[:, self.heads :]
        if self.query_scale != 1:
            q = q * self.query_scale
        step.write(keys, k)
        step.write(values, v)
        h = step.attend(q, keys, values).reshape(rows, width, self.heads * self.head_size)
        return layer.output(h)

    def _mlp(self, layer: _Layer, h: Tensor) -> Tensor:
        gate, up = layer.gate_up(h).chunk(2, dim=-1)
        return layer.down(self.activation(gate) * up)

    def _step(
        self,
        rows: int,
        width: int,
        start: int | Tensor,
        slots: int,
        kind: _Kind,
        length: int | None = None,
    ) -> Step:
        (cos, sin), device = self.angles[kind], kind.device
        if isinstance(start, int):
            new = slice(start, start + width)
            first = torch.tensor([start], device=device)
            cos, sin = cos[new], sin[new]

            def write(held: Tensor, values: Tensor) -> None:
                held[:, :, new] = values
        else:
            first = start.to(device)
            positions = first[:, None] + torch.arange(width, device=device)
            row_index = torch.arange(rows, device=device)[:, None]
            cos, sin = cos[positions][:, None], sin[positions][:, None]

            def write(held: Tensor, values: Tensor) -> None:
                held[row_index, :, positions] = values.transpose(1, 2)

        def grouped(attention: Any, length: int, mask: Tensor | None) -> Step:
            return Step(cos, sin, write, self._grouped(attention, length, mask))

        if length is not None:
            mask = causal_bias(first, width, length, self.dtype, kind.window)
            mask = mask.repeat(1, self.group, 1)[:, None]
            return grouped(F.scaled_dot_product_attention, length, mask)
        on_cpu = device.type == "cpu"
        many = rows >= BATCHED_ROWS and on_cpu
        if isinstance(start, int):
            end = start + width
        else:
            # whole tensors need no copy of a slice, and generate_batched keeps few unused slots
            end = slots if many else int(start.max()) + width
        length = min(cpu_bits.whole_blocks(end), slots) if on_cpu else end
        masked = kind.window is not None or length > end or not isinstance(start, int)
        if not (many or width > 1 or masked or self.together):
            return grouped(F.scaled_dot_product_attention, length, None)
        mask = causal_bias(first, width, length, self.dtype, kind.window)
        if rows == 1 and 1 < width <= cpu_bits.WIDEST and on_cpu:
            block = cpu_bits.BlockAttention(mask, end - width, slots, self.group, self.together)
            return Step(cos, sin, write, block)
        mask = mask.repeat(1, self.group, 1)[:, None]
        if many:
            mask = mask.expand(rows, self.key_heads, -1, -1).flatten(0, 1)
            return grouped(batched_attention, length, mask)
        if self.together:
            return grouped(cpu_bits.alike, length, cpu_bits.enough_rows(mask))
        return grouped(F.scaled_dot_product_attention, length, mask)

    def _grouped(
        self, attention: Any, length: int, mask: Tensor | None
    ) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """Attention to the first `length` slots of a cache."""

        def attend(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            # query heads that share a key head become query positions, so keys are not repeated
            folded = q.reshape(len(q), self.key_heads, -1, self.head_size)
            h = attention(folded, keys[:, :, :length], values[:, :, :length], mask)
            return h.reshape(q.shape).transpose(1, 2)

        return attend


def batched_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Scaled dot-product attention of many rows as two batched products.

    q [B, heads, T, D], k and v [B, heads, S, D], mask [B * heads, T, S], added to the scores.
    torch's fused CPU kernel reads the rows one by one, and takes twice as long from eight rows on.
    """
    scores = torch.baddbmm(
        mask, q.flatten(0, 1), k.flatten(0, 1).transpose(1, 2), alpha=q.shape[-1] ** -0.5
    )
    return torch.bmm(scores.softmax(-1), v.flatten(0, 1)).view(q.shape)
