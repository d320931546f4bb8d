"""The command for a cron job: what it says, what it returns, and what it keeps."""

import itertools
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from eval import drift as module
from eval.drift import main
from eval.measuring.intervals import measure, share
from eval.measuring.runs import Speculation
from eval.reporting.build import build_report
from eval.reporting.fields import Counters
from eval.reporting.files import write_report
from tests.eval.engines.test_counters import page
from tests.eval.fake_prometheus import FakePrometheus
from tests.fake_vllm import FakeVllm

ROOT = Path(__file__).resolve().parents[2]
REAL = Path(__file__).parent / "engines"
LIGHT = {"filelock", "numpy", "pydantic", "ruamel.yaml", "scipy", "urllib3"}  # docs/serving.md
SHARES = (0.6, 0.36, 0.22)
START_LINE = "process_start_time_seconds 1.7e9\n"


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
    ("drafts", "times", "status", "moved", "lacking"),
    [
        (4000, 1.0, 0, [], 0),
        (4000, 0.6, 1, [1, 2], 0),
        (4000, 1.5, 1, [1, 2], 0),
        (100, 1.0, 3, [], 1500),
        (0, 1.0, 3, [], 0),
    ],
)
def test_verdicts(report, traffic, capsys, drafts, times, status, moved, lacking):
    assert drift(report, traffic(drafts, times), "--json") == status
    result = json.loads(capsys.readouterr().out)
    assert (result["exit_status"], result["verdict"]) == (status, module.VERDICTS[status])
    assert result["drafts"] == {"report": 400, "traffic": drafts}
    found = [place["position"] for place in result["positions"] if place["verdict"] == "moved away"]
    assert found == moved
    assert (result["more_drafts_needed"] or 0) == pytest.approx(lacking, rel=0.1)
    assert drift(report, traffic(drafts, times)) == status
    text = capsys.readouterr().out
    assert text.count("moved away") == len(moved) + (status == 1)
    assert result["reason"] in text
    assert text.endswith(f"{result['assumed']}.\n")


def test_a_report_by_its_output_folder(sample_report, traffic, tmp_path):
    write_report(tmp_path / "report", sample_report)
    assert drift(str(tmp_path), traffic(4000)) == 0


def test_a_monitor_needs_light_packages_only(report, traffic, tmp_path):
    """On a machine without torch, transformers and the like the whole command runs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w.-]+", spec)[0] for spec in project["dependencies"]}
    assert names > LIGHT
    code = f"""
import sys
class Missing:
    def find_spec(name, path=None, target=None):
        if name in {names - LIGHT}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing)
from eval.drift import main
sys.exit(main(sys.argv[1:4]) + main([sys.argv[1], "--monitoring", "."]))
"""
    command = [sys.executable, "-c", code, report, "--metrics", traffic(4000)]
    subprocess.run(command, check=True, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})


def test_a_real_server_s_code_is_as_measured_and_its_legal_texts_moved(sample_report, tmp_path):
    """Counts of vLLM 0.32, gamma 3: a report of 30 prompts of code, 60 others, 60 of licences."""
    rows = []
    for line in (REAL / "vllm-answers.jsonl").read_text().splitlines()[:30]:
        counts = json.loads(line)["metrics"]["speculative_decoding"]
        drafts, *at = (sum(counts["acceptance_histogram"][i:]) for i in range(4))
        rows.append(Speculation(drafts, counts["num_draft_tokens"], sum(at), at))
    drafts, drafted, accepted, _ = Speculation.sum(rows)
    sample_report.drafts["tuned"].counters = Counters(
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        mean_acceptance_length=measure(
            "length", [(row.drafts + row.accepted, row.drafts) for row in rows]
        ),
        acceptance_rate=share("rate", [(None, row.accepted, row.drafted) for row in rows]),
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
    server.metrics = page(0, *before) + "vllm:num_requests_running 0.0\n" + START_LINE
    for address in (server.url, f"{server.url}/metrics", f"{server.url}/v1/"):
        assert drift(report, address) == 0
    assert not last.exists()
    assert drift(report, server.url, "--since", last) == 0  # all since the server's start
    assert last.read_text() == page(0, *before) + START_LINE
    # an hour of other texts, which all that was served before would hide
    now = [a + b for a, b in zip(before, (600, 120, 20, 4), strict=True)]
    server.metrics = page(0, *now) + START_LINE
    assert drift(report, server.url) == 3
    assert drift(report, server.url, "--since", last) == 1
    assert last.read_text() == server.metrics
    # a quiet hour is kept for the next one
    kept, server.metrics = last.read_text(), page(0, 4700, 2580, 1496, 906) + START_LINE
    assert drift(report, server.url, "--since", last) == 3
    assert last.read_text() == kept
    server.metrics = page(0, 5000, 2760, 1604, 972) + START_LINE
    assert drift(report, server.url, "--since", last) == 0
    # started anew, with fewer than before
    server.metrics = page(0, 1000, 600, 360, 220) + START_LINE
    assert drift(report, server.url, "--since", last) == 0


def test_a_process_that_started_anew_is_known_by_its_start(report, server, tmp_path):
    """It has drafted more than the one before, so no counter fell."""
    last = tmp_path / "last.prom"
    for start, counts in ((1.7e9, (4000, 2400, 1440, 880)), (1.8e9, (6000, 3600, 2160, 1320))):
        server.metrics = page(0, *counts) + f"process_start_time_seconds {start}\n"
        assert drift(report, server.url, "--since", last) == 0
        assert last.read_text() == server.metrics
    # another replica, which is older
    server.metrics = page(0, 7000, 4200, 2520, 1540) + "process_start_time_seconds 1.7e9\n"
    assert drift(report, server.url, "--since", last) == 2


class Balancer(FakeVllm):
    """In front of two replicas, which answer in turn."""

    page = property(lambda self: next(self.replicas))


@pytest.mark.parametrize("named", [True, False])
def test_a_load_balancer_is_refused_and_pointed_to_prometheus(report, capsys, tmp_path, named):
    """Mutant: what one replica counted is subtracted from what another one did.

    named: not with data parallelism, where no process has a start; but no counter can fall.
    """
    pages = (
        page(0, drafts, *(round(drafts * share) for share in SHARES))
        + f"process_start_time_seconds {start}\n" * named
        for drafts, start in ((4000, 1.7e9), (9000, 1.6e9))
    )
    balancer = Balancer(replicas=itertools.cycle(list(pages)))
    try:
        assert drift(report, balancer.url, "--json", "--since", tmp_path / "last.prom") == 2
    finally:
        balancer.stop()
    assert "--prometheus" in json.loads(capsys.readouterr().out)["reason"]
    assert not (tmp_path / "last.prom").exists()


def test_a_process_without_a_start_is_not_subtracted(report, server, traffic, tmp_path):
    """Another replica may answer the next call. Files are the caller's."""
    last, server.metrics = tmp_path / "last.prom", page(0, 4000, 2400, 1440, 880)
    assert drift(report, server.url) == 0
    assert drift(report, server.url, "--since", last) == 2
    assert not last.exists()
    last.write_text(server.metrics)
    assert drift(report, traffic(8000), "--since", last) == 0


def test_short_outputs_are_not_called_moved(report, traffic, capsys):
    """Engines count behind the end of outputs."""
    path = Path(report)
    content = json.loads(path.read_text())
    for row in content["drafts"]["tuned"]["per_prompt"]:
        if "drafted" in row:  # each draft that was rejected at once has ended its output
            row["block_tokens"], row["drafted"] = row["block_tokens"] - 1, row["drafted"] - 2
    path.write_text(json.dumps(content))
    assert drift(report, traffic(4000, shares=(0.6, 0.45, 0.3)), "--json") == 3
    result = json.loads(capsys.readouterr().out)
    assert "--engine vllm" in result["reason"]
    place = result["positions"][1]
    assert place["report_highest"] == pytest.approx(place["report"] + 0.1)
    assert drift(report, traffic(4000, shares=(0.6, 0.2, 0.1))) == 1


def test_of_lengths_by_load_the_first_position_is_compared(report, tmp_path, capsys):
    for accepted, status in ((2400, 0), (1200, 1)):
        text = page(0, 4000, accepted, 400, 100).replace("12000.0", "8000.0")
        (tmp_path / "now.prom").write_text(text)
        assert drift(report, str(tmp_path / "now.prom"), "--json") == status
        result = json.loads(capsys.readouterr().out)
        assert len(result["positions"]) == 1
        assert "2.00 tokens" in result["reason"]


def test_a_server_or_counters_that_are_not_there(report, server, prometheus, capsys):
    assert drift(report, "http://127.0.0.1:9", "--json") == 4
    assert json.loads(capsys.readouterr().out)["verdict"] == "no counters"
    server.metrics = "vllm:num_requests_running 0.0\n"
    assert drift(report, server.url) == 4
    assert main([report, "--prometheus", server.url]) == 4  # not Prometheus
    empty = prometheus([])
    assert main([report, "--prometheus", empty.url]) == 4
    empty.fails = 503
    assert main([report, "--prometheus", empty.url]) == 4
    empty.fails = 400  # the selector is wrong
    assert main([report, "--prometheus", empty.url, "--selector", "{"]) == 2


# --- Prometheus


@pytest.fixture
def prometheus():
    """Makes a FakePrometheus of series."""
    made = []

    def make(series):
        made.append(FakePrometheus(series))
        return made[-1]

    yield make
    for one in made:
        one.stop()


WEEK, START, SCRAPE = 7 * 24 * 3600, 1_790_000_000, 15


def replica(rng, instance, shares=SHARES, begins=0, before=0, restarts_at=None):
    """The series of a replica from `begins` on, and its counts. before: drafts before the week."""
    times = np.arange(begins + rng.uniform(0, SCRAPE), WEEK, SCRAPE)
    new = {("drafts", None): rng.poisson(3 + 2 * np.sin(times / 43200))}
    accepted = new["drafts", None]
    for i, (now, earlier) in enumerate(zip(shares, (1, *shares), strict=False)):
        accepted = rng.binomial(accepted, now / earlier)
        new["accepted_tokens_per_pos", i] = accepted
    new["accepted_tokens", None] = sum(new["accepted_tokens_per_pos", i] for i in range(3))
    new["draft_tokens", None] = 3 * new["drafts", None]
    counters = {}
    for key, counts in new.items():
        values = np.cumsum(counts) + before * counts.sum() // new["drafts", None].sum()
        if restarts_at is not None:
            after = times >= restarts_at
            values[after] -= values[~after][-1]
        counters[key] = values
    truth = {key: counts.sum() for key, counts in new.items()}
    return ({"instance": instance, "model_name": "m"}, START + times, counters), truth


def test_three_replicas_with_a_restart_add_up_to_the_truth(
    report, prometheus, tmp_path, monkeypatch, capsys
):
    rng = np.random.default_rng(0)
    replicas = [
        replica(rng, "a", before=500_000),
        replica(rng, "b", before=9_000, restarts_at=3.4 * 24 * 3600),
        replica(rng, "c", begins=2 * 24 * 3600),
    ]
    server = prometheus([series for series, _ in replicas])
    truth = {key: sum(counts[key] for _, counts in replicas) for key in replicas[0][1]}

    def call(hour, last):
        monkeypatch.setattr(module, "time", lambda: START + hour * 3600)
        status = main([report, "--prometheus", server.url, "--since", str(last), "--json"])
        return status, json.loads(capsys.readouterr().out)

    def counts(result):
        drafts = result["drafts"]["traffic"]
        return np.array([drafts, *(place["traffic"] * drafts for place in result["positions"])])

    expected = [truth["drafts", None], *(truth["accepted_tokens_per_pos", i] for i in range(3))]
    week, hourly = tmp_path / "week", tmp_path / "hourly"
    week.write_text(str(START))
    status, result = call(168, week)
    assert status == 0
    assert counts(result) == pytest.approx(expected, rel=2e-4)
    # each hour: what is not decided is counted again by the next call
    found = pending = np.zeros(4)
    for hour in range(1, 169):
        status, result = call(hour, hourly)
        assert status in (0, 3)
        pending = counts(result)
        if hourly.read_text() == f"{START + hour * 3600}\n":
            found, pending = found + pending, np.zeros(4)
    assert found + pending == pytest.approx(expected, rel=2e-3)


def test_prometheus_finds_what_moved_in_one_replica_and_asks_for_one_model(
    report, prometheus, monkeypatch
):
    rng = np.random.default_rng(1)
    other, _ = replica(rng, "b", shares=(0.2, 0.04, 0.01))
    server = prometheus([replica(rng, "a")[0], other])
    monkeypatch.setattr(module, "time", lambda: START + WEEK)
    arguments = [report, "--prometheus", server.url, "--selector", '{job="vllm"}', "--hours", "12"]
    assert main(arguments) == 1
    assert all('{job="vllm"}' in query for query in server.queries)
    assert sum("[43200s]" in query for query in server.queries) == 4
    other[0]["model_name"] = "n"
    assert main(arguments) == 2


@pytest.mark.parametrize("prefix", ["ray_vllm:", "ray_vllm_", "vllm_"])
def test_prometheus_of_ray_or_of_a_collector(report, prometheus, monkeypatch, prefix):
    server = prometheus([replica(np.random.default_rng(1), "a")[0]])
    server.prefix = prefix
    monkeypatch.setattr(module, "time", lambda: START + WEEK)
    assert main([report, "--prometheus", server.url, "--hours", "12"]) == 0


def test_prometheus_has_headers_of_its_own(report, prometheus, monkeypatch, capsys):
    """And never the key of the model's server."""
    server = prometheus([replica(np.random.default_rng(1), "a")[0]])
    server.tenant = "team-a"
    monkeypatch.setattr(module, "time", lambda: START + WEEK)
    monkeypatch.setenv("DRAFTSMITH_API_KEY", "secret")
    arguments = [report, "--prometheus", server.url, "--hours", "12"]
    for headers, status in (
        ('{"X-Scope-OrgID": "team-a"}', 0),
        ('{"X-Scope-OrgID": "team-b"}', 4),
        ("team-a", 2),
        ('["team-a"]', 2),
        ('{"X-Scope-OrgID": "team-a\\n"}', 2),
    ):
        monkeypatch.setenv("DRAFTSMITH_PROMETHEUS_HEADERS", headers)
        assert main(arguments) == status
        said = capsys.readouterr().err
        assert "team-" not in said
        assert ("DRAFTSMITH_PROMETHEUS_HEADERS" in said) == (status != 0)
    assert all("Authorization" not in headers for headers in server.headers)


def test_servers_that_went_down_are_missed_though_the_window_has_their_counts(
    report, prometheus, monkeypatch, tmp_path
):
    server, since = prometheus([replica(np.random.default_rng(2), "a")[0]]), tmp_path / "since"
    for seconds, status in ((0, 0), (600, 4)):
        since.write_text(str(START))
        monkeypatch.setattr(module, "time", lambda now=START + WEEK + seconds: now)
        assert main([report, "--prometheus", server.url, "--since", str(since)]) == status


def test_input_of_no_use(report, traffic, tmp_path, capsys):
    def refused(reason, *arguments):
        assert main([str(argument) for argument in arguments]) == 2
        assert reason in capsys.readouterr().err

    now = traffic(4000)
    refused(
        "draft length is 3, so acceptance", report, "--metrics", traffic(4000, shares=(0.6, 0.4))
    )
    now = traffic(4000)
    refused("no report at", tmp_path / "no.json", "--metrics", now)
    refused("no report at", tmp_path, "--metrics", now)
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
    refused("holds no time", report, "--prometheus", "http://127.0.0.1:9", "--since", now)
    refused("traffic has temperature 0.7", report, "--metrics", now, "--temperature", "0.7")
    with pytest.raises(SystemExit, match="2"):
        main([report])


@pytest.mark.parametrize("address", ["http://[::1", "http://h:x", "me:secret@h:8000", "http://h?k"])
def test_an_address_that_is_none(report, traffic, address):
    """Not status 4: the server is not missing, its address is wrong."""
    assert main([report, "--prometheus", address]) == 2


TOKEN, BLOCK = "rejection sampling", "block verification"
DRAWN, LIKELIEST = "probabilistic", "greedy"


@pytest.mark.parametrize(
    ("engine", "rule", "method", "served", "top_p", "status"),
    [
        ("vllm", TOKEN, DRAWN, None, 0.9, 1),
        ("vllm", TOKEN, DRAWN, DRAWN, 0.9, 1),
        ("vllm", TOKEN, DRAWN, LIKELIEST, 1, 2),
        ("vllm", "the server's own rule", None, None, 1, 1),  # the same servers
        ("vllm", "the server's own rule", None, LIKELIEST, 1, 2),
        ("torch", BLOCK, LIKELIEST, None, 1, 2),
        ("torch", TOKEN, LIKELIEST, LIKELIEST, 0.9, 1),
        ("torch", TOKEN, DRAWN, None, 1, 1),
        ("torch", TOKEN, DRAWN, LIKELIEST, 1, 2),
        ("torch", TOKEN, DRAWN, None, 0.9, 2),  # vLLM drafts without top_p
        ("llama.cpp", "the server's own rule", None, None, 1, 2),
    ],
)
def test_sampled_outputs_are_judged_by_the_same_rules_only(
    sample_report, traffic, tmp_path, engine, rule, method, served, top_p, status
):
    """By other rules other drafts are accepted, though nothing moved."""
    sample_report.engine, decoding = engine, sample_report.decoding
    decoding.temperature, decoding.top_p = 0.7, top_p
    decoding.verification, decoding.draft_sample_method = rule, method
    write_report(tmp_path, sample_report)
    asked = ["--draft_sample_method", served] if served else []
    assert drift(str(tmp_path / "report.json"), traffic(4000, 0.6), *asked) == status
