"""The decoder of any other causal LM: its own modules. Legend: as in forward.py."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin

from eval.decoding.forward import (
    HiddenStates,
    KVCache,
    causal_bias,
    embedded,
    empty_cache,
    input_embedding,
    nested_bytes,
)
from eval.decoding.weights import in_fp32


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


def longest_context(config: Any) -> int:
    """Up to how many positions a model attends to all of a text, each token by the same angles."""
    longest: int = config.max_position_embeddings
    kinds = getattr(config, "layer_types", None) or []
    # without layer_types (Mistral-v0.1, Phi-3-mini) every layer has the window
    if (not kinds or any("sliding" in kind for kind in kinds)) and (
        window := getattr(config, "sliding_window", None)
    ):
        longest = min(longest, window)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":  # all angles are others from this many tokens on
        longest = min(longest, rope.get("original_max_position_embeddings", longest))
    return longest


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
        longest = longest_context(config)
        if context_length > longest:
            raise ValueError(
                f"A context of {context_length} tokens exceeds the {longest} within which "
                f"{config.model_type} reads all of a text in one way (a sliding window, or rotary "
                "angles that change); shorten max_new_tokens or the prompts."
            )
        self.model, self.config = model, config
        self.embedding, self.masks = input_embedding(model), masks
        self.device = self.embedding.device
        self.dtype = torch.float32 if fp32 else self.embedding.dtype
        self.context_length = context_length

    def own_bytes(self) -> int:
        shared = self.embedding.data_ptr()
        own = sum(p.nbytes for p in self.model.parameters() if p.data_ptr() != shared)
        return own + nested_bytes(self.masks)

    def new_cache(self, rows: int, slots: int) -> KVCache:
        config = self.config
        head_size = getattr(config, "head_dim", None) or (
            config.hidden_size // config.num_attention_heads
        )
        # GPT-NeoX and others have as many as heads, and do not say so
        key_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        shape = (rows, key_heads, slots, head_size)
        return empty_cache(shape, self.dtype, [self.device] * config.num_hidden_layers)

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
