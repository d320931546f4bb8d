"""EAGLE-3: one transformer layer that reads the target's hidden states (arXiv 2503.01840).

Each input of the layer is the embedding of a token and a state [H] of the token before it. If the
target has read the token before, the state is the target's states there, fused by `fc`; otherwise
it is the layer's output for the input before. Input i belongs to token i + 1.

A folder holds the checkpoint in the layout of vLLM and speculators, or of EAGLE's code, and
compact.json if draftsmith made it. Legend: T inputs, H hidden size, K entries of the head, V the
target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from align.errors import UserError
from align.sources import read_json
from eval.decoding.drafters.causal_lm import CausalLMDrafter, TokenSession
from eval.decoding.drafters.compact import (
    check_compact,
    fill,
    read_token_ids,
    refuse_other_embedding,
    refuse_other_target,
    refuse_unknown_parts,
    weights_of,
)
from eval.decoding.drafters.drafter import Session, Text, on_target_ids, timed_choice
from eval.decoding.drafters.formats import DraftFormat
from eval.decoding.forward import PIECE, HiddenStates, KVCache
from eval.decoding.fused import FusedDecoder
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

EMBEDDING, PREFIX = "model.embed_tokens.weight", "model."
LAYERS = "eagle_aux_hidden_state_layer_ids"  # config.json's key for the target's states to read
MIDLAYER = "midlayer."  # the layer's name in the layout of EAGLE's own code


class Eagle3(DraftFormat):
    def head_size(self, config: Mapping[str, Any]) -> int | None:
        if config.get("speculators_model_type") != "eagle3" and not in_own_layout(config):
            return None
        text = config.get("transformer_layer_config", config)
        return int(config.get("draft_vocab_size") or text["vocab_size"])

    def check_config(self, folder: Path, target: PreTrainedConfig) -> None:
        about = read_json(folder / "config.json")
        shape, eagle = about.get("transformer_layer_config", about), about.get("eagle_config") or {}
        norm_before_fc = bool(eagle.get("norm_before_fc") or about.get("norm_before_fc"))
        parts = {
            "num_hidden_layers": (shape.get("num_hidden_layers", 1), 1),
            "model_type": (shape.get("model_type", "llama"), "llama"),
            "attention_bias": (bool(shape.get("attention_bias")), False),
            "norm_before_fc": (norm_before_fc, False),
            "fc_norm": (bool(about.get("fc_norm")), False),
            "norm_output": (bool(about.get("norm_output")), False),
            "use_aux_hidden_state": (eagle.get("use_aux_hidden_state", True), True),
        }
        refuse_unknown_parts(folder, "EAGLE-3", parts)
        refuse_other_target(folder, shape, target, ("hidden_size", "vocab_size"))

    def load(self, folder: Path, target: Target) -> Eagle3Drafter:
        text = target.model.config.get_text_config()
        model, token_ids = load_eagle3(folder, target.decoder.embedding, text)
        layers, depth = model.target_layers, text.num_hidden_layers
        if max(layers) > depth:
            raise UserError(
                f"{folder} reads the hidden states of layers {list(layers)}, but this target has "
                f"{depth} layers; use the target that the draft was made for."
            )
        return self.drafter(model, token_ids, target)

    def drafter(self, model: Any, token_ids: Tensor | None, target: Target) -> Eagle3Drafter:
        """The drafter of the model for that target; on a CPU in int8, unless the target is fp32."""
        embedding = target.decoder.embedding
        decoder = Eagle3Decoder(model, target.decoder.context_length, embedding)
        return Eagle3Drafter(
            **on_target_ids(token_ids, embedding) | {"form": "eagle3"},
            bytes=decoder.own_bytes(),
            decoder=decoder,
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
    if named := (about.get("eagle_config") or about).get(LAYERS) or about.get(LAYERS):
        return tuple(named)
    depth = target["num_hidden_layers"]
    return tuple(sorted({min(2, depth - 1), depth // 2, max(depth - 3, depth // 2)}))


def in_own_layout(config: Mapping[str, Any]) -> bool:
    """Whether a config.json belongs to an EAGLE-3 draft in the layout of EAGLE's code."""
    return any("Eagle3" in name for name in config.get("architectures") or ()) and (
        "speculators_model_type" not in config
    )


def build_eagle3(config: LlamaConfig, layers: Sequence[int], rows: int) -> LlamaForCausalLM:
    """The draft without weights: a Llama of one layer, with `fc` and `hidden_norm`.

    layers: numbers of the target's states that it reads. rows: entries of its head.
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
    model._no_split_modules = []  # parts of the layer are called alone, so it is not a shard unit
    built: LlamaForCausalLM = model
    return built


def load_eagle3(
    folder: Path, embedding: Tensor, target: PreTrainedConfig | None = None
) -> tuple[Any, Tensor]:
    """A folder's model on the target's embedding [V, H], and the target id of each head entry [K].

    target: the target's config, to check a published draft. Raises UserError if the draft was made
    for another target or cannot be computed here.
    """
    about, tensors = read_json(folder / "config.json"), weights_of(folder, str(embedding.device))
    published = tensors.pop("embed_tokens.weight", None)
    if target is None or (folder / "compact.json").is_file():
        compact = check_compact(folder, embedding.to(tensors["lm_head.weight"].dtype))
        layers = compact["layers"]
    else:
        FORMAT.check_config(folder, target)
        layers = target_layers(target.to_dict(), about)
        refuse_other_embedding(folder, published, embedding)
    config: Any = LlamaConfig(**about.get("transformer_layer_config", about))
    config.norm_before_residual = about.get("norm_before_residual", "speculators_version" in about)
    config.as_eagle = in_own_layout(about)
    token_ids = read_token_ids(folder, tensors)
    if token_ids is None:
        token_ids = torch.arange(len(tensors["lm_head.weight"]), device=embedding.device)
    model: Any = build_eagle3(config, layers, len(token_ids))
    named = {
        name if name.startswith("lm_head") else PREFIX + name.replace(MIDLAYER, "layers.0."): tensor
        for name, tensor in tensors.items()
    }
    cast = {name: tensor.to(embedding.dtype) for name, tensor in named.items()}
    fill(model, {**cast, EMBEDDING: embedding}, folder)
    # rotary tables are not in the checkpoint, so they are computed
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.to(embedding.device).eval(), token_ids


class Eagle3Decoder(FusedDecoder):
    """The layer with a cache, for inference; on a CPU in int8, unless the embedding is fp32."""

    def __init__(self, model: PreTrainedModel, context_length: int, embedding: Tensor) -> None:
        # a target in fp32 serves exact comparisons, so its draft is not rounded
        int8 = embedding.device.type == "cpu" and embedding.dtype != torch.float32
        super().__init__(model, context_length, embedding, int8)
        config: Any = model.config
        body: Any = model.base_model
        self.norm_before_residual = config.norm_before_residual
        self.hidden_norm = self._scale(body.layers[0].hidden_norm)
        self.fc = self.product(body.fc)

    def own_bytes(self) -> int:
        return super().own_bytes() + self.hidden_norm.nbytes + self.fc.nbytes

    @torch.inference_mode()
    def read(
        self, tokens: Tensor, hidden: Tensor, start: int, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """The head's input and the layer's output, which is the next input's state; both [1, T, H].

        tokens, hidden: the layer's inputs [1, T], [1, T, H]. start: the number of the first input.
        """
        (layer,), (kind,) = self.layers, self.kinds
        embedded = self._norm(F.embedding(tokens, self.embedding), layer.input_norm)
        normed = self._norm(hidden, self.hidden_norm)
        step = self._step(1, tokens.shape[1], start, cache.slots, kind)
        hidden = self._through_layer(
            layer,
            torch.cat([embedded, normed], -1),
            normed if self.norm_before_residual else hidden,
            *(cache.keys[0], cache.values[0], step),
        )
        return self._norm(hidden, self.final_norm), hidden


@dataclass(kw_only=True)
class Eagle3Drafter(CausalLMDrafter):
    decoder: Eagle3Decoder

    def fused(self, states: HiddenStates) -> Tensor:
        """The states of the layer's inputs, from the target's of each layer; [1, T, H] each."""
        return self.decoder.fc(self.side_by_side(states, self.decoder.dtype))

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

    `hidden` [1, 1, H]: the layer's output for the last input that was read.
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
