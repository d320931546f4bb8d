"""Shortens a report to the figures that the docs cite, for docs/evidence/.

    python tests/benchmarks/evidence.py REPORT.json docs/evidence/NAME.json "NOTE"

NOTE says what the report lacks. Left out: single prompts, rejections, the verdict, what was not
measured (null), and of absolute paths all but the last two names. Numbers have six digits.
"""

import json
import re
import sys
from pathlib import Path

LEFT_OUT = {"per_prompt", "divergences", "atlas", "by_category", "by_copy_share", "by_context",
            "held_out", "headline", "missing", "clusters", "freedom", "over_starts",
            "range"}  # fmt: skip


def shortened(value):
    """A value of report.json without what is left out."""
    match value:
        case dict():
            kept = {key: shortened(each) for key, each in value.items() if key not in LEFT_OUT}
            return {key: each for key, each in kept.items() if each not in (None, {}, [])}
        case list():
            return [shortened(each) for each in value]
        case float():
            return float(f"{value:.6g}")
        case str():
            return re.sub(r"(?<![^=])/[\w./-]*/(?=[\w.-]+/[\w.-]+$)", "", value)
    return value


if __name__ == "__main__":
    report, evidence, note = sys.argv[1:]
    figures = {"note": note} | shortened(json.loads(Path(report).read_text("utf-8")))
    text = json.dumps(figures, indent=1)
    text = re.sub(r"\[\s+([^][{}\"]+?)\s+\]", lambda numbers: " ".join(numbers[0].split()), text)
    Path(evidence).write_text(text + "\n", "utf-8")
