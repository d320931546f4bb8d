"""GGUF files in llama.cpp itself: the embedded target, and a small model of every family."""

import json
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from align import to_gguf
from align.checkpoint import Checkpoint
from align.to_gguf import _LLAMA3, write_gguf
from distill.recipe import load_recipe
from tests.align.conftest import STRINGS, byte_level_tokenizer  # noqa: F401
from tests.align.test_to_gguf import FAMILIES, LLAMA3, SHAPE, checkpoint, split_by  # noqa: F401

pytestmark = pytest.mark.real

VERSION = "3.22.1"
TEXTS = [text for text in STRINGS if 0 < len(text) < 999]
TEXTS += ["x =   12\n    34 5678", "def f(x):\n    return  1", "a\n \n\n  b <|im_end|>c"]
CODE = [
    "def mean(values):\n    total = 0\n    for",
    "The capital of France is",
    "import os\n\nclass Reader:\n    def __init__(self,",
]


@pytest.fixture(scope="session")
def ask(tmp_path_factory):
    """What llama.cpp makes of files: ask(files, texts, prompts, most=1), see llama_cpp.mjs."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("no node or npm: llama.cpp comes from npm; install Node.js 20 or later")
    folder = tmp_path_factory.mktemp("llama_cpp")
    binary = f"@node-llama-cpp/linux-{'arm64' if platform.machine() == 'aarch64' else 'x64'}"
    packages = [f"{name}@{VERSION}" for name in ("node-llama-cpp", binary)]
    command = ["npm", "install", "--omit=optional", "--ignore-scripts", "--prefix", str(folder)]
    try:
        made = subprocess.run([*command, *packages], capture_output=True, text=True, timeout=180)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm did not install {packages[0]} within three minutes")
    if made.returncode:
        pytest.skip(f"npm could not install {packages[0]}: {made.stderr[-300:]}")

    def ask(files, texts, prompts, most=1):
        about = {"files": [str(file) for file in files], "texts": texts, "prompts": prompts}
        script = Path(__file__).with_name("llama_cpp.mjs")
        run = subprocess.run(
            ["node", str(script), str(folder)],
            input=json.dumps(about | {"most": most}),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout.splitlines()[-1])

    return ask


def transformers_logits(spec, ids):
    with torch.inference_mode():
        return Checkpoint.open(spec).load(torch.float32)(torch.tensor([ids])).logits[0, -1]


def off(folder, answer, ids):
    """The largest difference of the logits, in standard deviations of them."""
    mine = transformers_logits(folder, ids)
    return float((mine - torch.tensor(answer["continued"][0]["first"])).abs().max() / mine.std())


MODELS = FAMILIES | {
    "biased": lambda: LlamaConfig(**SHAPE, attention_bias=True),
    "turned slower": lambda: LlamaConfig(
        **SHAPE, rope_parameters=LLAMA3 | {"original_max_position_embeddings": 32}
    ),
}


@pytest.mark.parametrize("family", MODELS)
def test_llama_cpp_computes_the_same(family, ask, checkpoint, tmp_path, monkeypatch):  # noqa: F811
    folder = checkpoint(MODELS[family]())
    ids = [(7 * i) % 420 for i in range(1, 101)]
    files = [tmp_path / "right.gguf"]
    write_gguf(Checkpoint.open(folder), files[0], "f32")
    if (
        to_gguf.FAMILIES[Checkpoint.open(folder).load(torch.float32).config.model_type].name
        == "LLAMA"
    ):
        monkeypatch.setattr(to_gguf, "_interleaved", lambda weight, heads: weight)
        files.append(tmp_path / "rows as they are.gguf")
        write_gguf(Checkpoint.open(folder), files[1], "f32")
    answers = ask(files, [], [ids])
    assert off(folder, answers[0], ids) < 0.02  # keys and values are kept in fp16
    assert all(off(folder, answer, ids) > 0.2 for answer in answers[1:])


@pytest.mark.parametrize("split", [None, split_by(_LLAMA3.replace("{1,3}", ""))])
def test_llama_cpp_reads_the_same_ids(split, ask, checkpoint, tmp_path):  # noqa: F811
    folder = checkpoint(FAMILIES["llama"](), split)
    write_gguf(Checkpoint.open(folder), tmp_path / "model.gguf", "f16")
    tokenizer = Checkpoint.open(folder).tokenizer
    [answer] = ask([tmp_path / "model.gguf"], TEXTS, [])
    assert answer["ids"] == [tokenizer(text).input_ids for text in TEXTS]


def test_the_embedded_target(ask, tmp_path):
    folder = Checkpoint.open(load_recipe(["--recipe", "code"]).target).folder
    for kind in ("f32", "q8_0", "q4_0"):
        write_gguf(Checkpoint.open(folder), tmp_path / f"{kind}.gguf", kind)
    model, tokenizer = (
        Checkpoint.open(folder).load(torch.float32),
        Checkpoint.open(folder).tokenizer,
    )
    prompts = [tokenizer(text).input_ids for text in CODE]
    files = [tmp_path / f"{kind}.gguf" for kind in ("f32", "q8_0", "q4_0")]
    exact, *quantised = ask(files, TEXTS, prompts, most=32)
    assert exact["ids"] == [tokenizer(text).input_ids for text in TEXTS]
    for ids, found in zip(prompts, exact["continued"], strict=True):
        texts = model.generate(
            torch.tensor([ids]), max_new_tokens=32, do_sample=False, eos_token_id=[0, 2]
        )
        assert found["ids"] == texts[0, len(ids) :].tolist()
    eight, four = (off(folder, answer, prompts[0]) for answer in quantised)
    assert eight < four < 3
    assert eight < 0.5
