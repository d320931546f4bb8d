"""A model's weights in the form that a decoder multiplies by, in memory once.

Legend: B rows, T positions, K terms of a product, N its results.
"""

from __future__ import annotations

import ctypes
import itertools
import mmap
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from eval.decoding import cpu_bits

INT8_TERMS = 16  # torch's kernel reads the terms of a product sixteen at a time, past the end too
INT8_ROWS = 16  # for more rows than this, unpacking an int8 weight first is faster

PIECE = 2**20  # values of a weight converted at once: few enough for a core's cache

_MADV_DONTNEED = 4  # Linux' mman.h


def _pieces(weight: Tensor) -> Sequence[Tensor]:
    """A weight [N, K], a few rows at a time."""
    return weight.split(max(1, PIECE // weight.shape[1]))


class Int8Weight(NamedTuple):
    """A weight [N, K] in eight bits: values int8 [N, K], and the unit of each row, scales [N]."""

    values: Tensor
    scales: Tensor

    @classmethod
    def of(cls, *weights: Tensor) -> Int8Weight:
        """Weights one below the other, each row rounded to 255 levels up to its largest value."""
        values, scales = [], []
        for rows in (rows for weight in weights for rows in _pieces(weight)):
            largest = rows.abs().amax(1).clamp_min(torch.finfo(rows.dtype).tiny)
            scales.append((largest / 127).to(rows.dtype))
            rounded = (rows.float() / scales[-1][:, None].float()).round_()
            values.append(rounded.clamp_(-127, 127).to(torch.int8))
        return cls(torch.cat(values), torch.cat(scales))


class Product(NamedTuple):
    """One product, of several of a model's where they read the same input."""

    weight: Tensor | Int8Weight
    bias: Tensor | None

    @classmethod
    def of(cls, *parts: nn.Linear, int8: bool = False) -> Product:
        """int8: a copy in eight bits; the parts stay as they are."""
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
        """Of the weight as it is held, a bias aside."""
        weight = self.weight
        return weight.nbytes if isinstance(weight, Tensor) else sum(part.nbytes for part in weight)

    def __call__(self, x: Tensor) -> Tensor:
        """F.linear of [B, T, K] in its dtype. In eight bits the bits depend on B and T."""
        if isinstance(self.weight, Tensor):
            if x.dtype != self.weight.dtype:
                return fp32_linear(x, self.weight, self.bias)
            return cpu_bits.linear(x, self.weight, self.bias)
        values, scales = self.weight
        if not 0 < x.shape[0] * x.shape[1] <= INT8_ROWS:
            return F.linear(x, values.to(x.dtype) * scales[:, None], self.bias)
        y = torch._weight_int8pack_mm(x.flatten(0, 1), values, scales).view(*x.shape[:2], -1)
        return y if self.bias is None else y + self.bias


def linear(weight: Tensor) -> nn.Linear:
    """A layer without a bias that holds this very weight [N, K]."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight.contiguous())
    return layer


def fused(parts: Sequence[nn.Linear]) -> Tensor:
    """The weights of products that read the same input, one below the other [N, K].

    The parts' own weights become views of it: the model computes, saves and is pruned as before.
    Where they are views already, as after an earlier call, nothing is copied.
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
    """Release the file pages that these weights were read from; a later read loads them again.

    transformers maps a checkpoint's file into memory. The pages that were read stay in memory as
    long as any tensor of the file exists.
    """
    if sys.platform != "linux":
        return
    with open("/proc/self/maps") as maps:
        lines = [line.split() for line in maps]
    files = [[int(at, 16) for at in line[0].split("-")] for line in lines if line[4] != "0"]
    page, libc = mmap.PAGESIZE, ctypes.CDLL(None)
    for weight in weights:
        # whole pages only: its neighbours' stay
        begin = -(-weight.data_ptr() // page) * page
        end = (weight.data_ptr() + weight.nbytes) // page * page
        if any(first <= begin < end <= last for first, last in files):
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_DONTNEED)


def fp32_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear in fp32 of a weight [N, K] in fewer bits, converted a few rows at a time.

    All pieces use one buffer. Otherwise outputs fill the holes of freed pieces, and each new piece
    takes more memory.
    """
    pieces = _pieces(weight)
    buffer = torch.empty(pieces[0].shape, dtype=torch.float32, device=weight.device)
    y = torch.cat([F.linear(x, buffer[: len(rows)].copy_(rows)) for rows in pieces], -1)
    return y if bias is None else y + bias.float()


def _widened(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: t.float() if t is not None and t.is_floating_point() else t
        for name, t in tensors.items()
    }


class _Fp32Products(TorchFunctionMode):
    """Within it F.linear takes fp32 inputs whatever its weight is in."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and args[0].dtype != args[1].dtype:
            return fp32_linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[None]:
    """Within it the model computes in fp32: each module's weights are converted while it runs.

    A product's weight is converted a few rows at a time, an embedding's in the rows that are read,
    any other module's (a norm, a mixture's experts) at once. Afterwards the model is unchanged.
    """
    saved: dict[nn.Module, dict[str, Any]] = {}

    def widen(module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        saved[module] = dict(module.__dict__)
        parameters = dict(module._parameters)
        if isinstance(module, nn.Embedding):
            read, places = args[0].unique(return_inverse=True)
            parameters["weight"], args = module.weight[read], (places, *args[1:])
            module.padding_idx = None  # only training looks at it, and it may be no row now
        module._parameters, module._buffers = _widened(parameters), _widened(module._buffers)
        return args

    def put_back(module: nn.Module, *_: Any) -> None:
        module.__dict__.update(saved.pop(module))

    hooks = []
    for module in model.modules():
        tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        narrow = any(t.is_floating_point() and t.dtype != torch.float32 for t in tensors)
        if narrow and type(module) is not nn.Linear:
            hooks.append(module.register_forward_pre_hook(widen))
            hooks.append(module.register_forward_hook(put_back, always_call=True))
    try:
        with _Fp32Products():
            yield
    finally:
        for hook in hooks:
            hook.remove()
