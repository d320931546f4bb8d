"""Reads compact.json and the tensors of a draft that shares its target's embedding.

Legend: V the target's vocabulary, H hidden size, K entries of the draft's head.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import read_json
from eval.decoding.target import tensor_sha256

COMPACT = "draftsmith-compact/2"


def check_compact(folder: Path, embedding: Tensor | None, dtype: torch.dtype) -> Mapping[str, Any]:
    """The fields of compact.json, if the draft was made for the target with `embedding` [V, H].

    embedding: None if it may be another one. dtype: the draft's. The embeddings are compared in it,
    because the target may be loaded in another one. Raises UserError if they differ, and for
    another format.
    """
    about: dict[str, Any] = read_json(folder / "compact.json")
    if about.get("format") != COMPACT:
        raise UserError(
            f"{folder} has format {about.get('format')!r}, but this version reads {COMPACT!r}. "
            "Train the draft again."
        )
    if embedding is None:
        return about
    if about["embedding_sha256"] != (found := tensor_sha256(embedding.to(dtype))):
        stated, here = (str(each).removeprefix("torch.") for each in (dtype, embedding.dtype))
        raise UserError(
            f"{folder} was made in {stated} with an input embedding of hash "
            f"{about['embedding_sha256'][:12]}…, but this target's, in {here}, has "
            f"{found[:12]}…. Use the draft's target in the same dtype."
        )
    return about


def weights_of(folder: Path, device: str) -> dict[str, Tensor]:
    """All tensors of a folder's weights, by name. Raises SourceError if a file is damaged."""
    return Checkpoint(str(folder), folder).tensors(device=device)


def fill(model: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Load the tensors into the model. Raises UserError if names or shapes do not fit."""
    try:
        model.load_state_dict(tensors, assign=True)
    except RuntimeError as error:
        raise UserError(
            f"The weights of {folder} do not fit its kind of draft ({error}): the draft is damaged "
            "or has parts that are not computed here. Fetch it again, or measure it in vLLM "
            "(eval.run --engine vllm)."
        ) from None


def refuse_unknown_parts(folder: Path, kind: str, parts: Mapping[str, tuple[Any, Any]]) -> None:
    """Raise UserError for a published draft with parts that are not computed here.

    parts: the draft's value, and the value that is computed, by key.
    """
    for key, (value, computed) in parts.items():
        if value != computed:
            raise UserError(
                f"{folder} has {key} {value}, but only {kind} with {computed} is computed here; "
                "measure the draft in vLLM (eval.run --engine vllm)."
            )


def refuse_other_target(folder: Path, about: Mapping[str, Any], target: Any) -> None:
    """Raise UserError if a published draft's config has other sizes than the target's config."""
    for key in ("hidden_size", "vocab_size"):
        if about.get(key) != getattr(target, key):
            raise UserError(
                f"{folder} was made for a target with {key} {about.get(key)}, but this target has "
                f"{getattr(target, key)}; name the target of the draft."
            )


def refuse_other_layers(folder: Path, layers: Sequence[int], depth: int) -> None:
    """Raise UserError if a draft reads states that a target of `depth` layers does not have.

    The state after the last layer is here after the final norm, but engines give it without.
    """
    if max(layers) >= depth:
        raise UserError(
            f"{folder} reads the hidden states of layers {list(layers)}, but this target has "
            f"{depth} layers, and the state after the last one is not read here. Use the draft's "
            "target, or measure the draft in vLLM (eval.run --engine vllm)."
        )


def refuse_other_embedding(folder: Path, own: Tensor | None, embedding: Tensor) -> None:
    """Raise UserError if a published draft has an embedding `own` that is not the target's."""
    if own is not None and not torch.equal(own.to(embedding.dtype), embedding):
        raise UserError(
            f"{folder} has another input embedding than this target; name the target of the "
            "draft, or measure the draft in vLLM (eval.run --engine vllm)."
        )


def read_token_ids(folder: Path, tensors: dict[str, Tensor]) -> Tensor | None:
    """The target id of each entry of the head [K]; None for a head over all ids.

    d2t and t2d are removed from `tensors`. A draft need not have t2d. Raises UserError if they
    disagree.
    """
    if "d2t" not in tensors:
        return None
    d2t = tensors.pop("d2t").long()
    token_ids = d2t + torch.arange(len(d2t), device=d2t.device)
    has_entry = tensors.pop("t2d", None)
    if has_entry is not None and not torch.equal(
        has_entry.nonzero()[:, 0], token_ids.sort().values
    ):
        raise UserError(
            f"TOK-015: d2t and t2d of {folder} name different ids, so wrong tokens would be "
            "drafted; fetch or train the draft again."
        )
    return token_ids
