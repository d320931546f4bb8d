#!/usr/bin/env bash
# speculators reads whatever is in memory as the embedding of an EAGLE-3 head that has none.
#
# One would guess: a head whose file has no `embed_tokens.weight` shares the embedding of the
# verifier that its config names, as engines do, and as the package does when it makes a new head.
# What happens: the package fills new weights with NaN, tells transformers that they are
# initialised, and takes the verifier's weights where NaN is left. But from_pretrained makes the
# weights anew without the package's NaN, and then does not initialise them, as it was told. So an
# embedding is read from the verifier only if the memory happens to hold a NaN. The same file gives
# other embeddings in the same process. The only sign is a line MISSING in transformers' report.
# The same package reads DFlash heads right: there the verifier's embedding always replaces.
#
# Versions: speculators 0.9.0, transformers 5.19.0, torch 2.13.0.
# Source: speculators/model.py (load_verifier_weights), models/eagle3/core.py.
# Output seen on 2026-11-29 (the last number differs from run to run):
#   made: the verifier's embedding
#   read with it: the verifier's embedding
#   read without it 20 times: N times another one
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet speculators==0.9.0 transformers==5.19.0 torch==2.13.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio # not used; other builds break
cd "$folder"
HF_HUB_OFFLINE=1 venv/bin/python - <<'PY'
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.train.cli import create_transformer_layer_config
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
LlamaForCausalLM(LlamaConfig(vocab_size=96, num_hidden_layers=8, **sizes)).save_pretrained("target")
wanted = AutoModelForCausalLM.from_pretrained("target").get_input_embeddings().weight


def embedding(head):
    return "the verifier's embedding" if head.embed_tokens.weight.equal(wanted) else "another one"


layer = create_transformer_layer_config("target", 1, "llama", "silu", 2048, [])
made = SpeculatorModel.registry["eagle3"].from_training_args(
    layer, None, None, draft_vocab_size=96, norm_before_residual=True, ttt_steps=3,
    verifier_name_or_path="target", draft_attn_impl="sdpa", target_layer_ids=None,
)
print("made:", embedding(made))
made.save_pretrained("head")
read = SpeculatorModel.from_pretrained("head")
print("read with it:", embedding(read))
(file,) = Path("head").glob("*.safetensors")
tensors = {name: t for name, t in load_file(file).items() if name != "embed_tokens.weight"}
assert tensors.keys() != load_file(file).keys(), "changed: heads are saved without an embedding"
save_file(tensors, file, {"format": "pt"})
heads = [SpeculatorModel.from_pretrained("head") for _ in range(20)]
others = sum(embedding(head) == "another one" for head in heads)
print(f"read without it 20 times: {others} times another one")
assert embedding(made) == embedding(read) == "the verifier's embedding"
assert others, "mended: the verifier's embedding is read"
PY
