"""CUDA graphs on a CPU: the tensor operations of one run are kept, and repeated.

As in a graph, operations, arguments and the addresses of all tensors are fixed. What the input
tensors hold is read anew. What CUDA refuses while it records, is refused here.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eval.decoding import build, graphs

aten = torch.ops.aten
# a number that the host reads, a shape that depends on one, a tensor made of the host's numbers
REFUSED = (aten.item.default, aten._local_scalar_dense.default, aten.nonzero.default)
REFUSED += (aten.lift_fresh.default,)


def tensors(nest):
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, torch.Tensor)]


class Recording(TorchDispatchMode):
    """Keeps the operations that run in this context."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in REFUSED:
            raise RuntimeError(f"{func} while a graph is recorded")
        result = func(*args, **(kwargs or {}))
        given = {tensor.untyped_storage().data_ptr() for tensor in tensors(args)}
        made = [t for t in tensors(result) if t.untyped_storage().data_ptr() not in given]
        if made or func._schema.is_mutable:  # else it is a view
            self.operations.append((func, args, kwargs or {}, made))
        return result

    def repeat(self):
        for func, args, kwargs, made in self.operations:
            again = func(*args, **kwargs)
            for kept, new in zip(made, tensors(again) if made else (), strict=True):
                kept.copy_(new)


class Replayed:
    """`graphs.Record`. made: the shape of the tokens of each recording."""

    def __init__(self):
        self.made = []

    def __call__(self, run, inputs):
        self.made.append(tuple(inputs[0].shape))
        with Recording() as recording:
            outputs = run(*inputs)

        def replay():
            recording.repeat()
            return outputs

        return replay


def as_on_a_gpu(patch, record=Replayed):
    """Decoders that are built from now on record and replay their forwards. record: makes `Record`.

    A short text meets several buckets, and widths beyond the widest. A pooled cache comes with
    numbers that nobody may read, because those of an earlier text may be right by chance.
    """
    pooled = graphs.GraphedDecoder.new_cache

    def soiled(decoder, rows, slots):
        cache = pooled(decoder, rows, slots)
        with torch.inference_mode():  # in which a former text may have made the pooled cache
            for held in cache.keys + cache.values:
                held.fill_(1e3)
        return cache

    patch.setattr(graphs.GraphedDecoder, "new_cache", soiled)
    patch.setattr(build, "on_one_gpu", lambda fused: True)
    patch.setattr(build, "CudaGraphs", lambda device: record())
    patch.setattr(graphs, "BUCKET", 32)
    patch.setattr(graphs, "WIDEST", 6)
