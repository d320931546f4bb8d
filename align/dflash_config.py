"""The config.json of a DFlash draft, in z-lab's layout or that of speculators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ARCHITECTURE = "DFlashDraftModel"  # of new drafts
NAMES = {ARCHITECTURE, "DFlash2DraftModel", "dflash", "dflash2"}
DFLASH2 = {"conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"}
SLIDING = "sliding_attention"


def is_dflash(about: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a DFlash or DFlash2 draft."""
    named = {about.get("speculators_model_type"), *(about.get("architectures") or ())}
    return not NAMES.isdisjoint(named)


def plain_config(about: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of either layout as one of z-lab's.

    is_causal: whether the slots of a block see only those before them; None: in layers with a
    window.
    """
    if (shape := about.get("transformer_layer_config")) is None:
        inner = about["dflash_config"]
        if "target_layer_ids" not in inner and (depth := about.get("num_target_layers")):
            # z-lab's class then spreads them evenly
            count = about["num_hidden_layers"]
            spread = [round(1 + i * (depth - 4) / max(count - 1, 1)) for i in range(count)]
            inner = inner | {"target_layer_ids": spread if count > 1 else [depth // 2]}
        causal = about.get("is_causal")
        about = {"block_size": inner.get("block_size"), **about, "dflash_config": inner}
        return about | {"is_causal": inner.get("causal") if causal is None else causal}
    inner = {
        "mask_token_id": about["mask_token_id"],
        "target_layer_ids": [number - 1 for number in about["aux_hidden_state_layer_ids"]],
        "sample_from_anchor": about.get("sample_from_anchor", False),
    }
    inner |= {key: about[key] for key in DFLASH2 & about.keys()}
    kept = {key: about[key] for key in ("block_size", "draft_vocab_size") if key in about}
    # vLLM reads this layout without the defaults of a class, so a window needs layer_types
    types = shape.get("layer_types") or ["full_attention"] * shape["num_hidden_layers"]
    # speculators' layers without a window see both ways in any case
    kept["is_causal"] = False if about.get("sliding_window_non_causal", True) else None
    return {**shape, **kept, "layer_types": types, "dflash_config": inner}
