"""Servers that are started on this machine: ready before they are used, and always ended."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import psutil

from eval.engines.server import API_KEY, Server, ServerError

READY_SECONDS = 1800  # enough to load a large model from a network disk and to compile it
END_SECONDS, DYING_SECONDS = 60, 5
# Variables that a server started here must not get, because it has no key and no launcher.
NOT_PASSED = {API_KEY, "VLLM_API_KEY", "LLAMA_API_KEY", "RANK", "LOCAL_RANK", "WORLD_SIZE"}
NOT_PASSED |= {"LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
# With the last one, no process of the server hosts a store.
NOT_PASSED |= {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
# looked up here, because between fork and exec a lock of another thread may be held for ever
_prctl: Any = ctypes.CDLL(None).prctl if sys.platform == "linux" else None


@contextmanager
def served_here(engine: str, command: Sequence[str], variables: Mapping[str, str]) -> Iterator[str]:
    """The address of a server that `command` starts; the server ends with the block.

    command: without the options --host and --port, which every engine here has. variables: the
    environment. On Linux the server also ends if this process is killed. Raises ServerError if the
    server does not start. If the server ended, a ServerError of the block is raised again with the
    end of the server's log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env={name: value for name, value in variables.items() if name not in NOT_PASSED},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all processes of the server can be ended
            preexec_fn=_end_with_parent if _prctl else None,
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait_until_ready(engine, server, port, log.fileno())
            try:
                yield address
            except ServerError as error:
                with suppress(subprocess.TimeoutExpired):  # the server may be about to end
                    server.wait(DYING_SECONDS)
                if server.poll() is None:
                    raise
                why = _last_words(server, log.fileno())
                raise ServerError(f"{error} This {engine} {why}.") from None
        finally:
            _end(server)


def _end_with_parent() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_ready(engine: str, server: subprocess.Popen[bytes], port: int, log: int) -> None:
    """Wait until this server answers at its port; another server may have taken the port."""
    deadline = time.monotonic() + READY_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(psutil.Error, ServerError):  # the server does not answer yet
            process = psutil.Process(server.pid)
            for child in (process, *process.children(recursive=True)):
                if any(c.laddr.port == port for c in child.net_connections("tcp")):
                    Server(f"http://127.0.0.1:{port}", timeout=5).text("/health")
                    return
        time.sleep(1)
    raise ServerError(
        f"{engine} {_last_words(server, log)} before it was ready. Free memory, or correct the "
        "cause that its log names."
    )


def _last_words(server: subprocess.Popen[bytes], log: int) -> str:
    """The server's exit status, if it ended, and the last errors (else lines) of its log."""
    size = os.fstat(log).st_size
    said = os.pread(log, size, 0).decode("utf-8", "replace").splitlines()
    reasons = [line.strip() for line in said if "Error:" in line or "error:" in line]
    status = server.poll()
    ending = "did not answer" if status is None else f"ended with status {status}"
    why = " / ".join((reasons or said)[-2:])[-600:] or "no output"
    return f"{ending} ({why})"


def _end(server: subprocess.Popen[bytes]) -> None:
    """End all processes of a server: with SIGTERM first, then with SIGKILL."""
    for signal_sent in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal_sent)
        with suppress(subprocess.TimeoutExpired):
            server.wait(END_SECONDS)
            break
    deadline = time.monotonic() + DYING_SECONDS
    with suppress(ProcessLookupError):  # child processes may live longer and hold memory
        while time.monotonic() < deadline:
            os.killpg(server.pid, signal.SIGKILL)
            time.sleep(0.1)
