"""Measure base and distilled draft on the same prompts: in this process or behind servers."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from typing import Any

from align.files import write_json
from align.machine import free_memory
from align.sources import opened_weights, read_json, weight_files
from distill.card import USUAL_GAMMA, write_card
from distill.clock import EVALUATED, TRAINED, Clock
from distill.held_out import held_out_curve
from distill.models import Pair
from distill.prompt_sets import Prompts
from distill.recipe import Recipe
from distill.run_folder import provenance
from distill.teacher.answers import USED
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.lookup import lookup_first, prompt_lookup
from eval.decoding.loop import Decoding
from eval.decoding.target import Target
from eval.engines.local_vllm import speculation
from eval.engines.served import measure_servers
from eval.engines.server import ServerError
from eval.engines.vllm import VllmServer
from eval.measuring.evaluation import Plan
from eval.measuring.evaluation import evaluate as measure
from eval.measuring.journal import JOURNAL, Journal
from eval.reporting.build import build_report
from eval.reporting.fields import Report
from eval.reporting.files import write_report


def evaluate(
    recipe: Recipe, pair: Pair, prompts: Prompts, load: Callable[[], Target] | None, clock: Clock
) -> Report | None:
    """Write and return the report (`report/`), with `provenance.json` and the draft's model card.

    load: returns the target; None: nothing is measured, and the result is None. With `answers:
    server` the report compares `speculative_url` with `answer_url`; without `speculative_url` the
    result is None. Raises ServerError for a server that cannot be measured. If a server fails
    midway, the report of the measured prompts is written.
    """
    folder = recipe.folder
    for path in weight_files(folder / "draft"):  # not measured if there is a trimmed checkpoint
        with opened_weights(path):  # compares header and file size
            pass
    made_by = provenance(recipe, prompts, clock.seconds())
    report = None
    if load is not None and recipe.served:
        report = _measured_served(recipe, prompts, made_by)
    elif load is not None:
        report = _measured_here(recipe, pair, prompts, load(), clock, made_by)
    write_json(folder / "provenance.json", made_by)
    if report is None:
        return None
    report = report.model_copy(update={"held_out": held_out_curve(folder, prompts.held_out)})
    write_report(folder / "report", report)
    write_card(folder / "draft", folder, [report])
    broken_off = [m.reason for m in report.last[1].missing if m.field == "prompts"]
    if broken_off:
        raise ServerError(
            f"only a part was measured, {broken_off[0]} The report has these prompts; the same "
            "command measures all."
        )
    return report


def _measured_here(
    recipe: Recipe,
    pair: Pair,
    prompts: Prompts,
    target: Target,
    clock: Clock,
    made_by: dict[str, Any],
) -> Report:
    """The report of the reference decoder on base draft, n-gram speculation, distilled draft, and
    n-gram, then distilled draft. Drafts with two checkpoints are loaded from the trimmed one.
    """
    distilled = load_drafter(str(recipe.folder / "draft"), target, pair.strategy)
    drafts: dict[str, Drafter] = {}
    if recipe.training.get("max_steps") != 0:  # else base and distilled draft are the same
        spec = recipe.draft or str(recipe.folder / "prepared")
        drafts["untuned"] = load_drafter(spec, target, pair.strategy)
        drafts["untuned"].full_form_bytes = distilled.full_form_bytes  # the base draft has none
    drafts |= {"lookup": prompt_lookup(target), "tuned": distilled}
    drafts["tuned+lookup"] = lookup_first(distilled, target.stops)
    free_memory()  # copies of weights from loading
    seconds = None
    if recipe.minutes is not None:
        # a run that has a report is measured again, in the usual share of its minutes
        again = (recipe.folder / "report" / "report.json").exists()
        seconds = 60 * recipe.minutes * (EVALUATED - TRAINED) if again else clock.left(EVALUATED)
    with Journal(recipe.folder / "report" / JOURNAL) as journal:
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


def _measured_served(recipe: Recipe, prompts: Prompts, made_by: dict[str, Any]) -> Report | None:
    """The report of two servers. If only one is named, print how to serve the draft."""
    served = read_json(recipe.folder / USED)["key"]["served model"]
    draft = (recipe.folder / "draft").resolve()
    words = ["vllm", "serve", recipe.target, "--served-model-name", served]
    gamma, method = recipe.gamma or USUAL_GAMMA, recipe.draft_sample_method
    command = shlex.join([*words, *speculation(draft, gamma, draft_sample_method=method)])
    advice = (
        f"Serve the target with this draft where {recipe.folder / 'draft'} can be read:\n\n"
        f"    {command}\n\nand run the same command again"
    )
    if recipe.speculative_url is None:
        print(f"\nThe draft is complete, not measured. {advice} with --speculative_url http://….")
        return None
    assert recipe.answer_url is not None
    try:
        return measure_servers(
            {"tuned": VllmServer(recipe.speculative_url, model=served)},
            VllmServer(recipe.answer_url, model=served),
            prompts.evaluation.drawn(recipe.speed_prompts, recipe.seed),
            Decoding(
                recipe.sampling,
                frozenset(),
                recipe.max_new_tokens,
                recipe.seed,
                draft_sample_method=None,
            ),
            made_by,
            target=recipe.target,
            gamma=recipe.gamma,
        )
    except ServerError as error:
        raise ServerError(f"{error}\nThe draft is complete and is kept. {advice}.") from None
