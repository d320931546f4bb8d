"""report.html: one file without scripts, network access or fonts; for screen and print.

The markup is in page.html.j2 and charts.html.j2, where all texts of the report are escaped. This
module has the scales and the data of the charts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from align.errors import abridged
from eval.reporting.fields import ONE_AT_A_TIME, DraftReport, Report
from eval.reporting.tables import (
    DEFINITIONS,
    details,
    gain_table,
    load_table,
    missing_lines,
    result_table,
    shown,
)
from eval.reporting.verdict import in_order, label, times, top
from eval.reporting.warnings import find_warnings

COLOURS = 5  # --s0 … --s4 of page.css; the distilled draft takes the first
WIDTH, HEIGHT = 480, 240  # of a chart, in SVG units
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 42  # margins around its plot
# fields of the report that are shown as they are
SETTING = {"engine", "device", "dtype", "decoding", "prompts", "answers", "environment", "starts"}
SETTING |= {"provenance"}
SHORT = 28  # most characters of a cell that stays on one line; longer ones are sentences or hashes

Drafts = dict[str, DraftReport]  # by shown name


def height(share: float) -> float:
    """The y coordinate of a share in a chart; 0 is at the bottom and 1 at the top."""
    return round(HEIGHT - BOTTOM - min(share, 1) * (HEIGHT - TOP - BOTTOM), 1)


def acceptance_chart(drafts: Drafts) -> dict[str, Any]:
    """The bar chart of the acceptance by position in the draft; without bars if not measured."""
    bars = {
        name: [entry.marginal for entry in draft.per_position]
        for name, draft in drafts.items()
        if draft.per_position
    }
    return {"labels": range(1, max(map(len, bars.values()), default=0) + 1), "bars": bars}


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
    environment.filters |= {"shown": shown, "times": times}
    environment.globals |= {
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
    fields = report.model_dump(mode="json", include=SETTING)
    setting = {"target": abridged(report.target)} | fields
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
            chart=acceptance_chart({label(each): report.drafts[each] for each in names}),
            details=details(report),
            missing=list(missing_lines(report)),
            definitions=DEFINITIONS,
            setting=json.dumps(setting, indent=2, ensure_ascii=False),
        )
    )
    return page.lstrip() + "\n"
