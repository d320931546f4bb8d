#!/usr/bin/env bash
# A generator of torch on a CPU accepts a seed of 64 bits, returns it, and draws by its lowest 32.
#
# One would guess: two seeds that differ draw different numbers, as generator.initial_seed() differs.
# Seeds of 64 bits are usual where a seed is a hash of a text or (epoch << 32) + row.
# What happens: the upper half changes nothing. With a seed (epoch << 32) + row every epoch masks,
# samples or drops the same as the first. Hashes of 100,000 texts have at least one common stream with
# a probability of 69%. numpy takes the whole seed, and so does torch's generator on a GPU (Philox):
# the same program draws other numbers there.
#
# Versions: torch 2.13.0, numpy 2.3.5.
# Source: the engine of CPU generators, at::mt19937, has a seed of 32 bits
# (aten/src/ATen/core/MT19937RNGEngine.h).
# Output seen on 2026-11-28:
#   initial seeds 7, 4294967303, 30064771079: 1 different stream in torch, 3 in numpy
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.3.5
"$folder/venv/bin/python" - <<'PY'
import numpy
import torch

generators = [torch.Generator().manual_seed((epoch << 32) + 7) for epoch in (0, 1, 7)]
seeds = [generator.initial_seed() for generator in generators]
streams = {tuple(torch.rand(64, generator=generator).tolist()) for generator in generators}
others = {tuple(numpy.random.default_rng(seed).random(64)) for seed in seeds}
print(f"initial seeds {', '.join(map(str, seeds))}:", end=" ")
print(f"{len(streams)} different stream in torch, {len(others)} in numpy")
assert len(set(seeds)) == len(others) == 3
assert len(streams) == 1, "mended: a generator reads its whole seed"
PY
