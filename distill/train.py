"""Distil a draft for a target on one domain, and report what it is worth.

    accelerate launch distill/train.py --recipe code              models from PyPI, CPU, no Hub
    accelerate launch distill/train.py --recipe code --dry_run true    what it needs and can gain
    accelerate launch distill/train.py --recipe legal --num_train_epochs 8

After an interruption the same command continues the run.
"""

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("TQDM_DELAY", "1")  # when tqdm is imported: no bar for what takes a moment

from accelerate import PartialState

from align.files import DiskFullError, refuse_unwritable
from align.machine import free_memory, from_first, join_processes, use_machine
from align.sources import cache_folder, read_json
from distill.clock import Clock, answers_in_time
from distill.dry_run import dry_run
from distill.evaluation import evaluate
from distill.export import export_draft
from distill.held_out import held_out_answers
from distill.models import Pair, check_models, target_loader, with_published_kind
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
)
from distill.teacher.served import ServedTarget
from distill.teacher.started_vllm import served_target
from distill.teacher.states import cache_states
from distill.teacher.store import Answers, names_of
from distill.trainer import WAIT, distil_draft, training_config
from eval.decoding.target import Target
from eval.measuring.journal import INTERRUPTED
from eval.reporting.text import print_summary

COVERED = 256  # answers by which `coverage_curve` judges trimmed vocabularies


def run(recipe: Recipe) -> int:
    """Check the recipe, then do the main job or its dry run; returns an exit status."""
    timeout = float(recipe.training.get("ddp_timeout", WAIT))
    use_machine(join_processes(recipe.training.get("use_cpu", False), timeout))
    recipe = with_published_kind(recipe)
    training_config(recipe)  # what transformers refuses is refused now, not after minutes
    for folder in (recipe.folder, cache_folder() / "teacher"):
        refuse_unwritable(folder)
    if recipe.dry_run:
        return dry_run(recipe)
    refuse_another_run(recipe)
    with Clock(recipe.folder, recipe.minutes) as clock:
        return run_stages(recipe, clock)


def run_stages(recipe: Recipe, clock: Clock) -> int:
    """The main job. Each stage continues from what an interrupted run has left."""
    main_process = PartialState().is_main_process
    clock.stage("Check the pair, collect prompts")
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    load_target = target_loader(recipe, prompts)  # behind a server it is never loaded
    draft_exists = (recipe.folder / "draft").exists() and not recipe.coverage_curve
    served = None if draft_exists else served_target(recipe, pair.target, prompts)
    if main_process:
        if served is not None:
            served.check()
        claim_folder(recipe, pair, prompts)
        clock.keep()
    if not draft_exists:
        clock.stage("The target answers the training prompts")
        answers, held_out = answered(recipe, pair, prompts, load_target, served, clock)
        if recipe.coverage_curve:
            if main_process:
                print_coverage(pair, answers)
            return 0
        if main_process:
            note_used(recipe.folder, pair.target, answers, held_out)
        PartialState().wait_for_everyone()  # they read what was noted
        cache_states(pair.layers, load_target, answers, held_out_answers(recipe.folder))
        clock.stage("Prepare the draft")
        # one process prepares, the others wait and read what it left on disk
        with PartialState().main_process_first():
            prepared = prepare_draft(recipe, pair, load_target, answers)
        load_target.cache_clear()  # the target is not in memory while the draft is trained
        free_memory()
        clock.stage("Distil the draft")
        distilled = distil_draft(recipe, pair, prepared, answers, clock)
        free_memory()  # trainer and optimiser, which refer to each other
        if distilled is not None:
            clock.stage("Save the draft")
            export_draft(recipe, pair, prepared, distilled, answers)
        del prepared, distilled
        free_memory()
    if not main_process:
        return 0
    clock.stage("Measure the drafts")
    report = evaluate(recipe, pair, prompts, load_target, clock)
    delete_training_state(recipe.folder)
    clock.stage("Done")
    if report is not None:
        print_summary(report)
    print(f"\nDraft: {recipe.folder / 'draft'}")
    if report is not None:
        print(f"Report: {recipe.folder / 'report' / 'report.html'}")
    return 0


def answered(
    recipe: Recipe,
    pair: Pair,
    prompts: Prompts,
    load_target: Callable[[], Target],
    served: ServedTarget | None,
    clock: Clock,
) -> tuple[Answers, list[str]]:
    """The target's answers to the training prompts, and the names of its held-out answers.

    The recipe or its minutes decide how many prompts are answered. For a local target, also store
    the hidden states that the draft reads.
    """
    store = open_store(recipe, pair.target) if served is None else served.store
    held_out = [] if served is None else served.held_out
    if served is None and prompts.held_out.prompts:
        held_out = answer_prompts(recipe, prompts.held_out.ids, load_target, store).names
    asked = to_answer(recipe, prompts.training.ids)
    if recipe.coverage_curve:
        asked = asked[:COVERED]
    names = names_of(asked, recipe.train_on_prompts)
    lacking = from_first([i for i, name in enumerate(names) if name not in store])

    def first(count: int) -> Answers:
        if served is not None:
            return served.answers(count)
        taught = recipe.train_on_prompts
        return answer_prompts(recipe, asked[:count], load_target, store, pair.layers, taught)

    noted = recipe.folder / USED
    if noted.exists():  # a run goes on with the answers that it has begun to train on
        answers = first(read_json(noted)["count"])
    elif recipe.minutes is None:
        answers = first(len(asked))
    else:
        answers = answers_in_time(clock, len(asked), lacking, recipe.answer_batch_size, first)
    if served is not None:
        served.close()
    return answers, held_out


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
