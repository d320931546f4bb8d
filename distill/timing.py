"""What the steps of a run take here: each timed at its real shape, before the run is made."""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from distill.models import Pair
from distill.prompts import Prompts
from distill.recipe import Recipe
from distill.teacher.states import layers_read
from distill.teacher.store import CachedAnswer
from distill.trainer import build_trainer, training_config
from eval.decoding.drafters.base import timed_step
from eval.decoding.forward import Reader
from eval.decoding.target import Target
from eval.measuring.agreement import BATCH
from eval.measuring.replay import ROWS, TEXT_TOKENS
from eval.measuring.timing import CHOICE_REPEATS, COST_REPEATS, STOCK_PROMPTS, STOCK_TOKENS

TIMED_STEPS = 9  # of training, rows grouped by length; the first one is warm-up
SPEEDUPS = (1.0, 1.3, 1.7)  # taken for granted of the untuned, the tuned draft, and behind lookup
PLACE = 4  # steps of the target that drafting and verifying at a place of ROWS texts takes


def batched_step(decoder: Reader, rows: int, at: int) -> float:
    """Seconds of one step of the target for so many rows, each `at` tokens in."""
    cache = decoder.new_cache(rows, at + 1)
    token = torch.zeros((rows, 1), dtype=torch.long, device=decoder.device)
    start = torch.full((rows,), at, device=decoder.device)
    decoder.forward(token, start, cache)  # warm-up
    clock = time.perf_counter()
    decoder.forward(token, start, cache)[0, 0, 0].item()
    return time.perf_counter() - clock


def evaluation_seconds(
    recipe: Recipe, prompts: Prompts, target: Target, tokens: float
) -> Callable[[int], float]:
    """Seconds of the evaluation by the number of timed prompts.

    tokens: how long an answer is in the mean. All but the texts for alpha is counted in steps of
    the target on one token: what a draft adds to a step is in SPEEDUPS.
    """
    ids = prompts.evaluation.ids
    context = sum(map(len, ids)) // len(ids)
    sampling = recipe.sampling
    step = _median(timed_step(target.decoder, 1, context, sampling))
    whole = _median(timed_step(target.decoder, context + round(tokens), 0, sampling))
    texts = len(ids) / BATCH * tokens * batched_step(target.decoder, BATCH, context)
    drafts = SPEEDUPS[: 2 + recipe.lookup_first]
    widths = len(drafts) * (recipe.max_gamma + 2)
    steps = 0.0
    if recipe.gamma is None:
        steps = PLACE * len(drafts) * min(tokens, TEXT_TOKENS) * -(-recipe.tuning_prompts // ROWS)
        steps += widths * CHOICE_REPEATS
    steps += STOCK_PROMPTS * STOCK_TOKENS * 2.5  # ours, and stock generate, which takes longer
    steps += widths * COST_REPEATS
    fixed = texts + len(ids) * whole * 1.2 + steps * step
    each = tokens * step * (1 + sum(1 / s for s in drafts))
    return lambda timed: fixed + timed * each


def _median(run: Callable[[], None]) -> float:
    """Median seconds of a few runs, the first left out."""
    seconds = []
    for _ in range(8):
        clock = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - clock)
    return statistics.median(seconds[1:])


def training_steps(recipe: Recipe, rows: int) -> int:
    """How many optimiser steps the run takes over so many rows."""
    args = training_config(recipe)
    batch = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
    if args.max_steps >= 0:
        return int(args.max_steps)
    return math.ceil(rows / batch * args.num_train_epochs)


class _StepClock(TrainerCallback):
    """Seconds of each optimiser step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def training_step(
    recipe: Recipe, pair: Pair, ids: list[list[int]], model: PreTrainedModel, rows: Tensor | None
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
    shape = len(layers_read(recipe, pair)), pair.target.config["hidden_size"]
    states = {
        one.index: torch.ones((len(one.prompt_ids) + len(one.response_ids) - 1, *shape))
        for one in made_up
    }
    few = recipe.training | {"max_steps": TIMED_STEPS, "save_strategy": "no", "report_to": "none"}
    with tempfile.TemporaryDirectory() as folder:
        here = dataclasses.replace(recipe, output_dir=folder, training=few)
        trainer = build_trainer(
            model,
            made_up,
            rows,
            pair.load_tokenizer(),
            here,
            pair.retokenizer,
            pair.new_rows,
            states if shape[0] else None,
        )
        clock = _StepClock()
        trainer.add_callback(clock)
        trainer.train()
    return statistics.mean(clock.seconds[1:])  # long rows and short ones
