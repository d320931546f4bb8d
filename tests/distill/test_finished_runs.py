"""What every finished run keeps, of each kind of draft and each way onto the target's ids."""

import dataclasses
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from align.checkpoint import weights_sha256
from align.files import read_json
from distill import run_report, train
from distill.train import run
from eval.decoding.drafters.mtp import HEAD
from eval.measuring.journal import JOURNAL
from eval.reporting.fields import read_report
from eval.run import main
from tests.distill.conftest import RUNS

FILES = [
    *("recipe.yaml", "provenance.json", "vocab_check.json", "report/report.md"),
    *("report/report.html", "draft/config.json", "draft/tokenizer.json", "draft/README.md"),
]
# the fast set starts these again; the others are read in the same ways
FAST = ["transplant", "padded lora", "trimmed", "eagle3", "medusa", "dflash", "mtp", "mtp hybrid"]
FAST += ["pard lora"]
ALL = [name if name in FAST else pytest.param(name, marks=pytest.mark.real) for name in RUNS]


@pytest.fixture(params=ALL)
def recipe(finished, request):
    return finished(request.param)


def report_of(folder):
    return read_report(folder / "report" / "report.json")


def test_it_is_lossless(recipe):
    drafts = report_of(recipe.folder).drafts
    # a base draft that was made from the target was never of use to anybody
    assert ("untuned" in drafts) == (recipe.draft is not None or recipe.kind.trained)
    for draft in drafts.values():
        assert draft.lossless.unexplained == 0
        assert draft.lossless.identical + draft.lossless.tie_divergences == 3


def weights_of(recipe):
    name = "adapter_model" if recipe.kind.adapter else "model"
    return recipe.folder / "draft" / f"{name}.safetensors"


def test_it_leaves_what_is_promised(recipe):
    assert weights_of(recipe).is_file()
    assert [name for name in FILES if not (recipe.folder / name).is_file()] == []
    assert "auto_map" not in read_json(recipe.folder / "draft" / "config.json")  # no file of code
    if recipe.kind.language_model:  # engines load it over the target's whole vocabulary
        draft, target = (
            read_json(Path(folder) / "config.json")
            for folder in (recipe.folder / "draft", recipe.target)
        )
        assert draft["vocab_size"] == target["vocab_size"]


def test_what_is_measured_is_what_engines_load(recipe):
    """Its weights and their bytes, without maps of ids, the target's head, a router's bias."""
    draft, drafts = recipe.folder / "draft", report_of(recipe.folder).drafts
    measured, behind = drafts["tuned"], drafts["tuned+lookup"]
    assert (measured.path, measured.sha256) == (str(draft), weights_sha256(draft))
    assert (behind.path, behind.sha256) == (f"lookup-first:{draft}", measured.sha256)
    own = [
        tensor.nbytes
        for name, tensor in load_file(weights_of(recipe)).items()
        if tensor.is_floating_point() and not name.endswith((HEAD, "correction_bias"))
    ]
    assert measured.memory.draft_bytes == sum(own)


# others are read again in the same way when they are started again
@pytest.mark.parametrize("recipe", ["trimmed", "eagle3", "pard lora"], indirect=True)
def test_measured_again_it_has_the_same_acceptance_rate(recipe, tmp_path):
    given = ["--run", str(recipe.folder), "--gamma", "1", "--output_dir", str(tmp_path)]
    assert main(given) == 0
    report = report_of(tmp_path)
    again, drafts = report.drafts, report_of(recipe.folder).drafts
    assert again.keys() == drafts.keys()
    for name in again:
        assert again[name].alpha == drafts[name].alpha
        assert again[name].vocabulary == drafts[name].vocabulary
    assert report.prompts.overlap_with_training == 0  # the run knows
    assert report.prompts.chat_template is False


@pytest.mark.parametrize("recipe", ["trimmed"], indirect=True)
def test_other_prompts_are_compared_with_those_that_it_was_trained_on(recipe, tmp_path):
    given = ["--run", str(recipe.folder), "--gamma", "1", "--output_dir", str(tmp_path)]
    given += ["--prompts", str(recipe.folder / "prompts" / "train.jsonl"), "--max_prompts", "4"]
    assert main(given) == 0
    prompts = report_of(tmp_path).prompts
    assert prompts.overlap_with_training >= prompts.n == 4


def test_started_again_it_trains_nothing(recipe, tmp_path, capsys, monkeypatch):
    folder = shutil.copytree(recipe.folder, tmp_path / "run")
    again = dataclasses.replace(recipe, output_dir=str(folder))
    shutil.rmtree(folder / "report")
    monkeypatch.delattr(train, "answering_target")  # the target's outputs are what it trains on
    assert run(again) == 0
    assert capsys.readouterr().out.endswith(f"python -m eval.demo {folder}\n")
    first, second = (report_of(place) for place in (recipe.folder, folder))
    assert first.drafts["tuned"].alpha == second.drafts["tuned"].alpha
    assert first.provenance["hashes"] == second.provenance["hashes"]


@pytest.mark.parametrize("recipe", ["transplant"], indirect=True)
@pytest.mark.parametrize("change", [None, "journal", "report", "weights"])
def test_started_again_it_keeps_a_report_that_is_whole(recipe, tmp_path, monkeypatch, change):
    folder = shutil.copytree(recipe.folder, tmp_path / "run")
    again = dataclasses.replace(recipe, output_dir=str(folder))
    report = folder / "report" / "report.json"
    before = report.read_bytes()
    match change:
        case "journal":
            (folder / "report" / JOURNAL).touch()
        case "report":
            report.write_text("{}")
        case "weights":
            path = folder / "draft" / "model.safetensors"
            tensors = load_file(path)
            save_file(
                tensors | {"lm_head.weight": -tensors["lm_head.weight"]}, path, {"format": "pt"}
            )
    measured = []
    monkeypatch.setattr(run_report, "_measured_here", lambda *_: measured.append(1) or 1 / 0)
    if change is None:
        assert run(again) == 0
        assert report.read_bytes() == before
    else:
        with pytest.raises(ZeroDivisionError):
            run(again)
    assert measured == [1] * (change is not None)
