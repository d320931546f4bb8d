"""Does what you serve still accept the draft as its report says?

    python -m eval.drift DIR --prometheus http://prometheus:9090 --since last.txt
    python -m eval.drift DIR --metrics http://localhost:8000 --since last.prom

The counters of vLLM come from Prometheus (all replicas together), from /metrics of one server, or
from a file with this page (docs/serving.md). Exit status: 0 as measured; 1 moved away; 2 for a bad
call or input; 3 inconclusive; 4 if the server does not answer or has no counters.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from time import time
from typing import Any, Literal

from align import command_line
from align.command_line import Count, NotNegative, Options, option
from align.errors import UserError
from align.files import atomic_file
from eval.engines import counters
from eval.engines.server import Server, ServerError
from eval.measuring.runs import Speculation
from eval.monitoring import write_monitoring
from eval.reporting.fields import ReportError, read_report
from eval.reporting.traffic import (
    MARGIN,
    REMEDY,
    Estimate,
    compare,
    counted_acceptance,
    drafts_lacking,
    measured_acceptance,
)
from eval.reporting.verdict import measured_in

AS_MEASURED, MOVED, BAD_INPUT, INCONCLUSIVE, NO_COUNTERS = range(5)  # exit statuses
SampleMethod = Literal["greedy", "probabilistic"]
VERDICTS = ("as measured", "moved away", "bad input", "inconclusive", "no counters")
READINGS = 6  # in 31 of 32 calls they show that two replicas answer in random order


@dataclass(frozen=True)
class DriftOptions(Options):
    report: Path = option("a report.json, or an output folder", positional=True, metavar="REPORT")
    metrics: str = option("URL of one vLLM, or a file with its page /metrics", "", one_of="counts")
    prometheus: str = option("URL of a Prometheus that reads all replicas", "")
    monitoring: Path | None = option("folder for Prometheus' alerts and Grafana's dashboard", None)
    selector: str = option("labels of servers in Prometheus, as '{job=\"vllm\"}'", "", group="more")
    prefix: str | None = option(
        "names of counters start so; default: as found, or vllm:", None, choices=counters.PREFIXES
    )
    hours: Count = option("window in Prometheus", 1)
    since: Path | None = option("file of the earlier reading, which this call updates", None)
    draft: str | None = option("name in the report; default: tuned, else the last", None)
    temperature: NotNegative | None = option("the traffic's; default: the report's", None)
    draft_sample_method: SampleMethod | None = option("the vLLM's; default: the report's", None)
    json: bool = option("print one JSON object", False)


def parse(argv: Sequence[str]) -> DriftOptions:
    return command_line.parse(DriftOptions, "python -m eval.drift", __doc__, argv)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read as text ({error}); correct the path.") from None


def _from_prometheus(args: DriftOptions) -> tuple[Speculation | None, str, str]:
    """The counts; the Unix times of this reading and of the earlier one, to be kept."""
    until = round(time())
    since = until - 3600 * args.hours
    if args.since and args.since.exists():
        if not (earlier := _read(args.since).strip()).isdecimal():
            raise ReportError(f"{args.since} holds no time; delete the file to start anew.")
        since = int(earlier)
    window = f"{max(until - since, 1)}s"
    prefixes = [args.prefix] if args.prefix else counters.PREFIXES
    series = counters.read_prometheus(args.prometheus, window, args.selector, until, prefixes)
    return counters.total(series), f"{until}\n", f"{since}\n"


def _from_metrics(args: DriftOptions) -> tuple[Speculation | None, str, str]:
    """The counts; the lines of this reading, to be kept, and "". Of a file nothing is kept."""
    if is_server := args.metrics.startswith(("http://", "https://")):
        address = args.metrics.rstrip("/").removesuffix("/metrics")
        pages = [Server(address).text("/metrics") for _ in range(READINGS)]  # new connections
    else:
        pages = [_read(Path(args.metrics))]
    readings = [counters.read_series(page) for page in pages]
    if not all(map(counters.continues, readings, readings[1:])):
        raise counters.CountersError(counters.SEVERAL)
    series = readings[-1]
    if counters.total(series) and args.since and is_server and counters.STARTED not in series:
        raise counters.CountersError(
            f"{address} does not name its process (no process_start_time_seconds, as with data "
            "parallelism), so nothing shows that the earlier reading is of the same one. Give "
            "--prometheus, or leave out --since."
        )
    if counters.total(series) and args.since and (args.since.exists() or not is_server):
        earlier = counters.read_series(_read(args.since))
        if counters.total(earlier) is None:
            raise ReportError(f"{args.since} holds no counters; delete the file to start anew.")
        series = counters.growth(earlier, series)
    lines = (f"{line[0]}\n" for line in counters.LINE.finditer(pages[-1]))
    return counters.total(series), "".join(lines) if is_server else "", ""


def check_traffic(promised: Sequence[Estimate], args: DriftOptions) -> dict[str, Any]:
    """The result as `--json` prints it. Raises UserError for input that is unusable."""
    counts, reading, earlier = (_from_prometheus if args.prometheus else _from_metrics)(args)
    if counts is None:
        raise ServerError(
            f"{args.prometheus or args.metrics} has no counters vllm:spec_decode_* now: there is "
            "no draft, --disable-log-stats is set, it is not vLLM, or --selector matches nothing. "
            "Start vLLM with --speculative-config and without --disable-log-stats."
        )
    differences = compare(promised, counted_acceptance(counts, promised)) if counts.drafts else []
    lacking = drafts_lacking(differences) if differences else None
    # if more drafts may decide, the next call counts these drafts again
    kept = reading if lacking in (0, math.inf) else earlier
    if args.since and kept:
        with atomic_file(args.since) as file:
            file.write(kept)
    moved = [difference for difference in differences if difference.moved]
    unclear = f"a change of {MARGIN:g} in acceptance is neither shown nor excluded"
    if any(abs(difference.mean) > difference.chance(0.05) for difference in differences):
        unclear = "acceptance differs at the 95% level, but an alarm each hour needs more certainty"
    status = INCONCLUSIVE
    if moved:
        status = MOVED
        direction = "less" if moved[0].mean < 0 else "more"
        positions = ", ".join(str(difference.position) for difference in moved)
        reason = f"{direction} is accepted than measured at position {positions}. {REMEDY}"
    elif lacking is None:
        reason = "nothing was drafted."
    elif lacking == math.inf:
        report = "of 100 prompts"
        if any(difference.report.behind_end >= MARGIN for difference in differences):
            report = "of --engine vllm, which counts behind the end of short outputs as this does,"
        reason = f"{unclear}; more drafts cannot decide this, but a report {report} may."
    elif lacking:
        reason = f"{unclear}; about {lacking:,.0f} more drafts are needed."
    else:
        status = AS_MEASURED
        reason = f"no position differs by {MARGIN:g} or more."
    if 0 < len(differences) < len(promised):
        reason += (
            f" Only position 1 is compared, because {counts.drafted / counts.drafts:.2f} tokens "
            f"per draft were drafted instead of {len(promised)} (a high load, or a grammar)."
        )
    return {
        "verdict": VERDICTS[status],
        "exit_status": status,
        "reason": reason,
        "drafts": {"report": promised[0].drafts, "traffic": counts.drafts},
        "more_drafts_needed": None if lacking == math.inf else lacking,
        "positions": [
            {
                "position": difference.position,
                "report": difference.report.mean,
                "report_highest": difference.highest,
                "traffic": difference.traffic.mean,
                "difference": difference.mean,
                "half_width95": difference.chance(0.05),
                "verdict": difference.verdict,
            }
            for difference in differences
        ],
    }


def _as_text(result: dict[str, Any]) -> str:
    """The result for a reader."""
    lines = ""
    for place in result["positions"]:
        to = " to {report_highest:.3f}" if place["report_highest"] > place["report"] else ""
        lines += (
            f"position {{position:<3}} report {{report:.3f}}{to}   traffic {{traffic:.3f}}   "
            "{difference:+.3f} ± {half_width95:.3f}   {verdict}\n"
        ).format(**place)
    drafts = "{report:,.0f} and {traffic:,.0f} drafts".format(**result["drafts"])
    return (
        f"{lines}\n{result['verdict']} ({drafts}): {result['reason']}\n"
        f"The traffic is assumed to be as in the report: {result['assumed']}."
    )


def main(argv: list[str]) -> int:
    args = parse(argv)
    try:
        report = read_report(args.report)
        name = args.draft or report.tuned[0]
        if name not in report.drafts:
            raise ReportError(
                f"the report has no draft {name!r}; name one of {', '.join(report.drafts)}"
            )
        asked = args.temperature, args.draft_sample_method
        promised = measured_acceptance(report, report.drafts[name], *asked)
        if args.monitoring:
            title = f"{name} on {report.target_named}"
            written = args.monitoring, title, promised, args.selector, args.hours
            write_monitoring(*written, args.prefix or counters.PREFIXES[0])
            return AS_MEASURED
        result = check_traffic(promised, args)
        result["assumed"] = f"{measured_in(report)}, temperature {report.decoding.temperature:g}"
        if report.decoding.temperature:
            method = report.decoding.draft_sample_method or "as in its servers"
            result["assumed"] += f", draft_sample_method {method}"
    except (UserError, OSError) as error:
        missing = isinstance(error, ServerError) and error.status != 400  # 400: a bad selector
        status = NO_COUNTERS if missing else BAD_INPUT
        result = {"verdict": VERDICTS[status], "exit_status": status, "reason": str(error)}
        print(f"error: {error}", file=sys.stderr)
    if args.json:
        print(json.dumps(result))
    elif "positions" in result:
        print(_as_text(result))
    return int(result["exit_status"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
