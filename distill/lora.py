"""Adapters that share one base draft: the base they start from, and each kept beside its merge.

BASE/draft/            the base: any finished run with a pruned draft, `compact/` in it
RUN/draft/adapter/     as peft writes it, with base.json: the hashes of what it is for
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from align.files import atomic_folder
from align.sources import ADAPTER_WEIGHTS, merge_adapter, read_json, resolve_checkpoint
from distill.recipe import OWN, Recipe, RecipeError
from eval.decoding.drafters.adapter import BASE
from eval.decoding.target import weights_sha256

KEPT = "adapter"


def on_base(recipe: Recipe) -> Recipe:
    """The recipe with the shape of its base draft, where it has one. Raises RecipeError."""
    if recipe.base is None:
        return recipe
    folder = base_draft(recipe.base)
    with safe_open(folder / "compact" / "model.safetensors", "pt") as tensors:
        trimmed = "d2t" in tensors.keys()  # noqa: SIM118 - a file of tensors is no mapping
        rows = tensors.get_slice("lm_head.weight").get_shape()[0]
    layers = read_json(folder / "compact" / "config.json")["num_hidden_layers"]
    shape = {"num_draft_layers": layers, "draft_vocab_size": rows if trimmed else None}
    for key, value in shape.items():
        asked = getattr(recipe, key)
        if asked not in (OWN[key].default, value):
            raise RecipeError(
                f"{key} is {asked}, but the base {recipe.base} has {value}, which every draft on "
                f"it has; leave {key} out, or make another base."
            )
    return dataclasses.replace(recipe, **shape)


def base_draft(base: str) -> Path:
    """The draft folder of a base: of a run, or itself. Raises RecipeError where there is none."""
    for folder in (Path(base) / "draft", Path(base)):
        if (folder / "compact" / "compact.json").is_file():
            return folder
    raise RecipeError(
        f"base is {base!r}, but no pruned draft lies there (draft/compact); make it first, as "
        "`accelerate launch distill/train.py --recipe base` does, or name another run. A sibling "
        "is named with draft."
    )


def base_sha256(base: str) -> str | None:
    """The hash of a base's own weights, those of its compact form."""
    return weights_sha256(str(base_draft(base) / "compact"))


def full_head(base: str) -> Tensor:
    """The head of a base's full form [V, H]."""
    for path in sorted(base_draft(base).glob("*.safetensors")):
        with safe_open(path, "pt") as tensors:
            if "lm_head.weight" in tensors.keys():  # noqa: SIM118
                head: Tensor = tensors.get_tensor("lm_head.weight")
                return head
    raise RecipeError(f"base is {base!r}, whose full form has no head; make the base again.")


def lora_config(recipe: Recipe) -> LoraConfig:
    """The adapters that the recipe asks for."""
    modules = recipe.lora_target_modules
    return LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules=modules if modules == "all-linear" else modules.split(","),
        task_type="CAUSAL_LM",
    )


def refuse_unknown_modules(recipe: Recipe, draft: PreTrainedConfig) -> None:
    """Raise RecipeError where the recipe's adapters name a module that no such draft has.

    peft itself says so after the answers, and of several names only where none is known.
    """
    if not recipe.use_peft or recipe.lora_target_modules == "all-linear":
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(draft)
    modules = [name for name, _ in model.named_modules()]
    for name in recipe.lora_target_modules.split(","):
        if not any(f".{module}".endswith(f".{name}") for module in modules):
            last = sorted({module.rpartition(".")[2] for module in modules if "." in module})
            linear = ", ".join(part for part in last if not part.isdigit())
            raise RecipeError(
                f"lora_target_modules names {name!r}, which no module of the draft is called "
                f"({linear} are); correct it, or use all-linear."
            )


def merged(recipe: Recipe, trained: Any) -> PreTrainedModel:
    """The draft in fp32, made of its base and the adapter that is kept in the run's `adapter/`.

    trained: a PeftModel. What is kept is rounded to the recipe's dtype, and the draft is made of
    that, so that peft makes the same one of the files.
    """
    folder = recipe.folder / KEPT
    with atomic_folder(folder) as partial:
        trained.peft_config["default"].base_model_name_or_path = str(_base_folder(recipe))
        trained.save_pretrained(str(partial), save_embedding_layers=False)
        (partial / "README.md").unlink()  # peft's
        dtype = getattr(torch, recipe.dtype)
        tensors = {k: v.to(dtype) for k, v in load_file(partial / ADAPTER_WEIGHTS).items()}
        save_file(tensors, partial / ADAPTER_WEIGHTS, metadata={"format": "pt"})
        (partial / BASE).write_text(json.dumps(_what_it_is_for(recipe), indent=2))
    return merge_adapter(trained.unload(), str(_base_folder(recipe)), folder)


def _base_folder(recipe: Recipe) -> Path:
    """What the adapter was trained on: the sibling, the base, or the run's own prepared draft."""
    if recipe.draft is not None:
        return Path(recipe.draft)
    return recipe.folder / "prepared" if recipe.base is None else base_draft(recipe.base)


def _what_it_is_for(recipe: Recipe) -> dict[str, Any]:
    """Domain, target, and the hashes of the base's weights in each of its forms.

    Raises RecipeError where the base was made again since the run started from it.
    """
    started_from = weights_sha256(str(recipe.folder / "prepared" / "model.safetensors"))
    hashes = [started_from]
    if recipe.base is not None or recipe.draft is not None:
        folder = resolve_checkpoint(recipe.draft) if recipe.draft else _base_folder(recipe)
        hashes = [weights_sha256(str(form)) for form in (folder, folder / "compact")]
    if recipe.base is not None and started_from not in hashes:
        raise RecipeError(
            f"{recipe.base} was made again since {recipe.folder} started from it (sha256 of its "
            f"weights {hashes[-1]}, then {started_from}), so the adapter would fit no base that is "
            "there; give the run a --name or --output_dir of its own."
        )
    return {
        "domain": recipe.domain,
        "target": recipe.target,
        "base_sha256": [sha for sha in hashes if sha is not None],
    }
