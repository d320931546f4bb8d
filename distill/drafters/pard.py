"""PARD in training (arXiv 2504.18583): a language model learns all tokens of a draft at once.

For each later token it reads a mask, whose embedding is trained together with the model. A pass
reads a text and, behind it, chains of masks. Their anchors and lengths are drawn anew at each step;
longer chains are rarer. A mask sees the text up to its anchor and the masks before it in its chain.
Legend: B rows, T tokens of a text, L tokens of a text and its masks, N response positions, H hidden
size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from align.errors import UserError
from distill.drafters.attention import NO_TEXT, Attention, Marks
from distill.drafters.batch import (
    HeadInput,
    Plan,
    TrainingBatch,
    drawn_depths,
    followed,
    mean_depth,
    slots,
)
from distill.drafters.kind import Draft, Origin
from distill.drafters.language_model import states_seen
from distill.drafters.pruned import Pruned
from eval.decoding.weights import linear

MASK = "mask"  # the module with the embedding [1, H] of the mask
DEEPER = 0.6  # probability that an anchor with masks to some depth has one more


class Pard(Pruned):
    made_from = ("target", "sibling")
    has_mask = True
    added_modules = (MASK,)

    def initialise(self, origin: Origin) -> Draft:
        draft = super().initialise(origin)
        # the target's first layers get a mask as a sibling does
        self.from_sibling(draft.model, origin.mask, origin.max_gamma)
        return draft

    def load(self, folder: Path, embedding: Tensor, head: Callable[[], Tensor]) -> Draft:
        draft = super().load(folder, embedding, head)
        config: Any = draft.model.config
        give_mask(draft.model, config.pard_token, config.pard_tokens)
        return draft

    def from_sibling(self, model: PreTrainedModel, mask: int | None, max_gamma: int) -> None:
        assert mask is not None
        # a PARD draft keeps its mask
        give_mask(model, getattr(model.config, "pard_token", mask), max_gamma)

    def exported(self, model: PreTrainedModel) -> PreTrainedModel:
        return with_mask_row(model)

    def plan(self, model: Any, batch: TrainingBatch, training: bool) -> Plan:
        """Masks for drafts of up to `pard_tokens`, where the target's distribution is cached."""
        most, width = model.config.pard_tokens, batch.input_ids.shape[1]
        lengths = drawn_depths(batch, most, DEEPER)
        anchors, depths = [batch.positions[:0]], [batch.positions[:0]]
        for depth in range(1, most):
            wanted = (lengths > depth) & followed(batch.positions, depth)
            anchors.append(wanted.nonzero()[:, 0])
            depths.append(torch.full_like(anchors[-1], depth))
        later, depth_of = torch.cat(anchors), torch.cat(depths)
        of_slots, of_depths, places = slots(batch, later, depth_of)
        slots_a_row = of_slots.shape[1]
        length = width + slots_a_row
        first = batch.positions // width * length + batch.positions % width
        behind = places // slots_a_row * length + width + places % slots_a_row
        learned = torch.cat([torch.arange(len(first)), later + depth_of])
        counts = (len(first), *map(len, anchors[1:]))
        return Plan(of_slots, of_depths, torch.cat([first, behind]), learned, counts)

    def head_input(self, model: PreTrainedModel, batch: TrainingBatch) -> HeadInput:
        """The losses are divided by the mean number of draft tokens of a position."""
        masked: Any = model
        states = read_with_masks(model, batch)
        weight = 1 / mean_depth(masked.config.pard_tokens, DEEPER)
        return HeadInput(states, batch.plan.learned, weight)


KIND = Pard()


@torch.no_grad()
def give_mask(model: PreTrainedModel, token: int, most: int) -> None:
    """Add `model.mask`, a copy of embedding entry `token`, for drafts of up to `most` tokens."""
    embedding: Any = model.get_input_embeddings()
    if embedding.weight.ndim != 2 or hasattr(embedding, "embed_scale"):
        raise UserError(
            f"A {model.config.model_type} model scales its embedding, but PARD does not scale the "
            "mask; use another drafter than pard."
        )
    mask = nn.Embedding(1, embedding.weight.shape[1]).to(embedding.weight)
    mask.weight.copy_(embedding.weight[token : token + 1])
    model.add_module(MASK, mask)
    config: Any = model.config
    config.pard_token, config.pard_tokens = token, most


@torch.no_grad()
def with_mask_row(model: PreTrainedModel) -> PreTrainedModel:
    """A copy as engines load it, with the mask in the embedding; other weights are shared."""
    whole: Any = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    rows = whole.get_input_embeddings().weight.clone()
    rows[whole.config.pard_token] = whole.mask.weight[0]
    del whole.mask
    tied = whole.get_output_embeddings().weight is whole.get_input_embeddings().weight
    whole.set_input_embeddings(nn.Embedding.from_pretrained(rows))
    if tied:
        whole.set_output_embeddings(linear(rows))
        whole.tie_weights()
    exported: PreTrainedModel = whole
    return exported


def read_with_masks(model: PreTrainedModel, batch: TrainingBatch) -> Tensor:
    """The last states [M, H] that the plan takes of the texts and, behind them, its masks."""
    masked: Any = model
    anchors, depths, *_ = batch.plan
    start = batch.positions[anchors.clamp_min(0)]  # [B, Q], in the flattened batch
    numbers = batch.position_ids.flatten()[start]
    texts = batch.texts.flatten()[start].masked_fill(anchors < 0, NO_TEXT)
    of_texts = Marks.of_texts(batch.texts, batch.position_ids)
    masks = Marks(texts, numbers, anchors, depths)
    attention = Attention(of_texts.then(masks), of_texts.then(masks.as_keys()))
    embedded = masked.get_input_embeddings()(batch.input_ids)
    mask = masked.mask(start.new_zeros(1)).to(embedded.dtype).expand(*start.shape, -1)
    inputs = torch.cat([embedded, mask], 1)
    position_ids = torch.cat([batch.position_ids, numbers + depths], 1)
    return states_seen(model, batch, inputs, position_ids, attention, batch.plan.taken)
