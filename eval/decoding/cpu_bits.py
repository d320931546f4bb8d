"""Equal bits on a CPU: a token verified among others has, to the bit, the logits it has alone.

Else bf16 decides near-ties in another way, and half of all texts part from the target's own. A
CPU's kernels sum in an order that depends on the shapes; these functions keep products and
attention to shapes that agree (measurements: docs/lab-notes.md). The order within MKL is fixed in
align/process.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

SLOT_BLOCK = 64  # attention runs over a multiple of so many slots, the last ones masked
APART = 16  # up to so many positions of one row attend one by one, as rows of their own
ROW_SUMS = 1024  # oneDNN sums more terms of a single row in another order than of two


def whole_blocks(slots: int) -> int:
    """The number of slots that attention runs over, or a cache has, for that many in use."""
    return -(-slots // SLOT_BLOCK) * SLOT_BLOCK


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """F.linear of [B, T, K], a row alone computed beside a copy of itself where sums are long.

    Two rows take no longer than one: the weights are read once.
    """
    alone = x.shape[0] * x.shape[1] == 1 and x.shape[2] > ROW_SUMS
    if alone and x.dtype == torch.bfloat16 and x.device.type == "cpu":
        return F.linear(torch.cat([x, x], dim=1), weight, bias)[:, :1]
    return F.linear(x, weight, bias)


class SeparatePositions:
    """Attention of a few positions of one row, each as its own row, over as many slots as alone.

    bias: as of `forward.causal_bias` [1, T, S]. first: the first position. slots: of the cache.
    group: query heads that share a key head.
    """

    def __init__(self, bias: Tensor, first: int, slots: int, group: int) -> None:
        self.group = group
        self.parts: list[tuple[int, int, int, Tensor]] = []  # positions from, to, slots, mask
        width, at = bias.shape[1], 0
        while at < width:
            length = min(whole_blocks(first + at + 1), slots)
            to = min(width, length - first)
            shape = (to - at, 1, group, length)
            mask = bias[0, at:to, None, None, :length].expand(shape).contiguous()
            self.parts.append((at, to, length, mask))
            at = to

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """q [1, heads, T, D], keys and values [1, key heads, S, D] -> [T, key heads, group, D]."""
        q = q.reshape(keys.shape[1], self.group, q.shape[2], -1).permute(2, 0, 1, 3)
        found = [
            F.scaled_dot_product_attention(
                q[at:to],
                keys[:, :, :length].expand(to - at, -1, -1, -1),
                values[:, :, :length].expand(to - at, -1, -1, -1),
                mask,
            )
            for at, to, length, mask in self.parts
        ]
        return found[0] if len(found) == 1 else torch.cat(found)
