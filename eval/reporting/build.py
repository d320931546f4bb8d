"""Builds the report of an evaluation from its raw logs. All engines fill the same logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from align.checkpoint import weights_sha256
from eval.decoding.drafters import LOOKUP, LOOKUP_FIRST
from eval.measuring import metrics
from eval.measuring.copy_share import described
from eval.measuring.cost import Payoff, StepCosts, payoff
from eval.measuring.intervals import Both, NothingToMeasure
from eval.measuring.metrics import PromptSums, measured, prompt_table
from eval.measuring.runs import DraftLog, RunLog
from eval.measuring.sampled_check import sampled_check
from eval.reporting.fields import SCHEMA, Report, checked

Table = Sequence[PromptSums]


def build_report(run: RunLog, drafts: Sequence[DraftLog]) -> Report:
    """The checked report of a run.

    Raises UserError for a log that contradicts itself, `ReportError` if the result is not a valid
    report.
    """
    tables = {
        draft.name: prompt_table(
            draft.runs,
            draft.baseline,
            draft.agreement or (),
            "tau" not in draft.missing,
            draft.again,
        )
        for draft in drafts
    }
    logs = {draft.name: draft for draft in drafts}
    fields = {
        **run.about,
        "schema": SCHEMA,
        "baseline": {
            "tokens_per_s": measured(
                metrics.BASELINE_TOKENS_PER_S, tables[drafts[0].name], drafts[0].started
            ),
            "over_stock_generate": run.over_stock_generate,
        },
        "answers": described(run.answers),
        "drafts": {draft.name: _draft_block(draft, tables[draft.name], run) for draft in drafts},
        "gain": [
            _gain(logs[draft], logs[over], tables[draft], tables[over])
            for draft, over in compared(drafts)
            # no gain without the same prompts: a server that failed decoded fewer
            if {row.id for row in tables[draft]} == {row.id for row in tables[over]}
        ],
    }
    return checked(fields)


def _gain(log: DraftLog, rival: DraftLog, table: Table, over: Table) -> dict[str, Any]:
    """The fields of a `Gain` of a draft over a rival."""
    gain: dict[str, Any] = {"draft": log.name, "over": rival.name}
    started = max(filter(None, (log.started, rival.started)), default=None)
    for number in metrics.COMPARED:
        gain[number.name] = metrics.difference(number, table, over, started)
    if log.costs and rival.costs:
        mine, other = map(metrics.predicted_with_prefill, (log.costs, rival.costs))
        gain[mine.name] = metrics.difference(mine, table, over, rival=other)
    return gain


def compared(drafts: Sequence[DraftLog]) -> list[tuple[str, str]]:
    """Pairs of names: a draft, and the draft that it is compared with.

    Each model is compared with the first model (a distilled draft with the base draft), then every
    draft with n-gram speculation alone. If drafts were measured at several draft lengths, those of
    the same length are compared; else with the next longer one, or the longest.
    """
    models = [draft for draft in drafts if not draft.path.startswith((LOOKUP, LOOKUP_FIRST))]
    first = [draft for draft in models if draft.path == models[0].path]
    ngram = [draft for draft in drafts if draft.path == LOOKUP]
    pairs = []
    for contenders, rivals in ((models, first), (drafts, ngram)):
        for draft in contenders if rivals else ():
            longer = [r for r in rivals if (r.gamma or 0) >= (draft.gamma or 0)]
            rival = min(longer, key=lambda r: r.gamma or 0, default=rivals[-1])
            at_another_length = draft.path == rival.path and draft.gamma != rival.gamma
            if draft is not rival and not at_another_length:
                pairs.append((draft.name, rival.name))
    return pairs


def _draft_block(log: DraftLog, table: Table, run: RunLog) -> dict[str, Any]:
    """The fields of a `DraftReport`; a field without data is null and has a reason in `missing`."""
    missing, block = dict(log.missing), dict[str, Any]()
    for field, number in _numbers(log, table, run).items():
        if field not in missing:
            try:
                block[field] = number()
            except NothingToMeasure as reason:
                missing[field] = str(reason)
    return {
        **dict.fromkeys(missing),
        **block,
        **log.about,
        "sha256": weights_sha256(Path(log.path.removeprefix(LOOKUP_FIRST))),
        "missing": [{"field": field, "reason": reason} for field, reason in missing.items()],
        "per_prompt": table,
    }


def _numbers(log: DraftLog, table: Table, run: RunLog) -> dict[str, Callable[[], Any]]:
    """A function for each field of a `DraftReport` that is computed.

    A new number needs a `Number` in eval/measuring/metrics.py, a field in fields.py, a line here
    and a row in tables.py.
    """
    numbers: dict[str, Callable[[], Any]] = {
        "tau": lambda: measured(metrics.MEAN_ACCEPTANCE_LENGTH, table),
        "mean_drafted": lambda: measured(metrics.MEAN_DRAFTED, table).mean,
        "accepted_over_drafted": lambda: measured(metrics.ACCEPTED_OVER_DRAFTED, table),
        "per_position": lambda: metrics.per_position(table),
        "speedup": lambda: measured(metrics.SPEEDUP, table, log.started),
        "tokens_per_s": lambda: Both(
            baseline=measured(metrics.BASELINE_TOKENS_PER_S, table, log.started),
            speculative=measured(metrics.TOKENS_PER_S, table, log.started),
        ),
        "ttft_ms": lambda: Both(
            baseline=measured(metrics.BASELINE_TTFT_MS, table, log.started),
            speculative=measured(metrics.TTFT_MS, table, log.started),
        ),
        "itl_ms": lambda: Both(
            baseline=metrics.itl_ms([*log.baseline, *(base for base, _ in log.again)]),
            speculative=metrics.itl_ms([*log.runs, *(run for _, run in log.again)]),
        ),
        "by_category": lambda: metrics.by_category(table, log.started),
    }
    if log.agreement is not None:
        numbers["alpha"] = lambda: measured(metrics.ACCEPTANCE_RATE, table)
    if (costs := log.costs) is not None:
        numbers |= {
            "costs": lambda: costs,
            "c": lambda: metrics.cost_ratio(costs),
            "verify_ratio": lambda: (
                float(costs.verify(measured(metrics.MEAN_DRAFTED, table).mean + 1.0))
                / costs.target_step_ms
            ),
            "predicted_speedup": lambda: measured(metrics.predicted_speedup(costs), table),
            "predicted_with_prefill": lambda: measured(
                metrics.predicted_with_prefill(costs), table
            ),
            "decode_efficiency": lambda: measured(metrics.decode_efficiency(costs), table),
            "payoff": lambda: _payoff(log, costs, table),
        }
    if run.about["decoding"]["temperature"]:
        numbers["sampled_check"] = lambda: sampled_check(table)
    return numbers


def _payoff(log: DraftLog, costs: StepCosts, table: Table) -> Payoff:
    if log.path.startswith((LOOKUP, LOOKUP_FIRST)):
        raise NothingToMeasure(
            "break-even is not computed for n-gram drafts: their cost per token is not constant"
        )
    accepted = [entry.marginal.mean for entry in metrics.per_position(table)]
    return payoff(costs, accepted, measured(metrics.SPEEDUP, table).bounds)
