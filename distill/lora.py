"""LoRA (arXiv 2106.09685): the adapters that a recipe asks for."""

from __future__ import annotations

from typing import Any

from peft import LoraConfig

from align.files import atomic_folder
from distill.recipe import Recipe


def lora_config(recipe: Recipe) -> LoraConfig:
    """Adapters on all linear layers: on queries and values alone they are too few.

    The head has none, because an adapter on a head tied to the embedding is merged wrongly.
    """
    return LoraConfig(
        r=recipe.lora_r,
        lora_alpha=recipe.lora_alpha,
        lora_dropout=recipe.lora_dropout,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )


def save_adapters(recipe: Recipe, trained: Any) -> None:
    """Write the adapters of a PeftModel to the run's `adapter/`, in peft's format."""
    with atomic_folder(recipe.folder / "adapter") as partial:
        base = recipe.draft or str((recipe.folder / "prepared").resolve())
        trained.peft_config["default"].base_model_name_or_path = base
        trained.save_pretrained(str(partial), save_embedding_layers=False)
        (partial / "README.md").unlink()  # peft's template of a card
