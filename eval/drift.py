"""Does what you serve still accept the draft as its report says?

    python -m eval.drift report.json --metrics http://localhost:8000
    python -m eval.drift report.json --metrics http://localhost:8000 --since last.prom
    python -m eval.drift report.json --metrics answers.jsonl

Counters are vLLM's: a server's /metrics or a file of it, or its answers with their own counts, one
a line (docs/serving.md). Prompts that were not served are measured by eval.run. Exit status: 0 as
measured; 1 moved away; 2 for input that cannot be used, and where the two are not told apart yet.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import math

from align.files import atomic_file
from eval.engines.counters import growth, read_requests, read_series, total
from eval.engines.server import Server
from eval.measuring.intervals import FEWEST_CLUSTERS
from eval.reporting.fields import DraftReport, Report, ReportError, read_report
from eval.reporting.traffic import (
    MARGIN,
    Acceptance,
    Difference,
    NotComparable,
    answered_acceptance,
    compare,
    counted_acceptance,
    drafts_lacking,
    measured_acceptance,
)

REMEDY = (
    "Draft and report no longer fit what is served: measure on recent prompts (python -m eval.run "
    "--run DIR --prompts RECENT --output_dir NEW), then train on their like."
)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.drift", description=__doc__.split("\n")[0]
    )
    parser.add_argument("report", type=Path, metavar="REPORT", help="a report.json")
    parser.add_argument(
        "--metrics",
        metavar="URL|FILE",
        help="a vLLM server, what its /metrics said, or its answers with their counts, one a line",
    )
    parser.add_argument(
        "--since",
        type=Path,
        metavar="FILE",
        help="what /metrics said before: only what came since counts. With a URL the file is kept "
        "up to date, and made where there is none",
    )
    parser.add_argument("--draft", help="of the report; default: tuned, or its last")
    args = parser.parse_args(argv)
    if args.metrics is None:
        parser.error("--metrics is required: a vLLM server, or a file of what it counted")
    return args


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read as text ({error}); correct the path.") from None


def _traffic(source: str, since: Path | None, report: Acceptance) -> tuple[Acceptance, str]:
    """What a server or a file has counted, and a server's counters as they stand."""
    is_server = source.startswith(("http://", "https://"))
    if is_server:
        text = Server(source.rstrip("/").removesuffix("/metrics")).text("/metrics")
    else:
        text = _read(Path(source))
        if text.lstrip().startswith("{"):
            if since is not None:
                raise NotComparable("--since is for counters; answers count by themselves.")
            return answered_acceptance(read_requests(text), report), ""
    series = read_series(text)
    if total(series) is None:
        raise NotComparable(
            f"{source} has no counters vllm:spec_decode_*: the server has no draft, "
            "--disable-log-stats is set, or it is no vLLM; start vLLM with --speculative-config "
            "and without --disable-log-stats."
        )
    if since is not None and (since.exists() or not is_server):
        series = growth(read_series(_read(since)), series)
    counts = total(series)
    assert counts is not None
    lines = (f"{line}\n" for line in text.splitlines() if "spec_decode" in line)
    return counted_acceptance(counts, report), "".join(lines) if is_server else ""


def _verdict(difference: Difference) -> str:
    if difference.moved:
        return "MOVED"
    return "as measured" if difference.as_measured else "not told apart"


def _line(difference: Difference) -> str:
    parts = (
        f"{difference.name:24} report {difference.report.mean:.3f}",
        f"traffic {difference.traffic.mean:.3f}",
        f"{difference.by:+.3f} ± {difference.chance(0.05):.3f}",
        _verdict(difference),
    )
    return "   ".join(parts)


def check_traffic(draft: DraftReport, report: Report, source: str, since: Path | None) -> int:
    """Compare, print, and return the exit status. Raises ValueError for input of no use."""
    promised = measured_acceptance(draft, report.engine)
    traffic, counters = _traffic(source, since, promised)
    differences = compare(promised, traffic)
    lacking = drafts_lacking(differences)
    # where more drafts may tell they stay in the next reading: where little is served, hours add up
    if counters and since is not None and lacking in (0, math.inf):
        with atomic_file(since) as file:
            file.write(counters)
    for difference in differences:
        print(_line(difference))
    # bare counters know no categories
    apart = promised.categories.keys() ^ traffic.categories.keys() if traffic.categories else ()
    for name in sorted(apart):
        where = "report" if name in traffic.categories else "traffic"
        print(f"category {name}: not compared, fewer than {FEWEST_CLUSTERS} prompts in the {where}")
    drafts = f"{promised.positions[0].drafts:,.0f} and {traffic.positions[0].drafts:,.0f} drafts"
    if moved := [difference for difference in differences if difference.moved]:
        way = "less" if moved[0].by < 0 else "more"
        print(
            f"\nmoved away ({drafts}): {way} is accepted than measured at "
            f"{', '.join(difference.name for difference in moved)}. {REMEDY}"
        )
        return 1
    if lacking:
        remedy = (
            "more drafts will not tell, a report of more prompts may (eval.run --speed_prompts)"
            if lacking == math.inf
            else f"too few drafts to tell, about {lacking:,.0f} more are needed"
        )
        raise NotComparable(
            f"not told apart ({drafts}): a change of {MARGIN:g} of acceptance is neither shown nor "
            f"ruled out; {remedy}."
        )
    print(f"\nas measured ({drafts}): no position differs by {MARGIN:g} or more")
    return 0


def main(argv: list[str]) -> int:
    try:
        args = parse(argv)
        report = read_report(args.report)
        name = args.draft or report.tuned[0]
        if name not in report.drafts:
            raise ReportError(
                f"no draft {name!r} in this report; it has {', '.join(report.drafts)}"
            )
        return check_traffic(report.drafts[name], report, args.metrics, args.since)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
