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
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from align.checkpoint import Checkpoint, opened_weights
from distill.drafters.initialisation import FrozenEmbedding, least_squares
from distill.drafters.kind import Draft, Origin
from distill.drafters.language_model import LanguageModel
from eval.decoding.forward import input_embedding
from eval.decoding.target import Target
from eval.decoding.weights import linear

HEAD_ENTRIES = 4096  # entries of a head that are in fp32 at once
TOKEN_IDS = "token_ids.safetensors"  # beside a base draft: the entries of its head to train


class Pruned(LanguageModel):
    def fit_layers(self, target: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
        return num_layers, target["num_hidden_layers"]

    @torch.no_grad()
    def initialise(self, origin: Origin) -> Draft:
        """A least-squares map leads from the RMS-normalised state after the last kept layer to the
        state that the target's head reads. It is multiplied into the head, so it costs no time.
        """
        assert isinstance(origin.target, Target)  # `check_models` refuses others
        head = origin.target.model.get_output_embeddings().weight.detach()
        if origin.texts:
            pieces = head.split(HEAD_ENTRIES)
            projection = least_squares(fitted_states(origin)).to(head.device)
            head = torch.cat([(w.float() @ projection).to(w.dtype) for w in pieces])
        else:
            head = head.clone()
        model = build_pruned(origin.target.model, origin.num_layers, head)
        return Draft(model, origin.token_ids)

    def save(self, folder: Path, draft: Draft, embedding: Tensor, target: Checkpoint) -> None:
        """As engines load it: over the whole vocabulary, and with the embedding. `load` trims."""
        if draft.token_ids is not None:
            save_file({"token_ids": draft.token_ids.cpu()}, folder / TOKEN_IDS)
        self.exported(draft.model).save_pretrained(folder)

    def load(self, folder: Path, embedding: Tensor, head: Callable[[], Tensor]) -> Draft:
        model: Any = Checkpoint.open(folder).load(embedding.dtype)
        model.set_input_embeddings(FrozenEmbedding(embedding))
        if not (folder / TOKEN_IDS).exists():
            return Draft(model)
        with opened_weights(folder / TOKEN_IDS) as file:
            token_ids = file.get_tensor("token_ids")
        model.lm_head = linear(model.lm_head.weight.detach()[token_ids])
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
