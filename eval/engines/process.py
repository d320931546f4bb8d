"""Servers that are started on this machine: ready before they are used, and always ended."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from eval.engines.server import API_KEY, Server, ServerError

READY_SECONDS = 1800  # enough to load a large model from a network disk and to compile it
END_SECONDS, DYING_SECONDS = 60, 5
# Variables that a server started here must not get, because it has no key and no launcher.
NOT_PASSED = {API_KEY, "VLLM_API_KEY", "LLAMA_API_KEY", "RANK", "LOCAL_RANK", "WORLD_SIZE"}
NOT_PASSED |= {"LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"}
# With the last one, no process of the server hosts a store.
NOT_PASSED |= {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_USE_AGENT_STORE"}
# It ends its process group if its input is closed, which happens however this process ends.
GUARD = f"trap '' TERM; read _; kill -TERM 0; sleep {DYING_SECONDS}; kill -KILL 0"


@contextmanager
def started_server(
    engine: str, command: Sequence[str], variables: Mapping[str, str], log_file: Path | None = None
) -> Iterator[str]:
    """The address of a server that `command` starts; the server ends with the block.

    command: without the options --host and --port, which every engine here has. variables: the
    environment. log_file: gets the server's log; None: a temporary file does. The server also ends
    if this process is killed. Raises ServerError if the server
    does not start. If the server ended, a ServerError of the block is raised again with the
    end of the server's log.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (
        log_file.open("w+b") if log_file else tempfile.TemporaryFile() as log,
        _process_group() as group,
    ):
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env={name: value for name, value in variables.items() if name not in NOT_PASSED},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=group,
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
            for signal_sent in (signal.SIGTERM, signal.SIGKILL):
                os.killpg(group, signal_sent)
                with suppress(subprocess.TimeoutExpired):
                    server.wait(END_SECONDS)
                    break


@contextmanager
def _process_group() -> Iterator[int]:
    """The id of a process group that is killed with the block, or if this process ends before."""
    guard = subprocess.Popen(
        ["/bin/sh", "-c", GUARD],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        process_group=0,
    )
    try:
        yield guard.pid
    finally:
        os.killpg(guard.pid, signal.SIGKILL)
        guard.communicate()
        deadline = time.monotonic() + DYING_SECONDS
        with suppress(ProcessLookupError):  # processes of a server may outlive it and hold memory
            while time.monotonic() < deadline:
                os.killpg(guard.pid, signal.SIGKILL)
                time.sleep(0.1)


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
    errors = [line.strip() for line in said if re.search(r"[Ee]rror:|_ASSERT\(", line)]
    reasons = [line for line in errors if "WARNING" not in line]
    status = server.poll()
    ending = "did not answer" if status is None else f"ended with status {status}"
    why = " / ".join((reasons or said)[-2:])[-600:] or "no output"
    return f"{ending} ({why})"
