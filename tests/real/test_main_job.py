"""The main job on the embedded target, shortened: the same command, fewer prompts and steps."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from align.checkpoint import Checkpoint
from eval.reporting.fields import read_report
from tests.conftest import cache_without_answers
from tests.real.conftest import words_of

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "minutes": "null",
    "max_train_prompts": 60,
    "answer_max_new_tokens": 24,
    "max_eval_prompts": 10,
    "speed_prompts": 3,
    "tuning_prompts": 2,
    "max_gamma": 2,
    "max_new_tokens": 24,
    "fit_tokens": 2000,
    "max_steps": 32,
    "warmup_steps": 4,
    "learning_rate": 0.002,
    "save_steps": 16,
}


def command(folder, recipe="code"):
    flags = words_of(SHORT | {"output_dir": folder})
    return [sys.executable, "distill/train.py", "--recipe", recipe, *flags]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return cache_without_answers(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def here(cache):
    return {"cwd": ROOT, "env": os.environ | {"DRAFTSMITH_CACHE": cache}}


@pytest.fixture(scope="module")
def run(tmp_path_factory, cache, here):
    """One short run that is killed while the target answers and then started again."""
    folder, cache = tmp_path_factory.mktemp("run") / "code", Path(cache)
    process = subprocess.Popen(
        command(folder), **here, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while not list(cache.glob("teacher/*/shard-*")) and process.poll() is None:
        time.sleep(0.2)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    cached = {path: path.stat().st_mtime_ns for path in cache.glob("teacher/*/shard-*")}
    assert cached
    done = subprocess.run(command(folder), **here, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    for path, written in cached.items():  # what was answered before the kill is not answered again
        assert path.stat().st_mtime_ns == written
    return folder


def test_the_report_is_whole_and_lossless(run):
    read_report(run / "report" / "report.json")
    report = json.loads((run / "report" / "report.json").read_text())
    assert list(report["drafts"]) == ["lookup", "tuned", "tuned+lookup"]
    pairs = [(gain["draft"], gain["over"]) for gain in report["gain"]]
    assert pairs == [("tuned", "lookup"), ("tuned+lookup", "lookup")]
    assert report["prompts"]["in_chat_form"] == 1
    for draft in report["drafts"].values():
        assert draft["lossless"]["prompts"] == SHORT["speed_prompts"]
        assert draft["lossless"]["unexplained"] == 0
        assert draft["memory"]["overhead"] <= 0.1
    assert report["prompts"]["overlap_with_training"] == 0
    assert report["drafts"]["tuned"]["alpha"]["n"] == SHORT["max_eval_prompts"]
    assert report["drafts"]["tuned"]["alpha"]["mean"] > 0.1


@pytest.fixture(scope="module")
def pruned(tmp_path_factory, here):
    """A draft that transformers loads. It has distributions within prompts, so other outputs."""
    folder = tmp_path_factory.mktemp("pruned") / "code"
    subprocess.run(command(folder, "code/pruned"), **here, capture_output=True, check=True)
    return folder


def test_the_draft_agrees_with_the_target_in_transformers_alone(pruned):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from distill.recipe import load_recipe

    recipe = load_recipe(["--recipe", "code"])
    dtype = getattr(torch, recipe.dtype)  # fp32 on a CPU without bf16 instructions
    draft = AutoModelForCausalLM.from_pretrained(pruned / "draft", dtype=dtype).eval()
    tokenizer = AutoTokenizer.from_pretrained(pruned / "draft")
    target = Checkpoint.open(recipe.target).load(dtype)
    prompts = [json.loads(line) for line in (pruned / "prompts" / "eval.jsonl").open()]
    agreed = total = 0
    for prompt in prompts:
        ids = tokenizer.apply_chat_template(
            prompt["messages"], add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        text = target.generate(ids, max_new_tokens=SHORT["max_new_tokens"], do_sample=False)
        with torch.no_grad():
            p, q = (model(text).logits[0, ids.shape[1] - 1 : -1] for model in (target, draft))
        agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
        total += len(p)
    low, high = json.loads((pruned / "report" / "report.json").read_text())["drafts"]["tuned"][
        "alpha"
    ]["ci95"]
    assert low <= agreed / total <= high
