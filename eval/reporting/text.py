"""A report as text: the table at the end of a run, and report.md.

Everything is rendered from the report alone, so it can be shown again from its report.json years
later. eval/reporting/page.py makes report.html from the same tables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from eval.reporting.report import Report
from eval.reporting.tables import (
    DEFINITIONS,
    Table,
    missing_lines,
    result_table,
    setting_line,
    tables,
    texts_line,
    verdict_lines,
)

LOG_WIDTH = 100  # columns, where no terminal has its own
STYLES = {"identical": "green", "same up to ties": "", "changed": "red bold"}


def print_summary(report: Report, console: Console | None = None) -> None:
    """The report at a glance, for the terminal at the end of a run."""
    console = console or Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    result = result_table(report)
    grid = Grid(
        title="Speculative decoding report",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        show_edge=False,
    )
    grid.add_column("", no_wrap=True)
    for name in result.header[1:]:
        grid.add_column(Text(name), justify="right")
    for label, *cells in result.rows:
        grid.add_row(label, *cells, style="bold" if label in ("alpha", "speed-up") else "")
    lines = [(setting_line(report), ""), (result.note, "")]
    for name, ledger in report.ledgers():
        lines.append((texts_line(name, ledger), STYLES[ledger.verdict]))
    lines += [(f"Warning: {warning}", "yellow") for warning in report.warnings]
    lines += [(verdict, "") for verdict in verdict_lines(report)[-1:]]
    lines += [(report.headline, "bold"), (report.recommendation, "bold")]
    with console.capture() as shown:
        # Text, not markup: a path or a range in brackets must not be read as a style
        console.print("", grid, "", *(Text(line, style=style) for line, style in lines), sep="\n")
    console.file.writelines(f"{line.rstrip()}\n" for line in shown.get().splitlines())


def _grid(table: Table) -> list[str]:
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    rows = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    return [f"## {table.title}", "\n".join(rows), *([table.note] if table.note else [])]


def _list(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", "\n".join(f"- {line}" for line in lines)] if lines else []


def render_markdown(report: Report) -> str:
    """report.md."""
    result, *others = tables(report)
    parts = [
        "# Speculative decoding report",
        f"**{report.headline}**",
        report.recommendation,
        *_list("Warnings", report.warnings),
        *_list("Not measured", missing_lines(report)),
        *_grid(result),
        *_list("Greedy text", [texts_line(*ledger) for ledger in report.ledgers()]),
        *_list("Does it pay?", verdict_lines(report)),
        *(part for table in others for part in _grid(table)),
        *_list("What the numbers mean", [f"**{term}**: {x}" for term, x in DEFINITIONS.items()]),
        "## Provenance",
        f"```json\n{json.dumps(report.provenance, indent=2)}\n```",
    ]
    return "\n\n".join(parts) + "\n"
