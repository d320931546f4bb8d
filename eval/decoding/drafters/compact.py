"""compact.json and the tensors of a draft that shares its target's embedding, as read.

Legend: K vocabulary entries of the draft's head.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from align.sources import read_json
from eval.decoding.target import tensor_sha256

COMPACT = "draftsmith-compact/2"


def check_compact(folder: Path, embedding: Tensor) -> Mapping[str, Any]:
    """What compact.json says. Raises ValueError when it names another target or format."""
    about: dict[str, Any] = read_json(folder / "compact.json")
    if about.get("format") != COMPACT:
        raise ValueError(
            f"{folder} has format {about.get('format')!r}, not {COMPACT!r}; it was written by "
            "another version: use the full-vocabulary checkpoint beside it, or make it again."
        )
    if about["embedding_sha256"] != tensor_sha256(embedding):
        raise ValueError(
            f"{folder} was made for another target: its input embedding has hash "
            f"{about['embedding_sha256'][:12]}…, this target's is "
            f"{tensor_sha256(embedding)[:12]}…. Use the target it was made for, in the same "
            "dtype, or the full-vocabulary checkpoint beside it."
        )
    return about


def weights_of(folder: Path, device: str) -> dict[str, Tensor]:
    """All tensors of a published draft."""
    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path, device=device)
    return tensors


def fill(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Load these weights into the model. Raises ValueError where others are due."""
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise ValueError(
            f"The weights of {folder} are not those of its kind of draft ({error}): it has parts "
            "that are not computed here, or is damaged; fetch it again, or measure it in vLLM "
            "(eval.run --engine vllm)."
        ) from None


def refuse_other_target(
    folder: Path, about: Mapping[str, Any], target: Any, keys: Iterable[str]
) -> None:
    """Raise ValueError where a published draft has another shape than its target's config."""
    for key in keys:
        if about.get(key) != getattr(target, key):
            raise ValueError(
                f"{folder} is a draft of a target with {key} {about.get(key)}, but this one has "
                f"{getattr(target, key)}; name the target that it was made for."
            )


def read_token_ids(folder: Path, tensors: dict[str, Tensor]) -> Tensor | None:
    """Target id of each entry of the head [K], removed from the tensors; None for a whole head.

    Raises ValueError where d2t and t2d disagree.
    """
    if "d2t" not in tensors:
        return None
    d2t = tensors.pop("d2t").long()
    token_ids = d2t + torch.arange(len(d2t), device=d2t.device)
    named = tensors.pop("t2d").nonzero()[:, 0]
    if not torch.equal(named, token_ids.sort().values):
        raise ValueError(
            f"TOK-015: d2t and t2d of {folder} name different ids, so its drafts would be "
            "other tokens than meant; make the draft again."
        )
    return token_ids
