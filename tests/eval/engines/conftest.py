"""Fake vLLM servers that end with their test."""

import pytest

from tests.fake_vllm import FakeVllm


@pytest.fixture
def fake():
    """Makes servers: fake(tokens of a step, model, **attributes)."""
    servers = []

    def make(step=1, model=None, **changes):
        servers.append(FakeVllm(model, step=step, **changes))
        return servers[-1]

    yield make
    for server in servers:
        server.stop()
