"""A run within `minutes`: steps timed on this machine decide how much of each stage is done.

The first answers are timed as they are made, and kept. What they and the training steps cost
decides how many answers there will be and how long is trained on them; what is left in the end goes
into timed prompts, whose number narrows the interval of the speed-up.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from typing import NamedTuple

from align.process import from_first
from distill.choice import chosen_before, with_choice
from distill.held_out import SHARE
from distill.models import Pair, TargetOfRun
from distill.prepare import stand_in
from distill.prompt_sets import Prompts
from distill.recipe import Recipe, RecipeError, read_yaml
from distill.run_folder import write_recipe
from distill.teacher.answers import (
    PROBE,
    answer_lengths,
    answer_prompts,
    seconds_each,
    to_answer,
)
from distill.teacher.states import layers_read
from distill.teacher.store import Answers, Store
from distill.timing import (
    evaluation_seconds,
    training_step,
    training_steps,
)

UNPLANNED = 0.05  # of the minutes: loading, fit, export, saving
MARGIN = 0.5  # minutes more than were lacking, since the next run's timings differ
MIN_TIMED = 32  # prompts; of fewer the interval says little
STARTED = time.monotonic()


def adopted(recipe: Recipe) -> Recipe:
    """The recipe with what an interrupted run of its folder had decided; without, as it is."""
    if recipe.drafter == "auto" and (choice := chosen_before(recipe.folder)):
        recipe = with_choice(recipe, choice)
    path = recipe.folder / "recipe.yaml"
    if recipe.minutes is None or recipe.max_answers is not None or not path.exists():
        return recipe
    found = read_yaml(path)
    if found.get("minutes") != recipe.minutes or found.get("max_answers") is None:
        return recipe
    return dataclasses.replace(
        recipe,
        max_answers=found["max_answers"],
        speed_prompts=found["speed_prompts"],
        training=recipe.training | {"max_steps": found["max_steps"]},
    )


class FirstAnswers(NamedTuple):
    """The first answers of a run, and the seconds that each took."""

    answers: Answers
    seconds: float


def first_answers(
    recipe: Recipe, pair: Pair, prompts: Prompts, target: TargetOfRun, store: Store
) -> FirstAnswers:
    """PROBE answers, and what those that are not at hand cost. A call of all processes."""
    some = to_answer(recipe, prompts.training.ids)[:PROBE]
    layers, taught = layers_read(recipe, pair), recipe.train_on_prompts
    answers = answer_prompts(recipe, some, target, store, layers, taught)
    return FirstAnswers(answers, seconds_each(recipe, some, target, store, layers))


def plan(
    recipe: Recipe,
    pair: Pair,
    prompts: Prompts,
    target: TargetOfRun,
    first: FirstAnswers,
) -> Recipe:
    """The recipe with `max_answers` and `max_steps` decided, printed, and written to its folder.

    A call of all processes. Raises RecipeError where the minutes are too few.
    """
    assert recipe.minutes is not None
    total = most_answers(recipe, prompts)
    answers, per_answer = first
    asked = prompts.training.ids * recipe.answers_per_prompt
    made = answers.store.at_hand(asked, recipe.train_on_prompts)
    model, token_ids = stand_in(recipe, pair, target.loaded)
    rows = pair.trained_rows(token_ids)
    per_step = training_step(recipe, pair, prompts.training.ids, model, rows)
    del model
    length = statistics.mean(answer_lengths(recipe, prompts.training.ids, answers))
    context = sum(map(len, prompts.training.ids)) / len(prompts.training.ids)
    per_step *= (context + length) / (context + recipe.answer_max_new_tokens)
    per_step *= 1 + SHARE  # held-out prompts are looked at meanwhile
    evaluation = evaluation_seconds(recipe, prompts, target.loaded, length)
    timed = min(recipe.speed_prompts, len(prompts.evaluation.ids))
    left = _left(recipe) - evaluation(timed)
    left, made, per_step = from_first((left, made, per_step))
    count, steps = split(recipe, left, made, total, per_answer, per_step)
    recipe = dataclasses.replace(
        recipe, max_answers=count, training=recipe.training | {"max_steps": steps}
    )
    print(
        f"plan for {recipe.minutes:g} minutes: {count} of {total} answers, {min(made, count)} of "
        f"them at hand ({max(0, count - made) * per_answer / 60:.1f} min), {steps} steps "
        f"({steps * per_step / 60:.1f} min), evaluation ({evaluation(timed) / 60:.1f} min)"
    )
    write_recipe(recipe)
    return recipe


def split(
    recipe: Recipe,
    left: float,
    first: int,
    total: int,
    per_answer: float,
    per_step: float,
) -> tuple[int, int]:
    """How many answers and training steps take `left` seconds, `first` answers being at hand.

    Every row is trained on `num_train_epochs` times, never more often: where `total` answers
    leave time, it stays. per_answer, per_step: seconds. Raises RecipeError where PROBE answers and
    the training on them do not fit.
    """
    steps_each = training_steps(recipe, total) / total
    trained = steps_each * per_step
    made = min(PROBE, total)
    lacking = max(0, made - first) * per_answer + made * trained - left
    if lacking > 0:
        assert recipe.minutes is not None
        needed = recipe.minutes + lacking / 60 / (1 - UNPLANNED) + MARGIN
        raise RecipeError(
            f"minutes is {recipe.minutes:g}, too few here: {made} answers of {per_answer:.2f} s, "
            f"the training on them in steps of {per_step:.2f} s, and the evaluation do not fit. "
            f"Give {math.ceil(needed)} or more, or fewer max_eval_prompts."
        )
    with_new = (left + first * per_answer) / (per_answer + trained)
    count = min(total, math.floor(min(left / trained, with_new)))
    return count, max(1, math.ceil(steps_each * count))


def most_answers(recipe: Recipe, prompts: Prompts) -> int:
    """How many answers there can be."""
    return len(prompts.training.ids) * recipe.answers_per_prompt


def spend_rest(recipe: Recipe, prompts: Prompts, target: TargetOfRun, answers: Answers) -> Recipe:
    """The recipe with as many `speed_prompts` as the rest of its minutes allows, written."""
    length = statistics.mean(answer_lengths(recipe, prompts.training.ids, answers))
    seconds = evaluation_seconds(recipe, prompts, target.loaded, length)
    most = len(prompts.evaluation.ids)
    timed = range(min(MIN_TIMED, most), most + 1)
    fits = [count for count in timed if seconds(count) <= _left(recipe)]
    recipe = dataclasses.replace(recipe, speed_prompts=max(fits, default=timed[0]))
    print(f"{_left(recipe) / 60:.1f} minutes are left: {recipe.speed_prompts} prompts are timed")
    write_recipe(recipe)
    return recipe


def _left(recipe: Recipe) -> float:
    """Seconds from now until the minutes are over, less what is never planned."""
    assert recipe.minutes is not None
    return 60 * recipe.minutes * (1 - UNPLANNED) - (time.monotonic() - STARTED)
