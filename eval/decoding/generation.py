"""Batched generation by the target alone: ragged rows, finished ones replaced at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.decoding.forward import Decoder
from eval.decoding.verification import Sampling, argmax, inverse_cdf, warp

SLACK = 32  # free slots: a step reads every slot of the cache, and resizing it reads all of it
PREFILL_ROWS = 4  # prompts read at once: each weight that is read serves all their tokens


@dataclass
class Answer:
    """The target's answer to prompt number `index`: tokens, a stop token included when emitted.

    captured: whatever `capture` returned for the raw logits at each of these tokens.
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    captured: list[tuple[Tensor, ...]] = field(default_factory=list)


def generate_batched(
    target: Decoder,
    prompts: list[list[int]],
    max_new_tokens: int,
    stops: frozenset[int],
    sampling: Sampling,
    batch_size: int,
    seeds: Sequence[int],
    capture: Callable[[Tensor], tuple[Tensor, ...]] | None = None,
) -> Iterator[Answer]:
    """Answers as they finish, not in order. `prompts` are token ids, none of them empty.

    A row that ends is given to the next prompt at once, so that no step is spent on finished rows.
    capture: called on the raw logits [B, V] of each step; row b of each tensor it returns goes to
    the answer that holds row b. seeds: one a prompt, from which all random numbers of its answer
    come: sampled tokens do not depend on the rows beside it, but for rounding.
    """
    # longest first: rows that run together have similar lengths, and attention reads less
    queue = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    longest = max((len(prompt) for prompt in prompts), default=0)
    cache = target.new_cache(min(batch_size, len(prompts)), longest + SLACK)
    prefilled = target.new_cache(min(PREFILL_ROWS, len(prompts)), longest)
    waiting: list[int] = []  # prompts in the rows of `prefilled`, the last of them first
    # each row's answer, the token it reads next, and that token's position
    answers: list[Answer] = []
    tokens = torch.zeros(cache.rows, dtype=torch.long, device=target.device)
    positions = torch.zeros(cache.rows, dtype=torch.long, device=target.device)
    # one uniform number for each token that a row may still emit, and how many it has used
    uniforms = torch.zeros((cache.rows, max_new_tokens), dtype=torch.float64, device=target.device)
    used = torch.zeros(cache.rows, dtype=torch.long, device=target.device)

    def admit(row: int) -> Answer:
        """Cache all of a prompt but its last token, which steps with the other rows."""
        if not waiting:
            waiting[:] = queue[-prefilled.rows :]
            del queue[-prefilled.rows :]
            width = max(len(prompts[i]) for i in waiting) - 1
            if width > 0:
                # what pads a head is overwritten before it is read
                heads = [(prompts[i][:-1] + [0] * width)[:width] for i in waiting]
                heads += heads[:1] * (prefilled.rows - len(heads))
                target.forward(torch.tensor(heads, device=target.device), 0, prefilled, True)
        index = waiting.pop()
        head = len(prompts[index]) - 1
        cache.copy_row(row, prefilled, len(waiting), head)
        tokens[row], positions[row], used[row] = prompts[index][-1], head, 0
        if not sampling.greedy:  # on the host: the same numbers on every device
            generator = torch.Generator().manual_seed(seeds[index])
            uniforms[row] = torch.rand(max_new_tokens, dtype=torch.float64, generator=generator)
        return Answer(index)

    for row in range(cache.rows):
        answers.append(admit(row))
    while answers:
        needed = int(positions.max()) + 1
        if not needed <= cache.slots <= needed + 2 * SLACK:
            cache = cache.resized(needed + SLACK)
        logits = target.forward(tokens[:, None], positions, cache)[:, -1]
        positions += 1
        if sampling.greedy:
            tokens = argmax(logits)
        else:
            tokens = inverse_cdf(warp(logits, sampling), uniforms.gather(1, used[:, None]))
        used += 1
        captured = capture(logits) if capture else ()
        ended = []
        for row, token in enumerate(tokens.tolist()):
            answer = answers[row]
            answer.tokens.append(token)
            if captured:
                answer.captured.append(tuple(part[row] for part in captured))
            if token in stops or len(answer.tokens) == max_new_tokens:
                yield answer
                if waiting or queue:
                    answers[row] = admit(row)
                else:
                    ended.append(row)
        if ended:
            left = [row for row in range(len(answers)) if row not in ended]
            answers = [answers[row] for row in left]
            kept = torch.tensor(left, dtype=torch.long, device=target.device)
            cache, tokens, positions = cache.keep_rows(kept), tokens[kept], positions[kept]
            uniforms, used = uniforms[kept], used[kept]
