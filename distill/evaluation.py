"""Measure base and distilled draft on the same prompts, in this process."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from align.checkpoint import Checkpoint, refuse_damaged, weights_sha256
from align.files import read_json, write_json
from align.machine import free_memory
from distill.card import USUAL_GAMMA, write_card
from distill.clock import Clock
from distill.held_out import held_out_curve
from distill.models import Pair
from distill.prompt_sets import Prompts
from distill.recipe import Recipe
from distill.run_folder import provenance
from distill.teacher.answers import USED
from eval import run
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.drafters.loading import model_drafter
from eval.decoding.drafters.lookup import lookup_first, prompt_lookup
from eval.decoding.loop import Decoding
from eval.decoding.target import Target
from eval.engines.local_vllm import EngineMissing, speculation, vllm_python
from eval.measuring.evaluation import Plan
from eval.measuring.evaluation import evaluate as measure
from eval.measuring.journal import INTERRUPTED, JOURNAL, Journal
from eval.reporting.build import build_report
from eval.reporting.fields import Report, ReportError, read_report
from eval.reporting.files import write_report

SHORTEST = 1.0  # minutes that an engine is given even if no time is left


def evaluate(
    recipe: Recipe, pair: Pair, prompts: Prompts, load: Callable[[], Target] | None, clock: Clock
) -> Report | None:
    """Write and return the report (`report/`), with `provenance.json` and the draft's model card.

    A report that is whole is kept. load: returns the target; None: nothing is measured, and the
    result is None. It is also None if the target is not decoded here: then the commands that
    measure the draft are printed.
    """
    folder = recipe.folder
    refuse_damaged(folder / "draft")
    report = whole_report(folder, recipe) if load is not None and pair.decoded_here else None
    if report is not None:
        return report
    made_by = provenance(recipe, prompts)
    write_json(folder / "provenance.json", made_by)
    if load is not None and recipe.served:
        print_commands(recipe)
    elif load is not None and not pair.decoded_here:
        print(
            "\nThe draft is complete, not measured, because only an engine computes this target:"
            f"\n\n    {shlex.join(in_vllm(recipe))}"
        )
    elif load is not None:
        with Journal(folder / "report" / JOURNAL) as journal:
            report = _measured_here(recipe, pair, prompts, load(), clock, made_by, journal)
            curve = held_out_curve(folder, prompts.held_out)
            report = report.model_copy(update={"held_out": curve})
            write_card(folder / "draft", folder, [report])
            write_report(folder / "report", report)
    return report


def whole_report(folder: Path, recipe: Recipe) -> Report | None:
    """The report in a folder on the run's draft; None if it is not there, whole and of its weights.

    `eval.run --run` measures the draft again.
    """
    with suppress(ReportError):
        report = read_report(folder)
        tuned, journal = report.drafts.get("tuned"), folder / "report" / JOURNAL
        same = tuned is not None and tuned.sha256 == weights_sha256(recipe.folder / "draft")
        return report if same and not journal.exists() else None
    return None


def in_engine(recipe: Recipe) -> bool:
    """Whether the run ends in vLLM. Raises EngineMissing if the recipe names it in vain."""
    if recipe.engine is None or recipe.served or recipe.kind.adapter:
        return False
    try:
        vllm_python()
    except EngineMissing:
        if recipe.engine == "vllm":
            raise
        return False
    return True


def evaluate_in_engine(recipe: Recipe, report: Report, clock: Clock, folder: Path) -> Report | None:
    """Write and return vLLM's report on the target alone, n-gram speculation and the draft.

    A report that is whole is kept. None if vLLM fails. report: of the reference decoder, whose
    draft lengths are used.
    """
    if (served := whole_report(folder, recipe)) is not None:
        return served
    options = ["--run", str(recipe.folder), "--engine", "vllm", "--output_dir", str(folder)]
    for option, name in (("--gamma", "tuned"), ("--ngram_gamma", "lookup")):
        options += [option, str(report.drafts[name].gamma or USUAL_GAMMA)]
    if recipe.minutes is not None:
        options += ["--minutes", f"{max(SHORTEST, clock.left(1.0) / 60):.2f}"]
    os.environ.pop("WORLD_SIZE", None)  # the run's other processes have ended
    status = run.main(options, summary=False)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        print("Warning: the drafts were not measured in vLLM; the lines above say why.")
        return None
    served = read_report(folder).model_copy(update={"held_out": report.held_out})
    write_report(folder / "report", served)
    write_card(recipe.folder / "draft", recipe.folder, [report, served])
    return served


def _measured_here(
    recipe: Recipe,
    pair: Pair,
    prompts: Prompts,
    target: Target,
    clock: Clock,
    made_by: dict[str, Any],
    journal: Journal,
) -> Report:
    """The report of the reference decoder on n-gram speculation, distilled draft, and n-gram, then
    distilled draft, as engines load them; also on a base draft that others trained.
    """
    draft = Checkpoint.open(recipe.folder / "draft")
    distilled = model_drafter(draft, target, pair.strategy)
    drafts: dict[str, Drafter] = {}
    trained = recipe.draft is not None or recipe.kind.trained  # before this run
    # with max_steps 0 base and distilled draft are the same
    if trained and recipe.training.get("max_steps") != 0:
        base = pair.published or pair.draft
        if recipe.draft is None:
            base = Checkpoint.open(recipe.folder / "prepared")
        drafts["untuned"] = model_drafter(base, target, pair.strategy)
    drafts |= {"lookup": prompt_lookup(target), "tuned": distilled}
    drafts["tuned+lookup"] = lookup_first(distilled, target.stops)
    free_memory()  # copies of weights from loading
    seconds = None if recipe.minutes is None else clock.left(clock.shares.decoded)
    logs = measure(
        target,
        drafts,
        prompts.evaluation,
        prompts.tuning,
        Decoding(recipe.sampling, target.stops, recipe.max_new_tokens, recipe.seed),
        Plan(recipe.gamma, recipe.max_gamma, recipe.speed_prompts, seconds=seconds),
        journal,
        made_by,
    )
    return build_report(*logs)


def served_length(recipe: Recipe) -> int:
    """The draft length of commands for a draft that is not measured."""
    return recipe.gamma or min(USUAL_GAMMA, recipe.max_gamma)


def in_vllm(recipe: Recipe) -> list[str]:
    """The command that measures the draft in vLLM; the report becomes that of the run."""
    command = ["python", "-m", "eval.run", "--run", str(recipe.folder), "--engine", "vllm"]
    gamma = served_length(recipe)
    return [*command, "--output_dir", str(recipe.folder), "--gamma", str(gamma)]


def print_commands(recipe: Recipe) -> None:
    """Print how to serve the draft, and how to compare its server with the target's."""
    served = read_json(recipe.folder / USED)["key"]["served model"]
    gamma, draft = served_length(recipe), (recipe.folder / "draft").resolve()
    drafting = speculation(draft, gamma, draft_sample_method=recipe.draft_sample_method)
    serve = ["vllm", "serve", recipe.target, "--served-model-name", served, *drafting]
    measure = [*in_vllm(recipe), "--baseline_url", str(recipe.answer_url)]
    print(
        f"\nThe draft is complete, not measured. Serve the target with it where {draft} can be "
        f"read:\n\n    {shlex.join(serve)}\n\nand compare the two servers:\n\n"
        f"    {shlex.join(measure)} --base_url tuned=http://HOST:PORT"
    )
