#!/usr/bin/env bash
# A DFlash layer "with a window of 2,048" is trained by speculators on other positions than served.
#
# One would guess: a window of W is what transformers and engines call so: a position sees itself
# and the W - 1 before it. speculators writes `sliding_window` and `layer_types` into the config of
# the layer, in transformers' words, and 2,048 for each layer is its default.
# What happens: in training all slots of a block have the window of their anchor, which has W
# positions besides it. The k-th slot behind the anchor sees W + k positions before itself; engines
# give it W - 1. Texts up to the window are the same. In longer ones a slot reads k + 1 positions
# less than in training, so a head that is measured on short prompts shows nothing.
#
# Versions: speculators 0.9.0, transformers 5.19.0, torch 2.13.0.
# Source: speculators/models/dflash/attention.py; transformers/masking_utils.py.
# Output seen on 2026-11-29 (window 8, blocks of 4):
#   positions before each slot, speculators: 8 9 10 11
#   positions before each slot, transformers: 7 7 7 7
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet speculators==0.9.0 transformers==5.19.0 torch==2.13.0
"$folder/venv/bin/pip" uninstall --quiet --yes torchvision torchaudio # not used; other builds break
cd "$folder"
venv/bin/python - <<'PY'
import torch
from speculators.models.dflash.attention import create_anchor_block_mask_mod
from transformers.masking_utils import sliding_window_causal_mask_function

WINDOW, BLOCK, TEXT, ANCHOR = 8, 4, 32, 20
mask, queries, keys = create_anchor_block_mask_mod(
    torch.zeros(TEXT, dtype=torch.long), TEXT, torch.tensor([ANCHOR]), BLOCK, WINDOW
)
row = head = torch.tensor(0)
seen = mask(row, head, torch.arange(queries)[:, None], torch.arange(keys)[None])  # [queries, keys]
trained = (seen.sum(1) - 1).tolist()  # without the slot itself
usual = sliding_window_causal_mask_function(WINDOW)
positions = torch.arange(TEXT)
served = [
    sum(bool(usual(0, 0, torch.tensor(ANCHOR + slot), key)) for key in positions) - 1
    for slot in range(BLOCK)
]
print("positions before each slot, speculators:", *trained)
print("positions before each slot, transformers:", *served)
assert trained == [WINDOW + slot for slot in range(BLOCK)], "changed: another window"
assert served == [WINDOW - 1] * BLOCK, "changed: transformers' window"
PY
