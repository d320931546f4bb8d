"""Medusa heads as they are trained: from the target's cached states alone.

From the state at token t, head d learns the target's distribution over the token after t + d. The
heads start from least squares (`fit_heads`):

1. A_d is the least-squares map from the state at t to the state at t + d.
2. A block adds SiLU(W x + b) to x. It gets W = A_d - I, and a b a few times as large as W x: there
   SiLU is nearly linear.
3. One more least-squares map, over all depths, takes out what b adds and what is not linear. It is
   multiplied into the output head.

Legend: N response positions, D heads, L layers read, H hidden size, K rows of the output head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from distill.drafters.batch import (
    HeadInput,
    TrainingBatch,
    drawn_depths,
    mean_depth,
    states_before,
)
from distill.drafters.compact import write_about
from distill.drafters.initialisation import AnsweredText, least_squares
from distill.drafters.kind import DraftKind, Start, Started
from eval.decoding.drafters.medusa import MedusaConfig, MedusaModel, load_heads

BIAS = 2.0  # of a block, in root mean squares of what it is to add
DEEPER = 0.5  # probability that a position which trains head d trains head d + 1, too


class Medusa(DraftKind):
    fitted_weights = ("blocks", "lm_head")
    trains_later_tokens = True

    def target_layers(
        self, target: Mapping[str, Any], published: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        return (target["num_hidden_layers"],)

    @torch.no_grad()
    def start(self, start: Start) -> Started:
        """Heads that all draft what the target's own head says, then fitted; in fp32."""
        if start.published is not None:
            config = start.target.model.config.get_text_config()
            return Started(*load_heads(start.published, start.target.decoder.embedding, config))
        head = start.head()
        model = MedusaModel(
            MedusaConfig(
                hidden_size=head.shape[1],
                vocab_size=start.target.model.get_output_embeddings().weight.shape[0],
                num_heads=start.max_gamma,
                truncated_vocab_size=len(head),
            )
        )
        for weight in model.blocks.parameters():
            weight.zero_()
        model.lm_head.weight.copy_(head)
        if start.texts:
            fit_heads(model, start.texts)
        return Started(model, start.token_ids)

    def save(
        self,
        folder: Path,
        model: PreTrainedModel,
        token_ids: Tensor | None,
        embedding: Tensor,
        target: str,
    ) -> None:
        tensors = {name: tensor.to(embedding.dtype) for name, tensor in model.state_dict().items()}
        if token_ids is not None:
            tensors["token_map"] = token_ids.cpu()
        model.config.architectures = ["MedusaModel"]
        model.config.save_pretrained(folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_about(folder, self.name, embedding)

    def load(self, folder: Path, embedding: Tensor) -> tuple[PreTrainedModel, Tensor | None]:
        return load_heads(folder, embedding)

    def first_states(self, model: PreTrainedModel, batch: TrainingBatch) -> Tensor:
        heads: Any = model
        states: Tensor = heads.blocks[0](states_before(batch)[:, 0].to(heads.lm_head.weight.dtype))
        return states

    def head_inputs(self, model: PreTrainedModel, batch: TrainingBatch) -> Iterator[HeadInput]:
        """The sum over the depths drawn, divided by how many a position has on average."""
        heads: Any = model
        positions, width, dtype = batch.positions, batch.width, heads.lm_head.weight.dtype
        depths = drawn_depths(positions, width, batch.seeds, len(heads.blocks), DEEPER)
        rows, states = positions // width, batch.states[..., 0, :].flatten(0, 1)
        weight = 1 / mean_depth(len(heads.blocks), DEEPER)
        for depth, block in enumerate(heads.blocks, start=1):
            drawn = (depths[: len(depths) - depth] >= depth).nonzero()[:, 0]
            # of the N positions, those whose answer has another token so much later
            entries = drawn[rows[drawn] == rows[drawn + depth]]
            read = states[positions[entries]].to(dtype)
            yield HeadInput(block(read), entries + depth, weight)


KIND = Medusa()


@torch.no_grad()
def fit_heads(model: MedusaModel, texts: Sequence[AnsweredText]) -> None:
    """The closed form of the module's docstring, from the states of these texts."""
    size, depths = model.config.hidden_size, range(1, len(model.blocks) + 1)
    maps = [least_squares(_pairs(texts, depth)) - torch.eye(size) for depth in depths]
    squares, count = torch.zeros(len(maps), size), 0
    for x, _ in _pairs(texts, 1):
        squares += torch.stack([(x @ added.T).pow(2).sum(0) for added in maps])
        count += len(x)
    bias = BIAS * (squares / count).sqrt().amax(0)
    for block, added in zip(model.blocks, maps, strict=True):
        layer: Any = block.layers[0]  # type: ignore[index]
        layer.weight.copy_(added)
        layer.bias.copy_(bias)
    to_state = least_squares(
        (block(x), y)
        for depth, block in zip(depths, model.blocks, strict=True)
        for x, y in _pairs(texts, depth)
    )
    model.lm_head.weight.copy_(model.lm_head.weight @ to_state)


def _pairs(texts: Sequence[AnsweredText], depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The target's states at a text's response positions and those `depth` tokens later [N, H]."""
    for text in texts:
        assert text.states is not None
        states = text.states[len(text.prompt_ids) - 1 :, 0].float()
        if len(states) > depth:
            yield states[:-depth], states[depth:]
