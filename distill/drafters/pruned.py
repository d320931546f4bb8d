"""The target's own first layers, under a head fitted to its own (distill/prepare.py)."""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.drafters.base import Finished
from distill.export import full_form
from distill.models import Pair
from distill.prepare import build_pruned, first_rows, prepare_pruned
from distill.recipe import Recipe
from distill.trainer import attach_distillation_forward
from eval.decoding.drafters.base import Drafter
from eval.decoding.drafters.pruned import pruned_drafter, save_compact
from eval.decoding.forward import input_embedding
from eval.decoding.target import Target

SLOW: tuple[str, ...] = ()
attach = attach_distillation_forward
prepare = prepare_pruned


def layers(config: dict[str, Any]) -> tuple[int, ...]:
    return ()


def export(made: Finished) -> None:
    """The form for every engine, and `compact/`."""
    tuned = made.tuned.to(made.dtype)
    embedding = input_embedding(tuned).to(made.dtype)
    # a FrozenEmbedding keeps its dtype and gives fp32
    tuned.set_input_embeddings(nn.Embedding.from_pretrained(embedding))
    full_form(made, tuned).save_pretrained(made.folder)
    save_compact(made.folder / "compact", tuned, made.prepared.token_ids, embedding)


def stand_in(recipe: Recipe, pair: Pair, target: Target) -> tuple[PreTrainedModel, Tensor | None]:
    head, ids = first_rows(recipe, target)
    return copy.deepcopy(build_pruned(target.model, recipe.num_draft_layers, head)), ids


def drafter(
    recipe: Recipe, pair: Pair, model: PreTrainedModel, ids: Tensor | None, target: Target
) -> Drafter:
    return pruned_drafter(model, ids, target)
