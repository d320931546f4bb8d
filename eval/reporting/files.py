"""Writes report.json, report.md and report.html."""

from __future__ import annotations

import json
from pathlib import Path

from align.files import atomic_file
from eval.reporting.fields import Report, checked
from eval.reporting.page import render_page
from eval.reporting.text import render_markdown
from eval.reporting.verdict import verdict
from eval.reporting.warnings import find_warnings


def write_report(folder: Path | str, report: Report) -> None:
    """Check the report and write its three files to `folder`, each atomically."""
    report = checked(report)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    fields = report.model_dump(mode="json") | {
        "headline": verdict(report),
        "warnings": [warning.text for warning in find_warnings(report)],
    }
    texts = {
        "report.md": render_markdown(report),
        "report.html": render_page(report),
        "report.json": json.dumps(fields, indent=2, allow_nan=False) + "\n",
    }
    for name, text in texts.items():
        with atomic_file(folder / name) as file:
            file.write(text)
