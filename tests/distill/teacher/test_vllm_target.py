"""A vLLM of the run's own, with a stand-in for it: started when needed, and always ended."""

import json
import shutil
import sys
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from align.checkpoint import Checkpoint
from align.files import read_json
from distill.models import check_models, open_models
from distill.prompt_sets import collect_prompts
from distill.teacher import vllm_target
from distill.teacher.answers import who_answers
from distill.teacher.store import names_of
from distill.teacher.vllm_target import answering_target
from distill.train import run
from eval.decoding.target import load_target
from eval.engines.server import ServerError
from eval.engines.start_vllm import VLLM_PYTHON, EngineMissing
from eval.reporting.fields import read_report
from tests.distill.teacher.test_server_target import StandIn


@pytest.fixture(autouse=True)
def started(monkeypatch):
    """Every server that was started, with the arguments: (server, target, arguments)."""
    servers = []

    @contextmanager
    def serve(target, *arguments):
        model = load_target(Checkpoint.open(target), torch.float32, "cpu", 128)
        server = StandIn(model, names=["target"], ended=False)
        servers.append((server, target, arguments))
        try:
            yield server.url
        except ServerError as error:  # as eval.engines.process adds the end of the log
            raise ServerError(f"{error} Its last words.") from None
        finally:
            server.stop()
            server.ended = True

    monkeypatch.setattr(vllm_target, "serve_vllm", serve)
    monkeypatch.setattr("distill.teacher.store.ANSWERS_PER_SHARD", 2)
    monkeypatch.setenv(VLLM_PYTHON, sys.executable)
    return servers


def test_a_run_answers_there_and_goes_on_as_one_that_answers_itself(
    job, tmp_path, started, followed, capsys
):
    keys = {"answer_max_new_tokens": 12, "cache_top_k": 6, "max_steps": 6, "gamma": 2}
    recipe = job(tmp_path / "there", answers="vllm", **keys)
    assert run(recipe) == 0
    shown = capsys.readouterr().out
    assert "answers: vllm, because the recipe names it" in shown
    assert shown.count("2 of 2 generated") == shown.count("9 of 9 generated") == 1
    ((server, target, arguments),) = started
    options = dict(pairwise(arguments))
    assert server.ended
    assert str(target) == recipe.target
    assert options["--dtype"] == recipe.dtype
    longest = max(len(b["prompt"]) for _, b in server.requests if b.get("max_tokens", 0) > 1)
    assert options["--max-model-len"] == str(longest + 12)
    report = read_report(recipe.folder / "report" / "report.json")
    assert {"untuned", "tuned", "tuned+lookup"} <= set(report.drafts)
    assert report.drafts["tuned"].lossless.unexplained == 0
    assert report.held_out.points
    assert report.provenance["answers"] == {"vllm": 9}
    assert (recipe.folder / "draft" / "README.md").is_file()
    for by in ("local", "vllm"):
        assert run(job(tmp_path / by, answers=by, coverage_curve=True, **keys)) == 0
        shown = capsys.readouterr().out
        assert shown.count("0 of 2 generated") == shown.count("0 of 9 generated") == 1
    assert len(started) == 1


@pytest.fixture
def asked(job, tmp_path):
    """A recipe's target that is to answer in a vLLM of its own."""
    recipe = job(tmp_path / "run", answers="vllm", answer_batch_size=2, answer_max_new_tokens=12)
    pair = check_models(recipe, *open_models(recipe))
    return answering_target(recipe, pair, collect_prompts(recipe, pair.target), None)


@pytest.mark.parametrize("failure", [KeyboardInterrupt, ServerError])
def test_it_ends_whatever_happens_and_what_it_answered_stays(asked, started, monkeypatch, failure):
    append, appended = asked.store.append, []

    def fails(*shard):
        append(*shard)
        appended.append(shard)
        if len(appended) == 2:
            raise failure("It broke off.")

    monkeypatch.setattr(asked.store, "append", fails)
    with pytest.raises(failure) as raised, asked:
        asked.answers(asked.prompts)
    assert ("Its last words." in str(raised.value)) == (failure is ServerError)
    assert started[0][0].ended
    kept = 11 - len(asked.store.missing(names_of(asked.prompts)))
    assert 0 < kept < 11
    monkeypatch.setattr(asked.store, "append", append)
    with asked:
        assert len(asked.answers(asked.prompts)) == 11
    assert started[1][0].ended
    assert started[1][0].answered < 11 - kept + 2  # the check, and none of those that are there


def test_it_takes_one_gpu_as_an_evaluation_does(asked, started, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (40 * 2**30, 80 * 2**30))
    with asked:
        asked.answers(asked.prompts)
    options = dict(pairwise(started[0][2]))
    assert options["--tensor-parallel-size"] == "1"
    assert options["--gpu-memory-utilization"] == "0.45"


def test_a_quantised_target_is_computed_in_the_dtype_of_its_checkpoint(asked, tmp_path):
    made = shutil.copytree(asked.target.folder, tmp_path / "fp8")
    config = read_json(made / "config.json") | {"quantization_config": {"quant_method": "fp8"}}
    (made / "config.json").write_text(json.dumps(config))
    quantised = replace(asked, target=replace(asked.target, source=made))
    dtypes = [dict(pairwise(one.arguments()))["--dtype"] for one in (asked, quantised)]
    assert dtypes == [asked.dtype, "auto"]


def test_without_vllm_it_is_refused_with_the_commands_that_install_it(
    job, tmp_path, started, monkeypatch
):
    monkeypatch.delenv(VLLM_PYTHON)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "empty"))
    recipe = job(tmp_path / "run", answers="vllm")
    with pytest.raises(EngineMissing, match="pip install"):
        run(recipe)
    assert not recipe.folder.exists()
    assert not started


@pytest.mark.parametrize(
    ("device", "installed", "answers", "taught", "by", "why"),
    [
        ("cpu", True, "auto", False, "local", "on the CPU"),
        ("cuda", True, "auto", False, "vllm", "should be faster"),
        ("cuda", True, "auto", True, "local", "train_on_prompts"),
        ("cuda", False, "auto", False, "local", "pip install"),
        ("cuda", True, "local", False, "local", "the recipe names it"),
        ("cpu", False, "vllm", False, "vllm", "the recipe names it"),
    ],
)
def test_who_answers_where_nobody_is_named(
    tmp_path, monkeypatch, device, installed, answers, taught, by, why
):
    if not installed:
        monkeypatch.delenv(VLLM_PYTHON)
        monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "empty"))
    chosen, reason = who_answers(answers, device, taught)
    assert chosen == by
    assert why in reason
