"""A real vLLM serves the embedded target with an exported draft: text and counters are as ours.

It needs a Python with vLLM (docs/engines.md), and the draft of a finished run:

    accelerate launch distill/train.py --recipe code
    DRAFTSMITH_RUN=outputs/code pytest tests/real/test_vllm_real.py

In bf16 texts diverge, and each divergence is explained; a vLLM that does not verify is found out.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
import yaml

from align.sources import resolve_checkpoint
from eval.decoding.drafters import medusa
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.engines import local_vllm
from eval.engines.local_vllm import serve_vllm, speculation
from eval.engines.vllm import VllmServer
from eval.prompts import load_prompts, render_set
from eval.reporting.fields import read_report
from eval.run import main

RUN = os.environ.get("DRAFTSMITH_RUN")
PROMPTS, TOKENS, GAMMA, SEED = 40, 64, 3, 42
TIE = 1e-4  # logits: the same sum in fp32, in another order, is off by less

pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(
        not RUN,
        reason="needs a draft: set DRAFTSMITH_RUN to the folder of a finished run",
    ),
]


@dataclass
class Served:
    speculative: str
    baseline: str


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


@pytest.fixture(scope="module")
def served(recipe, draft, vllm):
    target = resolve_checkpoint(recipe["target"])
    # one after the other: both load at once on a small machine
    speculative = vllm(target, *speculation(draft, GAMMA))
    return Served(speculative, vllm(target))


@pytest.fixture(scope="module")
def prompts():
    return load_prompts(str(Path(RUN) / "prompts" / "eval.jsonl"), PROMPTS, SEED)


@pytest.fixture(scope="module")
def target(recipe):
    return load_target(recipe["target"], torch.float32, "cpu", 2048)


@pytest.fixture(scope="module")
def ours(target, draft, prompts):
    """Our decoder's runs with the draft's full form, on past the limit and past the stops."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(medusa, "INT8_TERMS", 1 << 30)  # heads, too, in fp32 as there, not eight bits
        drafter = load_drafter(str(draft), target)
    # so that the block that reaches the limit is drafted and counted in full, as vLLM does
    how = Decoding(Sampling(), frozenset(), TOKENS + 2 * GAMMA + 1)
    ids = render_set("", prompts, target.tokenizer, 2048, how.max_new_tokens).ids
    with torch.inference_mode():
        return [
            decode(target.decoder, drafter, prompt, one, how, GAMMA)
            for prompt, one in zip(prompts, ids, strict=True)
        ]


@pytest.fixture(scope="module")
def report(served, tmp_path_factory):
    return measured(served.speculative, served.baseline, tmp_path_factory.mktemp("report"))


def measured(speculative, baseline, folder, prompts=PROMPTS):
    command = ["--engine", "vllm", "--base_url", speculative, "--output_dir", str(folder)]
    command += ["--baseline_url", baseline, "--speed_prompts", str(prompts)]
    command += ["--prompts", str(Path(RUN) / "prompts" / "eval.jsonl"), "--seed", str(SEED)]
    assert main([*command, "--max_new_tokens", str(TOKENS), "--gamma", str(GAMMA)]) == 0
    return read_report(folder / "report" / "report.json")


def answer(run, stops):
    """What of our text is the answer: up to the first stop, or the limit."""
    ends = [i + 1 for i, token in enumerate(run.tokens) if token in stops]
    return run.tokens[: min([TOKENS, *ends])]


def vllm_counts(run, emitted):
    """Drafts and accepted tokens of the blocks that gave an answer of so many tokens.

    vLLM counts all that a draft had accepted, beyond the limit and the stop as well.
    """
    drafts, accepted, tokens = 0, 0, 1
    for block, stood in zip(run.block_tokens, run.accepted, strict=True):
        if tokens >= emitted:
            break
        drafts, accepted, tokens = drafts + 1, accepted + stood, tokens + block
    return drafts, accepted


def gap(target, prompt, text):
    """Between the target's two best logits after the prompt and the text."""
    ids = [*render_set("", [prompt], target.tokenizer, 2048, TOKENS).ids[0], *text]
    cache = target.decoder.new_cache(1, len(ids))
    with torch.inference_mode():
        logits = target.decoder.forward(torch.tensor([ids]), 0, cache, last_only=True)
    best, second = logits[0, -1].topk(2).values.tolist()
    return best - second


def test_the_text_is_ours(served, target, prompts, ours):
    """Token by token; where it parts, the target itself had a tie there."""
    same, how = 0, Decoding(Sampling(), frozenset(), TOKENS, SEED)
    for prompt, run in zip(prompts, ours, strict=True):
        expected = answer(run, target.stops)
        for url in (served.speculative, served.baseline):
            found = VllmServer(url, 600).decode(prompt, how).run
            assert found.prompt_tokens == run.prompt_tokens
            if found.tokens == expected:
                same += 1
                continue
            pairs = zip(found.tokens, expected, strict=False)
            at = next((i for i, (theirs, mine) in enumerate(pairs) if theirs != mine), None)
            assert at is not None, f"{prompt.id}: {found.tokens} and {expected} end differently"
            assert gap(target, prompt, expected[:at]) < TIE, (prompt.id, at)
    print(f"{same} of {2 * len(prompts)} answers identical, the others part at a tie")


def test_the_report_is_whole(report):
    draft = report.drafts["served"]
    assert draft.lossless.prompts == draft.speedup.n == PROMPTS
    assert draft.lossless.unexplained == 0
    assert report.decoding.gamma == GAMMA
    assert "counters" not in {entry.field for entry in draft.missing}


def test_the_counters_are_ours(report, target, ours):
    counts = [vllm_counts(run, len(answer(run, target.stops))) for run in ours]
    drafts, accepted = (sum(column) for column in zip(*counts, strict=True))
    counters = report.drafts["served"].counters
    theirs = counters.num_accepted_tokens / counters.num_drafts
    print(f"accepted a draft: vLLM {theirs:.4f}, ours {accepted / drafts:.4f} ({drafts} drafts)")
    assert theirs == pytest.approx(accepted / drafts, rel=0.02)
    assert counters.num_drafts == pytest.approx(drafts, rel=0.02)
    assert accepted > 0.1 * drafts  # a draft that is never right would agree with anything


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
    with serve_vllm(target, dtype="bfloat16") as baseline:
        for more in ({}, {"PYTHONPATH": str(folder)}):
            with (
                mock.patch.object(
                    local_vllm, "environment_of", lambda python, m=more: clean(python) | m
                ),
                serve_vllm(target, *speculation(draft, GAMMA), dtype="bfloat16") as speculative,
            ):
                out = tmp_path_factory.mktemp("bf16")
                reports.append(measured(speculative, baseline, out, 12).drafts["served"].lossless)
    return reports


def test_each_divergence_in_bf16_is_explained(in_bf16):
    honest, _ = in_bf16
    assert honest.unexplained == 0
    assert honest.identical + honest.tie_divergences == 12


def test_a_vllm_that_does_not_verify_changes_texts(in_bf16):
    _, mutant = in_bf16
    assert mutant.unexplained >= 10
