"""What processes do that test_process.py starts."""

import os
import resource
import sys
import time

import torch
from torch.distributed import distributed_c10d
from transformers import TrainingArguments

from align.machine import from_first, join_processes, shared_by_all, use_machine, wait_on_host


def let_tensors_die(megabytes, growing):
    """Prints the page faults, and the pages still held, of tensors that die one after the other.

    growing: each is a little larger than the one before, and something small outlives it.
    """

    def faults_and_pages():
        with open("/proc/self/statm") as pages:
            resident = int(pages.read().split()[1])
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt, resident

    use_machine()
    torch.ones(megabytes << 18)
    before = faults_and_pages()
    alive = []
    for more in range(4 if growing else 16):
        torch.ones((megabytes << 18) + growing * more * (megabytes << 14))
        if growing:
            alive.append(torch.ones(1 << 16))
    print(*(b - a for a, b in zip(before, faults_and_pages(), strict=True)))


def wait_for_the_first(timeout, folder):
    """One process works while the other waits, for a second or until it gives up.

    Nobody waits on its GPU.
    """
    os.environ["ACCELERATE_USE_CPU"] = "true"  # as the launcher does
    print("here:", join_processes(True, timeout), flush=True)
    TrainingArguments(use_cpu=True)
    distributed_c10d._get_default_group = None  # with NCCL it would spin
    rank, given_up = os.environ["RANK"], folder / "given up"
    if rank == "0":
        until = time.monotonic() + (1 if timeout > 10 else 60)
        while time.monotonic() < until and not given_up.exists():
            time.sleep(0.1)
    try:
        wait_on_host()
    finally:
        given_up.touch()
    shared = shared_by_all(folder), shared_by_all(folder / rank)
    print("from", from_first(rank), shared, file=sys.stderr)
