"""EAGLE-3: one transformer layer that reads the target's hidden states (arXiv 2503.01840).

For each token but the first, the layer's attention reads its embedding beside a state of H numbers:
for what the target has read, its own states one token earlier, fused (`fc`); for a token that was
just drafted, what the layer itself made of the token before. So a pair is a token and the states
before it; pair i belongs to token i + 1.

It learns over several steps of a draft at once, the later ones on what it made itself
(training-time test). It starts as a fit: the queries, keys and values of the embeddings are those
of the target's first layer, those of the states are zero; `fc` and the attention's output map, then
the last map of the MLP, are least squares to the state that the target's head reads. Or it starts
from a published draft. A folder holds the checkpoint as vLLM and speculators load it, or in the
layout of EAGLE's own code where it came so, and compact.json. Legend: B rows, T pairs, N response
positions, L layers read, H hidden size, K rows of the head, S slots, V the target's vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from align.sources import load_config, read_json
from eval.decoding.drafters.causal_lm import CausalLMDrafter, TokenSession
from eval.decoding.drafters.compact import (
    check_compact,
    fill,
    read_token_ids,
    refuse_other_target,
    target_id_maps,
    weights_of,
    write_about,
)
from eval.decoding.drafters.drafter import Proposal, Session, Texts, on_target_ids, timed_choice
from eval.decoding.drafters.kind import Heads
from eval.decoding.drafters.training import (
    AnsweredText,
    FrozenEmbedding,
    HeadInput,
    LeastSquares,
    Start,
    TrainingBatch,
)
from eval.decoding.forward import PIECE, HiddenStates, KVCache, causal_bias, input_embedding
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.decoding.weights import INT8_TERMS, Product, linear

EMBEDDING, PREFIX = "model.embed_tokens.weight", "model."
SPECULATORS = "0.3.0"  # the version of its format
LAYERS = "eagle_aux_hidden_state_layer_ids"  # in config.json: the target's states that are read
EAGLE, MIDLAYER = "LlamaForCausalLMEagle3", "midlayer."  # of the layout of EAGLE's own code
RIDGE = 1e-2  # of maps from many states, which the fit's tokens determine poorly otherwise
STEPS = 3  # of a draft that are trained at once
SCORES = 2**20  # of each head at once while it is trained


class Eagle3(Heads):
    engines = ("vllm",)
    slow = ("lm_head", "model.fc")

    def layers(
        self, config: Mapping[str, Any], about: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        """A low, a middle and a high one: what vLLM takes where a checkpoint names none."""
        about = about or {}
        if named := (about.get("eagle_config") or about).get(LAYERS) or about.get(LAYERS):
            return tuple(named)
        depth = config["num_hidden_layers"]
        return tuple(sorted({min(2, depth - 1), depth // 2, max(depth - 3, depth // 2)}))

    def start(self, start: Start) -> tuple[PreTrainedModel, Tensor | None]:
        model = from_target(start.target, start.layers, start.head())
        if start.texts:
            fit(model, start.target, start.texts)
        return model, None

    def rows_of(self, about: Mapping[str, Any]) -> int | None:
        if about.get("speculators_model_type") != "eagle3" and not _of_eagle(about):
            return None
        text = about.get("transformer_layer_config", about)
        return int(about.get("draft_vocab_size") or text["vocab_size"])

    def check_published(self, folder: Path, target: PreTrainedConfig) -> None:
        about = read_json(folder / "config.json")
        refuse_unknown_parts(folder, about)
        shape = about.get("transformer_layer_config", about)
        refuse_other_target(folder, shape, target, ("hidden_size", "vocab_size"))

    @torch.no_grad()
    def published(
        self, folder: Path, target: PreTrainedModel, texts: Sequence[AnsweredText] = ()
    ) -> tuple[PreTrainedModel, Tensor | None]:
        about, text = read_json(folder / "config.json"), target.config.get_text_config()
        self.check_published(folder, text)
        embedding = input_embedding(target)
        tensors = weights_of(folder, str(embedding.device))
        published = tensors.pop("embed_tokens.weight", None)
        if published is not None and not torch.equal(published.to(embedding.dtype), embedding):
            raise ValueError(
                f"{folder} has an embedding of its own, which is not this target's; name the "
                "target that it was made for, or measure it in vLLM (eval.run --engine vllm)."
            )
        layers = self.layers(text.to_dict(), about)
        model, token_ids = _built(folder, tensors, layers, embedding)
        model = model.float()
        model.set_input_embeddings(FrozenEmbedding(embedding))
        if texts:
            measure_sizes(model, texts)
            fc: Any = model.get_submodule("model.fc")
            fc.weight.mul_(model.get_buffer("sizes").repeat_interleave(text.hidden_size))
        return model, token_ids

    def save(
        self,
        folder: Path,
        model: PreTrainedModel,
        token_ids: Tensor | None,
        embedding: Tensor,
        target: str,
    ) -> None:
        config: Any = model.config
        layers = list(target_layers(model))
        tensors = {
            name.removeprefix(PREFIX): weight.to(embedding.dtype).contiguous()
            for name, weight in model.state_dict().items()
            if name != EMBEDDING
        }
        tensors["fc.weight"] = fc_of_states(model).to(embedding.dtype)
        rows = len(tensors["lm_head.weight"])
        ids = torch.arange(rows) if token_ids is None else token_ids
        shape = config.to_dict()
        before = {"norm_before_residual": shape.pop("norm_before_residual", False)}
        dtype = {"torch_dtype": str(embedding.dtype).removeprefix("torch.")}
        if shape.pop("as_eagle", False):
            about = {**shape, "architectures": [EAGLE], "draft_vocab_size": rows, **before, **dtype}
            about["eagle_config"] = {LAYERS: layers, "use_aux_hidden_state": True}
            tensors = {
                name.replace("layers.0.", MIDLAYER, 1): tensor for name, tensor in tensors.items()
            }
        else:
            about = _as_speculators(shape, rows, layers, target) | before | dtype
        (folder / "config.json").write_text(json.dumps(about, indent=2))
        sizes = model.get_buffer("sizes").tolist()
        write_about(folder, "eagle3", embedding, layers=layers, sizes=sizes)
        if rows < len(embedding):  # of a whole head vLLM takes no map
            tensors |= target_id_maps(ids, len(embedding))
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    def load_to_train(
        self, folder: Path, embedding: Tensor
    ) -> tuple[PreTrainedModel, Tensor | None]:
        model, token_ids = load_eagle3(folder, embedding)
        model = model.float()
        sizes = torch.tensor(read_json(folder / "compact.json")["sizes"])
        model.get_buffer("sizes").copy_(1 / sizes)
        weight = fc_of_states(model)  # reads the states divided by their sizes, from now on
        fc: Any = model.get_submodule("model.fc")
        fc.weight.data.copy_(weight)
        model.get_buffer("sizes").copy_(sizes)
        model.set_input_embeddings(FrozenEmbedding(embedding))
        return model, token_ids

    def first_input(self, model: PreTrainedModel, batch: TrainingBatch) -> Tensor:
        (y,) = unrolled(model, batch.input_ids, batch.states, 1)
        return y.flatten(0, 1)[batch.positions]

    def head_inputs(self, model: PreTrainedModel, batch: TrainingBatch) -> Iterator[HeadInput]:
        entries = torch.arange(len(batch.positions), device=batch.positions.device)
        for y in unrolled(model, batch.input_ids, batch.states, STEPS):
            positions = batch.positions[entries]
            yield HeadInput(y.flatten(0, 1)[positions], entries, 1 / STEPS)
            # only what comes right after another response position is a later token of a draft
            entries = entries[1:][positions[1:] == positions[:-1] + 1]

    def drafter(
        self, model: PreTrainedModel, token_ids: Tensor | None, target: Target
    ) -> Eagle3Drafter:
        """On a CPU in eight bits."""
        embedding = target.decoder.embedding
        decoder = Eagle3Decoder(model, target.decoder.context_length, embedding)
        return Eagle3Drafter(
            **on_target_ids(token_ids, embedding) | {"form": "eagle3"},
            bytes=decoder.own_bytes(),
            decoder=decoder,
            layers=target_layers(model),
        )

    def load(self, folder: Path, target: Target) -> Eagle3Drafter:
        layers = read_json(folder / "compact.json")["layers"]
        depth = target.model.config.get_text_config().num_hidden_layers
        if max(layers) > depth:
            raise ValueError(
                f"{folder} reads the hidden states of layers {layers}, but this target has "
                f"{depth} layers; use the target that the draft was made for."
            )
        model, token_ids = load_eagle3(folder, target.decoder.embedding)
        return self.drafter(model, token_ids, target)


KIND = Eagle3()


def _as_speculators(
    shape: dict[str, Any], rows: int, layers: list[int], target: str
) -> dict[str, Any]:
    """config.json of the format of speculators. shape: of the layer."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "draft_vocab_size": rows,
        "norm_before_fc": False,
        LAYERS: layers,
        # vLLM takes three, whatever is named, unless the layer's own config has their number
        "transformer_layer_config": shape
        | {"architectures": ["LlamaForCausalLM"], "num_aux_hidden_states": len(layers)},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {
                "name_or_path": target,
                "architectures": load_config(target).architectures,
            },
        },
    }


def _of_eagle(about: Mapping[str, Any]) -> bool:
    """Whether a config.json is of EAGLE-3 in the layout of its authors' code."""
    return any("Eagle3" in name for name in about.get("architectures") or ()) and (
        "speculators_model_type" not in about
    )


def refuse_unknown_parts(folder: Path, about: Mapping[str, Any]) -> None:
    """Raise ValueError for an EAGLE-3 whose layer has parts that are not computed here."""
    shape = about.get("transformer_layer_config", about)
    eagle = about.get("eagle_config") or {}
    parts = {
        "num_hidden_layers": (shape.get("num_hidden_layers", 1), 1),
        "model_type": (shape.get("model_type", "llama"), "llama"),
        "attention_bias": (bool(shape.get("attention_bias")), False),
        "norm_before_fc": (bool(eagle.get("norm_before_fc") or about.get("norm_before_fc")), False),
        "fc_norm": (bool(about.get("fc_norm")), False),
        "norm_output": (bool(about.get("norm_output")), False),
        "use_aux_hidden_state": (eagle.get("use_aux_hidden_state", True), True),
    }
    for key, (value, computed) in parts.items():
        if value != computed:
            raise ValueError(
                f"{folder} has {key} {value}, but EAGLE-3 is computed here with {computed} only; "
                "measure it as it is in vLLM (eval.run --engine vllm)."
            )


def layer_config(target: PreTrainedConfig) -> LlamaConfig:
    """A Llama of one layer in the target's shape."""
    kept = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "rms_norm_eps", "rope_parameters", "max_position_embeddings"),
    )
    heads: Any = target
    config = LlamaConfig(
        **{key: getattr(target, key) for key in kept},
        head_dim=getattr(target, "head_dim", None)
        or heads.hidden_size // heads.num_attention_heads,
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )
    config.norm_before_residual = False  # of the states, as in EAGLE's own code
    return config


def build_eagle3(config: LlamaConfig, layers: Sequence[int], rows: int) -> LlamaForCausalLM:
    """The draft without weights: a Llama whose one layer reads pairs, with `fc` and `hidden_norm`.

    layers: of the target it reads. rows: of its head. Its buffer `sizes` [L] is what it divides the
    target's states by, 1 but for a draft that is trained.
    """
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
        layer: Any = model.model.layers[0]
        size = config.hidden_size
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = layer.self_attn.get_submodule(name)
            setattr(layer.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=False))
        layer.hidden_norm = type(layer.input_layernorm)(size, config.rms_norm_eps)
        model.model.fc = nn.Linear(len(layers) * size, size, bias=False)
        model.lm_head = nn.Linear(size, rows, bias=False)
    model.target_layers = tuple(layers)
    model.register_buffer("sizes", torch.ones(len(layers)), persistent=False)
    model._no_split_modules = []  # its layer is read in parts, so it is no unit to shard on its own
    built: LlamaForCausalLM = model
    return built


def target_layers(model: Any) -> tuple[int, ...]:
    """The target's hidden states that an EAGLE-3 model reads."""
    layers: tuple[int, ...] = model.target_layers
    return layers


def fc_of_states(model: PreTrainedModel) -> Tensor:
    """The weight of `fc` [H, L * H] as it reads states that are not divided by their sizes."""
    fc: Any = model.get_submodule("model.fc")
    sizes = model.get_buffer("sizes").to(fc.weight)
    return (fc.weight.detach().unflatten(1, (len(sizes), -1)) / sizes[:, None]).flatten(1)


@torch.no_grad()
def from_target(target: PreTrainedModel, layers: Sequence[int], head: Tensor) -> LlamaForCausalLM:
    """The draft in fp32 with all that is taken from the target; the fitted maps are zero.

    It shares nothing with the target but the embedding. head: [K, H].
    """
    config = layer_config(target.config.get_text_config())
    embedding = input_embedding(target)
    model = build_eagle3(config, layers, len(head)).to_empty(device=embedding.device)
    model.get_buffer("sizes").fill_(1)
    body: Any = model.model
    for weight in body.layers.parameters():
        weight.zero_()
    body.fc.weight.zero_()
    for norm in (body.norm, body.layers[0].hidden_norm):
        norm.weight.fill_(1)
    size = config.hidden_size
    first: Any = target.get_submodule("model.layers.0")
    last: Any = target.get_submodule("model.norm")
    layer = body.layers[0]
    for name in ("q_proj", "k_proj", "v_proj"):
        getattr(layer.self_attn, name).weight[:, :size] = getattr(first.self_attn, name).weight
    for name in ("gate_proj", "up_proj"):
        getattr(layer.mlp, name).weight.copy_(getattr(first.mlp, name).weight)
    layer.input_layernorm.weight.copy_(first.input_layernorm.weight)
    layer.post_attention_layernorm.weight.copy_(first.post_attention_layernorm.weight)
    body.norm.weight.copy_(last.weight)
    model.lm_head.weight.copy_(head)
    model.set_input_embeddings(FrozenEmbedding(embedding))
    body.rotary_emb = type(body.rotary_emb)(config).to(embedding.device)
    return model.eval()


def load_eagle3(folder: Path, embedding: Tensor) -> tuple[PreTrainedModel, Tensor]:
    """The model on the target's own embedding [V, H], and the target ids [K] of its head.

    Raises ValueError when it was made for another target.
    """
    tensors = load_file(folder / "model.safetensors", device=str(embedding.device))
    about = check_compact(folder, embedding.to(tensors["lm_head.weight"].dtype))
    return _built(folder, tensors, about["layers"], embedding)


def _built(
    folder: Path, tensors: dict[str, Tensor], layers: Sequence[int], embedding: Tensor
) -> tuple[PreTrainedModel, Tensor]:
    """From tensors named as in either layout; without d2t the head is over all of V."""
    about = read_json(folder / "config.json")
    config: Any = LlamaConfig(**about.get("transformer_layer_config", about))
    config.norm_before_residual = about.get("norm_before_residual", "speculators_version" in about)
    config.as_eagle = _of_eagle(about)
    token_ids = read_token_ids(folder, tensors)
    if token_ids is None:
        token_ids = torch.arange(len(tensors["lm_head.weight"]))
    model: Any = build_eagle3(config, layers, len(token_ids))
    named = {
        name if name.startswith("lm_head") else PREFIX + name.replace(MIDLAYER, "layers.0."): tensor
        for name, tensor in tensors.items()
    }
    cast = {name: tensor.to(embedding.dtype) for name, tensor in named.items()}
    fill(model, {**cast, EMBEDDING: embedding}, folder)
    # rotary tables are no parameters: build them for real
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.to(embedding.device).eval(), token_ids


def measure_sizes(model: PreTrainedModel, texts: Sequence[AnsweredText]) -> None:
    """Have it divide the target's states by their usual size, that of each layer in the texts."""
    states = torch.cat([text.states for text in texts if text.states is not None])
    model.get_buffer("sizes").copy_(states.float().pow(2).mean((0, 2)).sqrt())


@torch.no_grad()
def fit(model: LlamaForCausalLM, target: PreTrainedModel, texts: Sequence[AnsweredText]) -> None:
    """Fit `from_target`'s draft to what the target's final norm makes, its weights left out."""
    measure_sizes(model, texts)
    body: Any = model.model
    layer = body.layers[0]
    size, width = model.config.hidden_size, body.fc.in_features
    # 1. The state before the MLP, from the target's states and the attention's output
    state = LeastSquares(width + layer.self_attn.o_proj.in_features, size, RIDGE)
    for part in _fitted_on(model, target, texts):
        state.add(torch.cat([part.states, part.attended], 1), part.goal)
    maps = state.solution()
    body.fc.weight.copy_(maps[:, :width])
    layer.self_attn.o_proj.weight.copy_(maps[:, width:])
    # 2. The remaining error, from the inner values of the MLP
    residual = LeastSquares(layer.mlp.down_proj.in_features, size, RIDGE)
    for part in _fitted_on(model, target, texts):
        x = body.fc(part.states) + layer.self_attn.o_proj(part.attended)
        inner = layer.post_attention_layernorm(x)
        residual.add(F.silu(layer.mlp.gate_proj(inner)) * layer.mlp.up_proj(inner), part.goal - x)
    layer.mlp.down_proj.weight.copy_(residual.solution())


class _Fitted(NamedTuple):
    """Of an answer's N response positions: states before [N, L * H], attention's output, goal."""

    states: Tensor
    attended: Tensor
    goal: Tensor


def _fitted_on(
    model: PreTrainedModel, target: PreTrainedModel, texts: Sequence[AnsweredText]
) -> Iterator[_Fitted]:
    body: Any = model.model
    last: Any = target.get_submodule("model.norm")
    weight = last.weight.float()
    for text in texts:
        assert text.states is not None
        ids = torch.cat([text.prompt_ids, text.response_ids])[None, :-1].to(model.device)
        y = target.base_model(input_ids=ids, use_cache=False).last_hidden_state[0, 1:].float()
        before = scaled(model, text.states[None, :-1].to(model.device))
        pairs = Pairs(model, ids.shape[1] - 1)
        attended = pairs.attend(body.embed_tokens(ids[:, 1:]), body.fc(before))
        # the first token has no pair
        at = slice(max(0, len(text.prompt_ids) - 2), None)
        yield _Fitted(before[0, at], attended[0, at], (y / weight)[at].to(model.device))


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
        """The heads' output of this step [B, T, heads * D], of embeddings and states [B, T, H].

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
        (keys, values), *later = self.past
        chain = [
            (_moved(keys, age), _moved(values, age))
            for age, (keys, values) in enumerate(reversed(later))
        ]
        attended = []
        rows, count, _ = read.shape
        chunk = max(1, SCORES // max(1, rows * count))
        # some pairs' scores at a time, made again for their gradients: never T by T of them
        for at in range(0, max(1, count), chunk):
            to = at + chunk
            attended.append(
                checkpoint(
                    _attended,
                    q[:, :, at:to],
                    keys[:, :, :to],
                    values[:, :, :to],
                    [(k[:, :, at:to], v[:, :, at:to]) for k, v in chain],
                    use_reentrant=False,
                )
            )
        return torch.cat(attended, 2).transpose(1, 2).flatten(2)


def _attended(
    q: Tensor, keys: Tensor, values: Tensor, chain: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of queries [B, heads, C, D] over the first step's pairs up to the last of theirs
    [B, heads, S, D], and of each over the `chain`: its own draft's pairs of later steps
    [B, heads, C, D].
    """
    visible = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool, device=q.device)
    visible = visible.tril(keys.shape[2] - q.shape[2] - len(chain))
    columns = [(q @ keys.transpose(2, 3)).masked_fill_(~visible, float("-inf"))]
    columns += [(q * chain_keys).sum(-1, keepdim=True) for chain_keys, _ in chain]
    scores = torch.cat(columns, -1).float() * q.shape[-1] ** -0.5
    weights, count = scores.softmax(-1).to(values.dtype), keys.shape[2]
    attended = weights[..., :count] @ values
    for age, (_, chain_values) in enumerate(chain):
        attended = attended + weights[..., count + age, None] * chain_values
    return attended


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
        attended = layer.self_attn.o_proj(pairs.attend(embedded, hidden))
        x = (layer.hidden_norm(hidden) if model.config.norm_before_residual else hidden) + attended
        hidden = x + layer.mlp(layer.post_attention_layernorm(x))
        yield F.pad(body.norm(hidden), (0, 0, 1, 0))


class Eagle3Decoder:
    """The layer over a cache of its own, for inference."""

    def __init__(self, model: PreTrainedModel, context_length: int, embedding: Tensor) -> None:
        config: Any = model.config
        body: Any = model.base_model
        layer, attention = body.layers[0], body.layers[0].self_attn
        # a target in fp32 is there to be compared with, and so is its draft
        int8 = embedding.device.type == "cpu" and embedding.dtype != torch.float32
        int8 = int8 and config.hidden_size % INT8_TERMS == 0
        self.embedding, self.device, self.dtype = embedding, embedding.device, embedding.dtype
        self.context_length, self.eps = context_length, config.rms_norm_eps
        self.key_heads, self.head_size = config.num_key_value_heads, config.head_dim
        self.heads = config.num_attention_heads
        self.norm_before_residual = config.norm_before_residual
        self.norms = [
            norm.weight.detach().to(self.dtype)
            for norm in (
                layer.input_layernorm,
                layer.hidden_norm,
                layer.post_attention_layernorm,
                body.norm,
            )
        ]
        self.fc = Product.of(linear(fc_of_states(model).to(self.dtype)), int8=int8)
        self.qkv = Product.of(attention.q_proj, attention.k_proj, attention.v_proj, int8=int8)
        self.output = Product.of(attention.o_proj, int8=int8)
        self.gate_up = Product.of(layer.mlp.gate_proj, layer.mlp.up_proj, int8=int8)
        self.down = Product.of(layer.mlp.down_proj, int8=int8)
        self.head = Product.of(model.get_submodule("lm_head"), int8=int8)  # type: ignore[arg-type]
        # rows of a batch that read less than others are padded, beyond their last position, too
        positions = torch.arange(2 * context_length, device=self.device)[None]
        cos, sin = body.rotary_emb(embedding[:1, :1], positions)
        half = self.head_size // 2
        self.cos = cos[0]
        self.sin = torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1)

    def own_bytes(self) -> int:
        products = (self.fc, self.qkv, self.output, self.gate_up, self.down, self.head)
        return sum(part.nbytes for part in (*products, *self.norms))

    def new_cache(self, rows: int, slots: int) -> KVCache:
        shape = (rows, self.key_heads, slots, self.head_size)
        keys, values = torch.zeros((2, *shape), dtype=self.dtype, device=self.device)
        return KVCache([keys], [values])

    @torch.inference_mode()
    def forward(
        self, tokens: Tensor, hidden: Tensor, start: Tensor, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """What the head reads, and the state for the next pair [B, T, H] each.

        tokens: [B, T]. hidden: their states [B, T, H]. start: the first pair of each row [B].
        """
        rows, width, size = hidden.shape
        norm_in, norm_hidden, norm_post, norm_end = self.norms
        positions = start[:, None] + torch.arange(width, device=self.device)
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        embedded = F.rms_norm(F.embedding(tokens, self.embedding), (size,), norm_in, self.eps)
        normed = F.rms_norm(hidden, (size,), norm_hidden, self.eps)
        qkv = (
            self.qkv(torch.cat([embedded, normed], -1))
            .view(rows, width, -1, self.head_size)
            .transpose(1, 2)
        )
        turned = self.heads + self.key_heads
        qk, v = qkv[:, :turned], qkv[:, turned:]
        qk = qk * cos + torch.roll(qk, self.head_size // 2, -1) * sin
        keys, values = cache.keys[0], cache.values[0]
        row_index = torch.arange(rows, device=self.device)[:, None]
        keys[row_index, :, positions] = qk[:, self.heads :].transpose(1, 2)
        values[row_index, :, positions] = v.transpose(1, 2)
        length = int(start.max()) + width
        mask = causal_bias(start, width, length, self.dtype)[:, None]
        h = F.scaled_dot_product_attention(
            qk[:, : self.heads],
            keys[:, :, :length],
            values[:, :, :length],
            mask,
            enable_gqa=True,
        )
        before = normed if self.norm_before_residual else hidden
        hidden = before + self.output(h.transpose(1, 2).reshape(rows, width, -1))
        gate, up = self.gate_up(F.rms_norm(hidden, (size,), norm_post, self.eps)).chunk(2, dim=-1)
        hidden = hidden + self.down(F.silu(gate) * up)
        return F.rms_norm(hidden, (size,), norm_end, self.eps), hidden

    def from_start(self, tokens: Tensor, hidden: Tensor, cache: KVCache | None = None) -> Tensor:
        """What the head reads of a text's first pairs, as of `forward`."""
        cache = cache or self.new_cache(1, tokens.shape[1])
        first = torch.zeros(1, dtype=torch.long, device=self.device)
        pieces = zip(tokens.split(PIECE, 1), hidden.split(PIECE, 1), strict=True)
        read = [
            self.forward(piece, states, first + number * PIECE, cache)[0]
            for number, (piece, states) in enumerate(pieces)
        ]
        return torch.cat(read, 1)


@dataclass(kw_only=True)
class Eagle3Drafter(CausalLMDrafter):
    decoder: Eagle3Decoder  # type: ignore[assignment]

    def fused(self, states: HiddenStates) -> Tensor:
        """The states it reads [B, T, H], of the target's [B, T, H] a layer."""
        return self.decoder.fc(self.side_by_side(states, self.decoder.dtype))

    def start(self, texts: Texts) -> Session:
        return Eagle3Session(self, texts)

    @torch.inference_mode()
    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        decoder = self.decoder
        tokens = torch.tensor([[*ids, *text[:-1]][1:]], device=decoder.device)
        hidden = self.fused({k: states[k][:, :-1] for k in self.layers})  # type: ignore[index]
        # of a prompt of one token there is no pair before the first token of the text
        first = max(0, tokens.shape[1] - len(text))
        logits = decoder.head(decoder.from_start(tokens, hidden)[:, first:])
        return logits, len(text) - logits.shape[1]

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        decoder = self.decoder
        token = torch.ones((1, 1), dtype=torch.long, device=decoder.device)
        hidden = torch.ones(
            (1, 1, decoder.embedding.shape[1]), dtype=decoder.dtype, device=decoder.device
        )
        start = torch.tensor([context_length], device=decoder.device)
        cache = decoder.new_cache(1, context_length + 1)

        return timed_choice(
            lambda: decoder.head(decoder.forward(token, hidden, start, cache)[0]), sampling
        )

    def probe(self, ids: list[int]) -> Tensor:
        decoder = self.decoder
        tokens = torch.tensor([ids[: decoder.context_length]], device=decoder.device)
        return decoder.head(decoder.from_start(tokens, F.embedding(tokens, decoder.embedding)))


class Eagle3Session(TokenSession):
    """`new`: of each row the tokens since it last read, with the target's states before them."""

    drafter: Eagle3Drafter

    def __init__(self, drafter: Eagle3Drafter, texts: Texts) -> None:
        self.drafter, self.sampling, self.generator = drafter, texts.sampling, texts.generator
        self.texts, self.slots = [list(text) for text in texts.ids], texts.slots
        self.in_cache = [len(text) - 1 for text in self.texts]
        self.cache = drafter.decoder.new_cache(len(self.texts), 2 * self.slots)
        self.hidden = torch.empty(0)
        self.new: list[tuple[list[int], Tensor]] = []
        for row, (text, states) in enumerate(zip(self.texts, texts.states, strict=True)):
            fused = drafter.fused(states)[0]
            if len(text) > 2:
                tokens = torch.tensor([text[1:-1]], device=drafter.decoder.device)
                drafter.decoder.from_start(tokens, fused[None, :-1], self.cache.row(row))
            self.new.append((text[-1:], fused[-1:]))

    def logits(self, step: Tensor, start: int | Tensor, drafted: int) -> Tensor:
        decoder = self.drafter.decoder
        lengths = torch.tensor([len(text) for text in self.texts], device=decoder.device)
        if drafted:
            y, self.hidden = decoder.forward(step, self.hidden, lengths + drafted - 2, self.cache)
            return decoder.head(y)[:, -1]
        counts = [len(tokens) for tokens, _ in self.new]
        width = max(counts)
        # what pads a row on the right is overwritten before it is read
        tokens = torch.tensor(
            [[*tokens, *[0] * (width - len(tokens))] for tokens, _ in self.new],
            device=decoder.device,
        )
        hidden = torch.stack([F.pad(h, (0, 0, 0, width - len(h))) for _, h in self.new])
        count = torch.tensor(counts, device=decoder.device)
        y, hidden = decoder.forward(tokens, hidden, lengths - 1 - count, self.cache)
        rows = torch.arange(len(counts), device=decoder.device)
        self.hidden = hidden[rows, count - 1][:, None]
        return decoder.head(y[rows, count - 1][:, None])[:, -1]

    def propose(self, count: int, stop_below: float) -> Proposal:
        proposal = super().propose(count, stop_below)
        if proposal.tokens.shape[1]:
            self.new = [([], h[:0]) for _, h in self.new]
        return proposal

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        super().commit(emitted, accepted, states)
        self.in_cache = [len(text) - 1 for text in self.texts]  # `new` has what it has not read
        fused = self.drafter.fused(states)
        self.new = [
            ([*tokens, *new], torch.cat([h, fused[row, : len(new)]]))
            for row, ((tokens, h), new) in enumerate(zip(self.new, emitted, strict=True))
        ]

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.new = [self.new[row] for row in rows]
