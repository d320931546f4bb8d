"""A real vLLM for CPUs, in a separate environment; drafts that are distilled for real servers."""

from contextlib import ExitStack

import pytest

from distill.recipe import build_recipe
from distill.train import run
from eval.engines.start_vllm import serve_vllm
from tests.distill.conftest import TEXTS

FP32 = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048")


def words_of(keys):
    """Keys of a recipe as words of the command line."""
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def vllm(installed):
    """Starts servers in fp32: vllm(target, *arguments) -> address. They end with the module."""
    with ExitStack() as running:
        yield lambda target, *arguments: running.enter_context(
            serve_vllm(target, *FP32, *arguments)
        )


@pytest.fixture
def distilled(tmp_path):
    """Distils a draft for tmp_path/target: distilled(name, **recipe keys) -> its folder."""
    for name, texts in (("train", TEXTS[:12]), ("eval", TEXTS[12:])):
        rows = "".join(f'{{"prompt": "{text[:20]}"}}\n' for text in texts)
        (tmp_path / f"{name}_prompts.jsonl").write_text(rows)

    def make(name, **keys):
        recipe = build_recipe(
            {"target": str(tmp_path / "target"), "output_dir": str(tmp_path / name)}
            | {
                f"{part}_prompts": str(tmp_path / f"{part}_prompts.jsonl")
                for part in ("train", "eval")
            }
            | {"dtype": "float32", "bf16": False, "use_cpu": True, "learning_rate": 5e-3}
            | {"cache_top_k": 30, "answer_max_new_tokens": 96, "max_new_tokens": 16}
            | {"speed_prompts": 2, "tuning_prompts": 1, "gamma": 2}
            | keys
        )
        assert run(recipe) == 0
        return recipe.folder / "draft"

    return make
