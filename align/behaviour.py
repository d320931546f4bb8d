"""Check 16: what the models of a pair do with each other's tokens, on a probe text.

Three events of speculative decoding are played through on the draft alone: a token that stands
(forced accept), one that is taken back (forced reject), and one that only the target has (bonus).
Nothing is sampled, and neither model is changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from align.checks import PROBES, Finding, show
from align.sources import load_model
from align.token_bytes import is_used
from align.vocab_map import Retokenizer, build_map
from align.vocabulary import Vocabulary

LEAK = 0.01  # of q's mass on ids that stand for nothing: worth a warning
LOST = 0.2  # of q's mass on tokens that only the draft has


@torch.inference_mode()
def check_behaviour(target: Vocabulary, draft: Vocabulary, strategy: str) -> Iterator[Finding]:
    """Findings TOK-016 of a pair that has a lossless strategy; loads both models in fp32."""
    ids = target.encode("".join(PROBES[:2]).encode())
    text = [*target.prefix, *ids]
    model: Any = load_model(target.spec, torch.float32)
    yield from _distribution(model(torch.tensor([text])).logits[0].softmax(-1), target)
    del model
    model = load_model(draft.spec, torch.float32)
    retokenizer = None
    if strategy == "string":
        text = [*draft.prefix, *draft.encode(target.bytes_of(ids))]
    elif strategy not in ("direct", "padded"):
        retokenizer = Retokenizer(build_map(target, draft), target, draft)
        text = retokenizer.from_start(text)
    q = model(torch.tensor([text])).logits[0].softmax(-1)
    yield from _distribution(q, draft)
    if retokenizer is not None:
        yield from _lost(q, retokenizer)
        yield from _bonus(retokenizer)
    yield from _rolls_back(model, text)


def _distribution(p: Tensor, vocabulary: Vocabulary) -> Iterator[Finding]:
    """Logits that are not finite, and mass on ids that stand for nothing: padding, placeholders."""
    if not torch.isfinite(p).all():
        yield Finding(
            "TOK-016",
            "fatal",
            f"The logits of {vocabulary.spec} on a probe text are not finite.",
            "its weights are damaged: fetch or copy them again",
        )
    unused = torch.ones(p.shape[-1], dtype=torch.bool)
    unused[[i for i, token in enumerate(vocabulary.tokens) if is_used(token)]] = False
    mass = float(p[:, unused].sum(-1).mean())
    if mass > LEAK:
        worst = p[:, unused].mean(0).argsort(descending=True)
        yield Finding(
            "TOK-016",
            "warning",
            f"{vocabulary.spec} gives {mass:.1%} of its probability to ids that stand for nothing.",
            "zero rows do that: set them to a row that is never likely",
            unused.nonzero()[worst[:5], 0].tolist(),
        )


def _lost(q: Tensor, retokenizer: Retokenizer) -> Iterator[Finding]:
    unmapped = torch.ones(q.shape[-1], dtype=torch.bool)
    unmapped[retokenizer.vocab_map.mapped] = False
    mass = float(q[:, unmapped].sum(-1).mean())
    if mass > LOST:
        yield Finding(
            "TOK-016",
            "warning",
            f"The draft gives {mass:.1%} of its probability to tokens that the target lacks.",
            "transplant it onto the target's vocabulary and distil, or use strategy string",
        )


def _bonus(retokenizer: Retokenizer) -> Iterator[Finding]:
    """A token of the target alone must be retokenized to the same bytes."""
    target, draft = retokenizer.target, retokenizer.draft
    unmapped = (retokenizer.vocab_map.to_draft < 0).nonzero()[:, 0].tolist()
    normal = [i for i in unmapped if (token := target.tokens[i]) and token[0] == "normal"]
    lost = [i for i in normal if draft.bytes_of(retokenizer.of_token(i)) != target.bytes_of([i])]
    if lost:
        yield Finding(
            "TOK-016",
            "warning",
            f"{len(lost)} tokens of the target cannot be written in the draft's ({lost[0]} is "
            f"{show(target.tokens[lost[0]])}); it reads on without them.",
            "nothing for losslessness; acceptance falls after such tokens",
            lost[:5],
        )


def _rolls_back(model: Any, text: list[int]) -> Iterator[Finding]:
    """Logits after a rejected token was taken back must be those of a text that never had it."""
    half = len(text) // 2
    tokens = torch.tensor([text])
    cache = DynamicCache()  # without a configuration it keeps all of a text: a window is a mask
    try:
        model(tokens[:, :half], past_key_values=cache, use_cache=True)
        model(tokens[:, :1], past_key_values=cache, use_cache=True)  # a token that will be rejected
        cache.crop(-1)
        rolled_back = model(tokens[:, half:], past_key_values=cache, use_cache=True).logits[0, -1]
    except Exception as error:
        yield Finding(
            "TOK-016",
            "error",
            "The draft does not run on a cache of keys and values, from which a rejected token can "
            f"be taken back ({type(error).__name__}: {error}).",
            "use a draft with attention layers only",
        )
        return
    fresh = model(tokens).logits[0, -1]
    off = float((rolled_back - fresh).abs().max())
    if off > 1e-2 * float(fresh.abs().max()):
        yield Finding(
            "TOK-016",
            "error",
            f"After a rejected token is taken back the draft's logits are off by {off:.2g}.",
            "use a draft with attention layers only: a state that runs on cannot be rolled back",
        )
