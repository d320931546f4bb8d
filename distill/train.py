"""Distil a draft for a target on one domain, and report what it is worth.

    accelerate launch distill/train.py --recipe code              embedded models, CPU, no Hub
    accelerate launch distill/train.py --recipe code --dry_run true    check and price, then stop
    accelerate launch distill/train.py --recipe legal --num_train_epochs 8

Run again after an interruption, the same command goes on where it stopped.
"""

import dataclasses
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("TQDM_DELAY", "1")  # when tqdm is imported: no bar for what takes a moment

from accelerate import PartialState

from align.atomic import DiskFullError
from align.process import free_memory, join_processes, use_machine
from distill.adapters import on_base
from distill.answer_cache import CachedAnswer
from distill.answers import PROBE, answer_lengths, answer_prompts
from distill.compare import compare
from distill.dry_run import price_run
from distill.evaluation import evaluate
from distill.export import export_draft
from distill.held_out import HELD_OUT
from distill.models import Pair, TargetOfRun, check_models
from distill.plan import (
    Clock,
    Plan,
    first_answers,
    measured_costs,
    plan_as_given,
    plan_within,
    read_plan,
    write_plan,
)
from distill.prepare import prepare_draft, print_coverage
from distill.prompts import Prompts, collect_prompts
from distill.recipe import Recipe, build_recipe, help_text, load_recipe
from distill.run_folder import claim_folder, delete_training_state, refuse_another_run, write_recipe
from distill.served_evaluation import evaluate_served
from distill.server import ServedTarget
from distill.state_cache import cache_states, layers_read
from distill.trainer import distil_draft, process_timeout, training_config
from eval.measuring.journal import INTERRUPTED
from eval.reporting.text import print_summary


def run(recipe: Recipe) -> int:
    """The main job. Each stage finds what an interrupted run left and goes on from there."""
    on_cpu, timeout = recipe.training.get("use_cpu", False), process_timeout(recipe)
    use_machine(join_processes(on_cpu, timeout))
    recipe = on_base(recipe)
    if recipe.dry_run:
        return price_run(recipe)
    training_config(recipe)  # what transformers refuses is refused now, not after minutes
    refuse_another_run(recipe)
    clock = Clock()
    clock.stage("Check the pair, collect prompts")
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    target = TargetOfRun(recipe, pair, prompts)  # behind a server it is never loaded
    served = ServedTarget(recipe, pair.target, prompts) if recipe.answers == "server" else None
    if served is not None and PartialState().is_main_process:
        served.check()
    claim_folder(recipe, pair, prompts)

    clock.stage("The target answers the training prompts")
    if prompts.held_out.prompts:
        once = dataclasses.replace(recipe, answers_per_prompt=1, train_on_prompts=False)
        answer_prompts(once, prompts.held_out.ids, target, HELD_OUT)
    if recipe.coverage_curve:
        count = PROBE if recipe.planned else recipe.max_answers
        answers = served.answers() if served else answered(recipe, pair, target, count)
        if PartialState().is_main_process:
            print_coverage(pair, answers)
        return 0
    plan = read_plan(recipe.folder) or make_plan(recipe, pair, prompts, target, clock)
    write_recipe(recipe, plan.decided())
    recipe = with_choice(recipe, plan.choice)
    answers = served.answers() if served else answered(recipe, pair, target, plan.answers)

    if not (recipe.folder / "draft").exists():
        make_draft(recipe, pair, target, answers, plan, clock)
        free_memory()
    if PartialState().is_main_process:
        clock.stage("Measure the drafts")
        report = (
            evaluate(recipe, pair, prompts, target.loaded, plan, clock)
            if served is None
            else evaluate_served(recipe, pair, prompts, clock)
        )
        delete_training_state(recipe.folder)
        clock.stage("Done")
        if report is not None:
            print_summary(report)
        print(f"\nDraft: {recipe.folder / 'draft'}")
        if report is not None:
            print(f"Report: {recipe.folder / 'report' / 'report.html'}")
    return 0


def answered(recipe: Recipe, pair: Pair, target: TargetOfRun, count: int | None) -> AnswerCache:
    """The target's first answers to the training prompts, with its states where they are read."""
    ids, layers = target.prompts.training.ids, layers_read(recipe, pair)
    return answer_prompts(recipe, ids, target, layers=layers, count=count)


def make_plan(
    recipe: Recipe, pair: Pair, prompts: Prompts, target: TargetOfRun, clock: Clock
) -> Plan:
    """What the run will do: printed, and written for whoever goes on with it."""
    if not recipe.planned:
        plan = plan_as_given(recipe, prompts, answers_there(recipe, pair))
    else:
        assert recipe.minutes is not None
        answers, answer = first_answers(recipe, pair, prompts, target)
        choice = None
        if recipe.drafter == "auto":
            clock.stage("Compare kinds of draft")
            choice = compare(recipe, pair, prompts, target, answers, clock)
            clock.stage("The target answers more training prompts")
        recipe = with_choice(recipe, choice)
        tokens = statistics.mean(answer_lengths(recipe, prompts.training.ids, answers))
        steps, costs = measured_costs(recipe, pair, prompts, target, tokens, answer)
        print(price(steps))
        left = from_first(clock.left(recipe.minutes))
        plan = plan_within(recipe, prompts, len(answers), costs, left)
        plan = dataclasses.replace(plan, choice=choice)
    if PartialState().is_main_process:
        write_plan(recipe.folder, plan)
        print("\n".join(plan.lines()))
    return plan


def make_draft(
    recipe: Recipe,
    pair: Pair,
    target: TargetOfRun,
    answers: Sequence[CachedAnswer],
    plan: Plan,
    clock: Clock,
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


def main(argv: list[str]) -> int:
    if "--help" in argv or "-h" in argv:
        print(help_text())
        return 0
    # of peft, and nothing that a user could mend: a name that transformers has changed, and that a
    # transplanted draft's embedding is saved with its adapters, as it must be
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
