"""The speculative decoder and its baseline: one prompt, chain drafting, exact verification.

The output is the target's own: identical tokens when greedy, the same distribution when sampling
(arXiv 2211.17192, 2302.01318; the rules are in eval/verification.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from eval.forward import Decoder, KVCache
from eval.metrics import PromptRun
from eval.prompts import Prompt
from eval.verification import Sampling, likeliest, sample, verify_greedy, verify_sampled, warp


@dataclass(frozen=True)
class Draft:
    """A draft ready to run.

    token_ids: target id of each row of a trimmed head [K], None when rows are ids. rows: how many
    of the head's first rows may be drafted (the rest is padding), None for all.
    """

    decoder: Decoder
    token_ids: Tensor | None = None
    rows: int | None = None

    def forward(self, tokens: Tensor, start: int, cache: KVCache, last_only: bool) -> Tensor:
        """Logits [B, T, K] over what may be drafted."""
        return self.decoder.forward(tokens, start, cache, last_only)[..., : self.rows]

    def to_target_ids(self, rows: Tensor) -> Tensor:
        return rows if self.token_ids is None else self.token_ids[rows]

    def over_target_ids(self, q: Tensor, vocab_size: int) -> Tensor:
        """q [..., K] over the target's vocabulary [..., V], zero where the draft has no row."""
        if self.token_ids is None:
            missing = vocab_size - q.shape[-1]
            assert missing >= 0
            return F.pad(q, (0, missing)) if missing else q
        full = torch.zeros((*q.shape[:-1], vocab_size), dtype=q.dtype, device=q.device)
        return full.index_copy_(-1, self.token_ids, q)


@dataclass(frozen=True)
class DraftLength:
    """How many tokens a block drafts: at most gamma, and no more once the draft doubts them.

    stop_below: another token is drafted only while the product of the draft's probabilities of the
    tokens drafted so far is at least this; 0 drafts gamma tokens every time. Whatever was drafted
    is verified: the decision depends on the past alone, so the output stays the target's.
    """

    gamma: int
    stop_below: float = 0.0

    def __str__(self) -> str:
        return f"{self.gamma}" + (f", stop below {self.stop_below:g}" if self.stop_below else "")


@dataclass(frozen=True)
class Decoding:
    """How text is decoded: the deployed sampling, the stop tokens, the longest answer, the seed."""

    sampling: Sampling
    stops: frozenset[int]
    max_new_tokens: int
    seed: int = 0


def _cut(tokens: list[int], room: int, stops: frozenset[int]) -> tuple[list[int], bool]:
    """The tokens up to the first stop (included) or the room left, and whether any were lost."""
    kept = tokens[:room]
    for i, token in enumerate(kept):
        if token in stops:
            kept = kept[: i + 1]
            break
    return kept, len(kept) < len(tokens)


def decode_baseline(target: Decoder, prompt: Prompt, ids: list[int], how: Decoding) -> PromptRun:
    """The target alone, one token a call, timed as `decode_speculative` is."""
    generator = torch.Generator(device=target.device).manual_seed(how.seed)

    def choose(logits: Tensor) -> Tensor:
        if how.sampling.greedy:
            return likeliest(logits)
        return sample(warp(logits, how.sampling), generator)

    clock = time.perf_counter()
    cache = target.new_cache(1, len(ids) + how.max_new_tokens)
    logits = target.forward(torch.tensor([ids], device=target.device), 0, cache, last_only=True)
    token = choose(logits)
    tokens = token[0].tolist()
    now = time.perf_counter()
    run = _empty_run(prompt, ids, tokens, now - clock)
    while tokens[-1] not in how.stops and len(tokens) < how.max_new_tokens:
        clock = now
        token = choose(target.forward(token, len(ids) + len(tokens) - 1, cache))
        tokens.extend(token[0].tolist())
        now = time.perf_counter()
        run.block_seconds.append(now - clock)
        run.block_tokens.append(1)
        run.drafted.append(0)
        run.accepted.append(0)
    return run


def decode_speculative(
    target: Decoder,
    draft: Draft,
    prompt: Prompt,
    ids: list[int],
    how: Decoding,
    length: DraftLength,
) -> PromptRun:
    """The target with a draft of that length, cut where fewer tokens are still wanted."""
    assert length.gamma >= 1
    greedy = how.sampling.greedy
    generator = torch.Generator(device=target.device).manual_seed(how.seed)
    slots = len(ids) + how.max_new_tokens
    device = target.device

    # 1. Prefill the target; its last logits give the first token, which no draft had a part in.
    clock = time.perf_counter()
    target_cache = target.new_cache(1, slots)
    logits = target.forward(torch.tensor([ids], device=device), 0, target_cache, last_only=True)
    first = likeliest(logits) if greedy else sample(warp(logits, how.sampling), generator)
    tokens: list[int] = first[0].tolist()
    now = time.perf_counter()
    run = _empty_run(prompt, ids, tokens, now - clock)

    # 2. What the draft has not seen yet; it is fed at the start of each round.
    draft_cache = draft.decoder.new_cache(1, slots)
    unseen, seen = [*ids, tokens[0]], 0

    while tokens[-1] not in how.stops and len(tokens) < how.max_new_tokens:
        clock = now
        # 3. Draft. The last wanted token comes from the target itself, so one less is drafted.
        room = how.max_new_tokens - len(tokens) - 1
        confidence = 1.0
        step = torch.tensor([unseen], device=device)
        drafted: list[Tensor] = []
        q: list[Tensor] = []
        while len(drafted) < min(length.gamma, room) and confidence >= length.stop_below:
            logits = draft.forward(step, seen, draft_cache, last_only=True)[:, -1]
            seen += step.shape[1]
            if greedy:
                chosen = likeliest(logits)
            else:
                q.append(warp(logits, how.sampling))
                chosen = sample(q[-1], generator)
            if length.stop_below:
                probabilities = logits.float().softmax(-1) if greedy else q[-1]
                confidence *= float(probabilities[0, chosen])
            step = draft.to_target_ids(chosen)[:, None]
            drafted.append(step)

        # 4. Verify the last token and the draft in one target call.
        last = torch.tensor([tokens[-1:]], device=device)
        block = torch.cat([last, *drafted], dim=1)
        start = len(ids) + len(tokens) - 1
        logits = target.forward(block, start, target_cache)
        if greedy:
            accepted, following = verify_greedy(likeliest(logits), block[:, 1:])
        else:
            p = warp(logits, how.sampling)
            q_full = (
                draft.over_target_ids(torch.stack(q, dim=1), p.shape[-1])
                if q
                else p.new_zeros((1, 0, p.shape[-1]))
            )
            accepted, following = verify_sampled(p, q_full, block[:, 1:], generator)

        # 5. One transfer a block: the draft's tokens, how many stand, and the target's next one.
        *proposal, n, correction = torch.cat([block[0, 1:], accepted, following]).tolist()
        emitted, truncated = _cut(
            [*proposal[:n], correction], how.max_new_tokens - len(tokens), how.stops
        )
        tokens.extend(emitted)
        now = time.perf_counter()
        run.block_seconds.append(now - clock)
        run.block_tokens.append(len(emitted))
        run.drafted.append(len(drafted))
        run.accepted.append(n)
        run.last_truncated = truncated or len(drafted) == room < length.gamma

        # 6. Roll back by position: what the draft fed itself beyond the accepted tokens is stale.
        seen = min(seen, start + n + 1)
        unseen = [*ids, *tokens][seen:]
    return run


def _empty_run(prompt: Prompt, ids: list[int], tokens: list[int], seconds: float) -> PromptRun:
    return PromptRun(
        prompt_id=prompt.id,
        category=prompt.category,
        prompt_tokens=len(ids),
        tokens=tokens,
        prefill_seconds=seconds,
        block_seconds=[],
        block_tokens=[],
        drafted=[],
        accepted=[],
        last_truncated=False,
    )
