"""PARD in training (arXiv 2504.18583): a language model learns all tokens of a draft at once.

For each later token it reads a mask, whose embedding is trained together with the model. A pass
reads a text and, behind it, chains of masks. Their anchors and lengths are drawn anew at each step;
longer chains are rarer. A mask sees the text up to its anchor and the masks before it in its chain.
Legend: B rows, T tokens of a text, L tokens of a text and its masks, N response positions, H hidden
size.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from align.errors import UserError
from distill.drafters.batch import (
    HeadInput,
    Slots,
    TrainingBatch,
    additive,
    drawn_depths,
    followed,
    mean_depth,
)
from distill.drafters.kind import Draft, Origin
from distill.drafters.pruned import Pruned
from eval.decoding.drafters.pruned import MASK
from eval.decoding.weights import linear

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

    def from_sibling(self, model: PreTrainedModel, mask: int | None, max_gamma: int) -> None:
        assert mask is not None
        # a PARD draft keeps its mask
        give_mask(model, getattr(model.config, "pard_token", mask), max_gamma)

    def exported(self, model: PreTrainedModel) -> PreTrainedModel:
        return with_mask_row(model)

    def head_input(self, model: PreTrainedModel, batch: TrainingBatch) -> HeadInput:
        """The losses are divided by the mean number of draft tokens of a position."""
        masked: Any = model
        most = masked.config.pard_tokens
        drawn = draw_masks(batch, most)
        states = read_with_masks(model, batch, drawn)
        length = states.shape[1]
        first = batch.positions // batch.width * length + batch.positions % batch.width
        later = drawn.rows * length + batch.width + drawn.slots
        return HeadInput(
            states.flatten(0, 1)[torch.cat([first, later])],
            torch.cat([batch.position_numbers, drawn.anchors + drawn.depths]),
            1 / mean_depth(most, DEEPER),
        )


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


def draw_masks(batch: TrainingBatch, most: int) -> Slots:
    """Draw masks for drafts of up to `most` tokens, where the target's distribution is cached."""
    positions = batch.positions
    lengths = drawn_depths(positions, batch.width, batch.seeds, most, DEEPER)
    anchors, depths = [positions[:0]], [positions[:0]]
    for depth in range(1, most):
        anchors.append(followed(positions, lengths > depth, depth))
        depths.append(torch.full_like(anchors[-1], depth))
    return Slots.of(batch, torch.cat(anchors), torch.cat(depths))


def read_with_masks(model: PreTrainedModel, batch: TrainingBatch, masks: Slots) -> Tensor:
    """The last states [B, L, H] of the texts followed by the masks."""
    masked: Any = model
    ids = batch.input_ids
    rows, width = ids.shape
    places = masks.placed(batch.positions[masks.anchors] % width, 0)
    anchors, depths = masks.placed(masks.anchors, -1), masks.placed(masks.depths, 0)
    length = width + places.shape[1]
    visible = torch.zeros((rows, length, length), dtype=torch.bool, device=ids.device)
    numbers = torch.arange(width, device=ids.device)
    visible[:, :width, :width] = numbers <= numbers[:, None]
    visible[:, width:, :width] = numbers <= places[..., None]
    same = anchors[:, :, None] == anchors[:, None]
    visible[:, width:, width:] = same & (depths[:, None] <= depths[:, :, None])
    embedded = masked.get_input_embeddings()(ids)
    mask = masked.mask(ids.new_zeros(1)).to(embedded.dtype).expand(*places.shape, -1)
    if masked._supports_sdpa:
        masked.config._attn_implementation = "sdpa"  # keeps no scores
    return masked.base_model(
        inputs_embeds=torch.cat([embedded, mask], 1),
        attention_mask=additive(visible[:, None], embedded),
        position_ids=torch.cat([numbers.expand(rows, -1), places + depths], 1),
        use_cache=False,
    ).last_hidden_state
