"""A model's weights in the form that decoders multiply by, without a second copy in memory.

Legend: B rows, T positions, I inputs and O outputs of a matrix.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from eval.decoding import cpu_bits

_MADV_DONTNEED = 4  # Linux' mman.h


class Product(NamedTuple):
    """A linear layer; several layers that read the same input are fused into one."""

    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, *parts: nn.Linear) -> Product:
        """The layers' weights become views of the product's."""
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        return cls(fused(parts), torch.cat(biases) if biases else None)

    def __call__(self, x: Tensor) -> Tensor:
        """F.linear of x [B, T, I], in the dtype of x."""
        return cpu_bits.linear(x, self.weight, self.bias)


def linear(weight: Tensor) -> nn.Linear:
    """A layer without bias on this weight [O, I]; a contiguous weight is not copied."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.contiguous())
    return layer


def fused(parts: Sequence[nn.Linear]) -> Tensor:
    """The weights of layers that read the same input, joined along O [O, I].

    The layers' weights become views of the result, so the model can be called, saved and pruned as
    before. If they are such views already, nothing is copied.
    """
    weights = [part.weight.detach() for part in parts]
    first, size = weights[0], sum(len(weight) for weight in weights)
    ends = itertools.accumulate((w.nbytes for w in weights), initial=first.data_ptr())
    whole = first.untyped_storage().data_ptr()
    if all(
        w.data_ptr() == at and w.untyped_storage().data_ptr() == whole and w.is_contiguous()
        for w, at in zip(weights, ends, strict=False)
    ):
        return first.as_strided((size, first.shape[1]), (first.shape[1], 1))
    together = torch.cat(weights)
    views = together.split([len(weight) for weight in weights])
    for part, view in zip(parts, views, strict=True):
        part.weight = nn.Parameter(view, part.weight.requires_grad)
    if first.device.type == "cpu":
        _unload(weights)
    return together


def _unload(weights: Sequence[Tensor]) -> None:
    """Release the file pages of these weights. Linux only; a later read loads the pages again.

    transformers maps a checkpoint's file into memory, and pages that were read stay in memory as
    long as any tensor of the file exists.
    """
    if sys.platform != "linux":
        return
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    files = [[int(at, 16) for at in line[0].split("-")] for line in lines if line[4] != "0"]
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None)
    for weight in weights:
        # only whole pages, because neighbouring tensors use the others
        begin = -(-weight.data_ptr() // page) * page
        end = (weight.data_ptr() + weight.nbytes) // page * page
        if any(first <= begin < end <= last for first, last in files):
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)
