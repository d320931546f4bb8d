"""A report as text: in the terminal, and report.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from eval.reporting.fields import Report
from eval.reporting.tables import Table, gain_table, result_table
from eval.reporting.verdict import times, top
from eval.reporting.warnings import find_warnings

LOG_WIDTH = 100  # columns, if the output is not a terminal


def print_summary(report: Report, console: Console | None = None) -> None:
    """Print the first lines of the report at the end of a run."""
    console = console or Console(width=None if sys.stdout.isatty() else LOG_WIDTH)
    lines = top(report)
    styled = [(f"Verdict: {lines.verdict}", "bold")]
    broken = any(draft.lossless.unexplained for draft in report.drafts.values())
    styled.append((f"Output:  {lines.output}", "red bold" if broken else ""))
    width = max(len(name) for name, _ in lines.speedups)
    styled.append((f"Speed-up over {lines.speedups[0][1].n} prompts:", ""))
    styled += [(f"  {name:{width}}  {times(value)}", "") for name, value in lines.speedups]
    for before, line in (
        ("  ", lines.note),
        ("Memory:  ", lines.memory),
        ("Next:    ", lines.command),
    ):
        styled += [(before + line, "")] if line else []
    styled += [(f"Warning: {warning.text}", "yellow") for warning in find_warnings(report)]
    styled.append((lines.setting, ""))
    with console.capture() as shown:
        # Text, because markup would read a path or an interval in brackets as a style
        console.print("", *(Text(line, style=style) for line, style in styled), sep="\n")
    console.file.writelines(f"{line.rstrip()}\n" for line in shown.get().splitlines())


def _grid(table: Table) -> Iterator[str]:
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    yield f"## {table.title}"
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    yield "\n".join("| " + " | ".join(line) + " |" for line in cells)
    if table.note:
        yield table.note


def render_markdown(report: Report) -> str:
    """The text of report.md: first lines and results; report.html has the details."""
    lines, gains = top(report), gain_table(report)
    parts = [
        "# Speculative decoding report",
        f"**{lines.verdict}**",
        f"Output check: {lines.output}.",
        *([f"Memory: {lines.memory}."] if lines.memory else []),
        *([f"Next: `{lines.command}`"] if lines.command else []),
        lines.setting,
        "\n".join(f"- Warning: {warning.text}" for warning in find_warnings(report)),
        *_grid(result_table(report)),
        *(_grid(gains) if gains.rows else ()),
        lines.note,
        "Charts, tables of details, definitions and provenance: [report.html](report.html).",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"
