# `make check` is what CI runs, without the installation.
.PHONY: check lint types test fast format gpu gpu-files gpu-unpack gpu-tests gpu-figures

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

# where there is a network: packages and embedded model files in parts of at most 50 MB, in .gpu-files
gpu-files:
	PYTHONPATH=. python tests/gpu/files.py pack

# on a GPU, from a copied working tree, without a network: tests, then figures; or one by one
ON_GPU = PYTHONPATH=$(CURDIR)/.gpu-files/site-packages:$(CURDIR) HF_HUB_OFFLINE=1
gpu: gpu-unpack gpu-tests gpu-figures

gpu-unpack:
	python3 tests/gpu/files.py unpack

gpu-tests:
	$(ON_GPU) DRAFTSMITH_CACHE=.gpu-files/cache python3 -m pytest -m gpu tests/gpu

gpu-figures:
	$(ON_GPU) python3 tests/benchmarks/gpu.py
