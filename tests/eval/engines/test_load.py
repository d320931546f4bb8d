"""Drafts at several requests at a time, behind servers that are stand-ins."""

import json
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines import installed
from eval.engines.turns import running
from eval.engines.vllm import VllmServer
from eval.engines.vllm_servers import compare
from eval.prompts import Prompt
from eval.reporting.page import render_page
from eval.reporting.report import Report, read_report
from eval.reporting.text import render_markdown
from eval.run import main
from tests.siblings import LARGE, save_sibling

PROMPTS = [Prompt(str(i), prompt=f"say {i}") for i in range(10)]
DECODING = Decoding(Sampling(), frozenset(), 20)


def curve(drafting, plain, loads):
    """`by_load` of a draft, and why it ends."""
    starts = [running(VllmServer(server.url, 5.0, connections=4)) for server in (plain, drafting)]
    compared = compare({"a": starts[1]}, starts[0], PROMPTS, DECODING, {"a": "A"}, loads)
    (log,) = compared.logs
    return log.by_load, log.missing.get("by_load")


def test_so_many_requests_are_in_flight_and_counted(fake):
    drafting, plain = fake(3, delay=0.02), fake(1, delay=0.02)
    points, failure = curve(drafting, plain, [1])
    assert failure is None
    assert (drafting.most, plain.most) == (1, 1)
    more, _ = curve(drafting, plain, [4])
    assert (drafting.most, plain.most) == (4, 4)
    (one,), (four,) = points, more
    # every prompt once, two a round; four rounds of eight
    assert (one["requests"], four["requests"]) == (10, 32)
    assert (one["speedup"].n, four["speedup"].n) == (5, 4)
    assert four["speedup"].ci95 is None
    # 7 blocks of 20 tokens after the first one, 2 drafted ones accepted in each
    assert four["mean_acceptance_length"].mean == 3.0
    assert four["itl_ms"].baseline.tokens == 32 * 19
    asked, same = (
        sorted(body["prompt"] for _, body in server.requests) for server in (drafting, plain)
    )
    assert asked == same
    both = four["tokens_per_s"]
    assert both.speculative.mean / both.baseline.mean == pytest.approx(four["speedup"].mean)
    # four at a time wait together
    assert both.baseline.mean > 2 * one["tokens_per_s"].baseline.mean


def test_a_server_that_fails_at_a_load_leaves_the_loads_before(fake):
    points, failure = curve(fake(3, refuses_after=22), fake(1), [1, 4])
    assert [point["concurrency"] for point in points] == [1]
    assert failure.startswith("at 4 requests at a time: http://127.0.0.1")
    assert "answered 400" in failure


ALWAYS_GAINS, AT_FEW = {1: 1.2, 4: 1.1, 8: 1.05}, {1: 1.4, 4: 1.1, 8: 0.8}


@pytest.mark.parametrize(
    ("lowest_of", "ranges"),
    [
        ({3: {1: 1.4, 4: 1.1, 8: 0.8, 32: 0.6}}, [(1, 7, 3), (8, 32, 0)]),
        ({3: {1: 1.4, 8: 1.1}}, [(1, 8, 3)]),
        ({3: {4: 0.8, 8: 1.1}}, [(1, 7, 0), (8, 8, 3)]),
        ({3: {1: 0.9}}, [(1, 1, 0)]),  # and 1.1 in the mean: not shown to gain
        ({3: {}}, []),
        ({1: ALWAYS_GAINS, 3: AT_FEW}, [(1, 7, 3), (8, 8, 1)]),
    ],
)
def test_the_length_to_serve_with_at_each_load(lowest_of, ranges):
    drafts = {
        f"tuned, gamma {gamma}": SimpleNamespace(
            gamma=gamma,
            by_load=[
                SimpleNamespace(
                    concurrency=load, speedup=SimpleNamespace(ci95=None, range=(lowest, 9.0))
                )
                for load, lowest in points.items()
            ],
        )
        for gamma, points in lowest_of.items()
    }
    assert Report.model_construct(drafts=drafts).gamma_by_load == {"tuned": ranges}


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "say {i}"}}\n' for i in range(10)))
    return path


def test_command_with_two_servers_and_loads(fake, tmp_path, prompts, capsys):
    servers = ["--base_url", f"one={fake(2).url}", "--base_url", f"two={fake(3).url}"]
    what = ["--prompts", str(prompts), "--output_dir", str(tmp_path), "--max_new_tokens", "20"]
    plain = ["--baseline_url", fake(1).url, "--concurrency", "1,2"]
    assert main(["--engine", "vllm", *servers, *plain, *what]) == 0
    report = read_report(tmp_path / "report" / "report.json")
    assert list(report.drafts) == ["one", "two"]
    for draft in report.drafts.values():
        assert [point.concurrency for point in draft.by_load] == [1, 2]
        assert draft.lossless.identical == 10
    lengths = [draft.counters.mean_acceptance_length.mean for draft in report.drafts.values()]
    assert lengths == [2.0, 3.0]
    for rendered in (render_markdown(report), render_page(report)):
        assert "By load" in rendered
        assert "ITL p95 with / without" in rendered
    twice = ["--base_url", servers[1], "--base_url", servers[1]]
    assert main(["--engine", "vllm", *twice, *plain, *what]) == 2
    assert "Two drafts are called 'one'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--target", "T", "--draft", "D", "--prompts", "P", "--concurrency", "1,2"])
    assert "--concurrency is of engine vllm" in capsys.readouterr().err


def test_servers_are_started_for_the_drafts_that_are_named(fake, tmp_path, prompts, monkeypatch):
    save_sibling(tmp_path / "target", LARGE, 1)
    save_sibling(tmp_path / "draft", LARGE, 2)

    def drafts(arguments):
        return "--speculative-config" in arguments

    started, most = [], []
    at_once = []

    @contextmanager
    def serve(target, *arguments, **_):
        assert target == tmp_path / "target"
        started.append(json.loads(arguments[1]) if drafts(arguments) else None)
        at_once.append(arguments)
        most.append(len(at_once))
        yield fake(3 if drafts(arguments) else 1).url
        at_once.remove(arguments)

    monkeypatch.setattr(installed, "serve_vllm", serve)
    monkeypatch.setattr("eval.engines.local_vllm.memory_left", lambda: 16 * 2**30)
    for module in ("eval.run", "eval.engines.installed"):
        monkeypatch.setattr(f"{module}.vllm_python", lambda: None)
    named_drafts = ["--draft", "lookup=prompt-lookup", "--draft", f"own={tmp_path / 'draft'}"]
    what = ["--prompts", str(prompts), "--output_dir", str(tmp_path), "--max_new_tokens", "20"]
    models = ["--engine", "vllm", "--target", str(tmp_path / "target"), *named_drafts]
    assert main([*models, *what, "--gamma", "3"]) == 0
    plain, lookup, own = started
    assert (lookup["method"], lookup["num_speculative_tokens"]) == ("ngram", 3)
    assert (own["method"], own["model"]) == ("draft_model", str(tmp_path / "draft"))
    assert plain is None
    report = read_report(tmp_path / "report" / "report.json")
    assert list(report.drafts) == ["lookup", "own"]
    assert report.target == str(tmp_path / "target")
    assert (report.device, report.dtype) == ("cpu", "float32")
    assert report.drafts["own"].path == str(tmp_path / "draft")
    assert [(gain.draft, gain.over) for gain in report.gain] == [("own", "lookup")]
    assert main([*models, *what, "--gamma", "2,3"]) == 0
    assert [about and about["num_speculative_tokens"] for about in started[3:]] == [
        None,
        2,
        2,
        3,
        3,
    ]
    report = read_report(tmp_path / "report" / "report.json")
    named = [f"{name}, gamma {gamma}" for gamma in (2, 3) for name in ("lookup", "own")]
    assert list(report.drafts) == named
    assert max(most) == 3
    together = report.drafts

    # no memory for two copies of the target
    monkeypatch.setattr("eval.engines.local_vllm.memory_left", lambda: 9 * 2**30)
    started.clear(), most.clear()
    assert main([*models, *what, "--gamma", "2,3", "--concurrency", "1,2"]) == 0
    assert max(most) == 1
    assert [about and about["num_speculative_tokens"] for about in started] == [
        *(None, 2, 2, 3, 3, 3, 2, 2, None),  # and back
    ]
    report = read_report(tmp_path / "report" / "report.json")
    assert list(report.drafts) == named
    for name, draft in report.drafts.items():
        assert draft.lossless == together[name].lossless
        assert draft.counters == together[name].counters
        assert draft.speedup.n == 10
        assert [point.concurrency for point in draft.by_load] == [1, 2]
    with pytest.raises(SystemExit):  # vLLM chooses no length
        main([*models, *what])
