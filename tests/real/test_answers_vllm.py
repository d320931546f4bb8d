"""`answers: vllm` with a real one: it is started, goes on where our own loop stopped, and ends.

`python -m eval.engines.environments vllm` installs it (3.5 GB); else this is skipped.
"""

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from eval.engines.environments import EngineMissing, vllm_python
from tests.conftest import cache_without_answers

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "coverage_curve": "true",  # it answers, and stops
    "minutes": "null",
    "train_on_prompts": "false",
    "max_train_prompts": 12,
    "answer_max_new_tokens": 16,
    "max_eval_prompts": 4,
    "tuning_prompts": 1,
}


def made(name, **keys):
    """How many answers a run makes, and of how many."""
    keys = SHORT | {"output_dir": f"{os.environ['DRAFTSMITH_CACHE']}/{name}"} | keys
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "distill/train.py", "--recipe", "code", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return tuple(map(int, re.search(r"(\d+) of (\d+) answers made", done.stdout).groups()))


def running(cache):
    """Processes that were started with that cache."""
    processes = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # of others, or gone
            if cache.encode() in path.read_bytes():
                processes.append(path.parent.name)
    return processes


def test_vllm_goes_on_where_our_own_loop_stopped_in_one_store(tmp_path, monkeypatch):
    try:
        vllm_python()
    except EngineMissing as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("DRAFTSMITH_CACHE", cache_without_answers(tmp_path))
    assert made("first", max_answers=4) == (4, 4)
    # vLLM's distributions after our own answers' prompts are found to be the same model's
    assert made("more", max_answers=12, answers="vllm") == (8, 12)
    assert not running(str(tmp_path))
    assert made("again", max_answers=12) == (0, 12)
