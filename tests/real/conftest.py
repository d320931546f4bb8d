"""A real vLLM for CPUs, in an environment of its own."""

from contextlib import ExitStack

import pytest

from eval.engines.environment import EngineMissing, vllm_python
from eval.engines.local_vllm import serve_vllm


@pytest.fixture(scope="module")
def vllm():
    """Starts servers in fp32: vllm(target, *arguments) -> address. They end with the module."""
    try:
        vllm_python()
    except EngineMissing as reason:
        pytest.skip(str(reason))
    with ExitStack() as running:
        yield lambda target, *arguments: running.enter_context(serve_vllm(target, *arguments))
