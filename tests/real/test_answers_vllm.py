"""`answers: vllm` with a real one: it is started, goes on where our own loop stopped, and ends.

It needs a Python with vLLM (docs/engines.md); else this is skipped.
"""

from contextlib import suppress
from pathlib import Path

import pytest

from distill.recipe import load_recipe
from distill.train import run
from tests.conftest import cache_without_answers
from tests.real.conftest import words_of

pytestmark = pytest.mark.real

SHORT = {
    "coverage_curve": "true",  # it answers, and stops
    "minutes": "null",
    "train_on_prompts": "false",
    "max_train_prompts": 12,
    "answer_max_new_tokens": 16,
    "max_eval_prompts": 4,
    "tuning_prompts": 1,
}


def running(cache):
    """Processes that were started with that cache."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # of others, or gone
            if cache.encode() in path.read_bytes():
                processes.append(path.parent.name)
    return processes


def test_vllm_goes_on_where_our_own_loop_stopped_in_one_store(
    tmp_path, installed, monkeypatch, capsys
):
    monkeypatch.setenv("DRAFTSMITH_CACHE", cache_without_answers(tmp_path))

    def shown(name, **keys):
        words = words_of(SHORT | {"output_dir": tmp_path / name} | keys)
        assert run(load_recipe(["--recipe", "code/pruned", *words])) == 0
        return capsys.readouterr().out

    assert "4 of 4 generated" in shown("first", max_answers=4)
    # vLLM's distributions after our own answers' prompts are found to be the same model's
    assert "8 of 12 generated" in shown("more", max_answers=12, answers="vllm")
    assert not running(str(tmp_path))
