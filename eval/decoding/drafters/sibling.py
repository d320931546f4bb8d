"""A sibling: another model as draft; its vocabulary is mapped to the target's if they differ.

Legend: K entries of the draft's head that may be drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from align.check import choose_strategy, compare
from align.checkpoint import Checkpoint
from align.transplant import resized, transplant
from align.vocab_map import Retokenizer, build_map
from align.vocabulary import Vocabulary
from eval.decoding.build import build_decoder, longest_context
from eval.decoding.drafters.causal_lm import CausalLMDrafter
from eval.decoding.drafters.pard import PardDrafter
from eval.decoding.target import Target, model_bytes

LONGER = 2  # a text has rarely more than this many times as many draft tokens as target tokens


@dataclass(kw_only=True)
class MapDrafter(CausalLMDrafter):
    """Vocabulary mapping `intersection`: the draft reads the target's text in the draft's ids.

    It drafts only tokens that both vocabularies have (arXiv 2502.05202).
    """

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


def sibling_drafter(draft: Checkpoint, target: Target, strategy: str) -> CausalLMDrafter:
    """The drafter of any language model.

    strategy: the vocabulary mapping (align/check.py). Raises UserError if the pair has no lossless
    mapping, or if `strategy` does not fit the pair.
    """
    target_vocab, draft_vocab = target.checkpoint.vocabulary, draft.vocabulary
    verdict = compare(target.checkpoint, draft)
    chosen = choose_strategy(verdict, strategy, tuned=False)
    model: Any = draft.load(target.decoder.dtype)
    model = model.to(target.decoder.device)
    vocab_size, shared = target.decoder.embedding.shape[0], verdict.shared_ids
    if chosen in ("remap", "transplant"):
        model = transplant(
            model, build_map(target_vocab, draft_vocab), target_vocab, draft_vocab, vocab_size
        )
        shared = target_vocab.count
    elif chosen in ("direct", "padded"):
        model = resized(model, draft_vocab, vocab_size)
    context = target.decoder.context_length
    if chosen == "intersection":
        context = min(longest_context(model.config.get_text_config()), LONGER * context)
    head_size = model.get_output_embeddings().weight.shape[0]
    about: dict[str, Any] = {
        "decoder": build_decoder(model, context),
        "vocab_size": vocab_size,
        "path": draft.spec,
        "vocabulary": {
            "relation": verdict.relation,
            "strategy": chosen,
            "coverage": verdict.coverage,
        },
        "bytes": model_bytes(model),
    }
    if chosen == "intersection":
        return MapDrafter(target=target_vocab, draft=draft_vocab, **about)
    about["entries"] = None if head_size == shared else shared
    if hasattr(model.config, "pard_token"):
        longest = getattr(model.config, "pard_tokens", None)
        return PardDrafter(mask=model.config.pard_token, most=longest, **about)
    return CausalLMDrafter(**about)
