"""The target's own first layers, under a head fitted to its own.

A folder's compact form (`draft/compact/`) holds the draft's own tensors only: its layers, its norm,
its head over `token_ids`. The input embedding is the target's, shared in memory and named by its
hash. Legend: H hidden size, V the target's vocabulary, K rows of the draft's head.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from eval.decoding.build import build_decoder
from eval.decoding.drafters.causal_lm import CausalLMDrafter, input_of_head
from eval.decoding.drafters.compact import (
    check_compact,
    read_token_ids,
    target_id_maps,
    write_about,
)
from eval.decoding.drafters.drafter import on_target_ids
from eval.decoding.drafters.kind import FromTarget
from eval.decoding.drafters.training import (
    AnsweredText,
    FrozenEmbedding,
    LeastSquares,
    Start,
    TrainingBatch,
)
from eval.decoding.forward import input_embedding
from eval.decoding.target import Target
from eval.decoding.weights import linear

EMBEDDING = "model.embed_tokens.weight"
MASK = "mask"  # the module with a mask's embedding [1, H], of a draft that has one (pard.py)
HEAD_ROWS = 4096  # of a head are in fp32 at once


class Pruned(FromTarget):
    name = "pruned"
    engines = ("vllm", "transformers", "llama.cpp")
    language_model = True
    keeps_layers = True

    @torch.no_grad()
    def start(self, start: Start) -> tuple[PreTrainedModel, Tensor | None]:
        """The head is fitted by least squares: it maps the RMS-normalised state after the last kept
        layer to the state that the target's head reads. Folded into the head it costs nothing.
        """
        if start.target.get_output_embeddings().bias is not None:
            raise ValueError(
                "TOK-012: the target's head has a bias, which a refitted or trimmed head would "
                "lack; name a sibling with --draft."
            )
        head = start.head()
        full_head = None
        if start.texts:
            projection = fit_projection(start.target, start.texts, start.num_layers)
            rows = start.target.get_output_embeddings().weight.split(HEAD_ROWS)
            projection = projection.to(rows[0].device)
            full_head = torch.cat([(part.float() @ projection).to(part.dtype) for part in rows])
            head = full_head if start.token_ids is None else full_head[start.token_ids]
        return build_pruned(start.target, start.num_layers, head), full_head

    def save(
        self,
        folder: Path,
        model: PreTrainedModel,
        token_ids: Tensor | None,
        embedding: Tensor,
        target: str,
    ) -> None:
        tensors = {
            name: weight.to(embedding.dtype).contiguous()
            for name, weight in model.state_dict().items()
            if name != EMBEDDING
        }
        if token_ids is not None:
            tensors |= target_id_maps(token_ids, len(embedding))
        model.config.save_pretrained(folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        write_about(folder, self.name, embedding)

    def load_to_train(
        self, folder: Path, embedding: Tensor
    ) -> tuple[PreTrainedModel, Tensor | None]:
        model, token_ids = load_compact(folder, embedding)
        model.set_input_embeddings(FrozenEmbedding(embedding))
        return model, token_ids

    def first_input(self, model: PreTrainedModel, batch: TrainingBatch) -> Tensor:
        return input_of_head(model, batch)

    def drafter(
        self, model: PreTrainedModel, token_ids: Tensor | None, target: Target
    ) -> CausalLMDrafter:
        """On a CPU in eight bits: one step of a draft is hardly more than reading its weights, and
        what rounding them costs in alpha is far less than the time it saves (docs/lab-notes.md).
        """
        embedding = target.decoder.embedding
        on_cpu = embedding.device.type == "cpu"
        decoder = build_decoder(model, target.decoder.context_length, embedding, int8=on_cpu)
        return CausalLMDrafter(
            **on_target_ids(token_ids, embedding), bytes=decoder.own_bytes(), decoder=decoder
        )

    def load(self, folder: Path, target: Target) -> CausalLMDrafter:
        return self.drafter(*load_compact(folder, target.decoder.embedding), target)


KIND = Pruned()


def pruned_config(target: PreTrainedConfig, num_layers: int) -> Any:
    """The target's config for its first layers under a head of their own."""
    config: Any = copy.deepcopy(target)
    config.num_hidden_layers = num_layers
    config.tie_word_embeddings = False
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    return config


def build_pruned(target: PreTrainedModel, num_layers: int, head: Tensor) -> PreTrainedModel:
    """The target's first layers, sharing its embedding, under a `head` [K, H] of their own.

    All on the embedding's device, wherever the target's layers are.
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
    # the fitted projection starts from the plain normalised state
    kept["norm.weight"] = torch.ones_like(kept["norm.weight"])
    model.model.load_state_dict(kept, assign=True)
    model.model.rotary_emb = type(target.model.rotary_emb)(config).to(embedding.device)
    model.lm_head = linear(head.to(embedding.device))
    model.generation_config = copy.deepcopy(target.generation_config)
    return model.eval()


def fit_projection(
    target: PreTrainedModel, texts: Sequence[AnsweredText], num_layers: int
) -> Tensor:
    """The matrix A [H, H] that minimises |A x - y|^2 from pruned to full final states, in fp32."""
    config: Any = target.config
    size, eps = config.hidden_size, config.rms_norm_eps
    fit = LeastSquares(size, size)
    states: dict[str, Tensor] = {}
    body: Any = target.model
    hooks = [
        body.layers[num_layers - 1].register_forward_hook(
            lambda _module, _inputs, output: states.update(early=output)
        ),
        body.norm.register_forward_hook(
            lambda _module, _inputs, output: states.update(final=output)
        ),
    ]
    try:
        for text in tqdm(texts, desc="fit head", unit="answer"):
            ids = torch.cat([text.prompt_ids, text.response_ids])[None].to(target.device)
            body(input_ids=ids[:, :-1], use_cache=False)
            response = slice(len(text.prompt_ids) - 1, None)
            x = F.rms_norm(states["early"][0, response].float(), (size,), eps=eps)
            fit.add(x, states["final"][0, response].float())
    finally:
        for hook in hooks:
            hook.remove()
    return fit.solution()


def load_compact(folder: Path, embedding: Tensor) -> tuple[PreTrainedModel, Tensor | None]:
    """The model and its head's token ids, on the target's own embedding [V, H].

    Raises ValueError when the draft was made for another target.
    """
    check_compact(folder, embedding)
    tensors = load_file(folder / "model.safetensors", device=str(embedding.device))
    token_ids = read_token_ids(folder, tensors)
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=embedding.dtype)
    rows, size = tensors["lm_head.weight"].shape
    model.lm_head = nn.Linear(size, rows, bias=False, device="meta")
    if f"{MASK}.weight" in tensors:
        model.add_module(MASK, nn.Embedding(1, size, device="meta"))
    model.load_state_dict({**tensors, EMBEDDING: embedding}, assign=True)
    # rotary tables are no parameters: build them for real
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(embedding.device)
    return model.eval(), token_ids
