"""The machine that an evaluation runs on, for the report."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from align.errors import masked_arguments
from align.machine import cores

CPU_INFO = Path("/proc/cpuinfo")
FASTER = {"avx2", "avx512f", "avx512_bf16", "amx_bf16"}  # instructions that a CPU may have
PACKAGES = "torch transformers trl peft accelerate datasets evaluate gguf safetensors".split()


def made_by(seed: int) -> dict[str, Any]:
    """The part of a report's `provenance` that each command has: itself, and its software."""
    return {
        "command": masked_arguments(sys.argv),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES}
        | {"python": platform.python_version()},
        "git_commit": git_commit(Path(__file__).parents[2]),
        "seed": seed,
    }


def git_commit(folder: Path) -> str | None:
    """The commit of the repository that this folder is; None for a folder in one, and without git.

    An installed wheel has no repository, but may be in that of its user.
    """
    if not (folder / ".git").exists():
        return None
    with suppress(OSError):
        command = ["git", "-C", str(folder), "rev-parse", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or None
    return None


def environment(
    engine: str, version: str | None, device: torch.device, gpus: int = 1
) -> dict[str, Any]:
    """The report's `environment`, for an engine on this machine; date and load are of now."""
    on_cpu = device.type != "cuda"
    return {
        "engine": engine,
        "engine_version": version,
        "hardware": cpu_model() if on_cpu else gpu_name(device, gpus),
        "cores": cores(),
        "threads": torch.get_num_threads() if on_cpu else None,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "load_average": round(os.getloadavg()[0], 2),
        "server_arguments": None,
        "server_variables": None,
    }


def gpu_name(device: torch.device, gpus: int = 1) -> str:
    """The GPU's model name, after the number of GPUs if there are several."""
    name = torch.cuda.get_device_name(device)
    return f"{gpus} x {name}" if gpus > 1 else name


def cpu_model() -> str:
    """The CPU's name, family, model and FASTER instructions from /proc/cpuinfo.

    In a virtual machine several generations have one name. Without the file, or on ARM, Python's
    `platform` names the CPU.
    """
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.exists() else []
    pairs = [line.partition(":")[::2] for line in reversed(lines)]
    about = {key.strip(): value.strip() for key, value in pairs}  # of the first core
    if "model name" not in about:
        return platform.processor() or platform.machine()
    faster = sorted(FASTER & {*about.get("flags", "").split()})
    kind = f"family {about.get('cpu family')}, model {about.get('model')}"
    return f"{about['model name']} ({', '.join([kind, *faster])})"
