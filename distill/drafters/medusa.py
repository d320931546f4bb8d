"""Medusa heads (arXiv 2401.10774) in training, from the target's cached states alone.

From the state at token t, head d learns the target's distribution over the token after t + d. The
heads start from least squares (`fit_heads`):

1. A_d is the least-squares map from the state at t to the state at t + d.
2. A block adds SiLU(W x + b) to x. It gets W = A_d - I, and a b a few times as large as W x: there
   SiLU is nearly linear.
3. One more least-squares map, over all depths, removes the effects of b and of nonlinearity. It is
   multiplied into the output head.

Legend: N response positions, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from align.checkpoint import Checkpoint
from distill.drafters.batch import (
    HeadInput,
    Plan,
    TrainingBatch,
    drawn_depths,
    followed,
    mean_depth,
)
from distill.drafters.compact import write_compact
from distill.drafters.initialisation import least_squares
from distill.drafters.kind import Config, Draft, DraftKind, Origin
from eval.decoding.drafters.medusa import MedusaConfig, MedusaModel, load_heads

BIAS = 2.0  # a block's bias over the root mean square of W x, which the block is to add
DEEPER = 0.5  # probability that a position which trains head d trains head d + 1, too


class Medusa(DraftKind):
    rate = 1e-3  # all weights are fitted
    unused = ("activation_checkpointing",)
    states_from_vllm = True

    def target_layers(self, target: Config, published: Config | None = None) -> tuple[int, ...]:
        return (target["num_hidden_layers"],)

    @torch.no_grad()
    def initialise(self, origin: Origin) -> Draft:
        """Heads equal to the target's head, then fitted, in fp32; or published heads."""
        if origin.published is not None:
            config = origin.target.model.config.get_text_config()
            return Draft(*load_heads(origin.published, origin.embedding, config, tuned=True))
        head = origin.head()
        model = MedusaModel(
            MedusaConfig(
                hidden_size=head.shape[1],
                vocab_size=origin.target.model.get_output_embeddings().weight.shape[0],
                num_heads=origin.max_gamma,
                truncated_vocab_size=len(head),
            )
        )
        for weight in model.blocks.parameters():
            weight.zero_()
        model.lm_head.weight.copy_(head)
        if origin.states is not None:
            fit_heads(
                model, [origin.states(text)[len(text.prompt_ids) - 1 :, 0] for text in origin.texts]
            )
        return Draft(model, origin.token_ids)

    def save(self, folder: Path, draft: Draft, embedding: Tensor, target: Checkpoint) -> None:
        tensors = dict(draft.model.state_dict())
        if draft.token_ids is not None:
            tensors["token_map"] = draft.token_ids.cpu()
        draft.model.config.architectures = ["MedusaModel"]
        draft.model.config.save_pretrained(folder)
        write_compact(folder, self.name, tensors, embedding)

    def load(self, folder: Path, embedding: Tensor, head: Callable[[], Tensor]) -> Draft:
        return Draft(*load_heads(folder, embedding))

    def plan(self, model: Any, batch: TrainingBatch, training: bool) -> Plan:
        depths = drawn_depths(batch, len(model.blocks), DEEPER)
        taken, learned = [torch.arange(len(depths))], [torch.arange(len(depths))]
        for depth in range(2, len(model.blocks) + 1):
            numbers = ((depths >= depth) & followed(batch.positions, depth)).nonzero()[:, 0]
            taken.append(numbers)
            learned.append(numbers + depth)
        none = taken[0][:0]
        return Plan(none, none, torch.cat(taken), torch.cat(learned), tuple(map(len, taken)))

    def head_input(self, model: PreTrainedModel, batch: TrainingBatch) -> HeadInput:
        """Their losses are divided by the mean number of depths at a position."""
        heads: Any = model
        blocks, dtype, plan = heads.blocks, heads.lm_head.weight.dtype, batch.plan
        read = batch.states[..., 0, :].flatten(0, 1)
        # when a token is drafted, the target has not read the newest token
        before = torch.where(batch.numbers[:, None] > 0, read[batch.positions - 1], 0)
        inputs = [before, *read[batch.positions[plan.taken]].split(plan.counts)[1:]]
        states = [block(x.to(dtype)) for block, x in zip(blocks, inputs, strict=True)]
        return HeadInput(torch.cat(states), plan.learned, 1 / mean_depth(len(blocks), DEEPER))


KIND = Medusa()


@torch.no_grad()
def fit_heads(model: MedusaModel, texts: Sequence[Tensor]) -> None:
    """Fit the heads as in the module's docstring, to each text's states [N, H] at its response."""
    # heads deeper than the longest text cannot be fitted
    deepest = min(len(model.blocks), max(map(len, texts)) - 1)
    if deepest < 1:
        return
    size, depths = model.config.hidden_size, range(1, deepest + 1)
    maps = [least_squares(_pairs(texts, depth)) - torch.eye(size) for depth in depths]
    squares, count = torch.zeros(len(maps), size), 0
    for x, _ in _pairs(texts, 1):
        squares += torch.stack([(x @ added.T).pow(2).sum(0) for added in maps])
        count += len(x)
    bias = BIAS * (squares / count).sqrt().amax(0)
    for block, added in zip(model.blocks, maps, strict=False):
        layer: Any = block.layers[0]  # type: ignore[index]
        layer.weight.copy_(added)
        layer.bias.copy_(bias)
    to_state = least_squares(
        (block(x), y)
        for depth, block in zip(depths, model.blocks, strict=False)
        for x, y in _pairs(texts, depth)
    )
    model.lm_head.weight.copy_(model.lm_head.weight @ to_state)


def _pairs(texts: Sequence[Tensor], depth: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A text's states, in fp32, and those `depth` tokens later [N, H]."""
    for states in texts:
        if len(states) > depth:
            yield states[:-depth].float(), states[depth:].float()
