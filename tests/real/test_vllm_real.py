"""A real vLLM in bf16 serves the embedded target with an exported draft: texts, a mutant, rates.

In fp32 outputs are compared token by token: test_server_answers.py, test_vllm_drafts.py.

It needs a Python with vLLM (docs/engines.md), and the draft of a finished run:

    accelerate launch distill/train.py --recipe code
    DRAFTSMITH_RUN=outputs/code pytest tests/real/test_vllm_real.py

In bf16 texts diverge, and each divergence is explained; a vLLM that does not verify is found out.
Of sampled tokens, as many are accepted as in the reference decoder by the same rule.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import yaml

from align.checkpoint import Checkpoint
from eval.chat_template import render_set
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.engines import start_vllm
from eval.engines.counters import between
from eval.engines.start_vllm import serve_vllm, speculation
from eval.engines.vllm import VllmServer
from eval.prompts import load_prompts
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
    """The files of the exported draft."""
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


# Put on the path of a server, it changes vLLM's kernels.
PATCH = """
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
            change(module)

        spec.loader.exec_module = patched
        return spec

sys.meta_path.insert(0, Finder())
"""
# It takes every drafted token for the target's own.
UNVERIFIED = """
def change(module):
    verified = module._rejection_greedy_sample_kernel_impl

    def unverified(output, ends, drafted, target, *more, **named):
        return verified(output, ends, drafted, drafted.to(target.dtype), *more, **named)

    module._rejection_greedy_sample_kernel_impl = unverified
"""
# The CPU build of vLLM 0.32.0 copies temperatures into integers, and leaves those of drafted tokens
# uninitialised.
TEMPERATURES = """
def change(module):
    def expand(output, values, ends, replaced, by, MAX_NUM_TOKENS=None):
        values = values.masked_fill(values == replaced, by)
        output.copy_(values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1))))

    module._expand_kernel_impl = expand
"""


@contextmanager
def patched(folder, change):
    """Servers that start within have the change."""
    (folder / "sitecustomize.py").write_text(PATCH + change)
    clean = start_vllm.environment_of
    with mock.patch.object(
        start_vllm, "environment_of", lambda python: clean(python) | {"PYTHONPATH": str(folder)}
    ):
        yield


@pytest.fixture(scope="module")
def in_bf16(recipe, draft, vllm, tmp_path_factory):
    """Reports in bf16 of a server that drafts, and of one that does not verify its draft."""
    target, reports = Checkpoint.open(recipe["target"]).folder, []
    with serve_vllm(target, *BF16) as baseline:
        for change in ("def change(module): pass", UNVERIFIED):
            with (
                patched(tmp_path_factory.mktemp("mutant"), change),
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


def accepted_there(target, draft, prompts, decoding, gamma):
    """The share of a server's drafts whose first i tokens were all accepted [gamma]."""
    drafting = speculation(draft, gamma, draft_sample_method=decoding.draft_sample_method)
    with serve_vllm(target, *BF16, *drafting) as address, ThreadPoolExecutor(4) as threads:
        server = VllmServer(address, 600)
        before = server.counters()
        list(threads.map(lambda prompt: server.generate(prompt, decoding), prompts))
        counts = between(before, server.counters())
    return np.array(counts.accepted_at) / counts.drafts


def accepted_here(target, drafter, prompts, decoding, gamma):
    """The same of the reference decoder, whose last drafts are as long as the others, too."""
    drafts, counts = 0, np.zeros(gamma)
    longer = replace(decoding, max_new_tokens=decoding.max_new_tokens + gamma)
    for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True):
        run = decode(target.decoder, drafter, prompt, ids, longer, gamma)
        done = run.prefill_tokens
        for tokens, accepted in zip(run.block_tokens, run.accepted, strict=True):
            drafts += done < decoding.max_new_tokens
            counts += (np.arange(gamma) < accepted) * (done < decoding.max_new_tokens)
            done += tokens
    return counts / drafts


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_sampled_acceptance_is_that_of_the_reference_decoder(
    tmp_path, recipe, draft, installed, method
):
    """The counters of 96 prompts; their error is about 0.01."""
    target = load_target(Checkpoint.open(recipe["target"]), torch.bfloat16, "cpu", 1024)
    prompts = load_prompts(str(Path(RUN) / "prompts" / "eval.jsonl"))
    rendered = render_set("", prompts, target.checkpoint.tokenizer, 512, TOKENS)
    how = Decoding(Sampling(0.7), target.stops, TOKENS, SEED, "token", method)
    here = accepted_here(target, load_drafter(str(draft), target), rendered, how, GAMMA)
    with patched(tmp_path, TEMPERATURES):
        folder = Checkpoint.open(recipe["target"]).folder
        there = accepted_there(folder, draft, prompts, how, GAMMA)
    assert np.allclose(there, here, atol=0.03)
