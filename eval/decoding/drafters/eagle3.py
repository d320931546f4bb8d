"""EAGLE-3: one transformer layer that reads the target's hidden states (arXiv 2503.01840).

For each token but the first, the layer's attention reads its embedding beside a state of H numbers:
for what the target has read, its own states one token earlier, fused (`fc`); for a token that was
just drafted, what the layer itself made of the token before. So a pair is a token and the states
before it; pair i belongs to token i + 1.

A folder holds the checkpoint as vLLM and speculators load it, or in the layout of EAGLE's own code
where it came so, and compact.json where draftsmith made it. Legend: B rows, T pairs, L layers read,
H hidden size, K rows of the head, V the target's vocabulary.
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
from eval.decoding.drafters.drafter import Proposal, Session, Texts, on_target_ids, timed_choice
from eval.decoding.drafters.formats import DraftFormat
from eval.decoding.forward import PIECE, HiddenStates, KVCache, causal_bias
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.decoding.weights import INT8_TERMS, Product

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
        self.fc = Product.of(body.fc, int8=int8)
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
