"""The target's answers and its distributions over their tokens, as compact shards on disk.

A shard is one safetensors file of whole answers. For each response token it keeps the ids and log
probabilities of the target's most likely tokens (raw logits, before any warper): 4 bytes an entry
up to 65,536 ids, 6 above. What is left of the mass needs no space: it is one minus their sum.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from align.atomic import atomic_file


@dataclass
class CachedAnswer:
    """One answer: prompt_ids [P], response_ids [R]; top_ids, top_logprobs [R, C], best first."""

    index: int
    prompt_ids: Tensor
    response_ids: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class CacheError(ValueError):
    """A cache that must not be used: other contents than the run asks for, or damaged."""


def _content_hash(tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


class AnswerCache:
    """A folder of shards that all depend on the same parts. Appending is safe against a kill."""

    def __init__(self, folder: Path, parts: dict[str, Any], vocab_size: int) -> None:
        """parts: what the cache depends on, by name; a cache of other parts is refused."""
        self.folder = folder
        self.id_type = torch.uint16 if vocab_size <= 2**16 else torch.int32
        key = folder / "key.json"
        if not key.exists():
            with atomic_file(key) as file:
                json.dump(parts, file, indent=2, sort_keys=True)
        try:
            found = json.loads(key.read_text())
        except ValueError as error:
            raise CacheError(
                f"{key} is not readable JSON ({error}): the cache is damaged; delete {folder} "
                "and run again."
            ) from error
        changed = sorted(name for name in parts | found if parts.get(name) != found.get(name))
        if changed:
            detail = "; ".join(f"{n}: {found.get(n)} -> {parts.get(n)}" for n in changed)
            code = "TOK-014: " if "tokenizer" in changed else ""
            raise CacheError(
                f"{code}{folder} holds distributions made with another {', '.join(changed)} "
                f"({detail}); they would teach the draft the wrong target. Use another "
                "output_dir or delete that folder."
            )

    def shards(self) -> list[Path]:
        return sorted(self.folder.glob("shard-*.safetensors"))

    def append(self, answers: list[CachedAnswer]) -> None:
        """Write one shard of whole answers, atomically."""
        assert answers
        tensors = {
            "index": torch.tensor([a.index for a in answers], dtype=torch.int64),
            "prompt_length": torch.tensor([len(a.prompt_ids) for a in answers]),
            "response_length": torch.tensor([len(a.response_ids) for a in answers]),
            "prompt_ids": torch.cat([a.prompt_ids for a in answers]).to(torch.int32),
            "response_ids": torch.cat([a.response_ids for a in answers]).to(torch.int32),
            "top_ids": torch.cat([a.top_ids for a in answers]).to(self.id_type),
            "top_logprobs": torch.cat([a.top_logprobs for a in answers]).to(torch.float16),
        }
        # named by its first answer, not by count: a shard deleted by hand must not make the next
        # one overwrite another
        name = f"shard-{answers[0].index:08d}.safetensors"
        with atomic_file(self.folder / name, "wb") as file:
            file.write(save(tensors, metadata={"sha256": _content_hash(tensors)}))

    def __iter__(self) -> Iterator[CachedAnswer]:
        """Every answer, shard by shard; each shard is checked against its hash first."""
        for path in self.shards():
            try:
                with safe_open(path, "pt") as file:
                    tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                    recorded = (file.metadata() or {}).get("sha256")
            except SafetensorError as error:
                raise CacheError(
                    f"{path} is damaged ({error}); delete it and run again."
                ) from error
            if recorded != _content_hash(tensors):
                raise CacheError(
                    f"{path} does not match its checksum: bits changed since it was written; "
                    "delete it and run again, its answers are made anew."
                )
            prompts = tensors["prompt_ids"].long().split(tensors["prompt_length"].tolist())
            lengths = tensors["response_length"].tolist()
            parts = [
                tensors[name].split(lengths) for name in ("response_ids", "top_ids", "top_logprobs")
            ]
            rows = zip(tensors["index"].tolist(), prompts, *parts, strict=True)
            for index, prompt, response, top_ids, top_logprobs in rows:
                yield CachedAnswer(index, prompt, response.long(), top_ids.long(), top_logprobs)

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.shards())
