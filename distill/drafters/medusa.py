"""Heads on the target's last hidden state (eval/decoding/drafters/medusa.py).

Training reads the cached states alone: no text, no layers. From the state at token t, head d learns
the target's distribution over the token after t + d. It starts as a fit: A_d, least squares from
the state at t to the target's own at t + d, which the target's head turns into logits. A block can
only add SiLU(W x + b) to x; with b a few times the size of (A_d - I) x that is nearly linear, and
one more least squares, over all depths at once, takes out what b and the bend add. It is folded
into the output head. That last fit reads the embedding of the token before as well; its map C,
cut to rank r where the domain's tokens vary most, is the sequential head: with W the target's own
head, it adds W C e to the logits. Legend: N response positions, D heads, H hidden size, K rows of
the head.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from distill.drafters.base import Finished
from distill.drafters.features import states_before
from distill.drafters.low_rank import cut_to_rank, with_none
from distill.drafters.parallel import drawn_depths, mean_depth, rows_of
from distill.losses import Divergence
from distill.models import Pair, TargetOfRun
from distill.prepare import FitData, LeastSquares, PreparedDraft, first_rows, prepare_on_states
from distill.recipe import Recipe
from distill.teacher.states import States
from distill.teacher.store import Answers, CachedAnswer
from distill.trainer import attach_forward, attach_head
from distill.training_set import Batch
from eval.decoding.drafters.base import Drafter
from eval.decoding.drafters.medusa import (
    MedusaConfig,
    MedusaModel,
    load_medusa,
    medusa_drafter,
    save_medusa,
)
from eval.decoding.target import Target

SLOW = ("blocks", "lm_head", "sequential")
BIAS = 2.0  # of a block, in root mean squares of what it is to add


def layers(config: dict[str, Any]) -> tuple[int, ...]:
    return (config["num_hidden_layers"],)


def prepare(recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Answers) -> PreparedDraft:
    def make(folder: Path, found: FitData) -> None:
        ids, embedding = found.token_ids, found.embedding
        model = new_heads(recipe, pair, found.head)
        with_head_rows(model, ids)
        known = embedding if ids is None else embedding[ids]
        fit_heads(model, known.float(), found.states, found.answers)
        save_medusa(folder, model, ids, embedding)

    prepared = prepare_on_states(recipe, pair, target, answers, make, load_medusa)
    model: Any = prepared.model
    with_head_rows(model, prepared.token_ids)
    return prepared


def new_heads(recipe: Recipe, pair: Pair, head: Tensor) -> MedusaModel:
    """Heads that all draft what the target's own `head` [K, H] says, in fp32."""
    model = MedusaModel(
        MedusaConfig(
            hidden_size=head.shape[1],
            vocab_size=pair.vocab_size,
            num_heads=recipe.max_gamma,
            truncated_vocab_size=len(head),
            sequential_rank=recipe.sequential_rank,
        )
    )
    with torch.no_grad():
        for block in model.blocks.parameters():
            block.zero_()
        model.lm_head.weight.zero_()
        model.lm_head.weight[:, : head.shape[1]] = head
        if recipe.sequential_rank:
            generator = torch.Generator().manual_seed(recipe.seed)
            model.sequential.weight[:-1].normal_(generator=generator)
            model.sequential.weight[-1] = 0
    return model


def with_head_rows(model: MedusaModel, ids: Tensor | None) -> None:
    """Give the model, as a buffer, each target id's row of its head: the last for those without."""
    model.register_buffer("head_row", rows_of(ids, model.config.vocab_size), persistent=False)


@torch.no_grad()
def fit_heads(
    model: MedusaModel, known: Tensor, states: States, answers: list[CachedAnswer]
) -> None:
    """The closed form of the module's docstring, from the states of these answers.

    known: the target's embeddings of the tokens that the head has rows for [K, H].
    """
    size = model.config.hidden_size
    maps = []
    for depth in range(1, len(model.blocks) + 1):
        fit = LeastSquares(size, size)
        for x, y, _ in _pairs(states, answers, depth):
            fit.add(x, y)
        maps.append(fit.solution() - torch.eye(size))
    squares, count = torch.zeros(len(maps), size), 0
    for x, _, _ in _pairs(states, answers, 1):
        squares += torch.stack([(x @ one.T).pow(2).sum(0) for one in maps])
        count += len(x)
    bias = BIAS * (squares / count).sqrt().amax(0)
    table = with_none(known)
    rank = min(model.config.sequential_rank, size)
    whole = LeastSquares(2 * size if rank else size, size)
    for depth, (block, one) in enumerate(zip(model.blocks, maps, strict=True), start=1):
        layer: Any = block.layers[0]  # type: ignore[index]
        layer.weight.copy_(one)
        layer.bias.copy_(bias)
        for x, y, token in _pairs(states, answers, depth):
            before = table[model.get_buffer("head_row")[token]]
            whole.add(torch.cat([block(x), before], 1) if rank else block(x), y)
    fitted, head = whole.solution(), model.lm_head.weight
    own = head[:, :size].clone()
    head[:, :size] = own @ fitted[:, :size]
    if rank:
        cut = cut_to_rank(fitted[:, size:], whole.gram[size:, size:], table, own, rank)
        model.sequential.weight[:, :rank] = cut.read
        head[:, size : size + rank] = cut.write


def _pairs(
    states: States, answers: list[CachedAnswer], depth: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The target's states at an answer's response positions and those `depth` tokens later [N, H].

    With the token [N] that stands where the later ones are: the one before what they predict.
    """
    for answer in answers:
        found = states[answer.index][len(answer.prompt_ids) - 1 :, 0].float()
        if len(found) > depth:
            yield found[:-depth], found[depth:], answer.response_ids[depth - 1 : len(found) - 1]


def attach(model: PreTrainedModel, divergence: Divergence) -> None:
    """The loss: the sum over drawn depths, over how many a position has in the mean."""
    medusa: Any = model
    _, head = attach_head(model, divergence)

    def read_by_head(block: Any, at: Tensor, before: Tensor) -> Tensor:
        x: Tensor = block(at.to(head.weight.dtype))
        if medusa.config.sequential_rank:
            x = torch.cat([x, medusa.sequential(medusa.head_row[before])], dim=1)
        return x

    def first(batch: Batch) -> Tensor:
        before = states_before(batch.states, batch.positions)[:, 0]
        return read_by_head(medusa.blocks[0], before, batch.newest)

    def compute(batch: Batch) -> ModelOutput:
        positions, width = batch.positions, batch.width
        depths = drawn_depths(positions, width, batch.seeds, len(medusa.blocks))
        rows, read = positions // width, batch.states[..., 0, :].flatten(0, 1)
        loss, agreed = read.new_zeros(()), 0
        for depth, block in enumerate(medusa.blocks, start=1):
            at = (depths[: len(depths) - depth] >= depth).nonzero()[:, 0]
            at = at[rows[at] == rows[at + depth]]
            before = batch.input_ids.flatten()[positions[at] + depth]
            x = read_by_head(block, read[positions[at]], before)
            part, same = head(x, batch.top_ids[at + depth], batch.top_logprobs[at + depth])
            loss = loss + part
            if depth == 1:
                agreed = same * len(positions) / max(len(at), 1)
        return ModelOutput(loss=loss / mean_depth(len(medusa.blocks)), agreed=agreed)

    attach_forward(model, head, first, compute)


def export(made: Finished) -> None:
    """One form, which vLLM and our decoder read."""
    medusa: Any = made.tuned.to(made.dtype)
    embedding = made.pair.target_embedding(made.dtype)
    save_medusa(made.folder, medusa, made.prepared.token_ids, embedding)


def stand_in(recipe: Recipe, pair: Pair, target: Target) -> tuple[PreTrainedModel, Tensor | None]:
    head, ids = first_rows(recipe, target)
    model = new_heads(recipe, pair, head.float())
    with_head_rows(model, ids)
    return model, ids


def drafter(
    recipe: Recipe, pair: Pair, model: PreTrainedModel, ids: Tensor | None, target: Target
) -> Drafter:
    heads: Any = copy.deepcopy(model)
    (layer,) = layers(pair.target.config)
    return medusa_drafter(heads, ids, target, layer)
