"""A report as text: in the terminal, and report.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import indent

from eval.reporting.fields import ONE_AT_A_TIME, Report
from eval.reporting.tables import Table, gain_table, load_table, result_table
from eval.reporting.verdict import times, top
from eval.reporting.warnings import find_warnings


def print_summary(report: Report) -> None:
    """Print the first lines of the report at the end of a run."""
    first = top(report)
    width = max(len(name) for rows in first.speedups.values() for name, _ in rows)
    lines = ["", f"Verdict: {first.verdict}", f"Output:  {first.output}"]
    for load, rows in first.speedups.items():
        over = f"over {rows[0][1].n} prompts" if load == ONE_AT_A_TIME else f"at {load}"
        lines += [f"{first.title} {over}:"]
        lines += [f"  {name:{width}}  {times(value)}" for name, value in rows]
    lines += [f"  {first.note}"] if first.note else []
    lines += [f"Memory:  {first.memory}"] if first.memory else []
    lines += [f"Training: {first.training}"] if first.training else []
    lines += [f"Serve:   {first.serve}"] if first.serve else []
    lines += [f"Next:    {command}" for command in first.commands]
    lines += [f"Warning: {warning.text}" for warning in find_warnings(report)]
    print("\n".join([*lines, first.setting]))


def plain(text: str) -> str:
    """The text on one line of Markdown, where no character of it is markup."""
    return re.sub(r"[\\`*<|]|\](?=\()", r"\\\g<0>", " ".join(text.split()))


def grid(table: Table) -> Iterator[str]:
    """The parts of a table in Markdown: its title, its rows, and its note if there is one."""
    lines = [table.header, ["---"] * len(table.header), *table.rows]
    yield f"## {table.title}"
    cells = (map(plain, line) for line in lines)
    yield "\n".join("| " + " | ".join(line) + " |" for line in cells)
    if table.note:
        yield table.note


def render_markdown(report: Report) -> str:
    """The text of report.md: first lines and results; report.html has the details."""
    lines, loads, gains = top(report), load_table(report), gain_table(report)
    parts = [
        "# Speculative decoding report",
        f"**{plain(lines.verdict)}**",
        f"Output check: {lines.output}.",
        *([f"Memory: {plain(lines.memory)}."] if lines.memory else []),
        *([f"Training: {lines.training}."] if lines.training else []),
        *(["Serve:", indent(lines.serve, "    ")] if lines.serve else []),
        *(["Next:", indent("\n".join(lines.commands), "    ")] if lines.commands else []),
        plain(lines.setting),
        "\n".join(f"- Warning: {plain(warning.text)}" for warning in find_warnings(report)),
        *(grid(loads) if loads.rows else ()),
        *grid(result_table(report)),
        *(grid(gains) if gains.rows else ()),
        "Charts, tables of details, definitions and provenance: [report.html](report.html).",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"
