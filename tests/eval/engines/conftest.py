"""Fake vLLM servers that end with their test."""

import pytest

from eval.engines import measure
from eval.engines.engine_server import EngineServer
from eval.engines.server import PATIENT
from tests.fake_vllm import FakeVllm


@pytest.fixture(autouse=True)
def hurried(monkeypatch):
    soon = PATIENT.new(total=3, backoff_factor=0.05, backoff_jitter=0)
    monkeypatch.setattr(EngineServer, "retries", soon)
    monkeypatch.setattr(measure, "PATIENT", soon)


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
