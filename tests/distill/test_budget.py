"""A run within `minutes`: what it decides, that it keeps to it, that it goes on with it."""

import dataclasses
import json
import re

import pytest
import torch

from align.sources import load_model
from distill import budget, dry_run, train
from distill.budget import adopted, split
from distill.models import TargetOfRun, check_models
from distill.prompt_sets import collect_prompts
from distill.recipe import RecipeError, load_recipe, read_yaml
from distill.run_folder import refuse_another_run
from distill.timing import training_step
from distill.train import run

EPOCHS = {"max_steps": -1, "num_train_epochs": 2.0}


@pytest.fixture
def minutes(job, tmp_path, monkeypatch):
    """Makes the recipe of a run of so many minutes, of which none are gone."""

    def make(count, **changes):
        monkeypatch.setattr(budget, "STARTED", budget.time.monotonic())
        return job(tmp_path / "run", minutes=count, **(EPOCHS | changes))

    return make


def test_answers_and_steps_fill_what_is_left(minutes):
    recipe = minutes(20.0)
    # 600 s: 100 answers are there; each more costs 0.5 s, and each is trained on in 2 / 4 steps
    count, steps = split(recipe, 600, 100, 10_000, per_answer=0.5, per_step=0.4)
    assert steps == -(-count * 2 // 4)
    assert (count - 100) * 0.5 + steps * 0.4 == pytest.approx(600, abs=1)


def test_prompts_that_run_out_are_not_trained_on_more_often(minutes):
    assert split(minutes(20.0), 9e9, 100, 800, per_answer=0.5, per_step=0.4) == (800, 400)


def test_minutes_too_few_are_refused_with_what_they_would_have_to_be(minutes):
    with pytest.raises(RecipeError, match=r"minutes is 0.01, too few here: .* Give \d+ or more"):
        run(minutes(0.01))
    refuse_another_run(minutes(5.0))  # the same folder may be given more


def test_the_minutes_that_it_names_are_enough_where_training_is_dear(minutes, monkeypatch):
    monkeypatch.setattr(budget, "training_step", lambda *_: 30.0)
    with pytest.raises(RecipeError, match="too few") as refused:
        run(minutes(0.5))
    named = float(re.search(r"Give (\d+) or more", str(refused.value))[1])
    with pytest.raises(RecipeError, match="too few"):
        run(minutes(named - 2))
    assert run(minutes(named)) == 0


def test_a_dry_run_is_of_what_is_asked_for(minutes, job, tmp_path, capsys, monkeypatch):
    run(job(tmp_path / "run", **EPOCHS, max_answers=3, dry_run=True))
    assert "answers (72 tokens at most)" in capsys.readouterr().out
    monkeypatch.setattr(dry_run, "training_step", lambda *_: 30.0)
    with pytest.raises(RecipeError, match=r"minutes is 0\.5, too few here"):
        run(minutes(0.5, dry_run=True))


def test_minutes_do_not_take_over_a_run_that_was_made_without(minutes, job, tmp_path):
    # its answers would be thrown away
    run(job(tmp_path / "run", **EPOCHS))
    with pytest.raises(RecipeError, match=r"minutes: None -> 20\.0"):
        refuse_another_run(minutes(20.0))


def test_a_run_decides_writes_it_down_and_reports(minutes, capsys):
    recipe = minutes(5.0)
    assert run(recipe) == 0
    shown = capsys.readouterr().out
    assert "plan for 5 minutes: 11 of 11 answers" in shown
    assert "6 prompts are timed" in shown  # all that there are, as much time is left
    found = read_yaml(recipe.folder / "recipe.yaml")
    decided = {key: found[key] for key in ("max_answers", "max_steps", "speed_prompts")}
    assert decided == {"max_answers": 11, "max_steps": 6, "speed_prompts": 6}
    report = json.loads((recipe.folder / "report" / "report.json").read_text())
    assert report["drafts"]["tuned"]["speedup"]["n"] == 6


def test_fewer_answers_than_prompts_are_made_and_trained_on(minutes, monkeypatch):
    monkeypatch.setattr(budget, "split", lambda *_: (7, 4))
    monkeypatch.setattr(budget, "PROBE", 4)
    monkeypatch.setattr("distill.teacher.answers.PROBE", 4)
    recipe = minutes(5.0)
    seen = []
    monkeypatch.setattr(
        train, "make_draft", lambda recipe, pair, target, answers, stage: seen.append(list(answers))
    )
    monkeypatch.setattr(train, "evaluate", lambda *_: None)
    run(recipe)
    assert [answer.index for answer in seen[0]] == list(range(7))


def test_an_interrupted_run_goes_on_with_what_it_decided(minutes, monkeypatch):
    recipe = minutes(5.0)
    monkeypatch.setattr(budget, "split", lambda *_: (12, 5))

    def cut(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "make_draft", cut)
    with pytest.raises(KeyboardInterrupt):
        run(recipe)
    refuse_another_run(recipe)
    found = adopted(recipe)
    assert (found.max_answers, found.training["max_steps"]) == (12, 5)
    monkeypatch.undo()
    monkeypatch.setattr(train, "plan", cut)  # it is not decided a second time
    assert run(recipe) == 0
    with pytest.raises(RecipeError, match="minutes: 5"):
        refuse_another_run(dataclasses.replace(recipe, minutes=6.0))


def test_the_resolved_recipe_is_a_recipe_that_repeats_the_run(minutes, monkeypatch):
    recipe = minutes(5.0)
    run(recipe)
    again = load_recipe(["--recipe", str(recipe.folder / "recipe.yaml")])
    assert again.max_answers == 11
    assert again.training["max_steps"] == 6


@pytest.mark.parametrize(
    "changes",
    [{"max_steps": 10}, {"max_answers": 10}, {"answers": "server", "answer_url": "http://x:1"}],
)
def test_what_minutes_decides_may_not_be_given_in_part(minutes, changes):
    with pytest.raises(RecipeError, match="minutes to null"):
        minutes(5.0, **changes)


def test_timing_a_training_step_leaves_the_target_as_it_was(minutes, folder):
    recipe = minutes(5.0, draft=None, num_draft_layers=1, draft_vocab_size=270)
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    target = TargetOfRun(recipe, pair, prompts).loaded
    before = load_model(recipe.target, torch.float32).state_dict()
    model, token_ids = kind_of(recipe).stand_in(recipe, pair, target)
    rows = pair.trained_rows(token_ids)
    assert training_step(recipe, pair, prompts.training.ids, model, rows) > 0
    after = target.model.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    moved = dict(model.named_parameters())
    assert any(
        not torch.equal(tensor, before[name])
        for name, tensor in moved.items()
        if name in before and tensor.shape == before[name].shape
    )
