"""Distil a draft for a target on one domain, and report what it is worth.

    accelerate launch distill/train.py --recipe code              embedded models, CPU, no Hub
    accelerate launch distill/train.py --recipe code --dry_run true    check and price, then stop
    accelerate launch distill/train.py --recipe legal --num_train_epochs 8

Run again after an interruption, the same command goes on where it stopped.
"""

import dataclasses
import os
import statistics
import sys
import warnings
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("TQDM_DELAY", "1")  # when tqdm is imported: no bar for what takes a moment

from accelerate import PartialState

from align.files import DiskFullError
from align.machine import free_memory, from_first, join_processes, use_machine
from distill.compare import compare
from distill.dry_run import price_run
from distill.export import export_draft
from distill.local_evaluation import evaluate
from distill.models import Pair, TargetOfRun, check_models, layers_read, of_published
from distill.plan import (
    Clock,
    Plan,
    answers_at_hand,
    measured_costs,
    plan_as_given,
    plan_within,
    read_plan,
    with_choice,
    write_plan,
)
from distill.prepare import prepare_draft, print_coverage
from distill.prompt_sets import Prompts, collect_prompts
from distill.recipe import Recipe, help_text, load_recipe
from distill.run_folder import claim_folder, delete_training_state, refuse_another_run, write_recipe
from distill.served_evaluation import evaluate_served
from distill.teacher.answers import (
    PROBE,
    answer_lengths,
    answer_prompts,
    note_used,
    open_store,
    to_answer,
    who_answers,
)
from distill.teacher.served import ServedTarget
from distill.teacher.started_vllm import StartedVllm
from distill.teacher.states import cache_states
from distill.teacher.store import Answers, Store
from distill.trainer import distil_draft, process_timeout, training_config
from eval.measuring.cost import price
from eval.measuring.journal import INTERRUPTED
from eval.reporting.text import print_summary


def run(recipe: Recipe) -> int:
    """The main job. Each stage finds what an interrupted run left and goes on from there."""
    on_cpu, timeout = recipe.training.get("use_cpu", False), process_timeout(recipe)
    use_machine(join_processes(on_cpu, timeout))
    recipe = of_published(recipe)
    if recipe.dry_run:
        return price_run(recipe)
    training_config(recipe)  # what transformers refuses is refused now, not after minutes
    refuse_another_run(recipe)
    clock = Clock()
    clock.stage("Check the pair, collect prompts")
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    target = TargetOfRun(recipe, pair, prompts)  # behind a server it is never loaded
    made_before = (recipe.folder / "draft").exists() and not recipe.coverage_curve
    served = None if made_before else served_target(recipe, pair, prompts)
    if served is not None and PartialState().is_main_process:
        served.check()
    plan = read_plan(recipe.folder)
    claim_folder(recipe, pair, prompts, plan)
    if made_before:
        plan = plan or plan_as_given(recipe, prompts)
        return measure(with_choice(recipe, plan.choice), pair, prompts, target, plan, clock)
    clock.stage("The target answers the training prompts")
    store = open_store(recipe, pair.target) if served is None else served.store
    held_out = [] if served is None else served.held_out
    if served is None and prompts.held_out.prompts:
        held_out = answer_prompts(recipe, prompts.held_out.ids, target, store).names
    if recipe.coverage_curve:
        count = PROBE if recipe.planned else None
        answers = answered(recipe, pair, target, served, store, count)
        if PartialState().is_main_process:
            print_coverage(pair, answers)
        return 0
    plan = plan or make_plan(recipe, pair, prompts, target, served, store, clock)
    recipe = with_choice(recipe, plan.choice)
    answers = answered(recipe, pair, target, served, store, plan.answers)
    if PartialState().is_main_process:
        note_used(recipe.folder, pair.target, answers, held_out)
    PartialState().wait_for_everyone()  # they read what was noted
    make_draft(recipe, pair, target, answers, plan, clock)
    free_memory()
    return measure(recipe, pair, prompts, target, plan, clock)


def served_target(recipe: Recipe, pair: Pair, prompts: Prompts) -> ServedTarget | None:
    """The target where vLLM answers for it, the recipe's own or one started here; else None."""
    by, why = from_first(who_answers(recipe))
    if PartialState().is_main_process:
        print(f"answers: {by}, since {why}")
    if by == "server":
        return ServedTarget(recipe, pair.target, prompts)
    if by == "vllm":
        return StartedVllm(recipe, pair.target, prompts, open_store(recipe, pair.target))
    return None


def answered(
    recipe: Recipe,
    pair: Pair,
    target: TargetOfRun,
    served: ServedTarget | None,
    store: Store,
    count: int | None,
) -> Answers:
    """The first answers of a run, as many as `count` of them.

    Of the target's own, the states that are read are kept as well.
    """
    if served is not None:
        return served.answers(count)
    asked = to_answer(recipe, target.prompts.training.ids)
    layers = layers_read(recipe, pair.target.config)
    taught = recipe.train_on_prompts
    return answer_prompts(recipe, asked[:count], target, store, layers, taught)


def make_plan(
    recipe: Recipe,
    pair: Pair,
    prompts: Prompts,
    target: TargetOfRun,
    served: ServedTarget | None,
    store: Store,
    clock: Clock,
) -> Plan:
    """What the run will do: printed, and written for a process that goes on with it."""
    if recipe.planned:
        assert recipe.minutes is not None
        first = answered(recipe, pair, target, served, store, PROBE)
        choice = None
        if recipe.drafter == "auto":
            clock.stage("Compare kinds of draft")
            choice = compare(recipe, pair, prompts, target, first, clock)
        picked = with_choice(recipe, choice)
        tokens = statistics.mean(answer_lengths(recipe, prompts.training.ids, first))
        steps, costs = measured_costs(picked, pair, prompts, target, store, tokens)
        print(price(steps))
        at_hand, seconds = from_first(
            (answers_at_hand(recipe, prompts, store), clock.left(recipe.minutes))
        )
        if isinstance(served, StartedVllm):
            seconds -= from_first(served.starting)  # it starts once more
        plan = plan_within(picked, prompts, at_hand, costs, seconds)
        plan = dataclasses.replace(plan, choice=choice)
    else:
        plan = plan_as_given(recipe, prompts, answers_at_hand(recipe, prompts, store))
    if PartialState().is_main_process:
        write_plan(recipe.folder, plan)
        write_recipe(recipe, plan)
        print("\n".join(plan.lines()))
    return plan


def make_draft(
    recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Answers, plan: Plan, clock: Clock
) -> None:
    """`draft/`: prepared, distilled, exported. The target is not in memory while it is trained."""
    cache_states(recipe, pair, target, answers)
    clock.stage("Prepare the draft")
    # one process prepares, the others wait and read what it left on disk
    with PartialState().main_process_first():
        prepared = prepare_draft(recipe, pair, target, answers)
    target.release()
    clock.stage("Distil the draft")
    tuned = distil_draft(recipe, pair, prepared, answers, plan.steps)
    free_memory()  # trainer and optimiser, which refer to each other
    if tuned is not None:
        clock.stage("Save the draft")
        export_draft(recipe, pair, prepared, tuned, answers)


def measure(
    recipe: Recipe, pair: Pair, prompts: Prompts, target: TargetOfRun, plan: Plan, clock: Clock
) -> int:
    """The report, by the first process alone."""
    if not PartialState().is_main_process:
        return 0
    clock.stage("Measure the drafts")
    if recipe.answers == "server":
        report = evaluate_served(recipe, pair, prompts, clock.seconds())
    else:
        report = evaluate(recipe, pair, prompts, target.loaded, plan, clock.seconds())
    delete_training_state(recipe.folder)
    clock.stage("Done")
    if report is not None:
        print_summary(report)
    print(f"\nDraft: {recipe.folder / 'draft'}")
    if report is not None:
        print(f"Report: {recipe.folder / 'report' / 'report.html'}")
    return 0


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return 0
    # Two harmless warnings of peft are hidden: transformers has renamed an attribute, and the
    # embedding of a transplanted draft is saved with its adapters, as it must be.
    for message in ("`is_gradient_checkpointing` is deprecated", "Setting `save_embedding_layers`"):
        warnings.filterwarnings("ignore", message=message)
    try:
        return run(load_recipe(argv))
    except (ValueError, DiskFullError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on.", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
