"""EAGLE-3: one transformer layer that reads the target's hidden states (arXiv 2503.01840).

For each token but the first, the layer's attention reads its embedding beside a state of H numbers:
for what the target has read, its own states one token earlier, fused (`fc`); for a token that was
just drafted, what the layer itself made of the token before. So a pair is a token and the states
before it; pair i belongs to token i + 1.

A folder holds the checkpoint as vLLM and speculators load it, or in the layout of EAGLE's own code
where it came so, and compact.json where draftsmith made it. Legend: B rows, T pairs, L layers read,
H hidden size, K entries of the head, V the target's vocabulary.
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

from align.sources import read_json
from eval.decoding.drafters.causal_lm import CausalLMDrafter, TokenSession
from eval.decoding.drafters.compact import (
    check_compact,
    fill,
    read_token_ids,
    refuse_other_target,
    weights_of,
)
from eval.decoding.drafters.drafter import Session, Text, on_target_ids, timed_choice
from eval.decoding.drafters.formats import DraftFormat
from eval.decoding.forward import PIECE, HiddenStates, KVCache
from eval.decoding.fused import FusedDecoder
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

EMBEDDING, PREFIX = "model.embed_tokens.weight", "model."
LAYERS = "eagle_aux_hidden_state_layer_ids"  # in config.json: the target's states that are read
MIDLAYER = "midlayer."  # the layer's name in the layout of EAGLE's own code


class Eagle3(DraftFormat):
    def head_rows(self, config: Mapping[str, Any]) -> int | None:
        if config.get("speculators_model_type") != "eagle3" and not in_own_layout(config):
            return None
        text = config.get("transformer_layer_config", config)
        return int(config.get("draft_vocab_size") or text["vocab_size"])

    def check_config(self, folder: Path, target: PreTrainedConfig) -> None:
        config = read_json(folder / "config.json")
        refuse_unknown_parts(folder, config)
        shape = config.get("transformer_layer_config", config)
        refuse_other_target(folder, shape, target, ("hidden_size", "vocab_size"))

    def load(self, folder: Path, target: Target) -> Eagle3Drafter:
        text = target.model.config.get_text_config()
        model, token_ids = load_eagle3(folder, target.decoder.embedding, text)
        layers, depth = model.target_layers, text.num_hidden_layers
        if max(layers) > depth:
            raise ValueError(
                f"{folder} reads the hidden states of layers {list(layers)}, but this target has "
                f"{depth} layers; use the target that the draft was made for."
            )
        return self.drafter(model, token_ids, target)

    def drafter(self, model: Any, token_ids: Tensor | None, target: Target) -> Eagle3Drafter:
        """The model as it drafts for that target; on a CPU in eight bits."""
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
    """The target's hidden states that are read, numbered as in forward.py.

    They are those that a published draft's config.json names, else a low, a middle and a high one,
    as in vLLM. target: the target's config.
    """
    about = published or {}
    if named := (about.get("eagle_config") or about).get(LAYERS) or about.get(LAYERS):
        return tuple(named)
    depth = target["num_hidden_layers"]
    return tuple(sorted({min(2, depth - 1), depth // 2, max(depth - 3, depth // 2)}))


def in_own_layout(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE-3 in the layout of its authors' code."""
    return any("Eagle3" in name for name in config.get("architectures") or ()) and (
        "speculators_model_type" not in config
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


def build_eagle3(config: LlamaConfig, layers: Sequence[int], rows: int) -> LlamaForCausalLM:
    """The draft without weights: a Llama whose one layer reads pairs, with `fc` and `hidden_norm`.

    layers: the target's states that it reads. rows: of its head.
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
    model._no_split_modules = []  # its layer is read in parts, so it is no unit to shard on its own
    built: LlamaForCausalLM = model
    return built


def load_eagle3(
    folder: Path, embedding: Tensor, target: PreTrainedConfig | None = None
) -> tuple[Any, Tensor]:
    """The model of a folder on the target's own embedding [V, H], and the target ids [K] of its
    head.

    target: the target's config, which a published draft is checked by. Raises ValueError where the
    draft was made for another target, or cannot be computed here.
    """
    about, tensors = read_json(folder / "config.json"), weights_of(folder, str(embedding.device))
    published = tensors.pop("embed_tokens.weight", None)
    if target is None or (folder / "compact.json").is_file():
        compact = check_compact(folder, embedding.to(tensors["lm_head.weight"].dtype))
        layers = compact["layers"]
    else:
        FORMAT.check_config(folder, target)
        layers = target_layers(target.to_dict(), about)
        if published is not None and not torch.equal(published.to(embedding.dtype), embedding):
            raise ValueError(
                f"{folder} has an embedding of its own, which is not this target's; name the "
                "target that it was made for, or measure it in vLLM (eval.run --engine vllm)."
            )
    config: Any = LlamaConfig(**about.get("transformer_layer_config", about))
    config.norm_before_residual = about.get("norm_before_residual", "speculators_version" in about)
    config.as_eagle = in_own_layout(about)
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


class Eagle3Decoder(FusedDecoder):
    """The layer over its cache, for inference; on a CPU in eight bits."""

    def __init__(self, model: PreTrainedModel, context_length: int, embedding: Tensor) -> None:
        # a target in fp32 is there to be compared with, and so is its draft
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
        """What the head reads, and the state for the next pair [1, T, H] each.

        tokens: [1, T]. hidden: their states [1, T, H]. start: the number of the first pair.
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

    def from_start(self, tokens: Tensor, hidden: Tensor, cache: KVCache | None = None) -> Tensor:
        """What the head reads of a text's first pairs, as of `read`."""
        if tokens.shape[1] == 0:  # a text of one token has no pair
            return hidden
        cache = cache or self.new_cache(1, tokens.shape[1])
        pieces = zip(tokens.split(PIECE, 1), hidden.split(PIECE, 1), strict=True)
        read = [
            self.read(piece, states, number * PIECE, cache)[0]
            for number, (piece, states) in enumerate(pieces)
        ]
        return torch.cat(read, 1)


@dataclass(kw_only=True)
class Eagle3Drafter(CausalLMDrafter):
    decoder: Eagle3Decoder

    def fused(self, states: HiddenStates) -> Tensor:
        """The states it reads [1, T, H], of the target's [1, T, H] a layer."""
        return self.decoder.fc(self.side_by_side(states, self.decoder.dtype))

    def start(self, text: Text) -> Session:
        return Eagle3Session(self, text)

    @torch.inference_mode()
    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        decoder = self.decoder
        tokens = torch.tensor([[*ids, *text[:-1]][1:]], device=decoder.device)
        hidden = self.fused({k: states[k][:, :-1] for k in self.layers})  # type: ignore[index]
        # of a prompt of one token there is no pair before the first token of the text
        first = max(0, tokens.shape[1] - len(text))
        logits = decoder.head(decoder.from_start(tokens, hidden)[:, first:])[0]
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
    """`new`: the tokens since it last read. `states` [1, T, H]: the target's before each of them.

    `hidden` [1, 1, H]: what the layer itself made of the token before the one that is drafted.
    """

    drafter: Eagle3Drafter

    def __init__(self, drafter: Eagle3Drafter, text: Text) -> None:
        self.drafter, self.sampling, self.generator = drafter, text.sampling, text.generator
        self.text, self.slots = list(text.ids), text.slots
        self.cache = drafter.decoder.new_cache(1, self.slots)
        fused = drafter.fused(text.states)
        if len(self.text) > 2:
            tokens = torch.tensor([self.text[1:-1]], device=drafter.decoder.device)
            drafter.decoder.from_start(tokens, fused[:, :-1], self.cache)
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
