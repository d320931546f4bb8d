"""Which decoder a model gets."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from eval.decoding.forward import Decoder
from eval.decoding.fused import FusedDecoder
from eval.decoding.graphs import CudaGraphs, GraphedDecoder
from eval.decoding.transformers_forward import TransformersDecoder, refuse_states

# Families whose blocks are RMSNorm, rotary attention with grouped keys, a gated MLP, and no more.
# Not Gemma-2: torch's fused attention cannot cap scores.
FUSED_FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "gemma3_text",
    "granite",
    "olmo2",
    "phi3",
    "smollm3",
)
# Rotary variants whose angles depend on the position alone, so that they can be tabulated once.
TABULATED_ROPE = ("default", "linear", "llama3", "yarn")


def longest_context(config: Any) -> int:
    """Up to how many positions a model reads each token of a text by the same angles."""
    longest: int | None = getattr(config, "max_position_embeddings", None)
    if longest is None:
        raise ValueError(
            f"A {config.model_type} model cannot be decoded here: its configuration does not say "
            "how many positions it has (max_position_embeddings); use a model of another family."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    original = rope.get("original_max_position_embeddings") or longest
    if rope.get("rope_type") == "longrope":  # all angles are others from this many tokens on
        return min(longest, original)
    if rope.get("rope_type") == "yarn":  # the angles are fixed; many configs keep the old length
        return max(longest, int(original * rope["factor"]))
    return longest


def refuse_undecodable(config: PreTrainedConfig) -> None:
    """Raise ValueError where a configuration alone says that its model cannot be decoded here."""
    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), PreTrainedModel)
    refuse_states(config.get_text_config(), model_class._is_stateful)
    longest_context(config.get_text_config())


def build_decoder(
    model: PreTrainedModel,
    context_length: int,
    embedding: Tensor | None = None,
    int8: bool = False,
    fp32: bool = False,
) -> Decoder:
    """The fastest decoder this model can have; the model itself may be dropped afterwards.

    No weight is copied: the decoder reads the model's own, of which those it fuses become views.
    context_length: positions a row will ever have (prompt and answer). embedding: a tensor equal to
    the model's input embedding, shared instead of the model's own (a pruned draft reads its
    target's). int8: the layers and the head copied in eight bits where a fused forward has kernels
    for their shapes; the logits differ from the model's, so for drafts only. fp32: computes in
    fp32, the model's weights converted a piece at a time as they are used.
    """
    config = model.config.get_text_config()
    longest = longest_context(config)
    if context_length > longest:
        raise ValueError(
            f"A context of {context_length} tokens was asked for, but {config.model_type} reads "
            f"{longest} positions by the same angles; shorten max_new_tokens or the prompts."
        )
    if _is_fusible(model):
        fused = FusedDecoder(model, context_length, embedding, int8, fp32)
        # an fp32 check converts each weight as it is used: no launch holds it up
        if (
            fp32
            or fused.device.type != "cuda"
            or {*fused.devices, fused.head.device} != {fused.device}
        ):
            return fused
        return GraphedDecoder(fused, CudaGraphs(fused.device))
    if len(places := {str(p.device) for p in model.parameters()}) > 1:
        raise ValueError(
            f"The layers of a {config.model_type} model lie on {', '.join(sorted(places))}, but "
            f"only those of {', '.join(FUSED_FAMILIES)} may be spread; load it on one device, or "
            "let a server answer (answers: server)."
        )
    return TransformersDecoder(model, context_length, fp32)


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
