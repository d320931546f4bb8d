"""`drafter: auto`: which kind of draft, and how deep, makes this target fastest on this machine.

Every kind at every depth is priced: its steps are timed with untrained weights. The few best are
trained equally long on the run's first answers. The one that a replay of some texts
predicts to be fastest is chosen; whether it is faster than the pruned one is then measured on other
texts. If that is not shown, the pruned one is taken, since every engine runs it.
"""

from __future__ import annotations

import warnings

from accelerate import PartialState

from align.files import remove
from align.machine import free_memory, from_first
from distill.drafters.kind import kinds
from distill.export import export_draft
from distill.models import Pair, TargetOfRun, mask_of
from distill.plan import Clock, StepClock, draft_costs
from distill.prepare import prepare_draft, stand_in, stand_in_drafter
from distill.prompt_sets import Prompts
from distill.recipe import Recipe, build_recipe
from distill.teacher.states import cache_states, states_of
from distill.teacher.store import Answers
from distill.trainer import build_trainer, distil
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding, DraftLength
from eval.measuring.cost import best_gamma
from eval.measuring.metrics import Rows, difference, measure_rows
from eval.measuring.replay import Place, best_length, places, spent
from eval.measuring.runs import StepCosts
from eval.prompts import PromptSet
from eval.reporting.report import Candidate, DrafterChoice, Measured

PLAIN = "pruned"  # the kind that every engine runs
DEEPEST = 4  # layers kept of the target
TRAINED = 3  # candidates
SHARE = 0.1  # of the minutes, for all of it
FIT_TOKENS = 5_000  # that the candidates are fitted on
# Assumed alpha of a tuned draft, of two layers where it keeps any, and the gain of a layer more: as
# in the code run with two and three layers (docs/lab-notes.md).
ALPHA, OF_A_LAYER = 0.5, 0.03
FOLDER = "candidates"  # deleted after the comparison


def candidates(recipe: Recipe, pair: Pair) -> tuple[dict[str, Recipe], dict[str, str]]:
    """A recipe for each kind and depth, and the kinds that this one rules out, with the reason."""
    tried: dict[str, Recipe] = {}
    ruled_out: dict[str, str] = {}
    most = pair.target.config["num_hidden_layers"] - 1
    for kind, traits in kinds().items():
        if "target" not in traits.starts_from:
            continue
        for depth in range(1, min(most, DEEPEST) + 1) if traits.language_model else (1,):
            name = f"{kind}-{depth}" if traits.language_model else kind
            keys = {
                "drafter": kind,
                "num_draft_layers": depth,
                "output_dir": str(recipe.folder / FOLDER / name),
                "minutes": None,
                "fit_tokens": min(recipe.fit_tokens, FIT_TOKENS),
                # stopped by the clock, so no schedule of a known length
                "lr_scheduler_type": "constant_with_warmup",
                "max_steps": 10**6,
                "warmup_steps": 5,
                "save_strategy": "no",
            }
            try:
                candidate = build_recipe(recipe.values() | keys)
                mask_of(candidate, pair.target)
                tried[name] = candidate
            except ValueError as error:
                ruled_out[kind] = str(error)
    return tried, ruled_out


def price(
    tried: dict[str, Recipe], pair: Pair, prompts: Prompts, target: TargetOfRun
) -> dict[str, StepCosts]:
    """The step costs of each, printed with what they allow."""
    costs: dict[str, StepCosts] = {}
    for name, recipe in tried.items():
        prepared = stand_in(recipe, pair, target.loaded)
        drafter = stand_in_drafter(recipe, pair, prepared, target.loaded)
        costs[name] = draft_costs(recipe, prompts, target.loaded, drafter)
        del prepared, drafter
        free_memory()
        print(
            f"{name}: a drafted token costs {_c(costs[name]):.3f} of a target step; expected "
            f"speed-up {expected(recipe, costs[name]):.2f}"
        )
    return costs


def expected(recipe: Recipe, costs: StepCosts) -> float:
    """The speed-up at the alpha that a tuned draft of this kind and depth is taken to reach."""
    more = recipe.num_draft_layers - 2 if recipe.kind.language_model else 0
    return best_gamma(ALPHA + OF_A_LAYER * more, costs)[1]


def _c(costs: StepCosts) -> float:
    """Of a drafted token in a draft of the longest length, in steps of the target."""
    return float(costs.draft(costs.max_gamma)) / costs.max_gamma / costs.target_step


def few_best(tried: dict[str, Recipe], costs: dict[str, StepCosts]) -> list[str]:
    """The pruned draft of the best depth, the best of each other kind, then the next best."""
    ranked = sorted(tried, key=lambda name: -expected(tried[name], costs[name]))
    of_kind = {tried[name].kind_name: name for name in reversed(ranked)}
    plain = of_kind.pop(PLAIN)
    firsts = [name for name in ranked if name in of_kind.values()]
    others = [name for name in ranked if name not in (plain, *firsts)]
    return [plain, *firsts, *others][:TRAINED]


def compare(
    recipe: Recipe,
    pair: Pair,
    prompts: Prompts,
    target: TargetOfRun,
    answers: Answers,
    clock: Clock,
) -> DrafterChoice:
    """What is chosen, and what it was compared with. answers: the run's first ones.

    A call of all processes.
    """
    assert recipe.minutes is not None
    began = clock.seconds()
    with PartialState().main_process_first():
        remove(recipe.folder / FOLDER)  # of a run that was cut before it had chosen
    tried, ruled_out = candidates(recipe, pair)
    costs = price(tried, pair, prompts, target)
    few = few_best(tried, costs)
    # half of the time that is left is for preparing and replaying
    remaining = 60 * recipe.minutes * SHARE - (clock.seconds() - began)
    seconds = from_first(max(0.0, remaining / 2 / len(few)))
    for name in few:
        cache_states(tried[name], pair, target, answers)
        with PartialState().main_process_first():
            prepare_draft(tried[name], pair, target, answers)
    target.release()  # as in any run, it is not in memory while a draft is trained
    for name in few:
        train(tried[name], pair, target, answers, seconds)

    lengths: dict[str, DraftLength] = {}
    trained: dict[str, Measured] = {}
    measured: dict[str, Measured] = {}
    held_out: dict[str, Rows] = {}
    for name in few:
        texts = places_of(tried[name], pair, target, prompts.tuning)
        lengths[name] = best_length([*texts.values()], costs[name], recipe.max_gamma)
        rows = speedup_rows(texts, costs[name], lengths[name])
        trained[name] = from_first(measure_rows("speedup", rows))
        print(f"{name}, trained for {seconds:.0f} s: predicted speed-up {trained[name]:.2f}")
    plain, best = few[0], max(few, key=lambda name: trained[name].mean)
    for name in dict.fromkeys((plain, best)) if prompts.held_out.ids else ():
        texts = places_of(tried[name], pair, target, prompts.held_out)
        held_out[name] = speedup_rows(texts, costs[name], lengths[name])
        measured[name] = from_first(measure_rows("speedup", held_out[name]))
    winner, why = plain, f"{plain} is the fastest"
    if best != plain:
        gain = None
        if held_out:
            gain = from_first(difference("speedup", held_out[best], held_out[plain]))
        why = f"{best} and {plain} are not told apart: {plain}, since every engine runs it"
        if gain is not None and gain.bounds[0] > 0:
            winner, why = best, f"{best} is {gain:.2f} faster than {plain} on other texts"
    print(f"chosen: {why}")
    PartialState().wait_for_everyone()  # no process reads the candidates any more
    if PartialState().is_main_process:
        remove(recipe.folder / FOLDER)
    return DrafterChoice(
        candidates=[
            Candidate(
                drafter=candidate.kind_name,
                layers=candidate.num_draft_layers if candidate.kind.language_model else None,
                c=_c(costs[name]),
                expected_speedup=expected(candidate, costs[name]),
                trained=trained.get(name),
                measured=measured.get(name),
                chosen=name == winner,
            )
            for name, candidate in tried.items()
        ],
        ruled_out=ruled_out,
        trained_seconds=seconds,
        why=why,
    )


def train(
    recipe: Recipe,
    pair: Pair,
    target: TargetOfRun,
    answers: Answers,
    seconds: float,
) -> None:
    """Leave a candidate's `draft/`, trained for so many seconds from what was prepared."""
    prepared = prepare_draft(recipe, pair, target, answers)
    trainer = build_trainer(recipe, pair, prepared, answers, states_of(recipe, pair, answers))
    trainer.add_callback(StepClock(seconds))
    tuned = distil(trainer, recipe)
    if tuned is not None:
        with warnings.catch_warnings():  # about its full form, which is not kept
            warnings.simplefilter("ignore", UserWarning)
            export_draft(recipe, pair, prepared, tuned, answers)
    PartialState().wait_for_everyone()
    del prepared, trainer, tuned
    free_memory()


def places_of(
    recipe: Recipe, pair: Pair, target: TargetOfRun, prompts: PromptSet
) -> dict[str, list[Place]]:
    """By prompt, what a candidate's draft would have done at each place of the target's text."""
    loaded = target.loaded
    drafter = load_drafter(str(recipe.folder / "draft"), loaded, pair.strategy)
    decoding = Decoding(recipe.sampling, loaded.stops, recipe.max_new_tokens, recipe.seed)
    texts = places(loaded, drafter, prompts, decoding, recipe.max_gamma)
    ids = (prompt.id for prompt in prompts.prompts)
    return {prompt: text for prompt, text in zip(ids, texts, strict=True) if text}


def speedup_rows(texts: dict[str, list[Place]], costs: StepCosts, length: DraftLength) -> Rows:
    """Of each text the seconds without a draft, and with drafts of that length."""
    rows: Rows = {}
    for prompt, text in texts.items():
        seconds, tokens = spent(text, length, costs)
        rows[prompt] = None, (tokens * costs.target_step, seconds)
    return rows
