"""The untuned and the tuned draft on the same prompts: the report, and the card made from it."""

from __future__ import annotations

from align.files import write_json
from align.machine import free_memory
from distill.card import write_card
from distill.held_out import held_out_curve
from distill.models import Pair
from distill.plan import Plan
from distill.prepare import lost_mass_of
from distill.prompt_sets import Prompts
from distill.recipe import Recipe
from distill.run_folder import provenance
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.lookup import lookup_first, prompt_lookup
from eval.decoding.loop import Decoding
from eval.decoding.target import Target
from eval.measuring.evaluation import Plan as Measurements
from eval.measuring.evaluation import evaluate as measure
from eval.measuring.journal import JOURNAL, Journal
from eval.reporting.report import Report, write_report


def evaluate(
    recipe: Recipe, pair: Pair, prompts: Prompts, target: Target, plan: Plan, seconds: float
) -> Report:
    """The report, written to `report/`, with `provenance.json` and the draft's model card.

    seconds: that the run has taken.
    """
    folder = recipe.folder
    made_by = provenance(recipe, prompts, lost_mass_of(recipe), seconds)
    drafts = _drafts(recipe, pair, target, plan.steps)
    free_memory()  # of their weights as they were read
    with Journal(folder / "report" / JOURNAL) as journal:
        report = measure(
            target,
            drafts,
            prompts.evaluation,
            prompts.tuning,
            Decoding(recipe.sampling, target.stops, recipe.max_new_tokens, recipe.seed),
            Measurements(
                recipe.gamma,
                recipe.max_gamma,
                plan.timed if plan.timing is None else recipe.speed_prompts,
                execute=recipe.execute,
                seconds=plan.timing,
            ),
            journal,
            made_by,
        )
        curve = held_out_curve(folder, prompts.held_out)
        about = {"held_out": curve, "choice": plan.choice}
        report = report.model_copy(update=about)
        write_report(folder / "report", report)
        write_json(folder / "provenance.json", made_by)
        write_card(folder / "draft", folder, [report])
    return report


def _drafts(recipe: Recipe, pair: Pair, target: Target, steps: int) -> dict[str, Drafter]:
    """Untuned and tuned, prompt lookup alone and in front of the tuned draft.

    Of a pruned target in the compact form, which is what our decoder runs.
    """
    tuned = load_drafter(str(recipe.folder / "draft"), target, pair.strategy)
    untuned = load_drafter(recipe.draft or str(recipe.folder / "prepared"), target, pair.strategy)
    untuned.full_form_bytes = tuned.full_form_bytes  # it has no full form on disk
    drafts: dict[str, Drafter] = {"untuned": untuned, "lookup": prompt_lookup(target)}
    if steps == 0:  # untuned and tuned are the same
        del drafts["untuned"]
    return drafts | {"tuned": tuned, "tuned+lookup": lookup_first(tuned, target.stops)}
