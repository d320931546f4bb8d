"""The tables of a report, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel

from align.errors import abridged
from eval.measuring.intervals import FEWEST_CLUSTERS, Both, Measured
from eval.measuring.metrics import Percentiles
from eval.reporting.fields import REFERENCE, DraftReport, HeldOutCurve, Report
from eval.reporting.verdict import in_order, label, size

NOT_MEASURED = "not measured"
FEW_NOTE = f"Parentheses: lowest and highest of fewer than {FEWEST_CLUSTERS} prompts."
LOAD_NOTE = (
    "With / without the draft, at steady loads: the first and the last requests do not count. A "
    "request that failed is repeated, and timed from its first try. Intervals are over batches of "
    "requests; for one request at a time, the first lines have the speed-up over prompts, which "
    "differs. TTFT: time to the first token; ITL: between tokens. Tail: p99 of 100 requests or "
    "more, else p95. Outputs are not compared here, because bf16 sums depend on the batch."
)


@dataclass(frozen=True)
class Table:
    """One table; the first cell of a row is its label."""

    title: str
    header: list[str]
    rows: list[list[str]]
    note: str = ""


# --- Cells: (label, paths of fields in the report, function that formats the values) ---

Cells = list[tuple[str, str, Callable[..., str]]]


def shown(value: Measured | float) -> str:
    """A number with its interval, if there is one."""
    return format(value, ".2f")


def prompts_text(value: Measured) -> str:
    """The number of prompts behind a number: `160`, or `160 in 20 groups`."""
    groups = value.clusters if value.clusters != value.n else None
    return f"{value.n} in {groups} groups" if groups else str(value.n)


def _times(unit: str, percentile: str, tail: str, times: Both[Percentiles]) -> str:
    """A percentile of the times with and without the draft. percentile: "" for the tail's."""
    sides = times.speculative, times.baseline
    with_draft, alone = (getattr(side, percentile or tail) for side in sides)
    return f"{with_draft:.0f} / {alone:.0f}" if unit == "ms" else TWO(with_draft / 1e3, alone / 1e3)


TWO, TWO_MS = "{:.1f} / {:.1f}".format, "{:.1f} / {:.1f} ms".format
GAIN = "{:+.2f}".format
RESULT: Cells = [
    ("acceptance rate (alpha)", "alpha", shown),
    ("mean acceptance length (tau)", "tau", shown),
    ("tokens per target step", "counters.tokens_per_step", shown),
    ("draft length (gamma)", "gamma", str),
    ("accepted/drafted", "accepted_over_drafted", "{:.0%}".format),
    ("tokens/s", "tokens_per_s.speculative.mean", "{:.1f}".format),
    ("prompts timed", "speedup", prompts_text),
]
GAINS: Cells = [
    ("acceptance rate", "alpha", GAIN),
    ("mean acceptance length", "tau", GAIN),
]
DRAFTS: Cells = [
    ("path", "path", abridged),
    ("form", "form", str),
    ("vocabulary", "vocabulary.relation", str),
    ("vocabulary mapping", "vocabulary.strategy", str),
    ("draft length policy", "gamma_policy", str),
    ("output check", "lossless", str),
    ("sampled outputs, log-probability with - without", "sampled_check", str),
    ("memory", "memory.draft_bytes", size),
    ("overhead", "memory.overhead", "{:.1%}".format),
    ("KV bytes per token", "memory.kv_bytes_per_token.draft", "{:,}".format),
    ("speed-up by the wall clock", "speedup", shown),
    ("predicted speed-up, decode phase", "predicted_speedup", shown),
    ("decode efficiency", "decode_efficiency", shown),
    ("cost ratio (c)", "c", "{:.3f}".format),
    ("draft step", "costs.draft_step_ms", "{:.2f} ms".format),
    ("target step", "costs.target_step_ms", "{:.2f} ms".format),
    ("verify ratio", "verify_ratio", shown),
    ("break-even acceptance rate", "payoff.break_even_alpha", shown),
    ("speed-up of a perfect draft", "payoff.ceiling_speedup", shown),
    (
        "time to the first token with / without",
        "ttft_ms.speculative.mean ttft_ms.baseline.mean",
        TWO_MS,
    ),
    (
        "time between tokens p50 with / without",
        "itl_ms.speculative.p50 itl_ms.baseline.p50",
        TWO_MS,
    ),
    (
        "time between tokens p95 with / without",
        "itl_ms.speculative.p95 itl_ms.baseline.p95",
        TWO_MS,
    ),
    ("drafts by the server", "counters.num_drafts", "{:,}".format),
    ("mean acceptance length by the server", "counters.mean_acceptance_length", shown),
    ("accepted/drafted by the server", "counters.acceptance_rate", shown),
    (
        "acceptance by position by the server",
        "counters.per_position",
        lambda shares: ", ".join(f"{share.mean:.2f}" for share in shares),
    ),
]
CATEGORIES: Cells = [
    ("speed-up", "speedup", shown),
    ("acceptance rate", "alpha", shown),
    ("mean acceptance length", "tau", shown),
    ("prompts timed", "speedup", prompts_text),
]
# Short definitions; docs/report.md has long ones.
DEFINITIONS = {
    term: field.description
    for term, path, _ in [("speed-up", "speedup", shown), *RESULT, *DRAFTS]
    if (field := DraftReport.model_fields.get(path)) and field.description
} | {"intervals": Measured.model_fields["ci95"].description}
LOADS: Cells = [
    ("load", "load", lambda load: str(load).replace("requests at", "at")),
    ("requests", "requests", str),
    ("speed-up", "speedup", shown),
    ("completed/s", "requests_per_s.speculative requests_per_s.baseline", TWO),
    ("tokens/s", "tokens_per_s.speculative.mean tokens_per_s.baseline.mean", TWO),
    ("in flight", "request_rate in_flight.speculative in_flight.baseline", lambda _, *n: TWO(*n)),
    ("mean acceptance length", "mean_acceptance_length", shown),
    ("tail", "tail", str),
    *(
        (f"{title} {name}, {unit}", f"tail {field}", partial(_times, unit, at))
        for title, field, unit in (
            ("TTFT", "ttft_ms", "ms"),
            ("ITL", "itl_ms", "ms"),
            ("request", "e2e_ms", "s"),
        )
        for name, at in (("p50", "p50"), ("tail", ""))
    ),
    ("good requests/s", "goodput.requests_per_s.speculative goodput.requests_per_s.baseline", TWO),
]


def _at(part: BaseModel, path: str) -> Any:
    """The value at a path such as `memory.overhead`; None if a field on the path is null."""
    value: Any = part
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _cells(part: BaseModel, cells: Cells) -> list[str]:
    """The texts of the cells; a cell with a null field is empty."""
    texts = []
    for _, paths, form in cells:
        values = [_at(part, path) for path in paths.split()]
        texts.append("" if None in values else form(*values))
    return texts


def _noted(rows: list[list[str]], note: str) -> str:
    """The note, with FEW_NOTE if a row has a range in parentheses."""
    few = any(cell.endswith(")") and " to " in cell for row in rows for cell in row)
    return " ".join(filter(None, [note, FEW_NOTE if few else ""]))


def _by_draft(title: str, report: Report, cells: Cells, note: str = "") -> Table:
    """One column for each draft; a row without any value is left out."""
    names = in_order(report)
    columns = [_cells(report.drafts[name], cells) for name in names]
    rows = [
        [row_label, *(cell or NOT_MEASURED for cell in row)]
        for (row_label, _, _), *row in zip(cells, *columns, strict=True)
        if any(row)
    ]
    return Table(title, ["", *map(label, names)], rows, _noted(rows, note))


def _table(
    title: str, first: str, parts: Iterable[tuple[str, BaseModel]], cells: Cells, note: str = ""
) -> Table:
    """One row for each (label, part of the report); a column without any value is left out."""
    rows = [[text, *_cells(part, cells)] for text, part in parts]
    header = [first, *(column for column, _, _ in cells)]
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
    rows = [[row[i] for i in kept] for row in rows]
    return Table(title, [header[i] for i in kept], rows, _noted(rows, note))


# --- The tables ---


def _stated(report: Report) -> tuple[str, str]:
    """Label and field of the stated speed-up."""
    if report.engine == REFERENCE:
        return "predicted speed-up", "predicted_with_prefill"
    return "speed-up", "speedup"


def result_table(report: Report) -> Table:
    """The main table."""
    note = (
        f"Brackets: 95% intervals {_covered(report)}. "
        f"Target alone: {report.baseline.tokens_per_s:.1f} tokens/s"
    )
    if stock := report.baseline.over_stock_generate:
        note += f", {stock:.2f} of stock generate"
    return _by_draft("Results", report, [(*_stated(report), shown), *RESULT], f"{note}.")


def _covered(report: Report) -> str:
    """What the intervals of speeds cover."""
    if report.engine == REFERENCE:
        return "over prompts"
    if report.starts:
        (count, *_) = map(len, report.starts.seconds_per_token.values())
        return (
            f"over prompts and, for speeds, over {count} starts of each server, between which the "
            f"speed of a server differs by {report.starts.deviation:.1%} (standard deviation)"
        )
    return "over prompts; not covered: what another start of a server changes"


def gain_table(report: Report) -> Table:
    """The gain of each draft over another, on the same prompts."""
    gains = ((label(gain.draft), gain) for gain in report.gain)
    cells = [("over", "over", label), (*_stated(report), GAIN), *GAINS]
    return _table("Gains, paired by prompt", "draft", gains, cells)


def load_table(report: Report) -> Table:
    """The loads."""
    points = [
        (label(name), point) for name in in_order(report) for point in report.drafts[name].by_load
    ]
    limits = {
        f"{k} {v:g} ms" for _, p in points if p.goodput for k, v in p.goodput.limits_ms.items()
    }
    good = f" Good requests: within {', '.join(sorted(limits))}." if limits else ""
    return _table("By load", "draft", points, LOADS, LOAD_NOTE + good)


def _by_category(report: Report) -> Table:
    rows = (
        (f"{category}, {label(name)}", numbers)
        for name in in_order(report)
        for category, numbers in report.drafts[name].by_category.items()
        if len(report.drafts[name].by_category) > 1  # a single one repeats the main table
    )
    return _table("By category", "prompts, draft", rows, CATEGORIES)


def _held_out(curve: HeldOutCurve) -> Table:
    """The acceptance rate on held-out prompts during training."""
    rows = [
        [f"{p.tokens:,}", str(p.step), shown(p.alpha), "kept" if p.kept else ""]
        for p in curve.points
    ]
    header = ["different tokens", "step", "acceptance rate", ""]
    return Table("Held-out training prompts", header, rows)


def missing_lines(report: Report) -> Iterator[str]:
    """A line for each reason why fields of a draft were not measured, with these fields."""
    for name, draft in report.drafts.items():
        reasons: dict[str, list[str]] = {}
        for entry in draft.missing:
            reasons.setdefault(entry.reason, []).append(entry.field.replace("_", " "))
        for why, fields in reasons.items():
            yield f"{label(name)}, {', '.join(fields)}: {why}"


def details(report: Report) -> list[Table]:
    """The tables after the main ones; tables without rows are left out."""
    every = [
        _by_category(report),
        _by_draft("Drafts", report, DRAFTS),
        *([] if report.held_out is None else [_held_out(report.held_out)]),
    ]
    return [table for table in every if table.rows]
