# `make check` is what CI runs, without the installation.
.PHONY: check lint types test fast format gpu installs

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

# For a weekly job with a network: each installation of the pages, from PyPI alone.
installs:
	pytest tests/real/test_installs.py
