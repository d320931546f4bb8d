"""A pruned draft that reads the target's hidden states (eval/decoding/drafters/features.py).

It starts as a fit by least squares, from the cached states and what the first layers make of the
text, to the state that the target's head reads; then it learns over several steps of a draft at
once, the later ones on its own states (training-time test, arXiv 2503.01840). Legend: N response
positions, L layers read, H hidden size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from distill.drafters import pruned
from distill.drafters.base import Finished
from distill.export import full_form
from distill.losses import Divergence
from distill.models import Pair, TargetOfRun
from distill.prepare import LeastSquares, PreparedDraft, prepare_pruned, until
from distill.recipe import Recipe
from distill.teacher.states import States, states_of
from distill.teacher.store import Answers, CachedAnswer
from distill.trainer import attach_forward, attach_head
from distill.training_set import Batch
from eval.decoding.drafters.base import Drafter
from eval.decoding.drafters.features import (
    Fusion,
    features_drafter,
    hang_fusion,
    load_features,
)
from eval.decoding.drafters.pruned import save_compact
from eval.decoding.forward import input_embedding
from eval.decoding.target import Target

SLOW = ("lm_head", "fusion")
STEPS = 3  # of a draft that are trained at once
LATER = 3  # the later ones at every so many-th position, each for as many: a third of their cost
RIDGE = 1e-2  # of maps from many states, which the fit's tokens determine poorly otherwise
ALONE = 4  # at every so many-th position the second step goes without the draft's own state, too


def layers(config: dict[str, Any]) -> tuple[int, ...]:
    """Early, middle and late ones, and the last, which the target's head reads."""
    depth = config["num_hidden_layers"]
    return tuple(sorted({depth // 4, depth // 2, 3 * depth // 4, depth}))


def prepare(recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Answers) -> PreparedDraft:
    def finish(made: PreparedDraft) -> None:
        states = states_of(recipe, pair, answers)
        assert states is not None
        some = list(until(answers, recipe.fit_tokens))
        fit_fusion(made.model, target.loaded.model, made.token_ids, states, some)

    read = layers(pair.target.config)
    return prepare_pruned(recipe, pair, target, answers, finish, read, load_features)


@torch.no_grad()
def fit_fusion(
    model: PreTrainedModel,
    target: PreTrainedModel,
    token_ids: Tensor | None,
    states: States,
    answers: list[CachedAnswer],
) -> None:
    """Hang a fitted `fusion` on a pruned draft, and put the target's own rows into its head.

    The state that the head reads is the target's, divided by its usual size.
    """
    hang_fusion(model, len(states.layers))
    model.fusion = Fusion(model.config.hidden_size, len(states.layers))
    fusion: Any = model.fusion
    known = torch.cat([states[answer.index][len(answer.prompt_ids) - 1 :] for answer in answers])
    sizes = known.float().pow(2).mean((0, 2)).sqrt()
    fusion.sizes.copy_(sizes.to(model.dtype))  # as they are saved
    size = known.shape[2]
    given = LeastSquares(size * (1 + known.shape[1]), size, RIDGE)
    own = LeastSquares(size, size, RIDGE)
    for z, before, y in _fitted_on(model, fusion, states, answers):
        given.add(torch.cat([z, before], 1), y)
    maps = given.solution()
    fusion.given.weight.copy_(maps[:, :size])
    fusion.states.weight.copy_(maps[:, size:])
    fusion.alone.weight.copy_(given.solution(size))
    for z, before, y in _fitted_on(model, fusion, states, answers):
        guess = fusion.given(z) + fusion.states(before)
        own.add(guess[:-1], (y - fusion.alone(z))[1:])
    fusion.own.weight.copy_(own.solution())
    rows = target.get_output_embeddings().weight
    rows = rows if token_ids is None else rows[token_ids]
    head: Any = model.get_output_embeddings()
    head.weight = nn.Parameter((rows.float() * fusion.sizes[-1]).to(rows.dtype))
    model.fusion.to(rows.dtype)


def _fitted_on(
    model: PreTrainedModel, fusion: Any, states: States, answers: list[CachedAnswer]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Of each answer's response positions z [N, H], the states before [N, L * H], and y [N, H]."""
    for answer in answers:
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[None, :-1].to(model.device)
        z = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[0]
        scaled = states[answer.index].float() / fusion.sizes[:, None]
        before = F.pad(scaled, (0, 0, 0, 0, 1, 0))[:-1].flatten(1)
        at = slice(len(answer.prompt_ids) - 1, None)
        yield z[at].float().cpu(), before[at], scaled[at, -1]


def attach(model: PreTrainedModel, divergence: Divergence) -> None:
    body, head = attach_head(model, divergence)
    fusion: Any = model.get_submodule("fusion")

    def both(batch: Batch) -> tuple[Tensor, Tensor]:
        """z and y at the response positions [N, H]."""
        mask = batch.attention_mask
        text = body(input_ids=batch.input_ids, attention_mask=mask, use_cache=False)
        z = text.last_hidden_state.flatten(0, 1)[batch.positions]
        return z, fusion.first(z, states_before(batch.states, batch.positions))

    def compute(batch: Batch) -> ModelOutput:
        z, y = both(batch)
        places = places_in_turn(batch)

        def further(at: Tensor, before: Tensor, step: int) -> Tensor:
            if step == 1:
                before = before * (places[at] % ALONE != 0)[:, None]
            y: Tensor = fusion.further(z[at], before)
            return y

        return several_steps(head, batch, y, further)

    attach_forward(model, head, lambda batch: both(batch)[1], compute)


def states_before(states: Tensor, positions: Tensor) -> Tensor:
    """What the target has read when a token is drafted [N, L, H]: it ends before the newest token.

    states: [B, T, L, H]. positions: of the newest tokens, in the flattened batch [N].
    """
    return F.pad(states, (0, 0, 0, 0, 1, 0))[:, :-1].flatten(0, 1)[positions]


def places_in_turn(batch: Batch) -> Tensor:
    """Each response position's place in its row, counted from one that changes with the step [N].

    What is picked by it hangs neither on the batch's padding nor on the rows beside.
    """
    rows = batch.positions // batch.width
    return batch.positions % batch.width + batch.seeds.to(rows.device)[rows]


def several_steps(
    head: Any, batch: Batch, y: Tensor, further: Callable[[Tensor, Tensor, int], Tensor]
) -> ModelOutput:
    """The loss of STEPS steps of drafts; at every LATER-th of the places begins one that goes on.

    y: [N, H] of the first step. further: those of step 1, 2, … at some of the N positions, of the
    y one token before them.
    """
    top_ids, top_logprobs = batch.top_ids, batch.top_logprobs
    loss, agreed = head(y, top_ids, top_logprobs)
    goes_on = F.pad(following(batch.positions), (0, 1))
    at = (places_in_turn(batch) % LATER == 0).nonzero()[:, 0]
    y = y[at]
    for step in range(1, STEPS):
        y, at = y[goes_on[at]], at[goes_on[at]] + 1
        y = further(at, y, step)
        loss = loss + LATER * head(y, top_ids[at], top_logprobs[at])[0]
    return ModelOutput(loss=loss / STEPS, agreed=agreed)


def following(positions: Tensor) -> Tensor:
    """Of all positions [N] but the first, which come right after another [N - 1].

    There a token can be a later one of a draft, whose earlier ones were accepted.
    """
    return positions[1:] == positions[:-1] + 1


@torch.no_grad()
def export(made: Finished) -> None:
    """`compact/` reads states; the full form is the same draft without them."""
    tuned, ids, read = made.tuned, made.prepared.token_ids, layers(made.pair.target.config)
    fusion: Any = tuned.get_submodule("fusion")
    head: Any = tuned.get_output_embeddings()
    alone = (head.weight @ fusion.alone.weight).to(made.dtype)
    tuned.to(made.dtype)
    embedding = input_embedding(tuned).to(made.dtype)
    tuned.set_input_embeddings(nn.Embedding.from_pretrained(embedding))
    save_compact(made.folder / "compact", tuned, ids, embedding, made.recipe.kind, read)
    del tuned.fusion
    head.weight = nn.Parameter(alone)
    full_form(made, tuned).save_pretrained(made.folder)


def stand_in(recipe: Recipe, pair: Pair, target: Target) -> tuple[PreTrainedModel, Tensor | None]:
    model, ids = pruned.stand_in(recipe, pair, target)
    fusion = Fusion(model.config.hidden_size, len(layers(pair.target.config)))
    model.fusion = fusion.to(model.device, model.dtype)
    return model, ids


def drafter(
    recipe: Recipe, pair: Pair, model: PreTrainedModel, ids: Tensor | None, target: Target
) -> Drafter:
    # its head is taken off, and the model is still to be trained
    return features_drafter(copy.deepcopy(model), ids, target, layers(pair.target.config))
