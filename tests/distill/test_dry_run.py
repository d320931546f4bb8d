"""A dry run: memory from configs, and what a draft can gain from costs that are set by hand."""

import re

import pytest
from transformers import AutoModelForCausalLM

from align.sources import load_config
from distill import dry_run
from distill.train import run
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


@pytest.mark.parametrize("name", ["target", "large"])
def test_parameters_are_counted_from_the_config(folder, name):
    whole = AutoModelForCausalLM.from_pretrained(folder / name).num_parameters()
    assert dry_run.parameters(load_config(str(folder / name))) == whole
