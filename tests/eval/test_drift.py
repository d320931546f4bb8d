"""The command for a cron job: what it says, what it returns, and what it keeps."""

import json
from pathlib import Path

import pytest

from eval.drift import main
from eval.engines.counters import read_requests
from eval.measuring.intervals import measure, share
from eval.measuring.runs import Speculation
from eval.reporting.build import build_report
from eval.reporting.fields import Counters
from eval.reporting.files import write_report
from tests.eval.engines.test_counters import page
from tests.fake_vllm import FakeVllm

REAL = Path(__file__).parent / "engines"
SHARES = (0.6, 0.36, 0.22)


@pytest.fixture
def report(tmp_path, run_info, measurement):
    write_report(tmp_path, build_report(run_info, [measurement("tuned", 0.6)]))
    return str(tmp_path / "report.json")


@pytest.fixture
def traffic(tmp_path):
    """Makes a page of so many drafts, accepted like the report's or so many times it."""

    def make(drafts, times=1.0, shares=SHARES):
        text = page(0, drafts, *(round(drafts * share * times) for share in shares))
        (tmp_path / "now.prom").write_text(text)
        return str(tmp_path / "now.prom")

    return make


@pytest.fixture
def server():
    """A server whose /metrics is `server.metrics`."""
    made = FakeVllm()
    yield made
    made.stop()


def drift(report, metrics, *more):
    return main([report, "--metrics", metrics, *map(str, more)])


def test_as_measured(report, traffic, capsys):
    assert drift(report, traffic(4000)) == 0
    said = capsys.readouterr().out
    assert said.count("as measured") == 4  # each position, and in all
    assert "400 and 4,000 drafts" in said
    assert "category" not in said  # counters know none


def test_moved(report, traffic, capsys):
    assert drift(report, traffic(4000, 0.6)) == 1
    said = capsys.readouterr().out
    assert said.count("MOVED") == 2
    assert "less is accepted than measured at position 1, position 2" in said
    assert drift(report, traffic(4000, 1.5)) == 1
    assert "more is accepted than measured" in capsys.readouterr().out


def test_a_real_server_s_code_is_as_measured_and_its_legal_texts_moved(sample_report, tmp_path):
    """Counts of vLLM 0.32, gamma 3: a report of 30 prompts of code, 30 others, 60 of licences."""
    lines = (REAL / "vllm-answers.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "others.jsonl").write_text("".join(lines[30:]))
    rows = [counts for _, counts in read_requests("".join(lines[:30]))]
    drafts, drafted, accepted, accepted_at = Speculation.sum(rows)
    sample_report.drafts["tuned"].counters = Counters(
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        mean_acceptance_length=measure(
            "length", [(row.drafts + row.accepted, row.drafts) for row in rows]
        ),
        acceptance_rate=share("rate", [(None, row.accepted, row.drafted) for row in rows]),
        acceptance_per_position=[count / drafts for count in accepted_at],
        per_position=[
            share("position", [(None, row.accepted_at[i], row.drafts) for row in rows])
            for i in range(3)
        ],
    )
    write_report(tmp_path, sample_report)
    report, code = str(tmp_path / "report.json"), REAL / "vllm-metrics.prom"
    legal = str(REAL / "vllm-metrics-legal.prom")  # of the same server, an hour later
    assert drift(report, str(code)) == 0
    assert drift(report, str(tmp_path / "others.jsonl")) == 2  # 30 and 30 tell too little
    assert drift(report, legal, "--since", code) == 1


def test_too_few_drafts_to_tell(report, traffic, capsys):
    assert drift(report, traffic(100)) == 2
    assert "not told apart (400 and 100 drafts)" in (said := capsys.readouterr().err)
    assert "too few drafts to tell, about 1,500 more are needed" in said


def test_a_category_that_moved(report, tmp_path, capsys):
    """Half of the answers are as measured, the odd ones accept nothing."""
    rows = []
    for i in range(40):
        histogram = [12, 7, 4, 7] if i % 2 == 0 else [30, 0, 0, 0]
        about = {
            "acceptance_histogram": histogram,
            "num_draft_tokens": 90,
            "num_spec_tokens": 3,
        }
        name = ("even", "odd")[i % 2]
        rows.append({"category": name, "metrics": {"speculative_decoding": about}})
    rows[0]["category"] = "new"
    answers = tmp_path / "answers.jsonl"
    answers.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert drift(report, str(answers)) == 1
    said = {line[:24].strip(): line for line in capsys.readouterr().out.splitlines()}
    assert said["category even"].endswith("as measured")
    assert said["category odd"].endswith("MOVED")
    assert drift(report, str(answers), "--since", tmp_path / "x") == 2
    assert "answers count by themselves" in capsys.readouterr().err


def test_a_server_since_the_last_call(report, server, tmp_path, capsys):
    last = tmp_path / "last.prom"
    before = (4000, 2400, 1440, 880)
    server.metrics = page(0, *before) + "vllm:num_requests_running 0.0\n"
    for address in (server.url, f"{server.url}/metrics", f"{server.url}/v1/"):
        assert drift(report, address) == 0
    assert not last.exists()
    assert drift(report, server.url, "--since", last) == 0  # all since the server's start
    assert last.read_text() == page(0, *before)
    # an hour of other texts, which all that was served before would hide
    server.metrics = page(0, *(a + b for a, b in zip(before, (600, 120, 20, 4), strict=True)))
    assert drift(report, server.url) == 2  # inconclusive
    assert drift(report, server.url, "--since", last) == 1
    assert last.read_text() == server.metrics
    # a quiet hour is kept for the next one
    kept, server.metrics = last.read_text(), page(0, 4700, 2580, 1496, 906)
    assert drift(report, server.url, "--since", last) == 2
    assert "too few drafts" in capsys.readouterr().err
    assert last.read_text() == kept
    server.metrics = page(0, 5000, 2760, 1604, 972)
    assert drift(report, server.url, "--since", last) == 0
    # started anew, with fewer than before
    server.metrics = page(0, 1000, 600, 360, 220)
    assert drift(report, server.url, "--since", last) == 0


def test_input_of_no_use(report, traffic, tmp_path, server, capsys):
    def refused(reason, *arguments):
        assert main([str(argument) for argument in arguments]) == 2
        assert reason in capsys.readouterr().err

    now = traffic(4000)
    refused("gamma is 3: acceptance differs", report, "--metrics", traffic(4000, shares=(0.6, 0.4)))
    now = traffic(4000)
    refused("no report at", tmp_path / "no.json", "--metrics", now)
    refused("Is a directory", tmp_path, "--metrics", now)
    refused("it has tuned", report, "--metrics", now, "--draft", "other")
    refused("cannot be read as text", report, "--metrics", tmp_path / "no.prom")
    refused("cannot be read as text", report, "--metrics", now, "--since", tmp_path / "no.prom")
    refused("cannot be reached", report, "--metrics", "http://127.0.0.1:9")
    server.metrics = "vllm:num_requests_running 0.0\n"
    refused("the server has no draft", report, "--metrics", server.url)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    refused("cannot be read as text", report, "--metrics", tmp_path / "binary")
    other = json.loads((tmp_path / "report.json").read_text()) | {"schema": "draftsmith-report/2"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    refused("draftsmith-report/1", tmp_path / "other.json", "--metrics", now)
    with pytest.raises(SystemExit) as ended:
        main([report])
    assert ended.value.code == 2
    assert "--metrics is required" in capsys.readouterr().err
