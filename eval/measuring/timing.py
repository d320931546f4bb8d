"""Times prompts with and without each draft, and single steps."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import GenerationConfig

from eval.decoding.drafters.drafter import Drafter, timed_step
from eval.decoding.forward import Decoder
from eval.decoding.graphs import GraphedDecoder
from eval.decoding.loop import Decoding, decode
from eval.decoding.prompt_run import PromptRun
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring.cost import StepCosts
from eval.measuring.journal import Enough, Journal, all_of_them
from eval.prompts import Prompt, PromptSet

COST_REPEATS = 30  # rounds in which all steps are timed
WARM_UP_ROUNDS = 3
STOCK_PROMPTS = 10  # the fewest prompts that give an interval
STOCK_TOKENS = 24
WARM_UP_TOKENS = 8
TUNING_TOKENS = 64  # the most tokens of an output on which a draft length is chosen


class Contender(NamedTuple):
    """The target alone, or with a drafter at one draft length."""

    drafter: Drafter | None
    draft_length: int
    decoding: Decoding


def step_costs(
    target: Decoder,
    drafters: Sequence[Drafter],
    context_length: int,
    longest_draft: int,
    decoding: Decoding,
    enough: Enough = all_of_them,
) -> list[StepCosts]:
    """The step costs of each drafter with one target, at one context length.

    A step is forward, head, and the choice of a token, as in decoding. Each round times all steps
    once. Steps of target and drafts alternate as far as possible, as in decoding.
    """
    proposed = decoding.draft_sampling
    synchronise = torch.cuda.synchronize if target.device.type == "cuda" else lambda: None
    steps: dict[tuple[str, int], Callable[[], None]] = {}
    cache = target.new_cache(1, context_length + longest_draft + 1)
    for number in range(max(longest_draft + 1, len(drafters))):
        if number <= longest_draft:
            width = number + 1
            steps["target", width] = timed_step(
                target, cache, width, context_length, decoding.sampling
            )
        if number < len(drafters):
            steps["draft", number] = drafters[number].step(context_length, proposed)
            whole = drafters[number].draft_at_once(context_length, proposed, longest_draft)
            if whole is not None:
                steps["whole draft", number] = whole
    seconds: dict[tuple[str, int], list[float]] = {step: [] for step in steps}
    for repeat in tqdm(range(WARM_UP_ROUNDS + COST_REPEATS), desc="step costs", unit="round"):
        if repeat > WARM_UP_ROUNDS and enough(repeat):
            break
        for step, run in steps.items():
            synchronise()
            clock = time.perf_counter()
            run()
            synchronise()
            if repeat >= WARM_UP_ROUNDS:
                seconds[step].append(time.perf_counter() - clock)
    median = {step: 1000 * statistics.median(seconds[step]) for step in steps}
    verify = {width: median["target", width] for width in range(1, longest_draft + 2)}
    costs = []
    for number in range(len(drafters)):
        token, once = median["draft", number], 0.0
        if ("whole draft", number) in median:  # a parallel draft's time grows by a column per token
            longest = median["whole draft", number]
            # noise can make the shorter draft slower, but no part of its time may be below 0
            column = max(
                0.0, min((longest - token) / max(1, longest_draft - 1), longest / longest_draft)
            )
            token, once = column, max(0.0, token - column)
        costs.append(StepCosts(token, verify[1], verify, context_length, once))
    return costs


def fastest_length(
    target: Target,
    drafter: Drafter,
    prompts: PromptSet,
    decoding: Decoding,
    costs: StepCosts,
    longest: int,
    enough: Enough = all_of_them,
) -> tuple[int, int]:
    """The draft length up to `longest` with the most tokens per second, from the step costs.

    Returns also the number of prompts that were decoded.

    The prompts are decoded once with drafts of the `longest` length. With token-by-token
    verification, a shorter draft accepts the same tokens up to its length, so this rule is used
    here. Block verification accepts as many tokens or more. DFlash is an exception: slots of a
    block see each other, so a shorter block drafts other tokens.
    """
    decoding = dataclasses.replace(
        decoding, rule="token", max_new_tokens=min(decoding.max_new_tokens, TUNING_TOKENS)
    )
    steps: list[tuple[int, int, bool]] = []  # tokens drafted and accepted, and whether free
    tuning = list(zip(prompts.prompts, prompts.ids, strict=True))
    count = 0
    for prompt, ids in tqdm(tuning, desc="choose draft length", unit="prompt"):
        if enough(count):
            break
        count += 1
        run = decode(target.decoder, drafter, prompt, ids, decoding, longest)
        whole = slice(run.whole_blocks)
        free = map(bool, run.free[whole])
        steps += zip(run.drafted[whole], run.accepted[whole], free, strict=True)

    def tokens_per_second(length: int) -> float:
        tokens = ms = 0.0
        for drafted, accepted, free in steps:
            verified = min(drafted, length)
            tokens += 1 + min(accepted, length)
            ms += float(costs.draft(0 if free else verified) + costs.verify(verified + 1))
        return 1000 * tokens / ms if steps else 0.0

    return max(range(1, longest + 1), key=tokens_per_second), count


def decode_undisturbed(
    target: Decoder, contender: Contender, prompt: Prompt, ids: list[int]
) -> PromptRun:
    """`decode`, repeated until no CUDA graph is recorded meanwhile, because recording takes time.

    The same prompt needs the same graphs, so a second run finds them recorded.
    """
    drafter, draft_length, decoding = contender
    while True:
        before = GraphedDecoder.recordings
        run = decode(target, drafter, prompt, ids, decoding, draft_length)
        if GraphedDecoder.recordings == before:
            return run


def decode_in_turns(
    target: Target,
    contenders: Mapping[str, Contender],
    prompts: PromptSet,
    journal: Journal,
    enough: Enough = all_of_them,
) -> list[list[PromptRun]]:
    """Every prompt decoded by every contender, prompt by prompt: runs [contenders][prompts].

    contenders: by their label in the journal.
    The order rotates and is reversed for every other prompt, so that no contender always runs on a
    cool machine or after the same other contender.
    """

    def measure(turn: int, row: tuple[Prompt, list[int]], without: list[int]) -> list[PromptRun]:
        first, runs = turn // 2 % len(without), {}
        order = [*without[first:], *without[:first]]
        for number in reversed(order) if turn % 2 else order:
            runs[number] = decode_undisturbed(target.decoder, sides[number], *row)
        return [runs[number] for number in without]

    rows, sides = list(zip(prompts.prompts, prompts.ids, strict=True)), [*contenders.values()]
    for contender in sides:  # warm-up, not counted
        new_tokens = min(contender.decoding.max_new_tokens, WARM_UP_TOKENS)
        short = dataclasses.replace(contender.decoding, max_new_tokens=new_tokens)
        decode_undisturbed(target.decoder, contender._replace(decoding=short), *rows[0])
    stages = [f"timed prompts of {label}" for label in contenders]
    return journal.together(stages, rows, measure, lambda run: PromptRun(**run), "prompt", enough)


def over_stock_generate(
    target: Target, prompts: PromptSet, decoding: Decoding, enough: Enough = all_of_them
) -> list[tuple[float, ...]]:
    """Times the baseline and transformers' `generate` on the same model, prompt by prompt.

    Returns a row per prompt: tokens and seconds of the baseline, tokens and seconds of `generate`.
    Both are greedy, because the choice of a token hardly changes the time of a step.
    """
    new_tokens = min(decoding.max_new_tokens, STOCK_TOKENS)
    greedy = Decoding(Sampling(), decoding.stops, new_tokens, decoding.seed)
    alone = Contender(None, 0, greedy)
    config = GenerationConfig(
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=sorted(decoding.stops) or None,
        pad_token_id=min(decoding.stops, default=0),
    )
    stock: Any = target.model  # transformers wraps `generate` in a type that mypy cannot call
    stock.generation_config = GenerationConfig()  # else its penalties and searches would be added
    rows: list[tuple[float, ...]] = []
    timed = list(zip(prompts.prompts, prompts.ids, strict=True))[:STOCK_PROMPTS]
    bar = tqdm([timed[0], *timed], desc="stock generate", unit="prompt")
    for turn, (prompt, ids) in enumerate(bar):
        if turn > 1 and enough(turn):
            break
        tokens = torch.tensor([ids], device=target.decoder.device)
        clock = time.perf_counter()
        output = stock.generate(
            tokens, attention_mask=torch.ones_like(tokens), generation_config=config
        )
        stock_seconds = time.perf_counter() - clock
        ours = decode_undisturbed(target.decoder, alone, prompt, ids)
        if turn > 0:  # the first is warm-up
            emitted = output.shape[1] - tokens.shape[1]
            rows.append((len(ours.tokens), ours.seconds, emitted, stock_seconds))
    return rows
