"""Does what you serve still accept the draft as its report says?

    python -m eval.drift report.json --metrics http://localhost:8000
    python -m eval.drift report.json --metrics http://localhost:8000 --since last.prom

The counters come from /metrics of a vLLM server, or from a file with this page (docs/serving.md).
Prompts that are not served can be measured with eval.run. Exit status: 0 as measured; 1 moved away;
2 for a bad call or input; 3 inconclusive; 4 if the server does not answer or has no counters.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import math

from align.errors import UserError
from align.files import atomic_file
from eval.engines.counters import growth, read_series, total
from eval.engines.server import Server, ServerError
from eval.measuring.runs import Speculation
from eval.reporting.fields import DraftReport, Report, ReportError, read_report
from eval.reporting.traffic import (
    MARGIN,
    Difference,
    compare,
    counted_acceptance,
    drafts_lacking,
    measured_acceptance,
)

AS_MEASURED, MOVED, BAD_INPUT, INCONCLUSIVE, NO_COUNTERS = range(5)  # exit statuses
REMEDY = (
    "The draft no longer fits the traffic: measure on recent prompts (python -m eval.run --run DIR "
    "--prompts RECENT --output_dir NEW), then train on such prompts."
)


class NoCounters(UserError):
    """A server or a page without counters of speculation."""


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m eval.drift", description=__doc__.split("\n")[0]
    )
    parser.add_argument("report", type=Path, metavar="REPORT", help="a report.json")
    parser.add_argument(
        "--metrics",
        required=True,
        metavar="URL|FILE",
        help="address of a vLLM server, or a file with its page /metrics",
    )
    parser.add_argument(
        "--since",
        type=Path,
        metavar="FILE",
        help="an earlier page /metrics: only later counts are compared. With a URL the file is "
        "updated, or created",
    )
    parser.add_argument("--draft", help="its name in the report; default: tuned, else the last")
    return parser.parse_args(argv)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read as text ({error}); correct the path.") from None


def _traffic(source: str, since: Path | None) -> tuple[Speculation, str]:
    """A server's or a file's counts since the page `since`, and a server's lines for that page."""
    is_server = source.startswith(("http://", "https://"))
    if is_server:
        text = Server(source.rstrip("/").removesuffix("/metrics")).text("/metrics")
    else:
        text = _read(Path(source))
    series = read_series(text)
    if total(series) is None:
        raise NoCounters(
            f"{source} has no counters vllm:spec_decode_*, because it has no draft, "
            "--disable-log-stats is set, or it is not vLLM. Start vLLM with --speculative-config "
            "and without --disable-log-stats."
        )
    if since is not None and (since.exists() or not is_server):
        earlier = read_series(_read(since))
        if total(earlier) is None:
            raise ReportError(
                f"{since} is damaged, because it lacks counters vllm:spec_decode_*. Delete the "
                "file; the next call then counts from the server's start."
            )
        series = growth(earlier, series)
    counts = total(series)
    assert counts is not None
    lines = (f"{line}\n" for line in text.split("\n") if "spec_decode" in line)
    return counts, "".join(lines) if is_server else ""


def _line(difference: Difference) -> str:
    verdict = "as measured" if difference.as_measured else "inconclusive"
    parts = (
        f"position {difference.position:<3} report {difference.report.mean:.3f}",
        f"traffic {difference.traffic.mean:.3f}",
        f"{difference.mean:+.3f} ± {difference.chance(0.05):.3f}",
        "MOVED" if difference.moved else verdict,
    )
    return "   ".join(parts)


def check_traffic(draft: DraftReport, report: Report, source: str, since: Path | None) -> int:
    """Compare, print, and return the exit status. Raises UserError for input that is unusable."""
    promised = measured_acceptance(draft, report.engine)
    counts, page = _traffic(source, since)
    if not counts.drafts:
        print("inconclusive: the server has drafted nothing yet")
        return INCONCLUSIVE
    differences = compare(promised, counted_acceptance(counts, promised))
    lacking = drafts_lacking(differences)
    # if more drafts may decide, the file stays, so that the next call counts these drafts again
    if page and since is not None and lacking in (0, math.inf):
        with atomic_file(since) as file:
            file.write(page)
    for difference in differences:
        print(_line(difference))
    drafts = f"{promised[0].drafts:,.0f} and {counts.drafts:,.0f} drafts"
    if moved := [difference for difference in differences if difference.moved]:
        direction = "less" if moved[0].mean < 0 else "more"
        positions = ", ".join(str(difference.position) for difference in moved)
        print(
            f"\nmoved away ({drafts}): {direction} is accepted than measured at position "
            f"{positions}. {REMEDY}"
        )
        return MOVED
    if lacking:
        remedy = (
            "more drafts cannot decide this, but a report of more prompts may (--speed_prompts)"
            if lacking == math.inf
            else f"about {lacking:,.0f} more drafts are needed"
        )
        print(
            f"\ninconclusive ({drafts}): a change of {MARGIN:g} in acceptance is neither shown nor "
            f"excluded; {remedy}."
        )
        return INCONCLUSIVE
    print(f"\nas measured ({drafts}): no position differs by {MARGIN:g} or more")
    return AS_MEASURED


def main(argv: list[str]) -> int:
    try:
        args = parse(argv)
        report = read_report(args.report)
        name = args.draft or report.tuned[0]
        if name not in report.drafts:
            raise ReportError(
                f"the report has no draft {name!r}; name one of {', '.join(report.drafts)}"
            )
        return check_traffic(report.drafts[name], report, args.metrics, args.since)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return NO_COUNTERS if isinstance(error, ServerError | NoCounters) else BAD_INPUT


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
