"""A draft without layers: one linear step a token, from the target's hidden states on.

After the recurrent drafter of arXiv 2403.09919, its step linear. With e a token's normalised
embedding in the target, s the target's states before the newest token (a few layers, each divided
by its usual size), and y the state that the head reads:

    first token of a draft    y = A [e, s], e of the newest token
    each further one          y = C [e, y'], e and y' of the token drafted before

Legend: B rows, T positions, N of them, L layers read, H hidden size, K rows of the head, V the
target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from eval.decoding.drafters.base import timed_choice
from eval.decoding.drafters.features import read_layers
from eval.decoding.drafters.from_states import StateDrafter
from eval.decoding.drafters.in_turn import Logits, on_target_ids
from eval.decoding.drafters.pruned import EMBEDDING, check_compact, read_token_ids
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.decoding.weights import INT8_TERMS, Product, linear

EPS = 1e-6  # of the embeddings' norm


class RecurrentConfig(PreTrainedConfig):
    """states_read: L. head_rows: K."""

    model_type = "recurrent_draft"
    hidden_size: int = 4096
    vocab_size: int = 32000
    states_read: int = 4
    head_rows: int = 32000


class RecurrentModel(PreTrainedModel):
    """A, C, the head, and the sizes [L] that states are divided by."""

    config: RecurrentConfig
    config_class = RecurrentConfig
    _supports_sdpa = True  # it has no attention, so any implementation is right
    sizes: Tensor

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.first = nn.Linear((1 + config.states_read) * size, size, bias=False)
        self.further = nn.Linear(2 * size, size, bias=False)
        self.lm_head = nn.Linear(size, config.head_rows, bias=False)
        self.register_buffer("sizes", torch.ones(config.states_read))
        self.post_init()

    def after_target(self, newest: Tensor, states: Tensor) -> Tensor:
        """y [N, H] of the newest tokens [N] and the target's states before them [N, L, H]."""
        y: Tensor = self.first(self.beside(newest, (states / self.sizes[:, None]).flatten(1)))
        return y

    def after_draft(self, drafted: Tensor, before: Tensor) -> Tensor:
        """y [N, H] of the tokens [N] that were drafted from `before` [N, H]."""
        y: Tensor = self.further(self.beside(drafted, before))
        return y

    def beside(self, tokens: Tensor, read: Tensor) -> Tensor:
        """[e, read] [N, ...]."""
        return torch.cat([normalised(self.model.embed_tokens(tokens)), read], 1)


def normalised(embedded: Tensor) -> Tensor:
    return F.rms_norm(embedded, embedded.shape[-1:], eps=EPS)


def load_recurrent(folder: Path, embedding: Tensor) -> tuple[RecurrentModel, Tensor | None]:
    """As `load_compact`."""
    check_compact(folder, embedding)
    tensors = load_file(folder / "model.safetensors", device=str(embedding.device))
    token_ids = read_token_ids(folder, tensors)
    with torch.device("meta"):
        model = RecurrentModel(RecurrentConfig.from_pretrained(folder))
    model.load_state_dict({**tensors, EMBEDDING: embedding}, assign=True)
    return model.eval(), token_ids


@dataclass(kw_only=True)
class RecurrentDrafter(StateDrafter):
    """first, further: A and C; A reads states as they are."""

    first: Product
    further: Product

    def beside(self, tokens: Tensor, read: Tensor) -> Tensor:
        """[e, read] [B, T, ...] of tokens [B, T]."""
        return torch.cat([normalised(F.embedding(tokens, self.embedding)), read], -1)

    def first_logits(self, states: Tensor, newest: Tensor) -> Tensor:
        return self.head(self.first(self.beside(newest, states)))

    def block_logits(self, states: Tensor, newest: Tensor) -> Logits:
        y = self.first(self.beside(newest[:, None], states))

        def logits(depth: int, before: Tensor | None) -> Tensor:
            nonlocal y
            if depth > 0:
                assert before is not None
                y = self.further(self.beside(self.to_target_ids(before)[:, None], y))
            return self.head(y)[:, -1]

        return logits

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        """A further token."""
        before = self.embedding.new_zeros((1, 1, self.embedding.shape[1]))
        token = torch.zeros((1, 1), dtype=torch.long, device=self.embedding.device)
        return timed_choice(
            lambda: self.head(self.further(self.beside(token, before)))[:, -1], sampling
        )

    @torch.inference_mode()
    def probe(self, ids: list[int]) -> Tensor:
        tokens = torch.tensor([ids], device=self.embedding.device)
        width = self.embedding.shape[1] * len(self.layers)
        y = self.first(self.beside(tokens, self.embedding.new_ones((1, len(ids), width))))
        return self.head(torch.cat([y, self.further(self.beside(tokens, y))]))


def recurrent_drafter(
    model: RecurrentModel, token_ids: Tensor | None, target: Target, layers: tuple[int, ...]
) -> RecurrentDrafter:
    """That draft in the target's dtype; on a CPU in eight bits, as `pruned_drafter`."""
    embedding = target.decoder.embedding
    size = model.config.hidden_size
    int8 = embedding.device.type == "cpu" and size % INT8_TERMS == 0
    usual = torch.cat([torch.ones(1).to(model.sizes), model.sizes])
    scaled = model.first.weight.detach().view(size, -1, size) / usual[:, None]
    first, further, head = (
        Product.of(linear(weight.to(embedding)), int8=int8)
        for weight in (scaled.flatten(1), model.further.weight, model.lm_head.weight)
    )
    return RecurrentDrafter(
        **on_target_ids(token_ids, embedding),
        bytes=sum(part.nbytes for part in (first, further, head)),
        layers=layers,
        embedding=embedding,
        first=first,
        further=further,
        head=head,
        longest=target.decoder.context_length,
    )


def load(folder: Path, target: Target, strategy: str) -> RecurrentDrafter:
    """The draft in `folder`. Raises ValueError where it was made for another target."""
    layers = read_layers(folder, target)
    model, token_ids = load_recurrent(folder, target.decoder.embedding)
    return recurrent_drafter(model, token_ids, target, layers)
