"""The client of vLLM servers against fake ones: what is counted, and every way they can fail."""

import json

import pytest

from eval.decoding.loop import Decoding, seed_of
from eval.decoding.verification import Sampling
from eval.engines.server import ServerError
from eval.engines.vllm import VllmServer
from eval.engines.vllm_servers import measure_servers
from eval.prompts import Prompt, PromptSet
from eval.reporting.page import render_page
from eval.reporting.report import read_report
from eval.reporting.tables import tables
from eval.reporting.text import render_markdown
from eval.run import main
from tests.eval.engines.conftest import TEXT

PROMPTS = [
    Prompt("a", prompt="one", category="x", group="doc"),
    Prompt("b", messages=[{"role": "user", "content": "two"}], category="y"),
    Prompt("c", prompt="three", category="x"),
]


def measure(drafting, plain, prompts=PROMPTS, temperature=0.0, timeout=5.0):
    return measure_servers(
        {"served": VllmServer(drafting.url + "/v1/", timeout)},
        VllmServer(plain.url, timeout),
        PromptSet("made up", prompts, []),
        Decoding(Sampling(temperature), frozenset(), 20),
        {"command": "test"},
    )


def test_a_whole_report_of_two_servers(fake):
    drafting, plain = fake(3), fake(1)
    report = measure(drafting, plain)
    draft = report.drafts["served"]
    # 20 tokens: the prefill's one, then 7 blocks of 3 at most, of which 2 drafted ones accepted
    counters = draft.counters
    assert counters.num_drafts == 3 * 7
    assert counters.num_draft_tokens == 3 * 7 * 3
    length = counters.mean_acceptance_length
    assert (length.mean, length.range, length.n) == (3.0, (3.0, 3.0), 3)
    assert counters.acceptance_rate.mean == pytest.approx(2 / 3)
    assert counters.acceptance_per_position == [1.0, 1.0, 0.0]
    assert [(p.mean, p.range, p.n) for p in counters.per_position] == [
        (1.0, (1.0, 1.0), 3),
        (1.0, (1.0, 1.0), 3),
        (0.0, (0.0, 0.0), 3),
    ]
    assert {name: (one.mean, one.n) for name, one in counters.by_category.items()} == {
        "x": (3.0, 2),
        "y": (3.0, 1),
    }
    assert draft.lossless.identical == draft.lossless.prompts == 3
    assert draft.speedup.n == 3
    assert set(draft.by_category) == {"x", "y"}
    assert draft.by_category["x"].tau is None
    assert draft.by_context["below 512 tokens"].speedup.n == 3
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
    for rendered in (render_markdown(report), render_page(report)):
        assert "Counters of the server" in rendered
        assert "served, alpha, rejection atlas: it gives no distributions" in rendered
    assert "decode efficiency" not in {row[0] for table in tables(report) for row in table.rows}


def test_a_first_block_of_several_tokens_belongs_to_the_prefill(fake):
    how = Decoding(Sampling(), frozenset(), 20)
    run = VllmServer(fake(3).url).decode(PROMPTS[0], how).run
    assert (run.prefill_tokens, run.block_tokens) == (1, [3, 3, 3, 3, 3, 3, 1])
    run = VllmServer(fake(3, first=4).url).decode(PROMPTS[0], how).run
    assert (run.prefill_tokens, run.block_tokens) == (4, [3, 3, 3, 3, 3, 1])
    assert run.tokens == TEXT
    assert len(run.block_seconds) == 6


def test_the_same_requests_to_both(fake):
    drafting, plain = fake(3), fake(1)
    measure(drafting, plain, temperature=0.7)
    one, other = (
        sorted(json.dumps(request, sort_keys=True) for request in server.requests)
        for server in (drafting, plain)
    )
    assert one == other
    paths = [path for path, _ in drafting.requests]
    assert paths.count("/v1/chat/completions") == 2  # sampled, and greedily for losslessness
    bodies = [body for _, body in drafting.requests]
    assert {body["temperature"] for body in bodies} == {0.7, 0.0}
    assert not any("ignore_eos" in body for body in bodies)
    assert {body["seed"] for body in bodies} == {seed_of(0, prompt.id) for prompt in PROMPTS}


def test_a_chat_brings_what_its_template_reads(fake):
    kwargs = {"enable_thinking": False}
    asked = Prompt("b", messages=PROMPTS[1].messages, chat_template_kwargs=kwargs)
    drafting = fake(3)
    report = measure(drafting, fake(1), [asked])
    assert all(body["chat_template_kwargs"] == kwargs for _, body in drafting.requests)
    assert report.prompts.chat_template_kwargs == [kwargs]


def test_other_tokens_are_not_explained_away(fake):
    drafting, plain = fake(3, text=[*TEXT[:9], 7, *TEXT[10:]]), fake(1)
    report = measure(drafting, plain)
    ledger = report.drafts["served"].lossless
    assert ledger.unexplained == 3
    assert ledger.divergences[0].position == 9
    assert ledger.divergences[0].drafted == "token 7"
    assert report.warnings[0].startswith("NOT LOSSLESS")


def test_a_server_that_is_down(fake):
    drafting, plain = fake(3), fake(1)
    plain.shutdown()
    plain.server_close()
    with pytest.raises(ServerError, match=r"127.0.0.1:\d+ cannot be reached.*start it"):
        measure(drafting, plain)


def test_an_address_that_is_none():
    with pytest.raises(ServerError, match="is no address of a server"):
        VllmServer("localhost:8000")


def test_a_server_that_dies_midway_leaves_what_was_measured(fake):
    report = measure(fake(3, dies_after=3), fake(1))  # the warm-up and two prompts
    draft = report.drafts["served"]
    assert draft.speedup.n == report.prompts.n == 2
    assert draft.missing[0].field == "prompts"
    assert draft.missing[0].reason.startswith("after 2 of 3 prompts: http://127.0.0.1")
    assert "broke off" in draft.missing[0].reason
    assert "served: measured in part only, after 2 of 3 prompts" in "".join(report.warnings)
    assert "served: measured in part only, after 2 of 3 prompts" in render_page(report)


def test_a_prompt_that_the_server_refuses_ends_the_run_with_its_reason(fake):
    report = measure(fake(3, refuses_after=3), fake(1))  # the warm-up and two prompts
    assert report.prompts.n == 2
    reason = report.drafts["served"].missing[0].reason
    assert reason.startswith("after 2 of 3 prompts: http://127.0.0.1")
    assert "answered 400" in reason
    assert "prompt 'c'" in reason
    assert "maximum context length is 8 tokens" in reason


@pytest.mark.parametrize(
    ("drafting", "plain", "message"),
    [
        ({"block": 3, "delay": 1.0}, {}, r"sent nothing for 0.3 s: it is overloaded"),
        ({"block": 3, "dies_after": 1}, {}, r"after 0 of 3 prompts: .* broke off"),
        ({"counted": True}, {}, "speculation is off; start it with --speculative-config"),
        ({"block": 3}, {"block": 2}, "speculates, too: a baseline must not"),
        ({"block": 3}, {"model": "org/other"}, "serve the same target twice"),
        ({"block": 3, "token_ids": False}, {}, "sent no token ids"),
    ],
)
def test_servers_that_cannot_be_measured(fake, drafting, plain, message):
    with pytest.raises(ServerError, match=message):
        measure(fake(**drafting), fake(**plain), timeout=0.3 if "delay" in drafting else 5.0)


@pytest.mark.parametrize(
    ("faults", "reason"),
    [
        ({"counted": False}, "no counters vllm:spec_decode_*"),
        ({"metrics": False}, "no counters vllm:spec_decode_*"),
        ({"traffic": 50}, "others used the server"),
    ],
)
def test_counters_that_are_of_no_use_leave_the_speed(fake, faults, reason):
    draft = measure(fake(3, **faults), fake(1)).drafts["served"]
    assert draft.counters is None
    assert draft.speedup.mean > 0
    assert reason in {entry.field: entry.reason for entry in draft.missing}["counters"]


def command(drafting, plain, prompts, out, *more):
    servers = ["--engine", "vllm", "--base_url", drafting.url, "--baseline_url", plain.url]
    what = ["--prompts", str(prompts), "--output_dir", str(out), "--max_new_tokens", "20"]
    return main([*servers, *what, *more])


def test_command(fake, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(10)))
    out = tmp_path / "out"
    assert command(fake(3), fake(1), prompts, out, "--fail_under_speedup", "0.001") == 0
    report = read_report(out / "report" / "report.json")
    assert report.engine == "vllm"
    assert report.target == "org/target"
    assert (out / "report" / "report.html").is_file()
    assert command(fake(3), fake(1), prompts, out, "--fail_under_speedup", "1000") == 1
    assert command(fake(3), fake(1), prompts, out, "--fail_under_alpha", "0.1") == 1
    assert "alpha was not measured" in capsys.readouterr().err
    few = tmp_path / "few.jsonl"
    few.write_text("".join(prompts.read_text().splitlines(keepends=True)[:9]))
    assert command(fake(3), fake(1), few, out, "--fail_under_speedup", "0.001") == 1
    assert "rests on 9 prompts" in capsys.readouterr().err
    assert command(fake(3, dies_after=3), fake(1), prompts, out) == 2
    assert "measured in part only, after 2 of 10 prompts" in capsys.readouterr().err
    assert read_report(out / "report" / "report.json").prompts.n == 2
    assert command(fake(1, counted=True), fake(1), prompts, out) == 2
    assert "speculation is off" in capsys.readouterr().err


def test_command_without_its_servers(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--engine", "vllm", "--base_url", "http://localhost:1", "--prompts", "x"])
    assert ended.value.code == 2
    assert "--baseline_url" in capsys.readouterr().err
