"""Times prompts with and without each draft, and single steps; chooses the draft length."""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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

WARM_UP_ROUNDS = 3
STOCK_PROMPTS = 10  # the fewest prompts that give an interval
STOCK_TOKENS = 24
WARM_UP_TOKENS = 8
TUNING_TOKENS = 64  # the most tokens of an output on which a draft length is chosen


Round = dict[str, float]  # seconds by step


class Contender(NamedTuple):
    """The target alone, or with a drafter at one draft length."""

    drafter: Drafter | None
    draft_length: int
    decoding: Decoding


@dataclass
class StepTimer:
    """Times single steps of one target and its drafters, at one context length.

    A step is forward, head, and the choice of a token, as in decoding. Each round times all steps
    once. Steps of target and drafts alternate as far as possible, as in decoding.
    """

    target: Decoder
    drafters: Sequence[Drafter]
    context_length: int
    longest_draft: int
    decoding: Decoding

    @functools.cached_property
    def _steps(self) -> dict[str, Callable[[], None]]:
        """The steps by their name in a round, after rounds of warm-up."""
        target, proposed = self.target, self.decoding.draft_sampling
        at, longest = self.context_length, self.longest_draft
        steps: dict[str, Callable[[], None]] = {}
        cache = target.new_cache(1, at + longest + 1)
        for number in range(max(longest + 1, len(self.drafters))):
            if number <= longest:
                sampling = self.decoding.sampling
                steps[f"verify {number + 1}"] = timed_step(target, cache, number + 1, at, sampling)
            if number < len(self.drafters):
                drafter = self.drafters[number]
                steps[f"draft {number}"] = drafter.step(at, proposed)
                whole = drafter.draft_at_once(at, proposed, longest)
                if whole is not None:
                    steps[f"whole draft {number}"] = whole
        for _ in range(WARM_UP_ROUNDS):
            self._run(steps)
        return steps

    def _run(self, steps: Mapping[str, Callable[[], None]]) -> Round:
        on_gpu = self.target.device.type == "cuda"
        synchronise = torch.cuda.synchronize if on_gpu else lambda: None
        seconds = {}
        for name, run in steps.items():
            synchronise()
            clock = time.perf_counter()
            run()
            synchronise()
            seconds[name] = time.perf_counter() - clock
        return seconds

    def round(self) -> Round:
        """The seconds of each step."""
        return self._run(self._steps)

    def costs(self, rounds: Sequence[Round]) -> list[StepCosts]:
        """The step costs of each drafter: medians over the rounds."""
        ms = {
            name: 1000 * statistics.median(seconds[name] for seconds in rounds)
            for name in rounds[0]
        }
        verify = {width: ms[f"verify {width}"] for width in range(1, self.longest_draft + 2)}
        costs = []
        for number in range(len(self.drafters)):
            token, once = ms[f"draft {number}"], 0.0
            # a parallel draft's time grows by a column per token
            if (longest := ms.get(f"whole draft {number}")) is not None:
                # noise can make the shorter draft slower, but no part of its time may be below 0
                column = (longest - token) / max(1, self.longest_draft - 1)
                column = max(0.0, min(column, longest / self.longest_draft))
                token, once = column, max(0.0, token - column)
            costs.append(StepCosts(token, verify[1], verify, self.context_length, once))
        return costs


def step_costs(
    target: Decoder,
    drafters: Sequence[Drafter],
    context_length: int,
    longest_draft: int,
    decoding: Decoding,
    rounds: int,
) -> list[StepCosts]:
    """The step costs of each drafter, as in `StepTimer`."""
    timer = StepTimer(target, drafters, context_length, longest_draft, decoding)
    return timer.costs([timer.round() for _ in range(rounds)])


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
    steps: tuple[str, StepTimer],
    enough: Enough = all_of_them,
) -> tuple[list[list[PromptRun]], list[Round]]:
    """Every prompt decoded by every contender, prompt by prompt: runs [contenders][prompts].

    contenders: by their label in the journal. steps: the label, and what times a round of steps
    before each prompt; the rounds are returned, too. So other work on the machine slows steps and
    prompts alike.
    The order rotates and is reversed for every other prompt, so that no contender always runs on a
    cool machine or after the same other contender.
    """

    def measure(turn: int, row: tuple[Prompt, list[int]], without: list[int]) -> list[Any]:
        results: dict[int, Any] = {}
        if len(sides) in without:
            results[len(sides)] = timer.round()
        order = [number for number in without if number < len(sides)]
        first = turn // 2 % max(1, len(order))
        order = [*order[first:], *order[:first]]
        for number in reversed(order) if turn % 2 else order:
            results[number] = decode_undisturbed(target.decoder, sides[number], *row)
        return [results[number] for number in without]

    rows, sides = list(zip(prompts.prompts, prompts.ids, strict=True)), [*contenders.values()]
    label, timer = steps
    for contender in sides:  # warm-up, not counted
        new_tokens = min(contender.decoding.max_new_tokens, WARM_UP_TOKENS)
        short = dataclasses.replace(contender.decoding, max_new_tokens=new_tokens)
        decode_undisturbed(target.decoder, contender._replace(decoding=short), *rows[0])
    stages = [*(f"timed prompts of {name}" for name in contenders), f"timed steps of {label}"]
    *runs, rounds = journal.together(stages, rows, measure, lambda row: row, "prompt", enough)
    return [[PromptRun(**run) for run in each] for each in runs], rounds


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
