"""The interface of all decoders: a forward pass over a preallocated cache of keys and values.

Legend: B rows, T new positions per row, S cache slots, H hidden size, V entries of the LM head.
Hidden states are numbered as in transformers' `hidden_states`: 0 is the embeddings, k the state
after k layers; the last one is after the final norm.
A token's position is its slot in the cache, and rows may be at different positions. A smaller
`start` rolls a row back: later slots are masked and then overwritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

PIECE = 512  # the most positions of a text that one forward reads


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
        """Bytes of one token of one row."""
        return sum(t[0, :, 0].nbytes for t in self.keys + self.values)

    def unrecorded(self) -> KVCache:
        """The same tensors, as a cache whose forwards are not recorded (graphs.py)."""
        return KVCache(self.keys, self.values)

    def copy_row(self, row: int, other: KVCache, other_row: int, length: int) -> None:
        """Copy the first `length` slots of row `other_row` of `other` to row `row`."""
        for mine, theirs in zip(self.keys + self.values, other.keys + other.values, strict=True):
            mine[row, :, :length] = theirs[other_row, :, :length]

    def only(self, rows: list[int]) -> KVCache:
        """The cache of these rows alone. Do not use the old cache afterwards."""
        for held in (self.keys, self.values):
            for layer, tensor in enumerate(held):  # by layer, as below
                held[layer] = selected(tensor, rows)
        return self

    def resized(self, slots: int) -> KVCache:
        """The cache, cut or padded to `slots` slots. Do not use the old cache afterwards."""
        more = slots - self.slots
        for held in (self.keys, self.values):
            for layer, tensor in enumerate(held):  # by layer, so that memory never holds two caches
                held[layer] = F.pad(tensor, (0, 0, 0, more))
        return self


def selected(tensor: Tensor, rows: list[int]) -> Tensor:
    """A copy of these rows of a tensor."""
    return tensor.index_select(0, torch.tensor(rows, device=tensor.device))


def empty_cache(
    keys: Sequence[tuple[int, ...]],
    values: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    devices: Sequence[torch.device],
) -> KVCache:
    """A cache of zeros. keys, values, devices: shape and device by layer."""
    # zeros, because a masked slot still enters a product, and 0 * nan is nan
    both = (
        [torch.zeros(s, dtype=dtype, device=d) for s, d in zip(shapes, devices, strict=True)]
        for shapes in (keys, values)
    )
    return KVCache(*both)


def causal_bias(
    start: Tensor, width: int, length: int, dtype: torch.dtype, window: int | None = None
) -> Tensor:
    """The mask [B, T=width, S=length] to add to attention scores: 0 if a slot is read, else -inf.

    start: first new position of each row [B]. Slots after a position are masked, because their keys
    are stale or unwritten. window: the number of slots that a position reads, with its own.
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


HiddenStates = dict[int, Tensor | None]  # by layer number; None until a forward fills it


class Decoder(Protocol):
    """A model, draft or target, as generation uses it.

    recorded: whether its small forwards are replayed as CUDA graphs (graphs.py).
    """

    embedding: Tensor
    device: torch.device
    dtype: torch.dtype
    context_length: int
    recorded: bool

    def new_cache(self, rows: int, slots: int) -> KVCache:
        """An empty cache of `rows` rows with at least `slots` slots."""
        ...

    def forward(
        self,
        tokens: Tensor,
        start: int | Tensor,
        cache: KVCache,
        last_only: bool = False,
        states: HiddenStates | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of `tokens` [B, T] at positions start, start+1, …; writes the cache.

        start: the first position, an int for all rows or a tensor [B] by row. If the tensor is on
        the host, the host does not wait for the device. last_only: returns the last position's
        logits [B, 1, V]. states: each layer number that is a key gets its hidden states [B, T, H].
        """
        ...


def in_pieces(
    decoder: Decoder,
    tokens: Tensor,
    start: int | Tensor,
    cache: KVCache,
    last_only: bool = True,
    states: HiddenStates | None = None,
) -> Iterator[Tensor]:
    """The logits of a text [B, T] in pieces of PIECE positions, each from one Decoder.forward.

    Pieces keep the memory for activations and masks constant as T grows. They are not recorded as
    CUDA graphs, because a piece's width and position seldom occur again. states: filled with the
    states of the whole text after the last piece.
    """
    plain = cache.unrecorded()
    read: dict[int, list[Any]] = {layer: [] for layer in states or ()}
    for piece in tokens.split(PIECE, dim=1):
        piece_states: HiddenStates = dict.fromkeys(read)
        yield decoder.forward(piece, start, plain, last_only, piece_states)
        start = start + piece.shape[1]  # not in place: it may be the caller's tensor
        for layer, state in piece_states.items():
            read[layer].append(state)
    if states:
        states.update({layer: torch.cat(parts, 1) for layer, parts in read.items()})
