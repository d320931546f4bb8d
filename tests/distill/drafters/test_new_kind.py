"""A new kind of draft is two files of one name: it is started, trained, saved and measured."""

from pathlib import Path

import pytest

from align.files import read_json
from distill import drafters as training
from distill.drafters.kind import kinds
from distill.recipe_files import RecipeError
from distill.train import run
from eval.decoding import drafters as inference
from eval.decoding.drafters.formats import formats
from eval.reporting.fields import read_report
from eval.run import main
from tests.distill.conftest import TRIMMED

NEW_KIND = Path(__file__).with_name("new_kind")


@pytest.fixture
def added(monkeypatch):
    """The files of new_kind/ lie beside those of the two packages."""
    for package in (inference, training):
        name = package.__name__.split(".")[0]
        folder = NEW_KIND / ("inference" if name == "eval" else "training")
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    kinds.cache_clear()
    formats.cache_clear()
    yield
    kinds.cache_clear()
    formats.cache_clear()


def test_it_goes_from_a_recipe_to_its_report(job, tmp_path, added):
    recipe = job(tmp_path / "run", **TRIMMED, drafter="one_head", max_steps=120)
    assert run(recipe) == 0
    assert read_json(recipe.folder / "draft" / "compact.json")["drafter"] == "one_head"
    drafts = read_report(recipe.folder / "report" / "report.json").drafts
    assert drafts["tuned"].lossless.unexplained == 0
    assert drafts["tuned"].gamma == 1
    base = ["--draft", str(recipe.folder / "prepared"), "--gamma", "1"]
    assert main(["--run", str(recipe.folder), *base, "--output_dir", str(tmp_path / "base")]) == 0
    _, untrained = read_report(tmp_path / "base").last
    assert drafts["tuned"].alpha.mean >= untrained.alpha.mean


def test_without_its_files_nobody_knows_it(job, tmp_path):
    with pytest.raises(RecipeError, match="'one_head'"):
        job(tmp_path, **TRIMMED, drafter="one_head")
    assert {"sibling", "pruned", "pard", "eagle3", "medusa"} <= kinds().keys()
    assert formats().keys() <= kinds().keys()
