"""Batches that a thread makes before they are needed."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from accelerate.utils import recursively_apply
from torch import Tensor

from distill.drafters.batch import TrainingBatch
from distill.training_set import Part, TrainingSet

AHEAD = 2  # batches that are made before they are needed


class Prefetcher(Iterator[tuple[Part, TrainingBatch]]):
    """The batches of these parts, on the device. The `with` block ends the thread.

    A batch is valid until the next one is taken, because its buffer is used again. waited: seconds
    that the caller has waited for batches.
    """

    def __init__(self, data: TrainingSet, parts: Iterable[Part], device: torch.device) -> None:
        self.data, self.parts, self.device = data, parts, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.waited, self.ended = 0.0, False
        self.used: list[Tensor] = []  # the buffer of the batch that the caller has
        self.free, self.ready = SimpleQueue[list[Tensor]](), SimpleQueue[Any]()
        self.thread = Thread(target=self._make, daemon=True)

    def __enter__(self) -> Prefetcher:
        for _ in range(AHEAD):
            self.free.put([])
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended = True
        self.free.put([])
        self.thread.join()

    def __next__(self) -> tuple[Part, TrainingBatch]:
        self.free.put(self.used)
        began = time.perf_counter()
        ready = self.ready.get()
        self.waited += time.perf_counter() - began
        if isinstance(ready, Exception):
            raise ready
        part, batch, self.used = ready
        if self.stream is not None:  # the memory is not used again before this stream's work
            recursively_apply(Tensor.record_stream, batch, torch.cuda.current_stream())
        return part, batch

    def _make(self) -> None:
        try:
            with torch.cuda.stream(self.stream):
                for part in self.parts:
                    buffer = self.free.get()
                    if self.ended:
                        return
                    batch = self.data.batch(part, buffer, pinned=self.stream is not None)
                    if self.stream is not None:
                        batch = recursively_apply(self._copied, batch)
                        self.stream.synchronize()  # this thread alone waits for the copy
                    self.ready.put((part, batch, buffer))
            self.ready.put(StopIteration())
        except Exception as error:
            self.ready.put(error)  # `__next__` raises it

    def _copied(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.device, non_blocking=True)
