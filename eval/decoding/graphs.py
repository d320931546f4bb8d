"""Small forwards on a GPU as CUDA graphs: recorded once, replayed by a single launch.

A step of a small draft runs hundreds of kernels, and each takes longer to launch than to run. A
recorded forward has fixed shapes and memory addresses. Therefore caches have the context's size and
are reused, attention runs over buckets of slots (unused ones masked), and tokens and position are
copied into fixed tensors. Forwards of several rows or above WIDEST tokens are not recorded.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eval.decoding.forward import HiddenStates, KVCache
from eval.decoding.fused import FusedDecoder

WIDEST = 16  # the most tokens of a recorded forward
BUCKET = 256  # slots
WARM_UPS = 2  # runs before a recording, which choose kernels and create workspaces


@dataclass
class StaticCache(KVCache):
    """A cache of one row whose tensors have fixed addresses. number: identifies these tensors."""

    number: int

    def resized(self, slots: int) -> KVCache:
        return KVCache([*self.keys], [*self.values]).resized(slots)


# Takes a function and its input tensors; returns a function that runs it on their present values.
Record = Callable[[Callable[..., list[Tensor]], Sequence[Tensor]], Callable[[], list[Tensor]]]


class CudaGraphs:
    """`Record` on a GPU. All graphs share one pool of memory, because only one runs at a time."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.pool = device, torch.cuda.graph_pool_handle()

    def __call__(
        self, run: Callable[..., list[Tensor]], inputs: Sequence[Tensor]
    ) -> Callable[[], list[Tensor]]:
        with torch.cuda.device(self.device):
            aside, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    run(*inputs)
            torch.cuda.current_stream().wait_stream(aside)
            with torch.cuda.graph(graph, pool=self.pool):
                outputs = run(*inputs)

        def replay() -> list[Tensor]:
            graph.replay()
            return outputs  # this reference keeps other graphs from using the outputs' memory

        return replay


class GraphedDecoder:
    """A fused decoder whose forwards of one row and a few tokens are recorded and replayed.

    recordings: the number of recordings of all such decoders; timings check that it is unchanged.
    """

    recorded = True
    recordings = 0

    def __init__(self, fused: FusedDecoder, record: Record) -> None:
        self.fused, self.record = fused, record
        self.embedding, self.device, self.dtype = fused.embedding, fused.device, fused.dtype
        self.context_length = fused.context_length
        self._slots = -(-fused.context_length // BUCKET) * BUCKET
        self._free: dict[int, StaticCache] = {}  # by number
        self._numbers = itertools.count()
        self._recorded: dict[tuple[Any, ...], Callable[[], list[Tensor]]] = {}
        self._tokens: dict[int, Tensor] = {}  # by width
        self._start = torch.zeros(1, dtype=torch.long, device=fused.device)

    def new_cache(self, rows: int, slots: int) -> KVCache:
        if rows > 1 or slots > self._slots:
            return self.fused.new_cache(rows, slots)
        if not self._free:
            new, number = self.fused.new_cache(1, self._slots), next(self._numbers)
            self._free[number] = StaticCache(new.keys, new.values, number)
        # the lowest number, so that texts one after the other use the same graphs
        pooled = self._free.pop(min(self._free))
        cache = StaticCache(pooled.keys, pooled.values, pooled.number)
        weakref.finalize(cache, self._free.__setitem__, pooled.number, pooled).atexit = False
        return cache

    @torch.inference_mode()
    def forward(
        self,
        tokens: Tensor,
        start: int | Tensor,
        cache: KVCache,
        last_only: bool = False,
        states: HiddenStates | None = None,
    ) -> Tensor:
        width = tokens.shape[1]
        if not isinstance(cache, StaticCache) or isinstance(start, Tensor) or width > WIDEST:
            return self.fused.forward(tokens, start, cache, last_only, states)
        length = -(-(start + width) // BUCKET) * BUCKET
        layers = tuple(states or ())
        key = (cache.number, width, length, last_only, layers)
        if width not in self._tokens:
            self._tokens[width] = torch.zeros((1, width), dtype=torch.long, device=self.device)
        read = self._tokens[width].copy_(tokens)
        self._start.fill_(start)
        if key not in self._recorded:
            GraphedDecoder.recordings += 1
            self._recorded[key] = self._record(read, cache, length, last_only, layers)
        # copies, because the next replay overwrites the outputs
        logits, *states_read = (output.clone() for output in self._recorded[key]())
        if states is not None:
            states.update(zip(layers, states_read, strict=True))
        return logits

    def _record(
        self,
        read: Tensor,
        cache: StaticCache,
        length: int,
        last_only: bool,
        layers: tuple[int, ...],
    ) -> Callable[[], list[Tensor]]:
        count = len(cache.keys)

        def run(tokens: Tensor, start: Tensor, *held: Tensor) -> list[Tensor]:
            states: HiddenStates = dict.fromkeys(layers)
            cached = KVCache([*held[:count]], [*held[count:]])
            logits = self.fused.forward(tokens, start, cached, last_only, states, length)
            return [logits, *(state for state in states.values() if state is not None)]

        return self.record(run, [read, self._start, *cache.keys, *cache.values])
