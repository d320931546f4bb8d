"""Every token of a tokenizer: its kind and its bytes.

Two vocabularies are compared by these, never by `decode([id])`, because a token with a part of a
character decodes to U+FFFD, and a Llama decoder gives one string for "▁the" and "the".
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Literal, TypeGuard

from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from align.errors import UserError

# Kind and bytes. A plain tuple, not a class, because the garbage collector would walk through up to
# 262k objects again and again.
Token = tuple[Literal["normal", "special", "unused"], bytes]

# Placeholders that model makers reserve, and the padding of converted vocabularies.
_UNUSED = re.compile(
    r"(<\|?|\[|>>|<｜)(\w+_)?(unused|reserved|place▁?holder|dummy|special|pad|control|extra)(_special)?"
    r"(_token|_id|▁no▁)?_?\d+(\|?>|\]|<<|｜>)",
    re.IGNORECASE,
)
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_SPACE_MARK = "\u2581"  # ▁, SentencePiece's space


def is_used(token: Token | None) -> TypeGuard[Token]:
    """True if a text may contain the token."""
    return token is not None and token[0] != "unused"


def tokens_of(tokenizer: PreTrainedTokenizerBase) -> list[Token | None]:
    """The token of every id of a fast tokenizer; None for an id that no token has.

    Raises UserError as `backend_of` and `backend_tokens` do.
    """
    return backend_tokens(backend_of(tokenizer))


def backend_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """The content of the tokenizer's tokenizer.json. Raises UserError for a slow tokenizer."""
    if not tokenizer.is_fast:
        raise UserError(
            f"{type(tokenizer).__name__} is a slow tokenizer, so the bytes of its tokens are "
            "unknown; add the tokenizer.json of its fast form, or use a model that has this file."
        )
    backend: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return backend


def backend_tokens(backend: dict[str, Any]) -> list[Token | None]:
    """The token of every id of a parsed tokenizer.json; None for an id that no token has.

    Raises UserError if it is neither byte-level BPE nor SentencePiece-like, because then tokens
    do not stand for bytes (WordPiece, for example, drops spaces).
    """
    model = backend["model"]
    kinds = set(_component_types(backend.get("decoder")))
    byte_level = "ByteLevel" in kinds
    marks_spaces = "Metaspace" in kinds or _SPACE_MARK in json.dumps(
        [backend.get("decoder"), backend.get("normalizer")], ensure_ascii=False
    )
    if not (byte_level or marks_spaces or model.get("byte_fallback")):
        raise UserError(
            f"A tokenizer of model {model.get('type')!r} with the decoder "
            f"{'+'.join(sorted(kinds)) or None} is neither byte-level BPE nor SentencePiece, so "
            "its tokens do not stand for fixed bytes; use a causal language model's tokenizer."
        )
    pieces = _pieces(model)
    added = {token["id"]: token for token in backend.get("added_tokens", [])}
    tokens: list[Token | None] = [None] * (max([*pieces, *added], default=-1) + 1)
    fallback = byte_fallback_ids(backend)
    for i, piece in pieces.items():
        if byte_level:
            raw = _from_byte_alphabet(piece)
        elif i in fallback:
            raw = bytes([int(piece[3:5], 16)])
        else:
            raw = piece.replace(_SPACE_MARK, " ").encode()
        tokens[i] = ("unused" if _UNUSED.fullmatch(piece) else "normal", raw)
    for i, token in added.items():
        literal: str = token["content"]
        if _UNUSED.fullmatch(literal):
            tokens[i] = ("unused", literal.encode())
        elif token["special"]:
            tokens[i] = ("special", literal.encode())
        elif byte_level or pieces.get(i) != literal:
            tokens[i] = ("normal", literal.encode())
        # else a SentencePiece piece that is also an added token (Gemma's "▁▁"): its bytes stay
    return tokens


def byte_fallback_ids(backend: dict[str, Any]) -> set[int]:
    """Ids of SentencePiece's byte tokens (`<0x41>`), for bytes that no other piece has.

    None if model and decoder have no byte fallback: then "<0x0A>" is a text of six characters.
    """
    model = backend["model"]
    if not (
        model.get("byte_fallback") or "ByteFallback" in _component_types(backend.get("decoder"))
    ):
        return set()
    return {i for i, piece in _pieces(model).items() if _BYTE_PIECE.fullmatch(piece)}


def _pieces(model: dict[str, Any]) -> dict[int, str]:
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: (piece, score) in the order of ids
        return {i: piece for i, (piece, _) in enumerate(vocabulary)}
    return {i: piece for piece, i in vocabulary.items()}


def _component_types(component: dict[str, Any] | None) -> Iterator[str]:
    """The type names of a decoder and of its parts."""
    if component is not None:
        yield component["type"]
        for part in component.get("decoders", []):
            yield from _component_types(part)


# GPT-2's alphabet: a character for each byte
_BYTES = {character: byte for byte, character in bytes_to_unicode().items()}


def _from_byte_alphabet(piece: str) -> bytes:
    try:
        return bytes([_BYTES[character] for character in piece])
    except KeyError:  # not in the alphabet: the decoder also takes such a piece literally
        return piece.encode()
