"""The target's first layers under a separate head.

A folder's trimmed-vocabulary checkpoint (`draft/compact/`) holds the draft's layers, its norm and
its head over `token_ids`. The input embedding is the target's; compact.json has its hash.
Legend: H hidden size, V the target's vocabulary, K entries of the draft's head.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from align.sources import load_config
from eval.decoding.build import build_decoder
from eval.decoding.drafters.causal_lm import CausalLMDrafter
from eval.decoding.drafters.compact import check_compact, read_token_ids, weights_of
from eval.decoding.drafters.drafter import on_target_ids
from eval.decoding.drafters.formats import DraftFormat
from eval.decoding.target import Target

EMBEDDING = "model.embed_tokens.weight"
MASK = "mask"  # the module with the embedding [1, H] of a PARD draft's mask (pard.py)


class Pruned(DraftFormat):
    def load(self, folder: Path, target: Target) -> CausalLMDrafter:
        return self.drafter(*load_compact(folder, target.decoder.embedding), target)

    def drafter(
        self, model: PreTrainedModel, token_ids: Tensor | None, target: Target
    ) -> CausalLMDrafter:
        """The drafter of the model for that target; on a CPU in int8.

        A step on a CPU mostly reads weights, so int8 saves time; it costs little acceptance
        (docs/lab-notes.md).
        """
        embedding = target.decoder.embedding
        on_cpu = embedding.device.type == "cpu"
        decoder = build_decoder(model, target.decoder.context_length, embedding, int8=on_cpu)
        return CausalLMDrafter(
            **on_target_ids(token_ids, embedding), bytes=decoder.own_bytes(), decoder=decoder
        )


FORMAT = Pruned()


def load_compact(folder: Path, embedding: Tensor) -> tuple[PreTrainedModel, Tensor | None]:
    """The model on the target's embedding [V, H], and the target id of each head entry [K].

    The ids are None for a head over all ids. Raises UserError if the draft is of another target.
    """
    tensors = weights_of(folder, str(embedding.device))
    check_compact(folder, embedding, tensors["lm_head.weight"].dtype)
    token_ids = read_token_ids(folder, tensors)
    config = load_config(str(folder))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=embedding.dtype)
    rows, size = tensors["lm_head.weight"].shape
    model.lm_head = nn.Linear(size, rows, bias=False, device="meta")
    if f"{MASK}.weight" in tensors:
        model.add_module(MASK, nn.Embedding(1, size, device="meta"))
    cast = {name: tensor.to(embedding.dtype) for name, tensor in tensors.items()}
    model.load_state_dict({**cast, EMBEDDING: embedding}, assign=True)
    # rotary tables are not in the checkpoint, so they are computed
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(embedding.device)
    return model.eval(), token_ids
