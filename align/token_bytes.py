"""The canonical key of every token: what kind it is and which bytes it stands for.

Two vocabularies are compared by these keys, never by `decode([id])`: a token that holds part of a
character decodes to U+FFFD, and a Llama decoder gives one string for "▁the" and "the".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# (kind, bytes); kind is normal | special | unused
Key = tuple[str, bytes]

# Placeholders that model makers leave for later, and the padding of converted vocabularies.
_UNUSED = re.compile(
    r"[<\[]\|?(unused|reserved|reserved_special_token|placeholder|dummy|SPECIAL|PAD)_?\d+\|?[>\]]"
)
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"  # ▁, SentencePiece's space


def token_keys(tokenizer: PreTrainedTokenizerBase) -> list[Key | None]:
    """The key of every id of a fast tokenizer, by id; None for an id that no token has.

    Raises ValueError for a tokenizer without a Rust backend, and as `backend_keys` does.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} has no fast form (tokenizer.json), and only that says how "
            "tokens are spelt; convert it with transformers' convert_slow_tokenizer, or use a "
            "model that has one."
        )
    return backend_keys(json.loads(tokenizer.backend_tokenizer.to_str()))


def backend_keys(backend: dict[str, Any]) -> list[Key | None]:
    """The keys of a parsed tokenizer.json, as `token_keys`.

    Raises ValueError when it is neither byte-level BPE nor SentencePiece-like: then its tokens do
    not spell bytes (WordPiece, for one, does not say where spaces were).
    """
    model = backend["model"]
    kinds = set(_component_types(backend.get("decoder")))
    marks_spaces = "Metaspace" in kinds or _SPACE_MARK in json.dumps(
        [backend.get("decoder"), backend.get("normalizer")], ensure_ascii=False
    )
    if "ByteLevel" in kinds:
        byte_level = True
    elif marks_spaces or model.get("byte_fallback"):
        byte_level = False
    else:
        raise ValueError(
            f"A tokenizer of model {model.get('type')!r} with the decoder "
            f"{'+'.join(sorted(kinds)) or None} is neither byte-level BPE nor SentencePiece, so "
            "its tokens do not stand for fixed bytes; use a causal language model's tokenizer."
        )

    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: (piece, score) in the order of ids
        pieces = {i: piece for i, (piece, _) in enumerate(vocabulary)}
    else:
        pieces = {i: piece for piece, i in vocabulary.items()}
    added = {token["id"]: token for token in backend.get("added_tokens", [])}
    keys: list[Key | None] = [None] * (max([*pieces, *added], default=-1) + 1)
    # a byte piece is a byte only if the decoder says so; elsewhere "<0x0A>" is six characters
    has_byte_pieces = "ByteFallback" in kinds or bool(model.get("byte_fallback"))
    for i, piece in pieces.items():
        if byte_level:
            spelt = _from_byte_alphabet(piece)
        elif has_byte_pieces and (match := _BYTE_PIECE.fullmatch(piece)):
            spelt = bytes([int(match[1], 16)])
        else:
            spelt = piece.replace(_SPACE_MARK, " ").encode()
        keys[i] = ("unused" if _UNUSED.fullmatch(piece) else "normal", spelt)
    for i, token in added.items():
        literal: str = token["content"]
        if _UNUSED.fullmatch(literal):
            keys[i] = ("unused", literal.encode())
        elif token["special"]:
            keys[i] = ("special", literal.encode())
        elif byte_level or pieces.get(i) != literal:
            keys[i] = ("normal", literal.encode())
        # else a SentencePiece symbol that was added as well ("▁▁" of Gemma): spelt as a piece
    return keys


def unfinished(data: bytes) -> int:
    """How many bytes at the end of `data` begin a UTF-8 character that is not complete."""
    for length in range(1, min(3, len(data)) + 1):
        byte = data[-length]
        if byte >= 0xC0:
            wanted = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return length if length < wanted else 0
        if byte < 0x80:
            return 0
    return 0


def _component_types(component: dict[str, Any] | None) -> Iterator[str]:
    """The type names of a decoder and of its parts."""
    if component is not None:
        yield component["type"]
        for part in component.get("decoders", []):
            yield from _component_types(part)


def _byte_alphabet() -> dict[int, str]:
    """GPT-2's alphabet turned round, as a table for str.translate.

    Printable Latin-1 characters stand for their own byte; the other bytes, in order, for the
    characters from U+0100 on. A character of Latin-1 outside the alphabet is sent to U+FFFF, so
    that encoding it fails.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    table = {0x100 + i: chr(byte) for i, byte in enumerate(others)}
    return table | dict.fromkeys(others, "\uffff")


_ALPHABET = _byte_alphabet()


def _from_byte_alphabet(piece: str) -> bytes:
    try:
        return piece.translate(_ALPHABET).encode("latin-1")
    except UnicodeEncodeError:  # not written in the alphabet: the decoder takes it literally, too
        return piece.encode()
