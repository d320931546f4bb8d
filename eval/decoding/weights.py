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
import torch.nn.functional as F
from torch import Tensor, nn

from eval.decoding import cpu_bits

INT8_TERMS = 16  # torch's kernel reads 16 terms at a time, beyond the end if I is no multiple of it
INT8_ROWS = 16  # for more rows, it is faster to convert the int8 weight first

PIECE = 2**20  # values of a weight that are converted at once; they fit into a core's cache

_MADV_DONTNEED = 4  # Linux' mman.h


class Int8Weight(NamedTuple):
    """A weight [O, I] in int8: weight = values [O, I] * scales [O], a scale per row."""

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, *weights: Tensor) -> Int8Weight:
        """The weights joined along O; each row is rounded to 255 levels up to its largest value."""
        values, scales = [], []
        pieces = (weight.split(max(1, PIECE // weight.shape[1])) for weight in weights)
        for rows in itertools.chain.from_iterable(pieces):
            largest = rows.abs().amax(1).clamp_min(torch.finfo(rows.dtype).tiny)
            scales.append((largest / 127).to(rows.dtype))
            rounded = (rows.float() / scales[-1][:, None].float()).round_()
            values.append(rounded.clamp_(-127, 127).to(torch.int8))
        return cls(torch.cat(values), torch.cat(scales))


class Product(NamedTuple):
    """A linear layer; several layers that read the same input are fused into one."""

    weight: Tensor | Int8Weight
    bias: Tensor | None

    @classmethod
    def of(cls, *parts: nn.Linear, int8: bool = False) -> Product:
        """int8: a copy in int8; the layers stay unchanged. Else their weights become views."""
        biases: list[Tensor] = [part.bias for part in parts if part.bias is not None]
        weight: Tensor | Int8Weight
        if int8:
            weight = Int8Weight.of(*(part.weight.detach() for part in parts))
        else:
            weight = fused(parts)
        return cls(weight, torch.cat(biases) if biases else None)

    @property
    def device(self) -> torch.device:
        weight = self.weight
        return weight.device if isinstance(weight, Tensor) else weight.values.device

    @property
    def nbytes(self) -> int:
        """Bytes of the weight in memory, without the bias."""
        weight = self.weight
        return weight.nbytes if isinstance(weight, Tensor) else sum(part.nbytes for part in weight)

    def __call__(self, x: Tensor) -> Tensor:
        """F.linear of x [B, T, I], in the dtype of x. With int8, the bits depend on B and T."""
        if isinstance(self.weight, Tensor):
            return cpu_bits.linear(x, self.weight, self.bias)
        values, scales = self.weight
        if not 0 < x.shape[0] * x.shape[1] <= INT8_ROWS:
            return F.linear(x, values.to(x.dtype) * scales[:, None], self.bias)
        y = torch._weight_int8pack_mm(x.flatten(0, 1), values, scales).view(*x.shape[:2], -1)
        return y if self.bias is None else y + self.bias


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
