"""The target's outputs, distributions and hidden states on disk, shared by all runs.

A store is a folder `teacher/KEY` of the cache, or of the run's folder (`stores_of`). KEY is a hash
of what runs must share to share the outputs: model, dtype and `AnswerSettings.key`; key.json has
them in words. Reference decoder or vLLM, batch size and device are not in the key: they change an
output by rounding only. A learning rate changes no output. A record has a name (a hash of its token
ids) and a few tensors. A shard is one safetensors file of whole records. It is written under
another name, renamed, and never changed. So any number of processes and runs read and append at
once, and a kill loses only the shard that is being written.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor

from align.cache import cache_folder, file_sha256
from align.checkpoint import opened_weights
from align.errors import SourceError, UserError
from align.files import atomic_file, locked, write_json
from align.machine import from_first, shared_by_all, wait_on_host
from eval.decoding.loop import Decoding

TEACHER = "teacher"  # the folder of all stores, in the cache or in a run's folder
VISIBLE_SECONDS = 90.0  # NFS may show a new file to other machines after a minute only
REMEDY = "delete it and run again: only its records are remade"  # of a damaged shard
ANSWERS_PER_SHARD = 64  # a process that is killed loses at most this number of outputs
TOKENS_PER_SHARD = 2**15  # of texts: their hidden states take up to 40 kB a token
TAUGHT = "-taught"  # ends the name of an output with distributions within its prompt

Record = Mapping[str, Tensor]
T = TypeVar("T")


@dataclass(frozen=True)
class AnswerSettings:
    """How the target is prompted for its outputs.

    top_k: log-probabilities stored at each token. batch_size: prompts in a batch. logged: whether
    the outputs are read from logs, so that nothing is generated.
    """

    decoding: Decoding
    top_k: int
    batch_size: int
    logged: bool = False

    @property
    def key(self) -> dict[str, Any]:
        """The settings that must be equal for two runs on one model to share outputs."""
        if self.logged:
            return {"outputs": "logged", "cache_top_k": self.top_k}
        temperature = self.decoding.sampling.temperature
        key = {
            "answer_temperature": temperature,
            "answer_max_new_tokens": self.decoding.max_new_tokens,
            "cache_top_k": self.top_k,
            "stop tokens": sorted(self.decoding.stops),
        }
        return key | ({"seed": self.decoding.seed} if temperature else {})


def stores_of(run: Path) -> Path:
    """The folder of all stores of the run with this folder. All processes must call it.

    It is in the run's folder if the processes do not share a cache.
    """
    cache, private = cache_folder() / TEACHER, run / TEACHER
    return cache if shared_by_all(cache) and not from_first(private.is_dir()) else private


def bytes_per_token(top_k: int, vocab_size: int) -> int:
    """Bytes on disk per response token, with its id."""
    return top_k * (4 if vocab_size <= 2**16 else 6) + 4


def name_of(ids: Sequence[int] | Tensor) -> str:
    """The name of token ids in a store: the start of their hash."""
    bits = torch.as_tensor(ids, dtype=torch.int64).numpy().tobytes()
    return hashlib.sha256(bits).hexdigest()[:32]


def names_of(prompts: Sequence[Sequence[int]], taught: bool = False) -> list[str]:
    """The name of each prompt's output. It has a number, because a prompt may have several outputs.

    taught: the outputs have distributions within the prompts.
    """
    times: Counter[str] = Counter()
    names = []
    for name in map(name_of, prompts):
        names.append(f"{name}-{times[name]}{TAUGHT * taught}")
        times[name] += 1
    return names


@dataclass
class CachedAnswer:
    """One output: prompt_ids [P], response_ids [R]; top_ids, top_logprobs [R, C], best first.

    The log-probabilities are those of the raw logits, before any logits processor; the mass that
    they lack is that of all other tokens. If the prompt is taught, prompt_ids is its first token,
    and response_ids has all other tokens.
    """

    prompt_ids: Tensor
    response_ids: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    @property
    def text(self) -> Tensor:
        """All token ids [P + R]."""
        return torch.cat([self.prompt_ids, self.response_ids])

    def packed(self, vocab_size: int) -> Record:
        """The record on disk, with `bytes_per_token` bytes for each response token."""
        return {
            "prompt_ids": self.prompt_ids.to(torch.int32),
            "response_ids": self.response_ids.to(torch.int32),
            "top_ids": self.top_ids.to(torch.uint16 if vocab_size <= 2**16 else torch.int32),
            "top_logprobs": self.top_logprobs.to(torch.float16),
        }


def in_shards(texts: Iterable[T], tokens: Callable[[T], int]) -> Iterator[list[T]]:
    """The texts in lists of ANSWERS_PER_SHARD, or of fewer that have TOKENS_PER_SHARD tokens.

    tokens: returns the number of tokens of a text.
    """
    shard, size = list[T](), 0
    for text in texts:
        shard.append(text)
        size += tokens(text)
        if len(shard) == ANSWERS_PER_SHARD or size >= TOKENS_PER_SHARD:
            yield shard
            shard, size = [], 0
    if shard:
        yield shard


class _Column(NamedTuple):
    """A tensor of a shard. start: its first byte in the file. ends: the ends of its records.

    like: no rows of it, for their shape and dtype.
    """

    start: int
    ends: np.ndarray[Any, Any]
    like: Tensor

    def shape(self, number: int) -> tuple[int, ...]:
        """The shape of a record's rows."""
        return int(self.ends[number + 1] - self.ends[number]), *self.like.shape[1:]


class _Shard(NamedTuple):
    """columns: the shard's tensors. by: what generated the records."""

    columns: dict[str, _Column]
    by: str


class Store:
    """The records of a folder, by name. Only their positions in the shards are in memory."""

    def __init__(self, folder: Path, key: Mapping[str, Any] | None = None) -> None:
        """key: the settings on which the records depend. The folder is made by the first `append`.

        Raises UserError for a truncated shard.
        """
        self.folder, self.key = folder, dict(key or {})
        self._places: dict[str, tuple[Path, int]] = {}  # shard, and number there
        self._shards: dict[Path, _Shard] = {}
        self.text_names: dict[str, str] = {}  # of outputs, by their names
        self.refresh()

    @classmethod
    def of(cls, key: Mapping[str, Any], stores: Path) -> Store:
        """The store with this key in the folder `stores`."""
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:16]
        return cls(stores / digest, key)

    def of_states(self, layers: Sequence[int]) -> Store:
        """The store of these layers' hidden states, by the name of the text they were read on."""
        folder = self.folder / f"states-{'-'.join(map(str, layers))}"
        return Store(folder, self.key | {"layers": list(layers)})

    def append(self, records: Mapping[str, Record], by: str) -> None:
        """Write a shard of the records that the store lacks. by: what generated them.

        Raises UserError.
        """
        with locked(self.folder / "shards"):
            self.refresh()
            new = {name: record for name, record in records.items() if name not in self}
            if not new:
                return
            if not self._shards:
                write_json(self.folder / "key.json", self.key)
            columns = next(iter(new.values())).keys()
            tensors = {c: torch.cat([record[c] for record in new.values()]) for c in columns}
            about = json.dumps(
                {
                    "names": list(new),
                    "lengths": {c: [len(record[c]) for record in new.values()] for c in columns},
                    "by": by,
                }
            )
            # another machine's shard of this number may not be visible yet
            name = f"shard-{len(self._shards):06d}-{secrets.token_hex(4)}.safetensors"
            path = self.folder / name
            with atomic_file(path, "wb") as file:
                file.write(save(tensors, metadata={"about": about}))
            self._take_in(path)

    def refresh(self) -> None:
        """Read the index of shards that any process has added."""
        for path in sorted(self.folder.glob("shard-*.safetensors")):
            if path not in self._shards:
                self._take_in(path)

    def _take_in(self, path: Path) -> None:
        with opened_weights(path, remedy=REMEDY) as file, path.open("rb") as raw:
            about = json.loads(file.metadata()["about"])
            data = 8 + int.from_bytes(raw.read(8), "little")  # where the tensors begin
            header = json.loads(raw.read(data - 8))
            columns = {
                name: _Column(
                    data + header[name]["data_offsets"][0],
                    np.cumsum([0, *lengths]),
                    file.get_slice(name)[:0].clone(),
                )
                for name, lengths in about["lengths"].items()
            }
        self._shards[path] = _Shard(columns, about.get("by", "not recorded"))
        self._places |= {name: (path, number) for number, name in enumerate(about["names"])}

    def missing(self, names: Sequence[str]) -> list[int]:
        """The indices in `names` of names without a record. All processes must call it.

        All get the list of the first process, because another run may append meanwhile, and the
        processes divide the list among themselves.
        """
        return from_first([i for i, name in enumerate(names) if name not in self])

    def has_all(self, names: Collection[str]) -> bool:
        return all(name in self for name in names)

    def wait_for(self, names: Collection[str]) -> None:
        """Wait until all processes have written their share of these records.

        Raises UserError if some are still missing.
        """
        wait_on_host()  # the first process may have a vLLM on all GPUs
        self.refresh()
        deadline = time.monotonic() + VISIBLE_SECONDS
        while not self.has_all(names) and time.monotonic() < deadline:
            time.sleep(1)
            self.refresh()
        if lacking := sum(name not in self for name in names):
            raise UserError(
                f"{self.folder} lacks {lacking} of {len(names)} records after every process has "
                "made its share: the processes do not see the same folder. Set output_dir to a "
                "folder on a disk that all of them share."
            )

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __getitem__(self, name: str) -> Record:
        path, number = self._places[name]
        columns = self._shards[path].columns.items()
        record = {column: rows.like.new_empty(rows.shape(number)) for column, rows in columns}
        for column, out in record.items():
            self.read_into(name, column, out)
        return record

    def read_into(self, name: str, column: str, out: Tensor) -> None:
        """Read a record's rows in this column into `out`, a contiguous tensor on the CPU.

        Several threads may call it. Raises UserError for a damaged shard, and for an `out` of
        another shape or dtype.
        """
        path, number = self._places[name]
        start, ends, like = rows = self._shards[path].columns[column]
        shape, row_bytes = rows.shape(number), math.prod(like.shape[1:]) * like.itemsize
        if (out.shape, out.dtype, out.is_contiguous()) != (shape, like.dtype, True):
            raise UserError(
                f"{column} of a record in {path} is {like.dtype} {list(shape)}, and cannot be read "
                f"into {out.dtype} {list(out.shape)}; give contiguous rows of its shape."
            )
        bits: Any = out.flatten().view(torch.uint8).numpy()
        try:
            # not mapped, because mapped pages would count as this process's memory
            with path.open("rb") as file:
                file.seek(start + int(ends[number]) * row_bytes)
                if file.readinto(bits) < len(bits):
                    raise SourceError(f"{path} is damaged (it ends early); {REMEDY}.")
        except FileNotFoundError as error:
            raise SourceError(f"{path} is missing; {REMEDY}.") from error

    def shape(self, name: str, column: str) -> tuple[int, ...]:
        """The shape of a record's rows in this column."""
        path, number = self._places[name]
        return self._shards[path].columns[column].shape(number)

    def length(self, name: str, column: str) -> int:
        """The number of rows of a record in this column."""
        return self.shape(name, column)[0]

    def sha256_of(self, names: Sequence[str]) -> str:
        """A hash of these names and of the contents of their shards."""
        hashes = {path: file_sha256(path) for path in {self._places[name][0] for name in names}}
        lines = [f"{name} {hashes[self._places[name][0]]}\n" for name in names]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def made_by(self, names: Sequence[str]) -> dict[str, int]:
        """The number of these records by the engine that made them."""
        return dict(Counter(self._shards[self._places[name][0]].by for name in names))

    def bytes_on_disk(self) -> int:
        return sum(path.stat().st_size for path in self._shards)


class Answers(Sequence[CachedAnswer]):
    """Outputs of a store in a run's order; each is read from disk when it is needed.

    left_out: the number of logged outputs that are not taught, by reason.
    """

    def __init__(
        self, store: Store, names: Iterable[str], left_out: Mapping[str, int] | None = None
    ) -> None:
        self.store, self.names, self.left_out = store, list(names), dict(left_out or {})

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, number: int) -> CachedAnswer:  # type: ignore[override]
        record = self.store[self.names[number]]
        return CachedAnswer(
            prompt_ids=record["prompt_ids"].long(),
            response_ids=record["response_ids"].long(),
            top_ids=record["top_ids"].long(),
            top_logprobs=record["top_logprobs"],
        )

    @property
    def asked(self) -> int:
        """The number of prompts of these outputs and of those that are left out."""
        return len(self) + sum(self.left_out.values())

    @property
    def response_lengths(self) -> list[int]:
        """The number of response tokens of each output."""
        return [self.store.length(name, "response_ids") for name in self.names]

    def tokens(self, number: int) -> int:
        """The number of tokens of an output and its prompt."""
        name = self.names[number]
        return self.store.length(name, "prompt_ids") + self.store.length(name, "response_ids")

    def text(self, number: int) -> Tensor:
        """All token ids of an output and its prompt [P + R]; nothing else of it is read."""
        name, ids = self.names[number], torch.empty(self.tokens(number), dtype=torch.int32)
        prompt = self.store.length(name, "prompt_ids")
        self.store.read_into(name, "prompt_ids", ids[:prompt])
        self.store.read_into(name, "response_ids", ids[prompt:])
        return ids.long()

    @property
    def text_names(self) -> list[str]:
        """The names of the texts, under which other stores have their hidden states."""
        by_output = self.store.text_names
        by_output |= {
            n: name_of(self.text(i)) for i, n in enumerate(self.names) if n not in by_output
        }
        return [by_output[name] for name in self.names]

    def until(self, tokens: int) -> Answers:
        """The first outputs, until they have this number of response tokens in total."""
        before = itertools.accumulate(self.response_lengths, initial=0)
        count = sum(total < tokens for total in itertools.islice(before, len(self)))
        return Answers(self.store, self.names[:count])
