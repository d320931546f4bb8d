"""`report_to`, as in transformers.

trackio (0.43) was tried by hand: it reads its folder when trl imports it, which a test cannot set.
"""

import pytest

from distill import train
from distill.recipe_files import RecipeError
from distill.training_setup import training_config


def test_a_tracker_that_is_not_installed_is_refused_before_anything_runs(job, tmp_path):
    recipe = job(tmp_path / "run", report_to=["tensorboard", "swanlob"])
    with pytest.raises(RecipeError, match="swanlob"):
        train.run(recipe)
    assert not recipe.folder.exists()


def test_only_named_trackers_get_anything(job, tmp_path):
    assert training_config(job(tmp_path / "run")).report_to == []
    tracked = training_config(job(tmp_path / "run", report_to="tensorboard"))
    assert tracked.report_to == ["tensorboard"]
