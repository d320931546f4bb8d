"""A draft without layers (eval/decoding/drafters/recurrent.py).

Training reads the cached states and single tokens, and learns over several steps of a draft at
once, as features does. It starts as a fit by least squares to the state that the target's head
reads. Legend: N response positions, L layers read, H hidden size, K rows of the head.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from align.atomic import atomic_file, atomic_folder
from distill.answer_cache import CachedAnswer
from distill.drafters.features import (
    RIDGE,
    layers,
    places_in_turn,
    several_steps,
    states_before,
)
from distill.losses import Divergence
from distill.models import Pair, TargetOfRun, forced_tokens
from distill.prepare import (
    PREPARED,
    FrozenEmbedding,
    LeastSquares,
    PreparedDraft,
    head_tokens,
    lost_mass_of,
    until,
)
from distill.recipe import Recipe
from distill.state_cache import StateCache, states_of
from distill.trainer import attach_head
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


def prepare(
    recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Iterable[CachedAnswer]
) -> PreparedDraft:
    folder = recipe.folder / "prepared"
    embedding = pair.target_embedding(getattr(torch, recipe.dtype))
    if not (folder / PREPARED).exists():
        states = states_of(recipe, pair, answers)
        assert states is not None
        forced = forced_tokens(pair.target)
        ids, lost = head_tokens(answers, pair.vocab_size, recipe.draft_vocab_size, forced)
        head = target.loaded.model.get_output_embeddings().weight.detach()
        kept = head if ids is None else head[ids]
        made: Any = new_model(embedding, len(states.layers), kept)
        fit(made, states, list(until(answers, recipe.fit_tokens)))
        made.to(embedding.dtype)
        save_compact(folder, made, ids, embedding, recipe.kind, states.layers)
        with atomic_file(folder / PREPARED) as file:
            json.dump({"lost_mass": lost}, file)
    model, ids = load_recurrent(folder, embedding)
    model.set_input_embeddings(FrozenEmbedding(pair.target_embedding(embedding.dtype)))
    lost = lost_mass_of(recipe)
    print(f"draft: recurrent, trimmed head loses {lost:.2%} of p's mass")
    return PreparedDraft(model.float(), ids, None, lost)


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
def fit(model: RecurrentModel, states: StateCache, answers: list[CachedAnswer]) -> None:
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
    model: RecurrentModel, states: StateCache, answers: list[CachedAnswer]
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

    def forward(
        input_ids: Tensor,
        positions: Tensor,
        top_ids: Tensor,
        top_logprobs: Tensor,
        states: Tensor,
        seeds: Any = None,
        temperature: float | None = None,
        **_: Any,
    ) -> ModelOutput:
        newest = input_ids.flatten()[positions]
        y = draft.after_target(newest, states_before(states, positions))
        if temperature is not None:
            found: ModelOutput = head(y, top_ids, top_logprobs, temperature)
            return found

        def further(at: Tensor, before: Tensor, step: int) -> Tensor:
            y: Tensor = draft.after_draft(newest[at], before)
            return y

        places = places_in_turn(positions, input_ids.shape[1], seeds)
        return several_steps(head, y, further, positions, places, top_ids, top_logprobs)

    draft.forward = forward


@torch.no_grad()
def export(
    recipe: Recipe,
    pair: Pair,
    prepared: PreparedDraft,
    tuned: PreTrainedModel,
    answers: Iterable[CachedAnswer],
) -> None:
    """One form, which our decoder reads."""
    dtype = getattr(torch, recipe.dtype)
    embedding, read = pair.target_embedding(dtype), layers(pair.target.config)
    tuned.to(dtype)
    with atomic_folder(recipe.folder / "draft") as partial:
        save_compact(partial, tuned, prepared.token_ids, embedding, recipe.kind, read)
        pair.load_tokenizer().save_pretrained(partial)


def stand_in(recipe: Recipe, pair: Pair, target: Target) -> tuple[PreTrainedModel, Tensor | None]:
    """Which rows a head keeps depends on the answers: here the first."""
    head: Tensor = target.model.get_output_embeddings().weight.detach()
    head = head[: recipe.draft_vocab_size]
    model = new_model(target.decoder.embedding, len(layers(pair.target.config)), head)
    ids = torch.arange(len(head), device=target.decoder.device)
    return model, None if recipe.draft_vocab_size is None else ids


def drafter(
    recipe: Recipe, pair: Pair, model: PreTrainedModel, ids: Tensor | None, target: Target
) -> Drafter:
    draft: Any = copy.deepcopy(model)
    return recurrent_drafter(draft, ids, target, layers(pair.target.config))
