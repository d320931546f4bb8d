"""The speculative decoder and its baseline: one prompt, chain drafting, exact verification.

The output is the target's own: identical tokens when greedy, the same distribution when sampling
(arXiv 2211.17192, 2302.01318; the rules are in eval/decoding/verification.py).
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.decoding.drafting import Draft, Proposal, StringDraft
from eval.decoding.forward import Decoder
from eval.decoding.verification import (
    Sampling,
    likeliest,
    sample,
    verify_greedy,
    verify_sampled,
    verify_without_q,
    warp,
)
from eval.measuring.metrics import PromptRun
from eval.prompts import Prompt


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


def cut(tokens: list[int], room: int, stops: frozenset[int]) -> tuple[list[int], bool]:
    """The tokens up to the first stop (included) or the room left, and whether any were lost."""
    kept = tokens[:room]
    for i, token in enumerate(kept):
        if token in stops:
            kept = kept[: i + 1]
            break
    return kept, len(kept) < len(tokens)


def choose(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The target's own choice of a token after each of [..., V]."""
    return likeliest(logits) if sampling.greedy else sample(warp(logits, sampling), generator)


def verify(
    logits: Tensor, proposal: Proposal, sampling: Sampling, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """How many of the drafted tokens stand [B] and the target's next one [B].

    logits: the target's after the last token of the text and after each drafted one [B, G+1, V].
    """
    if sampling.greedy:
        return verify_greedy(likeliest(logits), proposal.tokens)
    p = warp(logits, sampling)
    if proposal.q is None:
        return verify_without_q(p, proposal.tokens, generator)
    return verify_sampled(p, proposal.q, proposal.tokens, generator)


def decode_baseline(target: Decoder, prompt: Prompt, ids: list[int], how: Decoding) -> PromptRun:
    """The target alone, one token a call, timed as `decode_speculative` is."""
    generator = torch.Generator(device=target.device).manual_seed(how.seed)
    clock = time.perf_counter()
    cache = target.new_cache(1, len(ids) + how.max_new_tokens)
    logits = target.forward(torch.tensor([ids], device=target.device), 0, cache, last_only=True)
    token = choose(logits, how.sampling, generator)
    tokens = token[0].tolist()
    now = time.perf_counter()
    run = empty_run(prompt, ids, tokens, now - clock)
    while tokens[-1] not in how.stops and len(tokens) < how.max_new_tokens:
        clock = now
        logits = target.forward(token, len(ids) + len(tokens) - 1, cache)
        token = choose(logits, how.sampling, generator)
        tokens.extend(token[0].tolist())
        now = time.perf_counter()
        run.block_seconds.append(now - clock)
        run.block_tokens.append(1)
        run.drafted.append(0)
        run.accepted.append(0)
    return run


def decode_speculative(
    target: Decoder,
    draft: Draft | StringDraft,
    prompt: Prompt,
    ids: list[int],
    how: Decoding,
    length: DraftLength,
) -> PromptRun:
    """The target with a draft of that length, cut where fewer tokens are still wanted."""
    assert length.gamma >= 1
    generator = torch.Generator(device=target.device).manual_seed(how.seed)
    slots = len(ids) + how.max_new_tokens
    device = target.device

    # 1. Prefill the target; its last logits give the first token, which no draft had a part in.
    clock = time.perf_counter()
    target_cache = target.new_cache(1, slots)
    logits = target.forward(torch.tensor([ids], device=device), 0, target_cache, last_only=True)
    tokens: list[int] = choose(logits, how.sampling, generator)[0].tolist()
    now = time.perf_counter()
    run = empty_run(prompt, ids, tokens, now - clock)

    # 2. The draft takes in the text so far; it reads what is new at the start of each round.
    vocab_size = logits.shape[-1]
    session = draft.start([*ids, tokens[0]], slots, vocab_size, how.sampling, generator)

    while tokens[-1] not in how.stops and len(tokens) < how.max_new_tokens:
        clock = now
        # 3. Draft. The last wanted token comes from the target itself, so one less is drafted.
        room = how.max_new_tokens - len(tokens) - 1
        proposal = session.propose(min(length.gamma, room), length.stop_below)

        # 4. Verify the last token and the draft in one target call.
        last = torch.tensor([tokens[-1:]], device=device)
        block = torch.cat([last, proposal.tokens], dim=1)
        start = len(ids) + len(tokens) - 1
        logits = target.forward(block, start, target_cache)
        accepted, following = verify(logits, proposal, how.sampling, generator)

        # 5. One transfer a block: the draft's tokens, how many stand, and the target's next one.
        *drafted, n, correction = torch.cat([block[0, 1:], accepted, following]).tolist()
        emitted, truncated = cut(
            [*drafted[:n], correction], how.max_new_tokens - len(tokens), how.stops
        )
        tokens.extend(emitted)
        now = time.perf_counter()
        run.block_seconds.append(now - clock)
        run.block_tokens.append(len(emitted))
        run.drafted.append(len(drafted))
        run.accepted.append(n)
        run.last_truncated = truncated or len(drafted) == room < length.gamma

        # 6. The draft goes back to what stands. The target's own cache rolls back by position.
        session.extend(emitted, n)
    return run


def empty_run(prompt: Prompt, ids: list[int], tokens: list[int], seconds: float) -> PromptRun:
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
