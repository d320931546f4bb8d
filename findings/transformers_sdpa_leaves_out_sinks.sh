#!/usr/bin/env bash
# A gpt-oss model in transformers computes without its attention sinks once its config says "sdpa".
#
# One would guess: an attention implementation that a model cannot use is refused wherever it is
# chosen. from_pretrained(..., attn_implementation="sdpa") does refuse it for gpt-oss.
# What happens: setting config._attn_implementation on the loaded model, as much code does to switch
# between kernels, passes no check. The model then runs, and SDPA has no place for the sinks: the
# logits are those of another model, and no warning is given.
# The same holds for other models without SDPA support.
#
# Versions: transformers 5.23.0, torch 2.13.0. Source: huggingface/transformers#43120.
# Output seen on 2026-11-28:
#   from_pretrained: ValueError
#   config set to sdpa: logits off by 3.75
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet transformers==5.23.0 torch==2.13.0
cd "$folder"
venv/bin/python - <<'PY'
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM

torch.manual_seed(0)
config = GptOssConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, num_local_experts=2, num_experts_per_tok=1,
    initializer_range=0.2,
)
model = GptOssForCausalLM(config).eval()
for layer in model.model.layers:
    torch.nn.init.constant_(layer.self_attn.sinks, 2.0)
model.save_pretrained("model")
try:
    AutoModelForCausalLM.from_pretrained("model", attn_implementation="sdpa")
    raise SystemExit("changed: from_pretrained takes sdpa")
except ValueError as error:
    print("from_pretrained:", type(error).__name__)
ids = torch.arange(20)[None]
with torch.no_grad():
    right = model(ids).logits
    model.config._attn_implementation = "sdpa"
    difference = (model(ids).logits - right).abs().max().item()
print(f"config set to sdpa: logits off by {difference:.2f}")
assert difference > 0.01, "mended: the sinks are used"
PY
