"""What a run does, decided before it is done.

The steps of a run are timed here, once, at their real shapes, and by these costs its `minutes` are
divided: a third at most for the evaluation, the remainder for answers and training. `--dry_run`
prints the plan, a run follows it; `drafter: auto` chooses the kind first (distill/compare.py).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from transformers import TrainerCallback

from align.files import atomic_file
from align.machine import free_memory, from_first
from align.sources import load_config
from distill.held_out import SHARE, least_steps
from distill.memory import PROMPT_TOKENS, Needs, needs
from distill.models import Pair, TargetOfRun, layers_read
from distill.prepare import PreparedDraft, stand_in, stand_in_drafter
from distill.prompt_sets import Prompts
from distill.recipe import Recipe, RecipeError, build_recipe
from distill.teacher.answers import PROBE, this_machine, to_answer
from distill.teacher.store import CachedAnswer, Store
from distill.trainer import build_trainer, training_config
from eval.decoding.drafters.drafter import Drafter, timed_step
from eval.decoding.forward import Decoder
from eval.decoding.target import Target
from eval.measuring.agreement import BATCH
from eval.measuring.evaluation import FEWEST
from eval.measuring.replay import ROWS, TEXT_TOKENS
from eval.measuring.runs import StepCosts
from eval.measuring.timing import (
    CHOICE_REPEATS,
    COST_REPEATS,
    STOCK_PROMPTS,
    STOCK_TOKENS,
    step_costs,
)
from eval.reporting.report import DrafterChoice

PLAN = "plan.json"
UNPLANNED = 0.05  # of the minutes: loading, fit, export, saving
EVALUATION = 1 / 3  # of the minutes, at most
MARGIN = 0.5  # minutes more than were lacking, since the next run's timings differ
LIMIT = 10.0  # seconds in which one kind of step is timed, the first two aside
TIMED_STEPS = 9  # of training at most, rows grouped by length; the first one is warm-up
SPEEDUPS = (1.0, 1.4, 1.3, 1.7)  # assumed: untuned, lookup, tuned, lookup and tuned
ALPHA = 1.5  # passes of the target over a text that alpha of all drafts takes
PLACE = 4  # steps of the target that drafting and verifying at a place of ROWS texts takes


class Clock:
    """The time that a run has taken; all its stages read this one clock."""

    def __init__(self) -> None:
        self.start = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def left(self, minutes: float) -> float:
        """Seconds until these minutes are over, less the share that is never planned."""
        return 60 * minutes * (1 - UNPLANNED) - self.seconds()

    def stage(self, name: str) -> None:
        """Print that a stage begins, and when."""
        minutes, seconds = divmod(round(self.seconds()), 60)
        print(f"\n[{minutes:3d}:{seconds:02d}] {name}", flush=True)


@dataclass(frozen=True)
class Costs:
    """Seconds of what a run does over and over.

    answer: of the target. step: of training. timed: an evaluation prompt that is timed, without a
    draft and with each. evaluation: everything else in it.
    """

    answer: float
    step: float
    timed: float
    evaluation: float


@dataclass(frozen=True)
class Plan:
    """What a run does.

    answers: that are trained on, of which `at_hand` cost nothing. steps: of training. timed:
    evaluation prompts. memory: bytes at each stage's peak. costs: None where nothing had to be
    timed. choice: how `auto` has chosen. timing: seconds for the timed prompts; None: as it takes.
    held_out: seconds for measuring held-out prompts while it trains.
    """

    answers: int
    at_hand: int
    steps: int
    timed: int
    memory: dict[str, int]
    costs: Costs | None = None
    choice: DrafterChoice | None = None
    timing: float | None = None
    held_out: float = 0.0

    @property
    def minutes(self) -> dict[str, float]:
        """Of each stage; none where nothing was timed."""
        if self.costs is None:
            return {}
        seconds = {
            "answers": max(0, self.answers - self.at_hand) * self.costs.answer,
            "training": self.steps * self.costs.step + self.held_out,
            "evaluation": self.costs.evaluation + self.timed * self.costs.timed,
        }
        return {stage: took / 60 for stage, took in seconds.items()}

    def lines(self) -> list[str]:
        """As text."""
        counts = {
            "answers": f"{self.answers} answers ({self.at_hand} at hand)",
            "training": f"{self.steps} steps",
            "evaluation": f"{self.timed} prompts timed",
        }
        took = {stage: f", {minutes:.1f} min" for stage, minutes in self.minutes.items()}
        lines = [f"{stage}: {count}{took.get(stage, '')}" for stage, count in counts.items()]
        if took:
            lines.append(f"in all about {sum(self.minutes.values()):.0f} min from here")
        largest = max(self.memory, key=lambda stage: self.memory[stage])
        peak = self.memory[largest] / 2**30
        return [*lines, f"memory: {peak:.2f} GiB of weights and tensors at most, while {largest}"]

    def decided(self) -> dict[str, Any]:
        """Keys of the recipe that repeats the run."""
        keys: dict[str, Any] = {}
        if self.costs is not None:
            keys |= {"max_answers": self.answers, "max_steps": self.steps}
            keys |= {"speed_prompts": self.timed}
        return keys if self.choice is None else keys | chosen_keys(self.choice)


def with_choice(recipe: Recipe, choice: DrafterChoice | None) -> Recipe:
    """The recipe, of the kind that was chosen where `auto` had to."""
    return recipe if choice is None else build_recipe(recipe.values() | chosen_keys(choice))


def chosen_keys(choice: DrafterChoice) -> dict[str, Any]:
    """Keys of a recipe of the kind that was chosen."""
    (chosen,) = (kind for kind in choice.candidates if kind.chosen)
    keys: dict[str, Any] = {"drafter": chosen.drafter}
    return keys if chosen.layers is None else keys | {"num_draft_layers": chosen.layers}


def read_plan(folder: Path) -> Plan | None:
    """What an earlier process of the run has decided."""
    path = folder / PLAN
    return TypeAdapter(Plan).validate_json(path.read_bytes()) if path.exists() else None


def write_plan(folder: Path, plan: Plan) -> None:
    with atomic_file(folder / PLAN, "wb") as file:
        file.write(TypeAdapter(Plan).dump_json(plan, indent=2))


def plan_as_given(
    recipe: Recipe, prompts: Prompts, at_hand: int = 0, costs: Costs | None = None
) -> Plan:
    """The plan of a recipe that says itself how much is done."""
    count = len(to_answer(recipe, prompts.training.ids))
    timed = min(recipe.speed_prompts, len(prompts.evaluation.ids))
    memory = peaks(recipe, prompts)
    return Plan(count, at_hand, training_steps(recipe, count), timed, memory, costs)


def plan_within(
    recipe: Recipe, prompts: Prompts, at_hand: int, costs: Costs, seconds: float
) -> Plan:
    """The plan that takes so many seconds. at_hand: answers that cost nothing.

    Every row is trained on `num_train_epochs` times, never more often: where the prompts do not
    fill the time, some is left. FEWEST prompts are timed even where that exceeds the evaluation's
    share. Raises RecipeError where PROBE answers, the training on them and such an
    evaluation do not fit.
    """
    assert recipe.minutes is not None
    total = len(to_answer(recipe, prompts.training.ids))
    fewest = min(PROBE, total)
    steps_each = training_steps(recipe, total) / total
    train = steps_each * costs.step  # on an answer
    rows = len(prompts.held_out.ids)
    least = least_steps(rows, batch_size(recipe)) * costs.step  # for measuring these
    share = SHARE if rows else 0.0  # of training, where that is more
    needed = max(0, fewest - at_hand) * costs.answer
    needed += max(fewest * train + least, fewest * train * (1 + share))

    most = min(recipe.speed_prompts, len(prompts.evaluation.ids))
    room = min(60 * recipe.minutes * EVALUATION, seconds - needed) - costs.evaluation
    timed = min(most, max(FEWEST, math.floor(room / costs.timed)))
    budget = seconds - costs.evaluation - timed * costs.timed
    if needed > budget:
        minutes = recipe.minutes + (needed - budget) / 60 / (1 - UNPLANNED) + MARGIN
        raise RecipeError(
            f"minutes is {recipe.minutes:g}, too few here: {fewest} answers of {costs.answer:.2f} "
            f"s, the training on them in steps of {costs.step:.2f} s, and the evaluation do not "
            f"fit. Give {math.ceil(minutes)} or more, or fewer max_eval_prompts."
        )

    def answers_in(seconds: float, train: float) -> float:
        """How many answers: of those at hand, or all of these and new ones."""
        return min(seconds / train, (seconds + at_hand * costs.answer) / (costs.answer + train))

    count = min(answers_in(budget - least, train), answers_in(budget, train * (1 + share)), total)
    steps = max(1, math.ceil(round(steps_each * math.floor(count), 6)))
    followed = max(least, share * steps * costs.step)
    memory, timing = peaks(recipe, prompts), max(room, timed * costs.timed)
    return Plan(math.floor(count), at_hand, steps, timed, memory, costs, None, timing, followed)


def answers_at_hand(recipe: Recipe, prompts: Prompts, store: Store) -> int:
    """How many of the answers are at hand."""
    asked = to_answer(recipe, prompts.training.ids)
    return store.at_hand(asked, recipe.train_on_prompts)


def batch_size(recipe: Recipe) -> int:
    """Rows of an optimiser step, of all processes together."""
    args = training_config(recipe)
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)


def training_steps(recipe: Recipe, rows: int) -> int:
    """How many optimiser steps the run takes over so many rows."""
    args = training_config(recipe)
    if args.max_steps >= 0:
        return int(args.max_steps)
    return math.ceil(math.ceil(rows / batch_size(recipe)) * args.num_train_epochs)


def run_memory(recipe: Recipe, prompts: Prompts | None) -> Needs:
    """What the run takes of memory; prompts None: of PROMPT_TOKENS tokens at most."""
    longest = PROMPT_TOKENS
    if prompts is not None:
        longest = max(map(len, prompts.training.ids + prompts.evaluation.ids))
    draft = None if recipe.sibling is None else load_config(recipe.sibling)
    return needs(recipe, load_config(recipe.target), draft, longest)


def peaks(recipe: Recipe, prompts: Prompts) -> dict[str, int]:
    """Bytes at each stage's peak."""
    return {stage.name: stage.peak for stage in run_memory(recipe, prompts).stages}


# --- What is timed


def measured_costs(
    recipe: Recipe,
    pair: Pair,
    prompts: Prompts,
    target: TargetOfRun,
    store: Store,
    tokens: float,
) -> tuple[StepCosts, Costs]:
    """The steps of target and draft, and what the parts of the run cost. A call of all processes.

    tokens: of an answer in the mean. The target is not in memory while a training step is timed,
    nor afterwards.
    """
    loaded = target.loaded
    prepared = stand_in(recipe, pair, loaded)
    drafter = stand_in_drafter(recipe, pair, prepared, loaded)
    steps = draft_costs(recipe, prompts, loaded, drafter)
    timed, evaluation = evaluation_seconds(recipe, prompts, loaded.decoder, steps, tokens)
    prompt, rows = mean_length(prompts.training.ids), recipe.answer_batch_size
    answer = store.seconds_each(this_machine(recipe))
    if answer is None:  # none was made here
        answer = tokens * batched_step(loaded.decoder, rows, prompt + round(tokens / 2)) / rows
    del drafter, loaded
    target.release()
    step = training_step(recipe, pair, prepared, prompts.training.ids)
    del prepared
    free_memory()
    step *= (prompt + tokens) / (prompt + recipe.answer_max_new_tokens)
    return steps, from_first(Costs(answer, step, timed, evaluation))


def draft_costs(recipe: Recipe, prompts: Prompts, target: Target, drafter: Drafter) -> StepCosts:
    """Single steps of target and draft, in the middle of an evaluation's texts."""
    context = mean_length(prompts.evaluation.ids) + recipe.max_new_tokens // 2
    step = median_seconds(timed_step(target.decoder, 1, context, recipe.sampling))
    repeats = min(CHOICE_REPEATS, math.ceil(LIMIT / step / (recipe.max_gamma + 2)))
    (costs,) = step_costs(
        target.decoder, [drafter], context, recipe.max_gamma, recipe.sampling, repeats
    )
    return from_first(costs)


def evaluation_seconds(
    recipe: Recipe, prompts: Prompts, decoder: Decoder, steps: StepCosts, tokens: float
) -> tuple[float, float]:
    """Seconds of a timed prompt, and of everything else in an evaluation.

    tokens: of an answer in the mean. All but the texts for alpha, and prompts, is counted in steps
    of the target on one token: what a draft adds to a step is in SPEEDUPS.
    """
    ids = prompts.evaluation.ids
    context = mean_length(ids)
    whole = median_seconds(timed_step(decoder, context + round(tokens), 0, recipe.sampling))
    read = whole * context / (context + tokens)  # of a prompt
    # the last rows decode almost alone
    untimed = max(0, len(ids) - FEWEST)  # prompts whose texts are written for alpha
    batched = untimed / BATCH * tokens + max(0.0, recipe.max_new_tokens - tokens)
    texts = untimed * read + batched * batched_step(decoder, BATCH, context)
    widths = recipe.max_gamma + 2
    counted = STOCK_PROMPTS * STOCK_TOKENS * 2.5  # ours, and stock generate, which takes longer
    counted += widths * COST_REPEATS
    if recipe.gamma is None:
        replayed = min(tokens, TEXT_TOKENS) * -(-recipe.tuning_prompts // ROWS)
        counted += PLACE * len(SPEEDUPS) * replayed + widths * CHOICE_REPEATS
    timed = tokens * steps.target_step * (1 + sum(1 / speedup for speedup in SPEEDUPS))
    timed += (1 + len(SPEEDUPS)) * read
    if not recipe.sampling.greedy:  # their texts are compared greedily, once more
        timed *= 2
    return timed, texts + len(ids) * whole * ALPHA + counted * steps.target_step


class StepClock(TrainerCallback):
    """Seconds of each optimiser step; training stops once `limit` has passed."""

    def __init__(self, limit: float) -> None:
        self.limit, self.seconds = limit, list[float]()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.began = time.monotonic()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.seconds.append(time.monotonic() - self.began)
        # two at least, since the first is warm-up; all processes stop together
        if len(self.seconds) > 1 and from_first(sum(self.seconds) > self.limit):
            control.should_training_stop = True


def training_step(
    recipe: Recipe, pair: Pair, prepared: PreparedDraft, ids: list[list[int]]
) -> float:
    """Seconds of an optimiser step, on made-up answers to the prompts `ids`, as long as allowed."""
    args = training_config(recipe)
    batch = args.train_batch_size * args.gradient_accumulation_steps
    made_up = []
    for i in range(batch * TIMED_STEPS):
        prompt = ids[i % len(ids)]
        if recipe.train_on_prompts:
            prompt = prompt[:1]  # taught from its second token on
        taught = recipe.answer_max_new_tokens + len(ids[i % len(ids)]) - len(prompt)
        top_ids = torch.zeros((taught, recipe.cache_top_k), dtype=torch.long)
        logprobs = torch.full(top_ids.shape, -4.0)
        made_up.append(CachedAnswer(i, torch.tensor(prompt), top_ids[:, 0], top_ids, logprobs))
    shape = len(layers_read(recipe, pair.target.config)), pair.target.config["hidden_size"]
    number = torch.ones(())  # the same for all states: they take no room
    states = {row.index: number.expand(len(row.text) - 1, *shape) for row in made_up}
    few = recipe.training | {"max_steps": TIMED_STEPS, "save_strategy": "no", "report_to": "none"}
    with tempfile.TemporaryDirectory() as folder:
        timed = dataclasses.replace(recipe, output_dir=folder, training=few)
        trainer = build_trainer(timed, pair, prepared, made_up, states if shape[0] else None)
        clock = StepClock(LIMIT)
        trainer.add_callback(clock)
        trainer.train()
    return statistics.mean(clock.seconds[1:])  # long rows and short ones


def batched_step(decoder: Decoder, rows: int, at: int) -> float:
    """Seconds of one step of the target for so many rows, each `at` tokens in."""
    cache = decoder.new_cache(rows, at + 1)
    token = torch.zeros((rows, 1), dtype=torch.long, device=decoder.device)
    start = torch.full((rows,), at, device=decoder.device)
    decoder.forward(token, start, cache)  # warm-up
    clock = time.monotonic()
    decoder.forward(token, start, cache)[0, 0, 0].item()
    return time.monotonic() - clock


def median_seconds(run: Callable[[], None]) -> float:
    """The median of a few runs after a warm-up; none is begun once LIMIT has passed."""
    run()
    seconds: list[float] = []
    while not seconds or (len(seconds) < 7 and sum(seconds) < LIMIT):
        clock = time.monotonic()
        run()
        seconds.append(time.monotonic() - clock)
    return statistics.median(seconds)


def mean_length(ids: list[list[int]]) -> int:
    return sum(map(len, ids)) // len(ids)
