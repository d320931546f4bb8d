"""Write the folder of a draft that shares its target's embedding.

Legend: V the target's vocabulary, K entries of the draft's head, H hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from align.checkpoint import Checkpoint
from eval.decoding.drafters.compact import COMPACT
from eval.decoding.target import tensor_sha256


def write_compact(
    folder: Path,
    kind: str,
    tensors: Mapping[str, Tensor],
    embedding: Tensor,
    file: str = "model.safetensors",
    **more: Any,
) -> None:
    """Write the tensors' file in the dtype of the target's `embedding` [V, H], and compact.json."""
    about = {"format": COMPACT, "drafter": kind, "embedding_sha256": tensor_sha256(embedding)}
    (folder / "compact.json").write_text(json.dumps(about | more, indent=2))
    stored = {
        name: (tensor.to(embedding.dtype) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(stored, folder / file, metadata={"format": "pt"})


def tuned_config(
    about: Mapping[str, Any], layers: PreTrainedConfig, embedding: Tensor, target: Checkpoint
) -> dict[str, Any]:
    """The config.json of a draft for `target`, whose layers have the config `layers`.

    about: the config.json that it was read from, or that of a new draft.
    """
    dtype = "dtype" if "dtype" in about else "torch_dtype"
    tuned = {**about, dtype: str(embedding.dtype).removeprefix("torch.")}
    if shape := about.get("transformer_layer_config"):
        # vLLM reads these keys without the defaults of the layers' class
        values, keys = layers.to_dict(), type(layers)().to_dict()
        tuned["transformer_layer_config"] = {key: values[key] for key in keys} | shape
    if proposals := about.get("speculators_config"):
        names = target.config.architectures
        verifier = {"name_or_path": target.spec, "architectures": names}
        tuned["speculators_config"] = proposals | {"verifier": verifier}
    return tuned


def target_id_maps(token_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """A trimmed head's ids [K] as other engines store them.

    d2t: target id minus entry number [K]. t2d: whether a target id has an entry [V].
    """
    entries = torch.arange(len(token_ids), device=token_ids.device)
    has_entry = torch.zeros(vocab_size, dtype=torch.bool)
    has_entry[token_ids.cpu()] = True
    return {"d2t": (token_ids - entries).cpu(), "t2d": has_entry}
