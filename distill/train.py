"""Distil a draft for a target on one domain, and report what it is worth.

    accelerate launch distill/train.py --recipe code              embedded models, CPU, no Hub
    accelerate launch distill/train.py --recipe code --dry_run true    check and price, then stop
    accelerate launch distill/train.py --recipe legal --num_train_epochs 8

Run again after an interruption, the same command goes on where it stopped.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("TQDM_DELAY", "1")  # when tqdm is imported: no bar for what takes a moment

from accelerate import PartialState

from align.atomic import DiskFullError
from align.process import free_memory, join_processes, use_machine
from distill.adapters import on_base
from distill.budget import adopted, first_answers, plan, spend_rest
from distill.choice import choose
from distill.dry_run import price_run
from distill.evaluation import evaluate
from distill.export import export_draft
from distill.models import Pair, TargetOfRun, check_models
from distill.prepare import prepare_draft, print_coverage
from distill.prompts import Prompts, collect_prompts
from distill.recipe import Recipe, help_text, load_recipe
from distill.run_folder import claim_folder, delete_training_state, refuse_another_run
from distill.served_evaluation import evaluate_served
from distill.server import ServedTarget
from distill.teacher.answers import PROBE, answer_prompts, note_used, open_store, to_answer
from distill.teacher.states import cache_states, layers_read
from distill.teacher.store import Answers
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
    recipe = adopted(recipe)
    stage = stage_clock()
    stage("Check the pair, collect prompts")
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    target = TargetOfRun(recipe, pair, prompts)  # behind a server it is never loaded
    drafted = (recipe.folder / "draft").exists() and not recipe.coverage_curve
    served = None
    if recipe.answers == "server" and not drafted:
        served = ServedTarget(recipe, pair.target, prompts)
        if PartialState().is_main_process:
            served.check()
    claim_folder(recipe, pair, prompts)
    if drafted:
        return measure(recipe, pair, prompts, target, stage)
    stage("The target answers the training prompts")
    store = open_store(recipe, pair.target) if served is None else served.store
    held_out: list[str] = []
    if prompts.held_out.prompts:
        held_out = answer_prompts(recipe, prompts.held_out.ids, target, store).names
    planned = recipe.minutes is not None and recipe.max_answers is None
    if planned:
        first = first_answers(recipe, pair, prompts, target, store)
        if recipe.drafter == "auto" and not recipe.coverage_curve:
            stage("Compare kinds of draft")
            recipe = choose(recipe, pair, prompts, target, first.answers)
            stage("The target answers more training prompts")
        recipe = plan(recipe, pair, prompts, target, first)
    if served is not None:
        answers = served.answers()
    else:
        asked, layers = to_answer(recipe, prompts.training.ids), layers_read(recipe, pair)
        answers = answer_prompts(recipe, asked, target, store, layers, recipe.train_on_prompts)
    if recipe.coverage_curve:
        if PartialState().is_main_process:
            print_coverage(pair, answers)
        return 0
    if PartialState().is_main_process:
        note_used(recipe.folder, pair.target, answers, held_out)
    PartialState().wait_for_everyone()  # they read what was noted
    if recipe.drafter == "auto":
        stage("Compare kinds of draft")
        recipe = choose(recipe, pair, prompts, target, answers[:PROBE])
    make_draft(recipe, pair, target, answers, stage)
    free_memory()
    if planned and PartialState().is_main_process:
        recipe = spend_rest(recipe, prompts, target, answers)
    return measure(recipe, pair, prompts, target, stage)


def measure(
    recipe: Recipe,
    pair: Pair,
    prompts: Prompts,
    target: TargetOfRun,
    stage: Callable[[str], None],
) -> int:
    """The report, by the first process alone."""
    if not PartialState().is_main_process:
        return 0
    stage("Measure the drafts")
    if recipe.answers == "server":
        report = evaluate_served(recipe, pair, prompts)
    else:
        report = evaluate(recipe, pair, prompts, target.loaded)
    delete_training_state(recipe.folder)
    stage("Done")
    if report is not None:
        print_summary(report)
    print(f"\nDraft: {recipe.folder / 'draft'}")
    if report is not None:
        print(f"Report: {recipe.folder / 'report' / 'report.html'}")
    return 0


def stage_clock() -> Callable[[str], None]:
    """Prints the name of a stage as it begins, after the minutes and seconds from here."""
    start = time.monotonic()

    def stage(name: str) -> None:
        minutes, seconds = divmod(round(time.monotonic() - start), 60)
        print(f"\n[{minutes:3d}:{seconds:02d}] {name}", flush=True)

    return stage


def make_draft(
    recipe: Recipe,
    pair: Pair,
    target: TargetOfRun,
    answers: Answers,
    stage: Callable[[str], None],
) -> None:
    """`draft/`: prepared, distilled, exported. The target is not in memory while it is trained."""
    cache_states(recipe, pair, target, answers)
    stage("Prepare the draft")
    # one process prepares, the others wait and read what it left on disk
    with PartialState().main_process_first():
        prepared = prepare_draft(recipe, pair, target, answers)
    target.release()
    stage("Distil the draft")
    tuned = distil_draft(recipe, pair, prepared, answers)
    free_memory()  # trainer and optimiser, which refer to each other
    if tuned is not None:
        stage("Save the draft")
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
