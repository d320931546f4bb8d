"""The first lines of a report as text: in the terminal, and in report.md."""

from __future__ import annotations

import re
from collections.abc import Iterator
from textwrap import indent

from eval.reporting.fields import ONE_AT_A_TIME, Report
from eval.reporting.verdict import times, top
from eval.reporting.warnings import find_warnings


def first_lines(report: Report) -> Iterator[tuple[str, str | list[str]]]:
    """The label of each line and its text, or lines that stay as they are: tables and commands."""
    first = top(report)
    yield "Verdict", first.verdict
    yield "Output", first.output
    width = max(len(name) for rows in first.speedups.values() for name, _ in rows)
    for load, rows in first.speedups.items():
        over = f"over {rows[0][1].n} prompts" if load == ONE_AT_A_TIME else f"at {load}"
        lines = [f"{name:{width}}  {times(value)}" for name, value in rows]
        yield f"{first.title} {over}", lines
    optional = [("Note", first.note), ("Memory", first.memory), ("Training", first.training)]
    yield from ((label, text) for label, text in optional if text)
    commands = [("Serve", first.serve), *(("Next", command) for command in first.commands)]
    yield from ((label, [command]) for label, command in commands if command)
    yield from (("Warning", warning.text) for warning in find_warnings(report))
    yield "Setting", first.setting


def print_summary(report: Report) -> None:
    """Print the first lines of the report at the end of a run."""
    print()
    for label, text in first_lines(report):
        if isinstance(text, str):
            print(f"{label + ':':8} {text}")
        else:
            print(f"{label}:", *text, sep="\n  ")


def plain(text: str) -> str:
    """The text on one line of Markdown, where no character of it is markup."""
    return re.sub(r"[\\`*<|]|\](?=\()", r"\\\g<0>", " ".join(text.split()))


def render_markdown(report: Report) -> str:
    """The text of report.md."""
    parts = ["# Speculative decoding report"]
    for label, text in first_lines(report):
        if isinstance(text, str):
            parts.append(f"**{label}**: {plain(text)}")
        else:
            parts += [f"**{label}**:", indent("\n".join(text), "    ")]
    return "\n\n".join([*parts, "Tables, charts, definitions: [report.html](report.html)."]) + "\n"
