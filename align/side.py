"""One side of a pair, target or draft: what its tokenizer and config files say, no model loaded."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from align.sources import SourceError, load_tokenizer, read_json, resolve_checkpoint
from align.token_bytes import Key, backend_keys, byte_pieces

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
_HEAD_BIASES = ("lm_head.bias", "embed_out.bias")
# Keys of a config by which logits are changed after the head, as several families name them.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
ADAPTER = "adapter_model.safetensors"
_ANY_TEXT = "".join(map(chr, range(0x180))) + "\U0010ffff"


@dataclass
class Side:
    """keys: of every id (align/token_bytes.py), None where no token has it.

    special_ids: of SPECIAL_NAMES; None if the name has no token. stops: who says so -> ids that end
    a text. config: the text model's. tensors: name -> shape, empty if no weights are at hand.
    """

    spec: str
    folder: Path
    keys: list[Key | None]
    backend: dict[str, Any]
    special_ids: dict[str, int | None]
    special_texts: dict[str, str]
    stops: dict[str, set[int]]
    chat_template: str | None
    config: dict[str, Any]
    config_rows: int | None
    tensors: dict[str, list[int]]

    def _rows_of(self, names: tuple[str, ...]) -> int | None:
        return next((s[0] for name, s in self.tensors.items() if name.endswith(names)), None)

    @property
    def embedding_rows(self) -> int | None:
        rows = self._rows_of(_EMBEDDINGS)
        return self.config_rows if rows is None else rows

    @property
    def head_rows(self) -> int | None:
        rows = self._rows_of(_HEADS)
        return self.embedding_rows if rows is None else rows

    @property
    def tied(self) -> bool | None:
        if self.tensors:
            return self._rows_of(_HEADS) is None
        return self.config.get("tie_word_embeddings")

    @property
    def head_bias(self) -> bool:
        return any(tensor.endswith(_HEAD_BIASES) for tensor in self.tensors)

    @property
    def logit_changes(self) -> dict[str, float]:
        """What the config does to logits after the head."""
        return {k: v for k in _LOGIT_CHANGES if (v := self.config.get(k)) not in (None, 1, 1.0)}

    @cached_property
    def count(self) -> int:
        """One more than the highest id in use."""
        used = (i for i in range(len(self.keys) - 1, -1, -1) if is_used(self.keys[i]))
        return next(used, -1) + 1

    @cached_property
    def used(self) -> set[Key]:
        return {key for key in self.keys if key is not None and key[0] != "unused"}

    @property
    def all_stops(self) -> set[int]:
        return set().union(*self.stops.values())

    @cached_property
    def sha256(self) -> str:
        """Of what decides ids: the tokenizer.json, however it is laid out."""
        parts = {k: v for k, v in self.backend.items() if k not in ("truncation", "padding")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        try:
            made = Tokenizer.from_str(json.dumps(self.backend | {"truncation": None}))
            made.encode(_ANY_TEXT)  # an unk_token that has no id is noticed when it is needed
        except Exception as error:  # the Rust library raises Exception itself
            raise SourceError(
                f"TOK-000: The tokenizer of {self.spec} is ill-formed ({error}); restore its files."
            ) from error
        return made

    @cached_property
    def plain_tokenizer(self) -> Tokenizer:
        """As `tokenizer`, but special strings in a text are only text."""
        from tokenizers import Tokenizer

        plain = Tokenizer.from_str(self.tokenizer.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def prefix(self) -> list[int]:
        """The ids that the tokenizer puts before every text (a BOS)."""
        with_specials = self.tokenizer.encode("a").ids
        text = self.tokenizer.encode("a", add_special_tokens=False).ids
        at = next(
            (i for i in range(len(with_specials)) if with_specials[i : i + len(text)] == text), 0
        )
        return with_specials[:at]

    @cached_property
    def id_of(self) -> dict[Key, int]:
        """The id of each key in use; of tokens spelt alike the one that texts are encoded with."""
        # a byte piece stands for a byte only where no written piece does, wherever it is listed
        # (Gemma's "\n" is 107, its "<0x0A>" 248); tokens added later are matched first
        pieces = byte_pieces(self.backend)
        order = [*sorted(pieces), *(i for i in range(len(self.keys)) if i not in pieces)]
        return {key: i for i in order if (key := self.keys[i]) is not None and is_used(key)}

    @cached_property
    def longest_match(self) -> tuple[dict[bytes, int], int]:
        """Bytes -> id of every normal token, and the length of the longest."""
        ids = {spelt: i for (kind, spelt), i in self.id_of.items() if kind == "normal" and spelt}
        return ids, max(map(len, ids), default=0)

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """The bytes that ids stand for; an id without a token stands for none."""
        spelt = (self.keys[i] if i < len(self.keys) else None for i in ids)
        return b"".join(key[1] for key in spelt if key is not None)

    def spell(self, data: bytes) -> list[int]:
        """Ids of normal tokens that spell any bytes, each the longest that fits.

        A byte that no token begins with is left out.
        """
        ids, longest = self.longest_match
        found, at = [], 0
        while at < len(data):
            for end in range(min(at + longest, len(data)), at, -1):
                if (i := ids.get(data[at:end])) is not None:
                    found.append(i)
                    at = end
                    break
            else:
                at += 1
        return found

    def encode(self, data: bytes) -> list[int]:
        """Ids of a stretch of text that stands anywhere, special strings in it taken as text.

        The tokenizer's own where they spell the very bytes, else (a normaliser, half a character)
        those of `spell`.
        """
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return self.spell(data)
        ids = self.plain_tokenizer.encode(text, add_special_tokens=False).ids
        spelt = self.bytes_of(ids)
        if spelt == b" " + data and ids:  # SentencePiece begins every text with a space
            first = self.bytes_of(ids[:1])
            ids = self.spell(first[1:]) + ids[1:]
            spelt = self.bytes_of(ids)
        return ids if spelt == data else self.spell(data)


def read_side(spec: str, weights: bool = False) -> Side:
    """One side of a pair by its spec (align/sources.py).

    weights: also fetch the weights of a Hub checkpoint, whose headers tell the real rows and biases
    (headers of local weights are always read).
    Raises SourceError, with code TOK-000 or TOK-013, for input that is missing or ill-formed.
    """
    try:
        return _read(spec, weights)
    except SourceError as error:
        coded = str(error).startswith("TOK-")
        raise SourceError(str(error) if coded else f"TOK-000: {error}") from error


def _read(spec: str, weights: bool) -> Side:
    _refuse_adapter_with_rows(Path(spec).expanduser())
    folder = resolve_checkpoint(spec, weights=weights)
    if (folder / "tokenizer.json").is_file():
        backend = read_json(folder / "tokenizer.json")
    else:  # transformers can build one from older files, but takes seconds to import
        tokenizer = load_tokenizer(spec)
        if not tokenizer.is_fast:
            raise SourceError(
                f"{spec!r} has only a slow tokenizer ({type(tokenizer).__name__}), which does not "
                "say how its tokens are spelt; add the tokenizer.json of its fast form."
            )
        backend = json.loads(tokenizer.backend_tokenizer.to_str())
    try:
        return _parse(spec, folder, backend)
    except (KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"The tokenizer or config files of {spec!r} are ill-formed ({type(error).__name__}: "
            f"{error}); restore them in {folder}."
        ) from error


def _refuse_adapter_with_rows(folder: Path) -> None:
    """A LoRA adapter beside or without its model, when it brings rows of embedding or head."""
    path = folder / ADAPTER
    if not path.is_file():
        return
    shapes = tensor_shapes(path)
    rows = {n: s[0] for n, s in shapes.items() if n.endswith((*_EMBEDDINGS, *_HEADS))}
    if rows:
        name, count = next(iter(rows.items()))
        raise SourceError(
            f"TOK-013: {path} is an adapter that brings its own rows of embedding or head ({name} "
            f"with {count} rows), so the vocabulary is not the base model's; merge it into its "
            "base model (resize_token_embeddings, then peft's merge_and_unload), save that with "
            "its tokenizer, and name the merged folder."
        )


def _parse(spec: str, folder: Path, backend: dict[str, Any]) -> Side:
    try:
        keys = backend_keys(backend)
    except ValueError as error:
        raise SourceError(f"{spec!r}: {error}") from error
    top = read_json(folder / "config.json")
    config = top.get("text_config", top)
    generation = _read_optional(folder / "generation_config.json")
    names = _read_optional(folder / "special_tokens_map.json")
    names |= _read_optional(folder / "tokenizer_config.json")
    ids = {token["content"]: token["id"] for token in backend.get("added_tokens", [])}
    vocabulary = backend["model"]["vocab"]
    if isinstance(vocabulary, dict):
        ids = vocabulary | ids
    special_texts = {name: _content(names[name]) for name in SPECIAL_NAMES if names.get(name)}
    special_ids = {name: ids.get(text) for name, text in special_texts.items()}
    eos = special_ids.get("eos_token")
    stops = {
        "tokenizer": set() if eos is None else {eos},
        "config": _as_set(config.get("eos_token_id", top.get("eos_token_id"))),
        "generation_config": _as_set(generation.get("eos_token_id")),
    }
    template = folder / "chat_template.jinja"
    chat_template = names.get("chat_template")
    if template.is_file():
        chat_template = template.read_text(encoding="utf-8")
    elif isinstance(chat_template, list):  # several by name: the default one is what is rendered
        chat_template = next((t["template"] for t in chat_template if t["name"] == "default"), None)
    tensors: dict[str, list[int]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        if path.name != ADAPTER:
            tensors |= tensor_shapes(path)
    return Side(
        spec=spec,
        folder=folder,
        keys=keys,
        backend=backend,
        special_ids=special_ids,
        special_texts=special_texts,
        stops=stops,
        chat_template=chat_template,
        config=config,
        config_rows=config.get("vocab_size"),
        tensors=tensors,
    )


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _as_set(ids: int | list[int] | None) -> set[int]:
    if ids is None:
        return set()
    return {ids} if isinstance(ids, int) else set(ids)


def safetensors_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file. Raises SourceError unless the file is whole."""
    try:
        with open(path, "rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > path.stat().st_size:
                raise ValueError("it ends within its header")
            header: dict[str, Any] = json.loads(file.read(length))
        tensors = [tensor for name, tensor in header.items() if name != "__metadata__"]
        end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
        if 8 + length + end != path.stat().st_size:
            raise ValueError("its length is not what its header says")
    except (ValueError, struct.error) as error:
        raise SourceError(
            f"{path} is no whole safetensors file ({error}); fetch or copy it again."
        ) from error
    return header


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Name -> shape of every tensor of a safetensors file."""
    header = safetensors_header(path)
    return {name: t["shape"] for name, t in header.items() if name != "__metadata__"}


def is_used(key: Key | None) -> bool:
    """Whether a text may hold the token."""
    return key is not None and key[0] != "unused"
