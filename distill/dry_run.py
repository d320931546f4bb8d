"""What a run would take, whether it fits here, and whether it can pay: its plan, printed.

One prompt is shown as the target reads it, where the weights are at hand.

Memory comes from the models' configs alone, for prompts of PROMPT_TOKENS tokens where they were not
read. Minutes and the pay-off come from a step of each kind, timed where the weights are at
hand; answers are taken to be as long as allowed.
"""

from __future__ import annotations

import sys
import textwrap

import torch
from transformers import PreTrainedTokenizerBase

from align.machine import machine_lines
from align.sources import load_tokenizer, weights_at_hand
from distill.compare import candidates, price
from distill.models import TargetOfRun, check_models
from distill.plan import (
    Clock,
    answers_at_hand,
    measured_costs,
    plan_as_given,
    plan_within,
    run_memory,
)
from distill.prompt_sets import Prompts, collect_prompts
from distill.recipe import Recipe
from distill.teacher.answers import open_store, who_answers
from distill.teacher.served import ServedTarget
from distill.trainer import training_config
from eval.engines.environment import vllm_python
from eval.measuring import cost

EXAMPLE = 1000  # characters shown of the beginning of a prompt, and of its end


def price_run(recipe: Recipe) -> int:
    """Print memory, minutes and the pay-off; exit status 1 when no draft length can pay.

    Raises what the checks of a run raise.
    """
    clock = Clock()
    untimed = why_not_timed(recipe)
    if untimed is not None and recipe.answers != "server":
        print_memory(recipe, None)
        print(f"minutes and pay-off: not measured, {untimed}")
        return 0
    training_config(recipe)
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    print_memory(recipe, prompts)
    print_example(prompts, load_tokenizer(pair.target.spec))
    by, why = who_answers(recipe)
    print(f"answers: {by}, since {why}")
    if by == "server":
        served = ServedTarget(recipe, pair.target, prompts)
        served.check()
        return served.describe()
    if by == "vllm":
        vllm_python()
        print("until it has answered here, its answers are timed as those of our own loop")
    target = TargetOfRun(recipe, pair, prompts)
    if recipe.drafter == "auto":
        costs = price(candidates(recipe, pair)[0], pair, prompts, target)
        return exit_status(max(map(cost.ceiling_speedup, costs.values())))
    store, tokens = open_store(recipe, pair.target), recipe.answer_max_new_tokens
    steps, parts = measured_costs(recipe, pair, prompts, target, store, tokens)
    at_hand = answers_at_hand(recipe, prompts, store)
    if recipe.planned:
        assert recipe.minutes is not None
        plan = plan_within(recipe, prompts, at_hand, parts, clock.left(recipe.minutes))
    else:
        plan = plan_as_given(recipe, prompts, at_hand, parts)
    print("\n".join(plan.lines()))
    print(cost.price(steps))
    return exit_status(cost.ceiling_speedup(steps))


def print_memory(recipe: Recipe, prompts: Prompts | None) -> None:
    """What each stage needs, and what is here; of the Hub no more than configs are fetched."""
    needed = run_memory(recipe, prompts)
    disk = needed.answers_on_disk + needed.states_on_disk + needed.checkpoint
    on_gpu = not recipe.training.get("use_cpu", False)
    machine = machine_lines(needed.device, disk, recipe.folder, on_gpu)
    print("\n".join([*needed.lines(), *machine]))


def print_example(prompts: Prompts, tokenizer: PreTrainedTokenizerBase) -> None:
    """The first training prompt as the target reads it, and where its answer goes.

    A draft that is trained in another form than it is served in guesses badly, and nothing else
    shows it.
    """
    ids = prompts.training.ids[0]
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if (more := len(text) - 2 * EXAMPLE) > 0:
        text = f"{text[:EXAMPLE]} [… {more} characters …] {text[-EXAMPLE:]}"
    print(f"the first training prompt as the target reads it, {len(ids)} tokens:")
    print(textwrap.indent(f"{text}[the answer begins here]", "    ", lambda line: True))


def why_not_timed(recipe: Recipe) -> str | None:
    """Why no step of this run can be timed here; None where it can."""
    for spec in filter(None, (recipe.target, recipe.draft)):
        if not weights_at_hand(spec):
            return f"the weights of {spec} are not on this machine (`hf download {spec}`)"
    on_gpu = not recipe.training.get("use_cpu", False)
    if on_gpu and recipe.training.get("bf16", True) and not torch.cuda.is_available():
        return "the recipe trains on a GPU and there is none here (or add --use_cpu true)"
    return None


def exit_status(ceiling: float) -> int:
    """1, and the reason, where even a perfect draft does not reach 1x."""
    if ceiling <= 1:
        print("error: no draft length can pay with this draft; use a smaller one.", file=sys.stderr)
        return 1
    return 0
