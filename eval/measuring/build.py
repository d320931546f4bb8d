"""From the raw logs, which every engine fills alike, to the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from eval.decoding.target import weights_sha256
from eval.measuring import metrics
from eval.measuring.atlas import build_atlas, telling_prompts
from eval.measuring.cost import gamma_curve, payoff, placements, waterfall
from eval.measuring.log import DraftLog, RunLog
from eval.measuring.metrics import NUMBERS, NothingToMeasure, agreed, blocks, timed
from eval.reporting.report import SCHEMA, Findings, PromptSums, Report, ReportError, checked
from eval.reporting.text import headline
from eval.reporting.warnings import find_warnings

# Fields that are in the draft's log as they are.
COPIED = (
    "path form vocabulary gamma gamma_policy gamma_sweep by_batch_size lossless other_prompts "
    "counters"
).split()


def build_report(run: RunLog, drafts: Sequence[DraftLog]) -> Report:
    """The whole report, with its warnings and headline, checked.

    `gain` compares every draft after the first with the first. Raises ValueError for a log that
    contradicts itself, `ReportError` where the result is not a valid report.
    """
    if not drafts:
        raise ReportError("a report needs at least one draft")
    names = [draft.name for draft in drafts]
    if len(set(names)) < len(names):
        raise ReportError(f"two drafts of one report have the same name: {', '.join(names)}")
    shown = telling_prompts(drafts[-1].agreement or [])
    fields = {
        "schema": SCHEMA,
        "target": run.target,
        "target_quantization": run.target_quantization,
        "engine": run.engine,
        "device": run.device,
        "dtype": run.dtype,
        "baseline": {
            "tokens_per_s": metrics.tokens_per_s(drafts[0].baseline),
            "over_stock_generate": run.over_stock_generate,
        },
        "decoding": run.decoding,
        "prompts": run.prompts,
        "drafts": {draft.name: _draft_block(draft, run, shown) for draft in drafts},
        "gain": [metrics.gain(draft, over=drafts[0]) for draft in drafts[1:]],
        "provenance": run.provenance,
    }
    found = checked(Findings, fields)
    words = {"warnings": find_warnings(found), "headline": headline(found)}
    return checked(Report, fields | words)


def _draft_block(log: DraftLog, run: RunLog, shown: Sequence[str]) -> dict[str, Any]:
    """The fields of a `DraftReport`; null where the log holds nothing to measure them on."""
    blocks_known = "tau" not in log.missing
    metrics.check_runs(log.runs, blocks_known)
    metrics.check_runs(log.baseline, blocks_known)
    missing = dict(log.missing)
    block: dict[str, Any] = {field: getattr(log, field) for field in COPIED}
    numbers: dict[str, Callable[[DraftLog], Any]] = NUMBERS | {
        "payoff": lambda log: payoff(timed(log), metrics.alpha(agreed(log)).mean),
        "waterfall": _waterfall,
        "placement": lambda log: placements(
            metrics.tau(blocks(log)).mean,
            metrics.mean_drafted(log.runs),
            metrics.paid(log),
            log.q_rows if run.decoding["temperature"] else 0,
        ),
        "gamma_curve": lambda log: gamma_curve(
            metrics.alpha(agreed(log)).mean, _replayed(log, run), timed(log)
        ),
        "atlas": lambda log: build_atlas(agreed(log), run.answers, run.spell, timed(log), shown),
    }
    for field, number in numbers.items():
        block[field] = None
        if field not in missing:
            try:
                block[field] = number(log)
            except NothingToMeasure as reason:
                missing[field] = str(reason)
    return block | {
        "sha256": weights_sha256(log.path),
        "missing": [{"field": field, "reason": reason} for field, reason in missing.items()],
        "per_prompt": _per_prompt(log, blocks_known),
    }


def _waterfall(log: DraftLog) -> Any:
    return waterfall(
        metrics.tau(blocks(log)).mean,
        metrics.mean_drafted(log.runs),
        metrics.paid(log),
        metrics.decode_speedup(log.runs, log.baseline).mean,
        metrics.speedup(log.runs, log.baseline).mean,
    )


def _replayed(log: DraftLog, run: RunLog) -> dict[int, float]:
    """tau by gamma from the log of alpha: exact for greedy decoding and drafts that are `alike`."""
    if run.decoding["temperature"] > 0 or not log.alike:
        return {}
    taus = {}
    for gamma in range(1, timed(log).max_gamma + 1):
        blocks = [tokens for a in agreed(log) for tokens in metrics.replayed(a, gamma)]
        if blocks:
            taus[gamma] = sum(blocks) / len(blocks)
    return taus


def _per_prompt(log: DraftLog, blocks_known: bool) -> list[PromptSums]:
    """The sums that every mean and interval above is made from, one row a prompt.

    The run's part is absent for prompts that only alpha was taken on.
    """
    rows = {
        a.prompt_id: PromptSums(
            id=a.prompt_id,
            category=a.category,
            group=a.group,
            alpha_sum=a.alpha_sum,
            positions=a.positions,
        )
        for a in log.agreement or []
    }
    for run, base in metrics.pair(log.runs, log.baseline):
        about = PromptSums(id=run.prompt_id, category=run.category, group=run.group)
        sums = {
            "prompt_tokens": run.prompt_tokens,
            "tokens": len(run.tokens),
            "seconds": run.seconds,
            "baseline_tokens": len(base.tokens),
            "baseline_seconds": base.seconds,
        }
        if blocks_known:
            whole = run.whole_blocks
            sums |= {
                "calls": len(run.block_tokens),
                "blocks": whole,
                "block_tokens": sum(run.block_tokens[:whole]),
                "drafted": sum(run.drafted[:whole]),
                "accepted": sum(run.accepted[:whole]),
            }
        rows[run.prompt_id] = rows.get(run.prompt_id, about).model_copy(update=sums)
    return list(rows.values())
