"""EAGLE-3 (arXiv 2503.01840) in training: several steps of a draft at once (training-time test).

The later steps read the draft's own states, and their losses weigh less, because fewer drafts reach
them. A new draft has one layer and starts from least squares: the queries, keys and values of the
embeddings are those of the target's first layer, those of the states are zero; `fc` and the
attention's output map, then the last map of the MLP, are fitted to the state that the target's head
reads. Or a published draft is trained further, with all its layers and norms, and is saved with its
own config.json and names. Legend: B rows, T inputs, N response positions, L layers read, H hidden
size, D size of an attention head, K entries of the LM head.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from align.checkpoint import Checkpoint
from align.files import read_json
from distill.drafters.attention import NO_TEXT, Attention, Marks, Rotary, rotated
from distill.drafters.batch import (
    HeadInput,
    Plan,
    TrainingBatch,
    recomputed,
    slots,
    unrolled_input,
    unrolled_plan,
)
from distill.drafters.compact import target_id_maps, tuned_config, write_compact
from distill.drafters.initialisation import (
    least_squares,
    scaled,
    shape_of,
    to_train,
    undivided,
    usual_sizes,
)
from distill.drafters.kind import Draft, DraftKind, Origin
from distill.drafters.layers import heads, normed, rotary_of
from eval.decoding.drafters import eagle3
from eval.decoding.drafters.eagle3 import (
    EMBEDDING,
    FIRST,
    LAYERS,
    PREFIX,
    build_eagle3,
    layer_config,
    normed_states,
)
from eval.decoding.forward import input_embedding

SPECULATORS = "0.3.0"  # the version of the format of speculators
BETA = 0.5  # weight of a step's loss over that of the step before
RIDGE = 1e-2  # ridge of the fit: its tokens alone determine maps from many states poorly


class Eagle3(DraftKind):
    rate = 4e-3
    warmup = 60  # with fewer the first token loses up to 40% of its share within 20 steps
    fitted_weights = (
        "lm_head",
        "model.fc.",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.down_proj",
    )
    states_from_vllm = True

    def target_layers(
        self, target: Mapping[str, Any], published: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        return eagle3.target_layers(target, published)

    def num_layers(self, wanted: int, published: Mapping[str, Any] | None = None) -> int:
        return 1 if published is None else int(layer_config(published).num_hidden_layers)

    def fit_layers(self, target: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
        return (target["num_hidden_layers"],)

    @torch.no_grad()
    def initialise(self, origin: Origin) -> Draft:
        target, token_ids, sizes = origin.target, origin.token_ids, usual_sizes(origin)
        if origin.published is None:
            model = from_target(target.model, origin.layers, origin.head())
        else:
            config = target.model.config.get_text_config()
            model, token_ids = eagle3.load_eagle3(origin.published, origin.embedding, config, True)
            if model.config.norm_before_fc or model.config.fc_norm:
                sizes = torch.ones_like(sizes)  # the norms read the states as they are
        model = to_train(model, sizes, origin.embedding)
        if origin.published is None and origin.texts:
            fit(model, origin)
        model.ttt_steps = origin.ttt_steps
        return Draft(model, token_ids)

    def save(self, folder: Path, draft: Draft, embedding: Tensor, target: Checkpoint) -> None:
        model: Any = draft.model
        tensors = {
            name.removeprefix(PREFIX).replace(FIRST, model.first_layer): weight
            for name, weight in model.state_dict().items()
            if name != EMBEDDING
        }
        tensors["fc.weight"] = undivided(model)
        if model.own_embedding:  # speculators 0.9 reads any memory where it is missing
            tensors["embed_tokens.weight"] = embedding
        about = tuned_config(model.about, model.config, embedding, target)
        if LAYERS in (about.get("eagle_config") or {}):
            about[LAYERS] = list(model.target_layers)  # vLLM's second runner reads no other place
        (folder / "config.json").write_text(json.dumps(about, indent=2))
        rows = len(tensors["lm_head.weight"])
        if draft.token_ids is not None and rows < len(embedding):  # vLLM refuses a whole head's map
            tensors |= target_id_maps(draft.token_ids, len(embedding))
        more = {"layers": list(model.target_layers), "sizes": model.sizes.tolist()}
        write_compact(folder, self.name, tensors, embedding, **more, ttt_steps=model.ttt_steps)

    def load(self, folder: Path, embedding: Tensor, head: Callable[[], Tensor]) -> Draft:
        model, token_ids = eagle3.load_eagle3(folder, embedding)
        compact = read_json(folder / "compact.json")
        model.ttt_steps = compact["ttt_steps"]
        return Draft(to_train(model, torch.tensor(compact["sizes"]), embedding), token_ids)

    def plan(self, model: Any, batch: TrainingBatch, training: bool) -> Plan:
        everywhere = torch.arange(len(batch.positions))
        anchors, depths, places = slots(batch, everywhere, torch.zeros_like(everywhere))
        size, steps = anchors.numel(), model.ttt_steps
        return unrolled_plan(batch, places, size, steps, True, anchors=anchors, depths=depths)

    def head_input(self, model: Any, batch: TrainingBatch) -> HeadInput:
        return unrolled_input(list(unrolled(model, batch, model.ttt_steps)), batch.plan, BETA)


KIND = Eagle3()


def as_speculators(shape: Mapping[str, Any], rows: int, layers: Sequence[int]) -> dict[str, Any]:
    """config.json of a new draft in the format of speculators. shape: the layer's config.

    `save` adds the target.
    """
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "draft_vocab_size": rows,
        "norm_before_residual": False,  # as in EAGLE's own code
        "norm_before_fc": False,
        LAYERS: list(layers),
        # vLLM reads three states unless the layer's own config has their number
        "transformer_layer_config": {
            **shape,
            "architectures": ["LlamaForCausalLM"],
            "num_aux_hidden_states": len(layers),
        },
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        },
    }


def from_target(target: PreTrainedModel, layers: Sequence[int], head: Tensor) -> Any:
    """The draft in fp32 with weights that come from the target; the maps that `fit` sets are zero.

    No weights are shared. `to_train` sets the embedding, which is empty here. A weight is random if
    the target's is empty (`TargetEnds`). head: [K, H].
    """
    embedding = input_embedding(target)
    shape = LlamaConfig(**shape_of(target.config.get_text_config()), num_hidden_layers=1)
    about = as_speculators(shape.to_dict(), len(head), layers)
    model = build_eagle3(layer_config(about), layers, len(head)).to_empty(device=embedding.device)
    model.about, model.first_layer, model.own_embedding = about, FIRST, False
    body = model.model
    for weight in body.layers.parameters():
        weight.zero_()
    body.fc.weight.zero_()
    body.layers[0].hidden_norm.weight.fill_(1)
    size = model.config.hidden_size
    generator = torch.Generator(embedding.device).manual_seed(0)
    weights = dict(target.named_parameters())
    for name, weight in body.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weight = weight[:, :size]
        elif not name.endswith(("gate_proj.weight", "up_proj.weight", "layernorm.weight")):
            continue
        taken = weights[f"model.{name}"]
        if taken.device.type == "meta":
            weight.normal_(std=model.config.initializer_range, generator=generator)
        else:
            weight.copy_(taken)
    body.norm.weight.copy_(weights["model.norm.weight"])
    model.lm_head.weight.copy_(head)
    body.rotary_emb = type(body.rotary_emb)(model.config).to(embedding.device)
    return model.eval()


def fit(model: Any, origin: Origin) -> None:
    """Fit the draft of `from_target`: its last state becomes the target's normalised final state,
    before the weights of the final norm.
    """
    body: Any = model.model
    layer, width = body.layers[0], body.fc.in_features
    # 1. The state before the MLP, from the target's states and the attention's output
    read = (
        (torch.cat([states, attended], 1), goal)
        for states, attended, goal in _fitted_states(model, origin)
    )
    maps = least_squares(read, RIDGE)
    body.fc.weight.copy_(maps[:, :width])
    layer.self_attn.o_proj.weight.copy_(maps[:, width:])

    # 2. The remaining error, from the inner values of the MLP
    def inner_values() -> Iterator[tuple[Tensor, Tensor]]:
        for states, attended, goal in _fitted_states(model, origin):
            x = body.fc(states) + layer.self_attn.o_proj(attended)
            normed = layer.post_attention_layernorm(x)
            yield F.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed), goal - x

    layer.mlp.down_proj.weight.copy_(least_squares(inner_values(), RIDGE))


def _fitted_states(model: Any, origin: Origin) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """At each text's N response positions: the scaled target states [N, L * H], the attention's
    output [N, heads * D], and the goal of the draft's last state [N, H].
    """
    body: Any = model.base_model
    target: Any = origin.target.model
    last = target.model.norm.weight.float().to(model.device)
    assert origin.states is not None
    assert origin.fit_states is not None
    for text in origin.texts:
        ids = text.text[None, :-1].to(model.device)
        goal = origin.fit_states(text)[1:, 0].to(model.device).float() / last
        before = scaled(model, origin.states(text)[None, :-1].to(model.device))
        read, _ = first_input(model, body.embed_tokens(ids[:, 1:]), body.fc(before))
        numbers = torch.arange(read.shape[1], device=ids.device)[None]
        marks = Marks.of_texts(torch.zeros_like(numbers), numbers)
        layer = LayerAttention(model, 0)
        rotary = rotary_of(body, numbers)
        attended = layer.attend(Attention(marks, marks), read, read, rotary, rotary)
        response = slice(
            max(0, len(text.prompt_ids) - 2), None
        )  # no input predicts the first token
        yield before[0, response], attended[0, response], goal[response]


class LayerAttention:
    """A layer's attention. Each call of `attend` adds the keys of another step of the drafts."""

    def __init__(self, model: Any, number: int) -> None:
        config = model.config
        self.attention = model.base_model.layers[number].self_attn
        sliding = config.layer_types[number] == "sliding_attention"
        self.window = config.sliding_window if sliding else None
        self.past: list[tuple[Tensor, Tensor]] = []  # keys and values of each step

    def attend(
        self,
        attention: Attention,
        asking: Tensor,
        read: Tensor,
        asking_rotary: Rotary,
        rotary: Rotary,
    ) -> Tensor:
        """The heads' output [B, Q, heads * D] for the inputs `asking` [B, Q, …].

        They see the inputs that were read at the steps before, and at this one: `read` [B, K, …].
        """

        q = rotated(heads(self.attention, "q", asking), asking_rotary)
        k = rotated(heads(self.attention, "k", read), rotary)
        self.past.append((k, heads(self.attention, "v", read)))
        keys, values = (torch.cat(steps, 2) for steps in zip(*self.past, strict=True))
        return attention(q, keys, values, window=self.window).flatten(2)


def first_input(model: Any, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """The attention's inputs in the first layer [B, T, 2 * H], and what its output is added to.

    embedded, hidden: the embeddings and states of T inputs [B, T, H].
    """
    layer = model.base_model.layers[0]
    normed_states = normed(layer.hidden_norm, hidden)
    read = torch.cat([normed(layer.input_layernorm, embedded), normed_states], -1)
    return read, normed_states if model.config.norm_before_residual else hidden


def unrolled(model: Any, batch: TrainingBatch, steps: int) -> Iterator[Tensor]:
    """For each step of a draft, the LM head's inputs of the drafts of all slots [B, Q, H].

    A draft begins at a response position. Its first step reads the newest token there, and the
    states of the target up to the token before, as all inputs of the text do. Its step g + 1 reads
    the g-th token after the anchor and its own state of the step before. It sees the text as far
    as its first step. So prompts are read for keys and values only, except in the layers below the
    last. A text's first token has no state before it, so no draft begins there: zeros.
    """
    body = model.base_model
    anchors, depths = batch.plan[:2]
    start = batch.positions[anchors.clamp_min(0)]  # [B, Q], in the flattened batch
    # an input is numbered as the token before its own, whose state it has
    begins, numbers = batch.position_ids.flatten()[start] - 1, batch.position_ids - 1
    texts = batch.texts.flatten()[start].masked_fill((anchors < 0) | (begins < 0), NO_TEXT)
    drafts = Marks(texts, begins, anchors, depths)
    inputs = Marks.of_texts(batch.texts.masked_fill(numbers < 0, NO_TEXT), numbers)

    def at_drafts(values: Tensor) -> Tensor:
        return values.flatten(0, 1)[start]

    # of the inputs, then of the drafts' tokens at each step
    read_at = torch.cat([numbers, *(begins + step for step in range(steps))], 1).clamp_min(0)
    sizes = [numbers.shape[1], *[begins.shape[1]] * steps]
    parts = (table.split(sizes, 2) for table in rotary_of(body, read_at))
    turned, *of_steps = zip(*parts, strict=True)
    ids = batch.input_ids.flatten()
    hidden = F.pad(body.fc(normed_states(body, scaled(model, batch.states))), (0, 0, 1, -1))
    read, x = first_input(model, body.embed_tokens(batch.input_ids), hidden)
    keys, attention = inputs, Attention(inputs, inputs)
    asking_turned = turned
    layers = [LayerAttention(model, number) for number in range(len(body.layers))]
    for step in range(steps):
        if step:
            later = (start + step).clamp(max=len(ids) - 1)
            read, x = first_input(model, body.embed_tokens(ids[later]), hidden)
            drafts = drafts._replace(depths=drafts.depths + 1)
            keys = keys.then(drafts.as_keys())
            attention, turned = Attention(drafts, keys), of_steps[step]
            asking_turned = turned
        for number, layer in enumerate(body.layers):
            if number:
                read = normed(layer.input_layernorm, x)
            asking = read
            if step == 0 and number == len(layers) - 1:
                asking, x = at_drafts(read), at_drafts(x)
                attention, asking_turned = Attention(drafts, inputs), of_steps[0]
            attended = layers[number].attend(attention, asking, read, asking_turned, turned)
            x = x + layer.self_attn.o_proj(attended)
            x = x + recomputed(layer, layer.mlp, normed(layer.post_attention_layernorm, x))
        y = normed(body.norm, x)
        hidden = y if model.config.norm_output else x
        yield y.masked_fill((begins < 0)[..., None], 0)
