"""LoRA (arXiv 2106.09685): the adapters that a recipe asks for."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, PreTrainedConfig

from align.files import atomic_folder
from distill.recipe import Recipe, RecipeError


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
                f"lora_target_modules names {name!r}, but the draft's modules are {linear}; "
                "correct it, or use all-linear."
            )


def save_adapters(recipe: Recipe, trained: Any) -> None:
    """Write the adapters of a PeftModel to the run's `adapter/`, in peft's format."""
    with atomic_folder(recipe.folder / "adapter") as partial:
        base = recipe.draft or str(recipe.folder / "prepared")
        trained.peft_config["default"].base_model_name_or_path = base
        trained.save_pretrained(str(partial), save_embedding_layers=False)
        (partial / "README.md").unlink()  # peft's template of a card
