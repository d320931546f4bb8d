"""A run's plan: how its minutes are shared out, that it keeps to it, that it goes on with it."""

import dataclasses
import json
import re
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

from align.sources import load_model
from distill import held_out, models, plan, train
from distill.models import TargetOfRun, check_models
from distill.plan import Costs, plan_within, read_plan, training_step
from distill.prepare import stand_in
from distill.prompt_sets import collect_prompts
from distill.recipe import RecipeError, load_recipe, read_yaml
from distill.run_folder import refuse_another_run
from distill.teacher.answers import open_store
from distill.train import run

EPOCHS = {"max_steps": -1, "num_train_epochs": 2.0}
COSTS = Costs(answer=0.5, step=0.4, timed=5.0, evaluation=100.0)


@pytest.fixture
def minutes(job, tmp_path):
    """Makes the recipe of a run of so many minutes."""
    return lambda count, **changes: job(tmp_path / "run", minutes=count, **(EPOCHS | changes))


def prompts(training=10_000, evaluation=64, held_out=0):
    """Stand-ins for so many prompts."""
    parts = {"training": training, "evaluation": evaluation, "held_out": held_out}
    return SimpleNamespace(
        **{name: SimpleNamespace(ids=[[1] * 6] * count) for name, count in parts.items()}
    )


def test_answers_and_steps_fill_what_the_evaluation_leaves(minutes):
    decided = plan_within(minutes(20.0), prompts(), 0, COSTS, 1000)
    assert decided.timed == 3  # speed_prompts
    left = 1000 - 100 - 3 * 5
    assert decided.steps == -(-decided.answers * 2 // 4)
    assert decided.answers * 0.5 + decided.steps * 0.4 == pytest.approx(left, abs=1)
    assert sum(decided.minutes.values()) == pytest.approx(1000 / 60, abs=0.02)


@pytest.mark.parametrize("seconds", [400, 4000])
def test_held_out_prompts_are_paid_for_by_their_number(minutes, seconds):
    recipe = minutes(200.0)
    decided = plan_within(recipe, prompts(held_out=32), 0, COSTS, seconds)
    batch = plan.batch_size(recipe)
    times = held_out.affordable(32, decided.steps, batch)
    expected = times * 32 * held_out.FORWARD / batch * COSTS.step
    assert decided.held_out == pytest.approx(expected, rel=0.2)
    assert (times == held_out.FEWEST) == (seconds == 400)
    assert sum(decided.minutes.values()) == pytest.approx(seconds / 60, rel=0.01)
    assert decided.steps < plan_within(recipe, prompts(), 0, COSTS, seconds).steps


@pytest.mark.parametrize("there", [300, 5000])
def test_answers_at_hand_cost_nothing(minutes, there):
    none, some = (plan_within(minutes(20.0), prompts(), n, COSTS, 1000) for n in (0, there))
    new = max(0, some.answers - there)
    assert some.answers > none.answers
    assert new * 0.5 + some.steps * 0.4 == pytest.approx(1000 - 115, abs=1)


def test_the_evaluation_takes_a_third_at_most_and_times_enough_prompts(minutes):
    plenty = minutes(20.0, speed_prompts=64)
    third = plan_within(plenty, prompts(), 0, COSTS, 1000)
    assert third.timed == 60  # (400 - 100) / 5
    assert third.timing == 300
    dear = dataclasses.replace(COSTS, timed=40.0)
    fewest = plan_within(plenty, prompts(), 0, dear, 1000)
    assert fewest.timed == plan.FEWEST
    assert fewest.timing == plan.FEWEST * 40
    assert plan_within(plenty, prompts(evaluation=9), 0, dear, 1000).timed == 9


def test_prompts_that_run_out_are_not_trained_on_more_often(minutes):
    decided = plan_within(minutes(20.0), prompts(800), 0, COSTS, 9e9)
    assert (decided.answers, decided.steps) == (800, 400)


def test_minutes_too_few_are_refused_with_what_they_would_have_to_be(minutes):
    with pytest.raises(RecipeError, match=r"minutes is 0.01, too few here: .* Give \d+ or more"):
        run(minutes(0.01))
    refuse_another_run(minutes(5.0))  # the same folder may be given more


def test_the_minutes_that_it_names_are_enough_where_training_is_dear(minutes, monkeypatch):
    monkeypatch.setattr(plan, "training_step", lambda *_: 30.0)
    with pytest.raises(RecipeError, match="too few") as refused:
        run(minutes(0.5))
    named = float(re.search(r"Give (\d+) or more", str(refused.value))[1])
    with pytest.raises(RecipeError, match="too few"):
        run(minutes(named - 2))
    assert run(minutes(named)) == 0


def test_a_dry_run_prints_the_plan_of_what_is_asked_for(minutes, job, tmp_path, capsys):
    run(job(tmp_path / "run", **EPOCHS, max_answers=3, dry_run=True))
    shown = capsys.readouterr().out
    assert "answers: 3 answers (0 at hand), 0.0 min" in shown
    assert "[the answer begins here]\n" in shown
    assert "training: 2 steps, 0.0 min" in shown
    assert "evaluation: 3 prompts timed, " in shown
    assert re.search("memory: .* GiB of weights and tensors at most, while ", shown)
    assert "a perfect draft reaches" in shown
    with pytest.raises(RecipeError, match=r"minutes is 0\.001, too few here"):
        run(minutes(0.001, dry_run=True))
    assert not (tmp_path / "run").exists()


def test_minutes_do_not_take_over_a_run_that_was_made_without(minutes, job, tmp_path):
    run(job(tmp_path / "run", **EPOCHS))
    with pytest.raises(RecipeError, match=r"minutes: None -> 20\.0"):
        refuse_another_run(minutes(20.0))


def test_a_run_decides_writes_it_down_follows_it_and_reports(minutes, capsys):
    recipe = minutes(5.0)
    assert run(recipe) == 0
    assert "training: 6 steps, " in capsys.readouterr().out
    decided = read_plan(recipe.folder)
    assert (decided.answers, decided.steps, decided.timed) == (11, 6, 3)
    assert set(decided.memory) == {
        "answering",
        "preparing",
        "distilling",
        "exporting",
        "evaluating",
    }
    values = read_yaml(recipe.folder / "recipe.yaml")
    keys = {key: values[key] for key in ("max_answers", "max_steps", "speed_prompts")}
    assert keys == {"max_answers": 11, "max_steps": 6, "speed_prompts": 3} == decided.decided()
    state = json.loads((recipe.folder / "checkpoint-6" / "trainer_state.json").read_text())
    assert state["max_steps"] == 6
    report = json.loads((recipe.folder / "report" / "report.json").read_text())
    assert report["drafts"]["tuned"]["speedup"]["n"] == 3
    again = load_recipe(["--recipe", str(recipe.folder / "recipe.yaml")])  # repeats the run
    assert again.max_answers == 11
    assert not again.planned


def test_an_interrupted_run_goes_on_with_what_it_decided(minutes, monkeypatch):
    recipe, seen = minutes(5.0), []

    def cut(*given):
        seen.append(given)
        raise KeyboardInterrupt

    few = plan.plan_within

    def fewer(*given):
        return dataclasses.replace(few(*given), answers=7, steps=5)

    with monkeypatch.context() as first:
        first.setattr(train, "plan_within", fewer)
        first.setattr(train, "make_draft", cut)
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
    assert [answer.index for answer in seen[0][3]] == list(range(7))
    refuse_another_run(recipe)
    monkeypatch.setattr(train, "make_plan", cut)  # it is not decided a second time
    assert run(recipe) == 0
    assert read_plan(recipe.folder).steps == 5
    with pytest.raises(RecipeError, match="minutes: 5"):
        refuse_another_run(dataclasses.replace(recipe, minutes=6.0))


@pytest.fixture
def pruned_run(minutes):
    """Recipe, pair, prompts and target of a run of a pruned draft."""
    recipe = minutes(5.0, draft=None, num_draft_layers=1, draft_vocab_size=270)
    pair = check_models(recipe)
    parts = collect_prompts(recipe, pair.target)
    return recipe, pair, parts, TargetOfRun(recipe, pair, parts)


def test_a_training_step_is_timed_without_the_target(pruned_run, monkeypatch):
    recipe, pair, parts, target = pruned_run
    loaded, step = [], plan.training_step

    def load(*given, load=models.load_target):
        target = load(*given)
        loaded.append(weakref.ref(target.model))
        return target

    def alone(*given):
        assert [model() for model in loaded] == [None]
        return step(*given)

    monkeypatch.setattr(models, "load_target", load)
    monkeypatch.setattr(plan, "training_step", alone)
    store = open_store(recipe, pair.target)
    steps, costs = plan.measured_costs(recipe, pair, parts, target, store, 24)
    assert min(dataclasses.astuple(costs)) > 0
    assert steps.max_gamma == recipe.max_gamma


def test_timing_a_training_step_leaves_the_target_as_it_was(pruned_run):
    recipe, pair, parts, target = pruned_run
    before = load_model(recipe.target, torch.float32).state_dict()
    prepared = stand_in(recipe, pair, target.loaded)
    start = {name: tensor.clone() for name, tensor in prepared.model.state_dict().items()}
    assert training_step(recipe, pair, prepared, parts.training.ids) > 0
    after = target.loaded.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    moved = prepared.model.state_dict()
    assert any(not torch.equal(moved[name], tensor) for name, tensor in start.items())


def test_dear_steps_are_timed_a_few_times_only(pruned_run, monkeypatch):
    recipe, pair, parts, target = pruned_run
    monkeypatch.setattr(plan, "LIMIT", 0.0)
    prepared = stand_in(recipe, pair, target.loaded)
    clock = []

    class Watched(plan.StepClock):
        def __init__(self, limit):
            super().__init__(limit)
            clock.append(self)

    monkeypatch.setattr(plan, "StepClock", Watched)
    training_step(recipe, pair, prepared, parts.training.ids)
    assert len(clock[0].seconds) == 2
    calls = []
    plan.median_seconds(lambda: calls.append(time.sleep(0.001)))
    assert len(calls) == 2
