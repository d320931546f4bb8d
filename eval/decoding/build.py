"""Chooses the decoder of a model: the fused forward or the Transformers forward."""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from align.errors import UserError
from eval.decoding.forward import Decoder
from eval.decoding.fused import FusedDecoder
from eval.decoding.graphs import CudaGraphs, GraphedDecoder
from eval.decoding.transformers_forward import TransformersDecoder, refuse_states

# Families whose layers have only RMSNorm, rotary attention with grouped keys, and a gated MLP.
# Gemma-2 is not among them, because torch's fused attention cannot cap scores.
FUSED_FAMILIES = "llama mistral qwen2 qwen3 gemma3_text granite olmo2 phi3 smollm3".split()
# Rotary variants whose angles depend on the position alone: one table serves all texts.
TABULATED_ROPE = ("default", "linear", "llama3", "yarn")


def longest_context(config: Any) -> int:
    """The longest text with fixed rotary angles. Raises UserError if the config has no length."""
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise UserError(
            f"A {config.model_type} model cannot be decoded here: its configuration has no "
            "max_position_embeddings; use a model of another family."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or longest
    if rope.get("rope_type") == "longrope":  # in a longer text, all angles are different
        return min(longest, original)
    if rope.get("rope_type") in ("yarn", "linear"):  # fixed; many configs keep the old length
        return max(longest, int(original * rope["factor"]))
    return longest


def refuse_undecodable(config: PreTrainedConfig) -> None:
    """Raise UserError if the configuration shows that the model cannot be decoded here."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), PreTrainedModel)
    refuse_states(config.get_text_config(), model_class._is_stateful)
    longest_context(config.get_text_config())


def build_decoder(model: PreTrainedModel, context_length: int) -> Decoder:
    """The fastest decoder for this model.

    The decoder shares the model's weights: fused weights replace the model's tensors, which become
    views. context_length: the most positions of a row (prompt and output). Raises UserError for a
    context that is too long, and for a model that cannot be decoded.
    """
    config = model.config.get_text_config()
    longest = longest_context(config)
    if context_length > longest:
        raise UserError(
            f"A context of {context_length} tokens is needed, but this {config.model_type} model "
            f"can be decoded up to {longest} positions only; lower max_new_tokens or shorten the "
            "prompts."
        )
    if _is_fusible(model):
        fused = FusedDecoder(model, context_length)
        return GraphedDecoder(fused, CudaGraphs(fused.device)) if on_one_gpu(fused) else fused
    if len(places := {str(p.device) for p in model.parameters()}) > 1:
        raise UserError(
            f"The layers of a {config.model_type} model are on {', '.join(sorted(places))}, but "
            f"only models of {', '.join(FUSED_FAMILIES)} can be spread over devices. Load the "
            "model on one device, or let a server compute it (answers: server)."
        )
    return TransformersDecoder(model, context_length)


def on_one_gpu(fused: FusedDecoder) -> bool:
    """Whether the whole model is on one GPU, so that its forwards can be recorded."""
    places = {fused.device, *fused.devices, fused.head.weight.device}
    return fused.device.type == "cuda" and len(places) == 1


def _is_fusible(model: PreTrainedModel) -> bool:
    config: Any = model.config
    if config.model_type not in FUSED_FAMILIES:
        return False
    gemma = config.model_type == "gemma3_text"
    if gemma and (config.use_bidirectional_attention or config.final_logit_softcapping):
        return False
    ropes = config.rope_parameters.values() if gemma else [config.rope_parameters]
    activation = config.hidden_activation if gemma else config.hidden_act
    kinds = {*(getattr(config, "layer_types", None) or [])}
    return (
        activation == ("gelu_pytorch_tanh" if gemma else "silu")
        and kinds <= {"full_attention", "sliding_attention"}
        and all(rope["rope_type"] in TABULATED_ROPE for rope in ropes)
        and all(rope.get("partial_rotary_factor", 1) == 1 for rope in ropes)
    )
