"""The report of an evaluation: report.json (draftsmith-report/1), report.md, report.html.

`build_report` turns the raw logs into one plain dict; everything that a person reads is rendered
from that dict alone (eval/reporting/text.py, eval/reporting/page.py).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from align.atomic import atomic_file
from eval.measuring import metrics
from eval.measuring.atlas import Answer, build_atlas, telling_prompts
from eval.measuring.cost import gamma_curve, payoff, waterfall
from eval.measuring.metrics import Agreement, Measured, PromptRun, StepCosts
from eval.reporting.page import render_page
from eval.reporting.schema import SchemaError, report_schema, validate
from eval.reporting.text import headline, ledgers, render_markdown

SCHEMA = "draftsmith-report/1"

# Thresholds of the warnings.
FEW_PROMPTS = 32
FEW_DRAFTS = 300
HIGH_LOOP_SHARE = 0.2
FAIR_BASELINE = 0.95
USUAL_EFFICIENCY = (0.8, 1.1)
RANDOM_SHARE = 0.75  # of the bits that random tokens take; text of any language takes far fewer
# Fields that are null only where `missing` gives the reason.
ALWAYS_MEASURED = (
    "alpha tau mean_drafted accepted_over_drafted per_position costs c verify_ratio "
    "predicted_speedup speedup decode_speedup decode_efficiency loop_share memory payoff waterfall "
    "gamma_curve atlas"
).split()
# Rules that leave the output as the target's: greedily the same tokens, sampled the same
# distribution. Whatever else a report names is taken for lossy.
LOSSLESS_RULES = ("greedy match", "rejection sampling")


class ReportError(ValueError):
    """A report that lacks a field, holds a value that is no number, or contradicts itself."""


@dataclass(frozen=True)
class RunInfo:
    """What all drafts of a report have in common; the dicts as in report.schema.json.

    answers: the texts that alpha was taken on. spell: the bytes of a token id.
    """

    target: str
    engine: str
    device: str
    dtype: str
    decoding: dict[str, Any]
    prompts: dict[str, Any]
    provenance: dict[str, Any]
    over_stock_generate: Measured  # tokens/s of the baseline / of stock `generate`
    answers: list[Answer]
    spell: Callable[[int], bytes]


@dataclass(frozen=True)
class DraftMeasurement:
    """The raw log of one draft. `runs` and `baseline_runs` are of the same prompts, interleaved.

    memory: {target_bytes, draft_bytes, kv_bytes_per_token: {target, draft}} in the form measured;
    lossless: {prompts, identical, tie_divergences, unexplained, divergences}, measured greedily.
    gamma_sweep: measured points {gamma, tau, speedup}. other_prompts: {source, sha256, alpha} of
    prompts outside the domain. by_batch_size: measured points (eval/measuring/evaluation.py).
    by_temperature: (runs, baseline runs) by the temperature they were decoded at.
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
    lossless: dict[str, Any]
    gamma_sweep: list[dict[str, Any]] = field(default_factory=list)
    other_prompts: dict[str, Any] | None = None
    by_batch_size: list[dict[str, Any]] = field(default_factory=list)
    by_temperature: dict[float, tuple[list[PromptRun], list[PromptRun]]] = field(
        default_factory=dict
    )


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
    shown = telling_prompts(drafts[-1].agreement)
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
        "drafts": {draft.name: _draft_block(draft, info, shown) for draft in drafts},
        "gain": [gain(draft, over=drafts[0]) for draft in drafts[1:]],
        "provenance": info.provenance,
    }
    return finished(report)


def finished(report: dict[str, Any]) -> dict[str, Any]:
    """The report with its warnings and headline, as JSON types, checked."""
    report = report | {"warnings": warnings(report), "headline": headline(report)}
    report = json.loads(json.dumps(report))  # tuples become lists, here rather than in the file
    check_report(report)
    return report


def _draft_block(draft: DraftMeasurement, info: RunInfo, shown: Sequence[str]) -> dict[str, Any]:
    runs, baseline, costs = draft.runs, draft.baseline_runs, draft.costs
    metrics.check_runs(runs)
    metrics.check_runs(baseline)
    alpha = metrics.alpha(draft.agreement)
    gamma = metrics.mean_drafted(runs)
    memory = draft.memory
    tau, speedup = metrics.tau(runs), metrics.speedup(runs, baseline)
    decode = metrics.decode_speedup(runs, baseline)
    return {
        "path": draft.path,
        "form": draft.form,
        "vocabulary": draft.vocabulary,
        "alpha": alpha,
        "tau": tau,
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
        "speedup": speedup,
        "decode_speedup": decode,
        "decode_efficiency": metrics.decode_efficiency(runs, baseline, costs),
        "tokens_per_s": metrics.both(metrics.tokens_per_s, baseline, runs),
        "ttft_ms": metrics.both(metrics.ttft_ms, baseline, runs),
        "itl_ms": metrics.both(metrics.itl_ms, baseline, runs),
        "loop_share": metrics.both(metrics.loop_share, baseline, runs),
        "memory": {
            "target_bytes": memory["target_bytes"],
            "draft_bytes": memory["draft_bytes"],
            "kv_bytes_per_token": memory["kv_bytes_per_token"],
            "overhead": memory["draft_bytes"] / memory["target_bytes"],
            "full_form_bytes": draft.full_form_bytes,
        },
        "payoff": payoff(costs, alpha["mean"]),
        "waterfall": waterfall(tau["mean"], gamma, costs, decode["mean"], speedup["mean"]),
        "gamma_curve": gamma_curve(alpha["mean"], _replayed(draft, info), costs),
        "gamma_sweep": draft.gamma_sweep,
        "by_batch_size": draft.by_batch_size,
        "by_temperature": [
            {
                "temperature": temperature,
                "tau": metrics.tau(some),
                "speedup": metrics.speedup(some, base),
            }
            for temperature, (some, base) in draft.by_temperature.items()
        ],
        "lossless": draft.lossless,
        "by_category": metrics.by_category(draft.agreement, runs, baseline),
        "atlas": build_atlas(draft.agreement, info.answers, info.spell, costs, shown),
        "other_prompts": draft.other_prompts,
        "counters": None,
        "missing": [],
        "per_prompt": _per_prompt(draft),
    }


def _replayed(draft: DraftMeasurement, info: RunInfo) -> dict[int, float]:
    """tau by gamma from the log of alpha, which is exact only for greedy decoding."""
    if info.decoding["temperature"] > 0:
        return {}
    lengths = range(1, draft.costs.max_gamma + 1)
    blocks = {
        gamma: [
            accepted + 1
            for agreement in draft.agreement
            for accepted in metrics.replayed_blocks([v == 1 for v in agreement.values], gamma)
        ]
        for gamma in lengths
    }
    return {gamma: sum(tokens) / len(tokens) for gamma, tokens in blocks.items() if tokens}


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
            "calls": len(run.block_tokens),
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
    found = [
        _not_lossless(where, ledger)
        for where, ledger in ledgers(report["drafts"])
        if ledger["unexplained"]
    ]
    found += _setting_warnings(report)
    for name, draft in report["drafts"].items():
        found += _draft_warnings(name, draft)
    for entry in report["gain"]:
        if entry["alpha"] and entry["alpha"]["ci95"][0] <= 0 <= entry["alpha"]["ci95"][1]:
            found.append(
                f"The interval of alpha's gain ({entry['draft']} over {entry['over']}) holds 0."
            )
    return found


def _setting_warnings(report: dict[str, Any]) -> list[str]:
    """What makes every number of the report look better than it is."""
    found: list[str] = []
    decoding, prompts = report["decoding"], report["prompts"]
    if decoding["verification"] not in LOSSLESS_RULES:
        found.append(
            f"LOSSY: verification by {decoding['verification']!r} is not known to leave the output "
            f"as the target's; a speed-up bought with other text cannot be compared."
        )
    if decoding["stop_tokens"] == 0:
        found.append(
            "No token ends a text, as with ignore_eos: what follows the end of an answer repeats "
            "itself, is easy to draft, and flatters every number."
        )
    elif decoding["ended_by_stop"] == 0:
        found.append(
            f"Not one answer ended by itself within {decoding['max_new_tokens']} tokens: if the "
            f"end of text is ignored, as with ignore_eos, every number is flattered."
        )
    if prompts["bits_per_token"] is not None and (
        prompts["bits_per_token"] > RANDOM_SHARE * prompts["random_bits"]
    ):
        found.append(
            f"The prompts look random: the target finds {prompts['bits_per_token']:.1f} bits in "
            f"each of their tokens, and random ones hold {prompts['random_bits']:.1f}. Acceptance "
            f"on such text says nothing about a domain."
        )
    stock = report["baseline"]["over_stock_generate"]
    if stock and stock["mean"] < FAIR_BASELINE:
        found.append(
            f"The baseline reaches only {stock['mean']:.2f} of stock generate's tokens/s: every "
            f"speed-up here is flattered by that."
        )
    overlap = prompts["overlap_with_training"]
    if overlap is None:
        found.append("It is not known whether evaluation prompts were trained on.")
    elif overlap:
        found.append(f"Evaluation prompts overlap with the training data: {overlap}.")
    return found


def _draft_warnings(name: str, draft: dict[str, Any]) -> list[str]:
    found = [
        f"{name}: measured in part only, {entry['reason']}"
        for entry in draft["missing"]
        if entry["field"] == "prompts"
    ]
    speedup = draft["speedup"]
    low, high = speedup["ci95"]
    if low <= 1 <= high:
        found.append(f"{name}: the interval of the speed-up holds 1x; no effect is shown.")
    if speedup["n"] < FEW_PROMPTS:
        found.append(
            f"{name}: the speed-up rests on {speedup['n']} prompts; intervals of fewer than "
            f"{FEW_PROMPTS} are too narrow."
        )
    drafts = None
    if draft["per_position"]:
        drafts = draft["per_position"][0]["drafts"]
    elif draft["counters"]:
        drafts = draft["counters"]["num_drafts"]
    if drafts is not None and drafts < FEW_DRAFTS:
        found.append(
            f"{name}: acceptance rests on {drafts} drafts; take longer answers or more prompts, "
            f"to have {FEW_DRAFTS} at least."
        )
    if draft["loop_share"] and draft["loop_share"]["speculative"]["mean"] > HIGH_LOOP_SHARE:
        found.append(
            f"{name}: {draft['loop_share']['speculative']['mean']:.0%} of the emitted tokens stand "
            f"in repeated loops, which are easy to draft; acceptance on useful text is lower."
        )
    efficiency = draft["decode_efficiency"]
    if efficiency and not USUAL_EFFICIENCY[0] <= efficiency["mean"] <= USUAL_EFFICIENCY[1]:
        cause = (
            "look for overhead in the loop or for a noisy machine"
            if efficiency["mean"] < 1
            else "single steps were timed in a slower moment than texts were decoded, so c and the "
            "predicted speed-up look worse than they are; measure again on a quiet machine"
        )
        found.append(
            f"{name}: the decode phase reaches {efficiency['mean']:.2f} of what its step costs "
            f"predict; {cause}."
        )
    return found


def _not_lossless(where: str, ledger: dict[str, Any]) -> str:
    return (
        f"NOT LOSSLESS: with draft {where}, {ledger['unexplained']} of {ledger['prompts']} prompts "
        f"gave other tokens than the target alone, with no tie to explain it. Do not serve this "
        f"draft."
    )


# ---------------------------------------------------------------------------------------------
# Check


def check_report(report: Any) -> None:
    """Raise `ReportError`, naming the field, unless this is a whole and consistent report.

    A draft that is not lossless is a finding, not an error: it must stand among the warnings. A
    field may be null only where `missing` gives the reason.
    """
    try:
        validate(report, report_schema(), "report")
    except SchemaError as error:
        raise ReportError(str(error)) from None
    for name, draft in report["drafts"].items():
        _check_draft(name, draft, report)
    for i, entry in enumerate(report["gain"]):
        for key in ("alpha", "tau", "speedup"):
            _check_gain(entry, key, report["drafts"], f"report.gain[{i}].{key}")


def _check_gain(entry: dict[str, Any], key: str, drafts: dict[str, Any], where: str) -> None:
    if entry[key] is None:
        return
    _check_interval(entry[key], where)
    mine, other = (drafts[entry[side]][key] for side in ("draft", "over"))
    # A gain may rest on fewer prompts than either side's own number; then they may differ.
    if mine["n"] == other["n"] == entry[key]["n"]:
        apart = mine["mean"] - other["mean"]
        if not math.isclose(entry[key]["mean"], apart, rel_tol=1e-6, abs_tol=1e-9):
            raise ReportError(
                f"{where} is {entry[key]['mean']}, but the drafts' own numbers are {apart} apart"
            )


def _check_draft(name: str, draft: dict[str, Any], report: dict[str, Any]) -> None:
    where = f"report.drafts.{name}"
    explained = {entry["field"] for entry in draft["missing"]}
    for key in ALWAYS_MEASURED:
        if draft[key] is None and key not in explained:
            raise ReportError(f"{where}.{key} is null, and {where}.missing does not say why")
        if isinstance(draft[key], dict) and "ci95" in draft[key]:
            _check_interval(draft[key], f"{where}.{key}")
    speeds = draft["tokens_per_s"]
    ratio = speeds["speculative"]["mean"] / speeds["baseline"]["mean"]
    if not math.isclose(ratio, draft["speedup"]["mean"], rel_tol=1e-6):
        raise ReportError(
            f"{where}.speedup is {draft['speedup']['mean']}, but its tokens_per_s give {ratio}"
        )
    if memory := draft["memory"]:
        overhead = memory["draft_bytes"] / memory["target_bytes"]
        if not math.isclose(memory["overhead"], overhead, rel_tol=1e-6):
            raise ReportError(
                f"{where}.memory.overhead is {memory['overhead']}, but its bytes give {overhead}"
            )
    for which, ledger in ledgers({name: draft}):
        parts = [ledger[key] for key in ("identical", "tie_divergences", "unexplained")]
        if ledger["prompts"] < 1 or sum(parts) != ledger["prompts"]:
            raise ReportError(
                f"report.drafts.{which}: {parts[0]} identical, {parts[1]} ties and {parts[2]} "
                f"unexplained do not make up {ledger['prompts']} prompts (1 at least)"
            )
        if parts[2] and _not_lossless(which, ledger) not in report["warnings"]:
            raise ReportError(f"{which} is not lossless and the report's warnings do not say so")


def _check_interval(value: Measured, where: str) -> None:
    if value["ci95"][0] > value["ci95"][1]:
        raise ReportError(f"{where}.ci95 runs backwards: {value['ci95']}")


# ---------------------------------------------------------------------------------------------
# Write and read


def write_report(folder: Path | str, report: dict[str, Any]) -> None:
    """Check the report and write report.json, .md and .html into `folder`, each atomically."""
    check_report(report)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / "report.md") as file:
        file.write(render_markdown(report))
    with atomic_file(folder / "report.html") as file:
        file.write(render_page(report))
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
