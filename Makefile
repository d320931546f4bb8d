# `make check` is what CI runs, without the installation.
.PHONY: check lint types test fast format gpu gpu-files

check: lint types test

lint:
	ruff check
	ruff format --check

types:
	mypy

test:
	pytest

fast:
	pytest -m "not real"

format:
	ruff check --fix
	ruff format

# where there is a network: the embedded model files in parts of at most 50 MB, in .gpu-files
gpu-files:
	PYTHONPATH=. python tests/gpu/files.py pack

# on a GPU, from a copied working tree, without a network: tests, then figures
gpu:
	PYTHONPATH=. python tests/gpu/files.py unpack
	DRAFTSMITH_CACHE=.gpu-files/cache HF_HUB_OFFLINE=1 pytest -m gpu tests/gpu
	PYTHONPATH=. python tests/benchmarks/gpu.py
