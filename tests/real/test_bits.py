"""On a CPU a token has the same logits, to the bit, whether it is verified alone or in a block."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.real

ROOT = Path(__file__).resolve().parents[2]

# Another process, because MKL reads at its first use how it shall sum.
SCRIPT = """
from align.checkpoint import Checkpoint
from align.machine import use_machine
use_machine()
import torch
torch.set_num_threads(2)  # sums are shared out, even if a worker of the tests has one core
from distill.prompt_sets import evaluation_prompts
from distill.recipe import load_recipe
from eval.decoding.target import load_target
from eval.chat_template import render_set

recipe = load_recipe(["--recipe", "code"])
target = load_target(Checkpoint.open(recipe.target), torch.bfloat16, "cpu", 600)
decoder = target.decoder
prompts = evaluation_prompts(recipe.eval_prompts, 2, 1)
for ids in render_set("", prompts, target.checkpoint.tokenizer, 600, 70).ids:
    cache = decoder.new_cache(1, len(ids) + 80)
    logits = decoder.forward(torch.tensor([ids]), 0, cache, last_only=True)
    text, alone = list(ids), []
    for at in range(len(ids), len(ids) + 48):
        text.append(int(logits[0, -1].max(-1).indices))
        logits = decoder.forward(torch.tensor([text[-1:]]), at, cache)
        alone.append(logits[0, 0].clone())
    for width in (2, 3, 4, 7):
        cache = decoder.new_cache(1, len(ids) + 80)
        decoder.forward(torch.tensor([ids]), 0, cache, last_only=True)
        for at in range(len(ids), len(text) - width + 1, width):
            block = decoder.forward(torch.tensor([text[at : at + width]]), at, cache)[0]
            for i, row in enumerate(block):
                assert torch.equal(row, alone[at - len(ids) + i]), (len(ids), width, at + i)
print("equal")
"""


def test_a_block_of_any_width_gives_the_bits_of_single_steps():
    command, waiting = [sys.executable, "-c", SCRIPT], {"OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | waiting, capture_output=True, text=True
    )
    assert done.stdout.strip().endswith("equal"), done.stdout + done.stderr[-3000:]
