"""What this process asks of the machine it runs on."""

from __future__ import annotations

import ctypes
import os
import platform

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT = 2**28  # bytes


def use_machine(processes: int = 1) -> None:
    """Give this process its share of the cores, the memory it frees, and sums in a fixed order.

    `accelerate launch` starts every process with a single thread. And glibc hands tensors of a few
    megabytes back to the kernel when they die, to ask for them again a moment later: the faults
    then take longer than the arithmetic (sampling for 48 rows of 49k logits: 48 ms, not 5).
    Larger ones still go back: kept, they leave holes that nothing fits (heads of 600 MB in
    training: 23 GiB after 30 steps, not 9).
    MKL otherwise lets the order of its sums depend on where in memory a tensor lies: now and then a
    verified token then had other last bits than the same token alone.
    processes: how many of them share this machine.
    """
    # read by MKL at its first call; what is set already is the user's choice
    os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
    mine = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None  # not on a Mac
    cores = len(mine) if mine else os.cpu_count() or 1
    torch.set_num_threads(max(1, cores // processes))
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
