"""The machine that an evaluation runs on, for the report."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from align.machine import cores

CPU_INFO = Path("/proc/cpuinfo")


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
    """The CPU's model name from /proc/cpuinfo; without that file, Python's `platform` names it."""
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines() if CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
