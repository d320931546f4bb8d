"""The report of a run whose target is behind a server: both servers measured from outside."""

from __future__ import annotations

import shlex

from align.files import write_json
from align.sources import read_json
from distill.card import USUAL_GAMMA, write_card
from distill.held_out import held_out_curve
from distill.models import Pair
from distill.prepare import lost_mass_of
from distill.prompt_sets import Prompts
from distill.recipe import Recipe
from distill.run_folder import provenance
from distill.teacher.answers import USED
from eval.decoding.loop import Decoding
from eval.engines.local_vllm import speculation
from eval.engines.served import measure_servers
from eval.engines.server import ServerError
from eval.engines.vllm import VllmServer
from eval.reporting.report import Report, write_report


def evaluate_served(recipe: Recipe, pair: Pair, prompts: Prompts, seconds: float) -> Report | None:
    """The report of `speculative_url` against `answer_url`, with provenance and model card.

    None where no speculative server is named: then the draft is all there is, and how to serve it
    is printed. Raises ServerError where one is named and cannot be measured, or not to the end;
    what was measured by then is in the report. seconds: that the run has taken.
    """
    folder = recipe.folder
    made_by = provenance(recipe, prompts, lost_mass_of(recipe), seconds)
    write_json(folder / "provenance.json", made_by)
    served = read_json(folder / USED)["key"]["served model"]
    advice = (
        f"Serve the target with this draft where {folder / 'draft'} can be read:\n\n"
        f"    {serving_command(recipe, pair, served)}\n\nand run the same command again"
    )
    if recipe.speculative_url is None:
        print(f"\nThe draft is made, and not measured. {advice} with --speculative_url http://….")
        return None
    assert recipe.answer_url is not None
    try:
        report = measure_servers(
            {"tuned": VllmServer(recipe.speculative_url, model=served)},
            VllmServer(recipe.answer_url, model=served),
            prompts.evaluation.drawn(recipe.speed_prompts, recipe.seed),
            Decoding(recipe.sampling, frozenset(), recipe.max_new_tokens, recipe.seed),
            made_by,
            target=recipe.target,
            gamma=recipe.gamma,
        )
    except ServerError as error:
        raise ServerError(f"{error}\nThe draft is made, and kept. {advice}.") from None
    report = report.model_copy(update={"held_out": held_out_curve(folder, prompts.held_out)})
    write_report(folder / "report", report)
    write_card(folder / "draft", folder, [report])
    broken_off = [m.reason for m in report.last[1].missing if m.field == "prompts"]
    if broken_off:
        raise ServerError(
            f"measured in part only, {broken_off[0]} The report has that part; run the same "
            "command again for the whole."
        )
    return report


def serving_command(recipe: Recipe, pair: Pair, served: str) -> str:
    """What starts vLLM on the target with this run's draft, under the name it has now."""
    draft, own_ids = (recipe.folder / "draft").resolve(), pair.retokenizer is not None
    words = ["vllm", "serve", recipe.target, "--served-model-name", served]
    return shlex.join([*words, *speculation(draft, recipe.gamma or USUAL_GAMMA, own_ids=own_ids)])
