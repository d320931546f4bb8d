"""A sibling: a small model of its own, tuned as it is."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from distill.drafters.base import Finished
from distill.models import Pair, TargetOfRun, load_sibling
from distill.prepare import PreparedDraft, read_prepared
from distill.recipe import Recipe
from distill.teacher.store import Answers
from distill.trainer import attach_distillation_forward
from eval.decoding.drafters.base import Drafter
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.target import Target

SLOW: tuple[str, ...] = ()
attach = attach_distillation_forward


def layers(config: dict[str, Any]) -> tuple[int, ...]:
    return ()


def prepare(recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Answers) -> PreparedDraft:
    assert recipe.draft is not None
    return read_prepared(recipe, pair)


def export(made: Finished) -> None:
    """One form for all engines, ours too."""
    made.tuned.to(made.dtype).save_pretrained(made.folder)


def stand_in(recipe: Recipe, pair: Pair, target: Target) -> tuple[PreTrainedModel, Tensor | None]:
    assert recipe.draft is not None
    return load_sibling(recipe.draft, pair), None


def drafter(
    recipe: Recipe, pair: Pair, model: PreTrainedModel, ids: Tensor | None, target: Target
) -> Drafter:
    assert recipe.draft is not None
    return load_drafter(recipe.draft, target, pair.strategy)
