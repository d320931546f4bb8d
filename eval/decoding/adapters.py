"""LoRA adapters as peft writes them, merged into models that share all else with their base.

A folder holds adapter_config.json, adapter_model.safetensors and, where draftsmith wrote it,
base.json: the domain, and the hashes of the base's weights in each of its forms. Legend: N x K a
weight, r the rank.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from align.sources import read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
BASE = "base.json"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_(A|B|magnitude_vector)(?:\.weight)?")


class AdapterError(ValueError):
    """An adapter that cannot be used: which, why, and what to do."""


@dataclass(frozen=True)
class Adapter:
    """path: its folder. base: what peft loads before it. scale: of every product B A.

    parts: by the name of the module: A [r, K], B [N, r] and, of DoRA, magnitude_vector [N].
    """

    path: Path
    base: str
    base_sha256: list[str]
    scale: float
    parts: dict[str, dict[str, Tensor]]

    @property
    def bytes(self) -> int:
        return (self.path / WEIGHTS).stat().st_size


def read_adapter(folder: Path) -> Adapter:
    """The adapter in a folder. Raises AdapterError for one that changes more than linear layers."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise AdapterError(
                f"{folder} is no adapter: it has no {name}; name a folder that peft wrote, as "
                "draft/adapter of a run with use_peft."
            )
    kind = read_json(folder / CONFIG).get("peft_type")
    if kind != "LORA":
        raise AdapterError(f"{folder} is of kind {kind}, and only LORA is known here; use LoRA.")
    config: Any = LoraConfig.from_pretrained(str(folder))
    odd = [key for key in ("modules_to_save", "rank_pattern", "alpha_pattern")
           if getattr(config, key)]  # fmt: skip
    odd += ["bias"] * (config.bias != "none")
    odd += ["init_lora_weights"] * (config.init_lora_weights not in (True, False, "gaussian"))
    if odd:
        raise AdapterError(
            f"{folder} sets {odd[0]} ({getattr(config, odd[0])!r}): it is more than products "
            "beside the base's own weights; merge it into its base with peft instead."
        )
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in load_file(folder / WEIGHTS).items():
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise AdapterError(
                f"{folder} holds {name}, which is no part of LoRA or DoRA on a linear layer; merge "
                "it into its base with peft instead."
            )
        parts.setdefault(match[1], {})[match[2]] = tensor
    hashes = read_json(folder / BASE)["base_sha256"] if (folder / BASE).is_file() else []
    rank = math.sqrt(config.r) if config.use_rslora else config.r
    return Adapter(
        folder, str(config.base_model_name_or_path), hashes, config.lora_alpha / rank, parts
    )


def find_adapters(folder: Path) -> dict[str, Adapter]:
    """The adapters of a folder of runs, or of published adapters, by the name of each one's folder.

    Raises AdapterError where there is none.
    """
    found: dict[str, Adapter] = {}
    for own in sorted(folder.iterdir()) if folder.is_dir() else []:
        for place in (own / "draft" / "adapter", own / "adapter", own):
            if (place / CONFIG).is_file():
                found[own.name] = read_adapter(place)
                break
    if not found:
        raise AdapterError(
            f"{folder} holds no run with an adapter (NAME/draft/adapter); name the folder that "
            "holds the runs, such as outputs."
        )
    return found


@torch.no_grad()
def adapted(base: PreTrainedModel, adapter: Adapter) -> PreTrainedModel:
    """The base with the adapter merged, as peft merges it; weights that it leaves are shared.

    Raises AdapterError where the base has no such layers.
    """
    model = _sharing(base)
    for name, part in adapter.parts.items():
        try:
            layer = model.get_submodule(name)
            own: Tensor = layer.weight  # type: ignore[assignment]
            weight = own.float() + adapter.scale * (part["B"].to(own.device).float()
                                                    @ part["A"].to(own.device).float())  # fmt: skip
        except (AttributeError, RuntimeError) as error:
            raise AdapterError(
                f"{adapter.path} does not fit its base: {name} ({error}); name the base that it "
                "was trained on."
            ) from None
        if (magnitude := part.get("magnitude_vector")) is not None:
            weight *= (magnitude.to(own.device).float() / weight.norm(dim=1))[:, None]
        layer.weight = nn.Parameter(weight.to(own.dtype), requires_grad=False)
    return model


@torch.no_grad()
def averaged(base: PreTrainedModel, models: Sequence[PreTrainedModel]) -> PreTrainedModel:
    """The mean of the models' weights; those that all share with the base are shared here, too."""
    model = _sharing(base)
    owned = [dict(one.named_parameters()) for one in models]
    for name, own in base.named_parameters():
        if any(one[name] is not own for one in owned):
            mean = torch.stack([one[name].float() for one in owned]).mean(0)
            owner, _, attribute = name.rpartition(".")
            weight = nn.Parameter(mean.to(own.dtype), requires_grad=False)
            setattr(model.get_submodule(owner), attribute, weight)
    return model


def _sharing(base: PreTrainedModel) -> PreTrainedModel:
    """The same modules on the same weights."""
    return copy.deepcopy(base, {id(weight): weight for weight in base.parameters()})
