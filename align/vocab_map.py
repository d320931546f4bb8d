"""The map between the ids of a draft and those of its target, by the bytes that tokens stand for.

Legend: V ids of the target's tokenizer, D ids of the draft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from safetensors.torch import save
from torch import Tensor

from align.atomic import atomic_file
from align.checks import Comparison, Relation
from align.sources import SourceError
from align.token_bytes import Token
from align.vocabulary import Vocabulary, open_safetensors

FORMAT = "draftsmith-vocab-map/1"


class MapError(ValueError):
    """A map that cannot be made or must not be used: code, value, reason, remedy."""


@dataclass(frozen=True)
class VocabMap:
    """to_target: target id of each draft id [D], -1 for none; to_draft: the other way round [V].

    Several draft ids may have one target id (equal tokens): their probabilities add up.
    `to_target[to_draft[t]]` is t, or the id of a token that equals t's.
    """

    relation: Relation
    to_target: Tensor
    to_draft: Tensor
    target_sha256: str
    draft_sha256: str

    @property
    def mapped(self) -> Tensor:
        """The draft ids that have a target id [K], ascending."""
        return (self.to_target >= 0).nonzero()[:, 0]


def build_map(target: Vocabulary, draft: Vocabulary) -> VocabMap:
    """The map of a pair. Raises MapError when they share no token that stands for text."""
    relation = Comparison(target, draft).relation
    if relation == "disjoint":
        raise MapError(
            f"TOK-005: of {len(target.used)} and {len(draft.used)} tokens {target.spec!r} and "
            f"{draft.spec!r} share none that stands for text, so a map of tokens would be empty; "
            "use strategy string, which needs no shared token."
        )
    to_target = _look_up(target.id_of, draft.tokens)
    to_draft = _look_up(draft.id_of, target.tokens)
    # an end of text is one whatever it is called
    mine, theirs = (one.special_ids.get("eos_token") for one in (target, draft))
    if mine is not None and theirs is not None and to_draft[mine] < 0 and to_target[theirs] < 0:
        to_draft[mine], to_target[theirs] = theirs, mine
    return VocabMap(relation, to_target, to_draft, target.sha256, draft.sha256)


def _look_up(ids: dict[Token, int], tokens: list[Token | None]) -> Tensor:
    return torch.tensor([-1 if token is None else ids.get(token, -1) for token in tokens])


def save_map(path: Path, vocab_map: VocabMap) -> None:
    """Write the map and the hashes of the tokenizers it was made from."""
    tensors = {"to_target": vocab_map.to_target.int(), "to_draft": vocab_map.to_draft.int()}
    about = {
        "format": FORMAT,
        "relation": vocab_map.relation,
        "target_sha256": vocab_map.target_sha256,
        "draft_sha256": vocab_map.draft_sha256,
    }
    with atomic_file(path, "wb") as file:
        file.write(save(tensors, about))


def load_map(path: Path, target: Vocabulary, draft: Vocabulary) -> VocabMap:
    """The map saved at `path`.

    Raises MapError when either tokenizer is not the one it was made of, SourceError when the file
    is no whole map.
    """
    with open_safetensors(path) as file:
        about = file.metadata() or {}
        tensors = {n: torch.from_numpy(file.get_tensor(n)).long() for n in sorted(file.keys())}
    if about.get("format") != FORMAT:
        raise SourceError(
            f"{path} has format {about.get('format')!r}, not {FORMAT!r}; delete it, it is made "
            "again from the tokenizers."
        )
    for name, vocabulary in (("target", target), ("draft", draft)):
        found = about[f"{name}_sha256"]
        if found != vocabulary.sha256:
            raise MapError(
                f"TOK-014: {path} was made for another {name} tokenizer (hash {found[:12]}…, that "
                f"of {vocabulary.spec} is {vocabulary.sha256[:12]}…), and would corrupt; delete "
                "the map, it is made again from the tokenizers."
            )
    relation = cast(Relation, about["relation"])
    return VocabMap(relation, **tensors, target_sha256=target.sha256, draft_sha256=draft.sha256)


@dataclass(frozen=True)
class Retokenizer:
    """Target ids as draft ids: the mapped token, else its bytes in the draft's tokens.

    A target's BOS becomes whatever the draft's own tokenizer begins a text with.
    """

    vocab_map: VocabMap
    target: Vocabulary
    draft: Vocabulary
    _cache: dict[int, list[int]] = field(default_factory=dict)

    def from_start(self, ids: Sequence[int]) -> list[int]:
        """Of a text from its start."""
        bos = self.target.special_ids.get("bos_token")
        own = ids[1:] if ids and ids[0] == bos else ids
        whole = [*self.draft.prefix, *self.continuation(own)]
        # a model needs something to begin with: without a BOS, texts follow the end of another
        return whole or [self.draft.special_ids.get("eos_token") or 0]

    def continuation(self, ids: Sequence[int]) -> list[int]:
        """Of a stretch of text that goes on."""
        return [piece for i in ids for piece in self.of_token(i)]

    def of_token(self, i: int) -> list[int]:
        """Of one target id; none of a padding row, which stands for nothing."""
        if i not in self._cache:
            mapped = int(self.vocab_map.to_draft[i]) if i < len(self.vocab_map.to_draft) else -1
            data = self.target.bytes_of([i])
            self._cache[i] = [mapped] if mapped >= 0 else self.draft.longest_match(data)
        return self._cache[i]
