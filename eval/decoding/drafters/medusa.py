"""Heads on the target's last hidden state (Medusa, arXiv 2401.10774).

The target has read all tokens except the newest. Head d reads the target's state (after the final
norm) at the token before the newest, and drafts the token d + 1 positions after the newest, d = 0,
1, …: a residual block, then an LM head that all heads share. No cache and no model that reads the
text are needed, so a draft step is one head.

A folder holds the checkpoint that vLLM loads (its MedusaModel), and compact.json if draftsmith made
it. Legend: T positions, D heads, H hidden size, K entries of the LM head, V the target's
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from align.files import read_json
from eval.decoding.drafters.compact import (
    check_compact,
    fill,
    refuse_other_target,
    refuse_unknown_parts,
    weights_of,
)
from eval.decoding.drafters.drafter import (
    HeadDrafter,
    Proposal,
    Session,
    Text,
    no_draft,
    on_target_ids,
    timed_choice,
)
from eval.decoding.drafters.formats import DraftFormat
from eval.decoding.forward import HiddenStates
from eval.decoding.target import Target, model_bytes
from eval.decoding.verification import Sampling
from eval.decoding.weights import Product


class MedusaConfig(PreTrainedConfig):
    """The keys that vLLM reads."""

    model_type = "medusa"
    hidden_size: int = 4096
    vocab_size: int = 32000
    num_heads: int = 4
    truncated_vocab_size: int = 32000
    num_hidden_layers: int = 1  # linear layers of a block
    original_lm_head: bool = True  # all heads share one LM head
    medusa_fc_bias: bool = True


class ResidualBlock(nn.Module):
    """x + SiLU(W x + b)."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size)])

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.layers[0](x))


class MedusaModel(PreTrainedModel):
    config: MedusaConfig
    config_class = MedusaConfig
    _supports_sdpa = True  # there is no attention, so any implementation is right

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        size = config.hidden_size
        self.blocks = nn.ModuleList([ResidualBlock(size) for _ in range(config.num_heads)])
        self.lm_head = nn.Linear(size, config.truncated_vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> None:  # type: ignore[override]
        """None, because the model reads hidden states."""

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head


class Medusa(DraftFormat):
    def head_size(self, config: Mapping[str, Any]) -> int | None:
        if config.get("model_type") != "medusa":
            return None
        return int(config.get("truncated_vocab_size") or config["vocab_size"])

    def longest(self, config: Mapping[str, Any]) -> int | None:
        return None if self.head_size(config) is None else config.get("num_heads")

    def check_config(self, folder: Path, target: PreTrainedConfig) -> None:
        config = read_json(folder / "config.json")
        parts = {
            "num_hidden_layers": (config.get("num_hidden_layers", 1), 1),
            # without these keys, vLLM makes a head for each block, and no bias
            "original_lm_head": (config.get("original_lm_head", False), True),
            "medusa_fc_bias": (config.get("medusa_fc_bias", False), True),
        }
        refuse_unknown_parts(folder, "a Medusa draft", parts)
        refuse_other_target(folder, config, target)

    def load(self, folder: Path, target: Target) -> MedusaDrafter:
        text = target.model.config.get_text_config()
        return self.drafter(*load_heads(folder, target.decoder.embedding, text), target)

    def drafter(self, model: Any, token_ids: Tensor | None, target: Target) -> MedusaDrafter:
        """The drafter of the model in the target's dtype."""
        embedding = target.decoder.embedding
        model = model.to(embedding)
        return MedusaDrafter(
            **on_target_ids(token_ids, embedding, self.name),
            bytes=model_bytes(model),
            layers=(target.model.config.get_text_config().num_hidden_layers,),
            embedding=embedding,
            blocks=[Product.of(block.layers[0]) for block in model.blocks],
            head=Product.of(model.lm_head),
        )


FORMAT = Medusa()


def load_heads(
    folder: Path, embedding: Tensor, target: PreTrainedConfig | None = None, tuned: bool = False
) -> tuple[MedusaModel, Tensor | None]:
    """A folder's model, and the target id of each head entry [K]; None for a head over all ids.

    embedding: the target's [V, H]. target: the target's config, to check a published draft. tuned:
    as in `load_eagle3`. Raises UserError if the draft was made for another target or cannot be
    computed here.
    """
    tensors = weights_of(folder, str(embedding.device))
    if target is None or (folder / "compact.json").is_file():
        check_compact(folder, None if tuned else embedding, tensors["lm_head.weight"].dtype)
    else:
        FORMAT.check_config(folder, target)
    token_ids = tensors.pop("token_map", None)
    about = read_json(folder / "config.json")
    config = MedusaConfig(**about | {"truncated_vocab_size": FORMAT.head_size(about)})
    with torch.device("meta"):
        model = MedusaModel(config)
    fill(model, tensors, folder)
    return model.eval(), None if token_ids is None else token_ids.long()


@dataclass(kw_only=True)
class MedusaDrafter(HeadDrafter):
    """embedding: the target's [V, H]. blocks: one for each of D heads; all share `head`."""

    embedding: Tensor
    blocks: list[Product]
    head: Product

    def __post_init__(self) -> None:
        self.most = len(self.blocks)

    @property
    def recorded(self) -> bool:
        return False

    def logits(self, states: Tensor, depth: int) -> Tensor:
        """Logits [1, T, K] of head number `depth`, from the target's states [1, T, H]."""
        return self.head(states + F.silu(self.blocks[depth](states)))

    def start(self, text: Text) -> Session:
        return MedusaSession(self, text)

    @torch.inference_mode()
    def text_logits(
        self, ids: list[int], text: list[int], states: HiddenStates
    ) -> tuple[Tensor, int]:
        """Logits of a draft's first token; none if no token is before the newest token."""
        before = self.side_by_side(states, self.embedding.dtype)[:, :-1]
        logits = self.logits(before, 0)[0, max(0, len(ids) - 2) :]
        return logits, len(text) - len(logits)

    def step(self, context_length: int, sampling: Sampling) -> Callable[[], None]:
        """One head and the choice of its token, for timing."""
        state = self.embedding.new_zeros((1, 1, self.embedding.shape[1]))
        return timed_choice(lambda: self.logits(state, 0)[:, -1], sampling)


class MedusaSession(Session):
    """The heads on one text.

    state [1, 1, H]: the target's last hidden state at the token before the newest token, which is
    the last emitted token.
    """

    def __init__(self, drafter: MedusaDrafter, text: Text) -> None:
        self.drafter, self.sampling, self.generator = drafter, text.sampling, text.generator
        self.state = drafter.side_by_side(text.states, drafter.embedding.dtype)[:, -1:]

    @torch.inference_mode()
    def propose(self, count: int) -> Proposal:
        drafter, state = self.drafter, self.state
        count = min(count, len(drafter.blocks))
        if count < 1:
            return no_draft(state.device)
        return drafter.in_turn(
            lambda depth, _: drafter.logits(state, depth)[:, -1],
            count,
            self.sampling,
            self.generator,
        )

    def commit(self, emitted: list[int], accepted: int, states: HiddenStates) -> None:
        read = self.drafter.side_by_side(states, self.drafter.embedding.dtype)
        # the target has read all emitted tokens except the last one, which is now the newest
        self.state = read[:, len(emitted) - 1 : len(emitted)]
