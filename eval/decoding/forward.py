"""What all decoders are: one forward pass, preallocated KV, rollback by position, ragged rows.

Legend: B rows, T new positions a row, S cache slots, H hidden size, V rows of the output head. A
layer's number is its place in transformers' `hidden_states`: 0 the embeddings, k the state after k
layers, the last one after the final norm.
A row's position is its slot in the cache. Therefore a smaller `start` rolls back: the slots beyond
it are masked and then overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

PIECE = 512  # positions of a text that are read at once, at most


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

    def resized(self, slots: int) -> KVCache:
        """This cache, from now on with that many slots, the first ones as they were."""
        more = slots - self.slots
        for held in (self.keys, self.values):
            for layer, tensor in enumerate(held):  # one by one: no second cache is ever in memory
                held[layer] = F.pad(tensor, (0, 0, 0, more))
        return self


def empty_cache(
    keys: Sequence[tuple[int, ...]],
    values: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    devices: Sequence[torch.device],
) -> KVCache:
    """A cache of these shapes, a layer each. devices: where each layer's keys and values are."""
    # zeros, not empty: a masked slot still enters a product, and 0 * nan is nan
    made = (
        [torch.zeros(s, dtype=dtype, device=d) for s, d in zip(shapes, devices, strict=True)]
        for shapes in (keys, values)
    )
    return KVCache(*made)


def causal_bias(
    start: Tensor, width: int, length: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """Added to attention scores [B, T=width, S=length]: 0 where a position may look, else -inf.

    start: first new position of each row [B]. Slots past a row's position hold stale or unwritten
    keys and are masked. window: number of slots that a position looks at, its own included.
    """
    positions = (start[:, None] + torch.arange(width, device=start.device))[..., None]
    slots = torch.arange(length, device=start.device)
    hidden = slots > positions
    if window is not None:
        hidden |= slots <= positions - window
    return torch.zeros(hidden.shape, dtype=dtype, device=start.device).masked_fill_(
        hidden, float("-inf")
    )


def input_embedding(model: PreTrainedModel) -> Tensor:
    """The input embedding [V, H] of a model, outside of autograd."""
    embedding: Any = model.get_input_embeddings()
    return embedding.weight.detach()


HiddenStates = dict[int, Tensor | None]  # by layer; None until a forward has put them in


class Decoder(Protocol):
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


def in_pieces(
    decoder: Decoder,
    tokens: Tensor,
    start: int,
    cache: KVCache,
    last_only: bool = True,
    states: HiddenStates | None = None,
) -> Iterator[Tensor]:
    """The logits of a long text [B, T], piece by piece, each as Decoder.forward returns it.

    So the memory for activations and for the mask does not grow with T. states: at the end, those
    of the whole text.
    """
    read: dict[int, list[Any]] = {layer: [] for layer in states or ()}
    for piece in tokens.split(PIECE, dim=1):
        piece_states: HiddenStates = dict.fromkeys(read)
        yield decoder.forward(piece, start, cache, last_only, piece_states)
        start += piece.shape[1]
        for layer, state in piece_states.items():
            read[layer].append(state)
    if states:
        states.update({layer: torch.cat(parts, 1) for layer, parts in read.items()})
