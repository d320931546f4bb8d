"""A pruned draft that reads what the target has just computed.

The draft's own first layers read the text alone; at their end the target's hidden states come in.
The newest token has not been read by the target yet, the one before it has, so with z the draft's
normalised state at the newest token, s the target's states one token earlier (a few layers, each
divided by its usual size), and y the state that the head reads:

    first token of a draft    y = A1 z + B s
    each further one          y = A0 z + D y', y' of the token before: its own state stands in

A0 z alone is the draft without any states: its full form. The cache of keys and values depends on
the text alone. Legend: B rows, T positions, N of them, L layers read, H hidden size, K rows of the
head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from align.sources import read_json
from eval.decoding.build import build_decoder
from eval.decoding.drafters.base import Session, Texts, timed_step
from eval.decoding.drafters.checkpoint import (
    CheckpointDrafter,
    TokenSession,
    teacher_forced_logits,
)
from eval.decoding.drafters.in_turn import on_target_ids
from eval.decoding.drafters.pruned import load_compact
from eval.decoding.forward import HiddenStates
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.decoding.weights import INT8_TERMS, Product, linear


class Fusion(nn.Module):
    """The maps A1, B, A0, D, and the sizes [L] that states are divided by."""

    sizes: Tensor

    def __init__(self, size: int, layers: int) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.ones(layers))
        self.given = nn.Linear(size, size, bias=False)
        self.states = nn.Linear(layers * size, size, bias=False)
        self.alone = nn.Linear(size, size, bias=False)
        self.own = nn.Linear(size, size, bias=False)

    def first(self, z: Tensor, states: Tensor) -> Tensor:
        """y [N, H] of z [N, H] and the target's states one token earlier [N, L, H]."""
        y: Tensor = self.given(z) + self.states((states / self.sizes[:, None]).flatten(1))
        return y

    def further(self, z: Tensor, before: Tensor) -> Tensor:
        """y [N, H] of z and the draft's own y one token earlier [N, H]."""
        y: Tensor = self.alone(z) + self.own(before)
        return y


@dataclass(kw_only=True)
class FeaturesDrafter(CheckpointDrafter):
    """Its decoder gives A0 z and A1 z side by side [B, T, 2H].

    head [K, H], states_map [H, L * H], own_map [H, H]: what follows.
    """

    alike: bool = False
    head: Product
    states_map: Product
    own_map: Product

    def first(self, both: Tensor, states: HiddenStates) -> Tensor:
        """y [B, T, H] from what the decoder gives and the target's states one token earlier."""
        known = self.side_by_side(states, self.decoder.dtype)
        return both.chunk(2, -1)[1] + self.states_map(known)

    def further(self, both: Tensor, before: Tensor) -> Tensor:
        """y [B, T, H] from what the decoder gives and the draft's own y one token earlier."""
        return both.chunk(2, -1)[0] + self.own_map(before)

    def start(self, texts: Texts) -> Session:
        return FeaturesSession(self, texts)

    @torch.inference_mode()
    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        both = teacher_forced_logits(self.decoder, [*ids, *text[:-1]], len(ids))
        # a zero where there is no token before: of a prompt of one token the first
        earlier = {k: F.pad(states[k], (0, 0, 1, 0)) for k in self.layers}  # type: ignore[arg-type]
        at = slice(len(ids) - 1, len(ids) - 1 + len(text))
        return self.head(self.first(both, {k: state[:, at] for k, state in earlier.items()})), 0

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        shape = (1, 1, self.own_map.weight[0].shape[0])
        before = torch.zeros(shape, dtype=self.decoder.dtype, device=self.decoder.device)
        return timed_step(
            self.decoder,
            1,
            context_length,
            sampling,
            lambda both: self.head(self.further(both, before)),
        )


class FeaturesSession(TokenSession):
    """`states`: the target's at the token before the newest [B, 1, H] a layer; `y`: its own."""

    drafter: FeaturesDrafter

    def __init__(self, drafter: FeaturesDrafter, texts: Texts) -> None:
        super().__init__(drafter, texts)
        self.states: HiddenStates = {
            k: torch.cat([one[k][:, -1:] for one in texts.states])  # type: ignore[index]
            for k in drafter.layers
        }

    def logits(self, step: Tensor, start: int | Tensor, drafted: int) -> Tensor:
        both = super().logits(step, start, drafted)[:, None]
        if drafted == 0:
            self.y = self.drafter.first(both, self.states)
        else:
            self.y = self.drafter.further(both, self.y)
        return self.drafter.head(self.y)[:, -1]

    def commit(self, emitted: list[list[int]], accepted: list[int], states: HiddenStates) -> None:
        super().commit(emitted, accepted, states)
        # of all that is emitted the target has read everything but the last
        rows = torch.arange(len(emitted))
        read = torch.tensor([len(new) - 1 for new in emitted])
        self.states = {k: states[k][rows, read][:, None] for k in self.drafter.layers}  # type: ignore[index]

    def keep(self, rows: list[int]) -> None:
        super().keep(rows)
        self.states = {k: state[rows] for k, state in self.states.items()}  # type: ignore[index]


def features_drafter(
    model: PreTrainedModel, token_ids: Tensor | None, target: Target, layers: tuple[int, ...]
) -> FeaturesDrafter:
    """That draft over its target's embedding, on a CPU in eight bits.

    model: a pruned draft with a `fusion`. Its head is taken off: the decoder ends in A0 and A1.
    """
    embedding = target.decoder.embedding
    fusion: Any = model.get_submodule("fusion")
    size = embedding.shape[1]
    int8 = embedding.device.type == "cpu" and size % INT8_TERMS == 0
    head = Product.of(model.get_submodule("lm_head"), int8=int8)  # type: ignore[arg-type]
    fusion.states.weight.data.view(size, -1, size).div_(fusion.sizes[:, None])
    maps = [Product.of(part, int8=int8) for part in (fusion.states, fusion.own)]
    model.set_output_embeddings(linear(torch.cat([fusion.alone.weight, fusion.given.weight])))
    decoder = build_decoder(model, target.decoder.context_length, embedding, int8=int8)
    return FeaturesDrafter(
        **on_target_ids(token_ids, embedding),
        bytes=decoder.own_bytes() + sum(product.nbytes for product in (head, *maps)),
        decoder=decoder,
        layers=layers,
        head=head,
        states_map=maps[0],
        own_map=maps[1],
    )


def hang_fusion(model: PreTrainedModel, layers: int) -> None:
    """Give a pruned draft a `fusion` for so many layers, without weights."""
    size: int = model.config.hidden_size
    with torch.device("meta"):
        model.fusion = Fusion(size, layers)


def load_features(folder: Path, embedding: Tensor) -> tuple[PreTrainedModel, Tensor | None]:
    """As `load_compact`, the fusion with it."""
    layers = read_json(folder / "compact.json")["layers"]
    return load_compact(folder, embedding, lambda model: hang_fusion(model, len(layers)))


def read_layers(folder: Path, target: Target) -> tuple[int, ...]:
    """The target's layers that a draft reads. Raises ValueError where the target lacks one."""
    layers: tuple[int, ...] = tuple(read_json(folder / "compact.json")["layers"])
    depth = target.model.config.get_text_config().num_hidden_layers
    if max(layers) > depth:
        raise ValueError(
            f"{folder} reads the hidden states of layers {list(layers)}, but this target has "
            f"{depth} layers; use the target that the draft was made for."
        )
    return layers


def load(folder: Path, target: Target, strategy: str) -> FeaturesDrafter:
    """The draft in `folder`. Raises ValueError where it reads layers that the target lacks."""
    layers = read_layers(folder, target)
    return features_drafter(*load_features(folder, target.decoder.embedding), target, layers)
