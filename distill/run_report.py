"""Measure a run's drafts on the same prompts, in this process and in vLLM."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from align.checkpoint import Checkpoint, refuse_damaged, weights_sha256
from align.command_line import INTERRUPTED
from align.files import read_json, write_json
from align.machine import free_memory
from distill.card import USUAL_GAMMA, write_card
from distill.clock import Clock
from distill.export import BASE_KEPT, export_draft
from distill.held_out import held_out_curve
from distill.models import Pair
from distill.prepare import read_prepared
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
from eval.engines.start_vllm import EngineMissing, speculation, vllm_python
from eval.measuring.evaluation import Plan
from eval.measuring.evaluation import evaluate as measure_here
from eval.measuring.intervals import around, measure, ratio
from eval.measuring.journal import JOURNAL, Journal
from eval.measuring.runs import DraftLog, RunLog
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
    if load is not None and recipe.remote_target:
        print_commands(recipe)
    elif load is not None and not pair.decoded_here:
        print(
            "\nThe draft is complete, not measured, because only an engine computes this target:"
            f"\n\n    {shlex.join(vllm_command(recipe))}"
        )
    elif load is not None:
        curve = held_out_curve(folder)
        with Journal(folder / "report" / JOURNAL) as journal:
            measured = _measured_here(recipe, pair, prompts, load(), clock, made_by, journal)
            report = build_report(*measured)
            kept = folder / BASE_KEPT
            comparable = not becomes_parallel(recipe, pair) and not kept.exists()
            if comparable and (reason := shown_loss(report, curve is not None)):
                keep_base(recipe, pair, reason)
                report = build_report(*with_base_only(*measured))
            update: dict[str, Any] = {"held_out": curve}
            if kept.exists():
                update["base_kept"] = read_json(kept)["reason"]
            report = report.model_copy(update=update)
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
    if recipe.engine is None or recipe.remote_target or recipe.kind.adapter:
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

    Also on the base draft, unless it was made from the target. A report that is whole is kept.
    None if vLLM fails. report: of the reference decoder, whose draft lengths are used.
    """
    if (engine_report := whole_report(folder, recipe)) is not None:
        return engine_report
    options = ["--run", str(recipe.folder), "--engine", "vllm", "--output_dir", str(folder)]
    for option, name in (("--gamma", "tuned"), ("--ngram_gamma", "lookup")):
        options += [option, str(report.drafts[name].gamma or USUAL_GAMMA)]
    if recipe.minutes is not None:
        options += ["--minutes", f"{max(SHORTEST, clock.left(1.0) / 60):.2f}"]
    os.environ.pop("WORLD_SIZE", None)  # the run's other processes have ended
    try:
        status = run.main(options, summary=False)
    except SystemExit as refused:  # a key of the recipe that vLLM has not
        status = int(refused.code or 0)
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status:
        print("Warning: the drafts were not measured in vLLM; the lines above say why.")
        return None
    ours = {name: getattr(report, name) for name in ("held_out", "base_kept")}
    engine_report = read_report(folder).model_copy(update=ours)
    write_report(folder / "report", engine_report)
    write_card(recipe.folder / "draft", recipe.folder, [report, engine_report])
    return engine_report


def _measured_here(
    recipe: Recipe,
    pair: Pair,
    prompts: Prompts,
    target: Target,
    clock: Clock,
    made_by: dict[str, Any],
    journal: Journal,
) -> tuple[RunLog, list[DraftLog]]:
    """The logs of the reference decoder on n-gram speculation, distilled draft, and n-gram, then
    distilled draft, as engines load them; also on a base draft that was trained before.
    """
    draft = Checkpoint.open(recipe.folder / "draft")
    distilled = model_drafter(draft, target, pair.strategy)
    drafts: dict[str, Drafter] = {}
    # with max_steps 0 base and distilled draft are the same
    if recipe.starts_trained and recipe.training.get("max_steps") != 0:
        base = pair.draft
        if recipe.sibling is None:
            base = Checkpoint.open(recipe.folder / "prepared")
        drafts["untuned"] = model_drafter(base, target, pair.strategy)
    drafts |= {"lookup": prompt_lookup(target), "tuned": distilled}
    drafts["tuned+lookup"] = lookup_first(distilled, target.stops)
    free_memory()  # copies of weights from loading
    seconds = None if recipe.minutes is None else clock.left(clock.shares.decoded)
    return measure_here(
        target,
        drafts,
        prompts.evaluation,
        prompts.tuning,
        Decoding(recipe.sampling, target.stops, recipe.max_new_tokens, recipe.seed),
        Plan(recipe.gamma, recipe.max_gamma, recipe.speed_prompts, seconds=seconds),
        journal,
        made_by,
    )


def shown_loss(report: Report, followed: bool) -> str | None:
    """Why a base draft that was trained before is to be kept; None if the distilled draft is.

    The tokens a step of the two are compared, prompt by prompt, at the shorter of their draft
    lengths. A loss is one reason. The other is that a gain is not shown, if the training was not
    `followed` on held-out prompts. Fewer prompts than an interval needs show neither.
    """
    if "untuned" not in report.drafts:
        return None
    ours, base = report.drafts["tuned"], report.drafts["untuned"]
    length = min(ours.gamma or 0, base.gamma or 0)
    rows, groups = [], []
    for our, other in zip(ours.per_prompt, base.per_prompt, strict=True):
        if our.accepted_at and other.accepted_at:
            sums = ((sum(at[1 : length + 1]), at[0]) for at in (our.accepted_at, other.accepted_at))
            rows.append([number for pair in sums for number in pair])
            groups.append(our.group)
    if not rows:  # outputs of a token or two
        return None
    gain = measure("gain", rows, lambda t: ratio(t[..., :2]) - ratio(t[..., 2:]), groups, around)
    low, high = gain.bounds
    if high < 0 or (gain.ci95 and low <= 0 and not followed):
        return f"{gain:+.3f} tokens a step with the distilled draft on the evaluation prompts"
    return None


def becomes_parallel(recipe: Recipe, pair: Pair) -> bool:
    """Whether the sibling drafts token by token, and the distilled draft all tokens in one pass.

    Such a step emits fewer tokens and costs less, so tokens a step do not compare them.
    """
    sibling = recipe.sibling is not None and recipe.kind.has_mask
    return sibling and "pard_token" not in pair.draft.config_json


def keep_base(recipe: Recipe, pair: Pair, reason: str) -> None:
    """Make `draft/` the base draft, which was trained before this run and has no trimmed head."""
    print(f"draft/ is the base draft: {reason}")
    base = read_prepared(recipe, pair)
    export_draft(recipe, pair, base, base.model.float(), None)
    write_json(recipe.folder / BASE_KEPT, {"reason": reason})  # after a kill it is compared again


def with_base_only(run: RunLog, drafts: list[DraftLog]) -> tuple[RunLog, list[DraftLog]]:
    """The logs after `keep_base`: the results of the base draft are those of `tuned`, too."""
    base, lookup, tuned, _ = drafts
    about = base.about | {"path": tuned.path}
    return run, [base, lookup, replace(base, name=tuned.name, about=about)]


def unmeasured_draft_length(recipe: Recipe) -> int:
    """The draft length of commands for a draft that is not measured."""
    return recipe.gamma or min(USUAL_GAMMA, recipe.max_gamma)


def vllm_command(recipe: Recipe) -> list[str]:
    """The command that measures the draft in vLLM; the report becomes that of the run."""
    command = ["python", "-m", "eval.run", "--run", str(recipe.folder), "--engine", "vllm"]
    gamma = unmeasured_draft_length(recipe)
    return [*command, "--output_dir", str(recipe.folder), "--gamma", str(gamma)]


def print_commands(recipe: Recipe) -> None:
    """Print how to serve the draft, and how to compare its server with the target's."""
    model_name = read_json(recipe.folder / USED)["key"]["served model"]
    gamma, draft = unmeasured_draft_length(recipe), (recipe.folder / "draft").resolve()
    drafting = speculation(draft, gamma, draft_sample_method=recipe.draft_sample_method)
    serve = ["vllm", "serve", recipe.target, "--served-model-name", model_name, *drafting]
    measure = [*vllm_command(recipe), "--baseline_url", str(recipe.answer_url)]
    print(
        f"\nThe draft is complete, not measured. Serve the target with it where {draft} can be "
        f"read:\n\n    {shlex.join(serve)}\n\nand compare the two servers:\n\n"
        f"    {shlex.join(measure)} --base_url tuned=http://HOST:PORT"
    )
