"""A sibling: a small model of its own, tuned as it is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from align.atomic import atomic_folder
from distill.answer_cache import CachedAnswer
from distill.export import keep_adapter
from distill.models import Pair, TargetOfRun, load_sibling
from distill.prepare import PreparedDraft, read_prepared
from distill.recipe import Recipe
from distill.trainer import attach_distillation_forward
from eval.decoding.drafters.base import Drafter
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.target import Target

SLOW: tuple[str, ...] = ()
attach = attach_distillation_forward


def layers(config: dict[str, Any]) -> tuple[int, ...]:
    return ()


def prepare(
    recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Iterable[CachedAnswer]
) -> PreparedDraft:
    assert recipe.draft is not None
    return read_prepared(recipe, pair)


def export(
    recipe: Recipe,
    pair: Pair,
    prepared: PreparedDraft,
    tuned: PreTrainedModel,
    answers: Iterable[CachedAnswer],
) -> None:
    """One form for all engines, ours too."""
    with atomic_folder(recipe.folder / "draft") as partial:
        tuned.to(getattr(torch, recipe.dtype)).save_pretrained(partial)
        pair.load_tokenizer().save_pretrained(partial)
        keep_adapter(recipe, partial)


def stand_in(recipe: Recipe, pair: Pair, target: Target) -> tuple[PreTrainedModel, Tensor | None]:
    assert recipe.draft is not None
    return load_sibling(recipe.draft, pair), None


def drafter(
    recipe: Recipe, pair: Pair, model: PreTrainedModel, ids: Tensor | None, target: Target
) -> Drafter:
    assert recipe.draft is not None
    return load_drafter(recipe.draft, target, pair.strategy)
