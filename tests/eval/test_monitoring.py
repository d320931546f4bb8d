"""The alert rules and the dashboard of a report; promtool has checked such rules."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from ruamel.yaml import YAML

from eval.drift import main
from eval.measuring.runs import Speculation
from eval.monitoring import write_monitoring
from eval.reporting.files import write_report
from eval.reporting.traffic import compare, counted_acceptance, measured_acceptance

PAGE = Path(__file__).parent / "engines" / "vllm-metrics.prom"  # a vLLM server's own
SUM = re.compile(
    r"sum by \((?:model_name|instance)\) \(increase\("
    r'vllm:spec_decode_num_(\w+)_total\{job="vllm"(?:,position="(\d)")?\}\[\w+\]\)\)'
)


@pytest.fixture
def made(sample_report, tmp_path):
    """(alerts, dashboard) of a report whose outputs differ by more than drafts of one output do."""
    for place in sample_report.drafts["tuned"].per_position:
        place.marginal.ci95 = place.marginal.mean - 0.06, place.marginal.mean + 0.06
    write_report(tmp_path, sample_report)
    arguments = ["--monitoring", str(tmp_path / "made"), "--selector", '{job="vllm"}']
    assert main([str(tmp_path / "report.json"), *arguments]) == 0
    alerts = YAML(typ="safe", pure=True).load(tmp_path / "made" / "alerts.yaml")
    return alerts["groups"], json.loads((tmp_path / "made" / "dashboard.json").read_text())


def value(expression, counts):
    """What Prometheus gives for these counts of an hour."""
    names = ("drafts", "draft_tokens", "accepted_tokens")

    def count(match):
        name, position = match.groups()
        return repr(float(counts[3][int(position)] if position else counts[names.index(name)]))

    python = SUM.sub(count, expression)
    return eval(python, {"abs": abs, "sqrt": math.sqrt, "vector": float, "__builtins__": {}})


def test_metrics_are_vllm_s_and_only_of_the_selected_servers(made):
    groups, dashboard = made
    expressions = [rule["expr"] for group in groups for rule in group["rules"]]
    expressions += [t["expr"] for panel in dashboard["panels"] for t in panel["targets"]]
    counters = set(re.findall(r"^vllm:\w+", PAGE.read_text(), flags=re.MULTILINE))
    named = re.findall(r"(vllm:\w+)(\{.*?\})", " ".join(expressions))
    assert {name for name, _ in named} <= counters
    assert {labels.partition(",")[0].strip("{}") for _, labels in named} == {'job="vllm"'}
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_rule_alerts_in_the_hours_that_drift_calls_moved(made, sample_report):
    (acceptance, _), _ = made
    assert acceptance["interval"] == "1h"
    promised = measured_acceptance(sample_report, sample_report.drafts["tuned"])
    rng = np.random.default_rng(0)
    verdicts = []
    for drafts, alpha in zip(rng.integers(5, 5000, 400), rng.uniform(0.2, 1, 400), strict=True):
        at = np.logical_and.accumulate(rng.random((3, drafts)) < alpha).sum(axis=1).tolist()
        counts = Speculation(drafts, 3 * drafts, sum(at), at)
        moved = [d.moved for d in compare(promised, counted_acceptance(counts, promised))]
        assert [value(rule["expr"], counts) for rule in acceptance["rules"]] == moved
        verdicts += moved
    assert 0.1 < np.mean(verdicts) < 0.9
    # of shorter drafts, at a high load, only the first position is compared
    shorter = Speculation(4000, 8000, 400, [400, 0, 0])
    assert [value(rule["expr"], shorter) for rule in acceptance["rules"]] == [True, False, False]


def test_the_rule_knows_that_engines_draft_on_behind_the_end_of_an_output(
    made, sample_report, tmp_path
):
    """Each of 40 outputs of 10 drafts ended in an accepted token at the first position."""
    draft = sample_report.drafts["tuned"]
    for row in draft.per_prompt[:40]:
        row.drafted, row.block_tokens = row.drafted - 2, row.block_tokens - 1
    promised = measured_acceptance(sample_report, draft)
    assert [place.behind_end for place in promised] == [0, 0.1, 0.1]
    write_monitoring(tmp_path, "t", promised, '{job="vllm"}', 1, "vllm:")
    rules = YAML(typ="safe", pure=True).load(tmp_path / "alerts.yaml")["groups"][0]["rules"]
    for share in np.linspace(0, 0.6, 61):
        at = [2400, round(4000 * share), round(4000 * share * 0.6)]
        counts = Speculation(4000, 12_000, sum(at), at)
        moved = [d.moved for d in compare(promised, counted_acceptance(counts, promised))]
        assert [value(rule["expr"], counts) for rule in rules] == moved


def test_all_names_have_the_prefix_of_ray(sample_report, tmp_path):
    write_report(tmp_path, sample_report)
    report = str(tmp_path / "report.json")
    assert main([report, "--monitoring", str(tmp_path), "--prefix", "ray_vllm_"]) == 0
    for name in ("alerts.yaml", "dashboard.json"):
        text = (tmp_path / name).read_text()
        assert "vllm:" not in text
        assert text.count("ray_vllm_spec_decode_num_") > 10


def test_the_dashboard_shows_the_report_beside_the_traffic(made, sample_report):
    _, dashboard = made
    counts = Speculation(1000, 3000, 1180, [600, 360, 220])
    shown = {
        target["legendFormat"]: value(target["expr"], counts)
        for panel in dashboard["panels"][:2]
        for target in panel["targets"]
    }
    first, *_ = measured_acceptance(sample_report, sample_report.drafts["tuned"])
    assert shown["position 1"] == 0.6
    assert shown["position 1, report"] == pytest.approx(first.mean, rel=1e-5)
    assert shown["traffic"] == pytest.approx(2.18)
    assert shown["report"] == pytest.approx(sample_report.drafts["tuned"].tau.mean, rel=1e-3)
