#!/usr/bin/env bash
# On a CPU, torch's products in bf16 lack parts if OpenMP grants fewer threads than torch asks for.
#
# One would guess: OMP_THREAD_LIMIT, which batch systems set to the cores of a job, and OMP_DYNAMIC
# make torch slower at most. OpenMP may always start fewer threads than a program asks for.
# What happens: oneDNN, which computes bf16 products, divides the work among the threads it asked for.
# The parts of threads that do not start are never written: the result has NaN or old values of the
# memory there, without an error or a warning. fp32 (MKL) and torch's own kernels are right. A model
# that is trained or evaluated in bf16 under such a limit is wrong, and torch.get_num_threads() does
# not know the limit. torch.set_num_threads(limit) mends it.
#
# Versions: torch 2.13.0 (oneDNN 3.12.0), Linux, a CPU with AVX-512 and at least two cores.
# Source: seen in a training run that became NaN; relatives are pytorch/pytorch#168965 (inductor) and
# openvinotoolkit/openvino#26801.
# Output seen on 2026-11-28, AMD EPYC (Zen 4), two cores:
#   OMP_THREAD_LIMIT not set: bf16 lacks 0% of the values, fp32 0%
#   OMP_THREAD_LIMIT=1: bf16 lacks 40% of the values, fp32 0%
#   OMP_THREAD_LIMIT=1 and set_num_threads(1): bf16 lacks 0% of the values, fp32 0%
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0
cat >"$folder/products.py" <<'PY'
import sys
import warnings

warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch

label, threads, expected = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "wrong"
torch.set_num_threads(threads)
torch.manual_seed(0)
shares = []
for dtype in (torch.bfloat16, torch.float32):
    x, weight = torch.randn(256, 576, dtype=dtype), torch.randn(1536, 576, dtype=dtype)
    right = x.double() @ weight.double().T
    former = torch.full((256, 1536), float("nan"), dtype=dtype)  # what the memory held before
    del former
    off = (x @ weight.T).double() - right
    shares.append((~(off.abs() < 0.05 * right.abs().max())).double().mean().item())
print(f"{label}: bf16 lacks {shares[0]:.0%} of the values, fp32 {shares[1]:.0%}")
assert shares[1] == 0
assert (shares[0] > 0.1) == expected, "this has changed, or this CPU has no bf16 kernels of oneDNN"
PY
run() { "$folder/venv/bin/python" "$folder/products.py" "$@"; }
run "OMP_THREAD_LIMIT not set" 2 right
OMP_THREAD_LIMIT=1 run "OMP_THREAD_LIMIT=1" 2 wrong
OMP_THREAD_LIMIT=1 run "OMP_THREAD_LIMIT=1 and set_num_threads(1)" 1 right
