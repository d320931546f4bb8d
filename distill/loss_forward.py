"""The forward pass of every kind of draft in training: from a batch to its loss.

Legend: N response positions of the batch, H hidden size, K entries of the draft's head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from distill.drafters.batch import TrainingBatch
from distill.drafters.kind import DraftKind
from distill.drafters.layers import give_layer_forward, plain_layers, whole
from distill.losses import LossFunction, acceptance, head_logits, head_loss, rows_at_once


def give_loss_forward(model: PreTrainedModel, kind: DraftKind, divergence: LossFunction) -> None:
    """Make `model.forward` return the summed loss over response positions instead of logits.

    The loss is computed inside forward for DDP's gradient hooks, PEFT's adapters and autocast, and
    because FSDP has the whole head there only. The head is applied to response positions only.
    Called with a `temperature`, forward returns `_acceptance`. `take_loss_forward` undoes this.
    The head has no bias and no softcap (`Vocabulary.head_is_plain`), because the loss has none.
    """
    head: Any = model.get_output_embeddings()
    assert head.bias is None

    def forward(temperature: float | None = None, **inputs: Any) -> ModelOutput:
        batch = TrainingBatch(**{k: v for k, v in inputs.items() if k in TrainingBatch._fields})
        if batch.top_logprobs.dtype == torch.int32:  # see `TrainingSet.batch`
            batch = batch._replace(top_logprobs=batch.top_logprobs.view(torch.float32))
        weight = whole(head.weight)
        if temperature is not None:
            return _acceptance(kind, model, weight, batch, temperature)
        states, learned, factors = kind.head_input(model, batch)
        cached = batch.top_ids[learned], batch.top_logprobs[learned]
        return ModelOutput(loss=head_loss(states, weight, *cached, divergence, factors))

    model.forward = forward
    give_layer_forward(model)


def take_loss_forward(model: PreTrainedModel) -> None:
    """Restore the `forward` of the classes of the model, which returns logits, and its layers."""
    for module in (model, *plain_layers(model)):
        vars(module).pop("forward", None)


def _acceptance(
    kind: DraftKind,
    model: PreTrainedModel,
    weight: Tensor,
    batch: TrainingBatch,
    temperature: float,
) -> ModelOutput:
    """`acceptance` with a head of this weight [K, H], for each position [N].

    accepted, lacking: for the first token of a draft. emitted: the expected tokens of a step whose
    draft begins at this position: accepted draft tokens, and the target's one.
    """

    def rates(states: Tensor, learned: Tensor) -> tuple[Tensor, Tensor]:
        cached = batch.top_ids[learned], batch.top_logprobs[learned]
        count = rows_at_once(len(weight))
        parts = zip(*(part.split(count) for part in (states, *cached)), strict=True)
        each = [
            acceptance(head_logits(rows, weight), ids, logprobs, temperature)
            for rows, ids, logprobs in parts
        ]
        accepted, lacking = (torch.cat(part) for part in zip(*each, strict=True))
        return accepted, lacking

    states, learned, _ = kind.head_input(model, batch)
    accepted, lacking = rates(states, learned)
    count = len(batch.positions)
    counts = [count] if batch.plan is None else batch.plan.counts
    drafts = accepted.new_zeros(len(counts), count)
    parts = zip(accepted.split(counts), learned.split(counts), strict=True)
    for depth, (tokens, numbers) in enumerate(parts):
        drafts[depth, numbers - depth] = tokens
    emitted = 1 + drafts.cumprod(0).sum(0)
    return ModelOutput(accepted=accepted[:count], lacking=lacking[:count], emitted=emitted)
