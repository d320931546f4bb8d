"""The target's answers and its distributions over their tokens, as compact shards on disk.

A shard is one safetensors file of whole answers. For each response token it keeps the ids and log
probabilities of the target's most likely tokens (raw logits, before any warper): 4 bytes an entry
up to 65,536 ids, 6 above. What is left of the mass needs no space: it is one minus their sum.

Any number of processes append to one cache, each to shards of its own; read, it is one sequence by
index, of which nothing is in memory but where each answer stands.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from align.atomic import atomic_file, write_json


@dataclass
class CachedAnswer:
    """One answer: prompt_ids [P], response_ids [R]; top_ids, top_logprobs [R, C], best first.

    Where prompts teach as well, prompt_ids is their first token, and response_ids has the rest.
    """

    index: int
    prompt_ids: Tensor
    response_ids: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


# Where the indices of answers to held-out prompts begin: no two answers share one.
HELD_OUT = 2**30 + 2**29


class CacheError(ValueError):
    """A cache that must not be used: other contents than the run asks for, or damaged."""


def bytes_per_token(top_k: int, vocab_size: int) -> int:
    """What a response token takes on disk, its own id included."""
    return top_k * (4 if vocab_size <= 2**16 else 6) + 4


def claim(folder: Path, parts: dict[str, Any], what: str) -> None:
    """Write `parts` into the folder's key.json, or raise CacheError where it names others."""
    key = folder / "key.json"
    if not key.exists():
        write_json(key, dict(sorted(parts.items())))
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
            f"{code}{folder} holds {what} made with another {', '.join(changed)} "
            f"({detail}); they would teach the draft the wrong target. Use another "
            "output_dir or delete that folder."
        )


def content_hash(tensors: dict[str, Tensor]) -> str:
    """sha256 of names and bits, order aside."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


class AnswerCache(Sequence[CachedAnswer]):
    """A folder of shards that all depend on the same parts, read as answers ordered by index.

    Appending is safe against a kill and beside other processes that append. An answer is read from
    disk each time it is asked for.
    """

    def __init__(self, folder: Path, parts: dict[str, Any], vocab_size: int) -> None:
        """parts: what the cache depends on, by name; a cache of other parts is refused.

        Raises CacheError for that and for a shard whose bits have changed.
        """
        self.folder = folder
        self.id_type = torch.uint16 if vocab_size <= 2**16 else torch.int32
        claim(folder, parts, "distributions")
        self._paths: list[Path] = []
        # a row an answer: its index, its shard's place in _paths, and from where to where in the
        # shard its prompt and its response stand
        self._places = np.empty((0, 6), dtype=np.int64)
        self.refresh()

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
        # one overwrite another, nor one process the shard of another
        write_shard(self.folder, answers[0].index, tensors)
        self.refresh()

    def refresh(self) -> None:
        """Take in the shards written since, by whatever process; each is checked against its hash.

        Raises CacheError for one that is damaged.
        """
        known = set(self._paths)
        for path in self.shards():
            if path not in known:
                self._take_in(path)

    def _take_in(self, path: Path) -> None:
        tensors = read_shard(path, "answers")
        index = tensors["index"].numpy()
        columns = [index, np.full_like(index, len(self._paths))]
        for lengths in (tensors["prompt_length"].numpy(), tensors["response_length"].numpy()):
            ends = lengths.cumsum()
            columns += [ends - lengths, ends]
        places = np.concatenate([self._places, np.stack(columns, axis=1)])
        # by index: on disk they stand in the order in which they were finished
        self._places = places[np.unique(places[:, 0], return_index=True)[1]]
        self._paths.append(path)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, number: int) -> CachedAnswer: ...

    @overload
    def __getitem__(self, number: slice) -> list[CachedAnswer]: ...

    def __getitem__(self, number: int | slice) -> CachedAnswer | list[CachedAnswer]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        index, shard, *bounds = self._places[number].tolist()
        prompt, response = slice(*bounds[:2]), slice(*bounds[2:])
        # opened anew each time: pages of a map that stays open would count as this process's memory
        with opened(self._paths[shard]) as file:
            return CachedAnswer(
                index,
                file.get_slice("prompt_ids")[prompt].long(),
                file.get_slice("response_ids")[response].long(),
                file.get_slice("top_ids")[response].long(),
                file.get_slice("top_logprobs")[response].clone(),
            )

    @property
    def indices(self) -> list[int]:
        """The index of each answer, in order."""
        return self._places[:, 0].tolist()

    @property
    def response_lengths(self) -> list[int]:
        """Tokens of each response, in order of the answers."""
        return (self._places[:, 5] - self._places[:, 4]).tolist()

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self.shards())


def write_shard(folder: Path, first: int, tensors: dict[str, Tensor]) -> None:
    """Write a shard, atomically, under the index of its first answer."""
    with atomic_file(folder / f"shard-{first:08d}.safetensors", "wb") as file:
        file.write(save(tensors, metadata={"sha256": content_hash(tensors)}))


def read_shard(path: Path, what: str) -> dict[str, Tensor]:
    """All tensors of a shard. Raises CacheError where their bits have changed; what: they are."""
    with opened(path) as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        recorded = (file.metadata() or {}).get("sha256")
    if recorded != content_hash(tensors):
        raise CacheError(
            f"{path} does not match its checksum: bits changed since it was written; "
            f"delete it and run again, its {what} are made anew."
        )
    return tensors


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A shard, memory-mapped. Raises CacheError for one that is cut or gone."""
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (SafetensorError, FileNotFoundError) as error:
        raise CacheError(f"{path} is damaged ({error}); delete it and run again.") from error
