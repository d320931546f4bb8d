"""A draft with another vocabulary, which drafts only tokens that both vocabularies have.

arXiv 2502.05202 calls this token-level intersection. Legend: K entries of the draft's head that may
be drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from align.vocab_map import Retokenizer, build_map
from align.vocabulary import Vocabulary
from eval.decoding.drafters.causal_lm import CausalLMDrafter


@dataclass(kw_only=True)
class MapDrafter(CausalLMDrafter):
    """Vocabulary mapping `intersection`: the draft reads the target's text in the draft's ids."""

    target: Vocabulary
    draft: Vocabulary

    def __post_init__(self) -> None:
        super().__post_init__()
        vocab_map = build_map(self.target, self.draft)
        self.retokenizer = Retokenizer(vocab_map, self.target, self.draft)
        device = self.decoder.device
        token_ids = vocab_map.to_target[vocab_map.mapped]
        self.mapped = vocab_map.mapped.to(device)  # entries of the head that may be drafted [K]
        self.token_ids = token_ids.to(device)
        self.own_ids = vocab_map.to_draft[token_ids].to(device)  # draft id of each entry [K]

    def read(self, ids: Sequence[int], begins: bool = False) -> list[int]:
        return self.retokenizer.from_start(ids) if begins else self.retokenizer.continuation(ids)

    def own_slots(self, slots: int) -> int:
        return self.decoder.context_length  # a text may have more tokens in the draft's ids

    def cut(self, logits: Tensor) -> Tensor:
        # in bf16, torch's selection takes three times as long as conversion and selection in fp32
        return logits.float().index_select(-1, self.mapped)

    def to_own_ids(self, entries: Tensor) -> Tensor:
        return self.own_ids[entries]
