"""A draft with ids of its own, bridged token by token: what both vocabularies have is drafted.

Legend: as in checkpoint.py; D rows of the draft's whole head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from align.vocab_map import Retokenizer, build_map
from align.vocabulary import Vocabulary
from eval.decoding.drafters.base import GroupedRows, Session, Texts
from eval.decoding.drafters.checkpoint import CheckpointDrafter, TokenSession


@dataclass(kw_only=True)
class MapDrafter(CheckpointDrafter):
    """Strategy `intersection`: reads the target's text in its own ids, drafts the tokens both have.

    Raises MapError when the two share no token.
    """

    target: Vocabulary
    draft: Vocabulary

    def __post_init__(self) -> None:
        super().__post_init__()
        vocab_map = build_map(self.target, self.draft)
        self.retokenizer = Retokenizer(vocab_map, self.target, self.draft)
        device = self.decoder.device
        token_ids = vocab_map.to_target[vocab_map.mapped]
        self.mapped = vocab_map.mapped.to(device)  # head rows that may be drafted [K]
        self.token_ids = token_ids.to(device)
        self.own_ids = vocab_map.to_draft[token_ids].to(device)  # what is read for each [K]

    def read(self, ids: Sequence[int], begins: bool = False) -> list[int]:
        return self.retokenizer.from_start(ids) if begins else self.retokenizer.continuation(ids)

    def own_slots(self, slots: int) -> int:
        return self.decoder.context_length  # in its own ids a text may be longer

    def cut(self, logits: Tensor) -> Tensor:
        # torch selects in bf16 three times as slowly as it converts and selects in fp32
        return logits.float().index_select(-1, self.mapped)

    def certainty(self, q: Tensor, chosen: Tensor, logits: Tensor) -> Tensor:
        """As of any draft, times the mass of what may be drafted at all."""
        share = self.cut(logits.float().softmax(-1)).sum(-1)
        return super().certainty(q, chosen, logits) * share

    def to_own_ids(self, rows: Tensor) -> Tensor:
        return self.own_ids[rows]

    def start(self, texts: Texts) -> Session:
        # in its own ids rows do not go on by as many tokens: each keeps to itself
        return GroupedRows([TokenSession(self, texts._replace(ids=[i])) for i in texts.ids])
