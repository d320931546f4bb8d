"""The report has every field of the contract, refuses broken ones, and says first what decides."""

import copy
import dataclasses
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from eval import drift
from eval.measuring.cost import StepCosts
from eval.measuring.intervals import Both, share
from eval.measuring.metrics import Percentiles
from eval.measuring.sampled_check import SampledCheck
from eval.reporting.build import build_report, compared
from eval.reporting.fields import (
    HeldOutCurve,
    HeldOutPoint,
    LoadPoint,
    Overload,
    ReportError,
    checked,
    read_report,
)
from eval.reporting.files import write_report
from eval.reporting.page import render_page, waterfall
from eval.reporting.recommendation import recommended, schedule_by_load
from eval.reporting.tables import details, load_table, result_table
from eval.reporting.text import print_summary, render_markdown
from eval.reporting.verdict import in_order, top, verdict
from eval.reporting.warnings import find_warnings
from eval.run import parse
from tests.benchmarks.evidence import evidence
from tests.conftest import assert_golden

MISMATCH = {"prompt": "3", "position": 7, "target": "a", "drafted": "b", "tie": False}
MISMATCH |= {"gap": None, "error": None}
SAMPLED = {"prompts": 40, "difference": {"mean": -0.2, "ci95": [-0.3, -0.1], "n": 40}}
GOLDEN = Path(__file__).parent / "golden"
CONTRACT = {
    "": "schema target engine device dtype baseline decoding prompts drafts gain provenance "
    "environment",
    "baseline": "tokens_per_s over_stock_generate",
    "decoding": "temperature top_k top_p max_new_tokens gamma gamma_policy verification",
    "prompts": "source n sha256 overlap_with_training",
    "environment": "engine engine_version hardware cores threads date load_average "
    "server_arguments",
    "drafts.tuned": "path form vocabulary gamma gamma_policy alpha tau accepted_over_drafted "
    "per_position c verify_ratio predicted_speedup speedup decode_efficiency tokens_per_s ttft_ms "
    "itl_ms memory payoff lossless by_category",
    "drafts.tuned.vocabulary": "relation strategy coverage",
    "drafts.tuned.tokens_per_s": "baseline speculative",
    "drafts.tuned.alpha": "mean ci95 n",
    "drafts.tuned.speedup": "mean ci95 n",
    "drafts.tuned.memory": "target_bytes draft_bytes kv_bytes_per_token overhead",
    "drafts.tuned.memory.kv_bytes_per_token": "target draft",
    "drafts.tuned.payoff": "ceiling_speedup break_even_alpha best_gamma best_gamma_speedup verdict",
    "drafts.tuned.lossless": "prompts identical tie_divergences unexplained",
    "drafts.tuned.by_category.odd": "alpha tau speedup",
    "gain.0": "draft over alpha tau speedup",
}
COUNTED = {"identical", "tie_divergences", "unexplained"}  # from the divergences
OPTIONAL = {"drafts.tuned.by_category.odd", "overhead", *COUNTED}


@pytest.fixture
def four_drafts(run_info, measurement):
    """The drafts of a training run in the reference decoder."""
    drafts = [
        measurement("untuned", 0.3),
        measurement("lookup", 0.4, path="prompt-lookup"),
        measurement("tuned", 0.6, path="outputs/code/draft"),
        measurement("tuned+lookup", 0.75, path="lookup-first:outputs/code/draft"),
    ]
    about = run_info.about | {"engine": "torch"}
    return build_report(dataclasses.replace(run_info, about=about), drafts)


@pytest.fixture
def data(sample_report):
    """The sample report as it stands in report.json, to be changed at will."""
    return sample_report.model_dump(mode="json")


@pytest.fixture
def read(tmp_path):
    """Reads a dict as a report.json."""

    def through_a_file(data):
        (tmp_path / "changed.json").write_text(json.dumps(data))
        return read_report(tmp_path / "changed.json")

    return through_a_file


def value_at(report, path):
    value = report
    for key in filter(None, path.split(".")):
        value = value[int(key)] if isinstance(value, list) else value[key]
    return value


def put(report, path, value):
    parent, _, key = path.rpartition(".")
    holder = value_at(report, parent)
    holder[int(key) if isinstance(holder, list) else key] = value


def served(report):
    """The recommended draft by load, with requests at a time as numbers and rates as `N/s`."""
    found = recommended(report)
    return found and {
        f"{load.rate:g}/s" if load.rate else load.concurrency: name
        for load, name in found.fastest.items()
    }


def codes(report):
    return [warning.code for warning in find_warnings(report)]


# --- Fields


def test_every_field_of_the_contract_is_there_and_needed(data, read):
    for path, keys in CONTRACT.items():
        assert set(keys.split()) <= set(value_at(data, path)), path
    for path, keys in CONTRACT.items():
        for key in keys.split() if path not in OPTIONAL else ():
            if key in OPTIONAL:
                continue
            broken = copy.deepcopy(data)
            del value_at(broken, path)[key]
            place = f"report.{path}.{key}".replace("..", ".").replace("gain.0", "gain[0]")
            with pytest.raises(ReportError, match=f"{re.escape(place)}: Field required"):
                read(broken)


@pytest.mark.parametrize(
    ("path", "value", "place"),
    [
        ("schema", "draftsmith-report/2", "schema"),
        ("drafts.tuned.alpha.mean", float("nan"), "alpha.mean"),
        ("drafts.tuned.alpha.mean", 1.2, "alpha.mean"),
        ("drafts.tuned.alpha.mean", "0.5", "alpha.mean"),
        ("drafts.tuned.alpha", 0.6, "drafts.tuned.alpha"),
        ("drafts.tuned.alpha.n", 0, "alpha.n"),
        ("drafts.tuned.per_position", [], "per_position"),
        ("drafts.tuned.c", None, "c is null"),
        ("drafts.tuned.per_prompt.0.id", 3, r"per_prompt\[0\].id"),
        ("drafts", {}, "drafts"),
    ],
)
def test_a_mutated_report_fails(data, read, path, value, place):
    read(data)
    put(data, path, value)
    with pytest.raises(ReportError, match=place):
        read(data)


def test_written_and_read_again(sample_report, data, read, tmp_path):
    write_report(tmp_path / "report", sample_report)
    assert read_report(tmp_path / "report" / "report.json") == sample_report
    names = sorted(path.name for path in (tmp_path / "report").iterdir())
    assert names == ["report.html", "report.json", "report.md"]
    written = json.loads((tmp_path / "report" / "report.json").read_text())
    assert written["headline"] == verdict(sample_report)
    data["forecast"] = {"alpha": 0.7}  # of a newer writer
    assert read(data) == sample_report


def test_evidence_of_a_report_is_read_as_a_report(sample_report, tmp_path):
    """Mutant: null fields and lists are left out."""
    (tmp_path / "short.json").write_text(evidence(sample_report.model_copy(deep=True), "a note"))
    short = read_report(tmp_path / "short.json")
    assert verdict(short) == verdict(sample_report)
    assert short.drafts["tuned"].lossless == sample_report.drafts["tuned"].lossless
    assert short.drafts["tuned"].per_prompt == []


def test_absent_and_cut_off_reports_are_refused(data, tmp_path):
    with pytest.raises(ReportError, match="no report at"):
        read_report(tmp_path / "report.json")
    (tmp_path / "report.json").write_text(json.dumps(data)[:-20])
    with pytest.raises(ReportError, match="is damaged"):
        read_report(tmp_path / "report.json")


def test_what_was_changed_after_building_is_checked_before_writing(sample_report, tmp_path):
    sample_report.drafts["tuned"].alpha.mean = 1.9
    with pytest.raises(ReportError, match=r"drafts.tuned.alpha.mean"):
        write_report(tmp_path, sample_report)
    assert list(tmp_path.iterdir()) == []


def test_reading_a_report_needs_no_torch():
    code = "import eval.reporting.files, sys; print({'torch', 'transformers'} & set(sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


# --- From logs


def test_numbers_of_the_made_up_run(sample_report):
    tuned = sample_report.drafts["tuned"]
    assert tuned.alpha.mean == pytest.approx(0.6, abs=0.02)
    assert (tuned.alpha.n, tuned.speedup.n) == (50, 40)
    assert tuned.tau.mean == pytest.approx(1 + 0.6 + 0.36 + 0.216, abs=0.15)
    assert tuned.tau.mean == pytest.approx(
        1 + tuned.mean_drafted * tuned.accepted_over_drafted.mean
    )
    assert tuned.c == pytest.approx(0.1)
    assert tuned.decode_efficiency.mean == pytest.approx(1.0)  # it was made without overhead
    assert tuned.memory.overhead == pytest.approx(0.1)
    assert tuned.lossless.largest_gap == 0.01
    assert [entry.position for entry in tuned.per_position] == [1, 2, 3]
    (gain,) = sample_report.gain
    assert (gain.draft, gain.over) == ("tuned", "untuned")
    assert gain.alpha.ci95[0] > 0.2


@pytest.mark.parametrize(
    ("alpha", "target_ms", "measured_ms", "verdict"),
    [
        (0.3, 10.0, 14, "inconclusive"),
        (0.7, 10.0, 30, "does not pay"),  # the estimate says that it pays
        (0.1, 10.0, 7, "pays"),  # and that it does not
        (0.7, 1.0, 30, "cannot pay"),
    ],
)
def test_the_measured_interval_decides_whether_a_draft_pays(
    run_info, measurement, alpha, target_ms, measured_ms, verdict
):
    costs = StepCosts(1.0, target_ms, {n: target_ms * (0.96 + 0.04 * n) for n in range(1, 6)}, 60)
    log = measurement("tuned", alpha, costs=costs)
    for run in log.runs:
        run.block_seconds = [measured_ms / 1000] * len(run.block_seconds)
    draft = build_report(run_info, [log]).drafts["tuned"]
    low, high = draft.speedup.ci95
    assert draft.payoff.verdict == verdict
    assert (low > 1, high < 1) == (verdict == "pays", verdict.endswith("not pay"))


def test_the_waterfall_counts_one_cost_after_the_other(sample_report):
    """3 tokens drafted of 0.1 target steps each, wide calls of 1.1, no overhead."""
    draft = sample_report.drafts["tuned"]
    rows, tau = waterfall(draft), draft.tau.mean
    ends = [4, tau, tau, tau / 1.3, *[tau / (0.3 + 1.1)] * 3, draft.speedup.mean]
    assert [end for _, _, end in rows] == pytest.approx([*ends, draft.speedup.mean])
    assert [rows[i][1] for i in (0, 2, 5, 8)] == [None] * 4  # the totals
    assert [rows[i][1] for i in (1, 3, 4, 6, 7)] == [rows[i][2] for i in (0, 2, 3, 5, 6)]


def test_per_prompt_rows_give_the_means_again(data):
    draft = data["drafts"]["tuned"]
    rows = draft["per_prompt"]
    assert len(rows) == 50
    alpha = sum(row["alpha_sum"] for row in rows) / sum(row["positions"] for row in rows)
    assert alpha == pytest.approx(draft["alpha"]["mean"])
    timed = [row for row in rows if "seconds" in row]
    assert len(timed) == 40  # what was not measured is absent
    summed = timed[0].keys() - {"id", "category", "accepted_at"}
    total = {key: sum(row[key] for row in timed) for key in summed}
    assert total["block_tokens"] / total["blocks"] == pytest.approx(draft["tau"]["mean"])
    baseline = total["baseline_seconds"] / total["baseline_tokens"]
    speedup = baseline / (total["seconds"] / total["tokens"])
    assert speedup == pytest.approx(draft["speedup"]["mean"])


def test_what_an_engine_could_not_measure_is_null_with_its_reason(run_info, measurement):
    """As from a server: no distributions, no step times, no drafted tokens."""
    unknown = "tau alpha memory costs c verify_ratio predicted_speedup payoff "
    unknown += "decode_efficiency"
    log = measurement(
        *("served", 0.6),
        agreement=None,
        costs=None,
        memory=None,
        gamma=None,
        gamma_policy="of the server",
        missing=dict.fromkeys(unknown.split(), "a server does not tell"),
    )
    for run in log.runs:
        run.drafted = run.accepted = [0] * len(run.drafted)
    report = build_report(run_info, [log])
    draft = report.drafts["served"]
    reasons = {entry.field: entry.reason for entry in draft.missing}
    assert all(getattr(draft, field) is None for field in reasons)
    assert set(unknown.split()) < set(reasons)
    assert reasons["per_position"] == "nothing was drafted"
    assert draft.by_category["odd"].speedup is not None
    assert draft.by_category["odd"].tau is None
    assert "blocks" not in draft.per_prompt[0].model_dump()
    rows = {row[0] for row in result_table(report).rows}
    assert not any("alpha" in row or "tau" in row for row in rows)
    assert "a server does not tell" in render_page(report)
    (gain,) = build_report(run_info, [log, dataclasses.replace(log, name="again")]).gain
    assert gain.alpha is gain.tau is None
    assert gain.speedup.mean == 0


def test_a_draft_that_proposed_nothing_is_reported(run_info, measurement):
    log = measurement("lookup", 0.6)
    log = dataclasses.replace(log, runs=copy.deepcopy(log.baseline))
    draft = build_report(run_info, [log]).drafts["lookup"]
    assert (draft.tau.mean, draft.mean_drafted) == (1, 0)
    assert draft.accepted_over_drafted is draft.per_position is None


def test_prompts_of_one_document_are_one_cluster(run_info, measurement):
    def grouped(log):
        for row in [*log.agreement, *log.runs, *log.baseline]:
            row.group = f"document {int(row.prompt_id) % 12}"
        return log

    logs = [measurement("a", 0.35), measurement("b", 0.6)]
    alone = build_report(run_info, logs)
    together = build_report(run_info, [grouped(log) for log in logs])
    pairs = [(alone.drafts["b"], together.drafts["b"]), (alone.gain[0], together.gain[0])]
    for one, other in pairs:
        for key in ("alpha", "tau", "speedup"):
            assert getattr(one, key).mean == pytest.approx(getattr(other, key).mean)
            assert getattr(one, key).ci95 != getattr(other, key).ci95
            assert getattr(one, key).n == getattr(other, key).n
    assert together.drafts["b"].speedup.clusters == 12
    assert len({row.group for row in together.drafts["b"].per_prompt}) == 12
    (counts,) = (row for row in result_table(together).rows if row[0] == "prompts timed")
    assert counts[1] == "40 in 12 groups"


@pytest.mark.parametrize(
    ("paths", "pairs"),
    [
        (["a", "b", "c"], [("b", "a"), ("c", "a")]),
        (["a", "prompt-lookup"], [("a", "prompt-lookup")]),
        (
            ["a", "prompt-lookup", "b", "lookup-first:b"],
            [("b", "a"), *((name, "prompt-lookup") for name in ("a", "b", "lookup-first:b"))],
        ),
        (["prompt-lookup"], []),
    ],
)
def test_each_draft_is_compared_with_what_shows_its_worth(measurement, paths, pairs):
    assert compared([measurement(path, 0.5, path=path) for path in paths]) == pairs


def test_a_draft_that_cannot_be_as_long_is_compared_with_longer_ones(measurement):
    lengths = {"a2": 2, "a8": 8, "b6": 6, "prompt-lookup": 2, "prompt-lookup8": 8}
    drafts = [measurement(n, 0.5, path=n.rstrip("2689"), gamma=g) for n, g in lengths.items()]
    assert compared(drafts) == [
        *[("b6", "a8"), ("a2", "prompt-lookup")],
        *[("a8", "prompt-lookup8"), ("b6", "prompt-lookup8")],
    ]


def test_ngram_drafts_have_no_break_even(four_drafts):
    priced = [name for name, draft in four_drafts.drafts.items() if draft.payoff]
    assert priced == ["untuned", "tuned"]
    assert all(draft.predicted_speedup and draft.costs for draft in four_drafts.drafts.values())


def test_outputs_that_repeat_themselves_are_warned_about(run_info, measurement):
    answers = [dataclasses.replace(answer, tokens=[7] * 30) for answer in run_info.answers]
    report = build_report(dataclasses.replace(run_info, answers=answers), [measurement("a", 0.6)])
    assert report.answers.copy_share.of_answer.mean > 0.5
    assert "self-copies" in codes(report)


# --- Verdict and warnings


def test_the_highest_lower_bound_is_recommended_not_the_highest_mean(sample_report):
    untuned, tuned = sample_report.drafts.values()
    untuned.speedup.mean, untuned.speedup.ci95 = 1.9, (1.05, 2.7)
    tuned.speedup.mean, tuned.speedup.ci95 = 1.5, (1.4, 1.6)
    assert served(sample_report) == {1: "tuned"}
    tuned.speedup.ci95 = (0.9, 2.1)
    assert served(sample_report) == {1: "untuned"}
    untuned.lossless.divergences[0].tie = False
    assert served(sample_report) is None
    assert verdict(sample_report).startswith("Do NOT serve base draft")


@pytest.fixture
def by_load(run_info, measurement):
    """Makes a report of an engine. drafts: intervals of the speed-up by load, by name; a load is a
    number of requests at a time, or (requests per second, requests in flight).
    """

    def make(drafts, engine="vllm", **paths):
        logs = [measurement(name, 0.5, path=paths.get(name, name)) for name in drafts]
        report = build_report(run_info, logs)
        report.engine, report.gain = engine, []
        for name, intervals in drafts.items():
            draft = report.drafts[name]
            draft.gamma = int(name.partition("gamma ")[2] or 3)
            draft.speedup.ci95 = intervals.pop(1)
            draft.speedup.mean = sum(draft.speedup.ci95) / 2
            draft.by_load = loads(intervals)
            config = json.dumps({"model": name, "num_speculative_tokens": draft.gamma})
            draft.serve = ["vllm", "serve", "T", "--speculative-config", config]
        return report

    return make


def test_one_configuration_is_recommended_for_all_loads(by_load):
    """Mutants: the best draft of each load; the highest mean; loads that are left out."""
    drafts = {
        "mine": {1: (1.5, 2.0), 2: (1.28, 1.7), 4: (0.8, 1.0)},
        "suffix": {1: (1.6, 1.9), 2: (1.6, 1.9), 4: (0.9, 1.2)},  # no schedule switches it off
        "surest": {1: (1.2, 1.4), 2: (1.2, 1.4), 4: (0.9, 1.2)},
    }
    report = by_load(drafts)
    assert served(report) == {1: "mine", 2: "mine"}
    assert recommended(report).schedule == [(1, 2, 3), (3, 5, 0)]
    first = top(report)
    config = json.loads(shlex.split(first.serve)[-1])
    assert config == {
        **{"model": "mine", "num_speculative_tokens": 3},
        "num_speculative_tokens_per_batch_size": [[1, 2, 3], [3, 5, 0]],
    }
    report.provenance["output_dir"] = "outputs/code-vllm"
    (command,) = top(report).commands
    assert drift.parse(shlex.split(command)[3:]).draft == "mine"
    assert {str(load): len(rows) for load, rows in first.speedups.items()} == {
        **{"1 request at a time": 3, "2 requests at a time": 3, "4 requests at a time": 3}
    }
    page, text = render_page(report), render_markdown(report)
    assert page.count('class="waterfall"') == 1 + 3
    for shown in (page, text):
        assert "num_speculative_tokens_per_batch_size" in shown
    assert page.index("By load") < page.index("Results")  # before one at a time alone
    report.drafts["mine"].serve = []  # a running server
    assert "num_speculative_tokens_per_batch_size" in top(report).serve


@pytest.mark.parametrize(
    "other",
    [
        {1: (1.5, 1.9), 8: (1.1, 1.4)},  # its bounds are higher in the mean
        {1: (1.9, 2.5), 8: (0.8, 0.9)},  # switched off at 8
    ],
)
def test_the_worst_bound_over_the_loads_decides(by_load, other):
    report = by_load({"other": other, "mine": {1: (1.3, 1.5), 8: (1.2, 1.3)}})
    assert served(report) == {1: "mine", 8: "mine"}


def test_a_schedule_may_shorten_the_draft(by_load):
    drafts = {
        "mine, gamma 4": {1: (1.8, 2.0), 8: (0.8, 0.9), 32: (0.5, 0.6)},
        "mine, gamma 2": {1: (1.4, 1.6), 8: (1.1, 1.2), 32: (0.7, 0.8)},
    }
    report = by_load(drafts)
    assert served(report) == {1: "mine, gamma 4", 8: "mine, gamma 2"}
    assert recommended(report).schedule == [(1, 1, 4), (2, 8, 2), (9, 33, 0)]
    config = json.loads(shlex.split(top(report).serve)[-1])
    assert config["num_speculative_tokens"] == 4


@pytest.mark.parametrize(("engine", "name"), [("llama.cpp", "mine"), ("vllm", "suffix")])
def test_what_cannot_be_switched_off_by_load_has_no_schedule(by_load, engine, name):
    """A server of one length is measured at each load with this length."""
    report = by_load({name: {1: (1.5, 2.0), 4: (0.8, 1.0)}}, engine, suffix="suffix")
    found = recommended(report)
    assert (served(report), found.schedule) == ({1: name}, [])
    assert [load.concurrency for load in found.slow] == [4]
    assert "4 requests at a time" in verdict(report)
    # a weaker one that is faster at each load is what one server can serve
    drafts = {name: {1: (1.5, 2.0), 4: (0.8, 1.0)}, "weak": {1: (1.1, 1.2), 4: (1.1, 1.2)}}
    assert served(by_load(drafts, engine, suffix="suffix")) == {1: "weak", 4: "weak"}


def test_rates_decide_too(by_load):
    """The schedule counts the requests that were in flight. Mutant: rates are passed over."""
    drafts = {"mine": {1: (1.5, 2.0), 4: (1.2, 1.4), 8: (0.8, 1.0), (2, 3.5): (1.1, 1.2)}}
    report = by_load(drafts)
    assert served(report) == {1: "mine", 4: "mine", "2/s": "mine"}
    assert "at 2 requests/s" in verdict(report)
    drafts["mine"] |= {1: (1.5, 2.0), (2, 3.5): (0.9, 1.2), (5, 7.5): (0.5, 0.6)}
    found = recommended(by_load(drafts))
    assert [load.rate for load in found.slow] == [2]
    assert [load.rate or load.concurrency for load in found.off] == [8, 5]
    rates = {"mine": {1: (1.5, 2.0), (2, 3.5): (1.1, 1.2), (5, 7.5): (0.5, 0.6)}}
    found = recommended(by_load(rates))
    assert ([load.rate for load in found.slow], found.schedule) == ([5], [])


def test_a_rate_that_overloads_a_draft_s_server_is_one_at_which_it_is_slow(by_load):
    """Mutant: a rate without a speed-up is passed over. One that only the draft keeps up with is
    no loss.
    """
    report = by_load({"mine": {1: (1.5, 2.0)}, "other": {1: (1.1, 1.2), (8, 9.5): (1.1, 1.2)}})
    done = {"baseline": 5.0, "speculative": 4.0}
    both = {"request_rate": 8, "requests_per_s": done, "tokens_per_s": done}
    for servers, name in ((["draft"], "other"), (["target"], "mine")):
        report.drafts["mine"].overloads = [both | {"servers": servers}]
        assert served(checked(report))[1] == name
    alone = by_load({"mine": {1: (1.5, 2.0)}})
    alone.drafts["mine"].overloads = [both | {"servers": ["draft", "target"]}]
    assert "8 requests/s" in verdict(checked(alone))


def test_n_gram_speculation_is_served_unless_a_draft_is_shown_to_be_faster(by_load):
    drafts = {"lookup": {1: (1.1, 1.4), 4: (1.12, 1.2)}, "tuned": {1: (1.3, 1.5), 4: (1.14, 1.3)}}
    report = by_load(drafts, lookup="prompt-lookup")
    assert served(report) == {1: "tuned", 4: "tuned"}
    drafts["lookup"][1], drafts["tuned"][1] = (1.1, 1.4), (1.2, 1.5)
    report = by_load(drafts, lookup="prompt-lookup")
    assert served(report) == {1: "lookup", 4: "lookup"}


def first_tokens(p50):
    """The times to the first token, whose median is 1 ms without a draft."""
    times = {"p50": 1.0, "p95": 3.0, "p99": 9.0}
    return Both[Percentiles](baseline=times, speculative=times | {"p50": p50})


def test_what_a_user_loses_is_said(by_load):
    """A later first token and lost goodput stand in the verdict."""
    report = by_load({"mine": {1: (1.5, 2.0), 4: (1.2, 1.4), (2, 3.5): (1.1, 1.2)}})
    assert codes(report) == []
    draft = report.drafts["mine"]
    for point in draft.by_load:
        point.ttft_ms = first_tokens(1.05)
    assert "First token" not in verdict(report)
    draft.ttft_ms.speculative.mean = 1.2 * draft.ttft_ms.baseline.mean
    assert "ms instead of 30 at 1 request at a time." in verdict(report)
    draft.ttft_ms.speculative.mean = draft.ttft_ms.baseline.mean
    at_rate = draft.by_load[-1]
    at_rate.ttft_ms = first_tokens(2.0)
    good = {"limits_ms": {"ttft": 500}, "requests_per_s": {"baseline": 1.9, "speculative": 1.5}}
    at_rate.goodput = good
    report = checked(report)
    for text in ("2 ms instead of 1 at 2 requests/s", "1.50 instead of 1.90 at 2 requests/s"):
        assert text in verdict(report)


def test_an_overload_is_warned_about(by_load):
    report = by_load({"mine": {1: (1.5, 2.0)}})
    done = Both(baseline=7.0, speculative=5.0)
    report.drafts["mine"].overloads = [
        Overload(request_rate=8, servers=["draft"], requests_per_s=done, tokens_per_s=done)
    ]
    assert "overload" in {warning.code for warning in find_warnings(report)}


def test_a_draft_that_slows_a_load_down_is_warned_about(by_load):
    report = by_load({"mine": {1: (1.5, 2.0), 4: (0.7, 0.9)}})
    assert codes(report) == ["slower"]
    assert "at 4 requests at a time" in find_warnings(report)[0].text


def test_the_tail_is_a_percentile_that_the_requests_support(by_load):
    report = by_load({"mine": {1: (1.5, 2.0), 4: (1.2, 1.4), 8: (1.1, 1.2)}})
    few, many = report.drafts["mine"].by_load
    few.requests, many.requests = 99, 100
    few.ttft_ms = many.ttft_ms = first_tokens(1.0)
    table = load_table(report)
    rows = [dict(zip(table.header, row, strict=True)) for row in table.rows]
    shown = [(row["requests"], row["tail"], row["TTFT tail, ms"]) for row in rows]
    assert shown == [("99", "p95", "3 / 3"), ("100", "p99", "9 / 9")]


def test_a_draft_keeps_its_colour_where_another_was_not_measured(by_load):
    report = by_load({"a": {1: (1.1, 1.2)}, "b": {1: (1.1, 1.2), 4: (1.1, 1.2)}})
    page = render_page(report)
    alone = page[page.index("At 4 requests at a time") :]
    assert re.search(r"fill:var\((--s\d)\)", alone)[1] == "--s0"  # the last draft's accent


ALWAYS, AT_FEW = {1: 1.2, 4: 1.1, 8: 1.05}, {1: 1.4, 4: 1.15, 8: 0.9}


@pytest.mark.parametrize(
    ("lowest_of", "ranges"),
    [
        ({3: {1: 1.4, 4: 1.1, 8: 0.8, 32: 0.6}}, [(1, 4, 3), (5, 33, 0)]),
        ({3: {1: 1.4, 8: 1.1}}, [(1, 8, 3), (9, 9, 0)]),  # 0 where nothing was measured
        ({3: {1: 0.8, 4: 0.8, 8: 1.1}}, [(1, 4, 0), (5, 8, 3), (9, 9, 0)]),
        ({3: {1: 1.4, 4: 0.9}}, [(1, 1, 3), (2, 5, 0)]),  # one at a time is of the prompts
        ({3: {1: 0.9, 2: 0.9}}, [(1, 3, 0)]),  # and 1.1 in the mean: not shown to gain
        ({3: {1: 1.4}}, []),
        ({1: ALWAYS, 3: AT_FEW}, [(1, 4, 3), (5, 8, 1), (9, 9, 0)]),
    ],
)
def test_the_length_to_serve_with_at_each_load(by_load, lowest_of, ranges):
    drafts = {
        f"mine, gamma {length}": {load: (low, low + 0.2) for load, low in lowest.items()}
        for length, lowest in lowest_of.items()
    }
    assert schedule_by_load([*by_load(drafts).drafts.values()]) == ranges


def test_drafts_are_shown_by_their_names(run_info, measurement):
    """Mutant: by their whole specs, which may have six lines; only the details have them, abridged.

    The draft of a name in several lengths is one.
    """
    spec = "+".join(f"pypi:part{i}==1.0/part{i}.bin" for i in range(1, 7)) + f"#sha256={'0' * 64}"
    names = ["untuned, gamma 2", "untuned, gamma 4", "mine"]
    report = build_report(run_info, [measurement(name, 0.6, path=spec) for name in names])
    report.engine = "vllm"
    for draft in report.drafts.values():
        draft.by_load = loads({1: (1.2, 1.3), 8: (0.9, 1.1)})
    page, text = render_page(report), render_markdown(report)
    for shown in (page, text):
        assert "base draft, draft length 2" in shown
        assert "part2" not in shown
    assert "part1.bin and 5 more pieces" in page
    assert "part1" not in text


def loads(intervals):
    """`by_load` of speed-ups with these intervals; a load is as in `by_load`."""
    number = {"mean": 1.0, "ci95": None, "n": 10}
    return [
        LoadPoint(
            **{"concurrency": load}
            if isinstance(load, int)
            else {
                "concurrency": None,
                "request_rate": load[0],
                "in_flight": {"baseline": load[1], "speculative": load[1]},
            },
            requests=40,
            tokens_per_s={"baseline": number, "speculative": number},
            speedup=number | {"mean": sum(interval) / 2, "ci95": interval},
            itl_ms=None,
            mean_acceptance_length=None,
        )
        for load, interval in intervals.items()
    ]


def test_what_no_engine_serves_is_not_recommended(four_drafts):
    speedups = {name: draft.speedup.mean for name, draft in four_drafts.drafts.items()}
    assert max(speedups, key=speedups.get) == "tuned+lookup"
    assert served(four_drafts) == {1: "tuned"}
    in_engine = four_drafts.model_copy(update={"engine": "llama-server"})
    assert served(in_engine) == {1: "tuned+lookup"}
    assert in_order(four_drafts) == ["untuned", "lookup", "tuned", "tuned+lookup"]
    (command,) = top(four_drafts).commands
    assert command.endswith("--run outputs/code --engine vllm --gamma 3 --ngram_gamma 3")
    four_drafts.provenance["removed"] = "outputs/code"
    assert top(four_drafts).commands == []
    assert "25.7 MiB" in top(four_drafts).memory


@pytest.mark.parametrize(
    ("form", "coverage", "in_vllm"),
    [("medusa", 1.0, True), ("medusa", 0.5, False), ("uno", 1.0, False), ("eagle3", 0.5, True)],
)
def test_what_vllm_does_not_load_is_not_recommended_for_it(four_drafts, form, coverage, in_vllm):
    tuned = four_drafts.drafts["tuned"]
    tuned.form, tuned.vocabulary.coverage = form, coverage
    assert (served(four_drafts) == {1: "tuned"}) == in_vllm
    assert (tuned.not_in_vllm in top(four_drafts).note) or in_vllm


def test_the_next_command_asks_the_same_in_another_folder(run_info, measurement):
    about = run_info.about | {"engine": "torch"}
    log = measurement("mine", 0.7)
    report = build_report(dataclasses.replace(run_info, about=about), [log])
    command = "eval.run --target T --draft mine=D --prompts P --engine torch --gamma 3 --seed=7"
    report.provenance["command"] = f"{command} --temperature 0.7 --max_new_tokens 64".split()
    report.provenance["output_dir"] = "outputs/own"
    (command,) = top(report).commands
    given = parse(shlex.split(command)[3:])
    assert (given.temperature, given.max_new_tokens, given.seed) == (0.7, 64, 7)
    assert (given.engine, given.output_dir) == ("vllm", Path("outputs/own-vllm"))
    report.drafts = {"tuned": report.drafts["mine"]}
    report.drafts["tuned"].path = "/data/draft/outputs/code/draft"
    (command,) = top(report).commands
    assert "--run /data/draft/outputs/code " in command


@pytest.mark.parametrize(("engine", "advised"), [("vllm", True), ("transformers", False)])
def test_loads_are_advised_where_they_can_be_measured(by_load, engine, advised):
    assert ("--concurrency" in verdict(by_load({"mine": {1: (1.2, 1.4)}}, engine))) == advised


def test_the_reference_decoder_predicts_for_an_engine(four_drafts):
    """Its own wall clock decides nothing, and stands under the details."""
    tuned, lookup = four_drafts.drafts["tuned"], four_drafts.drafts["lookup"]
    tuned.speedup = tuned.speedup.model_copy(update={"mean": 0.51, "ci95": (0.42, 0.61)})
    assert served(four_drafts) == {1: "tuned"}
    predicted = tuned.predicted_with_prefill
    assert tuned.predicted_speedup.mean > predicted.mean > 1
    for text in (verdict(four_drafts), render_markdown(four_drafts)):
        assert f"{predicted.mean:.2f}" in text
        assert "0.51" not in text
    rows = {row[0]: row for table in details(four_drafts) for row in table.rows}
    assert "0.51 [0.42,0.61]" in rows["speed-up by the wall clock"]
    # the comparison with n-gram speculation is paired, and predicted too
    gain = next(g for g in four_drafts.gain if (g.draft, g.over) == ("tuned", "lookup"))
    apart = predicted.mean - lookup.predicted_with_prefill.mean
    assert gain.predicted_with_prefill.mean == pytest.approx(apart)
    unsure = {"ci95": (-0.01, 2 * apart + 0.01)}
    gain.predicted_with_prefill = gain.predicted_with_prefill.model_copy(update=unsure)
    assert served(four_drafts) == {1: "lookup"}
    assert served(four_drafts.model_copy(update={"engine": "vllm"})) != {1: "tuned"}


def test_too_few_prompts_give_no_verdict(run_info, measurement):
    logs = [measurement("untuned", 0.3, prompts=9), measurement("tuned", 0.6, prompts=9)]
    report = build_report(run_info, logs)
    assert recommended(report) is None
    assert verdict(report).startswith("No verdict: 9 prompts")
    assert codes(report) == []  # tables carry their own note
    notes = [table.note for table in [result_table(report), *details(report)] if table.note]
    assert sum("fewer than 10" in note for note in notes) >= 2


@pytest.mark.parametrize(
    ("path", "below", "above", "code"),
    [
        ("decoding.verification", "greedy match", "typical acceptance", "lossy-rule"),
        ("decoding.stop_tokens", 1, 0, "no-stop-token"),
        ("decoding.ended_by_stop", 0.01, 0.0, "none-ended"),
        ("prompts.overlap_with_training", 0.0, None, "overlap-unknown"),
        ("prompts.in_chat_form", 1.0, 0.25, "raw-prompts"),
        ("prompts.other_ids", [], ["p"], "other-ids"),
        ("baseline.over_stock_generate.mean", 0.96, 0.94, "slow-baseline"),
        ("eager", [], ["target"], "no-graphs"),
        ("drafts.tuned.decode_efficiency.mean", 0.98, 0.96, "overhead"),
        ("drafts.tuned.decode_efficiency.mean", 1.01, 1.03, "slow-steps"),
        ("drafts.tuned.speedup.ci95", [1.1, 1.2], [0.9, 1.2], "no-effect"),
        ("drafts.tuned.speedup.ci95", [1.1, 1.2], [0.8, 0.9], "slower"),
        ("drafts.tuned.missing", [], [{"field": "prompts", "reason": "it failed"}], "partial"),
        ("drafts.tuned.lossless.divergences", [], [MISMATCH], "mismatch"),
        ("drafts.tuned.sampled_check.p_value", 0.011, 0.009, "sampled-mismatch"),
    ],
)
def test_warnings(run_info, measurement, read, path, below, above, code):
    data = build_report(run_info, [measurement("tuned", 0.6)]).model_dump(mode="json")
    data["prompts"] |= {"chat_template": True, "in_chat_form": 1.0}
    data["drafts"]["tuned"]["sampled_check"] = SAMPLED | {"p_value": 1.0}
    put(data, path, below)
    assert codes(read(data)) == []
    put(data, path, above)
    assert codes(read(data)) == [code]


def test_gains_that_are_not_shown_are_warned_about(run_info, measurement):
    ngram = measurement("lookup", 0.6, path="prompt-lookup")
    weak = build_report(run_info, [ngram, measurement("tuned", 0.3)])
    assert "not-over-ngram" in codes(weak)


def test_mismatches_come_first_and_cannot_be_hidden(run_info, measurement, tmp_path):
    wrong = MISMATCH | {"why": "the reason"}
    broken = measurement("tuned", 0.6, lossless={"prompts": 40, "divergences": [wrong]})
    write_report(tmp_path, build_report(run_info, [broken]))
    path = tmp_path / "report.json"
    hidden = json.loads(path.read_text()) | {"warnings": [], "headline": "All is well."}
    path.write_text(json.dumps(hidden))
    report = read_report(path)
    assert find_warnings(report)[0].code == "mismatch"
    assert "the reason" in find_warnings(report)[0].text
    assert verdict(report).startswith("Do NOT serve distilled draft")
    assert "1 MISMATCH" in render_markdown(report)


def test_sampled_outputs_that_differ_are_a_mismatch(sample_report):
    """The level is shared by the drafts."""
    tuned = sample_report.drafts["tuned"]
    for p_value, broken in ((0.006, []), (0.004, ["tuned"])):
        tuned.sampled_check = SampledCheck(**SAMPLED, p_value=p_value)
        assert sample_report.broken == broken
        assert (served(sample_report) == {1: "tuned"}) == (not broken)
    assert find_warnings(sample_report)[0].code == "sampled-mismatch"
    assert verdict(sample_report).startswith("Do NOT serve distilled draft")
    assert "p = 0.004" in render_markdown(sample_report)


# --- Rendered


def page_top(page):
    """The page without its style and details, one tag a line."""
    body = page.partition("<body>")[2].partition("<details")[0]
    return re.sub(r"\n\s*\n+", "\n", body)


def test_a_laptop_is_sent_to_llama_cpp(four_drafts):
    """Its steps are shorter than those of the reference decoder."""
    on_gpu, on_cpu = (
        top(four_drafts.model_copy(update={"device": device})).verdict
        for device in ("NVIDIA H100", "cpu (2 threads)")
    )
    assert "--engine llama.cpp" in on_cpu
    assert "--engine llama.cpp" not in on_gpu


@pytest.mark.parametrize(("kept", "after"), [(1, "0.55"), (0, "0.30")])
def test_the_first_lines_have_what_training_changed(four_drafts, kept, after):
    shares = (share("alpha", [(None, n, 100)] * 12) for n in (30, 55))
    points = [
        HeldOutPoint(step=10 * i, tokens=i, alpha=alpha, kept=i == kept)
        for i, alpha in enumerate(shares)
    ]
    report = four_drafts.model_copy(update={"held_out": HeldOutCurve(points=points)})
    assert top(report).training == (
        f"acceptance rate 0.30 before, {after} after, on 12 held-out prompts"
    )
    assert top(four_drafts).training == ""


@pytest.mark.parametrize("name", ["report.md", "top.html", "summary.txt"])
def test_golden(four_drafts, name, capsys):
    """What a reader sees first."""
    if name == "report.md":
        text = render_markdown(four_drafts)
    elif name == "top.html":
        text = page_top(render_page(four_drafts))
    else:
        print_summary(four_drafts)
        text = capsys.readouterr().out
    assert_golden(GOLDEN / name, text)
