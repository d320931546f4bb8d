"""EAGLE-3: transformer layers that read the target's hidden states (arXiv 2503.01840).

Each input of the first layer is the embedding of a token and a state [H] of the token before it. If
the target has read the token before, the state is the target's states there, fused by `fc`;
otherwise it is the draft's own state for the input before. Input i belongs to token i + 1.

config.json has the switches of EAGLE 3.1 (arXiv 2605.09992): RMS norms of the target's states, and
whether the draft's own state is taken after its last norm. They mean what they mean in vLLM 0.32.

A folder holds the checkpoint in the layout of vLLM and speculators, or of EAGLE's code, and
compact.json if draftsmith made it. Legend: T inputs, L layers read, H hidden size, K entries of the
head, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    CONFIG_MAPPING,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from align.files import read_json
from eval.decoding.build import longest_context
from eval.decoding.drafters.causal_lm import CausalLMDrafter, TokenSession
from eval.decoding.drafters.compact import (
    check_compact,
    fill,
    read_token_ids,
    refuse_other_embedding,
    refuse_other_layers,
    refuse_other_target,
    refuse_unknown_parts,
    weights_of,
)
from eval.decoding.drafters.drafter import Session, Text, on_target_ids, timed_choice
from eval.decoding.drafters.formats import DraftFormat
from eval.decoding.forward import PIECE, HiddenStates, KVCache
from eval.decoding.fused import FusedDecoder
from eval.decoding.target import Target, model_bytes
from eval.decoding.verification import Sampling
from eval.decoding.weights import Product

EMBEDDING, PREFIX = "model.embed_tokens.weight", "model."
LAYERS = "eagle_aux_hidden_state_layer_ids"  # config.json's key for the target's states to read
FIRST, MIDLAYER = "layers.0.", "midlayer."  # the first layer's name here, and in EAGLE's own code
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
# the layers in the layout of EAGLE's code, by architecture; model_type gives defaults of sizes only
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen3ForCausalLM": "qwen3",
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3Qwen3ForCausalLM": "qwen3",
}


class Eagle3(DraftFormat):
    def head_size(self, config: Mapping[str, Any]) -> int | None:
        if config.get("speculators_model_type") != "eagle3" and not in_eagle_layout(config):
            return None
        return int(config.get("draft_vocab_size") or layer_shape(config)["vocab_size"])

    def positions(self, config: Mapping[str, Any]) -> int:
        return longest_context(layer_config(config))

    def check_config(self, folder: Path, target: PreTrainedConfig) -> None:
        about = read_json(folder / "config.json")
        shape, eagle = layer_shape(about), about.get("eagle_config") or {}
        layers = family(about)
        parts = {
            "layers of type": (layers, layers if layers in FAMILIES else " or ".join(FAMILIES)),
            "attention_bias": (bool(shape.get("attention_bias")), False),
            "use_aux_hidden_state": (eagle.get("use_aux_hidden_state", True), True),
        }
        refuse_unknown_parts(folder, "EAGLE-3", parts)
        refuse_other_target(folder, shape, target)
        refuse_other_layers(
            folder, target_layers(target.to_dict(), about), target.num_hidden_layers
        )

    def load(self, folder: Path, target: Target) -> Eagle3Drafter:
        text = target.model.config.get_text_config()
        model, token_ids = load_eagle3(folder, target.decoder.embedding, text)
        refuse_other_layers(folder, model.target_layers, text.num_hidden_layers)
        return self.drafter(model, token_ids, target)

    def drafter(self, model: Any, token_ids: Tensor | None, target: Target) -> Eagle3Drafter:
        embedding = target.decoder.embedding
        return Eagle3Drafter(
            **on_target_ids(token_ids, embedding, self.name),
            bytes=model_bytes(model, EMBEDDING),
            decoder=Eagle3Decoder(model, target.decoder.context_length, embedding),
            layers=model.target_layers,
        )


FORMAT = Eagle3()


def target_layers(
    target: Mapping[str, Any], published: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """The numbers (forward.py) of the target's hidden states that an EAGLE-3 draft reads.

    A published draft's config.json names them; by default, as in vLLM, a low, a middle and a high
    layer are read. target: the target's config.
    """
    about = published or {}
    if named := about.get(LAYERS) or (about.get("eagle_config") or {}).get(LAYERS):
        return tuple(named)
    depth = target["num_hidden_layers"]
    return tuple(sorted({min(2, depth - 1), depth // 2, max(depth - 3, depth // 2)}))


def in_eagle_layout(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to an EAGLE-3 draft in the layout of EAGLE's code.

    EAGLE's authors name the architecture of a language model, as vLLM allows.
    """
    trimmed = "draft_vocab_size" in config
    return "speculators_model_type" not in config and any(
        "Eagle3" in name or (trimmed and name.endswith("ForCausalLM"))
        for name in config.get("architectures") or ()
    )


def family(about: Mapping[str, Any]) -> str:
    """The key of FAMILIES by a config.json, or the name of other layers."""
    if in_eagle_layout(about):
        name: str = about["architectures"][0]
        return ARCHITECTURES.get(name, name)
    return str(about["transformer_layer_config"].get("model_type", "llama"))


def layer_shape(about: Mapping[str, Any]) -> dict[str, Any]:
    """The layers' part of a config.json. As in vLLM, the class of the model_type completes it in
    the layout of EAGLE's code.
    """
    kind: Any = about.get("model_type")
    if in_eagle_layout(about) and kind in CONFIG_MAPPING:
        completed: dict[str, Any] = CONFIG_MAPPING[kind](**about).to_dict()
        return completed
    return dict(about.get("transformer_layer_config", about))


def layer_config(about: Mapping[str, Any]) -> Any:
    """The config of the layers by a config.json, with the switches of EAGLE-3 as attributes."""
    of_eagle, kind = in_eagle_layout(about), family(about)
    shape = layer_shape(about)
    if not shape.get("layer_types"):  # configs that were copied from a target's have a window, too
        shape |= {"layer_types": None, "sliding_window": None}
    config: Any = FAMILIES[kind][0](**shape | {"model_type": kind, "tie_word_embeddings": False})
    config.layer_types = config.layer_types or ["full_attention"] * config.num_hidden_layers
    eagle = about.get("eagle_config") or {}
    config.norm_before_fc = bool(eagle.get("norm_before_fc", about.get("norm_before_fc")))
    config.fc_norm, config.norm_output = bool(about.get("fc_norm")), bool(about.get("norm_output"))
    config.norm_before_residual = about.get("norm_before_residual", not of_eagle)
    return config


def build_eagle3(config: Any, layers: Sequence[int], rows: int) -> Any:
    """The draft without weights: a Llama or Qwen3 with `fc`, norms before it, and `hidden_norm`.

    layers: numbers of the target's states that it reads. rows: entries of its head.
    """
    size, width = config.hidden_size, len(layers) * config.hidden_size
    with torch.device("meta"):
        model: Any = FAMILIES[config.model_type][1](config)
        body, first = model.model, model.model.layers[0]

        def norm(size: int) -> nn.Module:
            module: nn.Module = type(body.norm)(size, config.rms_norm_eps)
            return module

        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = first.self_attn.get_submodule(name)
            setattr(first.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=False))
        first.hidden_norm = norm(size)
        body.input_norm = norm(width) if config.norm_before_fc else None
        body.fc_norm = nn.ModuleList(norm(size) for _ in layers) if config.fc_norm else None
        body.fc = nn.Linear(width, size, bias=False)
        model.lm_head = nn.Linear(size, rows, bias=False)
    model.target_layers = tuple(layers)
    model._no_split_modules = []  # parts of the layers are called alone, so they are no shard units
    return model


def normed_states(norms: Any, states: Tensor) -> Tensor:
    """The target's states, side by side [B, T, L * H], after the norms before `fc`.

    norms: what has `input_norm` and `fc_norm`, which are None if the draft has none.
    """
    if norms.input_norm is not None:
        states = norms.input_norm(states)
    if norms.fc_norm is not None:
        parts = zip(norms.fc_norm, states.chunk(len(norms.fc_norm), -1), strict=True)
        states = torch.cat([norm(part) for norm, part in parts], -1)
    return states


def load_eagle3(
    folder: Path, embedding: Tensor, target: PreTrainedConfig | None = None, tuned: bool = False
) -> tuple[Any, Tensor]:
    """A folder's model on the target's embedding [V, H], and the target id of each head entry [K].

    `model.about` is its config.json, `model.first_layer` the first layer's name in its checkpoint,
    `model.own_embedding` whether that has an embedding. target: the target's config, to check a
    published draft. tuned: whether the target may have been fine-tuned since, so that its embedding
    is another one. Raises UserError if the draft was made for another target or cannot be computed
    here.
    """
    about, tensors = read_json(folder / "config.json"), weights_of(folder, str(embedding.device))
    published = tensors.pop("embed_tokens.weight", None)
    if target is None or (folder / "compact.json").is_file():
        dtype = tensors["lm_head.weight"].dtype
        compact = check_compact(folder, None if tuned else embedding, dtype)
        layers = compact["layers"]
    else:
        FORMAT.check_config(folder, target)
        layers = target_layers(target.to_dict(), about)
        if not tuned:
            refuse_other_embedding(folder, published, embedding)
    token_ids = read_token_ids(folder, tensors)
    if token_ids is None:
        token_ids = torch.arange(len(tensors["lm_head.weight"]), device=embedding.device)
    model = build_eagle3(layer_config(about), layers, len(token_ids))
    model.about, model.own_embedding = about, published is not None
    model.first_layer = MIDLAYER if any(name.startswith(MIDLAYER) for name in tensors) else FIRST
    named = {
        name if name.startswith("lm_head") else PREFIX + name.replace(MIDLAYER, FIRST): tensor
        for name, tensor in tensors.items()
    }
    cast = {name: tensor.to(embedding.dtype) for name, tensor in named.items()}
    fill(model, {**cast, EMBEDDING: embedding}, folder)
    # rotary tables are not in the checkpoint, so they are computed
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.to(embedding.device).eval(), token_ids


class Eagle3Decoder(FusedDecoder):
    """The layers with a cache, for inference."""

    def __init__(self, model: PreTrainedModel, context_length: int, embedding: Tensor) -> None:
        super().__init__(model, context_length, embedding)
        config: Any = model.config
        body: Any = model.base_model
        self.norm_before_residual = config.norm_before_residual
        self.norm_output = config.norm_output
        self.hidden_norm = self._scale(body.layers[0].hidden_norm)
        self.input_norm, self.fc_norm = body.input_norm, body.fc_norm
        self.fc = Product.of(body.fc)

    def fused(self, states: Tensor) -> Tensor:
        """The states of the first layer's inputs [1, T, H], from the target's [1, T, L * H]."""
        return self.fc(normed_states(self, states))

    @torch.inference_mode()
    def read(
        self, tokens: Tensor, hidden: Tensor, start: int, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """The head's input and the draft's own state for the next input; both [1, T, H].

        tokens, hidden: the first layer's inputs [1, T], [1, T, H]. start: the number of the first
        input.
        """
        embedded = self._norm(F.embedding(tokens, self.embedding), self.layers[0].input_norm)
        normed = self._norm(hidden, self.hidden_norm)
        x = normed if self.norm_before_residual else hidden
        for number, (layer, kind) in enumerate(zip(self.layers, self.kinds, strict=True)):
            if number == 0:
                h = torch.cat([embedded, normed], -1)
            else:
                h = self._norm(x, layer.input_norm)
            step = self._step(1, tokens.shape[1], start, cache.slots, kind)
            x = self._through_layer(layer, h, x, cache.keys[number], cache.values[number], step)
        y = self._norm(x, self.final_norm)
        return y, y if self.norm_output else x


@dataclass(kw_only=True)
class Eagle3Drafter(CausalLMDrafter):
    decoder: Eagle3Decoder

    def fused(self, states: HiddenStates) -> Tensor:
        """The states of the inputs, from the target's of each layer; [1, T, H] each."""
        return self.decoder.fused(self.side_by_side(states, self.decoder.dtype))

    def from_start(self, tokens: Tensor, hidden: Tensor, cache: KVCache | None = None) -> Tensor:
        """The head's input [1, T, H] for the first T inputs of a text (`decoder.read`)."""
        if tokens.shape[1] == 0:  # a text of one token gives no input
            return hidden
        cache = cache or self.decoder.new_cache(1, tokens.shape[1])
        pieces = zip(tokens.split(PIECE, 1), hidden.split(PIECE, 1), strict=True)
        read = [
            self.decoder.read(piece, states, number * PIECE, cache)[0]
            for number, (piece, states) in enumerate(pieces)
        ]
        return torch.cat(read, 1)

    def start(self, text: Text) -> Session:
        return Eagle3Session(self, text)

    @torch.inference_mode()
    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        decoder = self.decoder
        tokens = torch.tensor([[*ids, *text[:-1]][1:]], device=decoder.device)
        hidden = self.fused({k: states[k][:, :-1] for k in self.layers})  # type: ignore[index]
        # after a prompt of one token, no input predicts the first token of the text
        first = max(0, tokens.shape[1] - len(text))
        logits = decoder.head(self.from_start(tokens, hidden)[:, first:])[0]
        return logits, len(text) - len(logits)

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        decoder = self.decoder
        token = torch.ones((1, 1), dtype=torch.long, device=decoder.device)
        hidden = torch.ones(
            (1, 1, decoder.embedding.shape[1]), dtype=decoder.dtype, device=decoder.device
        )
        cache = decoder.new_cache(1, context_length + 1)
        return timed_choice(
            lambda: decoder.head(decoder.read(token, hidden, context_length, cache)[0]), sampling
        )


class Eagle3Session(TokenSession):
    """`new`, `states` [1, T, H]: tokens and states of the inputs not yet read.

    `hidden` [1, 1, H]: the draft's own state for the last input that was read.
    """

    drafter: Eagle3Drafter

    def __init__(self, drafter: Eagle3Drafter, text: Text) -> None:
        self.drafter, self.sampling, self.generator = drafter, text.sampling, text.generator
        self.text, self.slots = list(text.ids), text.slots
        self.cache = drafter.decoder.new_cache(1, self.slots)
        fused = drafter.fused(text.states)
        if len(self.text) > 2:
            tokens = torch.tensor([self.text[1:-1]], device=drafter.decoder.device)
            drafter.from_start(tokens, fused[:, :-1], self.cache)
        self.new, self.states = self.text[-1:], fused[:, -1:]
        self.hidden = self.states

    def logits(self, depth: int, before: Tensor | None) -> Tensor:
        decoder = self.drafter.decoder
        if before is None:
            tokens = torch.tensor([self.new], device=decoder.device)
            hidden, start = self.states, len(self.text) - 1 - len(self.new)
            self.new, self.states = [], self.states[:, :0]
        else:
            tokens = self.drafter.to_own_ids(before)[None]
            hidden, start = self.hidden, len(self.text) + depth - 2
        y, hidden = decoder.read(tokens, hidden, start, self.cache)
        self.hidden = hidden[:, -1:]
        return decoder.head(y[:, -1:])[:, -1]

    def commit(self, emitted: list[int], accepted: int, states: HiddenStates) -> None:
        self.text += emitted
        self.new += emitted
        fused = self.drafter.fused(states)[:, : len(emitted)]
        self.states = torch.cat([self.states, fused], 1)
