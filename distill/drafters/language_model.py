"""Drafts that are language models: how they read packed texts in training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from distill.drafters.attention import Attention, Marks
from distill.drafters.batch import HeadInput, TrainingBatch
from distill.drafters.kind import DraftKind
from distill.drafters.layers import plain_layers, trained_states

PACKED = "packed_texts"  # name of `_attend` in transformers
TRIED = (3, 5)  # tokens of two texts that are packed on trial
NEAR = 1e-5  # of the largest value: most difference of packed texts that is rounding, in fp32


class _OtherAttention(Exception):
    """Attention with additions that `Attention` does not compute."""


class LanguageModel(DraftKind):
    language_model = True

    def packs(self, model: PreTrainedModel) -> bool:
        """Whether a trial on two short texts gives the states of each text alone.

        Recurrent layers and attention with additions of its own do not keep packed texts apart.
        """
        if plain_layers(model):
            return True
        if model._is_stateful or not model._supports_attention_backend:
            return False
        implementation, training = _text_config(model)._attn_implementation, model.training
        texts = [torch.arange(size, device=model.device)[None] for size in TRIED]
        ids = torch.cat(texts, 1)  # and the number of each token in its text
        numbers = torch.tensor([n for n, size in enumerate(TRIED) for _ in range(size)]).to(ids)
        everywhere, none = torch.arange(len(numbers)).to(ids), ids[0, :0]
        batch = TrainingBatch(ids, numbers[None], ids, everywhere, none, none)
        model.eval()
        with torch.no_grad():
            alone = [model.base_model(input_ids=text).last_hidden_state[0] for text in texts]
            try:
                together = LanguageModel.head_input(self, model, batch).states
                difference = (together - torch.cat(alone)).abs().max()
                same = bool(difference <= NEAR * together.abs().max())
            except _OtherAttention:
                same = False
        model.train(training)
        _text_config(model)._attn_implementation = implementation
        return same

    def head_input(self, model: PreTrainedModel, batch: TrainingBatch) -> HeadInput:
        if batch.packed:
            marks = Marks.of_texts(batch.texts, batch.position_ids)
            embedded: Tensor = model.get_input_embeddings()(batch.input_ids)
            where = batch.position_ids, Attention(marks, marks), batch.positions
            states = states_seen(model, batch, embedded, *where)
        else:  # attention is causal, and padding follows the text
            read = model.base_model(input_ids=batch.input_ids, use_cache=False)
            states = read.last_hidden_state.flatten(0, 1)[batch.positions]
        return HeadInput(states, torch.arange(len(states), device=states.device))


def states_seen(
    model: PreTrainedModel,
    batch: TrainingBatch,
    embedded: Tensor,
    position_ids: Tensor,
    attention: Attention,
    trained: Tensor,
) -> Tensor:
    """The model's last states of the trained tokens [M, H].

    embedded: all tokens [B, K, H]. position_ids: [B, K]. attention: what each sees. trained:
    indices of the flattened tokens [M].
    """
    if batch.packed and plain_layers(model):
        return trained_states(model, embedded, position_ids, attention, trained)
    mask: Any = {"attention_mask": attention.dense(model.dtype)}
    if batch.packed:
        # it stays for the backward pass, which computes checkpointed layers again
        _text_config(model)._attn_implementation = PACKED
        mask = {"packed": attention}
    inputs = {"inputs_embeds": embedded, "position_ids": position_ids, "use_cache": False}
    states: Tensor = model.base_model(**inputs, **mask).last_hidden_state
    return states.flatten(0, 1)[trained]


def _text_config(model: PreTrainedModel) -> Any:
    return model.config.get_text_config()


def _attend(
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Attention,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' interface of an attention."""
    if softcap is not None or s_aux is not None:
        raise _OtherAttention
    return packed(q, k, v, scaling, sliding_window), None


AttentionInterface.register(PACKED, _attend)
AttentionMaskInterface.register(PACKED, lambda *_, **__: None)
