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

from align.checks import PROBES, Finding, show
from align.side import Side
from align.sources import load_model
from align.vocab_map import Reader, VocabMap, build_map

LEAK = 0.01  # of q's mass on ids that stand for nothing: worth a warning
LOST = 0.2  # of q's mass on tokens that only the draft has


@torch.inference_mode()
def check_behaviour(target: Side, draft: Side, strategy: str) -> Iterator[Finding]:
    """Findings TOK-016 of a pair that has a lossless strategy; loads both models in fp32."""
    ids = target.encode("".join(PROBES[:2]).encode())
    model: Any = load_model(target.spec, torch.float32)
    p = model(torch.tensor([[*target.prefix, *ids]])).logits[0].softmax(-1)
    yield from _finite(p, target)
    yield from _leaks(p, target)
    del model
    model = load_model(draft.spec, torch.float32)
    by_id = strategy in ("direct", "padded")
    text = [*target.prefix, *ids]
    if by_id or strategy == "string":
        read = text if by_id else [*draft.prefix, *draft.encode(target.bytes_of(ids))]
        vocab_map = None
    else:
        vocab_map = build_map(target, draft)
        read = Reader(vocab_map, target, draft).begin(text)
    q = model(torch.tensor([read])).logits[0].softmax(-1)
    yield from _finite(q, draft)
    yield from _leaks(q, draft)
    if vocab_map is not None:
        yield from _lost(q, vocab_map)
        yield from _bonus(target, draft, vocab_map)
    yield from _rolls_back(model, read)


def _finite(p: Tensor, side: Side) -> Iterator[Finding]:
    if not torch.isfinite(p).all():
        yield Finding(
            "TOK-016",
            "fatal",
            f"The logits of {side.spec} on a probe text are not finite.",
            "its weights are damaged: fetch or copy them again",
        )


def _leaks(p: Tensor, side: Side) -> Iterator[Finding]:
    """Mass on ids that stand for nothing: rows of padding and of placeholders."""
    nothing = torch.ones(p.shape[-1], dtype=torch.bool)
    used = [i for i, key in enumerate(side.keys) if key is not None and key[0] != "unused"]
    nothing[torch.tensor(used)] = False
    mass = float(p[:, nothing].sum(-1).mean())
    if mass > LEAK:
        worst = p[:, nothing].mean(0).argsort(descending=True)[:5]
        ids = tuple(nothing.nonzero()[worst, 0].tolist())
        yield Finding(
            "TOK-016",
            "warning",
            f"{side.spec} gives {mass:.1%} of its probability to ids that stand for nothing.",
            "zero rows do that: set them to a row that is never likely",
            ids,
        )


def _lost(q: Tensor, vocab_map: VocabMap) -> Iterator[Finding]:
    only = torch.ones(q.shape[-1], dtype=torch.bool)
    only[vocab_map.mapped] = False
    mass = float(q[:, only].sum(-1).mean())
    if mass > LOST:
        yield Finding(
            "TOK-016",
            "warning",
            f"The draft gives {mass:.1%} of its probability to tokens that the target lacks.",
            "transplant it onto the target's vocabulary and distil, or use strategy string",
        )


def _bonus(target: Side, draft: Side, vocab_map: VocabMap) -> Iterator[Finding]:
    """A token of the target alone must reach the draft as the same bytes."""
    reader = Reader(vocab_map, target, draft)
    alone = [
        i
        for i, key in enumerate(target.keys)
        if key is not None and key[0] == "normal" and vocab_map.to_draft[i] < 0
    ]
    lost = [i for i in alone if draft.bytes_of(reader.pieces(i)) != target.bytes_of([i])]
    if lost:
        yield Finding(
            "TOK-016",
            "warning",
            f"{len(lost)} tokens of the target cannot be spelt by the draft ({lost[0]} is "
            f"{show(target.keys[lost[0]])}); it reads on without them.",
            "nothing for losslessness; acceptance falls after such tokens",
            tuple(lost[:5]),
        )


def _rolls_back(model: Any, read: list[int]) -> Iterator[Finding]:
    """Logits after a rejected token was taken back must be those of a text that never had it."""
    half = len(read) // 2
    tokens = torch.tensor([read])
    cache = model(tokens[:, :half], use_cache=True).past_key_values
    model(tokens[:, :1], past_key_values=cache, use_cache=True)  # a token that will be rejected
    cache.crop(-1)
    back = model(tokens[:, half:], past_key_values=cache, use_cache=True).logits[0, -1]
    fresh = model(tokens).logits[0, -1]
    error = float((back - fresh).abs().max())
    if error > 1e-2 * float(fresh.abs().max()):
        yield Finding(
            "TOK-016",
            "error",
            f"After a rejected token is taken back the draft's logits are off by {error:.2g}.",
            "use a draft with attention layers only: a state that runs on cannot be rolled back",
        )
