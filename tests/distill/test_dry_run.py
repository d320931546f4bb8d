"""A dry run: what a draft can gain, from costs that are set by hand."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from align.files import read_json
from distill import dry_run
from distill.train import run
from eval.engines.forecast import Gain
from eval.measuring.cost import StepCosts

PRUNED = {"draft": None, "num_draft_layers": 1}
TABLE = re.compile(r"^ *(.+?)  +(\d\.\d{3})  +(none|\d\.\d\d)  +(\d\.\d\d)x$", re.MULTILINE)


@pytest.mark.parametrize(
    ("changes", "name"), [(PRUNED, "1 layer"), ({}, "sibling")], ids=["pruned", "sibling"]
)
@pytest.mark.parametrize(
    ("draft_step", "status", "numbers"),
    # of 2 drafted tokens all are accepted: 3 tokens in 2 draft steps and one call of 1.2 steps
    [(0.15, 0, ("0.150", "0.35", "2.00")), (1.0, 1, ("1.000", "none", "0.94"))],
)
def test_a_dry_run_says_what_a_draft_can_gain_and_writes_nothing(
    job, tmp_path, monkeypatch, capsys, changes, name, draft_step, status, numbers
):
    costs = StepCosts(draft_step, 1.0, {1: 1.0, 2: 1.2, 3: 1.2}, 20)
    monkeypatch.setattr(dry_run, "step_costs", lambda *_: [costs])
    recipe = job(tmp_path / "run", dry_run=True, minutes=10.0, **changes)
    assert run(recipe) == status
    assert TABLE.findall(capsys.readouterr().out) == [(name, *numbers)]
    assert not recipe.folder.exists()


def test_the_recipe_s_own_layers_are_timed_too(job, tmp_path, monkeypatch, capsys):
    """A draft of eight layers is not priced as one of four."""
    costs = StepCosts(0.15, 1.0, {1: 1.0, 2: 1.2, 3: 1.2}, 20)
    monkeypatch.setattr(dry_run, "step_costs", lambda *_: [costs])
    monkeypatch.setattr(dry_run, "DEPTHS", range(0))
    assert run(job(tmp_path / "run", dry_run=True, **PRUNED)) == 0
    assert [row[0] for row in TABLE.findall(capsys.readouterr().out)] == ["1 layer"]


@pytest.mark.parametrize(
    ("changes", "name", "rows"),
    [
        ({}, "sibling", None),
        (PRUNED | {"draft_vocab_size": 280}, "pruned", None),
        (PRUNED | {"drafter": "eagle3", "draft_vocab_size": 280}, "eagle3", 280),
    ],
    ids=["sibling", "trimmed", "eagle3"],
)
@pytest.mark.parametrize(("perfect", "status"), [((0.9, 1.1), 0), ((0.9, 1.0), 1)])
def test_steps_are_timed_in_the_engine_that_the_run_ends_in(
    job, tmp_path, monkeypatch, capsys, changes, name, rows, perfect, status
):
    """With an untrained draft in the form that vLLM loads."""
    costs, calls = StepCosts(0.15, 1.0, {1: 1.0, 2: 1.2, 3: 1.2}, 20), []

    def forecast(engine, target, drafts, gammas, prompts, text_of, decoding, loads):
        (told, draft), *others = drafts.items()
        about = read_json(Path(draft) / "config.json")
        calls.append((told, gammas, [load.concurrency for load in loads], text_of([1, 2]) != ""))
        assert (others, about.get("draft_vocab_size")) == ([], rows)
        assert name == "eagle3" or about["vocab_size"] == target.config.vocab_size
        gains = [
            Gain(
                draft=told,
                draft_length=g,
                concurrency=1,
                plain_step_ms=20,
                step_ms=30,
                break_even=1.5,
                perfect_speedup=speedup,
            )
            for g, speedup in zip(gammas, perfect, strict=True)
        ]
        return SimpleNamespace(gains=gains, environment=SimpleNamespace(engine_version="0.32.0"))

    monkeypatch.setattr(dry_run, "step_costs", lambda *_: [costs])
    monkeypatch.setattr(dry_run, "in_engine", lambda recipe: True)
    monkeypatch.setattr(dry_run, "forecast_gains", forecast)
    assert run(job(tmp_path / "run", dry_run=True, **changes)) == status
    assert calls == [(name, [1, 2], [1], True)]
    assert f"{perfect[1]:.2f}x" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
