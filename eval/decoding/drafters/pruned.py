"""A target pruned in depth, in its compact form (`draft/compact/`).

That form holds the draft's own tensors only: its layers, its norm, its head over `token_ids`. The
input embedding is the target's, shared in memory and named by its hash.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from align.atomic import atomic_folder
from align.sources import read_json
from eval.decoding.build import build_decoder
from eval.decoding.drafters.checkpoint import CheckpointDrafter
from eval.decoding.drafters.in_turn import on_target_ids
from eval.decoding.target import Target, tensor_sha256

EMBEDDING = "model.embed_tokens.weight"
COMPACT = "draftsmith-compact/2"


def save_compact(
    folder: Path,
    model: PreTrainedModel,
    token_ids: Tensor | None,
    embedding: Tensor,
    drafter: str = "pruned",
    layers: Sequence[int] = (),
) -> None:
    """Write the compact form; `embedding` is the target's, of which only the hash is kept.

    drafter: the kind, a file of this folder. layers: the target's hidden states that it reads.
    """
    tensors = {k: v.contiguous() for k, v in model.state_dict().items() if k != EMBEDDING}
    if token_ids is not None:
        # as other engines store them: the target's id less the row's number, and who has a row
        rows = torch.arange(len(token_ids), device=token_ids.device)
        tensors["d2t"] = (token_ids - rows).int()
        tensors["t2d"] = torch.zeros(len(embedding), dtype=torch.bool)
        tensors["t2d"][token_ids.cpu()] = True
    with atomic_folder(folder) as partial:
        model.config.save_pretrained(partial)
        save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
        write_about(partial, drafter, embedding, layers=list(layers))


def write_about(folder: Path, drafter: str, embedding: Tensor, **more: Any) -> None:
    """compact.json of a kind; `embedding` is the target's."""
    about = {"format": COMPACT, "drafter": drafter, "embedding_sha256": tensor_sha256(embedding)}
    (folder / "compact.json").write_text(json.dumps(about | more, indent=2))


def load_compact(
    folder: Path,
    embedding: Tensor,
    extend: Callable[[PreTrainedModel], None] = lambda model: None,
) -> tuple[PreTrainedModel, Tensor | None]:
    """The model and its head's token ids, on the target's own embedding [V, H].

    extend: hangs the modules of a kind on the model, before weights are put in.
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
    extend(model)
    model.load_state_dict({**tensors, EMBEDDING: embedding}, assign=True)
    # rotary tables are no parameters: build them for real
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(embedding.device)
    return model.eval(), token_ids


def check_compact(folder: Path, embedding: Tensor) -> dict[str, Any]:
    """What compact.json says. Raises ValueError when it names another target or format."""
    about: dict[str, Any] = read_json(folder / "compact.json")
    if about.get("format") != COMPACT:
        raise ValueError(
            f"{folder} has format {about.get('format')!r}, not {COMPACT!r}; it was written by "
            "another version: make the draft again, or use the full form beside it."
        )
    if about["embedding_sha256"] != tensor_sha256(embedding):
        raise ValueError(
            f"{folder} was made for another target: its input embedding has hash "
            f"{about['embedding_sha256'][:12]}…, this target's is "
            f"{tensor_sha256(embedding)[:12]}…. Use the target it was made for, in the same "
            "dtype, or the full form beside it."
        )
    return about


def read_token_ids(folder: Path, tensors: dict[str, Tensor]) -> Tensor | None:
    """Target id of each head row [K], taken out of the tensors; None where it has them all.

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


def pruned_drafter(
    model: PreTrainedModel, token_ids: Tensor | None, target: Target, masks: Tensor | None = None
) -> CheckpointDrafter:
    """A pruned draft, which reads its target's embedding and drafts in the target's ids.

    token_ids: those of a trimmed head [K]. On a CPU it runs in eight bits: one step of a draft is
    hardly more than reading its weights, and what rounding them costs in alpha is far less than the
    time it saves (docs/lab-notes.md). masks: as of `build_decoder`.
    """
    embedding = target.decoder.embedding
    on_cpu = embedding.device.type == "cpu"
    decoder = build_decoder(
        model, target.decoder.context_length, embedding, int8=on_cpu, masks=masks
    )
    return CheckpointDrafter(
        **on_target_ids(token_ids, embedding), bytes=decoder.own_bytes(), decoder=decoder
    )


def load(folder: Path, target: Target, strategy: str) -> CheckpointDrafter:
    """The pruned draft in `folder`."""
    return pruned_drafter(*load_compact(folder, target.decoder.embedding), target)
