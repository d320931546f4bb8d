"""Batched generation by the target alone; when an output ends, the next prompt takes its row."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

from eval.decoding.forward import PIECE, Decoder, HiddenStates, in_pieces, selected
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

    When an output ends, the next prompt takes its row; when no prompt is left and half of the rows
    are free, these are dropped. So few steps are spent on finished rows. Prompts longer than PIECE
    run separately from shorter ones, in fewer rows (`rows_at_once`).
    seeds: one per prompt; all random numbers of its output come from its seed. The first tokens
    that all prompts share are read once, the others in `prefill_groups`. Therefore an output's bits
    depend only on the prompts that are read with its prompt, and on the numbers of rows, slots and
    shared tokens.
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
    # steps read all slots of the rows; a cache of fewer, resized now and then, gained no time
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

    def read(texts: list[list[int]], start: int) -> tuple[list[Any], list[Any]]:
        """Read texts of one length into `prefilled`; by row what was captured, and the states."""
        captured: list[Any] = [[] for _ in texts]
        if not texts[0]:
            return captured, [[] for _ in texts]
        tokens, states = torch.tensor(texts, device=target.device), dict.fromkeys(layers)
        for logits in in_pieces(target, tokens, start, prefilled, not kept.in_prompts, states):
            if capture and kept.in_prompts:
                for of_row, row_logits in zip(captured, logits, strict=True):
                    of_row.extend(zip(*capture(row_logits), strict=True))
        return captured, [*_on_host(states)] if layers else [[] for _ in texts]

    shared = _shared(prompts)
    first = read([prompts[0][:shared]] * prefilled.rows, 0)  # its slots are not written again

    def admit(row: int) -> Generated | None:
        """Give the row the next prompt, cached except its last token; None if no prompt is left."""
        if not waiting and queue:
            waiting[:] = queue.pop(0)
            width = max(len(prompts[i]) for i in waiting) - 1 - shared
            # the padding of a head is overwritten before any step reads it
            heads = [(prompts[i][shared:-1] + [0] * width)[:width] for i in waiting]
            heads += heads[:1] * (prefilled.rows - len(heads))
            for i, captured, states in zip(waiting, *read(heads, shared), strict=False):
                size = len(prompts[i]) - 1 - shared
                in_prompts[i] = first[0][0] + captured[:size]
                in_heads[i] = [part for part in (first[1][0], states[:size]) if len(part)]
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
        busy = [row for row, output in enumerate(running) if output is not None]
        if 2 * len(busy) <= len(running) and not (waiting or queue):
            cache, running = cache.only(busy), [running[row] for row in busy]
            by_row = tokens, positions, used, moves, uniforms
            tokens, positions, used, moves, uniforms = (selected(t, busy) for t in by_row)
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


def _shared(prompts: Sequence[list[int]]) -> int:
    """The number of first tokens that all prompts have, without the last token of any."""
    pairs = zip(min(prompts), max(prompts), strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)
    return min(sum(1 for _ in same), min(map(len, prompts)) - 1)


def _on_host(states: HiddenStates) -> Tensor:
    """The states of all layers at the positions of a forward [B, T, L, H], in bf16, on the host."""
    layers = [state for state in states.values() if state is not None]
    return torch.stack(layers, 2).to(torch.bfloat16).cpu()
