"""The tables of a report: one list that the terminal, report.md and report.html are made from.

A cell is plain text; paths and tokens in it stand in backquotes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel

from eval.measuring.answer_quality import Answers
from eval.measuring.atlas import Bucket, Confusion, TokenClass
from eval.measuring.cost import expected_speedup
from eval.measuring.intervals import FEWEST_CLUSTERS, Measured
from eval.measuring.losslessness import Divergence, Ledger
from eval.measuring.metrics import Costs, Memory
from eval.reporting.report import DraftReport, HeldOutCurve, Report

NOT_MEASURED = "not measured"
LEDGER_ROWS = 20
COUNTERS_NOTE = "By the server's own definitions (docs/metrics.md)."
LEDGER_NOTE = (
    "Greedy texts with and without the draft, token by token, and where they part. It is a tie "
    "where the two tokens lie no further apart than twice what two forwards of the target differ "
    "by, and the texts agree in fp32 (behind a server: and all that follows is its choice too)."
)
TIES = " (at a tie the target's own rounding decides between two tokens: either text is its own)"
LOAD_NOTE = (
    "So many requests are kept in flight, of one server after the other, in rounds of twice as "
    "many; intervals over rounds. Texts are not compared here: bf16 sums depend on what else is in "
    "the batch."
)
ANSWERS_NOTE = (
    "Copied tokens stand in stretches of 8 or more that occur earlier; prompt lookup drafts them "
    "without a model."
)
HELD_OUT_NOTE = "Prompts held out of training; in the first epoch all tokens are new."


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
    "copy share": _meaning(Answers, "copy_share"),
    "gain": _meaning(Report, "gain"),
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


# --- Cells ---


def shown(value: Measured | float | None, form: str = ".2f") -> str:
    """A number, with its interval where it has one."""
    return NOT_MEASURED if value is None else format(value, form)


def prompts_text(value: Measured) -> str:
    """How many prompts a number rests on: `160`, or `160 in 20 groups` where they name some."""
    groups = value.clusters if value.clusters != value.n else None
    return f"{value.n} in {groups} groups" if groups else str(value.n)


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


def _confusions(examples: list[Confusion]) -> str:
    return ", ".join(
        f"{quoted(e.target)} drafted as {quoted(e.draft)} ×{e.count}" for e in examples
    )


# --- Lines beside the tables ---


def texts_line(name: str, ledger: Ledger) -> str:
    """One ledger in a sentence, name says what ties are where there are any."""
    return f"With draft {name}, {ledger}{TIES if ledger.tie_divergences else ''}."


def setting_line(report: Report) -> str:
    """The target, and how it was run."""
    return (
        f"Target {report.target_named} on {report.device}, {report.dtype}, engine {report.engine}, "
        f"temperature {report.decoding.temperature:g}, batch size 1"
    )


def verdict_lines(report: Report) -> list[str]:
    """Whether each draft pays, where its step costs were timed."""
    return [
        f"{name}: {'NOT LOSSLESS, do not serve. ' if d.lossless.unexplained else ''}"
        f"{d.payoff.verdict}"
        for name, d in report.drafts.items()
        if d.payoff
    ]


def missing_lines(report: Report) -> list[str]:
    """One line for each reason why something could not be measured, with the fields it left out."""
    lines = []
    for name, draft in report.drafts.items():
        reasons: dict[str, list[str]] = {}
        for entry in draft.missing:
            label = LABELS.get(entry.field) or _in_words(entry.field)
            reasons.setdefault(entry.reason, []).append(label)
        lines += [f"{name}, {', '.join(fields)}: {why}" for why, fields in reasons.items()]
    return lines


# --- What the rows or columns show: label, fields of the report, and how they are written ---

Cells = list[tuple[str, str, Callable[..., str]]]


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_plain, value))
    return format(value, ".2f") if isinstance(value, float | Measured) else str(value)


def _in_words(field: str) -> str:
    return field.replace("_", " ").replace("speedup", "speed-up")


def _fields(prefix: str, names: str) -> Cells:
    """Fields under their own names."""
    cells: Cells = []
    for name in names.split():
        label = f"n of {name.removesuffix('.n')}" if name.endswith(".n") else name
        cells.append((_in_words(label), prefix + name, _plain))
    return cells


RESULT: Cells = [
    ("alpha", "alpha", shown),
    ("tau", "tau", shown),
    ("gamma", "gamma gamma_policy", gamma_text),
    ("accepted/drafted", "accepted_over_drafted", "{:.0%}".format),
    ("speed-up", "speedup", shown),
    ("predicted speed-up", "predicted_speedup", shown),
    ("decode efficiency", "decode_efficiency", shown),
    ("tokens/s, no draft", "tokens_per_s.baseline.mean", "{:.1f}".format),
    ("tokens/s, drafted", "tokens_per_s.speculative.mean", "{:.1f}".format),
    ("c (draft/target)", "c", "{:.3f}".format),
    ("memory overhead", "memory.overhead", "{:.1%}".format),
    ("n of alpha", "alpha", prompts_text),
    ("n of speed-up", "speedup", prompts_text),
]
GAINS: Cells = [
    ("over", "over", str),
    ("alpha", "alpha", "{:+.2f}".format),
    ("tau", "tau", "{:+.2f}".format),
    ("speed-up", "speedup", "{:+.2f}".format),
]
COUNTERS = _fields(
    "counters.",
    "num_drafts num_draft_tokens num_accepted_tokens mean_acceptance_length acceptance_rate "
    "acceptance_per_position",
)


def _by_steps(name: str, costs: Costs) -> str:
    """What the step costs leave open of a number; empty where they were not timed in rounds."""
    return "{:.3g} to {:.3g}".format(*costs.ci95[name]) if name in costs.ci95 else ""


TWO_MS = "{:.1f} / {:.1f} ms".format
COSTS: Cells = [
    ("draft step", "costs.draft_step_ms", "{:.2f} ms".format),
    ("draft, once a block", "costs.draft_block_ms", "{:.2f} ms".format),
    ("target step", "costs.target_step_ms", "{:.2f} ms".format),
    ("target on gamma + 1", "costs.target_step_ms verify_ratio", lambda t, r: f"{t * r:.2f} ms"),
    ("verify ratio", "verify_ratio", shown),
    *(
        (f"{label}, 95% by step costs", "costs", partial(_by_steps, name))
        for label, name in (
            ("c", "c"),
            ("verify ratio", "verify_ratio"),
            ("predicted speed-up", "predicted_speedup"),
            ("ceiling", "ceiling_speedup"),
            ("break-even alpha", "break_even_alpha"),
        )
    ),
    ("TTFT with / without", "ttft_ms.speculative.mean ttft_ms.baseline.mean", TWO_MS),
    ("ITL p50 with / without", "itl_ms.speculative.p50 itl_ms.baseline.p50", TWO_MS),
    ("ITL p95 with / without", "itl_ms.speculative.p95 itl_ms.baseline.p95", TWO_MS),
]
DRAFTS: Cells = [
    ("path", "path", "`{}`".format),
    ("form measured", "form", str),
    ("vocabulary", "vocabulary.relation", str),
    ("strategy", "vocabulary.strategy", str),
    ("draft length", "gamma_policy", str),
    ("target calls with a draft", "drafted_calls", "{:.0%}".format),
    ("draft", "memory.draft_bytes", size),
    ("full form", "memory.full_form_bytes", size),
    ("target", "memory.target_bytes", size),
    ("overhead", "memory.overhead", "{:.1%}".format),
    ("KV bytes a token of the draft", "memory.kv_bytes_per_token.draft", "{:,}".format),
    ("KV bytes a token of the target", "memory.kv_bytes_per_token.target", "{:,}".format),
    ("loop share", "loop_share.speculative.mean", "{:.1%}".format),
]
# What a field is called, where its own name in words does not say it
LABELS = {field: label for label, field, _ in reversed(RESULT + DRAFTS)}
LABELS |= {"per_position": "acceptance by position", "atlas": "rejection atlas"}
LABELS |= {"counters": "counters of the server", "lossless": "greedy text"}
ANSWERS: Cells = [
    ("copied", "copy_share.either", "{:.0%}".format),
    ("of the prompt", "copy_share.of_prompt", "{:.0%}".format),
    ("of the answer before", "copy_share.of_answer", "{:.0%}".format),
]
POSITIONS = _fields("", "position drafts marginal conditional")
CATEGORIES = _fields("", "alpha tau speedup alpha.n speedup.n")
BUCKETS = _fields("", "positions alpha")
LOADS: Cells = [
    ("requests at a time", "concurrency", str),
    ("tokens/s, no draft", "tokens_per_s.baseline", "{:.1f}".format),
    ("tokens/s, drafted", "tokens_per_s.speculative", "{:.1f}".format),
    ("speed-up", "speedup", shown),
    ("tokens per call", "mean_acceptance_length", shown),
    ("ITL p50 with / without", "itl_ms.speculative.p50 itl_ms.baseline.p50", TWO_MS),
    ("ITL p95 with / without", "itl_ms.speculative.p95 itl_ms.baseline.p95", TWO_MS),
    ("requests", "requests", str),
]
CLASSES: Cells = [
    ("tokens", "positions", str),
    ("alpha", "alpha", shown),
    ("rejected", "rejected", str),
    ("lost speed-up", "lost_speedup", "{:+.2f}".format),
    ("most often", "examples", _confusions),
]
LEDGER: Cells = [
    ("prompt", "prompt", str),
    ("token", "position", str),
    ("without a draft", "target", quoted),
    ("with it", "drafted", quoted),
    ("gap of logits", "gap", "{:.4f}".format),
    ("error of forwards", "error", "{:.4f}".format),
    ("verdict", "tie", lambda tie: "tie" if tie else "changed"),
    ("why", "why", str),
]


def _at(part: BaseModel, path: str) -> Any:
    """The value of `memory.overhead`, say; None where a part on the way is null."""
    value: Any = part
    for name in path.split("."):
        value = None if value is None else getattr(value, name)
    return value


def _cells(part: BaseModel, cells: Cells) -> list[str]:
    """Empty where a field is null."""
    texts = []
    for _, paths, form in cells:
        values = [_at(part, path) for path in paths.split()]
        # that the gamma of a server is not known has words of its own
        texts.append("" if None in values and form is not gamma_text else form(*values))
    return texts


def _by_draft(title: str, report: Report, cells: Cells, note: str = "") -> Table:
    """One column a draft; a row that nothing was measured for is left out."""
    columns = [_cells(draft, cells) for draft in report.drafts.values()]
    rows = [
        [label, *(cell or NOT_MEASURED for cell in row)]
        for (label, _, _), *row in zip(cells, *columns, strict=True)
        if any(row)
    ]
    return Table(title, ["", *report.drafts], rows, note)


def _table(
    title: str, before: str, rows: Iterable[tuple[str, BaseModel]], cells: Cells, note: str = ""
) -> Table:
    """rows: (text of the first column, whose header is `before`; what the cells are taken from)."""
    header = [before, *(label for label, _, _ in cells)]
    return Table(title, header, [[first, *_cells(part, cells)] for first, part in rows], note)


def _by_item(title: str, report: Report, path: str, cells: Cells, note: str = "") -> Table:
    """One row for each item of every draft's list at `path`."""
    rows = (
        (name, part) for name, draft in report.drafts.items() for part in _at(draft, path) or []
    )
    return _table(title, "draft", rows, cells, note)


def _by_load(report: Report) -> Table:
    """With vLLM's setting for each draft that pays at some loads only."""
    schedules = [
        f" Serve {name} with num_speculative_tokens_per_batch_size {json.dumps(ranges)}."
        for name, ranges in report.gamma_by_load.items()
        if len(ranges) > 1
    ]
    return _by_item("By load", report, "by_load", LOADS, LOAD_NOTE + "".join(schedules))


def result_table(report: Report) -> Table:
    """The main table; the gain of the second draft beside it where exactly two are compared."""
    stock = report.baseline.over_stock_generate
    compared = f", {stock:.2f} of stock generate" if stock else ""
    note = (
        "Brackets hold 95% intervals over prompts; parentheses, where these are fewer than "
        f"{FEWEST_CLUSTERS}, the lowest and the highest. "
        f"Baseline: {report.baseline.tokens_per_s:.1f} tokens/s{compared}."
    )
    table = _by_draft("Result", report, RESULT, note)
    if len(report.drafts) != 2 or not report.gain:
        return table
    gained = dict(zip((label for label, _, _ in GAINS), _cells(report.gain[0], GAINS), strict=True))
    rows = [[*row, gained.get(row[0], "")] for row in table.rows]
    return Table(table.title, [*table.header, "gain"], rows, note)


def ledger_table(report: Report) -> Table:
    """Greedy texts that parted from the target's own: the worst first, LEDGER_ROWS at most."""
    entries = [(name, entry) for name, ledger in report.ledgers() for entry in ledger.divergences]

    def doubt(row: tuple[str, Divergence]) -> tuple[bool, float]:
        """Changed texts first, then those whose gap is the largest part of the error."""
        _, entry = row
        return not entry.tie, entry.gap / entry.error if entry.gap and entry.error else 0.0

    note = LEDGER_NOTE
    if len(entries) > LEDGER_ROWS:
        note += f" The {LEDGER_ROWS} least clear of {len(entries)} are shown; report.json has all."
    worst = sorted(entries, key=doubt, reverse=True)[:LEDGER_ROWS]
    return _table("Tie ledger", "draft", worst, LEDGER, note)


def _setting(report: Report) -> Table:
    """What was run, on what, with which prompts."""
    prompts = report.prompts
    rows: list[tuple[str, Any]] = [
        ("target", report.target_named),
        ("engine, device, dtype", f"{report.engine}, {report.device}, {report.dtype}"),
        ("batch size", 1),
        *((key.replace("_", " "), value) for key, value in report.decoding),
        ("prompts", f"{prompts.source}, {prompts.n}"),
        ("prompts sha256", prompts.sha256),
        ("asked in chat form", f"{prompts.in_chat_form:.0%}"),
        ("chat template kwargs", " or ".join(map(json.dumps, prompts.chat_template_kwargs))),
        ("overlap with training", prompts.overlap_with_training),
        ("bits per prompt token", prompts.bits_per_token),
        ("bits of a random token", prompts.random_bits),
    ]
    texts = [[label, "none" if value is None else value] for label, value in rows]
    return Table("Setting", ["", ""], texts)


def _held_out(curve: HeldOutCurve) -> Table:
    """The draft on held-out prompts while it was trained."""
    rows = [
        [f"{p.tokens:,}", str(p.step), shown(p.alpha), f"{p.tau:.2f}", "kept" if p.kept else ""]
        for p in curve.points
    ]
    header = ["different tokens", "step", "alpha", f"simulated tau, gamma {curve.gamma}", ""]
    return Table("Held-out prompts while it was trained", header, rows, HELD_OUT_NOTE)


def waterfall(draft: DraftReport) -> dict[str, float]:
    """Speed-ups as one cost after the other is counted; empty where not all of it was measured.

    tau is the ideal: drafting free, and a wide target call as cheap as one on a single token.
    """
    tau, predicted, decode = draft.tau, draft.predicted_speedup, draft.decode_speedup
    if tau is None or predicted is None or decode is None:
        return {}
    assert draft.mean_drafted is not None
    assert draft.verify_ratio is not None
    drafting = tau.mean / predicted.mean - draft.verify_ratio  # in target steps, a block
    return {
        "all accepted": draft.mean_drafted + 1,
        "tau": tau.mean,
        "after draft steps": tau.mean / (1 + drafting),
        "predicted": predicted.mean,
        "decode": decode.mean,
        "wall": draft.speedup.mean,
    }


def _waterfalls(report: Report) -> Table:
    counted = {name: waterfall(draft) for name, draft in report.drafts.items()}
    priced = {name: speedups for name, speedups in counted.items() if speedups}
    stages = next(iter(priced.values()), {})
    rows = [[stage, *(f"{priced[name][stage]:.2f}" for name in priced)] for stage in stages]
    return Table("Where the speed-up goes", ["", *priced], rows)


def gamma_curve(draft: DraftReport) -> list[tuple[int, float, float]]:
    """(gamma, expected speed-up, that of a perfect draft), positions taken as independent."""
    if draft.payoff is None or draft.alpha is None or draft.costs is None:
        return []
    costs, alpha = draft.costs.steps(), draft.alpha.mean
    return [
        (gamma, expected_speedup(alpha, gamma, costs), expected_speedup(1.0, gamma, costs))
        for gamma in range(1, costs.max_gamma + 1)
    ]


def _curves(report: Report) -> Table:
    rows = [
        [name, str(gamma), f"{expected:.2f}", f"{ceiling:.2f}"]
        for name, draft in report.drafts.items()
        for gamma, expected, ceiling in gamma_curve(draft)
    ]
    return Table("Speed-up by gamma", ["draft", "gamma", "predicted", "ceiling"], rows)


def _charted(report: Report) -> list[Table]:
    """Tables that report.html draws instead."""
    charted = [
        _waterfalls(report),
        _curves(report),
        _by_item("Acceptance by position", report, "per_position", POSITIONS),
    ]
    for name, draft in report.drafts.items():
        if atlas := draft.atlas:
            classes = ((token_class.name, token_class) for token_class in atlas.classes)
            charted.append(_table(f"Rejection atlas, {name}", "class", classes, CLASSES))
            for unit, buckets in (
                ("output position", atlas.by_output_position),
                ("target's entropy in bits", atlas.by_entropy),
            ):
                rows = ((bounds(bucket), bucket) for bucket in buckets)
                charted.append(_table(f"alpha by {unit}, {name}", unit, rows, BUCKETS))
    return [dataclasses.replace(table, charted=True) for table in charted]


def tables(report: Report) -> list[Table]:
    """All tables; one that the report holds nothing for is left out."""
    gains = ((gain.draft, gain) for gain in report.gain if len(report.drafts) > 2)
    categories = {
        kind: [
            (f"{category}, {name}", numbers)
            for name, draft in report.drafts.items()
            for category, numbers in getattr(draft, kind).items()
        ]
        for kind in ("by_category", "by_copy_share", "by_context")
    }
    answers = [] if report.answers is None else [("share of tokens or answers", report.answers)]
    every = [
        result_table(report),
        _table("Gain", "draft", gains, GAINS),
        _by_draft("Counters of the server", report, COUNTERS, COUNTERS_NOTE),
        *_charted(report),
        _by_load(report),
        ledger_table(report),
        _table("The target's answers", "", answers, ANSWERS, ANSWERS_NOTE),
        _table("By category", "category, draft", categories["by_category"], CATEGORIES),
        _table("By copy share", "category, draft", categories["by_copy_share"], CATEGORIES),
        _table("By context length", "prompt, draft", categories["by_context"], CATEGORIES),
        *([] if report.held_out is None else [_held_out(report.held_out)]),
        _by_draft("Cost and latency", report, COSTS),
        _by_draft("Drafts", report, DRAFTS),
        _setting(report),
    ]
    return [table for table in every if table.rows]
