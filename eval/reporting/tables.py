"""The tables of a report: one list that the terminal, report.md and report.html are made from.

A cell is plain text; paths and tokens in it stand in backquotes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from eval.reporting.report import (
    Atlas,
    Bucket,
    Divergence,
    DraftReport,
    Findings,
    Ledger,
    Measured,
    Memory,
    Report,
    TokenClass,
)

NOT_MEASURED = "not measured"
LEDGER_ROWS = 20


def _meaning(model: type[BaseModel], field: str) -> str:
    return str(model.model_fields[field].description)


# One line each, from the fields themselves; docs/metrics.md has the long form.
DEFINITIONS = {
    "alpha": _meaning(DraftReport, "alpha"),
    "tau": _meaning(DraftReport, "tau"),
    "accepted/drafted": _meaning(DraftReport, "accepted_over_drafted"),
    "speed-up": _meaning(DraftReport, "speedup"),
    "predicted speed-up": _meaning(DraftReport, "predicted_speedup"),
    "decode efficiency": _meaning(DraftReport, "decode_efficiency"),
    "c": _meaning(DraftReport, "c"),
    "verify ratio": _meaning(DraftReport, "verify_ratio"),
    "memory overhead": _meaning(Memory, "overhead"),
    "TTFT": _meaning(DraftReport, "ttft_ms"),
    "ITL": _meaning(DraftReport, "itl_ms"),
    "lost speed-up": _meaning(TokenClass, "lost_speedup"),
    "loop share": _meaning(DraftReport, "loop_share"),
    "gain": _meaning(Findings, "gain"),
    "intervals": _meaning(Measured, "ci95"),
}


@dataclass(frozen=True)
class Table:
    """One table. charted: report.html draws it instead."""

    title: str
    header: list[str]
    rows: list[list[Any]]
    note: str = ""
    charted: bool = False


# ---------------------------------------------------------------------------------------------
# Cells


def shown(value: Measured | float | None, form: str = ".2f") -> str:
    """A number, with its interval where it has one."""
    return NOT_MEASURED if value is None else format(value, form)


def size(count: int) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:,.1f} MiB"


def gamma_text(gamma: int | None, policy: str) -> str:
    """A draft length as a table shows it: `3`, or `≤ 6` where drafts may stop before.

    A server does not tell its own.
    """
    if gamma is None:
        return "not known"
    return f"{'' if policy.startswith('fixed') else '≤ '}{gamma}"


def quoted(token: str) -> str:
    """A token in backquotes, its line breaks and bars made harmless in a table."""
    text = token.replace("\n", "⏎").replace("`", "ˋ").replace("|", "¦").replace("\t", "⇥")
    return f"`{text}`" if text.strip() else f"`{text.replace(' ', '␣')}`"


def bounds(bucket: Bucket) -> str:
    """`9-16` for positions (both ends in), `0.5-1` or `≥ 4` for bits (upper end out)."""
    return f"≥ {bucket.low:g}" if bucket.high is None else f"{bucket.low:g}-{bucket.high:g}"


def _counted(ledger: Ledger) -> str:
    counts = [f"{ledger.identical} of {ledger.prompts}"]
    counts += [f"{ledger.tie_divergences} at a tie"] if ledger.tie_divergences else []
    counts += [f"{ledger.unexplained} UNEXPLAINED"] if ledger.unexplained else []
    return ", ".join(counts)


# ---------------------------------------------------------------------------------------------
# Lines beside the tables


def lossless_line(which: str, ledger: Ledger) -> str:
    """One ledger in a sentence."""
    return (
        f"Lossless, {which}: {ledger.identical} of {ledger.prompts} prompts identical, "
        f"{ledger.tie_divergences} part at a tie, {ledger.unexplained} unexplained"
    )


def baseline_line(report: Findings) -> str:
    """The target alone, and how that compares with stock `generate`."""
    stock = report.baseline.over_stock_generate
    compared = f", {stock:.2f} of stock generate" if stock else ""
    return f"Baseline: {report.baseline.tokens_per_s:.1f} tokens/s{compared}"


def missing_lines(report: Findings) -> list[str]:
    """One line for each reason why something could not be measured, with the fields it left out."""
    lines = []
    for name, draft in report.drafts.items():
        reasons: dict[str, list[str]] = {}
        for entry in draft.missing:
            reasons.setdefault(entry.reason, []).append(entry.field)
        lines += [f"{name}, {', '.join(fields)}: {why}" for why, fields in reasons.items()]
    return lines


# ---------------------------------------------------------------------------------------------
# Tables with one column a draft: label, form of a cell, the fields it shows

Rows = list[tuple[str, Callable[..., str], str]]

RESULT: Rows = [
    ("alpha", shown, "alpha"),
    ("tau", shown, "tau"),
    ("gamma", gamma_text, "gamma gamma_policy"),
    ("accepted/drafted", "{:.0%}".format, "accepted_over_drafted"),
    ("speed-up", shown, "speedup"),
    ("predicted speed-up", shown, "predicted_speedup"),
    ("decode efficiency", shown, "decode_efficiency"),
    ("tokens/s, no draft", "{:.1f}".format, "tokens_per_s.baseline.mean"),
    ("tokens/s, drafted", "{:.1f}".format, "tokens_per_s.speculative.mean"),
    ("c (draft/target)", "{:.3f}".format, "c"),
    ("memory overhead", "{:.1%}".format, "memory.overhead"),
    ("n of alpha", str, "alpha.n"),
    ("n of speed-up", str, "speedup.n"),
]
COUNTERS: Rows = [
    ("drafts", str, "counters.num_drafts"),
    ("draft tokens", str, "counters.num_draft_tokens"),
    ("accepted tokens", str, "counters.num_accepted_tokens"),
    ("mean acceptance length", shown, "counters.mean_acceptance_length"),
    ("acceptance rate", "{:.0%}".format, "counters.acceptance_rate"),
    (
        "acceptance per position",
        lambda shares: ", ".join(f"{share:.2f}" for share in shares),
        "counters.acceptance_per_position",
    ),
]
WATERFALL: Rows = [
    ("every token accepted", shown, "waterfall.all_accepted"),
    ("tau", shown, "waterfall.tau"),
    ("after draft steps", shown, "waterfall.after_draft_steps"),
    ("after verify width", shown, "waterfall.predicted"),
    ("decode phase", shown, "waterfall.decode"),
    ("wall", shown, "waterfall.wall"),
]
COSTS: Rows = [
    ("draft step", "{:.2f} ms".format, "costs.draft_step_ms"),
    ("target step", "{:.2f} ms".format, "costs.target_step_ms"),
    (
        "target on gamma + 1",
        lambda step, ratio: f"{step * ratio:.2f} ms",
        "costs.target_step_ms verify_ratio",
    ),
    ("verify ratio", shown, "verify_ratio"),
    (
        "TTFT with / without",
        "{:.1f} / {:.1f} ms".format,
        "ttft_ms.speculative.mean ttft_ms.baseline.mean",
    ),
    (
        "ITL p50 with / without",
        "{:.1f} / {:.1f} ms".format,
        "itl_ms.speculative.p50 itl_ms.baseline.p50",
    ),
    (
        "ITL p95 with / without",
        "{:.1f} / {:.1f} ms".format,
        "itl_ms.speculative.p95 itl_ms.baseline.p95",
    ),
]
DRAFTS: Rows = [
    ("path", "`{}`".format, "path"),
    ("form measured", str, "form"),
    ("vocabulary", str, "vocabulary.relation"),
    ("strategy", str, "vocabulary.strategy"),
    ("draft length", str, "gamma_policy"),
    ("draft", size, "memory.draft_bytes"),
    ("full form", size, "memory.full_form_bytes"),
    ("target", size, "memory.target_bytes"),
    ("overhead", "{:.1%}".format, "memory.overhead"),
    (
        "KV bytes a token: draft, target",
        "{:,}, {:,}".format,
        "memory.kv_bytes_per_token.draft memory.kv_bytes_per_token.target",
    ),
    ("loop share", "{:.1%}".format, "loop_share.speculative.mean"),
]


def _cell(draft: DraftReport, form: Callable[..., str], paths: str) -> str:
    values = []
    for path in paths.split():
        value: Any = draft
        for name in path.split("."):
            value = value and getattr(value, name)
        values.append(value)
    # a server's gamma is not known, which is not the same
    return NOT_MEASURED if None in values and form is not gamma_text else form(*values)


def _by_draft(
    title: str, report: Findings, rows: Rows, note: str = "", charted: bool = False
) -> Table:
    """One column a draft; a row that nothing was measured for is left out."""
    cells = [
        [label, *(_cell(draft, form, paths) for draft in report.drafts.values())]
        for label, form, paths in rows
    ]
    kept = [row for row in cells if set(row[1:]) != {NOT_MEASURED}]
    return Table(title, ["", *report.drafts], kept, note, charted)


def result_table(report: Findings) -> Table:
    """The main table; the gain of the second draft beside it where exactly two are compared."""
    note = f"Brackets hold 95% intervals over prompts. {baseline_line(report)}."
    table = _by_draft("Result", report, RESULT, note)
    if len(report.drafts) != 2:
        return table
    (gain,) = report.gain
    gained = {"alpha": gain.alpha, "tau": gain.tau, "speed-up": gain.speedup}
    rows = [
        [*row, format(value, "+.2f") if (value := gained.get(row[0])) else ""] for row in table.rows
    ]
    return Table(table.title, [*table.header, "gain"], rows, note)


# ---------------------------------------------------------------------------------------------
# All tables


def tables(report: Report) -> list[Table]:
    """In the order of report.md; a table that the report holds nothing for is left out."""
    drafts = report.drafts.items()
    found = [
        result_table(report),
        _table(
            "Gain",
            "draft|over|alpha|tau|speed-up",
            (
                [
                    one.draft,
                    one.over,
                    *(shown(x, "+.2f") for x in (one.alpha, one.tau, one.speedup)),
                ]
                for one in report.gain
                if len(drafts) > 2
            ),
        ),
        _by_draft(
            "Counters of the server",
            report,
            COUNTERS,
            "By the server's own definitions (docs/metrics.md).",
        ),
        _by_draft("Where the speed-up goes", report, WATERFALL, charted=True),
        _table(
            "Speed-up by gamma",
            "draft|gamma|from alpha|replayed|at alpha 1|measured speed-up|measured tau",
            (row for name, draft in drafts for row in _curve(name, draft)),
            charted=True,
        ),
        _table("Setting", "|", _setting(report)),
        _table(
            "Acceptance by position",
            "draft|position|drafts|marginal|conditional",
            (
                [name, one.position, one.drafts, shown(one.marginal), _or_empty(one.conditional)]
                for name, draft in drafts
                for one in draft.per_position or []
            ),
            charted=True,
        ),
        *(
            table
            for name, draft in drafts
            if draft.atlas
            for table in _atlas_tables(name, draft.atlas)
        ),
        _table(
            "Verification rules and temperatures",
            "draft|temp.|rejection sampling|greedy match|target's p|prompts",
            (
                [
                    name,
                    f"{one.temperature:g}",
                    *(shown(x) for x in (one.exact, one.greedy_match, one.target_probability)),
                    one.exact.n,
                ]
                for name, draft in drafts
                if draft.atlas
                for one in draft.atlas.verification_rules
            ),
            "Mean acceptance of one drafted token, from one teacher-forced log. Rejection "
            "sampling: sum min(p, q). Greedy match: the draft proposes argmax q, accepted where "
            "the target samples it: p(argmax q). Target's p: x drawn from q, accepted with "
            "probability p(x): sum q p. All three leave the output as the target's.",
        ),
        _table(
            "Decoded at other temperatures",
            "draft|temperature|tau|speed-up|prompts",
            (
                [name, f"{one.temperature:g}", shown(one.tau), shown(one.speedup), one.speedup.n]
                for name, draft in drafts
                for one in draft.by_temperature
            ),
        ),
        _table(
            "By batch size",
            "draft|batch size|tokens/s, no draft|tokens/s, drafted|speed-up|tau|batches|"
            "texts as without a draft",
            (
                [
                    name,
                    one.batch_size,
                    shown(one.tokens_per_s.baseline, ".1f"),
                    shown(one.tokens_per_s.speculative, ".1f"),
                    shown(one.speedup),
                    shown(one.tau),
                    one.speedup.n,
                    _counted(one.lossless) if one.lossless else NOT_MEASURED,
                ]
                for name, draft in drafts
                for one in draft.by_batch_size
            ),
            "The rows of a batch start together, and one that ends leaves. Without a draft: the "
            "same batches. Tokens/s of all rows together; intervals over batches. In bf16 two "
            "forwards of other shapes differ in the last bits, so texts may part at near-ties, "
            "each checked in the tie ledger; in fp32 they are the same.",
        ),
        _table(
            "Other prompts",
            "draft|alpha here|alpha on other prompts|other prompts|n",
            (
                [name, shown(draft.alpha), shown(other.alpha), other.source, other.alpha.n]
                for name, draft in drafts
                if (other := draft.other_prompts)
            ),
        ),
        _by_draft("Cost and latency", report, COSTS),
        ledger_table(report),
        _by_draft("Drafts", report, DRAFTS),
        _table(
            "By category",
            "category|draft|alpha|tau|speed-up|n",
            (
                [category, name, *map(_or_empty, numbers), next(x.n for x in numbers if x)]
                for name, draft in drafts
                for category, one in draft.by_category.items()
                if any(numbers := (one.alpha, one.tau, one.speedup))
            ),
        ),
    ]
    return [table for table in found if table.rows]


def _table(
    title: str, header: str, rows: Iterable[list[Any]], note: str = "", charted: bool = False
) -> Table:
    return Table(title, header.split("|"), list(rows), note, charted)


def _or_empty(value: Measured | None) -> str:
    return "" if value is None else shown(value)


def _curve(name: str, draft: DraftReport) -> Iterable[list[Any]]:
    """Expected speed-up by draft length, and what a sweep measured."""
    swept = {point.gamma: point for point in draft.gamma_sweep}
    for point in draft.gamma_curve or []:
        measured = swept.get(point.gamma)
        yield [
            name,
            point.gamma,
            shown(point.predicted),
            "" if point.replayed is None else shown(point.replayed),
            shown(point.ceiling),
            *(map(shown, (measured.speedup, measured.tau)) if measured else ("", "")),
        ]


def _setting(report: Findings) -> list[list[Any]]:
    """What was run, on what, with which prompts."""
    prompts = report.prompts
    rows: list[tuple[str, Any]] = [
        ("target", report.target),
        ("engine, device, dtype", f"{report.engine}, {report.device}, {report.dtype}"),
        ("batch size", 1),
        *((key.replace("_", " "), value) for key, value in report.decoding),
        ("prompts", f"{prompts.source}, {prompts.n}"),
        ("prompts sha256", prompts.sha256),
        ("overlap with training", prompts.overlap_with_training),
        ("bits per prompt token", prompts.bits_per_token),
        ("bits of a random token", prompts.random_bits),
    ]
    return [[label, "none" if value is None else value] for label, value in rows]


def _atlas_tables(name: str, atlas: Atlas) -> list[Table]:
    """The rejection atlas of one draft, the costliest class first, and alpha by place."""

    def confused(one: TokenClass) -> str:
        return ", ".join(
            f"{quoted(e.target)} drafted as {quoted(e.draft)} ×{e.count}" for e in one.examples
        )

    classes = (
        [c.name, c.positions, shown(c.alpha), c.rejected, f"+{c.lost_speedup:.2f}", confused(c)]
        for c in atlas.classes
    )
    header = "class|tokens|alpha|rejected|lost speed-up|most often"
    return [
        _table(f"Rejection atlas, {name}", header, classes, charted=True),
        *(
            _table(
                f"alpha by {unit}, {name}",
                f"{unit}|tokens|alpha",
                ([bounds(b), b.positions, shown(b.alpha)] for b in buckets),
                charted=True,
            )
            for unit, buckets in (
                ("output position", atlas.by_output_position),
                ("target's entropy in bits", atlas.by_entropy),
            )
        ),
    ]


def ledger_table(report: Findings) -> Table:
    """Greedy texts that parted from the target's own: the worst first, LEDGER_ROWS at most."""
    entries = [(which, one) for which, ledger in report.ledgers() for one in ledger.divergences]

    def doubt(row: tuple[str, Divergence]) -> tuple[bool, float]:
        """Unexplained texts first, then those whose gap is the largest part of the error."""
        _, one = row
        return not one.tie, one.gap / one.error if one.gap and one.error else 0.0

    note = (
        "Greedy texts with and without the draft, token by token. A divergence is a tie where the "
        "two logits lie no further apart than twice what two forwards of the target differ by, and "
        "fp32 agrees."
    )
    if len(entries) > LEDGER_ROWS:
        note += f" The {LEDGER_ROWS} least clear of {len(entries)} are shown; report.json has all."
    return _table(
        "Tie ledger",
        "draft|prompt|token|without a draft|with it|gap of logits|error of forwards|verdict",
        (
            [
                which,
                one.prompt,
                one.position,
                quoted(one.target),
                quoted(one.drafted),
                "" if one.gap is None else f"{one.gap:.4f}",
                "" if one.error is None else f"{one.error:.4f}",
                "tie" if one.tie else "UNEXPLAINED",
            ]
            for which, one in sorted(entries, key=doubt, reverse=True)[:LEDGER_ROWS]
        ),
        note,
    )
