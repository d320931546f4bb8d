"""A draft without layers (eval/decoding/drafters/recurrent.py).

Training reads the cached states and single tokens, and learns over several steps of a draft at
once, as features does. It starts as a fit by least squares to the state that the target's head
reads. Legend: N response positions, L layers read, H hidden size, K rows of the head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from distill.drafters.base import Finished
from distill.drafters.features import (
    RIDGE,
    layers,
    several_steps,
    states_before,
)
from distill.losses import Divergence
from distill.models import Pair, TargetOfRun
from distill.prepare import (
    FitData,
    FrozenEmbedding,
    LeastSquares,
    PreparedDraft,
    first_rows,
    prepare_on_states,
)
from distill.recipe import Recipe
from distill.teacher.states import States
from distill.teacher.store import Answers, CachedAnswer
from distill.trainer import attach_forward, attach_head
from distill.training_set import Batch
from eval.decoding.drafters.base import Drafter
from eval.decoding.drafters.pruned import save_compact
from eval.decoding.drafters.recurrent import (
    RecurrentConfig,
    RecurrentModel,
    load_recurrent,
    recurrent_drafter,
)
from eval.decoding.target import Target

SLOW = ("first", "further", "lm_head")


def prepare(recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Answers) -> PreparedDraft:
    def make(folder: Path, found: FitData) -> None:
        read = found.states.layers
        made: Any = new_model(found.embedding, len(read), found.head)
        fit(made, found.states, found.answers)
        made.to(found.embedding.dtype)
        save_compact(folder, made, found.token_ids, found.embedding, recipe.kind, read)

    prepared = prepare_on_states(recipe, pair, target, answers, make, load_recurrent)
    embedding = pair.target_embedding(getattr(torch, recipe.dtype))
    prepared.model.set_input_embeddings(FrozenEmbedding(embedding))
    prepared.model.float()
    return prepared


def new_model(embedding: Tensor, states_read: int, head: Tensor) -> RecurrentModel:
    """A draft in fp32 over the target's embedding [V, H], under its `head` [K, H]; no maps yet."""
    config = RecurrentConfig(
        hidden_size=embedding.shape[1],
        vocab_size=len(embedding),
        states_read=states_read,
        head_rows=len(head),
    )
    with torch.device("meta"):
        model = RecurrentModel(config)
    model.to_empty(device=embedding.device)
    model.set_input_embeddings(FrozenEmbedding(embedding))
    with torch.no_grad():
        for part in (model.first.weight, model.further.weight):
            part.zero_()
        model.sizes.fill_(1)
        model.lm_head.weight.copy_(head)
    return model


@torch.no_grad()
def fit(model: RecurrentModel, states: States, answers: list[CachedAnswer]) -> None:
    """Both maps by least squares; the head reads the target's state divided by its usual size."""
    known = torch.cat([states[one.index][len(one.prompt_ids) - 1 :] for one in answers])
    model.sizes.copy_(known.float().pow(2).mean((0, 2)).sqrt())
    size = known.shape[2]
    first = LeastSquares(size * (1 + known.shape[1]), size, RIDGE)
    for newest, before, y in _fitted_on(model, states, answers):
        first.add(model.beside(newest, (before / model.sizes[:, None]).flatten(1)), y)
    model.first.weight.copy_(first.solution())
    further = LeastSquares(2 * size, size, RIDGE)
    for newest, before, y in _fitted_on(model, states, answers):
        guess = model.after_target(newest, before)
        further.add(model.beside(newest[1:], guess[:-1]), y[1:])
    model.further.weight.copy_(further.solution())
    model.lm_head.weight.mul_(model.sizes[-1])


def _fitted_on(
    model: RecurrentModel, states: States, answers: list[CachedAnswer]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each answer's response positions the newest token [N], the target's states before it
    [N, L, H], and its last one there, as the head reads it [N, H].
    """
    for answer in answers:
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[:-1].long()
        found = states[answer.index].float()
        at = slice(len(answer.prompt_ids) - 1, None)
        before = F.pad(found, (0, 0, 0, 0, 1, 0))[:-1]
        parts = (ids[at], before[at], found[at, -1] / model.sizes[-1].cpu())
        newest, before, y = (part.to(model.device) for part in parts)
        yield newest, before, y


def attach(model: PreTrainedModel, divergence: Divergence) -> None:
    _, head = attach_head(model, divergence)
    draft: Any = model

    def first(batch: Batch) -> Tensor:
        y: Tensor = draft.after_target(batch.newest, states_before(batch.states, batch.positions))
        return y

    def compute(batch: Batch) -> ModelOutput:
        newest = batch.newest
        return several_steps(
            head, batch, first(batch), lambda at, y, _: draft.after_draft(newest[at], y)
        )

    attach_forward(model, head, first, compute)


@torch.no_grad()
def export(made: Finished) -> None:
    """One form, which our decoder reads."""
    embedding = made.pair.target_embedding(made.dtype)
    ids, read = made.prepared.token_ids, layers(made.pair.target.config)
    save_compact(made.folder, made.tuned.to(made.dtype), ids, embedding, made.recipe.kind, read)


def stand_in(recipe: Recipe, pair: Pair, target: Target) -> tuple[PreTrainedModel, Tensor | None]:
    head, ids = first_rows(recipe, target)
    return new_model(target.decoder.embedding, len(layers(pair.target.config)), head), ids


def drafter(
    recipe: Recipe, pair: Pair, model: PreTrainedModel, ids: Tensor | None, target: Target
) -> Drafter:
    draft: Any = copy.deepcopy(model)
    return recurrent_drafter(draft, ids, target, layers(pair.target.config))
