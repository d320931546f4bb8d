"""Attention of drafts in training: which tokens a query sees, and the attention over them.

A token belongs to a text. A query sees its text up to a position, and the tokens of its own group
up to a depth. Groups are what a draft reads beside the text: the masks behind an anchor (PARD,
DFlash), or the earlier steps of the same draft (EAGLE-3).

On a CPU the texts are computed one after another, so packed texts cost what they cost alone. On a
GPU one dense mask covers a row. Legend: B rows, Q queries and K keys of a row, A attention heads, G
heads of keys and values, D size of a head.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama.modeling_llama import repeat_kv

NO_TEXT = -1  # the text of padding
NO_GROUP = -1  # the group of a text's own tokens
# Cosines and sines of positions [B, 1, K, D]; the sines of the first half of D are negative
Rotary = tuple[Tensor, Tensor]
BESIDE = 2**30  # the position of a token that is seen by its group alone


class Marks(NamedTuple):
    """What decides which tokens a query sees, for each token of a row [B, K].

    texts: the number of its text in the batch, or NO_TEXT. positions: its number in the text, or
    BESIDE. groups: the number of its group in the batch, or NO_GROUP. depths: its number there.
    """

    texts: Tensor
    positions: Tensor
    groups: Tensor
    depths: Tensor

    @classmethod
    def of_texts(cls, texts: Tensor, positions: Tensor) -> Marks:
        """The marks of tokens without a group."""
        none = torch.full_like(positions, NO_GROUP)
        return cls(texts, positions, none, torch.zeros_like(none))

    def as_keys(self) -> Marks:
        """The marks of a group's tokens as keys: no query sees them by their position."""
        return self._replace(positions=torch.full_like(self.positions, BESIDE))

    def then(self, others: Marks) -> Marks:
        """These tokens and, after them in their rows, the others [B, K + K']."""
        return Marks(*(torch.cat(pair, 1) for pair in zip(self, others, strict=True)))


def sees(queries: Marks, keys: Marks, window: int | None, both_ways: bool) -> Tensor:
    """Whether each query sees each key [B, Q, K]; arguments as of `Attention.__call__`."""
    behind = queries.positions[..., None] - keys.positions[:, None]
    visible = behind >= 0
    if window is not None:
        visible &= behind + queries.depths[..., None] < window
    group = queries.groups[..., None] == keys.groups[:, None]
    group &= (queries.groups != NO_GROUP)[..., None]
    if not both_ways:
        group &= keys.depths[:, None] <= queries.depths[..., None]
    return (visible | group) & (queries.texts[..., None] == keys.texts[:, None])


class Attention:
    """Attention of these queries over these keys, for all layers of a draft that share them.

    A query sees its text up to its position, and its group up to its depth. by_text: compute text
    by text. False: with one dense mask, as a GPU does.
    """

    def __init__(self, queries: Marks, keys: Marks, by_text: bool | None = None) -> None:
        self.queries, self.keys = queries, keys
        self.by_text = queries.texts.device.type == "cpu" if by_text is None else by_text
        self.masks: dict[tuple[int | None, bool, torch.dtype], list[Tensor]] = {}
        if self.by_text:
            count = max(keys.texts.flatten().tolist()) + 1
            self.places = [_places(marks.texts, count) for marks in (queries, keys)]

    def mask(self, window: int | None, both_ways: bool, dtype: torch.dtype) -> list[Tensor]:
        """The scores that are added: [1, Q, K] of each text, or one [B, 1, Q, K]."""
        if (window, both_ways, dtype) not in self.masks:
            pairs = [(self.queries, self.keys)]
            if self.by_text:
                pairs = list(zip(*map(self._parts, range(2)), strict=True))
            visible = [sees(*pair, window, both_ways) for pair in pairs]
            if not self.by_text:
                visible = [visible[0][:, None]]
            lowest = torch.finfo(dtype).min
            self.masks[window, both_ways, dtype] = [
                torch.zeros_like(part, dtype=dtype).masked_fill_(~part, lowest) for part in visible
            ]
        return self.masks[window, both_ways, dtype]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The scores to add of all pairs [B, 1, Q, K], as models of transformers take them."""
        return Attention(self.queries, self.keys, False).mask(None, False, dtype)[0]

    def _parts(self, side: int) -> list[Marks]:
        """The marks of the queries (0) or keys (1), text by text."""
        order, counts = self.places[side]
        fields = (
            field.flatten()[order][None].split(counts, 1)
            for field in (self.queries, self.keys)[side]
        )
        return [Marks(*part) for part in zip(*fields, strict=True)]

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        window: int | None = None,
        both_ways: bool = False,
    ) -> Tensor:
        """The heads' output [B, Q, A, D] of q [B, A, Q, D], k and v [B, G, K, D].

        scale: of the scores; None: D ** -0.5. window: the number of tokens that a query sees at
        most, itself included; None: all. both_ways: a query sees its whole group. The output of
        padding means nothing.
        """
        q, k = q.to(v.dtype), k.to(v.dtype)  # `rotated` may have computed in fp32
        masks = self.mask(window, both_ways, v.dtype)
        if not self.by_text:
            # torch's kernels for a mask need as many heads of keys as of queries
            k, v = (repeat_kv(x, q.shape[1] // x.shape[1]) for x in (k, v))
            dense = F.scaled_dot_product_attention(q, k, v, masks[0], scale=scale)
            return dense.transpose(1, 2)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        (of_queries, queries), (of_keys, keys) = self.places
        flat = (x.transpose(0, 1).flatten(1, 2) for x in (q, k, v))  # [A or G, B * Q or B * K, D]
        orders = of_queries, of_keys, of_keys
        by_text = (x[:, order] for x, order in zip(flat, orders, strict=True))
        out: Tensor = _ByText.apply(*by_text, masks, (queries, keys), scale).transpose(0, 1)
        rows, _, width, _ = q.shape
        if isinstance(of_queries, slice):
            whole = F.pad(out, (0, 0, 0, 0, 0, rows * width - len(out)))
        else:
            whole = out.new_zeros(rows * width, *out.shape[1:]).index_copy(0, of_queries, out)
        return whole.unflatten(0, (rows, width))


class _Rotation(torch.autograd.Function):
    """Its gradient is the rotation back, which takes fewer kernels than autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return torch.addcmul(x * cos, _halves_swapped(x), sin)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        turned = torch.addcmul(gradient * cos, _halves_swapped(gradient), sin, value=-1)
        return turned, None, None


def _halves_swapped(x: Tensor) -> Tensor:
    return x.roll(x.shape[-1] // 2, -1)


def rotated(heads: Tensor, rotary: Rotary) -> Tensor:
    """Queries or keys [B, A, K, D] turned by their positions."""
    turned: Tensor = _Rotation.apply(heads, *rotary)
    return turned


def _places(texts: Tensor, count: int) -> tuple[Tensor | slice, list[int]]:
    """The flat indices of the tokens of texts [B, K], text by text, and their number in each."""
    flat = texts.flatten()
    padding, *counts = (flat + 1).bincount(minlength=count + 1).tolist()
    tokens = len(flat) - padding
    first = flat[:tokens]
    if bool((first[:-1] <= first[1:]).all()) and bool((first >= 0).all()):
        return slice(0, tokens), counts  # already so, and a slice copies nothing
    return flat.sort(stable=True).indices[padding:], counts


class _ByText(torch.autograd.Function):
    """Attention of q [A, N, D] over k and v [G, M, D], which are sorted by text.

    Nothing of the size Q x K is kept: the backward pass computes the weights again.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        masks: list[Tensor],
        counts: tuple[list[int], list[int]],
        scale: float,
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.masks, ctx.counts, ctx.scale = masks, counts, scale
        out = torch.empty_like(q)
        parts = _split(counts, (q, out), (k, v))
        for mask, q_text, out_text, k_text, v_text in zip(masks, *parts, strict=True):
            _, weights = _weights(q_text, k_text, mask, scale)
            out_text.copy_((weights @ v_text).view(out_text.shape))
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in (q, k, v)]
        parts = _split(ctx.counts, (q, gradient, gradients[0]), (k, v, gradients[1], gradients[2]))
        for mask, q_text, out_text, to_q, k_text, v_text, to_k, to_v in zip(
            ctx.masks, *parts, strict=True
        ):
            grouped, weights = _weights(q_text, k_text, mask, ctx.scale)
            to_out = out_text.reshape(grouped.shape)
            to_v.copy_(weights.transpose(1, 2) @ to_out)
            to_weights = to_out @ v_text.transpose(1, 2)
            to_scores = torch._softmax_backward_data(to_weights, weights, -1, weights.dtype)
            to_scores *= ctx.scale
            to_q.copy_((to_scores @ k_text).view(to_q.shape))
            to_k.copy_(to_scores.transpose(1, 2) @ grouped)
        return *gradients, None, None, None


def _split(
    counts: tuple[list[int], list[int]], of_queries: tuple[Tensor, ...], of_keys: tuple[Tensor, ...]
) -> list[tuple[Tensor, ...]]:
    """Each tensor [A or G, N, D] by text."""
    sides = zip((of_queries, of_keys), counts, strict=True)
    return [x.split(count, 1) for tensors, count in sides for x in tensors]


def _weights(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The queries by head of keys [G, A / G * Q, D], and their weights of the keys [.., K]."""
    heads, queries, size = q.shape
    grouped = q.reshape(len(k), heads // len(k) * queries, size)
    scores = torch.bmm(grouped, k.transpose(1, 2)).mul_(scale)
    scores.view(heads, queries, k.shape[1]).add_(mask)
    return grouped, scores.softmax(-1)
