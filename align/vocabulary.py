"""The vocabulary of a checkpoint: tokens, special ids, size. Loads no model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from align.errors import UserError
from align.token_bytes import Token, backend_of, backend_tokens, byte_fallback_ids, is_used

# Keys of a config by which logits are changed after the head, as several families name them.
_LOGIT_CHANGES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
SPECIAL_NAMES = ("bos_token", "eos_token", "pad_token", "unk_token")


@dataclass
class Vocabulary:
    """The vocabulary of a target or a draft, from its tokenizer and config files.

    tokenizer: the transformers tokenizer, which renders prompts. backend: the content of its
    tokenizer.json. tokens: the token of every id (align/token_bytes.py), None where there is none.
    special_ids: an id for each of SPECIAL_NAMES, None if the tokenizer has no such token.
    all_stops: ids that end a text, from tokenizer, config and generation config. config: of the
    text model. head_bias: whether the LM head has a bias; False if no weights are cached. prefix,
    suffix: ids that the tokenizer puts before and after every text (a BOS; an EOS by mistake).
    """

    spec: str
    folder: Path
    tokenizer: PreTrainedTokenizerBase
    backend: dict[str, Any]
    tokens: list[Token | None]
    special_ids: dict[str, int | None]
    all_stops: frozenset[int]
    chat_template: str | None
    config: dict[str, Any]
    head_bias: bool
    prefix: list[int]
    suffix: list[int]

    @property
    def vocab_size(self) -> int:
        """Vocabulary entries of embedding and head: the config's vocab_size, else `count`."""
        return self.config.get("vocab_size") or self.count

    @property
    def logit_changes(self) -> dict[str, float]:
        """The settings of the config that change logits after the LM head."""
        return {k: v for k in _LOGIT_CHANGES if (v := self.config.get(k)) not in (None, 1, 1.0)}

    @property
    def head_is_plain(self) -> bool:
        """True if logits are only the head's product, so that new tokens need only new rows."""
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
        """The hash of tokenizer.json without truncation and padding."""
        parts = {k: v for k, v in self.backend.items() if k not in ("truncation", "padding")}
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

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


def mask_token(vocabulary: Vocabulary) -> int:
    """An id that occurs in no text: the first entry after the last token, or a special token that
    is no stop and that neither the tokenizer nor the chat template adds to a text.

    Raises UserError if there is none.
    """
    if vocabulary.count < vocabulary.vocab_size:
        return vocabulary.count
    used = {*vocabulary.all_stops, *vocabulary.special_ids.values(), *vocabulary.prefix}
    template = vocabulary.chat_template or ""
    for token in reversed(vocabulary.backend.get("added_tokens", [])):
        unused = token["id"] not in used and token["content"] not in template
        if token["special"] and unused and token["id"] < vocabulary.vocab_size:
            return int(token["id"])
    raise UserError(
        f"The vocabulary of {vocabulary.spec} has no entry that no text uses, and a draft of "
        "kind pard or dflash needs one for its mask; use another drafter."
    )


def read_vocabulary(
    spec: str,
    folder: Path,
    tokenizer: PreTrainedTokenizerBase,
    config: dict[str, Any],
    stops: frozenset[int],
    head_bias: bool,
) -> Vocabulary:
    """The vocabulary of a tokenizer under a model's head. config: the content of its config.json.

    Raises UserError for a tokenizer whose tokens have no known bytes, and errors of many types for
    ill-formed files (`Checkpoint.vocabulary` names the files).
    """
    backend = backend_of(tokenizer)
    tokens = backend_tokens(backend)
    special_ids = {name: getattr(tokenizer, f"{name}_id") for name in SPECIAL_NAMES}
    template: Any = tokenizer.chat_template
    if isinstance(template, dict):  # several by name: prompts use the default one
        template = template.get("default")
    ids, text = (tokenizer.encode("a", add_special_tokens=add) for add in (True, False))
    start = next((i for i in range(len(ids)) if ids[i : i + len(text)] == text), 0)
    vocabulary = Vocabulary(
        spec,
        folder,
        tokenizer,
        backend,
        tokens,
        special_ids,
        stops,
        template,
        config.get("text_config") or config,
        head_bias,
        prefix=ids[:start],
        suffix=ids[start + len(text) :],
    )
    # Gemma 3 1B has an image token beyond its vocab_size; no text contains it
    while len(tokens) > vocabulary.vocab_size and len(tokens) - 1 not in stops:
        if tokens[-1] is None or tokens[-1][0] != "special":
            break
        tokens.pop()
    special_ids |= {name: None for name, i in special_ids.items() if i and i >= len(tokens)}
    return vocabulary
