"""The target's first layers with an LM head from least squares.

Legend: H hidden size, K entries of the draft's head, N response positions of a text.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from distill.drafters.compact import target_id_maps, write_compact
from distill.drafters.initialisation import FrozenEmbedding, least_squares
from distill.drafters.kind import Draft, Origin
from distill.drafters.language_model import LanguageModel
from eval.decoding.drafters.pruned import EMBEDDING, load_compact
from eval.decoding.forward import input_embedding
from eval.decoding.target import Target
from eval.decoding.weights import linear

HEAD_ENTRIES = 4096  # entries of a head that are in fp32 at once


class Pruned(LanguageModel):
    def fit_layers(self, target: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
        return num_layers, target["num_hidden_layers"]

    @torch.no_grad()
    def initialise(self, origin: Origin) -> Draft:
        """A least-squares map leads from the RMS-normalised state after the last kept layer to the
        state that the target's head reads. It is multiplied into the head, so it costs no time.
        """
        assert isinstance(origin.target, Target)  # `check_models` refuses others
        head, full_head = origin.head(), None
        if origin.texts:
            whole = origin.target.model.get_output_embeddings().weight
            pieces = whole.split(HEAD_ENTRIES)
            projection = least_squares(fitted_states(origin)).to(pieces[0].device)
            full_head = torch.cat([(w.float() @ projection).to(w.dtype) for w in pieces])
            head = full_head if origin.token_ids is None else full_head[origin.token_ids]
        model = build_pruned(origin.target.model, origin.num_layers, head)
        return Draft(model, origin.token_ids, full_head)

    def save(self, folder: Path, draft: Draft, embedding: Tensor, target: str) -> None:
        weights = draft.model.state_dict()
        tensors = {name: weights[name] for name in weights if name != EMBEDDING}
        if draft.token_ids is not None:
            tensors |= target_id_maps(draft.token_ids, len(embedding))
        draft.model.config.save_pretrained(folder)
        write_compact(folder, self.name, tensors, embedding)

    def load(self, folder: Path, embedding: Tensor, head: Callable[[], Tensor]) -> Draft:
        model, token_ids = load_compact(folder, embedding)
        model.set_input_embeddings(FrozenEmbedding(embedding))
        return Draft(model, token_ids)


KIND = Pruned()


def pruned_config(target: PreTrainedConfig, num_layers: int) -> Any:
    """The target's config, changed to its first layers and an untied head."""
    config: Any = copy.deepcopy(target)
    config.num_hidden_layers = num_layers
    config.tie_word_embeddings = False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    return config


def build_pruned(target: PreTrainedModel, num_layers: int, head: Tensor) -> PreTrainedModel:
    """The target's first layers with another `head` [K, H]; the embedding is shared.

    All weights lie on the embedding's device, wherever the target's layers are.
    """
    config, embedding = pruned_config(target.config, num_layers), input_embedding(target)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=target.dtype)
    kept = {
        name: tensor.to(embedding.device, copy=True)
        for name, tensor in target.model.state_dict().items()
        if not name.startswith("layers.") or int(name.split(".")[1]) < num_layers
    }
    kept["embed_tokens.weight"] = embedding
    # the head was fitted to normalised states without weights
    kept["norm.weight"] = torch.ones_like(kept["norm.weight"])
    model.model.load_state_dict(kept, assign=True)
    model.model.rotary_emb = type(target.model.rotary_emb)(config).to(embedding.device)
    model.lm_head = linear(head.to(embedding.device))
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.eval()


def fitted_states(origin: Origin) -> Iterator[tuple[Tensor, Tensor]]:
    """For each text the RMS-normalised states after `num_layers` layers, and the states that the
    target's head reads, at the response positions [N, H] each, in fp32.
    """
    eps = origin.target.model.config.rms_norm_eps
    assert origin.fit_states is not None
    for text in origin.texts:
        states = origin.fit_states(text)[len(text.prompt_ids) - 1 :].to(origin.embedding.device)
        early, final = states.float().unbind(1)
        yield F.rms_norm(early, early.shape[1:], eps=eps), final
