"""Linear-attention layers of the Transformers forward, whose states can be rolled back.

Such a layer (Gated DeltaNet, arXiv 2412.06464) has one state for the whole text, so a rejected
token cannot be removed from it. The cache keeps the inputs of the layer, in slots as keys are, and
two states: that before the last forward and that after it. A row that goes on where the last
forward ended has its state. For a row that is rolled back, the layer reads the inputs behind the
state before the last forward again, or those of the whole text if even that state has read too
much. Legend: B rows, T positions, S slots, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, LinearAttentionLayer

from eval.decoding.forward import KVCache, selected

LINEAR = "linear_attention"  # in a config's layer_types
# families whose decoder layers have `input_layernorm`, then `linear_attn`
HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")

# of a layer: that of its convolution [B, …], the recurrent one [B, …]
States = tuple[Tensor, ...]
Shape = tuple[tuple[int, ...], torch.dtype]  # of a state: the shape without rows


def linear_layers(config: Any) -> list[int]:
    """The numbers of a config's layers that have states; none in other families."""
    kinds = config.layer_types if config.model_type in HYBRID else []
    return [number for number, kind in enumerate(kinds) if kind == LINEAR]


def shapes_of(layer: LinearAttentionLayer) -> list[Shape]:
    """The shapes of the states that transformers' cache of one layer has."""
    states: Any = layer.conv_states[0], layer.recurrent_states[0]
    return [(state.shape[1:], state.dtype) for state in states]


def holding(states: States) -> LinearAttentionLayer:
    """transformers' cache of one layer, which writes into these states."""
    layer = LinearAttentionLayer()
    layer.conv_states[0], layer.recurrent_states[0] = states
    layer.conv_kernel_size[0] = states[0].shape[-1]
    # zeros, where no token was read
    layer.is_conv_states_initialized[0] = layer.is_recurrent_states_initialized[0] = True
    layer.has_previous_state[0] = True
    return layer


@dataclass
class StatefulCache(KVCache):
    """A cache in which the keys of a linear-attention layer are its inputs [B, 1, S, H].

    before, after: the states of these layers before and after the last forward. begun, ended: the
    tokens that they have read, by row; -1 if the states are those of no tokens of the row.
    """

    before: dict[int, States]
    after: dict[int, States]
    begun: list[int]
    ended: list[int]

    def bytes_per_token(self) -> int:
        # as in engines, which keep no inputs of layers with states
        attention = [n for n in range(len(self.keys)) if n not in self.after]
        return sum(held[n][0, :, 0].nbytes for held in (self.keys, self.values) for n in attention)

    def unrecorded(self) -> StatefulCache:
        return self  # no forward with states is recorded

    def copy_row(self, row: int, other: KVCache, other_row: int, length: int) -> None:
        super().copy_row(row, other, other_row, length)
        self.begun[row] = self.ended[row] = -1

    def only(self, rows: list[int]) -> KVCache:
        for held in (self.before, self.after):
            held.update(
                {n: tuple(selected(state, rows) for state in parts) for n, parts in held.items()}
            )
        self.begun, self.ended = [self.begun[r] for r in rows], [self.ended[r] for r in rows]
        return super().only(rows)

    def after_step(self, start: int, width: int) -> None:
        """Count as after a step of `width` tokens of whose draft half was rejected, for timing.

        The next forward at `start` then costs what it costs while decoding: without a draft it goes
        on; after a draft the layers read the accepted tokens again. The states' values are any.
        """
        begun = start - (width + 1) // 2
        self.begun, self.ended = [begun] * self.rows, [begun + width] * self.rows

    def go_to(self, layers: Any, starts: list[int]) -> None:
        """Set the states to those of the first `starts` tokens of each row. layers: the model's."""
        for row, start in enumerate(starts):
            if start != self.ended[row]:
                self._read_again(layers, row, start)
        self.before = {n: tuple(map(Tensor.clone, states)) for n, states in self.after.items()}
        self.begun = starts

    def _read_again(self, layers: Any, row: int, start: int) -> None:
        first = self.begun[row] if 0 < self.begun[row] <= start else 0
        for number, after in self.after.items():
            states = tuple(held[row : row + 1] for held in after)
            for state, earlier in zip(states, self.before[number], strict=True):
                state.copy_(earlier[row : row + 1]) if first else state.zero_()
            if first < start:
                layer, inputs = layers[number], self.keys[number][row, :, first:start]
                cache = Cache(layers=[holding(states)] * (number + 1))
                layer.linear_attn(layer.input_layernorm(inputs), cache_params=cache)

    def keep(self, positions: Tensor, hidden: tuple[Tensor, ...]) -> None:
        """Keep the inputs of a forward. positions: [B, T]. hidden: the states before each layer."""
        rows = torch.arange(len(positions), device=positions.device)[:, None]
        for number in self.after:
            self.keys[number][rows, 0, positions] = hidden[number]
        self.ended = [start + positions.shape[1] for start in self.begun]


def stateful(cache: KVCache, states: dict[int, list[Shape]]) -> StatefulCache:
    """An empty cache with states. states: shape without rows and dtype of each state, by layer."""
    device = cache.keys[0].device

    def zeros() -> dict[int, States]:
        return {
            number: tuple(
                torch.zeros((cache.rows, *shape), dtype=dtype, device=device)
                for shape, dtype in parts
            )
            for number, parts in states.items()
        }

    read = [0] * cache.rows
    return StatefulCache(cache.keys, cache.values, zeros(), zeros(), read, [*read])
