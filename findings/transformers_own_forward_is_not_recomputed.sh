#!/usr/bin/env bash
# A layer that is given a forward of its own is not recomputed, though checkpointing is on.
#
# One would guess: after `gradient_checkpointing_enable()` each decoder layer is computed again in
# the backward pass, also a layer whose `forward` somebody has replaced on the instance (a fused
# kernel, packed texts, a profiler), as with transformers 4.57, where the layer's call did it.
# What happens: transformers 5.23 does it in the `forward` of the layer's class, so that hooks stay
# outside. A forward of the instance comes before that of the class. `is_gradient_checkpointing` is
# True, nothing warns, results are equal, and all activations are kept: training runs out of memory.
#
# Versions: torch 2.13.0 (CPU), transformers 4.57.1 and 5.23.0.
# Source: transformers, modeling_layers.py (GradientCheckpointingLayer).
# Output seen on 2026-11-29:
#   4.57.1: each layer computed 2 times, with a forward of its own 2 times
#   5.23.0: each layer computed 2 times, with a forward of its own 1 times
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
cat > "$folder/count.py" <<'PY'
import functools
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM

sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 50}


def times(replaced):
    """How often the MLP of a layer is computed in a step of training."""
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=1, **sizes)).train()
    model.gradient_checkpointing_enable()
    assert model.is_gradient_checkpointing
    (layer,) = model.model.layers
    calls = []
    layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    if replaced:  # by the very function of its class
        own = type(layer).forward
        layer.forward = functools.partial(getattr(own, "__wrapped__", own), layer)
    ids = torch.arange(8)[None]
    model(ids, labels=ids).loss.backward()
    return len(calls)


usual, own = times(False), times(True)
print(f"{transformers.__version__}: each layer computed {usual} times, with a forward of its own "
      f"{own} times")
assert (usual, own) == (2, int(sys.argv[1])), "changed"
PY
cd "$folder"
for pair in 4.57.1:2 5.23.0:1; do
    venv/bin/pip install --quiet "transformers==${pair%:*}" torch==2.13.0
    venv/bin/python -W ignore count.py "${pair#*:}" 2>/dev/null
done
