"""Drafts in running SGLang servers, fake ones that send SGLang's messages: requests and reports."""

from contextlib import nullcontext

import pytest

from eval.decoding.loop import Decoding, seed_of
from eval.decoding.verification import Sampling
from eval.engines.contender import Task
from eval.engines.load import passes, timed_pass
from eval.engines.measure import measure_servers
from eval.engines.server import ServerError
from eval.engines.sglang import SglangServer, counts_of
from eval.measuring.runs import Speculation
from eval.prompts import Prompt, PromptSet
from eval.reporting.fields import Load, read_report
from eval.run import main
from tests.fake_vllm import TEXT, Constant

GREEDY = Decoding(Sampling(), frozenset(), 20)
CHAT = [{"role": "user", "content": "two"}]
# meta_info of requests: of SGLang in August 2026, and in 2025
NOW = {
    "spec_accept_rate": 70 / 105,
    "spec_accept_length": 91 / 21,
    "spec_num_correct_drafts": 70,
    "spec_num_proposed_drafts": 105,
    "spec_verify_ct": 21,
    "spec_correct_drafts_histogram": [2, 4, 2, 1, 1, 11],
    "completion_tokens": 91,
}
BEFORE = {
    "spec_accept_rate": 0.75,
    "spec_accept_token_num": 96,
    "spec_draft_token_num": 240,
    "spec_verify_ct": 80,
    "spec_accept_histogram": [10, 44, 26],
}


@pytest.fixture
def served(fake):
    def make(step=1, model=None, **changes):
        return fake(step, model, owner="sglang", metrics=False, **changes)

    return make


@pytest.mark.parametrize(
    ("about", "counts"),
    [
        (NOW, Speculation(21, 105, 70, [19, 15, 13, 12, 11])),
        (BEFORE, Speculation(80, 240, 96, [70, 26, 0])),
        ({"completion_tokens": 91}, (0, 0, 0, [])),
        ({"completion_tokens": 91, "spec_verify_ct": 30}, None),
    ],
)
def test_counts_of_a_request(about, counts):
    assert counts_of(about) == counts


def test_counts_of_drafts_of_several_lengths():
    counts = [counts_of(NOW), counts_of(BEFORE)]
    assert Speculation.sum(counts) == (101, 345, 166, [89, 41, 13, 12, 11])


@pytest.mark.parametrize("incremental", [False, True])
def test_a_request_and_its_output(served, incremental):
    server = served(3, incremental=incremental)
    sampled = Decoding(Sampling(0.7, 50, 0.9), frozenset(), 20, seed=5)
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    prompt = Prompt("b", messages=CHAT, response_format=form, tools=tools)
    output = SglangServer(server.url).decode(prompt, sampled)
    assert (output.run.tokens, output.prompt_ids, output.ended) == (TEXT, [1, 2, 3], False)
    assert (output.run.prefill_tokens, output.run.block_tokens) == (1, [3] * 6 + [1])
    assert output.text == "".join(map(chr, TEXT))
    assert output.counters == (7, 21, 14, [7, 7, 0])
    (rendered, chat), (path, body) = server.requests
    assert (rendered, chat["messages"], chat["tool_choice"]) == ("/tokenize", CHAT, "auto")
    assert (path, body["input_ids"]) == ("/generate", [1, 2, 3])
    how = body["sampling_params"]
    assert (how["temperature"], how["top_k"], how["top_p"]) == (0.7, 50, 0.9)
    assert (how["max_new_tokens"], how["sampling_seed"]) == (20, seed_of(5, "b") % 2**31)
    assert (how["json_schema"], how["min_p"]) == ('{"type": "object"}', 0.0)


def test_an_output_that_a_stop_token_ends(served):
    class Stops(Constant):
        def write(self, ids, body):
            return TEXT[:4], None, "stop"

    assert SglangServer(served(1, Stops()).url).decode(Prompt("a", prompt="x"), GREEDY).ended


@pytest.mark.parametrize("fault", ["dies_after", "refuses_after"])
def test_an_output_that_breaks_off(served, fault):
    with pytest.raises(ServerError):
        SglangServer(served(3, **{fault: 0}).url).decode(Prompt("a", prompt="x"), GREEDY)


@pytest.mark.parametrize(("status", "tries"), [(None, 2), (503, 2), (400, 1)])
def test_an_aborted_output_is_asked_for_again(served, status, tries):
    """Unless the request was at fault."""
    server = served(3, faults=["abort"], error_status=status)
    with nullcontext() if tries == 2 else pytest.raises(ServerError):
        assert SglangServer(server.url).decode(Prompt("a", prompt="x"), GREEDY).run.tokens == TEXT
    assert len(server.streamed) == tries


def test_one_request_at_a_time_is_timed_by_its_last_try(served):
    """As at other servers; the others waited for 0.3 s."""
    server = served(3, faults=[503] * 3)
    assert SglangServer(server.url).decode(Prompt("a", prompt="x"), GREEDY).run.seconds < 0.15


def test_counts_at_a_load_are_those_of_its_requests(served):
    server = served(3)
    (asked, _) = passes(Load(concurrency=2), [Prompt(str(i), prompt="x") for i in range(10)], 0)
    passed = timed_pass(SglangServer(server.url), asked, GREEDY)
    count = len(asked.prompts)
    assert passed.counters == (7 * count, 21 * count, 14 * count, [7 * count, 7 * count, 0])


def test_a_server_that_speculates_sends_its_counts(served):
    """As one whose draft is not loaded does not; n-grams may find nothing."""
    clients = (SglangServer(served(1).url) for _ in range(2))
    task = Task(PromptSet("", [Prompt("a", prompt="x")], []), GREEDY)
    with pytest.raises(ServerError, match="served drafted nothing"):
        measure_servers({"served": next(clients)}, next(clients), task)
    drafts, specs = {"served": SglangServer(served(1).url)}, {"served": "prompt-lookup"}
    assert measure_servers(drafts, SglangServer(served(1).url), task, specs=specs).drafts


@pytest.fixture
def command(tmp_path):
    """The status of the command for these servers, with and without a draft."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(10)))

    def measure(drafting, plain, *more):
        urls = ["--base_url", drafting.url, "--baseline_url", plain.url]
        out = ["--output_dir", str(tmp_path), "--max_new_tokens", "20"]
        return main([*urls, *out, "--prompts", str(prompts), *more])

    return measure


def test_command_finds_the_engine_out(served, command, tmp_path):
    assert command(served(3), served(1), "--concurrency", "2") == 0
    report = read_report(tmp_path / "report" / "report.json")
    assert (report.environment.engine, report.environment.engine_version) == ("sglang", "0.5.21")
    draft = report.drafts["served"]
    assert (draft.lossless.identical, draft.speedup.n) == (10, 10)
    assert draft.counters.mean_acceptance_length.mean == 3.0
    assert [place.mean for place in draft.counters.per_position] == [1.0, 1.0, 0.0]
    assert draft.by_load[0].mean_acceptance_length.mean == 3.0


def test_a_server_of_another_engine_is_refused(served, fake, command, capsys):
    assert command(served(3), served(1), "--engine", "vllm") == 2
    assert command(served(3), fake(1)) == 2
    assert command(fake(3), served(1)) == 2
    assert capsys.readouterr().err.count("sglang") == 3


def test_an_engine_behind_a_gateway_is_named(served, command, tmp_path):
    """Its models have another owner."""
    servers = served(3), served(1)
    for server in servers:
        server.owned_by = "gateway"
    assert command(*servers, "--engine", "sglang") == 0
    assert read_report(tmp_path / "report" / "report.json").engine == "sglang"
