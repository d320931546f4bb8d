"""A Prometheus alert rule and a Grafana dashboard, made from a report.

The rule is the test of eval/reporting/traffic.py in PromQL, once an hour.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from align.files import atomic_file, write_json
from eval.engines.counters import counter
from eval.engines.counters import increase as growth_of
from eval.reporting.traffic import FULL_LENGTH, REMEDY, Estimate, compare


def write_monitoring(
    folder: Path, title: str, report: Sequence[Estimate], selector: str, hours: int, prefix: str
) -> None:
    """Write alerts.yaml and dashboard.json to a folder.

    report: acceptance by position. selector: the servers' labels in Prometheus. hours: the window.
    prefix: of vLLM's names.
    """
    window = f"{hours}h"
    increase = partial(growth_of, prefix=prefix)
    drafts, drafted, accepted = (
        increase(name, window, selector) for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    shares = [
        f"{increase('accepted_tokens_per_pos', window, selector, position)} / {drafts}"
        for position in range(len(report))
    ]
    moved = []
    for share, itself in zip(shares, compare(report, report), strict=True):
        mean, n = itself.report.mean, itself.report.drafts
        # itself.chance has the report's error twice; that of m drafts is sqrt(n / m) times as large
        chance = itself.chance(itself.level) * math.sqrt(n / 2)
        half = itself.report.behind_end / 2  # of the report's range
        expression = (
            f"abs({share} - {mean + half:.6g}) - {half:.6g} "
            f"> {chance:.6g} * sqrt({1 / n:.6g} + 1 / {drafts})"
        )
        if itself.position > 1:  # a shorter draft has a first position, too
            expression += f" and {drafted} >= {FULL_LENGTH * len(report):g} * {drafts}"
        rule = _alert(
            "DraftAcceptanceMoved",
            expression,
            f"{{{{ $labels.model_name }}}}: acceptance at position {itself.position} is "
            f"{{{{ $value | humanizePercentage }}}} away from the report's {mean:.1%}",
            REMEDY,
        )
        rule["labels"]["position"] = str(itself.position)
        moved.append(rule)
    silent = _alert(
        "DraftIsSilent",
        f"sum by (model_name) ({prefix}num_requests_running{{{selector.strip('{} ')}}}) > 0 "
        f"unless {increase('drafts', '15m', selector)} > 0",
        "{{ $labels.model_name }} serves requests and drafts nothing",
        "The server was started without --speculative-config, or its load is in a range of "
        "num_speculative_tokens_per_batch_size that drafts 0 tokens.",
    )
    missing = _alert(
        "DraftCountersMissing",
        f"absent({counter('drafts', selector, None, prefix)})",
        "Prometheus has no counters of speculation, so acceptance is not watched",
        "Start vLLM with --speculative-config and without --disable-log-stats, and let Prometheus "
        "read the /metrics of each replica.",
    )
    groups = [
        # FALSE_ALARMS is for a test in an hour
        {"name": "draft-acceptance", "interval": "1h", "rules": moved},
        {"name": "draft-counters", "rules": [rule | {"for": "30m"} for rule in (silent, missing)]},
    ]
    panels: dict[str, dict[str, str]] = {
        "Share of drafts accepted up to a position": {
            f"position {place}{of}": expression
            for place, (share, promised) in enumerate(zip(shares, report, strict=True), start=1)
            for of, expression in (("", share), (", report", f"vector({promised.mean:.6g})"))
        },
        "Mean acceptance length": {
            "traffic": f"1 + {accepted} / {drafts}",
            "report": f"vector({1 + sum(promised.mean for promised in report):.6g})",
        },
        "Draft length": {"traffic": f"{drafted} / {drafts}", "report": f"vector({len(report)})"},
        "Drafts": {"{{instance}}": increase("drafts", window, selector, by="instance")},
    }
    dashboard = {
        "title": title,
        "schemaVersion": 39,
        "time": {"from": "now-7d", "to": "now"},
        "templating": {"list": [{"name": "source", "type": "datasource", "query": "prometheus"}]},
        "panels": [_panel(i, *panel) for i, panel in enumerate(panels.items())],
    }
    folder.mkdir(parents=True, exist_ok=True)
    yaml = YAML()
    yaml.width = 10_000  # an expression can be copied as one line
    with atomic_file(folder / "alerts.yaml") as file:
        yaml.dump({"groups": groups}, file)
    write_json(folder / "dashboard.json", dashboard)


def _alert(name: str, expression: str, summary: str, description: str) -> dict[str, Any]:
    return {
        "alert": name,
        "expr": expression,
        "labels": {"severity": "warning"},
        "annotations": {"summary": summary, "description": description},
    }


def _panel(i: int, title: str, expressions: dict[str, str]) -> dict[str, Any]:
    """The panel at place i of two columns. expressions: PromQL by legend."""
    return {
        "id": i + 1,
        "type": "timeseries",
        "title": title,
        "datasource": {"type": "prometheus", "uid": "${source}"},
        "gridPos": {"x": i % 2 * 12, "y": i // 2 * 9, "w": 12, "h": 9},
        "targets": [
            {"refId": f"Q{number}", "legendFormat": legend, "expr": expression}
            for number, (legend, expression) in enumerate(expressions.items())
        ],
    }
