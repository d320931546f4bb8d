"""MTP: a target's own head for multi-token prediction, one more decoder layer (arXiv 2412.19437).

Input i of the layer is the embedding of token i + 1, and a state [H] of token i: the target's last
hidden state if the target has read token i, else the layer's output for the input before. The
checkpoint of the target stores the layer as `model.layers.N`, with N the number of its layers
(DeepSeek-V3, GLM-4.5), or as `mtp` (Qwen3-Next, Qwen3.5). transformers leaves these tensors out
when it loads the target.

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
from eval.decoding.recurrent import HYBRID
from eval.decoding.target import Target, model_bytes
from eval.decoding.transformers_forward import TransformersDecoder

ARCHITECTURE = "DraftsmithMtp"  # in a draft's config.json, which is otherwise the target's
SERVED = "served"  # a folder in the draft's folder: what engines load
LAYER = "model.layers.0."  # the names of the layer here
HEAD = "shared_head.head.weight"  # a checkpoint's copy of the target's LM head
EMBED = "embed_tokens.weight"  # and of its embedding
FULL = ["full_attention"]
EXPERT = re.compile(r"(.*mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
# Whether a later step of a draft reads the layer's output after its last norm, as vLLM 0.32
# computes it. The families in HYBRID store the layer as `mtp`, and the first input of a text has an
# embedding; in the other two it is zero.
NORMED = {"deepseek_v3": True, "glm4_moe": False} | dict.fromkeys(HYBRID, True)
PARTS = {  # tensors of `mtp` and their names here
    "mtp.fc.weight": "eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.norm.weight": "shared_head.norm.weight",
}
SPECULATORS = {  # tensors of `mtp_layers.0` in the layout of speculators, and their names here
    "input_proj.weight": "eh_proj.weight",
    "token_layernorm.weight": "enorm.weight",
    "hidden_layernorm.weight": "hnorm.weight",
    "final_layernorm.weight": "shared_head.norm.weight",
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
            bytes=model_bytes(model, "model.embed_tokens.weight", "lm_head.weight"),
            decoder=MtpDecoder(model, target.decoder.context_length),
            layers=(target.model.config.get_text_config().num_hidden_layers,),
        )


FORMAT = Mtp()


def layer_tensors(folder: Path, config: PreTrainedConfig) -> dict[str, Tensor]:
    """The tensors of the layer in a checkpoint, by their names here without `model.layers.0.`.

    config: of the target. Raises UserError if it has none, or several layers.
    """
    tensors, layers = {}, set()
    wanted = Checkpoint.open(folder).tensors(lambda name: place_of(name, config) is not None)
    for name, tensor in wanted.items():
        if place := place_of(name, config):
            layers.add(place[0])
            tensors[place[1]] = tensor
    if len(layers) != 1:
        raise UserError(
            f"{folder} has {len(layers)} layers for multi-token prediction ({prefix_of(config)}), "
            "but drafter mtp tunes exactly one. Fine-tuning may drop it: name the base model that "
            "has it with draft."
        )
    return tensors


def prefix_of(config: PreTrainedConfig) -> str:
    """The beginning of the layer's names in a checkpoint. config: of the target."""
    hybrid = config.model_type in HYBRID
    return "mtp.layers.0." if hybrid else f"model.layers.{config.num_hidden_layers}."


def place_of(name: str, config: PreTrainedConfig) -> tuple[int, str] | None:
    """The number of a checkpoint's layer, and the tensor's name in it here.

    None for a tensor that is not of the layer. config: of the target.
    """
    if match := re.fullmatch(r"mtp_layers\.(\d+)\.(.*)", name):
        return int(match[1]), SPECULATORS.get(match[2], match[2])
    hybrid = config.model_type in HYBRID
    match = re.fullmatch(rf"{'mtp' if hybrid else 'model'}\.layers\.(\d+)\.(.*)", name)
    if match and (hybrid or int(match[1]) >= config.num_hidden_layers):
        return int(match[1]), match[2]
    if hybrid and name.startswith("mtp."):
        return 0, PARTS.get(name, name.removeprefix("mtp."))
    return None


def stored_name(name: str, config: PreTrainedConfig) -> str:
    """The inverse of `place_of`."""
    parts = PARTS if config.model_type in HYBRID else {}
    stored = {part: place for place, part in parts.items()}
    return stored.get(name, prefix_of(config) + name)


def build_mtp(target: PreTrainedConfig) -> Any:
    """The draft without weights: a model of the target's class with this layer alone.

    The layer has the modules of the checkpoint. The body has no last norm, because some families
    pass the layer's output on without it. target: the target's config.
    """
    config: Any = copy.deepcopy(target)
    config.num_hidden_layers, config.first_k_dense_replace = 1, 0  # the layer has experts
    if config.model_type in HYBRID:
        config.layer_types, config.mlp_only_layers, config.decoder_sparse_step = FULL, [], 1
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
        layer, norm = model.model.layers[0], type(model.model.norm)
        size, eps = config.hidden_size, config.rms_norm_eps
        layer.enorm, layer.hnorm = norm(size, eps), norm(size, eps)
        layer.eh_proj = nn.Linear(2 * size, size, bias=False)
        layer.shared_head = nn.ModuleDict({"norm": norm(size, eps)})
        model.model.norm = nn.Identity()
    model._weight_conversions = []  # checkpoints of a training keep the experts in one tensor
    model._no_split_modules = []  # parts of the layer are called alone, so it is not a shard unit
    return model


def load_mtp(
    folder: Path,
    embedding: Tensor,
    head: Tensor,
    base: PreTrainedConfig | None = None,
    tuned: bool = False,
) -> PreTrainedModel:
    """The draft on the target's embedding and LM head [V, H], in the embedding's dtype.

    folder: a draft, or a checkpoint of the target; then `base`, its config, is the target's. tuned:
    as in `load_eagle3`. Raises UserError if the layer is missing or has other parts or another
    embedding.
    """
    config = base or Checkpoint.open(folder).text_config
    tensors = layer_tensors(folder, config)
    if base is None:
        check_compact(folder, embedding, tensors["eh_proj.weight"].dtype)
    own = tensors.pop(EMBED, None)
    if not tuned:
        refuse_other_embedding(folder, own, embedding)
    tensors.pop(HEAD, None)
    model = build_mtp(config)
    floating = {name for name, _ in model.named_parameters()}
    named = {LAYER + name: tensor for name, tensor in fused_experts(tensors).items()}
    cast = {k: v.to(embedding.dtype) if k in floating else v for k, v in named.items()}
    cast["lm_head.weight"] = head.to(embedding.dtype)
    fill(model, cast | {"model.embed_tokens.weight": embedding}, folder)
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


def joined(layer: Any, embedded: Tensor, hidden: Tensor) -> Tensor:
    """The layer's inputs [B, T, H], from the embeddings and the states [B, T, H]."""
    return layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(hidden)], -1))


def outputs(layer: Any, family: str, state: Tensor) -> tuple[Tensor, Tensor]:
    """The LM head's input and the next step's state, from the layer's output; each [B, T, H]."""
    normed = layer.shared_head.norm(state)
    return normed, normed if NORMED[family] else state


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
        """The head's input and the state of the next input; both [1, T, H].

        tokens, hidden: the layer's inputs [1, T], [1, T, H]. start: the number of the first input.
        """
        body: Any = self.model.base_model
        (layer,) = body.layers
        embedded = F.embedding(tokens, self.embedding)
        if start == 0 and self.config.model_type not in HYBRID:
            embedded[:, 0] = 0
        inputs = joined(layer, embedded, hidden)
        state = self.run(body, start, cache, inputs_embeds=inputs).last_hidden_state
        return outputs(layer, self.config.model_type, state)


@dataclass(kw_only=True)
class MtpDrafter(Eagle3Drafter):
    decoder: MtpDecoder  # type: ignore[assignment]

    def fused(self, states: HiddenStates) -> Tensor:
        return self.side_by_side(states, self.decoder.dtype)
