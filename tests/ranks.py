"""Processes of one run, as a launcher starts them, forked from one that has imported everything."""

import multiprocessing
import os

import torch
from torch.distributed import TCPStore

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["distill.train"])


def run_ranks(folder, count, work, *arguments):
    """Exit status and output of each of `count` processes that do `work(*arguments)` together.

    work: a function of a module. folder: for what they print.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    logs = [folder / f"rank-{rank}.log" for rank in range(count)]
    ranks = [
        FORKED.Process(target=_rank, args=(rank, count, store.port, log, work, arguments))
        for rank, log in enumerate(logs)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(600)
        process.kill()
        process.join()
    return [(process.exitcode, log.read_text()) for process, log in zip(ranks, logs, strict=True)]


def _rank(rank, count, port, log, work, arguments):
    here = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(here, 1)
    os.dup2(here, 2)
    if count > 1:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        address["TORCHELASTIC_USE_AGENT_STORE"] = True  # the store is the caller's, as of torchrun
        os.environ |= {name: str(value) for name, value in (numbers | address).items()}
    torch.set_num_threads(1)
    work(*arguments)
