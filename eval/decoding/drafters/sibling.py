"""A sibling: another model as draft; its vocabulary is mapped to the target's if they differ."""

from __future__ import annotations

from typing import Any

from align.check import choose_strategy, compare
from align.transplant import resized, transplant
from align.vocab_map import build_map
from align.vocabulary import read_vocabulary
from eval.decoding.build import build_decoder, longest_context
from eval.decoding.drafters.bridged import MapDrafter
from eval.decoding.drafters.causal_lm import CausalLMDrafter
from eval.decoding.drafters.pard import PardDrafter, of_config
from eval.decoding.target import Target, model_bytes

LONGER = 2  # a text has rarely more than this many times as many draft tokens as target tokens


def sibling_drafter(model: Any, spec: str, target: Target, strategy: str) -> CausalLMDrafter:
    """The drafter of a model that was loaded from `spec`; the spec's tokenizer is read.

    strategy: the vocabulary mapping (align/check.py). Raises UserError if the pair has no lossless
    mapping, or if `strategy` does not fit the pair.
    """
    target_vocab, draft_vocab = read_vocabulary(target.spec), read_vocabulary(spec)
    verdict = compare(target_vocab, draft_vocab)
    chosen = choose_strategy(verdict, strategy, tuned=False)
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
    size, head_size = model_bytes(model), model.get_output_embeddings().weight.shape[0]
    about: dict[str, Any] = {
        "decoder": build_decoder(model, context),
        "vocab_size": vocab_size,
        "path": spec,
        "vocabulary": {
            "relation": verdict.relation,
            "strategy": chosen,
            "coverage": verdict.coverage,
        },
        "bytes": size,
        "full_form_bytes": size,
    }
    if chosen == "intersection":
        return MapDrafter(target=target_vocab, draft=draft_vocab, **about)
    about["entries"] = None if head_size == shared else shared
    if hasattr(model.config, "pard_token"):
        return PardDrafter(**of_config(model.config), **about)
    return CausalLMDrafter(**about)
