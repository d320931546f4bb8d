"""Batched generation by the target alone; when an output ends, the next prompt takes its row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from eval.decoding.forward import PIECE, Decoder, HiddenStates, in_pieces
from eval.decoding.loop import Decoding
from eval.decoding.verification import argmax, inverse_cdf, warp

PREFILL_ROWS = 4  # prompts of up to PIECE tokens that one forward reads, so weights are read once


@dataclass
class Generated:
    """The target's output for prompt number `index`.

    tokens: with the stop token, if one was emitted. captured: what `capture` returned for the
    logits that predict each of these tokens. With `in_prompts`, the prompt's tokens except its
    first come before. states: hidden states at every token of prompt and output except the last,
    as bf16 pieces [T, L, H] on the host (T tokens, L layers).
    """

    index: int
    tokens: list[int] = field(default_factory=list)
    captured: list[tuple[Tensor, ...]] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


def tokens_bar(outputs: int, decoding: Decoding, disable: bool = False) -> tqdm[Any]:
    """A progress bar of tokens. Outputs are not counted, because many of them end at once."""
    total = outputs * decoding.max_new_tokens
    return tqdm(desc="target outputs", total=total, unit="token", unit_scale=True, disable=disable)


def prefill_groups(prompts: Sequence[list[int]]) -> list[list[int]]:
    """Groups of prompt numbers, each read in one forward; prompts above PIECE tokens are alone.

    The longest prompts come first, so that rows that run together have similar lengths and
    attention reads fewer slots.
    """
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    long = sum(len(prompt) > PIECE for prompt in prompts)
    together = range(long, len(order), PREFILL_ROWS)
    return [[i] for i in order[:long]] + [order[i : i + PREFILL_ROWS] for i in together]


def rows_at_once(batch_size: int, prompt: int, new: int) -> int:
    """The number of rows that run together: batch_size, or fewer to keep the cache from growing.

    prompt: tokens of the longest prompt; above PIECE, rows are fewer. new: tokens of an output.
    """
    return max(1, batch_size * (PIECE + new) // (_bucket(prompt) + new))


def _bucket(prompt: int) -> int:
    """The number of tokens, rounded up to PIECE times a power of two."""
    return PIECE << max(0, -(-prompt // PIECE) - 1).bit_length()


class Kept(NamedTuple):
    """What is kept of an output in addition to its tokens.

    capture: called on the logits [B, V] of each step, before any logits processor; row b of each
    tensor that it returns belongs to the output in row b. in_prompts: `capture` is also called on
    the logits within each prompt. layers: numbers (forward.py) of the hidden states to keep.
    """

    capture: Callable[[Tensor], tuple[Tensor, ...]] | None = None
    in_prompts: bool = False
    layers: Sequence[int] = ()


TOKENS_ALONE = Kept()


def generate_batched(
    target: Decoder,
    prompts: list[list[int]],
    decoding: Decoding,
    batch_size: int,
    seeds: Sequence[int],
    kept: Kept = TOKENS_ALONE,
    bar: tqdm[Any] | None = None,
) -> Iterator[Generated]:
    """Yields the outputs in the order in which they end. prompts: token ids, none of them empty.

    When an output ends, the next prompt takes its row, so that no step is spent on finished rows.
    Prompts longer than PIECE run separately from shorter ones, in fewer rows (`rows_at_once`).
    seeds: one per prompt; all random numbers of its output come from its seed. Every step has the
    same number of rows, and prompts are read in `prefill_groups`. Therefore an output's bits depend
    only on the prompts that are read with its prompt, and on the numbers of rows and slots.
    bar: from `tokens_bar`; when an output ends early, the bar counts the missing tokens, too.
    """

    def bucket(group: list[int]) -> int:
        return _bucket(len(prompts[group[0]]))

    for longest, groups in itertools.groupby(prefill_groups(prompts), bucket):
        numbers = list(itertools.chain.from_iterable(groups))
        rows = rows_at_once(batch_size, longest, decoding.max_new_tokens)
        alike, their_seeds = [prompts[i] for i in numbers], [seeds[i] for i in numbers]
        for output in _generate(target, alike, decoding, rows, their_seeds, kept, bar):
            if bar is not None:
                bar.update(decoding.max_new_tokens - len(output.tokens))
            output.index = numbers[output.index]
            yield output


def _generate(
    target: Decoder,
    prompts: list[list[int]],
    decoding: Decoding,
    rows: int,
    seeds: Sequence[int],
    kept: Kept,
    bar: tqdm[Any] | None,
) -> Iterator[Generated]:
    """`generate_batched` for prompts that run together, the longest first."""
    sampling, capture, layers = decoding.sampling, kept.capture, kept.layers
    queue = prefill_groups(prompts)
    longest = len(prompts[0])
    # a forward reads only the slots in use, so a large cache costs no time
    cache = target.new_cache(rows, longest + decoding.max_new_tokens)
    prefilled = target.new_cache(1 if longest > PIECE else PREFILL_ROWS, longest)
    waiting: list[int] = []  # prompts in the rows of `prefilled`
    in_prompts: dict[int, list[tuple[Tensor, ...]]] = {}  # what was captured of these prompts
    in_heads: dict[int, list[Tensor]] = {}  # hidden states of these prompts
    # by row: the output, the next token to read and its position; without an output, position 0
    running: list[Generated | None] = []
    tokens, positions, used, moves = torch.zeros((4, rows), dtype=torch.long, device=target.device)
    # one random number for each token of an output; `used` counts the used ones
    uniforms = torch.zeros(
        (rows, decoding.max_new_tokens), dtype=torch.float64, device=target.device
    )

    def admit(row: int) -> Generated | None:
        """Give the row the next prompt, cached except its last token; None if no prompt is left."""
        if not waiting and queue:
            waiting[:] = queue.pop(0)
            width = max(len(prompts[i]) for i in waiting) - 1
            if width > 0:
                # the padding of a head is overwritten before any step reads it
                heads = [(prompts[i][:-1] + [0] * width)[:width] for i in waiting]
                heads += heads[:1] * (prefilled.rows - len(heads))
                read = torch.tensor(heads, device=target.device)
                states = dict.fromkeys(layers)
                pieces = in_pieces(target, read, 0, prefilled, not kept.in_prompts, states)
                for at, logits in zip(range(0, width, PIECE), pieces, strict=True):
                    if capture and kept.in_prompts:
                        for i, row_logits in zip(waiting, logits, strict=False):
                            captured = capture(row_logits[: max(0, len(prompts[i]) - 1 - at)])
                            in_prompts.setdefault(i, []).extend(zip(*captured, strict=True))
                if layers:
                    for i, row_states in zip(waiting, _on_host(states), strict=False):
                        in_heads[i] = [row_states[: len(prompts[i]) - 1].clone()]
        positions[row] = used[row] = moves[row] = 0
        if not waiting:
            return None
        index = waiting.pop()
        head = len(prompts[index]) - 1
        cache.copy_row(row, prefilled, len(waiting), head)
        tokens[row], positions[row], moves[row] = prompts[index][-1], head, 1
        if not sampling.greedy:  # drawn on the host, so that all devices get the same numbers
            generator = torch.Generator().manual_seed(seeds[index])
            uniforms[row] = torch.rand(
                decoding.max_new_tokens, dtype=torch.float64, generator=generator
            )
        return Generated(index, [], in_prompts.pop(index, []), in_heads.pop(index, []))

    for row in range(rows):
        running.append(admit(row))
    while any(running):
        states = dict.fromkeys(layers)
        logits = target.forward(tokens[:, None], positions, cache, states=states)[:, -1]
        on_host = _on_host(states) if layers else None
        if sampling.greedy:
            tokens = argmax(logits)
        else:
            tokens = inverse_cdf(warp(logits, sampling), uniforms.gather(1, used[:, None]))
        positions += moves
        used += moves
        captured = capture(logits) if capture else ()
        if bar is not None:
            bar.update(sum(output is not None for output in running))
        for row, token in enumerate(tokens.tolist()):
            output = running[row]
            if output is None:
                continue
            output.tokens.append(token)
            if captured:
                output.captured.append(tuple(part[row] for part in captured))
            if on_host is not None:
                output.states.append(on_host[row])
            if token in decoding.stops or len(output.tokens) == decoding.max_new_tokens:
                yield output
                running[row] = admit(row)


def _on_host(states: HiddenStates) -> Tensor:
    """The states of all layers at the positions of a forward [B, T, L, H], in bf16, on the host."""
    layers = [state for state in states.values() if state is not None]
    return torch.stack(layers, 2).to(torch.bfloat16).cpu()
