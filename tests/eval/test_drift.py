"""The command for a cron job: what it says, what it returns, and what it keeps."""

import json
from pathlib import Path

import pytest

from eval.drift import main
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


@pytest.mark.parametrize(
    ("drafts", "times", "status", "says"),
    [
        (4000, 1.0, 0, "as measured (400 and 4,000 drafts)"),
        (4000, 0.6, 1, "less is accepted than measured at position 1, 2."),
        (4000, 1.5, 1, "more is accepted than measured"),
        (100, 1.0, 3, "about 1,500 more drafts are needed"),
        (0, 1.0, 3, "drafted nothing"),
    ],
)
def test_verdicts(report, traffic, capsys, drafts, times, status, says):
    assert drift(report, traffic(drafts, times)) == status
    assert says in capsys.readouterr().out


def test_a_real_server_s_code_is_as_measured_and_its_legal_texts_moved(sample_report, tmp_path):
    """Counts of vLLM 0.32, gamma 3: a report of 30 prompts of code, 60 others, 60 of licences."""
    rows = []
    for line in (REAL / "vllm-answers.jsonl").read_text().splitlines()[:30]:
        counts = json.loads(line)["metrics"]["speculative_decoding"]
        drafts, *at = (sum(counts["acceptance_histogram"][i:]) for i in range(4))
        rows.append(Speculation(drafts, counts["num_draft_tokens"], sum(at), at))
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
    assert drift(report, legal, "--since", code) == 1


def test_a_server_since_the_last_call(report, server, tmp_path):
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
    assert drift(report, server.url) == 3
    assert drift(report, server.url, "--since", last) == 1
    assert last.read_text() == server.metrics
    # a quiet hour is kept for the next one
    kept, server.metrics = last.read_text(), page(0, 4700, 2580, 1496, 906)
    assert drift(report, server.url, "--since", last) == 3
    assert last.read_text() == kept
    server.metrics = page(0, 5000, 2760, 1604, 972)
    assert drift(report, server.url, "--since", last) == 0
    # started anew, with fewer than before
    server.metrics = page(0, 1000, 600, 360, 220)
    assert drift(report, server.url, "--since", last) == 0


def test_a_server_or_counters_that_are_not_there(report, server, tmp_path):
    assert drift(report, "http://127.0.0.1:9") == 4
    server.metrics = "vllm:num_requests_running 0.0\n"
    assert drift(report, server.url) == 4


def test_input_of_no_use(report, traffic, tmp_path, capsys):
    def refused(reason, *arguments):
        assert main([str(argument) for argument in arguments]) == 2
        assert reason in capsys.readouterr().err

    now = traffic(4000)
    refused("gamma is 3, so acceptance", report, "--metrics", traffic(4000, shares=(0.6, 0.4)))
    now = traffic(4000)
    refused("no report at", tmp_path / "no.json", "--metrics", now)
    refused("Is a directory", tmp_path, "--metrics", now)
    refused("name one of tuned", report, "--metrics", now, "--draft", "other")
    refused("cannot be read as text", report, "--metrics", tmp_path / "no.prom")
    refused("cannot be read as text", report, "--metrics", now, "--since", tmp_path / "no.prom")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    refused("cannot be read as text", report, "--metrics", tmp_path / "binary")
    refused("is damaged", tmp_path / "binary", "--metrics", now)
    for text in ("", page(0, 1000)):  # emptied or cut, it would hide that all is counted again
        (tmp_path / "emptied.prom").write_text(text)
        refused("emptied.prom", report, "--metrics", now, "--since", tmp_path / "emptied.prom")
    other = json.loads((tmp_path / "report.json").read_text()) | {"schema": "draftsmith-report/2"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    refused("draftsmith-report/1", tmp_path / "other.json", "--metrics", now)
    with pytest.raises(SystemExit, match="2"):
        main([report])
