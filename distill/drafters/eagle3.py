"""EAGLE-3: one layer that reads the target's hidden states (eval/decoding/drafters/eagle3.py).

It learns over several steps of a draft at once, the later ones on what it made itself
(training-time test, arXiv 2503.01840). It starts as a fit: the queries, keys and values of the
embeddings are those of the target's first layer, those of the states are zero; `fc` and the
attention's output map, then the last map of the MLP, are least squares to the state that the
target's head reads. Legend: B rows, T pairs, N response positions, L layers read, H hidden size, G
steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv
from transformers.utils import ModelOutput

from align.atomic import atomic_folder
from align.sources import read_json
from distill.drafters.base import Finished
from distill.drafters.features import RIDGE, STEPS, following
from distill.losses import Divergence
from distill.models import Pair, TargetOfRun
from distill.prepare import (
    PREPARED,
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
from eval.decoding.drafters.eagle3 import (
    build_eagle3,
    eagle3_drafter,
    layer_config,
    load_eagle3,
    save_eagle3,
)
from eval.decoding.forward import input_embedding
from eval.decoding.target import Target

SLOW = ("lm_head", "model.fc")


def layers(config: dict[str, Any]) -> tuple[int, ...]:
    """A low, a middle and a high one, the ones that vLLM takes where a checkpoint names none."""
    depth = config["num_hidden_layers"]
    return tuple(sorted({min(2, depth - 1), depth // 2, max(depth - 3, depth // 2)}))


def prepare(recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Answers) -> PreparedDraft:
    def make(folder: Path, found: FitData) -> dict[str, Any]:
        model: Any = target.loaded.model
        made: Any = fit_eagle3(model, found.head, found.states, found.answers)
        sizes = made.get_buffer("sizes")
        fold(made, sizes)
        made.to(found.embedding.dtype)
        with atomic_folder(folder) as partial:
            read, ids = found.states.layers, found.token_ids
            save_eagle3(partial, made, ids, found.embedding, read, recipe.target)
        return {"sizes": sizes.tolist()}

    prepared = prepare_on_states(recipe, pair, target, answers, make, load_eagle3)
    model = prepared.model
    embedding = pair.target_embedding(getattr(torch, recipe.dtype))
    model.set_input_embeddings(FrozenEmbedding(embedding))
    sizes = torch.tensor(read_json(recipe.folder / "prepared" / PREPARED)["sizes"])
    fold(model.float(), 1 / sizes)
    model.register_buffer("sizes", sizes, persistent=False)
    return prepared


def fold(model: PreTrainedModel, sizes: Tensor) -> None:
    """Let `fc` read states as they are, where it read them divided by `sizes` [L]."""
    fc: Any = model.get_submodule("model.fc")
    parts = fc.weight.data.view(len(fc.weight), len(sizes), -1)
    parts /= sizes.to(parts)[:, None]


@torch.no_grad()
def fit_eagle3(
    target: PreTrainedModel, head: Tensor, states: States, answers: list[CachedAnswer]
) -> PreTrainedModel:
    """The draft before training, in fp32, under this `head` [K, H].

    What it is fitted to is what the target's final norm makes, without that norm's weights.
    """
    model = started(target, len(states.layers), head)
    known = torch.cat([states[answer.index] for answer in answers])
    model.get_buffer("sizes").copy_(known.float().pow(2).mean((0, 2)).sqrt())
    body: Any = model.model
    layer = body.layers[0]
    size, width = model.config.hidden_size, body.fc.in_features
    # 1. The state before the MLP: of the target's states, and of what attention found
    linear = LeastSquares(width + layer.self_attn.o_proj.in_features, size, RIDGE)
    for one in _fitted_on(model, target, states, answers):
        linear.add(torch.cat([one.states, one.found], 1), one.goal)
    maps = linear.solution()
    body.fc.weight.copy_(maps[:, :width])
    layer.self_attn.o_proj.weight.copy_(maps[:, width:])
    # 2. What is still lacking, of the numbers inside the MLP
    rest = LeastSquares(layer.mlp.down_proj.in_features, size, RIDGE)
    for one in _fitted_on(model, target, states, answers):
        x = body.fc(one.states) + layer.self_attn.o_proj(one.found)
        inner = layer.post_attention_layernorm(x)
        rest.add(F.silu(layer.mlp.gate_proj(inner)) * layer.mlp.up_proj(inner), one.goal - x)
    layer.mlp.down_proj.weight.copy_(rest.solution())
    return model


class _Fitted(NamedTuple):
    """Of an answer's N response positions: states before [N, L * H], what attention finds, goal."""

    states: Tensor
    found: Tensor
    goal: Tensor


def _fitted_on(
    model: PreTrainedModel,
    target: PreTrainedModel,
    states: States,
    answers: list[CachedAnswer],
) -> Iterator[_Fitted]:
    body: Any = model.model
    last: Any = target.get_submodule("model.norm")
    weight = last.weight.float()
    for answer in answers:
        ids = torch.cat([answer.prompt_ids, answer.response_ids])[None, :-1].to(model.device)
        y = target.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, 1:].float()
        before = scaled(model, states[answer.index][None, :-1].to(model.device))
        pairs = Pairs(model, ids.shape[1] - 1)
        found = pairs.attend(body.embed_tokens(ids[:, 1:]), body.fc(before))
        # the first token has no pair
        at = slice(max(0, len(answer.prompt_ids) - 2), None)
        yield _Fitted(before[0, at], found[0, at], (y / weight)[at].to(model.device))


def scaled(model: PreTrainedModel, states: Tensor) -> Tensor:
    """The target's states [B, T, L, H], each layer divided by its usual size [B, T, L * H]."""
    return (states.float() / model.get_buffer("sizes")[:, None]).flatten(2)


class Pairs:
    """The attention over T pairs, one step of a draft after another."""

    def __init__(self, model: PreTrainedModel, pairs: int) -> None:
        body: Any = model.base_model
        self.layer = body.layers[0]
        positions = torch.arange(pairs, device=model.device)[None]
        self.rotary = body.rotary_emb(torch.zeros(1, device=model.device), positions)
        self.past: list[tuple[Tensor, Tensor]] = []

    def attend(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What the heads of this step find [B, T, heads * D], of embeddings and states [B, T, H].

        A pair of step g sees the first step's up to g - 1 pairs before it, what the target has
        read, and of each later step the one pair of the same draft.
        """
        layer, attention = self.layer, self.layer.self_attn
        read = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(hidden)], -1)
        shape = (*read.shape[:2], -1, attention.head_dim)
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (part(read).view(shape).transpose(1, 2) for part in parts)
        q, k = apply_rotary_pos_emb(q, k, *self.rotary)
        groups = attention.num_key_value_groups
        self.past.append((repeat_kv(k, groups), repeat_kv(v, groups)))
        (keys, values), *own = self.past
        count = read.shape[1]
        seen = torch.ones(count, count, dtype=torch.bool, device=q.device).tril(-len(own))
        scores = (q @ keys.transpose(2, 3)).masked_fill(~seen, float("-inf"))
        columns = [scores]
        for age, (own_keys, _) in enumerate(reversed(own)):
            columns.append((q * _moved(own_keys, age)).sum(-1, keepdim=True))
        weights = (torch.cat(columns, -1).float() * attention.scaling).softmax(-1).to(v.dtype)
        found = weights[..., :count] @ values
        for age, (_, own_values) in enumerate(reversed(own)):
            found = found + weights[..., count + age, None] * _moved(own_values, age)
        return found.transpose(1, 2).flatten(2)


def _moved(pairs: Tensor, places: int) -> Tensor:
    """Each pair's numbers [B, heads, T, D] so many places later, zeros first."""
    return F.pad(pairs, (0, 0, places, 0))[:, :, : pairs.shape[2]]


def unrolled(
    model: PreTrainedModel, input_ids: Tensor, states: Tensor, steps: int
) -> Iterator[Tensor]:
    """What the head reads after each token [B, T, H], at each step of a draft; zero at the first.

    At step g the target has read all but the last g tokens. states: [B, T, L, H].
    """
    body: Any = model.base_model
    layer = body.layers[0]
    embedded = body.embed_tokens(input_ids[:, 1:])
    pairs = Pairs(model, embedded.shape[1])
    hidden = body.fc(scaled(model, states[:, :-1]))
    for step in range(steps):
        if step:
            hidden = F.pad(hidden, (0, 0, 1, 0))[:, :-1]
        x = hidden + layer.self_attn.o_proj(pairs.attend(embedded, hidden))
        hidden = x + layer.mlp(layer.post_attention_layernorm(x))
        yield F.pad(body.norm(hidden), (0, 0, 1, 0))


def attach(model: PreTrainedModel, divergence: Divergence) -> None:
    _, head = attach_head(model, divergence)
    model._no_split_modules = []  # its layer is read in parts, so it is no unit to shard on its own

    def first(batch: Batch) -> Tensor:
        (y,) = unrolled(model, batch.input_ids, batch.states, 1)
        return y.flatten(0, 1)[batch.positions]

    def compute(batch: Batch) -> ModelOutput:
        positions, top_ids, top_logprobs = batch.positions, batch.top_ids, batch.top_logprobs
        losses, agreements = [], []
        for y in unrolled(model, batch.input_ids, batch.states, STEPS):
            loss, agreed = head(y.flatten(0, 1)[positions], top_ids, top_logprobs)
            losses.append(loss)
            agreements.append(agreed)
            follows = following(positions)
            positions = positions[1:][follows]
            top_ids, top_logprobs = top_ids[1:][follows], top_logprobs[1:][follows]
        return ModelOutput(loss=torch.stack(losses).mean(), agreed=agreements[0])

    attach_forward(model, head, first, compute)


@torch.no_grad()
def export(made: Finished) -> None:
    """One form, which vLLM, speculators and our decoder read."""
    fold(made.tuned, made.tuned.get_buffer("sizes"))
    draft: Any = made.tuned.to(made.dtype)
    embedding = input_embedding(draft).to(made.dtype)
    ids, read = made.prepared.token_ids, layers(made.pair.target.config)
    save_eagle3(made.folder, draft, ids, embedding, read, made.recipe.target)


def stand_in(recipe: Recipe, pair: Pair, target: Target) -> tuple[PreTrainedModel, Tensor | None]:
    head, _ = first_rows(recipe, target)
    model = started(target.model, len(layers(pair.target.config)), head)
    return model, torch.arange(len(head), device=target.decoder.device)


def drafter(
    recipe: Recipe, pair: Pair, model: PreTrainedModel, ids: Tensor | None, target: Target
) -> Drafter:
    assert ids is not None
    draft: Any = copy.deepcopy(model)
    return eagle3_drafter(draft.to(target.decoder.dtype), ids, target, layers(pair.target.config))


@torch.no_grad()
def started(target: PreTrainedModel, layers: int, head: Tensor) -> PreTrainedModel:
    """The draft in fp32 with all that is taken from the target; the fitted maps are zero.

    It shares nothing with the target but the embedding.
    """
    config = layer_config(target.config.get_text_config())
    embedding = input_embedding(target)
    model = build_eagle3(config, layers, len(head)).to_empty(device=embedding.device)
    body: Any = model.model
    for weight in body.layers.parameters():
        weight.zero_()
    body.fc.weight.zero_()
    for norm in (body.norm, body.layers[0].hidden_norm):
        norm.weight.fill_(1)
    size = config.hidden_size
    first: Any = target.get_submodule("model.layers.0")
    last: Any = target.get_submodule("model.norm")
    mine = body.layers[0]
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(mine.self_attn, name).weight[:, :size] = getattr(first.self_attn, name).weight
    for name in ("gate_proj", "up_proj"):
        getattr(mine.mlp, name).weight.copy_(getattr(first.mlp, name).weight)
    mine.input_layernorm.weight.copy_(first.input_layernorm.weight)
    mine.post_attention_layernorm.weight.copy_(first.post_attention_layernorm.weight)
    body.norm.weight.copy_(last.weight)
    model.lm_head.weight.copy_(head)
    model.set_input_embeddings(FrozenEmbedding(embedding))
    body.rotary_emb = type(body.rotary_emb)(config).to(embedding.device)
    model.register_buffer("sizes", torch.ones(layers, device=embedding.device), persistent=False)
    return model.eval()
