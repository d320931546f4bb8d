"""From the raw logs of an evaluation to its report. Every engine fills the same logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from eval.decoding.prompt_run import PromptRun
from eval.decoding.target import weights_sha256
from eval.measuring import metrics
from eval.measuring.atlas import build_atlas, telling_prompts
from eval.measuring.copy_share import COPY_CATEGORIES, copy_categories, described
from eval.measuring.cost import Payoff, payoff
from eval.measuring.intervals import Both, NothingToMeasure
from eval.measuring.metrics import CategoryNumbers, Costs, agreed, blocks, timed
from eval.measuring.runs import DraftLog, RunLog, check_runs
from eval.reporting.fields import NGRAM, NGRAM_FIRST, SCHEMA, Report, ReportError, checked

# Fields that are in the draft's log as they are.
COPIED = ("path form vocabulary gamma gamma_policy by_load lossless counters").split()

T = TypeVar("T")


def build_report(run: RunLog, drafts: Sequence[DraftLog]) -> Report:
    """The whole report, checked.

    `gain` compares the `rivals`. Raises ValueError for a log that contradicts itself,
    `ReportError` where the result is not a valid report.
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
        "answers": described(run),
        "environment": run.environment,
        "drafts": {draft.name: _draft_block(draft, run, shown) for draft in drafts},
        "gain": [
            metrics.gain(draft, over)
            for draft, over in rivals(drafts)
            # a server that failed has decoded fewer prompts
            if {run.prompt_id for run in draft.runs} == {run.prompt_id for run in over.runs}
        ],
        "provenance": run.provenance,
    }
    return checked(fields)


def rivals(drafts: Sequence[DraftLog]) -> list[tuple[DraftLog, DraftLog]]:
    """Each draft with the one that shows what it adds.

    A model with the first model: in a training run, tuned with untuned. A draft behind prompt
    lookup with lookup alone, which costs nothing to make, and so a lone model.
    """
    models = [draft for draft in drafts if not draft.path.startswith((NGRAM, NGRAM_FIRST))]
    behind = [draft for draft in drafts if draft.path.startswith(NGRAM_FIRST)]
    alone = next((draft for draft in drafts if draft.path == NGRAM), None)
    if len(models) == 1 and alone is not None:
        behind = models + behind
    over = alone or (models or behind)[0]
    pairs = [(draft, models[0]) for draft in models[1:]]
    return pairs + [(draft, over) for draft in behind if draft is not over]


def _draft_block(log: DraftLog, run: RunLog, shown: Sequence[str]) -> dict[str, Any]:
    """The fields of a `DraftReport`; null where the log holds nothing to measure them on."""
    for runs in (log.runs, log.baseline):
        check_runs(runs, blocks="tau" not in log.missing)
    missing = dict(log.missing)
    block: dict[str, Any] = {field: getattr(log, field) for field in COPIED}
    for field, number in _numbers(log, run, shown).items():
        block[field] = None
        if field not in missing:
            try:
                block[field] = number()
            except NothingToMeasure as reason:
                missing[field] = str(reason)
    return block | {
        "sha256": weights_sha256(log.path),
        "missing": [{"field": field, "reason": reason} for field, reason in missing.items()],
        "per_prompt": _per_prompt(log),
    }


def _per_prompt(log: DraftLog) -> list[dict[str, Any]]:
    """The sums that every mean and interval above is made from, one row a prompt.

    The run's part is absent for prompts that only alpha was taken on.
    """
    rows: dict[str, dict[str, Any]] = {
        a.prompt_id: {
            "id": a.prompt_id,
            "category": a.category,
            "group": a.group,
            "prompt_tokens": a.prompt_tokens,
            "alpha_sum": a.alpha_sum,
            "positions": a.positions,
        }
        for a in log.agreement or []
    }
    for run, base in metrics.pair(log.runs, log.baseline):
        row = rows.setdefault(run.prompt_id, {"id": run.prompt_id})
        row |= {
            "category": run.category,
            "group": run.group,
            "prompt_tokens": run.prompt_tokens,
            "tokens": len(run.tokens),
            "seconds": run.seconds,
            "baseline_tokens": len(base.tokens),
            "baseline_seconds": base.seconds,
        }
        if "tau" not in log.missing:
            whole = run.whole_blocks
            row |= {
                "calls": len(run.block_tokens),
                "blocks": whole,
                "block_tokens": sum(run.block_tokens[:whole]),
                "drafted": sum(run.drafted[:whole]),
                "accepted": sum(run.accepted[:whole]),
            }
    return list(rows.values())


def _numbers(log: DraftLog, run: RunLog, shown: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Each field of a `DraftReport` that is computed from the logs of the draft and of its run.

    A new number is a function in eval/measuring/metrics.py, a field in fields.py, its line here,
    and a row in tables.py. shown: the prompts of the atlas' heat map.
    """
    return {
        "alpha": lambda: metrics.alpha(agreed(log)),
        "tau": lambda: metrics.tau(blocks(log)),
        "mean_drafted": lambda: metrics.mean_drafted(blocks(log)),
        "accepted_over_drafted": lambda: metrics.accepted_over_drafted(blocks(log)),
        "per_position": lambda: metrics.per_position(blocks(log)),
        "costs": lambda: Costs.of(timed(log), log.runs),
        "c": lambda: metrics.c(timed(log)),
        "verify_ratio": lambda: metrics.verify_ratio(timed(log), metrics.mean_drafted(blocks(log))),
        "predicted_speedup": lambda: metrics.predicted_speedup(blocks(log), timed(log)),
        "speedup": lambda: metrics.speedup(log.runs, log.baseline),
        "decode_efficiency": lambda: metrics.decode_efficiency(
            blocks(log), log.baseline, timed(log)
        ),
        "tokens_per_s": lambda: _both(metrics.tokens_per_s, log),
        "ttft_ms": lambda: _both(metrics.ttft_ms, log),
        "itl_ms": lambda: _both(metrics.itl_ms, log),
        "memory": lambda: metrics.memory(log),
        "payoff": lambda: _payoff(log),
        "by_category": lambda: metrics.by_category(log, lambda row: row.category),
        "by_copy_share": lambda: _by_copy_share(log, run),
        "by_context": lambda: metrics.by_context(log),
        "atlas": lambda: build_atlas(agreed(log), run, shown),
    }


def _payoff(log: DraftLog) -> Payoff:
    if log.path.startswith((NGRAM, NGRAM_FIRST)):
        raise NothingToMeasure(
            "break-even is not computed for n-gram drafts: their cost per token is not constant"
        )
    block = payoff(timed(log), metrics.alpha(agreed(log)).mean)
    low, high = metrics.speedup(log.runs, log.baseline).bounds
    return block.model_copy(update={"verdict": "inconclusive"}) if low <= 1 <= high else block


def _by_copy_share(log: DraftLog, run: RunLog) -> dict[str, CategoryNumbers]:
    shares = copy_categories(run.answers)
    return metrics.by_category(log, lambda row: shares.get(row.prompt_id), COPY_CATEGORIES)


def _both(metric: Callable[[Sequence[PromptRun]], T], log: DraftLog) -> Both[T]:
    """A metric of the runs without a draft and with it."""
    return Both(baseline=metric(log.baseline), speculative=metric(log.runs))
