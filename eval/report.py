"""The report of an evaluation: report.json (draftsmith-report/1), report.md, a terminal table.

`build_report` turns the raw logs into one plain dict; everything that a person reads is rendered
from that dict alone, so a report can be rendered again from report.json years later.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from align.atomic import atomic_file
from eval import metrics
from eval.cost import payoff
from eval.metrics import Agreement, Measured, PromptRun, StepCosts

SCHEMA = "draftsmith-report/1"

# Thresholds of the warnings.
FEW_PROMPTS = 32
HIGH_LOOP_SHARE = 0.2
FAIR_BASELINE = 0.95
USUAL_EFFICIENCY = (0.8, 1.1)

TOP_KEYS = (
    "schema target engine device dtype baseline decoding prompts drafts gain provenance"
).split()
DECODING_KEYS = "temperature top_k top_p max_new_tokens gamma gamma_policy verification".split()
PROMPTS_KEYS = "source n sha256 overlap_with_training".split()
DRAFT_KEYS = (
    "path form vocabulary alpha tau accepted_over_drafted per_position c verify_ratio "
    "predicted_speedup speedup decode_efficiency tokens_per_s ttft_ms itl_ms memory payoff "
    "lossless by_category"
).split()
VOCABULARY_KEYS = "relation strategy coverage".split()
MEMORY_KEYS = "target_bytes draft_bytes kv_bytes_per_token overhead".split()
PAYOFF_KEYS = "ceiling_speedup break_even_alpha best_gamma best_gamma_speedup verdict".split()
LOSSLESS_KEYS = "prompts identical tie_divergences unexplained".split()
MEASURED_KEYS = (
    "alpha tau accepted_over_drafted predicted_speedup speedup decode_efficiency".split()
)

# One line each; docs/metrics.md has the long form.
DEFINITIONS = {
    "alpha": "mean over positions of sum_x min(p, q) on text the target generated, teacher-forced; "
    "at temperature 0, how often the two argmaxes agree. Does not depend on gamma.",
    "tau": "tokens emitted per target call in the decode phase: bonus token in; prefill token and "
    "a cut last block out.",
    "accepted/drafted": "share of drafted tokens that verification accepted, over the blocks of "
    "tau. Falls as gamma grows.",
    "speed-up": "wall seconds per emitted token without a draft / with it; prefill in; same "
    "target, engine, dtype and run, interleaved prompt by prompt.",
    "predicted speed-up": "tau * t_target(1) / (gamma * t_draft + t_target(gamma + 1)) from "
    "isolated forwards, gamma the mean drafted length.",
    "decode efficiency": "decode-phase speed-up / predicted speed-up; 1 means no overhead beyond "
    "the two models.",
    "c": "seconds of one draft step / of one target step.",
    "verify ratio": "seconds of a target call on gamma + 1 tokens / on one.",
    "memory overhead": "bytes of the draft (what it shares with the target not counted) / bytes "
    "of the target, in the form measured.",
    "TTFT, ITL": "time to the first token; inter-token latency, a block's time spread evenly over "
    "its tokens.",
    "loop share": "share of emitted tokens in a pattern of at most 64 tokens that repeats at "
    "least 3 times over at least 8 tokens.",
    "gain": "difference to the draft named, on the same prompts.",
    "intervals": "95%, percentile bootstrap over prompts (10,000 resamples, fixed seed); n is the "
    "number of prompts.",
}


class ReportError(ValueError):
    """A report that lacks a field, holds a value that is no number, or contradicts itself."""


@dataclass(frozen=True)
class RunInfo:
    """What all drafts of a report have in common; the dicts as in the contract of report.json."""

    target: str
    engine: str
    device: str
    dtype: str
    decoding: dict[str, Any]
    prompts: dict[str, Any]
    provenance: dict[str, Any]
    over_stock_generate: Measured  # tokens/s of the baseline / of stock `generate`


@dataclass(frozen=True)
class DraftMeasurement:
    """The raw log of one draft. `runs` and `baseline_runs` are of the same prompts, interleaved.

    memory: {target_bytes, draft_bytes, kv_bytes_per_token: {target, draft}} in the form measured;
    lossless: {prompts, identical, tie_divergences, unexplained}, measured greedily.
    """

    name: str
    path: str
    form: str
    vocabulary: dict[str, Any]
    agreement: list[Agreement]
    runs: list[PromptRun]
    baseline_runs: list[PromptRun]
    costs: StepCosts
    memory: dict[str, Any]
    full_form_bytes: int | None
    lossless: dict[str, int]


# ---------------------------------------------------------------------------------------------
# Build


def build_report(info: RunInfo, drafts: Sequence[DraftMeasurement]) -> dict[str, Any]:
    """The whole report as a dict of JSON types, checked.

    `gain` compares every draft after the first with the first. Raises ValueError for a log that
    nothing can be measured on, `ReportError` where the result is not a valid report.
    """
    if not drafts:
        raise ReportError("a report needs at least one draft")
    names = [draft.name for draft in drafts]
    if len(set(names)) < len(names):
        raise ReportError(f"two drafts of one report have the same name: {', '.join(names)}")
    report = {
        "schema": SCHEMA,
        "target": info.target,
        "engine": info.engine,
        "device": info.device,
        "dtype": info.dtype,
        "baseline": {
            "tokens_per_s": metrics.tokens_per_s(drafts[0].baseline_runs),
            "over_stock_generate": info.over_stock_generate,
        },
        "decoding": info.decoding,
        "prompts": info.prompts,
        "drafts": {draft.name: _draft_block(draft) for draft in drafts},
        "gain": [gain(draft, over=drafts[0]) for draft in drafts[1:]],
        "provenance": info.provenance,
    }
    report["warnings"] = warnings(report)
    report["headline"] = headline(report)
    report = json.loads(json.dumps(report))  # tuples become lists, here rather than in the file
    check_report(report)
    return report


def _draft_block(draft: DraftMeasurement) -> dict[str, Any]:
    runs, baseline, costs = draft.runs, draft.baseline_runs, draft.costs
    metrics.check_runs(runs)
    metrics.check_runs(baseline)
    alpha = metrics.alpha(draft.agreement)
    gamma = metrics.mean_drafted(runs)
    memory = draft.memory
    return {
        "path": draft.path,
        "form": draft.form,
        "vocabulary": draft.vocabulary,
        "alpha": alpha,
        "tau": metrics.tau(runs),
        "mean_drafted": gamma,
        "accepted_over_drafted": metrics.accepted_over_drafted(runs),
        "per_position": metrics.per_position(runs),
        "costs": {
            "draft_step_ms": 1000 * costs.draft_step,
            "target_step_ms": 1000 * costs.target_step,
            "target_verify_ms": {
                str(width): 1000 * seconds for width, seconds in sorted(costs.target_verify.items())
            },
            "context_length": costs.context_length,
        },
        "c": metrics.c(costs),
        "verify_ratio": metrics.verify_ratio(costs, gamma),
        "predicted_speedup": metrics.predicted_speedup(runs, costs),
        "speedup": metrics.speedup(runs, baseline),
        "decode_speedup": metrics.decode_speedup(runs, baseline),
        "decode_efficiency": metrics.decode_efficiency(runs, baseline, costs),
        "tokens_per_s": _both(metrics.tokens_per_s, baseline, runs),
        "ttft_ms": _both(metrics.ttft_ms, baseline, runs),
        "itl_ms": _both(metrics.itl_ms, baseline, runs),
        "loop_share": _both(metrics.loop_share, baseline, runs),
        "memory": {
            "target_bytes": memory["target_bytes"],
            "draft_bytes": memory["draft_bytes"],
            "kv_bytes_per_token": memory["kv_bytes_per_token"],
            "overhead": memory["draft_bytes"] / memory["target_bytes"],
            "full_form_bytes": draft.full_form_bytes,
        },
        "payoff": payoff(costs, alpha["mean"]),
        "lossless": draft.lossless,
        "by_category": metrics.by_category(draft.agreement, runs, baseline),
        "per_prompt": _per_prompt(draft),
    }


def _both(
    metric: Callable[[Sequence[PromptRun]], Any],
    baseline: Sequence[PromptRun],
    runs: Sequence[PromptRun],
) -> dict[str, Any]:
    return {"baseline": metric(baseline), "speculative": metric(runs)}


def _per_prompt(draft: DraftMeasurement) -> list[dict[str, Any]]:
    """The sums that every mean and interval above is made from, one row a prompt.

    The run's part is absent for prompts that only alpha was taken on.
    """
    rows: dict[str, dict[str, Any]] = {
        a.prompt_id: {
            "id": a.prompt_id,
            "category": a.category,
            "alpha_sum": a.alpha_sum,
            "positions": a.positions,
        }
        for a in draft.agreement
    }
    for run, base in metrics.pair(draft.runs, draft.baseline_runs):
        row = rows.setdefault(run.prompt_id, {"id": run.prompt_id, "category": run.category})
        row |= {
            "prompt_tokens": run.prompt_tokens,
            "tokens": len(run.tokens),
            "seconds": run.seconds,
            "baseline_tokens": len(base.tokens),
            "baseline_seconds": base.seconds,
            "blocks": run.whole_blocks,
            "block_tokens": sum(run.block_tokens[: run.whole_blocks]),
            "drafted": sum(run.drafted[: run.whole_blocks]),
            "accepted": sum(run.accepted[: run.whole_blocks]),
        }
    return list(rows.values())


def gain(draft: DraftMeasurement, over: DraftMeasurement) -> dict[str, Any]:
    """Differences draft - over in alpha, tau and speedup, paired on the same prompts."""
    return {
        "draft": draft.name,
        "over": over.name,
        "alpha": metrics.alpha_gain(draft.agreement, over.agreement),
        "tau": metrics.tau_gain(draft.runs, over.runs),
        "speedup": metrics.speedup_gain(
            draft.runs, draft.baseline_runs, over.runs, over.baseline_runs
        ),
    }


def warnings(report: dict[str, Any]) -> list[str]:
    """What a reader must know before quoting a number, the gravest first."""
    found: list[str] = []
    for name, draft in report["drafts"].items():
        if unexplained := draft["lossless"]["unexplained"]:
            found.append(_not_lossless(name, unexplained, draft["lossless"]["prompts"]))
    stock = report["baseline"]["over_stock_generate"]["mean"]
    if stock < FAIR_BASELINE:
        found.append(
            f"The baseline reaches only {stock:.2f} of stock generate's tokens/s: every speed-up "
            f"here is flattered by that."
        )
    overlap = report["prompts"]["overlap_with_training"]
    if overlap is None:
        found.append("It is not known whether evaluation prompts were trained on.")
    elif overlap:
        found.append(f"Evaluation prompts overlap with the training data: {overlap}.")
    for name, draft in report["drafts"].items():
        speedup = draft["speedup"]
        low, high = speedup["ci95"]
        if low <= 1 <= high:
            found.append(f"{name}: the interval of the speed-up holds 1x; no effect is shown.")
        if speedup["n"] < FEW_PROMPTS:
            found.append(
                f"{name}: the speed-up rests on {speedup['n']} prompts; intervals of fewer than "
                f"{FEW_PROMPTS} are too narrow."
            )
        loops = draft["loop_share"]["speculative"]["mean"]
        if loops > HIGH_LOOP_SHARE:
            found.append(
                f"{name}: {loops:.0%} of the emitted tokens stand in repeated loops, which are "
                f"easy to draft; acceptance on useful text is lower."
            )
        efficiency = draft["decode_efficiency"]["mean"]
        if not USUAL_EFFICIENCY[0] <= efficiency <= USUAL_EFFICIENCY[1]:
            found.append(
                f"{name}: the decode phase reaches {efficiency:.2f} of what its step costs "
                f"predict; look for overhead in the loop or for a noisy machine."
            )
    for entry in report["gain"]:
        low, high = entry["alpha"]["ci95"]
        if low <= 0 <= high:
            found.append(
                f"The interval of alpha's gain ({entry['draft']} over {entry['over']}) holds 0."
            )
    return found


def _not_lossless(name: str, unexplained: int, prompts: int) -> str:
    return (
        f"NOT LOSSLESS: with draft {name}, {unexplained} of {prompts} prompts gave other tokens "
        f"than the target alone, with no tie to explain it. Do not serve this draft."
    )


def headline(report: dict[str, Any]) -> str:
    """One sentence on the last draft of the report (the tuned one of a training run)."""
    name, draft = list(report["drafts"].items())[-1]
    low, high = draft["speedup"]["ci95"]
    speedup = (
        f"{draft['speedup']['mean']:.2f}x (95% interval {low:.2f} to {high:.2f}, "
        f"{draft['speedup']['n']} prompts)"
    )
    if low > 1:
        effect = f"speeds the target up {speedup}"
    elif high < 1:
        effect = f"SLOWS the target DOWN to {speedup}"
    else:
        effect = f"makes no measurable difference in speed, {speedup}"
    exact = "OUTPUT CHANGED" if draft["lossless"]["unexplained"] else "output unchanged"
    return (
        f"Draft {name} {effect}: alpha {_short(draft['alpha'])}, memory "
        f"+{draft['memory']['overhead']:.0%}, {exact}."
    )


# ---------------------------------------------------------------------------------------------
# Check


def check_report(report: dict[str, Any]) -> None:
    """Raise `ReportError`, naming the field, unless this is a whole and consistent report.

    A draft that is not lossless is a finding, not an error: it must stand among the warnings.
    """
    _require(report, TOP_KEYS, "report")
    if report["schema"] != SCHEMA:
        raise ReportError(f"schema is {report['schema']!r}; this version reads {SCHEMA!r}")
    _finite(report, "report")
    _require(report["baseline"], ["tokens_per_s", "over_stock_generate"], "baseline")
    for key in ("tokens_per_s", "over_stock_generate"):
        _measured(report["baseline"][key], f"baseline.{key}")
    _require(report["decoding"], DECODING_KEYS, "decoding")
    _require(report["prompts"], PROMPTS_KEYS, "prompts")
    if not report["drafts"]:
        raise ReportError("drafts is empty: a report needs at least one draft")
    for name, draft in report["drafts"].items():
        _check_draft(name, draft, report)
    for i, entry in enumerate(report["gain"]):
        where = f"gain[{i}]"
        _require(entry, ["draft", "over", "alpha", "tau", "speedup"], where)
        for key in ("alpha", "tau", "speedup"):
            _measured(entry[key], f"{where}.{key}")
            mine, other = (report["drafts"][entry[side]][key] for side in ("draft", "over"))
            # A gain may rest on fewer prompts than either side's own number; then they may differ.
            if mine["n"] == other["n"] == entry[key]["n"]:
                apart = mine["mean"] - other["mean"]
                if not math.isclose(entry[key]["mean"], apart, rel_tol=1e-6, abs_tol=1e-9):
                    raise ReportError(
                        f"{where}.{key} is {entry[key]['mean']}, but the drafts' own numbers are "
                        f"{apart} apart"
                    )


def _check_draft(name: str, draft: dict[str, Any], report: dict[str, Any]) -> None:
    where = f"drafts.{name}"
    _require(draft, DRAFT_KEYS, where)
    for key, keys in (
        ("vocabulary", VOCABULARY_KEYS),
        ("memory", MEMORY_KEYS),
        ("payoff", PAYOFF_KEYS),
        ("lossless", LOSSLESS_KEYS),
        ("tokens_per_s", ["baseline", "speculative"]),
    ):
        _require(draft[key], keys, f"{where}.{key}")
    for key in MEASURED_KEYS:
        _measured(draft[key], f"{where}.{key}")
    for key in ("alpha", "accepted_over_drafted"):
        if not 0 <= draft[key]["mean"] <= 1:
            raise ReportError(
                f"{where}.{key} is {draft[key]['mean']}, but a share is within 0 and 1"
            )
    if draft["tau"]["mean"] < 1:
        raise ReportError(
            f"{where}.tau is {draft['tau']['mean']}, but a call emits at least 1 token"
        )
    if not draft["per_position"]:
        raise ReportError(f"{where}.per_position is empty: nothing was drafted")
    for place in draft["per_position"]:
        _measured(place["marginal"], f"{where}.per_position[{place['position']}].marginal")
    speeds = draft["tokens_per_s"]
    for side in ("baseline", "speculative"):
        _measured(speeds[side], f"{where}.tokens_per_s.{side}")
    ratio = speeds["speculative"]["mean"] / speeds["baseline"]["mean"]
    if not math.isclose(ratio, draft["speedup"]["mean"], rel_tol=1e-6):
        raise ReportError(
            f"{where}.speedup is {draft['speedup']['mean']}, but its tokens_per_s give {ratio}"
        )
    memory = draft["memory"]
    if not math.isclose(
        memory["overhead"], memory["draft_bytes"] / memory["target_bytes"], rel_tol=1e-6
    ):
        raise ReportError(
            f"{where}.memory.overhead is {memory['overhead']}, but its bytes give "
            f"{memory['draft_bytes'] / memory['target_bytes']}"
        )
    lossless = draft["lossless"]
    parts = [lossless[key] for key in ("identical", "tie_divergences", "unexplained")]
    if lossless["prompts"] < 1 or sum(parts) != lossless["prompts"] or min(parts) < 0:
        raise ReportError(
            f"{where}.lossless: {parts[0]} identical, {parts[1]} ties and {parts[2]} unexplained "
            f"do not make up {lossless['prompts']} prompts (1 at least)"
        )
    if parts[2]:
        warning = _not_lossless(name, parts[2], lossless["prompts"])
        if warning not in report.get("warnings", []):
            raise ReportError(f"{where} is not lossless and the report's warnings do not say so")


def _require(block: Any, keys: Sequence[str], where: str) -> None:
    if not isinstance(block, dict):
        raise ReportError(f"{where} should be an object, not {block!r}")
    missing = [key for key in keys if key not in block]
    if missing:
        raise ReportError(f"{where} lacks {', '.join(missing)}")


def _measured(value: Any, where: str) -> None:
    _require(value, ["mean", "ci95", "n"], where)
    numbers = [value["mean"], *value["ci95"]] if isinstance(value["ci95"], list) else []
    if len(numbers) != 3 or not all(type(x) in (int, float) for x in numbers):
        raise ReportError(f"{where} should hold a mean and an interval of two numbers, not {value}")
    if value["ci95"][0] > value["ci95"][1]:
        raise ReportError(f"{where}.ci95 runs backwards: {value['ci95']}")
    if type(value["n"]) is not int or value["n"] < 1:
        raise ReportError(f"{where}.n is {value['n']!r}; it counts prompts, at least 1")


def _finite(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ReportError(f"{where} is {value}, which is not a number that JSON can hold")
    if isinstance(value, dict):
        for key, item in value.items():
            _finite(item, f"{where}.{key}")
    if isinstance(value, list):
        for i, item in enumerate(value):
            _finite(item, f"{where}[{i}]")


# ---------------------------------------------------------------------------------------------
# Write and read


def write_report(folder: Path | str, report: dict[str, Any]) -> None:
    """Check the report and write report.json and report.md into `folder`, each atomically."""
    check_report(report)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / "report.md") as file:
        file.write(render_markdown(report))
    with atomic_file(folder / "report.json") as file:
        json.dump(report, file, indent=2, allow_nan=False)
        file.write("\n")


def read_report(path: Path | str) -> dict[str, Any]:
    """A checked report from a report.json. Raises `ReportError` where it is absent or broken."""
    path = Path(path)
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ReportError(f"no report at {path}: run the evaluation to its end first") from None
    except ValueError as error:
        raise ReportError(f"{path} is not whole JSON ({error}): evaluate again") from None
    check_report(report)
    return report


# ---------------------------------------------------------------------------------------------
# Show


def gamma_text(decoding: dict[str, Any]) -> str:
    """The draft length as a table shows it: `3`, or `≤ 6` where drafts may stop before."""
    return f"{'' if decoding['gamma_policy'].startswith('fixed') else '≤ '}{decoding['gamma']}"


def _short(value: Measured, digits: int = 2) -> str:
    low, high = value["ci95"]
    return f"{value['mean']:.{digits}f} [{low:.{digits}f},{high:.{digits}f}]"


def _signed(value: Measured) -> str:
    low, high = value["ci95"]
    return f"{value['mean']:+.2f} [{low:+.2f},{high:+.2f}]"


def _size(count: int | None) -> str:
    return "not saved" if count is None else f"{count / 2**20:,.1f} MiB"


def _percent(value: Measured) -> str:
    low, high = value["ci95"]
    return f"{value['mean']:.0%} [{low:.0%},{high:.0%}]"


def result_rows(report: dict[str, Any]) -> list[tuple[str, list[str], str | None]]:
    """The main table: (label, one cell a draft, gain of the second draft or None).

    The gain column has something to say only where exactly two drafts are compared.
    """
    drafts = list(report["drafts"].values())
    gains = report["gain"][0] if len(drafts) == 2 else {}

    def row(label: str, cell: Callable[[Any], str], key: str = "") -> tuple[Any, ...]:
        gained = _signed(gains[key]) if key in gains else None
        return label, [cell(draft) for draft in drafts], gained

    return [
        row("alpha", lambda d: _short(d["alpha"]), "alpha"),
        row("tau", lambda d: _short(d["tau"]), "tau"),
        row(
            f"accepted/drafted, γ {gamma_text(report['decoding'])}",
            lambda d: _percent(d["accepted_over_drafted"]),
        ),
        row("speed-up", lambda d: _short(d["speedup"]), "speedup"),
        row("predicted speed-up", lambda d: _short(d["predicted_speedup"])),
        row("decode efficiency", lambda d: _short(d["decode_efficiency"])),
        row("tokens/s, no draft", lambda d: f"{d['tokens_per_s']['baseline']['mean']:.1f}"),
        row("tokens/s, drafted", lambda d: f"{d['tokens_per_s']['speculative']['mean']:.1f}"),
        row("c (draft/target)", lambda d: f"{d['c']:.3f}"),
        row("memory overhead", lambda d: f"{d['memory']['overhead']:.1%}"),
        row("n: alpha, speed-up", lambda d: f"{d['alpha']['n']}, {d['speedup']['n']}"),
    ]


def _lossless_line(name: str, lossless: dict[str, int]) -> str:
    return (
        f"Lossless, {name}: {lossless['identical']} of {lossless['prompts']} prompts identical, "
        f"{lossless['tie_divergences']} part at a tie, {lossless['unexplained']} unexplained"
    )


def _baseline_line(report: dict[str, Any]) -> str:
    baseline = report["baseline"]
    return (
        f"Baseline: {_short(baseline['tokens_per_s'], 1)} tokens/s, "
        f"{_short(baseline['over_stock_generate'])} of stock generate"
    )


def print_summary(report: dict[str, Any], console: Console | None = None) -> None:
    """The report at a glance, for the terminal at the end of a run."""
    console = console or Console()
    table = Table(
        title="Speculative decoding report",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("", no_wrap=True)
    for name in report["drafts"]:
        table.add_column(Text(name), justify="right")
    rows = result_rows(report)
    with_gain = any(gained for _, _, gained in rows)
    if with_gain:
        table.add_column("gain", justify="right")
    for label, cells, gained in rows:
        strong = "bold" if label in ("alpha", "speed-up") else ""
        table.add_row(label, *cells, *([gained or ""] if with_gain else []), style=strong)
    console.print()
    console.print(table)
    console.print()
    # Text, not markup: a path or a range in brackets must not be read as a style.
    console.print(
        Text(
            f"Target {report['target']} on {report['device']}, {report['dtype']}, engine "
            f"{report['engine']}, temperature {report['decoding']['temperature']}, batch size 1"
        )
    )
    console.print(Text(_baseline_line(report) + ". Brackets: 95% interval over prompts."))
    for name, draft in report["drafts"].items():
        lossless = draft["lossless"]
        style = "red bold" if lossless["unexplained"] else "green"
        console.print(Text(_lossless_line(name, lossless), style=style))
    for warning in report.get("warnings", []):
        console.print(Text(f"Warning: {warning}", style="yellow"))
    name, draft = list(report["drafts"].items())[-1]
    console.print(Text(f"{name}: {draft['payoff']['verdict']}"))
    console.print(Text(headline(report), style="bold"))


def _table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def render_markdown(report: dict[str, Any]) -> str:
    """report.md, from the dict alone."""
    decoding, prompts, drafts = report["decoding"], report["prompts"], report["drafts"]
    rows = result_rows(report)
    with_gain = any(gained for _, _, gained in rows)
    parts = ["# Speculative decoding report", f"**{headline(report)}**"]
    if report.get("warnings"):
        parts += ["## Warnings", "\n".join(f"- {warning}" for warning in report["warnings"])]

    setting = [
        ("target", report["target"]),
        ("engine, device, dtype", f"{report['engine']}, {report['device']}, {report['dtype']}"),
        ("batch size", 1),
        *((key.replace("_", " "), decoding[key]) for key in DECODING_KEYS),
        ("prompts", f"{prompts['source']}, {prompts['n']}"),
        ("prompts sha256", prompts["sha256"]),
        ("overlap with training", prompts["overlap_with_training"]),
    ]
    parts += [
        "## Result",
        _table(
            ["", *drafts, *(["gain"] if with_gain else [])],
            [
                [label, *cells, *([gained or ""] if with_gain else [])]
                for label, cells, gained in rows
            ],
        ),
        "Brackets hold 95% intervals over prompts. " + _baseline_line(report) + ".",
        "\n".join(f"- {_lossless_line(name, d['lossless'])}" for name, d in drafts.items()),
    ]
    if len(drafts) > 2:
        parts += [
            "## Gain",
            _table(
                ["draft", "over", "alpha", "tau", "speed-up"],
                [
                    [e["draft"], e["over"], *(_signed(e[k]) for k in ("alpha", "tau", "speedup"))]
                    for e in report["gain"]
                ],
            ),
        ]
    parts += [
        "## Does it pay?",
        "\n".join(f"- {n}: {d['payoff']['verdict']}" for n, d in drafts.items()),
    ]
    parts += ["## Setting", _table(["", ""], setting)]
    parts += [
        "## Acceptance by position",
        _table(
            ["draft", "position", "drafts", "marginal", "conditional"],
            [
                [
                    name,
                    place["position"],
                    place["drafts"],
                    _short(place["marginal"]),
                    _short(place["conditional"]) if place["conditional"] else "",
                ]
                for name, d in drafts.items()
                for place in d["per_position"]
            ],
        ),
        "## Cost and latency",
        _table(
            [
                "draft",
                "draft step",
                "target step",
                "target on gamma + 1",
                "verify ratio",
                "TTFT with / without",
                "ITL p50 with / without",
                "ITL p95 with / without",
            ],
            [
                [
                    name,
                    f"{d['costs']['draft_step_ms']:.2f} ms",
                    f"{d['costs']['target_step_ms']:.2f} ms",
                    f"{d['costs']['target_step_ms'] * d['verify_ratio']:.2f} ms",
                    f"{d['verify_ratio']:.2f}",
                    _with_without(d["ttft_ms"], "mean"),
                    _with_without(d["itl_ms"], "p50"),
                    _with_without(d["itl_ms"], "p95"),
                ]
                for name, d in drafts.items()
            ],
        ),
        "## Drafts",
        _table(
            [
                "draft",
                "path",
                "form measured",
                "vocabulary",
                "strategy",
                "draft",
                "full form",
                "target",
                "overhead",
                "KV bytes a token: draft, target",
                "loop share",
            ],
            [
                [
                    name,
                    f"`{d['path']}`",
                    d["form"],
                    d["vocabulary"]["relation"],
                    d["vocabulary"]["strategy"],
                    _size(d["memory"]["draft_bytes"]),
                    _size(d["memory"].get("full_form_bytes")),
                    _size(d["memory"]["target_bytes"]),
                    f"{d['memory']['overhead']:.1%}",
                    "{draft:,}, {target:,}".format(**d["memory"]["kv_bytes_per_token"]),
                    f"{d['loop_share']['speculative']['mean']:.1%}",
                ]
                for name, d in drafts.items()
            ],
        ),
    ]
    by_category = [
        [
            category,
            name,
            *(_short(n[key]) if n[key] else "" for key in ("alpha", "tau", "speedup")),
            n["alpha"]["n"] if n["alpha"] else 0,
        ]
        for name, d in drafts.items()
        for category, n in d["by_category"].items()
    ]
    if by_category:
        header = ["category", "draft", "alpha", "tau", "speed-up", "prompts"]
        parts += ["## By category", _table(header, by_category)]
    parts += [
        "## What the numbers mean",
        "\n".join(f"- **{term}**: {text}" for term, text in DEFINITIONS.items()),
        "## Provenance",
        "```json\n" + json.dumps(report["provenance"], indent=2) + "\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _with_without(both: dict[str, Any], key: str) -> str:
    return f"{both['speculative'][key]:.1f} / {both['baseline'][key]:.1f} ms"
