"""Drafts that read the target's hidden states: prepared, trained over several steps, exported."""

import pytest
import torch

from distill import state_cache
from distill.answer_cache import CacheError
from distill.recipe import RecipeError
from distill.train import run

FEATURES = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 270, "drafter": "features"}


def test_the_main_job(job, tmp_path, capsys):
    recipe = job(tmp_path / "run", **FEATURES)
    assert run(recipe) == 0
    print(capsys.readouterr().out)
