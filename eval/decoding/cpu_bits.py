"""Makes logits on a CPU bit-identical, whether a token is verified with others or decoded alone.

If the bits differ, bf16 decides near-ties differently, and half of all outputs diverge from the
target's. The bits differ because a CPU's kernels sum in an order that depends on the shapes. These
functions use only shapes whose orders agree (measurements: docs/lab-notes.md). align/machine.py
fixes the order within MKL.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.decoding.forward import causal_bias

SLOT_BLOCK = 64  # attention runs over a multiple of this; unused slots are masked
WIDEST = 16  # the most positions of one row that attend with the bits that each has alone
KERNEL_ROWS = 32  # query rows that torch's fused attention processes together
FEWEST_ROWS = 4  # with fewer query rows, the sums have another order
TRIED_WIDTHS, TRIED_SLOTS = (2, 3, 4, 5, 7), (64, 180, 256, 320)
TRIED_HEADS, TRIALS = 32, 8
ROW_SUMS = 1024  # above this number of terms, oneDNN sums one row in another order than two rows
MKL_COLUMNS, MKL_MOST = 4, 8  # MKL multiplies by 4 columns at once; up to 8 have the bits of one


def whole_blocks(slots: int) -> int:
    """`slots` rounded up to a multiple of SLOT_BLOCK."""
    return -(-slots // SLOT_BLOCK) * SLOT_BLOCK


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of [B, T, I].

    Of rows that are not contiguous, as the last positions of texts, torch makes a batched product,
    for which it copies the weight B times.
    In bf16, one row with long sums is computed together with a copy. Two rows take no longer than
    one, because the weights are read once.
    In fp32, few rows become the columns of the right matrix. With F.linear, MKL sums one row in
    another order than two, and reads the weights more slowly (docs/lab-notes.md).
    """
    x = x.contiguous()
    if x.device.type != "cpu":
        return F.linear(x, weight, bias)
    rows = x.shape[0] * x.shape[1]
    if x.dtype == torch.float32 and rows <= MKL_MOST and torch.backends.mkl.is_available():
        padded = F.pad(x.flatten(0, 1), (0, 0, 0, -rows % MKL_COLUMNS))
        y = torch.mm(weight, padded.T)[:, :rows].T.contiguous().view(*x.shape[:2], len(weight))
        return y if bias is None else y + bias
    if x.dtype == torch.bfloat16 and rows == 1 and x.shape[2] > ROW_SUMS:
        return F.linear(torch.cat([x, x], dim=1), weight, bias)[:, :1]
    return F.linear(x, weight, bias)


class BlockAttention:
    """Attention of T positions of one row; each position has the bits that it has alone.

    Each position attends over the number of slots that it has alone. together: all positions are
    computed in one row, because `sums_alike` is true; otherwise each is a row of a batch.
    bias: `forward.causal_bias` [1, T, S]. first: the first position. slots: size of the cache.
    group: number of query heads that share a key head.
    """

    def __init__(self, bias: Tensor, first: int, slots: int, group: int, together: bool) -> None:
        self.group, self.together = group, together
        self.parts: list[tuple[int, int, int, Tensor]] = []  # positions from, to, slots, mask
        width, at = bias.shape[1], 0
        most = KERNEL_ROWS // group if together else width
        while at < width:
            length = min(whole_blocks(first + at + 1), slots)
            to = min(width, at + most, length - first)
            mask = bias[:, at:to, :length]
            if together:
                mask = enough_rows(mask.repeat(1, group, 1))[:, None]
            else:
                mask = mask[0, :, None, None].expand(-1, 1, group, -1).contiguous()
            self.parts.append((at, to, length, mask))
            at = to

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The attention [T, heads, D] of q [1, heads, T, D]; keys, values: [1, key heads, S, D]."""
        attend = self._together if self.together else self._apart
        pieces = [
            attend(q[:, :, at:to], keys[:, :, :length], values[:, :, :length], mask)
            for at, to, length, mask in self.parts
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

    def _together(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        _, heads, width, size = q.shape
        h = alike(q.reshape(1, keys.shape[1], self.group * width, size), keys, values, mask)
        return h.reshape(heads, width, size).transpose(0, 1)

    def _apart(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        _, heads, width, size = q.shape
        q = q.view(keys.shape[1], self.group, width, size).permute(2, 0, 1, 3)
        keys, values = (held.expand(width, -1, -1, -1) for held in (keys, values))
        h = F.scaled_dot_product_attention(q, keys, values, mask)
        return h.reshape(width, heads, size)


def alike(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Fused attention of a few query rows, with the bits that these rows have among more rows.

    q [B, heads, T, D], keys and values [B, heads, S, D]. mask: `enough_rows` of a mask of T rows.
    """
    rows = q.shape[2]
    if rows >= FEWEST_ROWS:
        return F.scaled_dot_product_attention(q, keys, values, mask)
    return F.scaled_dot_product_attention(enough_rows(q), keys, values, mask)[:, :, :rows]


def enough_rows(x: Tensor) -> Tensor:
    """x [..., T, D] padded with rows of zeros to at least FEWEST_ROWS rows."""
    return F.pad(x, (0, 0, 0, max(0, FEWEST_ROWS - x.shape[-2])))


@functools.cache
@torch.inference_mode()
def sums_alike(group: int, head_size: int, dtype: torch.dtype) -> bool:
    """Whether several positions that attend together have the bits that each has alone.

    The answer depends on this CPU's kernels, so random inputs are tried (0.3 s). Many are needed,
    because rounding to bf16 hides most differences: only 1 to 5 of 500 outputs of a head differ.
    """
    if 2 * group > KERNEL_ROWS:
        return False
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn((1, TRIED_HEADS, *shape), generator=generator).to(dtype)

    longest = max(TRIED_SLOTS)
    for slots in TRIED_SLOTS * TRIALS:
        keys, values = drawn(longest, head_size), drawn(longest, head_size)
        for width in TRIED_WIDTHS:
            q = drawn(group, width, head_size).flatten(1, 2)
            first = slots - width
            bias = causal_bias(torch.tensor([first]), width, longest, dtype)
            whole = BlockAttention(bias, first, longest, group, True)(q, keys, values)
            for i in range(width):
                block = BlockAttention(bias[:, i : i + 1], first + i, longest, group, True)
                if not torch.equal(whole[i : i + 1], block(q[:, :, i : i + 1], keys, values)):
                    return False
    return True
