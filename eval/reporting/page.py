"""report.html: one file without scripts, network access or fonts; for light, dark and print.

The markup is in page.html.j2 and charts.html.j2, where all texts of the report are escaped. This
module has the scales and the data of the charts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval.measuring.atlas import Bucket
from eval.reporting.fields import ONE_AT_A_TIME, DraftReport, Report
from eval.reporting.tables import (
    DEFINITIONS,
    details,
    gain_table,
    load_table,
    missing_lines,
    result_table,
    shown,
    visible,
)
from eval.reporting.verdict import in_order, label, times, top
from eval.reporting.warnings import find_warnings

COLOURS = 5  # --s0 … --s4 of page.css; the distilled draft takes the first
WIDTH, HEIGHT = 480, 240  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 42  # margins around its plot
SHORT = 28  # most characters of a cell that stays on one line; longer ones are sentences or hashes

Drafts = dict[str, DraftReport]  # by shown name


def bounds(bucket: Bucket) -> str:
    """`9-16` for positions (with both ends), `0.5-1` or `≥ 4` for bits (without the upper end)."""
    return f"≥ {bucket.low:g}" if bucket.high is None else f"{bucket.low:g}-{bucket.high:g}"


def height(share: float) -> float:
    """The y coordinate of a share in a chart; 0 is at the bottom and 1 at the top."""
    return round(HEIGHT - BOTTOM - min(share, 1) * (HEIGHT - TOP - BOTTOM), 1)


def acceptance_charts(drafts: Drafts) -> list[dict[str, Any]]:
    """The bar charts: by position in the draft, position in the output, and target's entropy."""
    positions = {name: d.per_position for name, d in drafts.items() if d.per_position}
    charts: list[dict[str, Any]] = [
        {
            "title": "Acceptance by position in the draft",
            "note": "Share of all drafts whose tokens up to this one were accepted.",
            "x_label": "position in the draft",
            "labels": range(1, max(map(len, positions.values()), default=0) + 1),
            "bars": {name: [entry.marginal for entry in each] for name, each in positions.items()},
        }
    ]
    for key, title, x_label in (
        ("by_output_position", "Acceptance rate by position in the output", "output token"),
        ("by_entropy", "Acceptance rate by the target's entropy", "bits at temperature 1"),
    ):
        buckets = {name: getattr(d.atlas, key) for name, d in drafts.items() if d.atlas}
        # all drafts are measured on the same outputs, so their buckets are the same
        first: list[Bucket] = next(iter(buckets.values()), [])
        charts.append(
            {
                "title": title,
                "note": f"Tokens: {', '.join(f'{b.positions:,}' for b in first)}.",
                "x_label": x_label,
                "labels": [bounds(bucket) for bucket in first],
                "bars": {name: [b.alpha for b in each] for name, each in buckets.items()},
            }
        )
    return [chart for chart in charts if chart["bars"]]


def waterfall(draft: DraftReport) -> list[tuple[str, float | None, float]]:
    """Bars (label, start, end): costs that reduce a perfect speed-up to the measured one.

    A total has no start. Empty if a part was not measured.
    """
    length, predicted, efficiency = draft.tau, draft.predicted_speedup, draft.decode_efficiency
    if length is None or predicted is None or efficiency is None:
        return []
    assert draft.mean_drafted is not None
    assert draft.verify_ratio is not None
    longest = draft.mean_drafted + 1
    drafting = length.mean / predicted.mean - draft.verify_ratio  # in target steps, a draft
    drafted = length.mean / (1 + drafting)
    decode = efficiency.mean * predicted.mean
    return [
        (f"All of {draft.mean_drafted:.2f} drafted tokens accepted", None, longest),
        ("Rejected tokens", longest, length.mean),
        ("Mean acceptance length: drafting is free", None, length.mean),
        (f"Draft steps, cost ratio {draft.c:.3f}", length.mean, drafted),
        (f"Wider target calls, ×{draft.verify_ratio:.2f}", drafted, predicted.mean),
        ("Predicted", None, predicted.mean),
        ("Overhead of the loop", predicted.mean, decode),
        ("Prefill, cut steps", decode, draft.speedup.mean),
        ("Wall clock", None, draft.speedup.mean),
    ]


def _environment() -> Environment:
    folder = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"shown": shown, "visible": visible, "times": times}
    environment.globals |= {
        "zip": zip,
        "SHORT": SHORT,
        "height": height,
        "WIDTH": WIDTH,
        "HEIGHT": HEIGHT,
        "LEFT": LEFT,
        "RIGHT": RIGHT,
        "BOTTOM": BOTTOM,
        "style": (folder / "page.css").read_text(encoding="utf-8"),
    }
    return environment


def render_page(report: Report) -> str:
    """The report as one self-contained HTML page."""
    name, draft = report.tuned
    names = in_order(report)
    coloured = [name, *(other for other in names if other != name)]
    drafts = report.drafts.values()
    ties = any(each.lossless.divergences for each in drafts)
    first = top(report)
    values = [value for rows in first.speedups.values() for _, value in rows]
    ends = [(value.ci95 or (0.0, value.mean))[1] for value in values]
    page = (
        _environment()
        .get_template("page.html.j2")
        .render(
            top=first,
            prompts=first.speedups[ONE_AT_A_TIME][0][1].n,
            mark="bad" if report.broken else "tie" if ties else "good",
            widest=max(1.0, *ends),
            colours={
                label(each) + star: f"var(--s{coloured.index(each) % COLOURS})"
                for each in names
                for star in ("", "*")
            },
            warnings=[warning.text for warning in find_warnings(report)],
            name=label(name),
            waterfall=waterfall(draft),
            starts=report.starts,
            loads=load_table(report),
            results=result_table(report),
            gains=gain_table(report),
            charts=acceptance_charts({label(each): report.drafts[each] for each in names}),
            atlas=draft.atlas,
            details=details(report),
            missing=list(missing_lines(report)),
            definitions=DEFINITIONS,
            provenance=json.dumps(report.provenance, indent=2, ensure_ascii=False),
        )
    )
    return page.lstrip() + "\n"
