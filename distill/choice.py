"""`drafter: auto`: which kind of draft, and how deep, makes this target fastest on this machine.

Made by the functions that every run makes its draft by, on its first answers, in three rounds.
Every kind at every depth is priced: its steps timed, of weights that are no draft's yet. Then the
pruned draft of every depth, and each other kind at the depth that serves it best, is prepared and
replayed untuned (eval/measuring/replay.py). The best few are trained for as many seconds each, and
replayed again. What is chosen has the highest speed-up that the replay predicts.
"""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

from accelerate import PartialState

from align.atomic import remove, write_json
from align.process import free_memory, from_first
from align.sources import read_json
from distill.drafters.base import kind_of
from distill.export import export_draft
from distill.models import PRUNED, Pair, TargetOfRun
from distill.prepare import prepare_draft
from distill.prompts import Prompts
from distill.recipe import Kind, Recipe, RecipeError, build_recipe
from distill.run_folder import write_recipe
from distill.teacher.states import cache_states
from distill.teacher.store import Answers
from distill.timing import training_step
from distill.trainer import distil_draft
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding
from eval.measuring.cost import ceiling_speedup
from eval.measuring.log import StepCosts
from eval.measuring.metrics import measure, share
from eval.measuring.replay import best_length, places, spent
from eval.measuring.timing import CHOICE_REPEATS, step_costs
from eval.prompts import PromptSet
from eval.reporting.report import Candidate, DrafterChoice, Replayed

KINDS: tuple[Kind, ...] = ("pruned", "features", "parallel", "recurrent", "eagle3", "medusa")
DEPTHS = (1, 2, 3, 4)  # layers kept of the target
HEALED = 3  # candidates
HEAL_PART = 0.025  # of the minutes, for each of them
HEAL_SECONDS = 30.0  # and without minutes
FIT_TOKENS = 5_000  # that the untuned drafts are fitted on
CHOICE = "choice.json"
FOLDER = "choice"  # the candidates', as long as they are compared


def chosen_before(folder: Path) -> DrafterChoice | None:
    """What `choose` has found in a run's folder."""
    path = folder / CHOICE
    return DrafterChoice.model_validate(read_json(path)) if path.exists() else None


def with_choice(recipe: Recipe, choice: DrafterChoice) -> Recipe:
    """The recipe with what was chosen in place of `auto`."""
    (one,) = (one for one in choice.candidates if one.chosen)
    layers = one.layers or recipe.num_draft_layers
    decided = {"drafter": one.drafter, "num_draft_layers": layers}
    return build_recipe(recipe.values() | decided)


def candidates(recipe: Recipe, pair: Pair) -> tuple[list[Recipe], dict[str, str]]:
    """A recipe for each kind and depth, and the kinds that this one rules out, with the reason."""
    found: list[Recipe] = []
    ruled_out: dict[str, str] = {}
    most = pair.target.config["num_hidden_layers"] - 1
    for kind in KINDS:
        for depth in DEPTHS if kind in PRUNED else DEPTHS[:1]:
            if depth > most:
                continue
            name = f"{kind}-{depth}" if kind in PRUNED else kind
            keys = {
                "drafter": kind,
                "num_draft_layers": depth,
                "output_dir": str(recipe.folder / FOLDER / name),
                "minutes": None,
                "max_answers": None,
                "fit_tokens": min(recipe.fit_tokens, FIT_TOKENS),
            }
            try:
                found.append(build_recipe(recipe.values() | keys))
            except RecipeError as error:
                ruled_out[kind] = str(error)
    return found, ruled_out


def choose(
    recipe: Recipe,
    pair: Pair,
    prompts: Prompts,
    target: TargetOfRun,
    answers: Answers,
) -> Recipe:
    """The recipe with `drafter` and `num_draft_layers` decided, printed, and written.

    answers: the first ones of the run. A call of all processes.
    """
    with PartialState().main_process_first():
        remove(recipe.folder / FOLDER)  # of a run that was cut before it had chosen
    comparison = Comparison(recipe, pair, prompts, target)
    comparison.price()
    tried = comparison.tried
    untuned = [one for one in tried if one.kind == "pruned"]
    for one in untuned:
        comparison.replay_untuned(one, answers)
    depth = max(untuned, key=comparison.speedup).num_draft_layers
    for one in tried:
        if one.kind != "pruned" and (one.kind not in PRUNED or one.num_draft_layers == depth):
            untuned.append(one)
            comparison.replay_untuned(one, answers)
    best = sorted(untuned, key=comparison.speedup, reverse=True)[:HEALED]
    comparison.heal(best, answers)
    winner = max(best, key=comparison.speedup)
    choice = comparison.choice(winner)
    recipe = with_choice(recipe, choice)
    if PartialState().is_main_process:
        remove(recipe.folder / FOLDER)
        write_json(recipe.folder / CHOICE, choice.model_dump(mode="json"))
        on = f" of {recipe.num_draft_layers} layers" if recipe.kind in PRUNED else ""
        print(f"chosen: {recipe.kind}{on}")
    write_recipe(recipe)
    return recipe


class Comparison:
    """Kinds and depths of draft for a run, and what is known of each, by its folder."""

    def __init__(self, recipe: Recipe, pair: Pair, prompts: Prompts, target: TargetOfRun) -> None:
        self.pair, self.prompts, self.target = pair, prompts, target
        self.sampling = recipe.sampling
        self.max_gamma, self.max_new_tokens = recipe.max_gamma, recipe.max_new_tokens
        self.seed = recipe.seed
        minutes = recipe.minutes
        self.seconds = HEAL_SECONDS if minutes is None else 60 * minutes * HEAL_PART
        self.tried, self.ruled_out = candidates(recipe, pair)
        self.costs: dict[Path, StepCosts] = {}
        self.untuned: dict[Path, Replayed] = {}
        self.healed: dict[Path, Replayed] = {}

    def speedup(self, one: Recipe) -> float:
        return (self.healed.get(one.folder) or self.untuned[one.folder]).speedup.mean

    def price(self) -> None:
        """Time the steps of all, and print what they allow."""
        target, ids = self.target.loaded, self.prompts.tuning.ids
        context = sum(map(len, ids)) // len(ids) + self.max_new_tokens // 2
        calls: StepCosts | None = None  # of the target, on 1 to max_gamma + 1 tokens
        for one in self.tried:
            model, token_ids = kind_of(one).stand_in(one, self.pair, target)
            drafter = kind_of(one).drafter(one, self.pair, model, token_ids, target)
            if calls is None:
                calls = step_costs(
                    target.decoder, drafter, context, self.max_gamma, self.sampling, CHOICE_REPEATS
                )
            # beside single steps of the target, so that a slow moment is one for both
            own = step_costs(target.decoder, drafter, context, 0, self.sampling, CHOICE_REPEATS)
            scale = calls.target_step / own.target_step
            step, block = own.draft_step * scale, own.draft_block * scale
            costs = dataclasses.replace(calls, draft_step=step, draft_block=block)
            self.costs[one.folder] = from_first(costs)
            del model, drafter
            free_memory()
        for one in self.tried:
            print(
                f"{one.folder.name}: a drafted token costs {self._c(one):.3f} of a target step, a "
                f"perfect draft would reach {self.ceiling(one):.2f}x"
            )
        for kind, reason in self.ruled_out.items():
            print(f"{kind}: ruled out, {reason}")

    def ceiling(self, one: Recipe) -> float:
        """The speed-up of a perfect draft at a candidate's cost."""
        return ceiling_speedup(self.costs[one.folder])

    def _c(self, one: Recipe) -> float:
        """Of a drafted token, in steps of the target, in a draft of the longest length."""
        costs = self.costs[one.folder]
        return float(costs.draft(self.max_gamma)) / self.max_gamma / costs.target_step

    def replay_untuned(self, one: Recipe, answers: Answers) -> None:
        """Prepare a candidate, and replay it."""
        cache_states(one, self.pair, self.target, answers)
        with PartialState().main_process_first():
            prepare_draft(one, self.pair, self.target, answers)
        self.untuned[one.folder] = self._replayed(one, "prepared", self.prompts.tuning)

    def heal(self, some: list[Recipe], answers: Answers) -> None:
        """Train each for as long, and replay it on more prompts."""
        for one in some:
            self._train(one, answers)
        both = (self.prompts.tuning, self.prompts.held_out)
        more = PromptSet(
            self.prompts.tuning.source,
            [prompt for part in both for prompt in part.prompts],
            [ids for part in both for ids in part.ids],
        )
        for one in some:
            self.healed[one.folder] = self._replayed(one, "draft", more)

    def _train(self, one: Recipe, answers: Answers) -> None:
        ids = self.prompts.training.ids
        model, token_ids = kind_of(one).stand_in(one, self.pair, self.target.loaded)
        rows = self.pair.trained_rows(token_ids)
        steps = from_first(
            max(1, round(self.seconds / training_step(one, self.pair, ids, model, rows)))
        )
        del model
        self.target.release()  # as in any run, it is not in memory while a draft is trained
        prepared = prepare_draft(one, self.pair, self.target, answers)
        warmup = min(one.training.get("warmup_steps", 0), steps // 5)
        short = {"max_steps": steps, "warmup_steps": warmup, "save_strategy": "no"}
        brief = dataclasses.replace(one, training=one.training | short)
        tuned = distil_draft(brief, self.pair, prepared, answers)
        if tuned is not None:
            with warnings.catch_warnings():  # of its full form, which nobody keeps
                warnings.simplefilter("ignore", UserWarning)
                export_draft(brief, self.pair, prepared, tuned, answers)
        PartialState().wait_for_everyone()
        del prepared, tuned
        free_memory()

    def _replayed(self, one: Recipe, which: str, prompts: PromptSet) -> Replayed:
        """A candidate's draft, `prepared` or trained, on the target's texts to these prompts."""
        target, costs = self.target.loaded, self.costs[one.folder]
        drafter = load_drafter(str(one.folder / which), target, self.pair.strategy)
        how = Decoding(self.sampling, target.stops, self.max_new_tokens, self.seed)
        texts = [t for t in places(target, drafter, prompts, how, self.max_gamma) if t]
        length = best_length(texts, costs, self.max_gamma)
        drafted = [spent(text, length, costs) for text in texts]
        rows = [(tokens * costs.target_step, seconds) for seconds, tokens in drafted]
        first = [(None, sum(place.accepted > 0 for place in text), len(text)) for text in texts]
        found = from_first(
            Replayed(
                alpha=share("alpha", first),
                speedup=measure("speedup", rows),
                gamma=length.gamma,
                stop_below=length.stop_below,
            )
        )
        alpha, speedup = found.alpha, found.speedup
        print(
            f"{one.folder.name}, {'untuned' if which == 'prepared' else 'trained briefly'}: alpha "
            f"{alpha:.2f}, predicted speed-up {speedup:.2f}"
        )
        return found

    def choice(self, winner: Recipe) -> DrafterChoice:
        """For the report."""
        return DrafterChoice(
            candidates=[
                Candidate(
                    drafter=one.kind,
                    layers=one.num_draft_layers if one.kind in PRUNED else None,
                    c=self._c(one),
                    ceiling_speedup=self.ceiling(one),
                    untuned=self.untuned.get(one.folder),
                    healed=self.healed.get(one.folder),
                    chosen=one is winner,
                )
                for one in self.tried
            ],
            ruled_out=self.ruled_out,
            healed_seconds=self.seconds,
        )
