"""A real vLLM in bf16 serves the embedded target with an exported draft: texts and a mutant.

In fp32 outputs are compared token by token: test_server_answers.py, test_vllm_drafts.py.

It needs a Python with vLLM (docs/engines.md), and the draft of a finished run:

    accelerate launch distill/train.py --recipe code
    DRAFTSMITH_RUN=outputs/code pytest tests/real/test_vllm_real.py

In bf16 texts diverge, and each divergence is explained; a vLLM that does not verify is found out.
"""

import os
from pathlib import Path
from unittest import mock

import pytest
import yaml

from align.sources import resolve_checkpoint
from eval.engines import local_vllm
from eval.engines.local_vllm import serve_vllm, speculation
from eval.reporting.fields import read_report
from eval.run import main

RUN = os.environ.get("DRAFTSMITH_RUN")
PROMPTS, TOKENS, GAMMA, SEED = 12, 64, 3, 42
BF16 = ("--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048")

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not RUN,
        reason="needs a draft: set DRAFTSMITH_RUN to the folder of a finished run",
    ),
]


@pytest.fixture(scope="module")
def recipe():
    return yaml.safe_load((Path(RUN) / "recipe.yaml").read_text())


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """The exported draft without its compact form, which vLLM does not load either."""
    folder = tmp_path_factory.mktemp("full")
    for file in (Path(RUN) / "draft").iterdir():
        if file.is_file():
            (folder / file.name).symlink_to(file.resolve())
    return folder


def measured(speculative, baseline, folder):
    command = ["--engine", "vllm", "--base_url", speculative, "--output_dir", str(folder)]
    command += ["--baseline_url", baseline, "--speed_prompts", str(PROMPTS)]
    command += ["--prompts", str(Path(RUN) / "prompts" / "eval.jsonl"), "--seed", str(SEED)]
    assert main([*command, "--max_new_tokens", str(TOKENS), "--gamma", str(GAMMA)]) == 0
    return read_report(folder / "report" / "report.json")


# Put on the path of a server, it takes every drafted token for the target's own.
UNVERIFIED = """
import importlib.abc, importlib.util, sys

PATCHED = "vllm.utils.cpu_triton_utils"

class Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name != PATCHED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def patched(module):
            execute(module)
            verified = module._rejection_greedy_sample_kernel_impl

            def unverified(output, ends, drafted, target, *more, **named):
                return verified(output, ends, drafted, drafted.to(target.dtype), *more, **named)

            module._rejection_greedy_sample_kernel_impl = unverified

        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Finder())
"""


@pytest.fixture(scope="module")
def in_bf16(recipe, draft, vllm, tmp_path_factory):
    """Reports in bf16 of a server that drafts, and of one that does not verify its draft."""
    folder = tmp_path_factory.mktemp("mutant")
    (folder / "sitecustomize.py").write_text(UNVERIFIED)
    target = resolve_checkpoint(recipe["target"])
    clean, reports = local_vllm.environment_of, []
    with serve_vllm(target, *BF16) as baseline:
        for more in ({}, {"PYTHONPATH": str(folder)}):
            with (
                mock.patch.object(
                    local_vllm, "environment_of", lambda python, m=more: clean(python) | m
                ),
                serve_vllm(target, *BF16, *speculation(draft, GAMMA)) as speculative,
            ):
                out = tmp_path_factory.mktemp("bf16")
                reports.append(measured(speculative, baseline, out).drafts["served"].lossless)
    return reports


def test_each_divergence_in_bf16_is_explained(in_bf16):
    honest, _ = in_bf16
    assert honest.unexplained == 0
    assert honest.identical + honest.tie_divergences == PROMPTS


def test_a_vllm_that_does_not_verify_changes_texts(in_bf16):
    _, mutant = in_bf16
    assert mutant.unexplained >= 10
