"""The map between the ids of a draft and those of its target, by the tokens' bytes.

Legend: V ids of the target's tokenizer, D ids of the draft's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from align.files import atomic_file
from align.token_bytes import Token
from align.vocabulary import Vocabulary

VOCAB_MAP = "vocab_map.safetensors"  # in a run's folder
FORMAT = "draftsmith-vocab-map/1"


@dataclass(frozen=True)
class VocabMap:
    """to_target: target id of each draft id [D]; to_draft: draft id of each target id [V]; or -1.

    Several draft ids may have one target id (equal tokens): their probabilities add up.
    `to_target[to_draft[t]]` is t, or the id of a token that equals t's.
    """

    to_target: Tensor
    to_draft: Tensor

    @property
    def mapped(self) -> Tensor:
        """The draft ids that have a target id [K], ascending."""
        return (self.to_target >= 0).nonzero()[:, 0]


def build_map(target: Vocabulary, draft: Vocabulary) -> VocabMap:
    """The map of a pair."""
    to_target = _look_up(target.id_of, draft.tokens)
    to_draft = _look_up(draft.id_of, target.tokens)
    # the two EOS tokens are mapped to each other even if their names differ
    mine, theirs = (side.special_ids.get("eos_token") for side in (target, draft))
    if mine is not None and theirs is not None and to_draft[mine] < 0 and to_target[theirs] < 0:
        to_draft[mine], to_target[theirs] = theirs, mine
    return VocabMap(to_target, to_draft)


def _look_up(ids: dict[Token, int], tokens: list[Token | None]) -> Tensor:
    return torch.tensor([-1 if token is None else ids.get(token, -1) for token in tokens])


def save_map(path: Path, vocab_map: VocabMap, target: Vocabulary, draft: Vocabulary) -> None:
    """Write the map, and the hashes of the two tokenizers, to a safetensors file."""
    tensors = {"to_target": vocab_map.to_target.int(), "to_draft": vocab_map.to_draft.int()}
    hashes = {"target_sha256": target.sha256, "draft_sha256": draft.sha256}
    with atomic_file(path, "wb") as file:
        file.write(save(tensors, {"format": FORMAT} | hashes))


@dataclass(frozen=True)
class Retokenizer:
    """Converts target ids to draft ids: to the mapped token, else to draft tokens of its bytes.

    At the start of a text the draft's prefix (its BOS, if any) replaces the target's BOS.
    """

    vocab_map: VocabMap
    target: Vocabulary
    draft: Vocabulary
    _cache: dict[int, list[int]] = field(default_factory=dict)

    def from_start(self, ids: Sequence[int]) -> list[int]:
        """Draft ids of a text from its start; at least one."""
        bos = self.target.special_ids.get("bos_token")
        text = ids[1:] if ids and ids[0] == bos else ids
        whole = [*self.draft.prefix, *self.continuation(text)]
        # a model needs at least one token; if there is no BOS, texts follow an EOS in training
        return whole or [self.draft.special_ids.get("eos_token") or 0]

    def continuation(self, ids: Sequence[int]) -> list[int]:
        """Draft ids of text that continues earlier text."""
        return [piece for i in ids for piece in self.of_token(i)]

    def of_token(self, i: int) -> list[int]:
        """Draft ids of one target id; none for an id without a token."""
        if i not in self._cache:
            mapped = int(self.vocab_map.to_draft[i]) if i < len(self.vocab_map.to_draft) else -1
            data = self.target.bytes_of([i])
            self._cache[i] = [mapped] if mapped >= 0 else self.draft.longest_match(data)
        return self._cache[i]
