"""Distil a draft for a target on one domain, and report what it is worth.

    accelerate launch distill/train.py --recipe code              models from PyPI, CPU, no Hub
    accelerate launch distill/train.py --recipe code --dry_run true    what it needs and can gain
    accelerate launch distill/train.py --recipe legal --num_train_epochs 8

After an interruption the same command continues the run.
"""

import os
import sys
import warnings
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("TQDM_DELAY", "1")  # when tqdm is imported: no bar for what takes a moment

from accelerate import PartialState

from align.files import DiskFullError
from align.machine import free_memory, from_first, join_processes, use_machine
from align.sources import read_json
from distill.clock import Clock, answers_in_time
from distill.dry_run import dry_run
from distill.evaluation import evaluate, evaluate_served
from distill.export import export_draft
from distill.models import Pair, TargetOfRun, check_models, layers_read, of_published
from distill.prepare import prepare_draft, print_coverage
from distill.prompt_sets import Prompts, collect_prompts
from distill.recipe import Recipe, load_recipe
from distill.run_folder import claim_folder, delete_training_state, refuse_another_run
from distill.teacher.answers import (
    USED,
    answer_prompts,
    note_used,
    open_store,
    to_answer,
    who_answers,
)
from distill.teacher.served import ServedTarget
from distill.teacher.started_vllm import StartedVllm
from distill.teacher.states import cache_states
from distill.teacher.store import Answers, Store, names_of
from distill.trainer import distil_draft, process_timeout, training_config
from eval.measuring.journal import INTERRUPTED
from eval.reporting.text import print_summary

COVERED = 256  # answers by which `coverage_curve` judges trimmed vocabularies


def run(recipe: Recipe) -> int:
    """Check the recipe, then do the main job or its dry run; returns an exit status."""
    on_cpu, timeout = recipe.training.get("use_cpu", False), process_timeout(recipe)
    use_machine(join_processes(on_cpu, timeout))
    recipe = of_published(recipe)
    training_config(recipe)  # what transformers refuses is refused now, not after minutes
    if recipe.dry_run:
        return dry_run(recipe)
    refuse_another_run(recipe)
    with Clock(recipe.folder, recipe.minutes) as clock:
        return run_stages(recipe, clock)


def run_stages(recipe: Recipe, clock: Clock) -> int:
    """The main job. Each stage finds what an interrupted run left and goes on from there."""
    clock.stage("Check the pair, collect prompts")
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    target = TargetOfRun(recipe, pair, prompts)  # behind a server it is never loaded
    made_before = (recipe.folder / "draft").exists() and not recipe.coverage_curve
    served = None if made_before else served_target(recipe, pair, prompts)
    if served is not None and PartialState().is_main_process:
        served.check()
    claim_folder(recipe, pair, prompts)
    clock.keep()
    if made_before:
        return measure(recipe, pair, prompts, target, clock)
    clock.stage("The target answers the training prompts")
    store = open_store(recipe, pair.target) if served is None else served.store
    held_out = [] if served is None else served.held_out
    if served is None and prompts.held_out.prompts:
        held_out = answer_prompts(recipe, prompts.held_out.ids, target, store).names
    answers = answered(recipe, pair, target, served, store, clock)
    if recipe.coverage_curve:
        if PartialState().is_main_process:
            print_coverage(pair, answers)
        return 0
    if PartialState().is_main_process:
        note_used(recipe.folder, pair.target, answers, held_out)
    PartialState().wait_for_everyone()  # they read what was noted
    make_draft(recipe, pair, target, answers, clock)
    free_memory()
    return measure(recipe, pair, prompts, target, clock)


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
    clock: Clock,
) -> Answers:
    """The target's answers to the training prompts, as many as the recipe or its minutes allow.

    For a local target, also store the hidden states that the draft reads.
    """
    asked = to_answer(recipe, target.prompts.training.ids)
    if recipe.coverage_curve:
        asked = asked[:COVERED]
    names = names_of(asked, recipe.train_on_prompts)
    lacking = from_first([i for i, name in enumerate(names) if name not in store])
    layers = layers_read(recipe, pair.target.config)

    def first(count: int) -> Answers:
        if served is not None:
            return served.answers(count)
        return answer_prompts(recipe, asked[:count], target, store, layers, recipe.train_on_prompts)

    noted = recipe.folder / USED
    if noted.exists():  # a run goes on with the answers that it has begun to train on
        answers = first(read_json(noted)["count"])
    elif recipe.minutes is None:
        answers = first(len(asked))
    else:
        answers = answers_in_time(clock, len(asked), lacking, recipe.answer_batch_size, first)
    if served is not None:
        served.close()
    return answers


def make_draft(
    recipe: Recipe, pair: Pair, target: TargetOfRun, answers: Answers, clock: Clock
) -> None:
    """`draft/`: prepared, distilled, exported. The target is not in memory while it is trained."""
    cache_states(recipe, pair, target, answers)
    clock.stage("Prepare the draft")
    # one process prepares, the others wait and read what it left on disk
    with PartialState().main_process_first():
        prepared = prepare_draft(recipe, pair, target, answers)
    target.release()
    clock.stage("Distil the draft")
    distilled = distil_draft(recipe, pair, prepared, answers, clock)
    free_memory()  # trainer and optimiser, which refer to each other
    if distilled is not None:
        clock.stage("Save the draft")
        export_draft(recipe, pair, prepared, distilled, answers)


def measure(recipe: Recipe, pair: Pair, prompts: Prompts, target: TargetOfRun, clock: Clock) -> int:
    """The report, by the first process alone."""
    if not PartialState().is_main_process:
        return 0
    clock.stage("Measure the drafts")
    if recipe.answers == "server":
        report = evaluate_served(recipe, pair, prompts, clock)
    else:
        report = evaluate(recipe, pair, prompts, target.loaded, clock)
    delete_training_state(recipe.folder)
    clock.stage("Done")
    if report is not None:
        print_summary(report)
    print(f"\nDraft: {recipe.folder / 'draft'}")
    if report is not None:
        print(f"Report: {recipe.folder / 'report' / 'report.html'}")
    return 0


def main(argv: list[str]) -> int:
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
