"""A real vLLM for CPUs, in a separate environment."""

from contextlib import ExitStack

import pytest

from eval.engines.local_vllm import serve_vllm

FP32 = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "2048")


def words_of(keys):
    """Keys of a recipe as words of the command line."""
    return [word for key, value in keys.items() for word in (f"--{key}", str(value))]


@pytest.fixture(scope="module")
def vllm(installed):
    """Starts servers in fp32: vllm(target, *arguments) -> address. They end with the module."""
    with ExitStack() as running:
        yield lambda target, *arguments: running.enter_context(
            serve_vllm(target, *FP32, *arguments)
        )
