"""MTP: a target's own head for multi-token prediction, one more decoder layer (arXiv 2412.19437).

Input i of the layer is the embedding of token i + 1, and a state [H] of token i: the target's last
hidden state if the target has read token i, else the layer's output for the input before, after its
last norm. The checkpoints of Qwen3-Next and Qwen3.5 store the layer as `mtp`. transformers leaves
these tensors out when it loads the target.

A folder holds these tensors alone, in the target's names or in the layout of speculators. If
draftsmith made it, it also has compact.json and `served/`: the target's own files as links,
with an index that takes the layer from this folder. Legend: T inputs, H hidden size, V the target's
vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import read_json
from eval.decoding.drafters.compact import (
    check_compact,
    fill,
    refuse_other_embedding,
    refuse_other_target,
    refuse_unknown_parts,
)
from eval.decoding.drafters.drafter import on_target_ids
from eval.decoding.drafters.eagle3 import Eagle3Drafter
from eval.decoding.drafters.formats import DraftFormat
from eval.decoding.forward import HiddenStates, KVCache
from eval.decoding.target import Target, model_bytes
from eval.decoding.transformers_forward import TransformersDecoder

ARCHITECTURE = "DraftsmithMtp"  # in a draft's config.json, which is otherwise the target's
SERVED = "served"  # a folder in the draft's folder: what engines load
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"  # the target's
FULL = ["full_attention"]
EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
LAYER = re.compile(r"mtp(_layers\.(?P<other>\d+)|(\.layers\.(?P<own>\d+))?)\.(?P<part>.*)")
SPECULATORS = {  # tensors of `mtp_layers.0` in the layout of speculators, and their names here
    "input_proj.weight": "model.fc.weight",
    "token_layernorm.weight": "model.pre_fc_norm_embedding.weight",
    "hidden_layernorm.weight": "model.pre_fc_norm_hidden.weight",
    "final_layernorm.weight": "model.norm.weight",
    "embed_tokens.weight": EMBEDDING,
}


class Mtp(DraftFormat):
    def head_size(self, config: Mapping[str, Any]) -> int | None:
        ours = ARCHITECTURE in (config.get("architectures") or ())
        if config.get("speculators_model_type") == "mtp":
            return int(config["transformer_layer_config"]["vocab_size"])
        return int(config["vocab_size"]) if ours else None

    def check_config(self, folder: Path, target: PreTrainedConfig) -> None:
        about = read_json(folder / "config.json")
        shape = about.get("transformer_layer_config", about)
        family = {"model_type": (shape.get("model_type"), target.model_type)}
        refuse_unknown_parts(folder, "MTP", family)
        refuse_other_target(folder, shape, target)

    def load(self, folder: Path, target: Target) -> MtpDrafter:
        head = target.model.get_output_embeddings().weight.detach()
        tuned = (folder / "compact.json").is_file()
        base = None if tuned else target.model.config.get_text_config()
        return self.drafter(load_mtp(folder, target.decoder.embedding, head, base), None, target)

    def drafter(self, model: Any, token_ids: Tensor | None, target: Target) -> MtpDrafter:
        """The drafter of the model for that target, whose LM head it shares."""
        model.lm_head = target.model.get_output_embeddings()
        return MtpDrafter(
            **on_target_ids(token_ids, target.decoder.embedding, self.name),
            bytes=model_bytes(model, EMBEDDING, HEAD),
            decoder=MtpDecoder(model, target.decoder.context_length),
            layers=(target.model.config.get_text_config().num_hidden_layers,),
        )


FORMAT = Mtp()


def layer_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of the layer in a checkpoint, by their names here: `model` in place of `mtp`.

    Raises UserError if it has none, or several layers.
    """
    tensors, layers = {}, set()
    wanted = Checkpoint.open(folder).tensors(lambda name: LAYER.fullmatch(name) is not None)
    for name, tensor in wanted.items():
        match = LAYER.fullmatch(name)
        assert match is not None
        layers.add(int(match["other"] or match["own"] or 0))
        place = name.replace("mtp.", "model.", 1)
        if match["other"]:
            place = SPECULATORS.get(match["part"], f"model.layers.0.{match['part']}")
        tensors[place] = tensor
    if len(layers) != 1:
        raise UserError(
            f"{folder} has {len(layers)} layers for multi-token prediction (mtp.layers), but "
            "drafter mtp tunes exactly one. Fine-tuning may drop it: name the base model that has "
            "it with draft."
        )
    return tensors


def build_mtp(target: PreTrainedConfig) -> Any:
    """The draft without weights: a model of the target's class with this layer alone.

    target: the target's config.
    """
    config: Any = copy.deepcopy(target)
    config.num_hidden_layers, config.layer_types = 1, FULL
    config.mlp_only_layers, config.decoder_sparse_step = [], 1
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
        body, size, eps = model.model, config.hidden_size, config.rms_norm_eps
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            setattr(body, name, type(body.norm)(size, eps))
        body.fc = nn.Linear(2 * size, size, bias=False)
    model._weight_conversions = []  # checkpoints of a training keep the experts in one tensor
    model._no_split_modules = []  # parts of the layer are called alone, so it is not a shard unit
    return model


def load_mtp(
    folder: Path, embedding: Tensor, head: Tensor, base: PreTrainedConfig | None = None
) -> PreTrainedModel:
    """The draft on the target's embedding and LM head [V, H], in the embedding's dtype.

    folder: a draft, or a checkpoint of the target; then `base`, its config, is the target's. Raises
    UserError if the layer is missing or has other parts or another embedding.
    """
    config = base or Checkpoint.open(folder).text_config
    tensors = layer_tensors(folder)
    if base is None:
        check_compact(folder, embedding, tensors["model.fc.weight"].dtype)
    refuse_other_embedding(folder, tensors.pop(EMBEDDING, None), embedding)
    model = build_mtp(config)
    tensors = {k: v.to(embedding.dtype) for k, v in fused_experts(tensors).items()}
    fill(model, tensors | {EMBEDDING: embedding, HEAD: head.to(embedding.dtype)}, folder)
    # rotary tables are not in the checkpoint, so they are computed
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    loaded: PreTrainedModel = model.to(embedding.device).eval()
    return loaded


def fused_experts(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a checkpoint, with all experts in one tensor, as transformers has them."""
    kept = {name: tensor for name, tensor in tensors.items() if not EXPERT.fullmatch(name)}
    parts = {match.groups(): tensors[name] for name in tensors if (match := EXPERT.fullmatch(name))}
    for prefix in {prefix for prefix, _, _ in parts}:
        count = sum(key[0] == prefix and key[2] == "down" for key in parts)
        gate, up, down = (
            torch.stack([parts[prefix, str(expert), kind] for expert in range(count)])
            for kind in ("gate", "up", "down")
        )
        kept |= {f"{prefix}.gate_up_proj": torch.cat([gate, up], 1), f"{prefix}.down_proj": down}
    return kept


def joined(body: Any, embedded: Tensor, hidden: Tensor) -> Tensor:
    """The layer's inputs [B, T, H], from the embeddings and the states [B, T, H]."""
    parts = body.pre_fc_norm_embedding(embedded), body.pre_fc_norm_hidden(hidden)
    inputs: Tensor = body.fc(torch.cat(parts, -1))
    return inputs


class MtpDecoder(TransformersDecoder):
    """The layer with a cache, for inference."""

    def __init__(self, model: PreTrainedModel, context_length: int) -> None:
        super().__init__(model, context_length)
        self.lm_head: Any = model.get_output_embeddings()

    @torch.inference_mode()
    def head(self, y: Tensor) -> Tensor:
        """Logits [1, T, V] of the head's inputs [1, T, H]."""
        logits: Tensor = self.lm_head(y)
        return logits

    @torch.inference_mode()
    def read(
        self, tokens: Tensor, hidden: Tensor, start: int, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """The head's input, which is also the state of the next input [1, T, H].

        tokens, hidden: the layer's inputs [1, T], [1, T, H]. start: the number of the first input.
        """
        body: Any = self.model.base_model
        inputs = joined(body, F.embedding(tokens, self.embedding), hidden)
        state: Tensor = self.run(body, start, cache, inputs_embeds=inputs).last_hidden_state
        return state, state


@dataclass(kw_only=True)
class MtpDrafter(Eagle3Drafter):
    decoder: MtpDecoder  # type: ignore[assignment]

    def fused(self, states: HiddenStates) -> Tensor:
        return self.side_by_side(states, self.decoder.dtype)
