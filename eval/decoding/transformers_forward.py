"""The Transformers forward: the decoder of all other causal LMs. Legend: as in forward.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from align.errors import UserError
from eval.decoding.forward import HiddenStates, KVCache, empty_cache, input_embedding
from eval.decoding.recurrent import (
    HYBRID,
    StatefulCache,
    holding,
    linear_layers,
    shapes_of,
    stateful,
)

# Layer types that work with a cache of the whole text: windows and chunks are masks over it.
ATTENTION_KINDS = {"full_attention", "sliding_attention", "chunked_attention"}
PROBE_LENGTH = 8


class _Slots:
    """The slots `positions` [B, T] that a forward writes; `length` slots are in use afterwards."""

    def __init__(self, start: int | Tensor, rows: int, width: int, device: torch.device) -> None:
        if isinstance(start, Tensor):
            first = start.to(device)
        else:
            first = torch.full((rows,), start, device=device)
        self.positions = first[:, None] + torch.arange(width, device=device)
        self.length = (int(start.max()) if isinstance(start, Tensor) else start) + width


class _SlotLayer(CacheLayerMixin):
    """One layer of a KVCache, with the interface that transformers' attention modules use.

    Without keys and values, the first update creates them with PROBE_LENGTH slots.
    """

    def __init__(
        self, slots: _Slots, keys: Tensor | None = None, values: Tensor | None = None
    ) -> None:
        super().__init__()
        self.keys, self.values, self.slots = keys, values, slots
        self.is_initialized = keys is not None

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows = key_states.shape[0]
        self.keys, self.values = (
            new.new_zeros(rows, new.shape[1], PROBE_LENGTH, new.shape[3])
            for new in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
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


@contextmanager
def _masks_by_row(slots: _Slots) -> Iterator[None]:
    """In this context, transformers computes masks at the positions of each row.

    transformers makes masks from functions of two positions (causal, window, chunk, or a family's
    combination), but assumes that all rows start at the same position.
    """

    def mask(
        batch_size: int,
        kv_length: int,
        mask_function: Callable[..., Tensor],
        dtype: torch.dtype,
        **_: Any,
    ) -> Tensor:
        queries, device = slots.positions[:, None, :, None], slots.positions.device
        rows = torch.arange(batch_size, device=device)[:, None, None, None]
        read = mask_function(rows, 0, queries, torch.arange(kv_length, device=device))
        bias = torch.zeros(read.shape, dtype=dtype, device=device)
        return bias.masked_fill_(~read, float("-inf"))

    originals = {name: ALL_MASK_ATTENTION_FUNCTIONS[name] for name in ("eager", "sdpa")}
    ALL_MASK_ATTENTION_FUNCTIONS.update(dict.fromkeys(originals, mask))
    try:
        yield
    finally:
        ALL_MASK_ATTENTION_FUNCTIONS.update(originals)


def refuse_states(config: Any, stateful: bool) -> None:
    """Raise UserError for layers that cannot roll back, or cannot read rows of unequal length.

    stateful: whether the model's class declares a state.
    """
    if config.model_type in HYBRID:
        return
    refused = f"A {config.model_type} model cannot be decoded here: "
    unknown = {*(getattr(config, "layer_types", None) or [])} - ATTENTION_KINDS
    if stateful or unknown:
        raise UserError(
            f"{refused}{', '.join(sorted(unknown)) or 'recurrent'} layers keep a state that "
            "cannot be rolled back by position; use a model with attention layers only."
        )
    if config.model_type == "gpt_neo":
        raise UserError(
            f"{refused}its local attention counts tokens from the end of the longest text of a "
            "batch, so shorter texts would read too few tokens; use a model of another family."
        )


class TransformersDecoder:
    """A Decoder that computes any causal LM with its transformers modules.

    The constructor tries the model on a few tokens to find the shapes of keys and values (MLA has
    two sizes; a layer may share another layer's). It raises UserError if the trial fails, or if
    two rows at different positions, one rolled back, have other logits than without a cache.
    """

    recorded = False

    def __init__(self, model: PreTrainedModel, context_length: int) -> None:
        config: Any = model.config.get_text_config()
        refuse_states(config, model._is_stateful)
        refused = f"A {config.model_type} model cannot be decoded here: "
        self.model, self.config = model, config
        self.embedding = input_embedding(model)
        self.device = self.embedding.device
        self.dtype = self.embedding.dtype
        self.context_length = context_length
        parameters = inspect.signature(model.forward).parameters
        self.takes_positions = "position_ids" in parameters  # else the model counts from the cache
        try:
            error = self._probe()
        except torch.OutOfMemoryError:
            raise
        except Exception as reason:
            raise UserError(
                f"{refused}its modules fail with a cache that is indexed by position "
                f"({type(reason).__name__}: {reason}); use a model of another family."
            ) from reason
        # rounding errors stay far below this bound; wrong masks or positions are far above it
        if not error < torch.finfo(self.dtype).eps ** 0.5:
            raise UserError(
                f"{refused}in rows of different lengths the relative error of its logits is "
                f"{error:.2g}; use a model of another family."
            )

    def new_cache(self, rows: int, slots: int) -> KVCache:
        keys, values = (
            [(rows, heads, slots, size) for heads, size in sizes] for sizes in self.shapes
        )
        cache = empty_cache(keys, values, self.dtype, [self.device] * len(keys))
        return stateful(cache, self.states) if self.states else cache

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        start: int | Tensor,
        cache: KVCache,
        last_only: bool = False,
        states: HiddenStates | None = None,
    ) -> Tensor:
        # an index, because of a slice torch copies the LM head once a row (cpu_bits.linear)
        last = torch.tensor([tokens.shape[1] - 1], device=self.device)
        kept = {"logits_to_keep": last if last_only else 0, "output_hidden_states": bool(states)}
        output = self.run(self.model, start, cache, input_ids=tokens, **kept)
        for layer in states or ():
            states[layer] = output.hidden_states[layer]  # type: ignore[index]
        return output.logits

    def run(self, model: Any, start: int | Tensor, cache: KVCache, **inputs: Any) -> Any:
        """The output of the model, or of its body, on a cache. start: see Decoder.forward.

        inputs: arguments of the model, with input_ids [B, T] or inputs_embeds [B, T, H].
        """
        read = inputs["input_ids"] if "input_ids" in inputs else inputs["inputs_embeds"]
        rows, width = read.shape[:2]
        slots = _Slots(start, rows, width, self.device)
        self._refuse_one_scale(slots)
        layers: list[Any]
        layers = [_SlotLayer(slots, k, v) for k, v in zip(cache.keys, cache.values, strict=True)]
        if not isinstance(cache, StatefulCache):
            return self._run(model, layers, slots, **inputs)
        starts = start.tolist() if isinstance(start, Tensor) else [start] * rows
        cache.go_to(self.model.base_model.layers, starts)
        for number, states in cache.after.items():
            layers[number] = holding(states)
        output = self._run(model, layers, slots, **inputs | {"output_hidden_states": True})
        cache.keep(slots.positions, output.hidden_states)
        return output

    def _refuse_one_scale(self, slots: _Slots) -> None:
        """Raise UserError if rows would get the attention scale of the longest one (Llama 4)."""
        if self.config.model_type != "llama4_text" or not self.config.attn_temperature_tuning:
            return
        unscaled = self.config.floor_scale  # tokens
        if slots.length >= unscaled and len(slots.positions[:, 0].unique()) > 1:
            raise UserError(
                f"Texts of a llama4_text model cannot be decoded together above {unscaled} tokens; "
                "shorten the prompts, or lower answer_batch_size to 1."
            )

    def _run(self, model: Any, layers: Any, slots: _Slots, **inputs: Any) -> Any:
        positions = {"position_ids": slots.positions} if self.takes_positions else {}
        with _masks_by_row(slots):
            return model(
                past_key_values=Cache(layers=layers), use_cache=True, **positions, **inputs
            )

    @torch.inference_mode()
    def _probe(self) -> float:
        """Finds the shapes of keys, values and states; returns the relative error of the logits."""
        half = PROBE_LENGTH // 2
        ids = torch.arange(1, 2 * PROBE_LENGTH + 1, device=self.device).view(2, PROBE_LENGTH)
        ids = ids % self.embedding.shape[0]
        expected = self.model(input_ids=ids, use_cache=False).logits
        slots = _Slots(0, 2, half, self.device)
        linear = linear_layers(self.config)
        layers: list[Any] = [
            LinearAttentionLayer() if number in linear else _SlotLayer(slots)
            for number in range(self.config.num_hidden_layers)
        ]
        self._run(self.model, layers, slots, input_ids=ids[:, :half])
        self.states = {number: shapes_of(layers[number]) for number in linear}
        for number in linear:  # the cache has the inputs of these layers as keys
            layers[number] = _SlotLayer(
                slots, self.embedding.new_empty(2, 1, 0, self.embedding.shape[1])
            )
        self.shapes = [
            # a layer that reads the keys and values of another layer has none
            [(0, 0) if held is None else (held.shape[1], held.shape[3]) for held in tensors]
            for tensors in ([x.keys for x in layers], [x.values for x in layers])
        ]
        cache = self.new_cache(2, PROBE_LENGTH)
        self.forward(ids[:, :half], 0, cache)
        first = torch.tensor([half, half - 1])  # the second row is rolled back by one token
        again = _Slots(first, 2, half, self.device).positions
        got = self.forward(ids.gather(1, again), first, cache)
        want = expected.gather(1, again[..., None].expand_as(got))
        # the median of a row, because rounding may send single tokens to another expert
        error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).median(1).values.max()
        return float(error)
