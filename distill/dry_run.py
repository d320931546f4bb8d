"""What a run would take, where it fits, and whether it can pay.

Memory comes from the models' configs alone (distill/memory.py). Minutes and the pay-off come from a
step of each kind, timed at its real shape, where the weights are at hand.
"""

from __future__ import annotations

import resource
import sys

import torch

from align.sources import load_config, weights_at_hand
from distill.budget import UNPLANNED, most_answers, split
from distill.choice import Comparison
from distill.drafters.base import kind_of
from distill.memory import PROMPT_TOKENS, columns, needs, summary, table
from distill.models import Pair, TargetOfRun, check_models, load_target
from distill.prompts import Prompts, collect_prompts
from distill.recipe import Recipe
from distill.server import ServedTarget
from distill.timing import (
    batched_step,
    evaluation_seconds,
    training_step,
    training_steps,
)
from distill.trainer import training_config
from eval.decoding.target import Target
from eval.measuring.cost import ceiling_speedup, elsewhere, price
from eval.measuring.timing import step_costs


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
    if recipe.drafter == "auto":
        comparison = Comparison(recipe, pair, prompts, TargetOfRun(recipe, pair, prompts))
        comparison.price()
        return _exit_status(max(map(comparison.ceiling, comparison.tried)))
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
    kind = kind_of(recipe)
    model, token_ids = kind.stand_in(recipe, pair, target)
    drafter = kind.drafter(recipe, pair, model, token_ids, target)
    evaluation, training = prompts.evaluation.ids, prompts.training.ids
    context = sum(map(len, evaluation)) // len(evaluation)
    sampling = recipe.sampling
    costs = step_costs(target.decoder, drafter, context, recipe.max_gamma, sampling)

    count = most_answers(recipe, prompts)
    if recipe.max_answers is not None:
        count = min(count, recipe.max_answers)
    at = sum(map(len, training)) // len(training) + recipe.answer_max_new_tokens // 2
    answering = recipe.answer_max_new_tokens * batched_step(
        target.decoder, recipe.answer_batch_size, at
    )
    per_answer = answering / recipe.answer_batch_size
    per_step = training_step(recipe, pair, training, model, pair.trained_rows(token_ids))
    measuring = evaluation_seconds(recipe, prompts, target, recipe.max_new_tokens)(
        min(recipe.speed_prompts, len(evaluation))
    )
    if recipe.minutes is not None and recipe.max_answers is None:
        left = 60 * recipe.minutes * (1 - UNPLANNED) - measuring
        count, steps = split(recipe, left, 0, count, per_answer, per_step)
    else:
        steps = training_steps(recipe, count)
    tokens = count * recipe.answer_max_new_tokens
    minutes = {
        f"answers ({tokens} tokens at most)": count * per_answer,
        f"training ({steps} steps)": steps * per_step,
        "evaluation": measuring,
    }
    for what, seconds in minutes.items():
        print(f"{what}: {seconds / 60:.1f} min")
    print(
        f"in all about {sum(minutes.values()) / 60:.0f} min, where answers are as long as allowed"
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"memory: {peak / 2**30:.1f} GiB at the peak of these steps")
    print(price(costs))
    head_rows = len(target.decoder.embedding) if token_ids is None else len(token_ids)
    for line in elsewhere(costs, 0 if sampling.greedy else head_rows):
        print(line)
    return _exit_status(ceiling_speedup(costs))


def _exit_status(ceiling: float) -> int:
    """1, and the reason, where even a perfect draft does not reach 1x."""
    if ceiling <= 1:
        print("error: no draft length can pay with this draft; use a smaller one.", file=sys.stderr)
        return 1
    return 0
