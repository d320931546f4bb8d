# `make check` is what CI runs, without the installation.
.PHONY: check lint types test fast format gpu

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

gpu:
	pytest -m gpu tests/gpu
