"""LoRA (arXiv 2106.09685)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft import LoraConfig

from align.files import atomic_folder


def lora_config(rank: int, alpha: int) -> LoraConfig:
    """Adapters on all linear layers, because queries and values alone have too few weights.

    The head has none, because an adapter on a head tied to the embedding is merged wrongly.
    """
    return LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")


def save_adapters(trained: Any, base: str, folder: Path) -> None:
    """Write the adapters of a PeftModel in peft's format. base: their base model."""
    with atomic_folder(folder) as partial:
        trained.peft_config["default"].base_model_name_or_path = base
        trained.save_pretrained(str(partial), save_embedding_layers=False)
        (partial / "README.md").unlink()  # peft's template of a card
