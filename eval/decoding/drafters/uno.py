"""Uno: the target drafts for itself, by a LoRA that only noise reads (arXiv 2609.04010).

A speculation step has two passes of the target. The first reads the newest token and, behind it,
uniformly random tokens. The newest token is computed by the target's own weights, so that the first
token of a draft is the target's own choice and its keys and values stay valid; the random tokens
are computed by the LoRA, too, and draft the tokens after it. The second pass is the verification,
which overwrites the keys and values of the random tokens. So one cache is enough.

The folder is PEFT's, as SGLang loads it (0.5.23, `--uno-lora-path`), with compact.json and the
target's config.json, in which `uno_tokens` is the longest draft. Legend: B rows, T positions, R
output tokens, V the target's vocabulary, I inputs and O outputs of a matrix, A rank of an adapter.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from align.errors import UserError
from align.files import read_json
from eval.decoding.drafters.compact import check_compact, refuse_other_target, weights_of
from eval.decoding.drafters.drafter import (
    HeadDrafter,
    Proposal,
    Session,
    Text,
    no_draft,
    on_target_ids,
    timed_step,
)
from eval.decoding.drafters.formats import DraftFormat
from eval.decoding.forward import Decoder, HiddenStates, in_pieces
from eval.decoding.fused import FusedDecoder
from eval.decoding.graphs import GraphedDecoder
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.decoding.weights import Product

TOKENS = "uno_tokens"  # key of config.json
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model.model.layers"  # of the tensors' names
# The adapted products by the layer's field in fused.py; products that are fused there have several
PRODUCTS = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
ROWS = 8  # drafts of a text that are computed together


class Uno(DraftFormat):
    def head_size(self, config: Mapping[str, Any]) -> int | None:
        return int(config["vocab_size"]) if TOKENS in config else None

    def longest(self, config: Mapping[str, Any]) -> int | None:
        return config.get(TOKENS)

    def check_config(self, folder: Path, target: PreTrainedConfig) -> None:
        refuse_other_target(folder, read_json(folder / "config.json"), target)

    def load(self, folder: Path, target: Target) -> UnoDrafter:
        adapter = read_adapter(folder, target.decoder.embedding)
        return uno_drafter(*adapter, read_json(folder / "config.json")[TOKENS], target.decoder)


FORMAT = Uno()


def read_adapter(folder: Path, embedding: Tensor) -> tuple[dict[str, Tensor], float]:
    """The adapter's tensors by name, and the factor on their product.

    embedding: the target's [V, H]. Raises UserError if the draft was made for another target.
    """
    about, tensors = read_json(folder / "adapter_config.json"), weights_of(folder, "cpu")
    check_compact(folder, embedding, next(iter(tensors.values())).dtype)
    return tensors, about["lora_alpha"] / about["r"]


def uno_drafter(
    tensors: Mapping[str, Tensor], scale: float, most: int, target: Decoder
) -> UnoDrafter:
    """The drafter of an adapter (`read_adapter`) for drafts of up to `most` tokens."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randint(len(target.embedding), (target.context_length,), generator=generator)
    return UnoDrafter(
        **on_target_ids(None, target.embedding, FORMAT.name),
        bytes=sum(tensor.nbytes for tensor in tensors.values()),
        own_tokens=1,
        most=most,
        target=target,
        decoder=adapted(target, tensors, scale),
        noise=noise.to(target.device),
    )


class Adapted(NamedTuple):
    """A product of the target's, to which the adapter adds at all positions but the first.

    down: [A, I]. up: [O, A], with the adapter's scale.
    """

    base: Product
    down: Tensor
    up: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        y = self.base(x)
        y[:, 1:] += x[:, 1:] @ self.down.T @ self.up.T
        return y


def adapted(base: Decoder, tensors: Mapping[str, Tensor], scale: float) -> Decoder:
    """A decoder on the target's weights that adds the adapter at all positions but the first.

    Raises UserError for a target without the fused forward.
    """
    fused = base.fused if isinstance(base, GraphedDecoder) else base
    if not isinstance(fused, FusedDecoder):
        raise UserError(
            "Uno drafts by the fused forward alone, and this target has another one "
            "(docs/drafters.md#families); use another drafter than uno."
        )
    decoder = copy.copy(fused)
    decoder.layers = []
    for number, layer in enumerate(fused.layers):
        fields: dict[str, Any] = {}
        for field, names in PRODUCTS.items():
            product: Product = getattr(layer, field)
            places = [f"{PREFIX}.{number}.{name}.lora_" for name in names]
            down = torch.cat([tensors[f"{place}A.weight"] for place in places])
            up = torch.block_diag(*(scale * tensors[f"{place}B.weight"] for place in places))
            fields[field] = Adapted(product, down.to(product.weight), up.to(product.weight))
        decoder.layers.append(layer._replace(**fields))
    return GraphedDecoder(decoder, base.record) if isinstance(base, GraphedDecoder) else decoder


@dataclass(kw_only=True)
class UnoDrafter(HeadDrafter):
    """decoder: the target with the adapter (`adapted`); it works on caches of `target`.

    noise: the random token of each position of a text [context length]. Engines draw them anew at
    each step; here they are the same in each run, so that results can be repeated.
    """

    target: Decoder
    decoder: Decoder
    noise: Tensor

    def start(self, text: Text) -> Session:
        return UnoSession(self, text)

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        return self.draft_at_once(context_length, sampling, 1)

    def draft_at_once(
        self, context_length: int, sampling: Sampling, count: int
    ) -> Callable[[], None]:
        cache = self.target.new_cache(1, context_length + count)
        return timed_step(self.decoder, cache, count, context_length, sampling)

    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        """At the random token before each token: the newest token is the one before that."""
        first = max(0, 2 - len(ids))
        length = len(ids) + len(text) - 2  # tokens of the longest text that is drafted for
        count = len(text) - first
        if count < 1:
            return self.target.embedding.new_zeros(0, self.vocab_size), len(text)
        tokens = torch.tensor([*ids, *text], device=self.noise.device)
        whole = self.target.new_cache(1, length)
        list(in_pieces(self.target, tokens[None, :length], 0, whole))
        cache = self.target.new_cache(ROWS, length + 1)
        for row in range(ROWS):
            cache.copy_row(row, whole, 0, length)
        logits = []
        # from the end of the text, because a row's random token makes later slots invalid
        for last in range(length - 1, length - 1 - count, -ROWS):
            newest = (last - torch.arange(ROWS, device=tokens.device)).clamp_min(0)
            read = torch.stack([tokens[newest], self.noise[newest + 1]], 1)
            logits.append(self.decoder.forward(read, newest, cache, last_only=True)[:, 0])
        return torch.cat(logits)[:count].flip(0), first


class UnoSession(Session):
    """`length`: tokens of the text; the target's cache has all but the newest."""

    def __init__(self, drafter: UnoDrafter, text: Text) -> None:
        self.drafter, self.sampling, self.generator = drafter, text.sampling, text.generator
        assert text.cache is not None
        self.cache, self.length, self.newest = text.cache, len(text.ids), text.ids[-1]

    def propose(self, count: int) -> Proposal:
        drafter = self.drafter
        count = min(count, drafter.most or count)
        if count < 1:
            return no_draft(drafter.noise.device)
        start = self.length - 1
        read = torch.cat(
            [drafter.noise.new_tensor([self.newest]), drafter.noise[start + 1 :][: count - 1]]
        )
        scores = drafter.decoder.forward(read[None], start, self.cache)
        return drafter.in_turn(
            lambda depth, _: scores[:, depth], count, self.sampling, self.generator
        )

    def commit(self, emitted: list[int], accepted: int, states: HiddenStates) -> None:
        self.length += len(emitted)
        self.newest = emitted[-1]
