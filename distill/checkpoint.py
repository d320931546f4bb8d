"""Checkpoints of a training: what continues it, and the best weights so far.

They hold the trained weights alone, by name and unsharded, so any number of processes reads them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import save
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from align.checkpoint import opened_weights
from align.errors import SourceError
from align.files import atomic_file, read_json, remove, write_json
from align.machine import wait_on_host

COMPLETE = "complete"  # the last file of a checkpoint (`mark_complete`)
WEIGHTS, OPTIMIZER, STATE = "model.safetensors", "optimizer.pt", "trainer_state.json"
BEST = "best.safetensors"  # in a run's folder: the best weights and their measurement
START = "start.safetensors"  # there, too: a trained base draft before its first step
REMEDY = "restore it, or train under another --name with the cached outputs"
_WRAPPER = "_checkpoint_wrapped_module."  # of FSDP's activation checkpointing, in names


def trained_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name; tied ones once."""
    parameters = ((name.replace(_WRAPPER, ""), p) for name, p in model.named_parameters())
    return {name: p for name, p in parameters if p.requires_grad}


def _whole(value: Any) -> Any:
    """The unsharded value on the CPU. All processes must call it."""
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().cpu() if isinstance(value, Tensor) else value


def _like(parameter: Tensor, value: Tensor) -> Tensor:
    """The value [of the parameter's shape] on its device, sharded as it is."""
    value = value.to(parameter.device)
    if not isinstance(parameter, DTensor):
        return value
    layout = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, *layout, src_data_rank=None)


def save_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    limit: int,
) -> None:
    """Write checkpoint-N; then delete all but the last `limit`. All processes must call it.

    state: what continues the training besides the tensors, and the `launch` of `mark_complete`.
    Raises UserError if the disk is full.
    """
    main = PartialState().is_main_process
    if main:
        remove(folder)  # an incomplete one of this step
    _write_weights(folder / WEIGHTS, model)
    moments = {
        name: {key: _whole(value) for key, value in optimizer.state[p].items()}
        for name, p in trained_weights(model).items()
    }
    if main:
        with atomic_file(folder / OPTIMIZER, "wb") as file:
            torch.save(moments, file)
        write_json(folder / STATE, state)
        mark_complete(folder, state["launch"])
        older = [path for path in _checkpoints(folder.parent) if _number(path) < _number(folder)]
        for path in older[: max(0, len(older) + 1 - limit)]:
            remove(path)
    wait_on_host()


def load_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any]:
    """Read weights and optimiser. Returns the `state` of `save_checkpoint`."""
    load_weights(folder / WEIGHTS, model)
    if not (folder / OPTIMIZER).exists():  # of a finished run
        return read_json(folder / STATE)
    moments = torch.load(folder / OPTIMIZER, "cpu", weights_only=True, mmap=True)
    fused = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    for name, p in trained_weights(model).items():
        for key, value in moments[name].items():
            if isinstance(value, Tensor) and value.shape == p.shape:
                value = _like(p, value)
            elif isinstance(value, Tensor) and (fused or key != "step"):
                value = value.to(p.device)
            optimizer.state[p][key] = value
    return read_json(folder / STATE)


def save_best(folder: Path, model: nn.Module, measurement: dict[str, Any]) -> None:
    """Write a run's best weights and their measurement. All processes must call it."""
    _write_weights(folder / BEST, model, {"measurement": json.dumps(measurement)})
    wait_on_host()


def best_measurement(folder: Path) -> dict[str, Any] | None:
    """The measurement of a run's best weights; None if none are saved. Raises SourceError."""
    if not (folder / BEST).exists():
        return None
    with opened_weights(folder / BEST, remedy=REMEDY) as file:
        measurement: dict[str, Any] = json.loads(file.metadata()["measurement"])
    return measurement


def _write_weights(path: Path, model: nn.Module, metadata: dict[str, str] | None = None) -> None:
    weights = {name: _whole(p).contiguous() for name, p in trained_weights(model).items()}
    if PartialState().is_main_process:
        with atomic_file(path, "wb") as file:
            file.write(save(weights, metadata))


def load_weights(path: Path, model: nn.Module) -> None:
    """Read the weights of a checkpoint, or a run's best ones, into the model.

    Raises SourceError if the file is damaged or missing.
    """
    with opened_weights(path, remedy=REMEDY) as file, torch.no_grad():
        for name, p in trained_weights(model).items():
            p.copy_(_like(p, file.get_tensor(name)))


def save_start(folder: Path, model: nn.Module) -> None:
    """Write the weights before the first step, for `halve_change`. All processes must call it."""
    _write_weights(folder / START, model)
    wait_on_host()


def halve_change(folder: Path, model: nn.Module) -> None:
    """Move the weights half the way back to those of `save_start`.

    Raises SourceError if these are damaged.
    """
    with opened_weights(folder / START, remedy=REMEDY) as file, torch.no_grad():
        for name, p in trained_weights(model).items():
            p.add_(_like(p, file.get_tensor(name))).div_(2)


def mark_complete(checkpoint: Path, launch: str, spent: Path | None = None) -> None:
    """Write the last file of a checkpoint: the trainer's `launch`, and the bytes of each file.

    spent: a file that may be deleted afterwards.
    """
    sizes = {
        file.name: file.stat().st_size
        for file in checkpoint.iterdir()
        if file.name != COMPLETE and file != spent
    }
    write_json(checkpoint / COMPLETE, {"launch": launch, "bytes": sizes})


def launch_of(checkpoint: Path) -> str | None:
    """The `launch` that wrote a complete checkpoint; None if it is incomplete."""
    try:
        marker = read_json(checkpoint / COMPLETE)
        for name, size in marker["bytes"].items():
            if (checkpoint / name).stat().st_size != size:
                return None
    except (SourceError, FileNotFoundError):
        return None
    return str(marker["launch"])


def last_checkpoint(folder: Path) -> Path | None:
    """The latest complete checkpoint, or None."""
    whole = [path for path in _checkpoints(folder) if launch_of(path) is not None]
    return whole[-1] if whole else None


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("checkpoint-*"), key=_number)


def _number(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
