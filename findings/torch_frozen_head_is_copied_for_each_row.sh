#!/usr/bin/env bash
# Freezing a model makes the last step of a batched prefill on a CPU tens of times slower.
#
# One would guess: `model.requires_grad_(False)` changes nothing of a forward under no_grad, and the
# logits of the last positions of four texts (`logits_to_keep=1`, as `generate` asks for) cost four
# rows of one product.
# What happens: the last positions are a slice, which is not contiguous. torch folds such an input
# into one product only if the weight needs a gradient. Else it makes a batched product, and in bf16
# on a CPU copies the LM head for each row of the batch: with 49,152 entries of 576 and four rows
# 226 MB and 0.6 s (two cores), where one product takes 0.01 s. Each batch size has its own buffers.
# Contiguous inputs are not concerned, nor a `logits_to_keep` that is a tensor of positions.
#
# Versions: torch 2.13.0 (CPU), transformers 5.23.0.
# Source: torch, aten/src/ATen/native/LinearAlgebra.cpp (should_fold).
# Output seen on 2026-11-29:
#   head that needs a gradient: 0 copies of its weight
#   frozen head: copied to [4, 64, 3000]
#   frozen head, logits_to_keep as a tensor: 0 copies of its weight
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
cd "$folder"
venv/bin/python - 2>&1 <<'PY' | grep -v profiler_
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2}
model = LlamaForCausalLM(LlamaConfig(vocab_size=3000, num_hidden_layers=1, **sizes)).bfloat16()
texts = torch.arange(20).view(4, 5)


def copies(last):
    with torch.no_grad(), torch.profiler.profile(record_shapes=True) as profile:
        model(texts, logits_to_keep=last)
    shapes = [event.input_shapes[0] for event in profile.events() if event.name == "aten::copy_"]
    return [shape for shape in shapes if 3000 in shape and 64 in shape]


free = copies(1)
print("head that needs a gradient:", len(free), "copies of its weight")
model.requires_grad_(False)
frozen = copies(1)
print("frozen head: copied to", *frozen)
by_index = copies(torch.tensor([4]))
print("frozen head, logits_to_keep as a tensor:", len(by_index), "copies of its weight")
assert free == by_index == [], "changed: copies elsewhere"
assert frozen == [[4, 64, 3000]], "mended: a frozen head is not copied"
PY
