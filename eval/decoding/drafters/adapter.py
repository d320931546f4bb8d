"""A LoRA adapter on its base draft, merged when it is loaded: `adapter:FOLDER[@BASE]`.

FOLDER is as peft wrote it; base.json, which draftsmith adds, has the hashes of the base's weights
in each of its forms.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel

from align.sources import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    check_adapter,
    load_model,
    merge_adapter,
    read_json,
    resolve_checkpoint,
)
from align.vocabulary import refuse_adapter_with_rows
from eval.decoding.drafters import pruned
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.drafters.sibling import sibling_drafter
from eval.decoding.target import Target, weights_sha256

BASE = "base.json"


class AdapterError(ValueError):
    """An adapter that cannot be used: which, why, and what to do."""


def load(spec: str, target: Target, strategy: str) -> Drafter:
    """Without BASE the adapter's own config names it.

    Raises AdapterError for another base than the adapter's, SourceError for what is no adapter.
    """
    name, _, base = spec.partition(":")[2].partition("@")
    folder = Path(name)
    check_adapter(folder)
    refuse_adapter_with_rows(folder / ADAPTER_WEIGHTS)
    base = base or read_json(folder / ADAPTER_CONFIG)["base_model_name_or_path"]
    places = (Path(base) / "compact", Path(base))
    compact = next((place for place in places if (place / "compact.json").is_file()), None)
    hashes = read_json(folder / BASE)["base_sha256"] if (folder / BASE).is_file() else []
    if hashes and weights_sha256(str(compact or resolve_checkpoint(base))) not in hashes:
        raise AdapterError(
            f"{folder} was trained on another base than {base} (sha256 {hashes[0][:12]}…); name "
            "its own as adapter:FOLDER@BASE, or train it again on this one."
        )
    dtype = target.decoder.dtype
    drafter: Drafter
    if compact is not None:
        model, token_ids = pruned.load_compact(compact, target.decoder.embedding)
        model = merged_in_fp32(model, base, folder, dtype)
        drafter = pruned.FORMAT.drafter(model, token_ids, target)
    else:
        model = merged_in_fp32(load_model(base, torch.float32), base, folder, dtype)
        drafter = sibling_drafter(model, base, target, strategy)
    drafter.path = name
    return drafter


def merged_in_fp32(
    model: PreTrainedModel, base: str, adapter: Path, dtype: torch.dtype
) -> PreTrainedModel:
    """The model with the adapter merged and rounded once, as a run's own draft is made."""
    whole = merge_adapter(model.float(), base, adapter)
    for weight in whole.parameters():  # and not the rotary frequencies
        weight.data = weight.data.to(dtype)
    return whole.eval()
