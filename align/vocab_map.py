"""The map between the ids of a draft and those of its target, by the bytes that tokens stand for.

Legend: V ids of the target's tokenizer, D ids of the draft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from align.atomic import atomic_file
from align.checks import Relation, differing_ids, relation_of
from align.side import Side, is_used, safetensors_header
from align.sources import SourceError
from align.token_bytes import Key

FORMAT = "draftsmith-vocab-map/1"


class MapError(ValueError):
    """A map that cannot be made or must not be used: code, value, reason, remedy."""


@dataclass(frozen=True)
class VocabMap:
    """to_target: target id of each draft id [D], -1 for none; to_draft: the other way round [V].

    Several draft ids may have one target id (tokens spelt alike): their probabilities add up.
    `to_target[to_draft[t]]` is t, or the id of a token spelt like t.
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


def build_map(target: Side, draft: Side) -> VocabMap:
    """The map of a pair. Raises MapError when they share no token that spells text."""
    relation = relation_of(target, draft, differing_ids(target, draft))
    if relation == "disjoint":
        raise MapError(
            f"TOK-005: of {len(target.used)} and {len(draft.used)} tokens {target.spec!r} and "
            f"{draft.spec!r} share none that spells text, so a map of tokens would be empty; use "
            "strategy string, which needs no shared token."
        )
    ids_of = _ids_by_key(target), _ids_by_key(draft)
    to_target = torch.tensor([_look_up(ids_of[0], key) for key in draft.keys])
    to_draft = torch.tensor([_look_up(ids_of[1], key) for key in target.keys])
    # an end of text is one whatever it is called
    mine, theirs = (side.special_ids.get("eos_token") for side in (target, draft))
    if mine is not None and theirs is not None and to_draft[mine] < 0 and to_target[theirs] < 0:
        to_draft[mine], to_target[theirs] = theirs, mine
    return VocabMap(relation, to_target, to_draft, target.sha256, draft.sha256)


def _ids_by_key(side: Side) -> dict[Key, int]:
    # the last of equals is the one that texts are encoded with (Side.longest_match)
    return {key: i for i, key in enumerate(side.keys) if key is not None and is_used(key)}


def _look_up(ids: dict[Key, int], key: Key | None) -> int:
    return -1 if key is None else ids.get(key, -1)


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


def load_map(path: Path, target: Side, draft: Side) -> VocabMap:
    """The map saved at `path`.

    Raises MapError when either tokenizer is not the one it was made of, SourceError when the file
    is no whole map.
    """
    about = safetensors_header(path).get("__metadata__", {})
    if about.get("format") != FORMAT:
        raise SourceError(
            f"{path} has format {about.get('format')!r}, not {FORMAT!r}; delete it, it is made "
            "again from the tokenizers."
        )
    for name, side in (("target", target), ("draft", draft)):
        found = about[f"{name}_sha256"]
        if found != side.sha256:
            raise MapError(
                f"TOK-014: {path} was made for another {name} tokenizer (hash {found[:12]}…, that "
                f"of {side.spec} is {side.sha256[:12]}…), and would corrupt; delete the map, it is "
                "made again from the tokenizers."
            )
    tensors = {name: tensor.long() for name, tensor in load_file(path).items()}
    return VocabMap(
        about["relation"],
        tensors["to_target"],
        tensors["to_draft"],
        about["target_sha256"],
        about["draft_sha256"],
    )


@dataclass(frozen=True)
class Reader:
    """Target ids as the draft reads them: the mapped token, else its bytes in the draft's tokens.

    A target's BOS becomes whatever the draft's own tokenizer begins a text with.
    """

    vocab_map: VocabMap
    target: Side
    draft: Side
    _pieces: dict[int, list[int]] = field(default_factory=dict)

    def begin(self, ids: Sequence[int]) -> list[int]:
        """A text from its start."""
        bos = self.target.special_ids.get("bos_token")
        own = ids[1:] if ids and ids[0] == bos else ids
        return [*self.draft.prefix, *self.read(own)]

    def read(self, ids: Sequence[int]) -> list[int]:
        """A stretch of text that goes on."""
        return [piece for i in ids for piece in self.pieces(i)]

    def pieces(self, i: int) -> list[int]:
        """Draft ids of one target id."""
        if i not in self._pieces:
            known = i < len(self.vocab_map.to_draft)  # padding rows stand for nothing
            mapped = int(self.vocab_map.to_draft[i]) if known else -1
            spelt = self.draft.spell(self.target.bytes_of([i])) if known else []
            self._pieces[i] = [mapped] if mapped >= 0 else spelt
        return self._pieces[i]
