"""The target's own first layers, under a head fitted to its own (distill/prepare.py)."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from align.atomic import atomic_folder
from distill.answer_cache import CachedAnswer
from distill.export import full_form, keep_adapter
from distill.models import Pair, TargetOfRun
from distill.prepare import PreparedDraft, build_pruned, prepare_pruned
from distill.recipe import Recipe
from distill.trainer import attach_distillation_forward
from eval.decoding.drafters.base import Drafter
from eval.decoding.drafters.pruned import pruned_drafter, save_compact
from eval.decoding.forward import input_embedding
from eval.decoding.target import Target

SLOW: tuple[str, ...] = ()
attach = attach_distillation_forward


def layers(config: dict[str, Any]) -> tuple[int, ...]:
    return ()


def prepare(
    recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Iterable[CachedAnswer]
) -> PreparedDraft:
    return prepare_pruned(recipe, pair, target, answers)


def export(
    recipe: Recipe,
    pair: Pair,
    prepared: PreparedDraft,
    tuned: PreTrainedModel,
    answers: Iterable[CachedAnswer],
) -> None:
    with atomic_folder(recipe.folder / "draft") as partial:
        write_forms(partial, recipe, pair, prepared, tuned, answers)
        keep_adapter(recipe, partial)


def write_forms(
    folder: Path,
    recipe: Recipe,
    pair: Pair,
    prepared: PreparedDraft,
    tuned: PreTrainedModel,
    answers: Iterable[CachedAnswer],
) -> None:
    """The form for every engine, and `compact/`."""
    dtype = getattr(torch, recipe.dtype)
    tuned.to(dtype)
    embedding = input_embedding(tuned).to(dtype)
    # a FrozenEmbedding keeps its dtype and gives fp32
    tuned.set_input_embeddings(nn.Embedding.from_pretrained(embedding))
    full = full_form(recipe, prepared, tuned, answers)
    full.save_pretrained(folder)
    pair.load_tokenizer().save_pretrained(folder)
    save_compact(folder / "compact", tuned, prepared.token_ids, embedding)


def stand_in(recipe: Recipe, pair: Pair, target: Target) -> tuple[PreTrainedModel, Tensor | None]:
    """Which rows a head keeps depends on the answers: here the first."""
    head: Tensor = target.model.get_output_embeddings().weight.detach()
    head = head[: recipe.draft_vocab_size].clone()
    model = copy.deepcopy(build_pruned(target.model, recipe.num_draft_layers, head))
    ids = torch.arange(len(head), device=target.decoder.device)
    return model, None if recipe.draft_vocab_size is None else ids


def drafter(
    recipe: Recipe, pair: Pair, model: PreTrainedModel, ids: Tensor | None, target: Target
) -> Drafter:
    return pruned_drafter(model, ids, target)
