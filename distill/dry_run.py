"""What a run would take, where it fits, and whether it can pay.

Memory comes from the models' configs alone (distill/memory.py). Minutes and the pay-off come from a
step of each kind, timed at its real shape, where the weights are at hand.
"""

from __future__ import annotations

import dataclasses
import math
import resource
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from align.sources import load_config, weights_at_hand
from distill.answer_cache import CachedAnswer
from distill.memory import PROMPT_TOKENS, columns, needs, summary, table
from distill.models import Pair, check_models, load_sibling, load_target
from distill.prepare import build_pruned
from distill.prompts import Prompts, collect_prompts
from distill.recipe import Recipe
from distill.server import ServedTarget
from distill.trainer import build_trainer, training_config
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.pruned import pruned_drafter
from eval.decoding.forward import Decoder
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring.agreement import BATCH
from eval.measuring.cost import ceiling_speedup, elsewhere, price
from eval.measuring.timing import step_costs

TIMED_STEPS = 4  # of training; the first one is warm-up
CONTENDERS = 3  # the target alone, the untuned and the tuned draft, at worst no faster


def price_run(recipe: Recipe) -> int:
    """Print memory, minutes and the pay-off ceiling; exit status 1 when no draft length can pay.

    Raises what the checks of a run raise.
    """
    print_needs(recipe)
    if recipe.answers == "server":
        pair = check_models(recipe)
        served = ServedTarget(recipe, pair.target, collect_prompts(recipe, pair.target))
        served.check()
        return served.describe()
    if reason := why_not_timed(recipe):
        print(f"minutes and pay-off: not measured, {reason}")
        return 0
    training_config(recipe)
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    return _time_run(recipe, pair, prompts, load_target(recipe, prompts))


def print_needs(recipe: Recipe) -> None:
    """Print what each stage needs of memory and where it fits; fetches no more than configs."""
    draft = None if recipe.draft is None else load_config(recipe.draft)
    found = needs(recipe, load_config(recipe.target), draft, target_here=recipe.answers == "local")
    print(f"memory at most, for prompts of up to {PROMPT_TOKENS} tokens, from the configs alone:")
    print(columns(*table(found)))
    print(summary(found))


def why_not_timed(recipe: Recipe) -> str | None:
    """Why no step of this run can be timed here; None where it can."""
    for spec in filter(None, (recipe.target, recipe.draft)):
        if not weights_at_hand(spec):
            return f"the weights of {spec} are not on this machine (`hf download {spec}`)"
    on_gpu = not recipe.training.get("use_cpu", False)
    if on_gpu and recipe.training.get("bf16", True) and not torch.cuda.is_available():
        return "the recipe trains on a GPU and there is none here (or add --use_cpu true)"
    return None


def _time_run(recipe: Recipe, pair: Pair, prompts: Prompts, target: Target) -> int:
    embedding = target.decoder.embedding
    if recipe.draft is not None:
        model, token_ids = load_sibling(recipe.draft, pair), None
        drafter = load_drafter(recipe.draft, target, pair.strategy)
    else:
        # which rows its head keeps depends on the answers: here the first
        head: Tensor = target.model.get_output_embeddings().weight.detach()
        head = head[: recipe.draft_vocab_size].clone()
        model = build_pruned(target.model, recipe.num_draft_layers, head)
        token_ids = None if recipe.draft_vocab_size is None else torch.arange(len(head))
        drafter = pruned_drafter(model, token_ids, target)
    evaluation, training = prompts.evaluation.ids, prompts.training.ids
    context = sum(map(len, evaluation)) // len(evaluation)
    sampling = Sampling(recipe.temperature, recipe.top_k, recipe.top_p)
    costs = step_costs(target.decoder, drafter, context, recipe.max_gamma, sampling)

    def target_step(rows: int) -> float:
        at = sum(map(len, training)) // len(training) + recipe.answer_max_new_tokens // 2
        return batched_step(target.decoder, rows, at)

    tokens = len(training) * recipe.answers_per_prompt * recipe.answer_max_new_tokens
    texts = len(evaluation) * recipe.max_new_tokens
    timed = min(recipe.speed_prompts, len(evaluation)) * recipe.max_new_tokens
    answering = tokens / recipe.answer_batch_size * target_step(recipe.answer_batch_size)
    steps, training_step = _training_step(
        recipe, pair, training, model, pair.trained_rows(token_ids)
    )
    minutes = {
        f"answers ({tokens} tokens at most)": answering,
        f"training ({steps} steps)": steps * training_step,
        "evaluation": texts / BATCH * target_step(BATCH)
        + (CONTENDERS + recipe.lookup_first) * timed * costs.target_step,
    }
    for what, seconds in minutes.items():
        print(f"{what}: {seconds / 60:.1f} min")
    print(
        f"in all about {sum(minutes.values()) / 60:.0f} min, where answers are as long as allowed"
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"memory: {peak / 2**30:.1f} GiB at the peak of these steps")
    print(price(costs))
    rows = len(embedding) if token_ids is None else len(token_ids)
    for line in elsewhere(costs, 0 if sampling.greedy else rows):
        print(line)
    if ceiling_speedup(costs) <= 1:
        print("error: no draft length can pay with this draft; use a smaller one.", file=sys.stderr)
        return 1
    return 0


def batched_step(decoder: Decoder, rows: int, at: int) -> float:
    """Seconds of one step of the target for so many rows, each `at` tokens in."""
    cache = decoder.new_cache(rows, at + 1)
    token = torch.zeros((rows, 1), dtype=torch.long, device=decoder.device)
    start = torch.full((rows,), at, device=decoder.device)
    decoder.forward(token, start, cache)  # warm-up
    clock = time.perf_counter()
    decoder.forward(token, start, cache)[0, 0, 0].item()
    return time.perf_counter() - clock


class _StepClock(TrainerCallback):
    """Seconds of each optimiser step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def _training_step(
    recipe: Recipe, pair: Pair, ids: list[list[int]], model: PreTrainedModel, rows: Tensor | None
) -> tuple[int, float]:
    """How many optimiser steps the run takes, and seconds of one, on made-up answers."""
    args = training_config(recipe)
    batch = args.train_batch_size * args.gradient_accumulation_steps
    steps = args.max_steps
    if steps < 0:
        answers = len(ids) * recipe.answers_per_prompt
        steps = math.ceil(answers / (batch * args.world_size) * args.num_train_epochs)
    top_ids = torch.zeros((recipe.answer_max_new_tokens, recipe.cache_top_k), dtype=torch.long)
    logprobs = torch.full(top_ids.shape, -4.0)
    made_up = [
        CachedAnswer(i, torch.tensor(ids[i % len(ids)]), top_ids[:, 0], top_ids, logprobs)
        for i in range(batch * TIMED_STEPS)
    ]
    few = recipe.training | {"max_steps": TIMED_STEPS, "save_strategy": "no", "report_to": "none"}
    with tempfile.TemporaryDirectory() as folder:
        here = dataclasses.replace(recipe, output_dir=folder, training=few)
        trainer = build_trainer(
            model, made_up, rows, pair.load_tokenizer(), here, pair.retokenizer, pair.new_rows
        )
        clock = _StepClock()
        trainer.add_callback(clock)
        trainer.train()
    return steps, statistics.median(clock.seconds[1:])
