#!/usr/bin/env bash
# transformers 4 computes another model from a checkpoint that transformers 5 saved, and says nothing.
#
# One would guess: a Llama that transformers 5 saves with save_pretrained computes the same logits in
# transformers 4, or is refused there: architecture, tensors and sizes are the same.
# What happens: version 5 writes the rotary base into `rope_parameters` alone. Version 4 does not know
# this key and takes its default base of 10,000, without a warning. A draft or a target that was
# published with version 5 is then another model in each engine that reads with version 4.
#
# Versions: transformers 5.23.0 writes, 4.57.6 reads; torch 2.13.0.
# Source: vllm-project/vllm#42624, Open-Athena/MarinFold#184.
# Output seen on 2026-11-28:
#   written by 5.23.0: rope_parameters {'rope_theta': 500000.0, 'rope_type': 'default'}, rope_theta absent
#   read by 4.57.6: rope_theta 10000.0
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
for version in 5.23.0 4.57.6; do
    "${PYTHON:-python3}" -m venv "$folder/$version"
    "$folder/$version/bin/pip" install --quiet "transformers==$version" torch==2.13.0
done
cd "$folder"
5.23.0/bin/python - <<'PY'
import json
import torch
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    initializer_range=0.3,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
)
model = LlamaForCausalLM(config).eval()
model.save_pretrained("model")
written = json.load(open("model/config.json"))
print("written by 5.23.0: rope_parameters", written.get("rope_parameters"), end=", ")
print("rope_theta", written.get("rope_theta", "absent"))
assert "rope_theta" not in written, "mended: version 5 writes the old key as well"
with torch.no_grad():
    torch.save(model(torch.arange(60)[None]).logits, "logits.pt")
PY
4.57.6/bin/python -W error - <<'PY'
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("model").eval()
print("read by 4.57.6: rope_theta", model.config.rope_theta)
with torch.no_grad():
    difference = (model(torch.arange(60)[None]).logits - torch.load("logits.pt")).abs().max()
assert model.config.rope_theta == 10000.0, "mended: version 4 reads the base"
print(f"logits off by {difference:.2f}")
assert difference > 0.1, "mended: the logits agree"
PY
