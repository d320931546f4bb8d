"""EAGLE-3: one transformer layer that reads the target's hidden states (arXiv 2503.01840).

For each token but the first, the layer's attention reads its embedding beside a state of H numbers:
for what the target has read, its own states one token earlier, fused (`fc`); for a token that was
just drafted, what the layer itself made of the token before. So a pair is a token and the states
before it; pair i belongs to token i + 1. A folder holds the checkpoint as vLLM and speculators load
it, and compact.json. Legend: B rows, T pairs, L layers read, H hidden size, K rows of the head, S
slots.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig, PreTrainedModel

from align.sources import read_json
from eval.decoding.drafters.base import Proposal, Session, Texts, timed_choice
from eval.decoding.drafters.checkpoint import CheckpointDrafter, TokenSession
from eval.decoding.drafters.features import read_layers
from eval.decoding.drafters.in_turn import on_target_ids
from eval.decoding.drafters.pruned import check_compact, read_token_ids, write_about
from eval.decoding.forward import HiddenStates, KVCache, causal_bias
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.decoding.weights import INT8_TERMS, Product

EMBEDDING, PREFIX = "model.embed_tokens.weight", "model."
SPECULATORS = "0.3.0"  # the version of its format


def layer_config(target: PreTrainedConfig) -> LlamaConfig:
    """A Llama of one layer in the target's shape."""
    kept = (
        *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "rms_norm_eps", "rope_parameters", "max_position_embeddings"),
    )
    heads: Any = target
    return LlamaConfig(
        **{key: getattr(target, key) for key in kept},
        head_dim=getattr(target, "head_dim", None)
        or heads.hidden_size // heads.num_attention_heads,
        num_hidden_layers=1,
        tie_word_embeddings=False,
    )


def build_eagle3(config: LlamaConfig, layers: int, rows: int) -> LlamaForCausalLM:
    """The draft without weights: a Llama whose one layer reads pairs, with `fc` and `hidden_norm`.

    layers: of the target it reads. rows: of its head.
    """
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        layer: Any = model.model.layers[0]
        size = config.hidden_size
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = layer.self_attn.get_submodule(name)
            setattr(layer.self_attn, name, nn.Linear(2 * size, narrow.out_features, bias=False))
        layer.hidden_norm = type(layer.input_layernorm)(size, config.rms_norm_eps)
        model.model.fc = nn.Linear(layers * size, size, bias=False)
        model.lm_head = nn.Linear(size, rows, bias=False)
    return model


def save_eagle3(
    folder: Path,
    model: PreTrainedModel,
    token_ids: Tensor | None,
    embedding: Tensor,
    layers: Sequence[int],
    target: str,
) -> None:
    """Write the checkpoint into a folder that is there.

    embedding: the target's, of which only the hash is kept. layers: the target's states that it
    reads. target: its name, for speculators.
    """
    config: Any = model.config
    tensors = {
        name.removeprefix(PREFIX): weight.contiguous()
        for name, weight in model.state_dict().items()
        if name != EMBEDDING
    }
    rows = len(tensors["lm_head.weight"])
    ids = torch.arange(rows) if token_ids is None else token_ids.cpu()
    tensors["d2t"] = ids - torch.arange(rows)
    tensors["t2d"] = torch.zeros(len(embedding), dtype=torch.bool)
    tensors["t2d"][ids] = True
    about = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": SPECULATORS,
        "draft_vocab_size": rows,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "eagle_aux_hidden_state_layer_ids": list(layers),
        "transformer_layer_config": {**config.to_dict(), "architectures": ["LlamaForCausalLM"]},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": target, "architectures": ["LlamaForCausalLM"]},
        },
        "torch_dtype": str(embedding.dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(about, indent=2))
    write_about(folder, "eagle3", embedding, layers=list(layers))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_eagle3(folder: Path, embedding: Tensor) -> tuple[LlamaForCausalLM, Tensor]:
    """The model on the target's own embedding [V, H], and the target ids [K] of its head.

    Raises ValueError when it was made for another target.
    """
    tensors = load_file(folder / "model.safetensors", device=str(embedding.device))
    about = check_compact(folder, embedding.to(tensors["lm_head.weight"].dtype))
    config = LlamaConfig(**read_json(folder / "config.json")["transformer_layer_config"])
    token_ids = read_token_ids(folder, tensors)
    assert token_ids is not None
    model = build_eagle3(config, len(about["layers"]), len(token_ids))
    named = {
        name if name.startswith("lm_head") else PREFIX + name: tensor.to(embedding.dtype)
        for name, tensor in tensors.items()
    }
    model.load_state_dict({**named, EMBEDDING: embedding}, assign=True)
    # rotary tables are no parameters: build them for real
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(embedding.device)
    return model.eval(), token_ids


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
        x = torch.cat([embedded, F.rms_norm(hidden, (size,), norm_hidden, self.eps)], -1)
        qkv = self.qkv(x).view(rows, width, -1, self.head_size).transpose(1, 2)
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
        hidden = hidden + self.output(h.transpose(1, 2).reshape(rows, width, -1))
        gate, up = self.gate_up(F.rms_norm(hidden, (size,), norm_post, self.eps)).chunk(2, dim=-1)
        hidden = hidden + self.down(F.silu(gate) * up)
        return F.rms_norm(hidden, (size,), norm_end, self.eps), hidden

    def from_start(self, tokens: Tensor, hidden: Tensor, cache: KVCache | None = None) -> Tensor:
        """What the head reads of a text's first pairs, as of `forward`."""
        first = torch.zeros(1, dtype=torch.long, device=self.device)
        return self.forward(tokens, hidden, first, cache or self.new_cache(1, tokens.shape[1]))[0]


@dataclass(kw_only=True)
class Eagle3Drafter(CheckpointDrafter):
    alike: bool = False
    one_form: bool = True
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
        self.seen = [len(text) - 1 for text in self.texts]
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
        made = super().propose(count, stop_below)
        if made.tokens.shape[1]:
            self.new = [([], h[:0]) for _, h in self.new]
        return made

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        super().commit(emitted, accepted, states)
        self.seen = [len(text) - 1 for text in self.texts]  # what is new to it, `new` says
        fused = self.drafter.fused(states)
        self.new = [
            ([*tokens, *new], torch.cat([h, fused[row, : len(new)]]))
            for row, ((tokens, h), new) in enumerate(zip(self.new, emitted, strict=True))
        ]

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.new = [self.new[row] for row in rows]


def eagle3_drafter(
    model: PreTrainedModel, token_ids: Tensor, target: Target, layers: tuple[int, ...]
) -> Eagle3Drafter:
    """That draft over its target's embedding, on a CPU in eight bits."""
    embedding = target.decoder.embedding
    decoder = Eagle3Decoder(model, target.decoder.context_length, embedding)
    about = on_target_ids(token_ids, embedding) | {"form": "eagle3"}
    return Eagle3Drafter(**about, bytes=decoder.own_bytes(), decoder=decoder, layers=layers)


def load(folder: Path, target: Target, strategy: str) -> Eagle3Drafter:
    """The draft in `folder`. Raises ValueError when it was made for another target."""
    layers = read_layers(folder, target)
    return eagle3_drafter(*load_eagle3(folder, target.decoder.embedding), target, layers)
