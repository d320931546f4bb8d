"""Shortens a report to the figures that the docs cite, for docs/evidence/.

    python tests/benchmarks/evidence.py REPORT.json docs/evidence/NAME.json "NOTE"

NOTE says what the report lacks. Left out: single prompts, rejections, classes of prompts, the steps
within training, and of absolute paths all but the last two names. Numbers have six digits.
`read_report` reads it.
"""

import json
import re
import sys
from pathlib import Path

from eval.reporting.fields import HeldOutCurve, Report, read_report

LEFT_OUT = ["clusters", "freedom", "over_starts", "range"]  # of a measured number


def shortened(value):
    """A value of report.json with short numbers and paths."""
    match value:
        case dict():
            return {key: shortened(each) for key, each in value.items() if key not in LEFT_OUT}
        case list():
            return [shortened(each) for each in value]
        case float():
            return float(f"{value:.6g}")
        case str():
            return re.sub(r'(?<![^="])/[\w./-]*/(?=[\w.-]+/[\w.-]+(?:"|$))', "", value)
    return value


def evidence(report: Report, note: str) -> str:
    """The text of the file."""
    if curve := report.held_out:
        kept = [point for point in curve.points if point.kept or not point.step]
        report = report.model_copy(update={"held_out": HeldOutCurve(points=kept)})
    for draft in report.drafts.values():
        draft.per_prompt, draft.by_category = [], {}
    fields = shortened(report.model_dump(mode="json", exclude_defaults=True))
    text = json.dumps({"note": note} | fields, indent=1)
    text = re.sub(r"\[\s+([^][{}\"]+?)\s+\]", lambda numbers: " ".join(numbers[0].split()), text)
    flat = r'{\s+((?:[^][{}"]|"[^"]*"|\[[^][{}]*\]){1,110}?)\s+}'
    text = re.sub(flat, lambda part: f"{{ {' '.join(part[1].split())} }}", text)
    return text + "\n"


if __name__ == "__main__":
    path, place, about = sys.argv[1:]
    Path(place).write_text(evidence(read_report(path), about), "utf-8")
