"""A parallel draft: what a row of training is, and a run from its command to its report."""

import json

import pytest
import torch

from distill.drafters import parallel
from distill.drafters.parallel import KEEP, drawn_depths, with_masks
from distill.recipe import RecipeError, build_recipe
from distill.train import run


@pytest.mark.parametrize("rank", [0, 4])
def test_a_run_makes_and_measures_it(job, tmp_path, rank):
    recipe = job(
        tmp_path / "run",
        draft=None,
        drafter="parallel",
        num_draft_layers=1,
        draft_vocab_size=270,
        max_gamma=3,
        sequential_rank=rank,
    )
    assert run(recipe) == 0
    report = json.loads((recipe.folder / "report" / "report.json").read_text())
    assert set(report["drafts"]) == {"untuned", "tuned"}
    for draft in report["drafts"].values():
        assert draft["lossless"]["unexplained"] == 0
        assert draft["costs"]["draft_block_ms"] > draft["costs"]["draft_step_ms"] > 0
    about = json.loads((recipe.folder / "draft" / "compact" / "compact.json").read_text())
    assert about["drafter"] == "parallel"
