"""Changes of a head's files that undo usual faults.

A head that accepts more after a change had the fault that the change undoes.

Legend: H hidden size, L layers read, K entries of the head.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor

from align.checkpoint import weight_files
from align.files import read_json
from eval.decoding.drafters.compact import weights_of

LAYERS = {"eagle_aux_hidden_state_layer_ids", "target_layer_ids", "layers"}  # by kind of file
LAYERS |= {"aux_hidden_state_layer_ids"}
ROPE = "rope_theta"
BASES = 1e4, 5e5, 1e6  # rotary bases of most published models


class Repair(NamedTuple):
    """cause: the fault. files: JSON files, by name. tensors: by name. Others are not changed."""

    cause: str
    files: Mapping[str, Any] = {}
    tensors: Mapping[str, Tensor] = {}

    def write(self, folder: Path, changed: Path) -> None:
        """Write the head in `folder` with the change to the new folder `changed`."""
        changed.mkdir()
        weights = {f"{number}.safetensors": p for number, p in enumerate(weight_files(folder))}
        for name, path in weights.items():
            (changed / name).symlink_to(path.resolve())
        for path in folder.iterdir():
            if path.name not in self.files and ".safetensors" not in path.suffixes:
                (changed / path.name).symlink_to(path.resolve())
        for name, content in self.files.items():
            (changed / name).write_text(json.dumps(content))
        # a tensor in two files is read from the last one, so the changed ones replace the others
        save_file({k: t.contiguous() for k, t in self.tensors.items()}, changed / "z.safetensors")


def repairs(folder: Path, target: Mapping[str, Any]) -> Iterator[Repair]:
    """The changes to try on the head in a folder. target: the config of the target's text model."""
    names = [name for name in ("config.json", "compact.json") if (folder / name).is_file()]
    files: dict[str, Any] = {name: read_json(folder / name) for name in names}
    tensors = weights_of(folder, "cpu")
    shape = files["config.json"].get("transformer_layer_config", files["config.json"])
    if rotary_base(shape) is None:
        shape[ROPE] = 1e4  # the default of Llama and Qwen3

    # 1. config.json
    def changed(
        cause: str, keys: Collection[str], change: Callable[[Any], Any]
    ) -> Iterator[Repair]:
        repaired = _changed(files, keys, change)
        if repaired != files:
            yield Repair(cause, repaired)

    for step in (1, -1):
        cause = f"its layer ids are {-step:+d} off those of its training"
        yield from changed(cause, LAYERS, partial(_moved, step))
    for base in {rotary_base(target) or 1e4, *BASES}:
        cause = f"its rotary base is {rotary_base(shape):g}, but it was trained with {base:g}"
        yield from changed(cause, {ROPE}, partial(lambda base, _: base, base))
    for flag in ("norm_before_residual", "norm_output"):
        yield from changed(f"{flag} is not as in its training", {flag}, operator.not_)

    # 2. The weights
    def rewritten(cause: str, ends: tuple[str, ...], change: Callable[[Tensor], Tensor]) -> Repair:
        named = {name: tensor for name, tensor in tensors.items() if name.endswith(ends)}
        return Repair(cause, tensors={name: change(tensor) for name, tensor in named.items()})

    attends = any(name.endswith("q_proj.weight") for name in tensors)  # Medusa has no attention
    size = shape.get("head_dim") or shape["hidden_size"] // shape.get("num_attention_heads", 1)
    for pairs in (True, False) if attends else ():
        cause = "q_proj and k_proj have the order of rows of another rotary layout"
        turn = partial(_turned, size=size, pairs=pairs)
        yield rewritten(cause, ("q_proj.weight", "k_proj.weight"), turn)
    for step in (1, -1):
        cause = f"the weights of its norms are {-step:+d} off, as another family stores them"
        yield rewritten(cause, ("norm.weight",), partial(operator.add, step))
    if "d2t" in tensors:
        entries = torch.arange(len(tensors["d2t"]))
        ids = tensors["d2t"] + entries
        readings = {"d2t has target ids, not offsets": tensors["d2t"]}
        for step in (1, -1):
            readings[f"the target ids of d2t are {-step:+d} off"] = ids + step
            readings[f"d2t is {-step:+d} entries off"] = ids.roll(step)
        for cause, ids in readings.items():
            if ids.min() >= 0 and ids.max() < target["vocab_size"]:
                changes = {"d2t": ids - entries}
                if "t2d" in tensors:
                    changes["t2d"] = torch.zeros_like(tensors["t2d"]).index_fill_(0, ids, True)
                yield Repair(cause, tensors=changes)
    if "fc.weight" in tensors:
        fc = tensors["fc.weight"]  # [H, L * H]
        blocks = fc.split(len(fc), 1)
        for cause, weight in {
            "fc is transposed": fc.reshape(fc.T.shape).T,
            "each layer's block of fc is transposed": torch.cat([b.T for b in blocks], 1),
            "fc has the layers in the opposite order": torch.cat(blocks[::-1], 1),
        }.items():
            yield Repair(cause, tensors={"fc.weight": weight})


def rotary_base(config: Any) -> float | None:
    """The first rotary base at any depth of a config; None without one."""
    if not isinstance(config, Mapping):
        return None
    bases = (config[ROPE] if key == ROPE else rotary_base(part) for key, part in config.items())
    return next((base for base in bases if base), None)


def _changed(node: Any, keys: Collection[str], change: Callable[[Any], Any]) -> Any:
    """The JSON value with the values of these keys changed, at any depth."""
    if not isinstance(node, Mapping):
        return node
    return {
        key: change(part) if key in keys and part is not None else _changed(part, keys, change)
        for key, part in node.items()
    }


def _moved(step: int, layers: list[int]) -> list[int]:
    return [layer + step for layer in layers]


def _turned(weight: Tensor, size: int, pairs: bool) -> Tensor:
    """The rows of each head of `size` rows from one rotary layout in the other.

    pairs: from interleaved pairs to halves; else from halves to pairs.
    """
    heads = weight.view(-1, *((size // 2, 2) if pairs else (2, size // 2)), weight.shape[1])
    return heads.transpose(1, 2).flatten(0, 2)
