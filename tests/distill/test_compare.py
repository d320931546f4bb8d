"""`drafter: auto`: what it compares, what it decides, that a run keeps it and reports it."""

import json

import pytest

from distill import compare, held_out, prompt_sets, train
from distill.compare import candidates, few_best
from distill.drafters.kind import kinds
from distill.models import check_models
from distill.plan import read_plan, with_choice
from distill.recipe import RecipeError, read_yaml
from distill.run_folder import refuse_another_run
from distill.train import run
from eval.measuring.runs import StepCosts
from eval.reporting.report import Measured, read_report
from eval.reporting.tables import tables

AUTO = {
    "draft": None,
    "drafter": "auto",
    "draft_vocab_size": 270,
    "minutes": 30.0,
    "max_steps": -1,
    "num_train_epochs": 1.0,
    "max_gamma": 3,
}


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Trained for two steps; some prompts held out."""
    monkeypatch.setattr(compare, "SHARE", 0.0)
    monkeypatch.setattr(prompt_sets, "HELD_OUT_PART", 4)
    monkeypatch.setattr(prompt_sets, "HELD_OUT_FEWEST", 1)
    monkeypatch.setattr(held_out, "SHARE", 10.0)


def told_apart(monkeypatch, low):
    """The best of the others is taken to be faster, by so much at least."""
    gain = Measured(mean=low + 0.1, ci95=(low, low + 0.2), n=8)
    monkeypatch.setattr(compare, "difference", lambda *_: gain)
    speedup = compare.measure_rows

    def faster(name, rows):
        measured = speedup(name, rows)
        order.append(measured.mean)
        mean = measured.mean + 100 * (len(order) == 2)  # the second of those that are trained
        return Measured(mean=mean, ci95=(mean, mean), n=measured.n)

    order = []
    monkeypatch.setattr(compare, "measure_rows", faster)


def test_a_run_compares_decides_follows_it_and_reports(job, tmp_path, monkeypatch, capsys):
    told_apart(monkeypatch, low=0.05)
    recipe = job(tmp_path / "run", **AUTO)
    assert run(recipe) == 0
    shown = capsys.readouterr().out
    choice = read_plan(recipe.folder).choice
    from_target = {name for name, kind in kinds().items() if "target" in kind.starts_from}
    # its target's vocabulary has no row for a mask
    assert {candidate.drafter for candidate in choice.candidates} == from_target - {"pard"}
    assert list(choice.ruled_out) == ["pard"]
    assert "has no row that no text uses" in choice.ruled_out["pard"]
    trained = [candidate for candidate in choice.candidates if candidate.trained]
    assert len(trained) == compare.TRAINED
    assert "pruned" in {candidate.drafter for candidate in trained}
    (winner,) = (candidate for candidate in choice.candidates if candidate.chosen)
    assert winner.trained.mean == max(candidate.trained.mean for candidate in trained)
    assert winner.drafter != "pruned"
    assert winner.measured.n == 2  # other texts
    assert f"chosen: {winner.drafter} is 0.15 [0.05,0.25] faster than pruned-" in shown
    assert not (recipe.folder / compare.FOLDER).exists()
    assert read_yaml(recipe.folder / "recipe.yaml")["drafter"] == winner.drafter

    about = json.loads((recipe.folder / "draft" / "config.json").read_text())
    assert about != {}
    report = read_report(recipe.folder / "report" / "report.json")
    assert report.choice == choice
    table = next(table for table in tables(report) if table.title == "Kinds of draft compared")
    names = [candidate.name for candidate in choice.candidates]
    assert [row[0] for row in table.rows] == [*names, "pard"]

    monkeypatch.setattr(train, "make_plan", None)  # not asked again
    assert run(recipe) == 0
    refuse_another_run(recipe)
    other = next(name for name in from_target if name != winner.drafter)
    with pytest.raises(RecipeError, match="holds a run of another recipe"):
        refuse_another_run(job(tmp_path / "run", **(AUTO | {"drafter": other})))


def test_where_they_are_not_told_apart_it_is_pruned(job, tmp_path, monkeypatch, capsys):
    told_apart(monkeypatch, low=-0.01)
    monkeypatch.setattr(train, "make_draft", lambda *_: pytest.exit("killed"))
    recipe = job(tmp_path / "run", **AUTO)
    with pytest.raises(pytest.exit.Exception):
        run(recipe)
    choice = read_plan(recipe.folder).choice
    assert with_choice(recipe, choice).drafter == "pruned"
    assert "are not told apart: pruned" in choice.why
    assert choice.why in capsys.readouterr().out


def costs(draft_step):
    return StepCosts(draft_step, 1.0, {1: 1.0, 2: 1.0, 3: 1.0, 4: 1.05}, 100)


def test_the_few_best_are_one_of_each_kind_at_the_depth_that_its_price_allows(job, tmp_path):
    recipe = job(tmp_path / "run", **AUTO)
    pair = check_models(recipe)
    tried, _ = candidates(recipe, pair)
    names = [name for name in tried if name.startswith("pruned")]
    assert len(names) == min(compare.DEEPEST, pair.target.config["num_hidden_layers"] - 1)
    cheap = few_best(tried, {name: costs(0.01) for name in tried})
    assert cheap[0] == names[-1]  # a layer more costs nothing
    dear = {name: costs(0.01 if name == names[0] else 0.5) for name in tried}
    assert few_best(tried, dear)[0] == names[0]
    assert len({tried[name].kind_name for name in cheap}) == compare.TRAINED


def test_kinds_that_the_recipe_rules_out_are_left_out_with_the_reason(job, tmp_path):
    recipe = job(tmp_path / "run", **AUTO, use_peft=True)
    tried, ruled_out = candidates(recipe, check_models(recipe))
    assert {recipe.kind_name for recipe in tried.values()} == {"pruned"}
    assert "eagle3" in ruled_out
    assert few_best(tried, {name: costs(0.1) for name in tried})  # other depths


def test_a_dry_run_prices_every_kind(job, tmp_path, capsys):
    recipe = job(tmp_path / "run", **AUTO, num_draft_layers=1, dry_run=True, dtype="bfloat16")
    run(recipe)
    tried, _ = candidates(recipe, check_models(recipe))
    assert capsys.readouterr().out.count("a drafted token costs") == len(tried)
    assert not (tmp_path / "run").exists()
