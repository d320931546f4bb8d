"""The vocabulary of a checkpoint: tokens, special ids, rows of the head. Loads no model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

from align.sources import (
    SourceError,
    load_tokenizer,
    read_json,
    resolve_checkpoint,
    weight_files,
)
from align.token_bytes import Token, backend_of, backend_tokens, byte_fallback_ids, is_used

_EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
_HEADS = ("lm_head.weight", "embed_out.weight")
_HEAD_BIASES = ("lm_head.bias", "embed_out.bias")
# Keys of a config by which logits are changed after the head, as several families name them.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")
_ANY_TEXT = "".join(map(chr, range(0x180))) + "\U0010ffff"


@dataclass
class Vocabulary:
    """The vocabulary of a target or a draft, as its tokenizer and config files have it.

    tokens: the token of every id (align/token_bytes.py), None where there is none. backend: the
    content of tokenizer.json. special_ids: an id for each of SPECIAL_NAMES, None if the name has no
    token. all_stops: ids that end a text by tokenizer, config or generation config. config: the
    text model's. tensors: name -> shape, empty if no weights are cached.
    """

    spec: str
    folder: Path
    tokens: list[Token | None]
    backend: dict[str, Any]
    special_ids: dict[str, int | None]
    special_texts: dict[str, str]
    all_stops: set[int]
    chat_template: str | None
    config: dict[str, Any]
    tensors: dict[str, list[int]]

    def _rows_of(self, names: tuple[str, ...]) -> int | None:
        return next((s[0] for name, s in self.tensors.items() if name.endswith(names)), None)

    @property
    def config_rows(self) -> int | None:
        return self.config.get("vocab_size")

    @property
    def embedding_rows(self) -> int | None:
        rows = self._rows_of(_EMBEDDINGS)
        return self.config_rows if rows is None else rows

    @property
    def rows(self) -> int:
        """Rows of the embedding; where neither weights nor config tell them, one for each id."""
        return self.embedding_rows or self.count

    @property
    def head_rows(self) -> int | None:
        rows = self._rows_of(_HEADS)
        return self.embedding_rows if rows is None else rows

    @property
    def rows_suffice(self) -> bool:
        """Whether embedding and head have a row for every id in use."""
        return all(r is None or r >= self.count for r in (self.embedding_rows, self.head_rows))

    @property
    def head_bias(self) -> bool:
        return any(tensor.endswith(_HEAD_BIASES) for tensor in self.tensors)

    @property
    def logit_changes(self) -> dict[str, float]:
        """The settings of the config that change logits after the LM head."""
        return {k: v for k in _LOGIT_CHANGES if (v := self.config.get(k)) not in (None, 1, 1.0)}

    @property
    def head_is_plain(self) -> bool:
        """Whether logits are the head's product alone, so that new tokens need only new rows."""
        return not (self.head_bias or self.logit_changes)

    @cached_property
    def count(self) -> int:
        """One more than the highest id in use."""
        last_first = reversed(range(len(self.tokens)))
        return next((i + 1 for i in last_first if is_used(self.tokens[i])), 0)

    @cached_property
    def used(self) -> set[Token]:
        return {token for token in self.tokens if is_used(token)}

    @cached_property
    def sha256(self) -> str:
        """The hash of tokenizer.json's content, which decides ids."""
        parts = {k: v for k, v in self.backend.items() if k not in ("truncation", "padding")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        try:
            tokenizer = Tokenizer.from_str(
                json.dumps(self.backend | {"truncation": None, "padding": None})
            )
            tokenizer.encode(_ANY_TEXT)  # an unk_token that has no id is noticed when it is needed
        except Exception as error:  # the Rust library raises Exception itself
            raise SourceError(
                f"TOK-000: The tokenizer of {self.spec} is ill-formed ({error}); restore its files."
            ) from error
        return tokenizer

    def encode_plain(self, text: str) -> list[int]:
        """Ids of a text alone: nothing put before it, and special strings in it taken as text."""
        self.tokenizer.encode_special_tokens = True
        try:
            return self.tokenizer.encode(text, add_special_tokens=False).ids
        finally:
            self.tokenizer.encode_special_tokens = False

    @cached_property
    def prefix(self) -> list[int]:
        """The ids that the tokenizer puts before every text (a BOS)."""
        return self._around_a_text[0]

    @property
    def suffix(self) -> list[int]:
        """The ids that the tokenizer puts behind every text, as an EOS saved by mistake."""
        return self._around_a_text[1]

    @cached_property
    def _around_a_text(self) -> tuple[list[int], list[int]]:
        ids, text = (
            self.tokenizer.encode("a", add_special_tokens=add).ids for add in (True, False)
        )
        start = next((i for i in range(len(ids)) if ids[i : i + len(text)] == text), 0)
        return ids[:start], ids[start + len(text) :]

    @cached_property
    def id_of(self) -> dict[Token, int]:
        """The id of each token in use; of equal tokens the id that encoding gives."""
        # a byte-fallback token is used for a byte only if no other token is that byte
        # (Gemma's "\n" is 107, its "<0x0A>" 248); tokens added later are matched first
        fallback = byte_fallback_ids(self.backend)
        order = [*sorted(fallback), *(i for i in range(len(self.tokens)) if i not in fallback)]
        return {token: i for i in order if is_used(token := self.tokens[i])}

    @cached_property
    def _normal_ids(self) -> tuple[dict[bytes, int], int]:
        """Bytes -> id of every normal token, and the length of the longest."""
        ids = {raw: i for (kind, raw), i in self.id_of.items() if kind == "normal" and raw}
        return ids, max(map(len, ids), default=0)

    def token(self, i: int) -> Token | None:
        """The token of any id, None where there is none."""
        return self.tokens[i] if i < len(self.tokens) else None

    def bytes_of(self, ids: Sequence[int]) -> bytes:
        """The bytes of ids; an id without a token has none."""
        return b"".join(token[1] for i in ids if (token := self.token(i)) is not None)

    def longest_match(self, data: bytes) -> list[int]:
        """Ids of normal tokens for any bytes, each the longest that fits.

        A byte that no token begins with is left out.
        """
        id_of, longest = self._normal_ids
        ids, start = [], 0
        while start < len(data):
            ends = range(min(start + longest, len(data)), start, -1)
            end = next((end for end in ends if data[start:end] in id_of), None)
            if end is not None:
                ids.append(id_of[data[start:end]])
            start = end or start + 1
        return ids

    def encode(self, data: bytes) -> list[int]:
        """Ids of text at any position, special strings in it taken as text.

        The tokenizer's ids if they have exactly the text's bytes, else (a normaliser, half
        a character) those of `longest_match`.
        """
        try:
            text = data.decode()
        except UnicodeDecodeError:
            return self.longest_match(data)
        ids = self.encode_plain(text)
        if ids and self.bytes_of(ids) == b" " + data:  # SentencePiece begins texts with a space
            ids = self.longest_match(self.bytes_of(ids[:1])[1:]) + ids[1:]
        return ids if self.bytes_of(ids) == data else self.longest_match(data)


def read_vocabulary(spec: str, weights: bool = False) -> Vocabulary:
    """The vocabulary of a checkpoint by its spec (align/sources.py).

    weights: also fetch the weights of a Hub checkpoint, whose headers tell the real rows and biases
    (headers of local weights are always read).
    Raises SourceError, with code TOK-000 or TOK-013, for input that is missing or ill-formed.
    """
    try:
        return _parse(spec, resolve_checkpoint(spec, weights=weights))
    except ValueError as error:
        text = str(error) if isinstance(error, SourceError) else f"{spec!r}: {error}"
        raise SourceError(text if text.startswith("TOK-") else f"TOK-000: {text}") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise SourceError(
            f"TOK-000: The tokenizer or config files of {spec!r} are ill-formed "
            f"({type(error).__name__}: {error}); restore them."
        ) from error


def mask_token(vocabulary: Vocabulary) -> int:
    """An id that no text has: of the rows behind the last token, or a special token that is no stop
    and that neither the tokenizer nor the chat template puts into a text.

    Raises ValueError where there is none.
    """
    if vocabulary.count < vocabulary.rows:
        return vocabulary.count
    used = {*vocabulary.all_stops, *vocabulary.special_ids.values(), *vocabulary.prefix}
    template = vocabulary.chat_template or ""
    for token in reversed(vocabulary.backend.get("added_tokens", [])):
        if token["special"] and token["id"] not in used and token["content"] not in template:
            return int(token["id"])
    raise ValueError(
        f"The vocabulary of {vocabulary.spec} has no row that no text uses, and a draft of kind "
        "pard needs one for its mask; use another drafter."
    )


def _parse(spec: str, folder: Path) -> Vocabulary:
    if (folder / "tokenizer.json").is_file():
        backend = read_json(folder / "tokenizer.json")
    else:  # transformers can build one from older files, but takes seconds to import
        backend = backend_of(load_tokenizer(spec))
    tokens = backend_tokens(backend)
    top = read_json(folder / "config.json")
    config = top.get("text_config", top)
    generation = _read_optional(folder / "generation_config.json")
    names = _read_optional(folder / "special_tokens_map.json")
    names |= _read_optional(folder / "tokenizer_config.json")
    pieces = backend["model"]["vocab"]
    ids = dict(pieces) if isinstance(pieces, dict) else {}
    ids |= {token["content"]: token["id"] for token in backend.get("added_tokens", [])}
    special_texts = {name: _content(names[name]) for name in SPECIAL_NAMES if names.get(name)}
    special_ids = {name: ids.get(text) for name, text in special_texts.items()}
    ends = special_ids.get("eos_token"), config.get("eos_token_id", top.get("eos_token_id"))
    stops = set().union(*map(_as_set, (*ends, generation.get("eos_token_id"))))
    template = names.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    elif isinstance(template, list):  # several by name: the default one is what is rendered
        template = next((t["template"] for t in template if t["name"] == "default"), None)
    tensors: dict[str, list[int]] = {}
    for path in filter(Path.is_file, weight_files(folder)):  # none of a Hub checkpoint at first
        with open_safetensors(path) as file:
            tensors |= {name: file.get_slice(name).get_shape() for name in sorted(file.keys())}
    about = special_ids, special_texts, stops, template, config, tensors
    vocabulary = Vocabulary(spec, folder, tokens, backend, *about)
    # Gemma 3 1B names an image token beyond its rows, which no text holds
    rows, needed = vocabulary.rows, {*stops, *special_ids.values()}
    while len(tokens) > rows and len(tokens) - 1 not in needed:
        if tokens[-1] is None or tokens[-1][0] != "special":
            break
        tokens.pop()
    return vocabulary


def _read_optional(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _content(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]


def _as_set(ids: int | list[int] | None) -> set[int]:
    return set() if ids is None else {ids} if isinstance(ids, int) else set(ids)


@contextmanager
def open_safetensors(path: Path) -> Iterator[Any]:
    """A safetensors file, its tensors as NumPy arrays. Raises SourceError unless it is whole."""
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except SafetensorError as error:
        raise SourceError(
            f"{path} is no whole safetensors file ({error}); fetch or copy it again."
        ) from error
