"""report.html: one file that needs nothing else, for a browser in the light or dark, and for paper.

No script, no network, no font of its own. The markup stands in page.html.j2 and charts.html.j2,
which escape every text of the report; here is what they cannot compute: scales and chart data.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval.measuring.atlas import Bucket
from eval.measuring.intervals import Measured
from eval.reporting.report import DraftReport, Report
from eval.reporting.tables import (
    DEFINITIONS,
    bounds,
    gamma_curve,
    gamma_text,
    ledger_table,
    missing_lines,
    prompts_text,
    setting_line,
    shown,
    size,
    tables,
    texts_line,
    verdict_lines,
    waterfall,
)

COLOURS = 5  # --s0 … --s4 of page.css; the last draft, which the headline is about, takes the first
WIDTH, HEIGHT = 480, 260  # of a chart, in its own units
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 42  # margins around its plot
NUMERIC = re.compile(r"[+\-−≤]?\d[\d.,]*(?!\w)|not measured")

# Classes of page.css: what stands in green is identical.
MARKS = {"identical": "good", "same up to ties": "tie", "changed": "bad"}

Drafts = dict[str, DraftReport]


@dataclass(frozen=True)
class Plot:
    """The plane of one chart: x in slots or numbers from `low` to `high`, y from 0 to `top`."""

    low: float
    high: float
    top: float

    def x(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(LEFT + min(max(share, 0), 1) * (WIDTH - LEFT - RIGHT), 1)

    def y(self, value: float) -> float:
        return round(HEIGHT - BOTTOM - min(value / self.top, 1) * (HEIGHT - TOP - BOTTOM), 1)

    @property
    def ticks(self) -> list[float]:
        """Round numbers from 0 to `top`, four or five of them."""
        raw = self.top / 4
        step = 10 ** math.floor(math.log10(raw))
        step *= next(m for m in (1, 2, 2.5, 5, 10) if m * step >= raw * 0.999)
        return [i * step for i in range(int(self.top / step + 1e-9) + 1)]


def is_numeric(cell: str) -> bool:
    """Whether a cell stays on one line: a number and its unit do, a hash must break."""
    return NUMERIC.match(cell) is not None


def visible(token: str) -> str:
    """A token with its white space to be seen."""
    return token.replace("\n", "⏎").replace("\t", "⇥").replace(" ", "·") or "∅"


def acceptance_charts(drafts: Drafts, colours: dict[str, str]) -> list[dict[str, Any]]:
    """Bars by place in the draft, by place in the answer, by the target's entropy."""
    places = {name: d.per_position for name, d in drafts.items() if d.per_position}
    longest = max(map(len, places.values()), default=0)
    charts: list[dict[str, Any]] = [
        {
            "title": "By position in the draft",
            "note": "Bars: all tokens up to this one accepted, of the drafts this long.",
            "x_label": "position in the draft",
            "labels": range(1, longest + 1),
            "bars": {name: [place.marginal for place in p] for name, p in places.items()},
            "dots": {name: [place.conditional for place in p] for name, p in places.items()},
            "legend": [("round", "var(--ink)", "given that all before were accepted")],
        }
    ]
    for key, title, x_label in (
        ("by_output_position", "By position in the answer", "token of the answer"),
        ("by_entropy", "By the target's entropy", "bits at temperature 1"),
    ):
        buckets = {name: getattr(d.atlas, key) for name, d in drafts.items() if d.atlas}
        # all drafts are measured on the same texts, so their buckets are the same
        first: list[Bucket] = next(iter(buckets.values()), [])
        charts.append(
            {
                "title": title,
                "note": f"alpha. Tokens: {', '.join(f'{b.positions:,}' for b in first)}.",
                "x_label": x_label,
                "labels": [bounds(bucket) for bucket in first],
                "bars": {name: [b.alpha for b in part] for name, part in buckets.items()},
                "dots": {},
                "legend": [],
            }
        )
    for chart in charts:
        chart["legend"] = [("", colours[name], name) for name in chart["bars"]] + chart["legend"]
    return [chart for chart in charts if chart["bars"]]


def _upper(value: Measured) -> float:
    """Where its mark in a chart ends."""
    return value.ci95[1] if value.ci95 else value.mean


def speedup_chart(drafts: Drafts) -> dict[str, Any]:
    """One bar a draft."""
    speedups = {name: draft.speedup for name, draft in drafts.items()}
    top = 1.08 * max(1.0, *map(_upper, speedups.values()))
    return {"plot": Plot(0, len(speedups), top), "speedups": speedups}


def gamma_chart(drafts: Drafts, colours: dict[str, str]) -> dict[str, Any] | None:
    """Expected speed-up by gamma as lines, measured speed-ups as dots."""
    curves = {name: curve for name, draft in drafts.items() if (curve := gamma_curve(draft))}
    if not curves:
        return None
    dots: list[tuple[float, Measured, str, str]] = []
    for name in curves:
        draft = drafts[name]
        if draft.mean_drafted is not None:
            dots.append((draft.mean_drafted, draft.speedup, colours[name], f"{name}, the run"))
    last, perfect = list(curves.items())[-1]
    lines = [("ceiling", "var(--muted)", [(gamma, ceiling) for gamma, _, ceiling in perfect])]
    for name, curve in curves.items():
        lines.append(("curve", colours[name], [(gamma, expected) for gamma, expected, _ in curve]))
    longest = max(gamma for curve in curves.values() for gamma, *_ in curve)
    highest = [ceiling for *_, ceiling in perfect] + [_upper(value) for _, value, *_ in dots]
    return {
        "plot": Plot(0.5, longest + 0.5, 1.08 * max(1.0, *highest)),
        "gammas": range(1, longest + 1),
        "lines": lines,
        "dots": dots,
        "legend": [
            *(("line", colours[name], name) for name in curves),
            ("line dashed", "var(--muted)", f"{last} at alpha 1"),
            ("round", "var(--ink)", "measured, 95% interval"),
        ],
    }


def waterfall_rows(draft: DraftReport) -> list[tuple[str, float | None, float]]:
    """(label, start, end) from the longest possible block to the wall clock; totals start at 0."""
    if not (speedups := waterfall(draft)):
        return []
    longest, tau, drafted, predicted, decode, wall = speedups.values()
    return [
        (f"All of {draft.mean_drafted:.2f} drafted tokens accepted", None, longest),
        ("Rejected tokens", longest, tau),
        ("τ: drafting and verification free", None, tau),
        (f"Draft steps, c = {draft.c:.3f}", tau, drafted),
        (f"Wider target calls, ×{draft.verify_ratio:.2f}", drafted, predicted),
        ("Predicted", None, predicted),
        ("Overhead of the loop", predicted, decode),
        ("Prefill, cut blocks", decode, wall),
        ("Wall clock", None, wall),
    ]


def memory_rows(drafts: Drafts, colours: dict[str, str]) -> list[tuple[str, str, int, int, str]]:
    """(name, form, bytes, KV bytes of a token, colour) of the target and of each draft."""
    rows: list[tuple[str, str, int, int, str]] = []
    for name, draft in drafts.items():
        if (m := draft.memory) is None:
            continue
        kv = m.kv_bytes_per_token
        if not rows:
            rows.append(("target", "", m.target_bytes, kv.target, "var(--muted)"))
        form = f"{draft.form}, {m.overhead:.1%}"
        rows.append((name, form, m.draft_bytes, kv.draft, colours[name]))
        if m.full_form_bytes and m.full_form_bytes != m.draft_bytes:
            form = f"full form, {m.full_form_bytes / m.target_bytes:.1%}"
            rows.append((name, form, m.full_form_bytes, kv.draft, colours[name]))
    return rows


def _environment() -> Environment:
    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "shown": shown,
        "size": size,
        "visible": visible,
        "prompts": prompts_text,
    }
    environment.tests["numeric"] = is_numeric
    environment.globals |= {
        "Plot": Plot,
        "zip": zip,
        "WIDTH": WIDTH,
        "HEIGHT": HEIGHT,
        "LEFT": LEFT,
        "RIGHT": RIGHT,
        "BOTTOM": BOTTOM,
        "style": (here / "page.css").read_text(encoding="utf-8"),
    }
    return environment


def render_page(report: Report) -> str:
    """The report as one self-contained HTML page."""
    order = list(reversed(report.drafts))
    colours = {name: f"var(--s{order.index(name) % COLOURS})" for name in report.drafts}
    name, draft = report.last
    page = (
        _environment()
        .get_template("page.html.j2")
        .render(
            report=report,
            name=name,
            draft=draft,
            gain=next((gain for gain in report.gain if gain.draft == name), None),
            setting=setting_line(report),
            gamma=gamma_text(draft.gamma, draft.gamma_policy),
            missing=missing_lines(report),
            tables={table.title: table for table in tables(report)},
            waterfall=waterfall_rows(draft),
            speedup_chart=speedup_chart(report.drafts),
            gamma_chart=gamma_chart(report.drafts, colours),
            acceptance_charts=acceptance_charts(report.drafts, colours),
            colours=colours,
            memory=memory_rows(report.drafts, colours),
            atlases=[(n, report.drafts[n].atlas) for n in order if report.drafts[n].atlas],
            verdicts=verdict_lines(report),
            ledgers=[(texts_line(*ledger), ledger[1].verdict) for ledger in report.ledgers()],
            marks=MARKS,
            tie_note=ledger_table(report).note,
            provenance=json.dumps(report.provenance, indent=2, ensure_ascii=False),
            definitions=DEFINITIONS,
        )
    )
    return page.lstrip() + "\n"
