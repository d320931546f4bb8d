"""Settings of the machine that a process runs on, and the other processes of its run."""

from __future__ import annotations

import ctypes
import datetime
import gc
import os
import platform
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch
from accelerate import PartialState
from accelerate.utils import get_int_from_env, parse_flag_from_env

from align.errors import UserError

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_KEPT = 2**28  # bytes of freed memory that malloc keeps
_OTHER_LAUNCHES = ("DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG")  # accelerate's, refused here
_HOST = torch.device("cpu")
_GLIBC = platform.libc_ver()[0] == "glibc"
_host_groups: list[Any] = []  # one gloo group of all processes, if a run has several


def join_processes(on_cpu: bool, timeout: float) -> int:
    """Join the other processes of this run. Returns the number of processes on this machine.

    Call it before any other use of accelerate's state, because the process group keeps its first
    timeout. timeout: seconds that a process waits for the others; one of them may work alone for
    minutes. Raises UserError if fewer processes started than were requested, for a launcher that
    shards in another way than FSDP2, and if models would be loaded without weights.
    """
    world_size = get_int_from_env(["PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "WORLD_SIZE"], 1)
    if world_size > 1 and not on_cpu and not torch.cuda.is_available():
        on_cpu = True
        os.environ["ACCELERATE_USE_CPU"] = "true"  # accelerate's state must agree
    # `accelerate launch` sets MASTER_PORT if several processes are requested. Only torchrun starts
    # them and sets WORLD_SIZE, and the launcher calls torchrun for GPUs only.
    started_one = "ACCELERATE_USE_CPU" in os.environ and "WORLD_SIZE" not in os.environ
    if started_one and "MASTER_PORT" in os.environ and world_size == 1:
        raise UserError(
            "Several processes were asked for, but the launcher started one: `accelerate launch "
            "--cpu` cannot start more. Add --config_file recipes/accelerate/cpu_2.yaml and "
            "--num_processes, or unset MASTER_PORT if one process is intended."
        )
    modes = [name for name in _OTHER_LAUNCHES if parse_flag_from_env(f"ACCELERATE_USE_{name}")]
    if parse_flag_from_env("ACCELERATE_USE_FSDP") and os.environ.get("FSDP_VERSION") != "2":
        modes.append("FSDP of version 1")
    if modes:
        raise UserError(
            f"accelerate launch was configured for {modes[0]}, but a draft is trained with DDP or "
            "FSDP2 only; use recipes/accelerate/multi_gpu.yaml or fsdp2.yaml."
        )
    if parse_flag_from_env("FSDP_CPU_RAM_EFFICIENT_LOADING"):
        raise UserError(
            "fsdp_cpu_ram_efficient_loading is true: all processes but the first would load empty "
            "models, the target included. Set it to false in the accelerate config, as "
            "recipes/accelerate/fsdp2.yaml does."
        )
    state = PartialState(cpu=on_cpu, timeout=datetime.timedelta(seconds=timeout))
    if state.num_processes != world_size:
        raise UserError(
            f"WORLD_SIZE is {world_size}, but {state.num_processes} process of this run was "
            "started; start it with `accelerate launch` or torchrun, or unset WORLD_SIZE."
        )
    if state.num_processes > 1 and state.is_main_process:
        print(f"processes: {state.num_processes}, {state.backend}, {state.device.type}")
    if state.num_processes > 1:
        limit = datetime.timedelta(seconds=timeout)
        _host_groups.append(torch.distributed.new_group(backend="gloo", timeout=limit))
    if not state.is_main_process:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - the first process prints
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def wait_on_host() -> None:
    """Wait for all processes. Not by NCCL, because its barrier keeps the GPU busy."""
    for group in _host_groups:
        torch.distributed.barrier(group)


def from_first(value: T) -> T:
    """The first process's value, on all processes. Waits as `wait_on_host`."""
    values = [value]
    for group in _host_groups:
        torch.distributed.broadcast_object_list(values, group=group)
    return values[0]


def shared_by_all(folder: Path) -> bool:
    """Whether the path is the same folder for all processes. Waits as `wait_on_host`."""
    if not _host_groups:
        return True
    visible = [False] * PartialState().num_processes
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as mine:
        first = folder / from_first(Path(mine.name).name)
        torch.distributed.all_gather_object(visible, first.exists(), _host_groups[0])
    return all(visible)


def use_machine(processes: int = 1) -> None:
    """Set the number of threads, malloc, MKL, oneDNN and cuDNN for this process.

    `accelerate launch` starts every process with a single thread.
    glibc returns freed tensors of a few megabytes to the kernel and requests them again. The
    page faults then take longer than the arithmetic (sampling for 48 rows of 49k logits: 48 ms, not
    5). Larger tensors are still returned, because they would fragment the memory (with heads of
    600 MB: 23 GiB after 30 training steps, not 9).
    By default MKL's order of summation depends on a tensor's address. Then the logits of a verified
    token could differ in the last bits from those of the same token decoded alone.
    oneDNN caches kernels for the last 1,024 shapes of a product. Batches of all lengths fill this
    cache with 0.6 GB, though few shapes occur again (docs/lab-notes.md). It also keeps 0.3 MB per
    shape, which no setting changes: therefore training uses few shapes (`losses.rounded`).
    oneDNN divides a product among the threads that it asks for. If OpenMP grants fewer, the other
    parts are never written, without an error (findings/).
    cuDNN's attention, which torch prefers on an H100, builds a plan for each new shape. This takes
    0.4 seconds (github.com/modelscope/FunASR/issues/3704), and each decoded token is a new shape.
    processes: the number of processes on this machine. Raises UserError if OpenMP may grant fewer
    threads than it is asked for.
    """
    if os.environ.get("OMP_DYNAMIC", "").strip().lower() in ("true", "1"):
        raise UserError(
            "OMP_DYNAMIC is true, with which torch's products in bf16 can lack parts without an "
            "error. Unset it."
        )
    # MKL and oneDNN read these at their first call; a value that is already set is the user's
    os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
    granted = get_int_from_env(["OMP_THREAD_LIMIT"], sys.maxsize)
    torch.set_num_threads(max(1, min(cores() // processes, granted)))
    torch.backends.cuda.enable_cudnn_sdp(False)
    if _GLIBC:
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)


def free_memory() -> None:
    """Collect garbage, and return freed memory that glibc keeps to the kernel.

    Call it between stages only: within a stage the same memory is needed again (`use_machine`).
    """
    gc.collect()
    torch.cuda.empty_cache()  # another process, for example vLLM, may need it
    if _GLIBC:
        ctypes.CDLL(None).malloc_trim(0)


def memory_left(device: torch.device = _HOST) -> int:
    """Bytes that this process may still take: of a GPU, or of the machine and its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free: int = psutil.virtual_memory().available
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdecimal() and used.isdecimal():
        files = re.findall(r"^(?:in)?active_file (\d+)", _read("/sys/fs/cgroup/memory.stat"), re.M)
        return min(free, int(limit) - int(used) + sum(map(int, files)))  # of the page cache
    return free


def machine_lines(memory: int, on_gpu: bool) -> list[str]:
    """Text on this machine beside the bytes of memory that a run needs."""
    about = f"machine: torch {torch.__version__}, {cores()} cores"
    place, left = "memory", memory_left()
    if on_gpu and torch.cuda.is_available():
        about += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        place, left = "memory of a GPU", memory_left(torch.device("cuda"))
    enough = "" if left >= memory else ": TOO LITTLE (docs/troubleshooting.md)"
    return [about, f"{place}: {memory / 2**30:.1f} GiB needed, {left / 2**30:.1f} free{enough}"]


def usual_dtype(on_cpu: bool) -> str:
    """The dtype in which a model computes unless another is given.

    On a CPU without bf16 instructions torch computes products of many rows nine times as fast in
    fp32 (docs/lab-notes.md). Where there is no list of instructions, it has them. A GPU below
    compute capability 8 has no bf16: engines compute in fp16 there.
    """
    if not on_cpu and torch.cuda.is_available():
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return "bfloat16" if native else "float16"
    flags = _read("/proc/cpuinfo") if on_cpu else ""
    return "bfloat16" if not flags or "bf16" in flags else "float32"


def cores() -> int:
    """The number of cores that this process may use."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None  # not on a Mac
    return len(allowed) if allowed else os.cpu_count() or 1


def _read(path: str) -> str:
    """The content of a system file of Linux; "" on other systems."""
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""
