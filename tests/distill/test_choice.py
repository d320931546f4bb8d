"""`drafter: auto`: what it compares, what it decides, that a run keeps it and reports it."""

import json

import pytest

from distill import budget, choice, held_out, prompts, state_cache, train
from distill.answer_cache import HELD_OUT as FIRST_HELD_OUT
from distill.budget import adopted
from distill.choice import KINDS, chosen_before, with_choice
from distill.held_out import HELD_OUT, read_followed
from distill.models import check_models
from distill.recipe import RecipeError, read_yaml
from distill.run_folder import refuse_another_run
from distill.train import run
from eval.reporting.page import render_page
from eval.reporting.report import read_report
from eval.reporting.tables import tables

AUTO = {"draft": None, "drafter": "auto", "draft_vocab_size": 270, "max_steps": 6, "max_gamma": 3}


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(choice, "HEAL_SECONDS", 0.05)


def test_a_run_compares_all_kinds_decides_and_reports(job, tmp_path, capsys):
    recipe = job(tmp_path / "run", **AUTO)
    assert run(recipe) == 0
    shown = capsys.readouterr().out
    found = chosen_before(recipe.folder)
    assert [one.drafter for one in found.candidates] == list(KINDS)
    assert found.ruled_out == {}
    assert all(one.untuned and one.c > 0 for one in found.candidates)
    healed = [one for one in found.candidates if one.healed]
    assert len(healed) == choice.HEALED
    least = min(one.untuned.speedup.mean for one in healed)
    others = [one for one in found.candidates if one.healed is None]
    assert all(one.untuned.speedup.mean <= least for one in others)
    (winner,) = (one for one in found.candidates if one.chosen)
    assert winner.healed.speedup.mean == max(one.healed.speedup.mean for one in healed)
    assert f"chosen: {winner.drafter}" in shown
    assert not (recipe.folder / choice.FOLDER).exists()
    assert read_yaml(recipe.folder / "recipe.yaml")["drafter"] == winner.drafter

    compact = recipe.folder / "draft" / "compact" / "compact.json"
    about = json.loads(
        (compact if compact.exists() else compact.parents[1] / "config.json").read_text()
    )
    assert about.get("drafter", winner.drafter) == winner.drafter
    report = read_report(recipe.folder / "report" / "report.json")
    assert report.choice == found
    table = next(one for one in tables(report) if one.title == "Kinds of draft compared")
    assert [row[0] for row in table.rows] == [one.name for one in found.candidates]
    assert table.title in render_page(report)


def test_a_run_goes_on_with_what_was_chosen(job, tmp_path, monkeypatch):
    recipe = job(tmp_path / "run", **AUTO)
    monkeypatch.setattr(train, "make_draft", lambda *_: pytest.exit("killed"))
    with pytest.raises(pytest.exit.Exception):
        run(recipe)
    found = chosen_before(recipe.folder)
    monkeypatch.undo()
    monkeypatch.setattr(train, "choose", None)  # not asked again
    assert adopted(recipe) == with_choice(recipe, found)
    refuse_another_run(recipe)
    assert run(recipe) == 0
    other = next(kind for kind in KINDS if kind != with_choice(recipe, found).kind)
    with pytest.raises(RecipeError, match="holds a run of another recipe"):
        refuse_another_run(job(tmp_path / "run", **(AUTO | {"drafter": other})))


def test_a_chosen_draft_that_reads_states_is_followed_and_gone_on_with(job, tmp_path, monkeypatch):
    """Prompts are held out before the kind is known; the states made for the choice are kept."""
    monkeypatch.setattr(prompts, "HELD_OUT_PART", 4)
    monkeypatch.setattr(prompts, "HELD_OUT_FEWEST", 1)
    monkeypatch.setattr(held_out, "SHARE", 10.0)
    monkeypatch.setattr(choice, "KINDS", ("pruned", "features"))
    speedup = choice.Comparison.speedup
    monkeypatch.setattr(
        choice.Comparison,
        "speedup",
        lambda self, one: speedup(self, one) + 10 * (one.kind == "features"),
    )
    passes, states_at = [], state_cache.states_at
    monkeypatch.setattr(
        state_cache, "states_at", lambda *given: passes.append(given[1].index) or states_at(*given)
    )
    recipe = job(tmp_path / "run", **AUTO)
    with monkeypatch.context() as killed:
        killed.setattr(train, "distil_draft", lambda *_: pytest.exit("killed"))
        with pytest.raises(pytest.exit.Exception):
            run(recipe)
    assert passes == [*range(9), FIRST_HELD_OUT, FIRST_HELD_OUT + 1]
    assert run(recipe) == 0
    assert len(passes) == 11
    assert read_followed(recipe.folder / HELD_OUT).seen
    report = read_report(recipe.folder / "report" / "report.json")
    assert next(one for one in report.choice.candidates if one.chosen).drafter == "features"


def test_minutes_are_planned_for_what_was_chosen(job, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(budget, "STARTED", budget.time.monotonic())
    timed = []
    step = budget.training_step
    monkeypatch.setattr(
        budget,
        "training_step",
        lambda recipe, *rest: timed.append(recipe.kind) or step(recipe, *rest),
    )
    keys = AUTO | {"minutes": 30.0, "max_steps": -1, "num_train_epochs": 1.0}
    monkeypatch.setattr(choice, "HEAL_PART", 0.0)
    recipe = job(tmp_path / "run", **keys)
    assert run(recipe) == 0
    found = chosen_before(recipe.folder)
    assert timed == [with_choice(recipe, found).kind]
    assert "plan for 30 minutes" in capsys.readouterr().out


def test_kinds_that_the_recipe_rules_out_are_left_out_with_the_reason(job, tmp_path):
    recipe = job(tmp_path / "run", **AUTO, use_peft=True)
    tried, ruled_out = choice.candidates(recipe, check_models(recipe))
    assert {one.kind for one in tried} == {"pruned"}
    assert set(ruled_out) == set(KINDS) - {"pruned"}
    assert "adapters of a low rank do not train" in ruled_out["eagle3"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_dry_run_prices_every_kind(job, tmp_path, capsys, dtype):
    run(job(tmp_path / "run", **AUTO, num_draft_layers=1, dry_run=True, dtype=dtype))
    shown = capsys.readouterr().out
    assert shown.count("a perfect draft would reach") == len(KINDS)
    assert not (tmp_path / "run" / choice.FOLDER).exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft": "org/sibling"}, "drafter is auto, .* but draft is 'org/sibling'"),
        ({"base": "outputs/base"}, "drafter is auto, .* but base is 'outputs/base'"),
        ({"data": {"fixed": 1.0}, "fixed_text": "a.txt"}, "drafter is auto, .* data has none"),
        ({"minutes": 20.0, "max_steps": -1}, "minutes is 20, but drafter auto .* give 30 or more"),
    ],
)
def test_what_leaves_nothing_to_compare_is_refused(job, tmp_path, changes, message):
    with pytest.raises(RecipeError, match=message):
        job(tmp_path / "run", **(AUTO | changes))
