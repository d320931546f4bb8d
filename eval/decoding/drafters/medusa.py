"""Heads on the target's last hidden state (Medusa, arXiv 2401.10774).

The target has read all but the newest token. From its state before that one (after the final norm),
head d drafts the token d places after the newest: a residual block, then an output head that all
share. There is no cache of keys and values, and no model that reads the text: a head is a step. A
sequential head may add what the token before says (Hydra), at the first place the newest one.
A folder holds the checkpoint as vLLM loads it (its MedusaModel), compact.json, and what is ours:
vLLM passes a sequential head over. Legend: B rows, T positions, D heads, H hidden size, K rows of
the output head, V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from align.atomic import atomic_folder
from eval.decoding.drafters.base import timed_choice
from eval.decoding.drafters.from_states import StateDrafter
from eval.decoding.drafters.in_turn import Logits, SequentialHead, on_target_ids
from eval.decoding.drafters.pruned import check_compact, write_about
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.decoding.weights import INT8_TERMS, Product, linear


class MedusaConfig(PreTrainedConfig):
    """vLLM's keys, and the rank of a sequential head, 0 for none."""

    model_type = "medusa"
    hidden_size: int = 4096
    vocab_size: int = 32000
    num_heads: int = 4
    truncated_vocab_size: int = 32000
    num_hidden_layers: int = 1  # of a block
    original_lm_head: bool = True  # one output head for all
    medusa_fc_bias: bool = True
    sequential_rank: int = 0


class Block(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size)])

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.layers[0](x))


class MedusaModel(PreTrainedModel):
    """The heads. In training `lm_head` reads, beside a state, what the token before reads [K, H+r].

    sequential: as `read` of a SequentialHead; its rows are those of `lm_head`.
    """

    config: MedusaConfig
    config_class = MedusaConfig
    _supports_sdpa = True  # it has no attention, so any implementation is right

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        rows, size, rank = config.truncated_vocab_size, config.hidden_size, config.sequential_rank
        self.blocks = nn.ModuleList([Block(size) for _ in range(config.num_heads)])
        self.lm_head = nn.Linear(size + rank, rows, bias=False)
        if rank:
            self.sequential = nn.Embedding(rows + 1, rank, padding_idx=rows)
        self.post_init()

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """None: it reads states."""

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


def save_medusa(
    folder: Path, model: MedusaModel, token_ids: Tensor | None, embedding: Tensor
) -> None:
    """Write the checkpoint in the dtype of the target's `embedding`, of which the hash is kept."""
    tensors = {name: tensor.to(embedding.dtype) for name, tensor in model.state_dict().items()}
    size = model.config.hidden_size
    head = tensors.pop("lm_head.weight")
    tensors["lm_head.weight"] = head[:, :size].contiguous()
    if model.config.sequential_rank:
        tensors["sequential.read"] = tensors.pop("sequential.weight")
        tensors["sequential.write"] = head[:, size:].contiguous()
    if token_ids is not None:
        tensors["token_map"] = token_ids
    with atomic_folder(folder) as partial:
        model.config.architectures = ["MedusaModel"]
        model.config.save_pretrained(partial)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        write_about(partial, "medusa", embedding)


def load_medusa(folder: Path, embedding: Tensor) -> tuple[MedusaModel, Tensor | None]:
    """The model as it is trained, and the target id of each row of its head [K], None for all.

    Raises ValueError when it was made for another target.
    """
    config = MedusaConfig.from_pretrained(folder)
    tensors = load_file(folder / "model.safetensors", device=str(embedding.device))
    # the target's own numbers, in whatever dtype it is loaded
    check_compact(folder, embedding.to(tensors["lm_head.weight"].dtype))
    token_ids = tensors.pop("token_map", None)
    if config.sequential_rank:
        tensors["sequential.weight"] = tensors.pop("sequential.read")
        both = [tensors["lm_head.weight"], tensors.pop("sequential.write")]
        tensors["lm_head.weight"] = torch.cat(both, dim=1)
    with torch.device("meta"):
        model = MedusaModel(config)
    model.load_state_dict(tensors, assign=True)
    return model.eval(), token_ids


@dataclass(kw_only=True)
class MedusaDrafter(StateDrafter):
    """layers: the number of the target's last one. blocks: D of them, with one head for all."""

    blocks: list[Product]

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """[B, T, K] at a depth from 0 on, from the target's states [B, T, H]."""
        return self.head(states + F.silu(self.blocks[depth](states)))

    def first_logits(self, states: Tensor, newest: Tensor) -> Tensor:
        return self.corrected(self.logits(states, 0), self.rows_of(newest))

    def block_logits(self, states: Tensor, newest: Tensor) -> Logits:
        def logits(depth: int, before: Tensor | None) -> Tensor:
            found = self.logits(states, depth)[:, -1]
            # the newest token is the one before the first
            return self.corrected(found, self.rows_of(newest)) if before is None else found

        return logits

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        """A head, and the choice of its token."""
        state = self.embedding.new_zeros((1, 1, self.embedding.shape[1]))
        before = torch.zeros(1, dtype=torch.long, device=self.embedding.device)
        return timed_choice(lambda: self.corrected(self.logits(state, 0)[:, -1], before), sampling)

    @torch.inference_mode()
    def probe(self, ids: list[int]) -> Tensor:
        state = self.embedding.new_ones((1, 1, self.embedding.shape[1]))
        return torch.stack([self.logits(state, depth) for depth in range(len(self.blocks))])


def medusa_drafter(
    model: MedusaModel, token_ids: Tensor | None, target: Target, layer: int
) -> MedusaDrafter:
    """The heads as they draft, in the target's dtype; on a CPU in eight bits, as `pruned_drafter`.

    layer: the number of the target's last one.
    """
    embedding = target.decoder.embedding
    size, weight = model.config.hidden_size, model.lm_head.weight.detach().to(embedding)
    int8 = embedding.device.type == "cpu" and size % INT8_TERMS == 0
    sequential = None
    if model.config.sequential_rank:
        read = model.sequential.weight.detach().to(embedding)
        sequential = SequentialHead(read, weight[:, size:].contiguous())
    parts: Any = model.blocks
    own = [Product.of(block.layers[0].to(embedding), int8=int8) for block in parts]
    shared = Product.of(linear(weight[:, :size].contiguous()), int8=int8)
    return MedusaDrafter(
        **on_target_ids(token_ids, embedding),
        bytes=sum(part.nbytes for part in (*own, shared, *(sequential or ()))),
        layers=(layer,),
        embedding=embedding,
        blocks=own,
        longest=len(own),
        head=shared,
        sequential=sequential,
    )


def load(folder: Path, target: Target, strategy: str) -> MedusaDrafter:
    """The heads in `folder`."""
    model, token_ids = load_medusa(folder, target.decoder.embedding)
    layer = target.model.config.get_text_config().num_hidden_layers
    return medusa_drafter(model, token_ids, target, layer)
