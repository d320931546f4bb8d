"""What a run ends with where vLLM is installed, with a stand-in for its measurement."""

import dataclasses
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from align.checkpoint import weights_sha256
from align.errors import UserError
from distill.export import BASE_KEPT
from distill.run_report import shown_loss
from distill.train import main, run
from eval.engines.start_vllm import VLLM_PYTHON
from eval.measuring.journal import JOURNAL
from eval.measuring.metrics import PromptSums
from eval.reporting.fields import read_report
from eval.reporting.files import write_report
from tests.distill.conftest import PARD


class Measured(list):
    """The options of every measurement in vLLM. status: what the next one ends with."""

    status = 0

    def __call__(self, options, summary):
        given = dict(zip(options[::2], options[1::2], strict=True))
        self.append(given)
        if not self.status:
            report = read_report(given["--run"])
            write_report(
                Path(given["--output_dir"]) / "report", report.model_copy(update={"engine": "vllm"})
            )
        return self.status


@pytest.fixture
def measured(monkeypatch):
    calls = Measured()
    monkeypatch.setenv(VLLM_PYTHON, sys.executable)
    monkeypatch.setattr("distill.run_report.run.main", calls)
    return calls


@pytest.mark.parametrize("minutes", [None, 0.5])
def test_a_run_ends_in_vllm_where_it_is(job, tmp_path, measured, capsys, minutes):
    recipe = job(tmp_path / "run", engine="auto", minutes=minutes, max_steps=2)
    assert run(recipe) == 0
    shown = capsys.readouterr().out
    (given,) = measured
    assert (given["--run"], given["--engine"]) == (str(recipe.folder), "vllm")
    drafts = read_report(recipe.folder).drafts
    assert given["--gamma"] == str(drafts["tuned"].gamma)
    assert given["--ngram_gamma"] == str(drafts["lookup"].gamma)
    assert ("--minutes" in given) == (minutes is not None)
    assert "predicted for vLLM" not in shown
    assert f"Report in vLLM: {tmp_path / 'run-vllm' / 'report' / 'report.html'}" in shown
    assert "vllm" in (recipe.folder / "draft" / "README.md").read_text()


def test_a_run_whose_vllm_fails_has_the_prediction(job, tmp_path, measured, capsys):
    measured.status = 2
    assert run(job(tmp_path / "run", engine="auto", max_steps=2)) == 0
    shown = capsys.readouterr().out
    assert "Warning: the drafts were not measured in vLLM" in shown
    assert "predicted for vLLM" in shown


def test_a_run_with_a_key_that_vllm_has_not_has_the_prediction(
    job, tmp_path, measured, monkeypatch, capsys
):
    def refuse(options, summary):
        sys.exit(2)

    monkeypatch.setattr("distill.run_report.run.main", refuse)
    assert run(job(tmp_path / "run", engine="auto", max_steps=2)) == 0
    assert "not measured in vLLM" in capsys.readouterr().out


@pytest.mark.parametrize("engine", ["auto", None])
def test_a_run_without_vllm_predicts(job, tmp_path, measured, monkeypatch, capsys, engine):
    if engine:
        monkeypatch.delenv(VLLM_PYTHON)
    assert run(job(tmp_path / "run", engine=engine, max_steps=2)) == 0
    assert not measured
    assert "predicted for vLLM" in capsys.readouterr().out


def test_a_named_engine_that_is_not_there_ends_the_run_first(
    job, tmp_path, measured, monkeypatch, capsys
):
    monkeypatch.delenv(VLLM_PYTHON)
    recipe = dataclasses.replace(job(tmp_path / "run"), engine="vllm")
    monkeypatch.setattr("distill.train.load_recipe", lambda argv: recipe)
    assert main([]) == 2
    assert "vLLM is not installed" in capsys.readouterr().err
    assert not recipe.folder.exists()


def test_a_report_that_cannot_be_written_leaves_what_was_measured(job, tmp_path, monkeypatch):
    def full(folder, report):
        raise UserError("The disk is full.")

    recipe = job(tmp_path / "run", max_steps=2)
    with monkeypatch.context() as patch:
        patch.setattr("distill.run_report.write_report", full)
        with pytest.raises(UserError, match="full"):
            run(recipe)
    assert (recipe.folder / "report" / JOURNAL).is_file()
    assert run(recipe) == 0
    assert read_report(recipe.folder).provenance["resumed"] is True


def drafts_of(gains, length=2):
    """Reports of a base draft and, with these gains in tokens a step, of a distilled one."""

    def numbers(name, gains, length):
        accepted = [[100, round(60 + 100 * gain), *[20] * (length - 1)] for gain in gains]
        sums = [PromptSums(id=str(i), accepted_at=each) for i, each in enumerate(accepted)]
        return SimpleNamespace(gamma=length, per_prompt=sums)

    base = numbers("untuned", [0.0] * len(gains), length + 3)  # its longer drafts are no gain
    return SimpleNamespace(drafts={"untuned": base, "tuned": numbers("tuned", gains, length)})


@pytest.mark.parametrize(
    ("gains", "followed", "unfollowed"),
    [
        ([0.1, 0.2] * 6, False, False),
        ([-0.1, -0.2] * 6, True, True),
        ([-0.1, 0.1] * 6, False, True),
        ([-0.1, -0.2] * 3, False, False),  # too few prompts for an interval
    ],
)
def test_a_trained_base_draft_is_kept_where_a_loss_or_no_gain_is_shown(gains, followed, unfollowed):
    report = drafts_of(gains)
    assert bool(shown_loss(report, followed=True)) is followed
    assert bool(shown_loss(report, followed=False)) is unfollowed
    del report.drafts["untuned"]  # made from the target, so nobody has trained it
    assert shown_loss(report, followed=False) is None


def test_a_parallel_draft_is_not_compared_with_its_sibling_by_tokens_a_step(
    job, folder, tmp_path, monkeypatch
):
    """Its steps emit fewer tokens and cost less; and its base has a mask that nobody trained."""
    monkeypatch.setattr("distill.run_report.shown_loss", lambda *_: "fewer tokens a step")
    keys = PARD | {"target": str(folder / PARD["target"]), "max_steps": 2, "speed_prompts": 2}
    recipe = job(tmp_path / "run", **keys | {"draft": str(folder / "target")})
    assert run(recipe) == 0
    assert read_report(recipe.folder).base_kept is None
    recipe = job(tmp_path / "again", **keys | {"draft": str(recipe.folder / "draft")})
    assert run(recipe) == 0
    assert read_report(recipe.folder).base_kept  # both are parallel


def test_a_draft_is_called_the_base_draft_once_it_is(job, tmp_path, monkeypatch):
    monkeypatch.setattr("distill.run_report.shown_loss", lambda *_: "a loss")
    recipe = job(tmp_path / "run", max_steps=2, speed_prompts=2)
    with monkeypatch.context() as patch:
        patch.setattr("distill.run_report.export_draft", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run(recipe)
    assert not (recipe.folder / BASE_KEPT).exists()
    assert run(recipe) == 0
    assert read_report(recipe.folder).base_kept == "a loss"


def test_a_draft_that_evaluation_prompts_show_to_be_worse_is_not_saved(
    job, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("eval.measuring.intervals.FEWEST_CLUSTERS", 3)
    keys = {"max_steps": 4, "learning_rate": 1.0, "speed_prompts": 6}
    recipe = job(tmp_path / "run", draft=str(tmp_path / "target"), **keys)
    shutil.copytree(recipe.target, tmp_path / "target")
    assert run(recipe) == 0
    report = read_report(recipe.folder)
    assert report.drafts["tuned"].alpha.mean == report.drafts["untuned"].alpha.mean == 1.0
    assert report.drafts["tuned"].sha256 == weights_sha256(recipe.folder / "draft")
    assert [name for name in report.drafts if name.startswith("tuned")] == ["tuned"]
    assert report.base_kept in capsys.readouterr().out
    assert report.base_kept in (recipe.folder / "draft" / "README.md").read_text()
    assert run(recipe) == 0  # which measures the same draft again
    assert read_report(recipe.folder).base_kept == report.base_kept
