"""The report of an evaluation: report.json (draftsmith-report/1), report.md, report.html.

The models say which fields a report has, what they mean and what must hold between them. Those of
a measured part stand where it is measured (eval/measuring/); the whole is here, and how it is
filled from the raw log. docs/metrics.md has the long definitions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import Field, JsonValue, ValidationError, computed_field, model_validator

from align.files import atomic_file
from align.sources import abridged
from eval.decoding.drafters.lookup import LOOKUP, LOOKUP_FIRST
from eval.decoding.prompt_run import PromptRun
from eval.decoding.target import weights_sha256
from eval.measuring import metrics
from eval.measuring.answer_quality import (
    COPY_CATEGORIES,
    Answers,
    copy_categories,
    described,
)
from eval.measuring.atlas import Atlas, build_atlas, telling_prompts
from eval.measuring.cost import Payoff, payoff
from eval.measuring.intervals import (
    Both,
    Count,
    Measured,
    NothingToMeasure,
    Part,
    Positive,
    Quantity,
    Share,
    TokensPerCall,
)
from eval.measuring.losslessness import Ledger
from eval.measuring.metrics import (
    CategoryNumbers,
    Costs,
    Latency,
    Memory,
    PositionAcceptance,
    agreed,
    blocks,
    timed,
)
from eval.measuring.runs import Agreement, DraftLog, RunLog, check_runs
from eval.reporting.warnings import find_warnings, headline, recommendation

SCHEMA: Final = "draftsmith-report/1"
SHOWN_ERRORS = 3

T = TypeVar("T")


class ReportError(ValueError):
    """A report that lacks a field, holds a value that is no number, or contradicts itself."""


class Vocabulary(Part):
    """How the draft's vocabulary relates to the target's, and what is done about it."""

    relation: str
    strategy: str
    coverage: float | None


class LoadPoint(Part):
    """Served with so many requests at a time; a round is what varies, n the number of rounds."""

    concurrency: Positive
    requests: Positive
    tokens_per_s: Both[Measured] = Field(description="of all requests together")
    speedup: Measured = Field(description="of these tokens/s")
    itl_ms: Both[Latency]
    mean_acceptance_length: Measured | None = Field(description="null: it has no counters")


class Counters(Part):
    """A server's own counters, by its own definitions."""

    num_drafts: Count
    num_draft_tokens: Count
    num_accepted_tokens: Count
    mean_acceptance_length: Measured
    acceptance_rate: Measured
    acceptance_per_position: list[float]
    per_position: list[Share] = Field(default=[], description="the same, with its intervals")
    by_category: dict[str, Measured] = Field(default={}, description="mean_acceptance_length")


class Missing(Part):
    """A field that could not be measured, and why."""

    field: str
    reason: str


# Left out where it was not measured
Sum = Annotated[int | None, Field(ge=0, exclude_if=lambda value: value is None)]
Amount = Annotated[float | None, Field(exclude_if=lambda value: value is None)]


class PromptSums(Part):
    """The sums that all means are made from."""

    id: str
    category: str | None
    group: Annotated[str | None, Field(exclude_if=lambda value: value is None)] = None
    alpha_sum: Amount = None
    positions: Sum = None
    prompt_tokens: Sum = None
    tokens: Sum = None
    seconds: Amount = None
    baseline_tokens: Sum = None
    baseline_seconds: Amount = None
    calls: Annotated[Sum, Field(description="target calls of the decode phase")] = None
    blocks: Annotated[Sum, Field(description="of these, the whole ones; so below")] = None
    block_tokens: Sum = None
    drafted: Sum = None
    accepted: Sum = None


class DraftReport(Part):
    """One draft. A number is null only where `missing` gives the reason."""

    path: str
    sha256: str | None = Field(
        default=None, description="of the weights measured; null: they are no files here"
    )
    form: str
    vocabulary: Vocabulary
    gamma: Count | None = Field(description="draft length chosen for it; null: a server's own")
    gamma_policy: str = Field(description="how a block's draft length is found")
    alpha: Share | None = Field(
        description="mean over positions of sum_x min(p, q) on text the target generated, "
        "teacher-forced; at temperature 0, how often the two argmaxes agree. Does not depend on "
        "gamma."
    )
    tau: TokensPerCall | None = Field(
        description="tokens emitted per target call in the decode phase: with the bonus token, "
        "without the prefill token and a last block that the length limit cut."
    )
    mean_drafted: Quantity | None = Field(description="tokens per target call")
    drafted_calls: Share | None = Field(description="share of target calls that verify any token")
    accepted_over_drafted: Share | None = Field(
        description="share of drafted tokens that verification accepted, over the blocks of tau. "
        "Falls as gamma grows."
    )
    per_position: Annotated[list[PositionAcceptance], Field(min_length=1)] | None
    costs: Costs | None
    c: Quantity | None = Field(description="seconds of one draft step / of one target step.")
    verify_ratio: Quantity | None = Field(
        description="time of a call on gamma + 1 tokens / on one."
    )
    predicted_speedup: Measured | None = Field(
        description="tau * t_target(1) / (gamma * t_draft + t_target(gamma + 1)) from isolated "
        "forwards, gamma the mean drafted length. Its interval is over prompts; that of the "
        "step costs stands in costs.ci95."
    )
    speedup: Measured = Field(
        description="wall seconds per emitted token without a draft / with it; prefill in; same "
        "target, engine, dtype and run, prompt by prompt, or in halves one server at a time."
    )
    decode_speedup: Measured | None = Field(description="over the blocks of tau, prefill out")
    decode_efficiency: Measured | None = Field(
        description="decode-phase speed-up / predicted speed-up; 1: no overhead beyond the models."
    )
    tokens_per_s: Both[Measured] = Field(description="emitted tokens / seconds, prefill in")
    ttft_ms: Both[Measured] = Field(description="time to the first token.")
    itl_ms: Both[Latency] = Field(description="between tokens, a block's time spread over its own.")
    loop_share: Both[Share] | None = Field(
        description="share of emitted tokens in a pattern of at most 64 tokens that repeats at "
        "least 3 times over at least 8 tokens."
    )
    memory: Memory | None
    payoff: Payoff | None
    by_load: list[LoadPoint] = Field(default=[], description="where loads were asked for")
    lossless: Ledger
    by_category: dict[str, CategoryNumbers]
    by_copy_share: dict[str, CategoryNumbers] = Field(
        default={}, description="by how much of the target's answer is copied"
    )
    by_context: dict[str, CategoryNumbers] = Field(
        default={}, description="by how many tokens the prompt has"
    )
    atlas: Atlas | None
    counters: Counters | None = Field(description="of a server")
    missing: list[Missing]
    per_prompt: list[PromptSums]

    @property
    def agreements(self) -> list[Agreement]:
        """The sums of alpha by prompt, of prompts that it was taken on."""
        return [
            Agreement(row.id, row.category, row.alpha_sum, row.positions, group=row.group)
            for row in self.per_prompt
            if row.alpha_sum is not None and row.positions is not None
        ]

    @model_validator(mode="after")
    def _null_has_a_reason(self) -> Self:
        explained = {"sha256", "gamma", "counters"}
        explained |= {entry.field for entry in self.missing}
        for name in type(self).model_fields:
            if getattr(self, name) is None and name not in explained:
                raise ValueError(f"{name} is null, and `missing` does not say why")
        return self

    @model_validator(mode="after")
    def _speedup_is_that_of_the_rates(self) -> Self:
        with_it, without = self.tokens_per_s.speculative.mean, self.tokens_per_s.baseline.mean
        if not math.isclose(with_it, self.speedup.mean * without, rel_tol=1e-6):
            raise ValueError(
                f"speedup is {self.speedup.mean}, but its tokens_per_s give {with_it} / {without}"
            )
        return self


def _numbers(log: DraftLog, run: RunLog, shown: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Each field above that is made from the logs of the draft and of its run.

    A new number is a function in eval/measuring/metrics.py, a field with its line here, and a row
    in tables.py. shown: the prompts of the atlas' heat map.
    """
    return {
        "alpha": lambda: metrics.alpha(agreed(log)),
        "tau": lambda: metrics.tau(blocks(log)),
        "mean_drafted": lambda: metrics.mean_drafted(blocks(log)),
        "drafted_calls": lambda: metrics.drafted_calls(blocks(log)),
        "accepted_over_drafted": lambda: metrics.accepted_over_drafted(blocks(log)),
        "per_position": lambda: metrics.per_position(blocks(log)),
        "costs": lambda: Costs.of(timed(log), log.runs),
        "c": lambda: metrics.c(timed(log)),
        "verify_ratio": lambda: metrics.verify_ratio(timed(log), metrics.mean_drafted(blocks(log))),
        "predicted_speedup": lambda: metrics.predicted_speedup(blocks(log), timed(log)),
        "speedup": lambda: metrics.speedup(log.runs, log.baseline),
        "decode_speedup": lambda: metrics.decode_speedup(blocks(log), log.baseline),
        "decode_efficiency": lambda: metrics.decode_efficiency(
            blocks(log), log.baseline, timed(log)
        ),
        "tokens_per_s": lambda: _both(metrics.tokens_per_s, log),
        "ttft_ms": lambda: _both(metrics.ttft_ms, log),
        "itl_ms": lambda: _both(metrics.itl_ms, log),
        "loop_share": lambda: _both(metrics.loop_share, log),
        "memory": lambda: metrics.memory(log),
        "payoff": lambda: _payoff(log),
        "by_category": lambda: metrics.by_category(log, lambda row: row.category),
        "by_copy_share": lambda: _by_copy_share(log, run),
        "by_context": lambda: metrics.by_context(log),
        "atlas": lambda: build_atlas(agreed(log), run, timed(log), shown),
    }


# Fields that are in the draft's log as they are.
COPIED = ("path form vocabulary gamma gamma_policy by_load lossless counters").split()


def _payoff(log: DraftLog) -> Payoff:
    if log.path.startswith((LOOKUP, LOOKUP_FIRST)):
        raise NothingToMeasure(
            "tokens that are looked up cost nothing, so the cost of a step does not price this "
            "draft; the predicted speed-up takes them as free"
        )
    return payoff(timed(log), metrics.alpha(agreed(log)).mean)


def _by_copy_share(log: DraftLog, run: RunLog) -> dict[str, CategoryNumbers]:
    shares = copy_categories(run.answers)
    return metrics.by_category(log, lambda row: shares.get(row.prompt_id), COPY_CATEGORIES)


def _both(metric: Callable[[Sequence[PromptRun]], T], log: DraftLog) -> Both[T]:
    """A metric of the runs without a draft and with it."""
    return Both(baseline=metric(log.baseline), speculative=metric(log.runs))


class Gain(Part):
    """What a draft has more than another, on the same prompts."""

    draft: str
    over: str
    alpha: Measured | None
    tau: Measured | None
    speedup: Measured


class Baseline(Part):
    """The target without a draft."""

    tokens_per_s: Measured
    over_stock_generate: Measured | None = Field(description="tokens/s over stock `generate`'s")


class DecodingSetting(Part):
    """How texts were decoded."""

    temperature: Quantity
    top_k: Count | None
    top_p: float
    max_new_tokens: Count
    gamma: Count | None = Field(description="the last draft's")
    gamma_policy: str
    verification: str
    stop_tokens: Count | None = Field(description="0: the end is ignored; null: a server knows")
    ended_by_stop: float = Field(ge=0, le=1, description="share of the baseline's answers")


class PromptsUsed(Part):
    """The evaluation prompts."""

    source: str
    n: Count
    sha256: str
    overlap_with_training: float | None
    bits_per_token: float | None = Field(description="the target's mean surprise at a token")
    random_bits: float | None = Field(description="log2 of the vocabulary: of a random token")
    in_chat_form: float = Field(0, ge=0, le=1, description="share asked as messages")
    chat_template_kwargs: list[dict[str, JsonValue]] = Field([], description="of the messages")
    chat_template: bool | None = Field(None, description="whether the target has one")


class HeldOutPoint(Part):
    """The draft on prompts held out of training, at some step of it."""

    step: Count = Field(description="0: before training")
    tokens: Count = Field(description="different tokens that it was trained on until then")
    alpha: Share
    tau: float = Field(ge=1, description="simulated: a chain of `gamma` drafted tokens")
    kept: bool = Field(description="these weights became the draft")


class HeldOutCurve(Part):
    """alpha while the draft was trained, on prompts held out of training."""

    gamma: Positive = Field(description="of the simulated tau")
    points: Annotated[list[HeldOutPoint], Field(min_length=1)]


class Report(Part):
    """What an evaluation of speculative decoding found. docs/metrics.md defines every number."""

    schema_name: Annotated[Literal["draftsmith-report/1"], Field(alias="schema")]
    target: str
    target_quantization: str | None = Field(
        None, description="of the GGUF file that the target's weights come from, e.g. Q4_0"
    )
    engine: str
    device: str
    dtype: str
    baseline: Baseline
    decoding: DecodingSetting
    prompts: PromptsUsed
    answers: Answers | None = Field(None, description="null: they are not known in token ids")
    drafts: dict[str, DraftReport] = Field(min_length=1, description="by name")
    gain: list[Gain] = Field(description="difference to the draft named, on the same prompts.")
    provenance: dict[str, JsonValue]
    held_out: HeldOutCurve | None = Field(
        None, description="null: no prompts were held out, or no training was followed"
    )

    @computed_field  # type: ignore[prop-decorator]
    @property
    def warnings(self) -> list[str]:
        """What to know before quoting a number; a draft that is not lossless is named first."""
        return find_warnings(self)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def headline(self) -> str:
        """One sentence on the last draft (the tuned one of a training run)."""
        return headline(self)

    @property
    def recommendation(self) -> str:
        """What to serve, in one sentence."""
        return recommendation(self)

    @property
    def target_named(self) -> str:
        """The target without its file's checksum, and how the file is quantised where it is."""
        quantised = self.target_quantization
        target = abridged(self.target).partition("#")[0]
        return f"{target} (GGUF {quantised})" if quantised else target

    @property
    def last(self) -> tuple[str, DraftReport]:
        """The draft that the headline is about."""
        return list(self.drafts.items())[-1]

    @property
    def tuned(self) -> tuple[str, DraftReport]:
        """The draft that is published: a training run's tuned one by itself, else the last."""
        return ("tuned", self.drafts["tuned"]) if "tuned" in self.drafts else self.last

    @property
    def gamma_by_load(self) -> dict[str, list[tuple[int, int, int]]]:
        """Rows (first load, last load, draft length) by each draft's path, as vLLM takes them.

        They are its num_speculative_tokens_per_batch_size: the length whose gain is the surest,
        where one is shown, all of the interval or of the rounds above 1x; else none. A measured
        load stands for all up to the next one.
        """
        at_load: dict[str, dict[int, list[tuple[float, int]]]] = {}
        for draft in self.drafts.values():
            for point in draft.by_load if draft.gamma else ():
                gains = at_load.setdefault(draft.path, {})
                surest = (point.speedup.ci95 or point.speedup.range or (0.0,))[0]
                gains.setdefault(point.concurrency, [(1.0, 0)]).append((surest, draft.gamma or 0))
        schedules: dict[str, list[tuple[int, int, int]]] = {}
        for path, gains in at_load.items():
            rows = schedules[path] = []
            ends = [load - 1 for load in list(gains)[1:]] + list(gains)[-1:]
            for last, (_, length) in zip(ends, map(max, gains.values()), strict=True):
                first = rows[-1][1] + 1 if rows else 1
                if rows and rows[-1][2] == length:
                    first = rows.pop()[0]
                rows.append((first, last, length))
        return schedules

    def ledgers(self) -> list[tuple[str, Ledger]]:
        """Those of all drafts, by what to call them."""
        return [(name, draft.lossless) for name, draft in self.drafts.items()]

    @model_validator(mode="after")
    def _gains_are_differences(self) -> Self:
        for i, entry in enumerate(self.gain):
            for name in (entry.draft, entry.over):
                if name not in self.drafts:
                    raise ValueError(f"gain[{i}] compares with {name!r}, which is no draft of it")
            for field in ("alpha", "tau", "speedup"):
                gained = getattr(entry, field)
                mine, other = (getattr(self.drafts[n], field) for n in (entry.draft, entry.over))
                # a gain may rest on fewer prompts than either side's own number
                if not (gained and mine and other and mine.n == other.n == gained.n):
                    continue
                apart = mine.mean - other.mean
                if not math.isclose(gained.mean, apart, rel_tol=1e-6, abs_tol=1e-9):
                    raise ValueError(
                        f"gain[{i}].{field} is {gained.mean}, but the drafts' own numbers are "
                        f"{apart} apart"
                    )
        return self


# --- From the raw logs, which every engine fills alike ---


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
    models = [draft for draft in drafts if not draft.path.startswith((LOOKUP, LOOKUP_FIRST))]
    behind = [draft for draft in drafts if draft.path.startswith(LOOKUP_FIRST)]
    alone = next((draft for draft in drafts if draft.path == LOOKUP), None)
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


# --- Files ---


def report_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a report.json."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Report.model_json_schema(mode="serialization"),
        "title": SCHEMA,
    }


def checked(value: Any) -> Report:
    """The value as a report. Raises `ReportError`, naming the fields and what is wrong."""
    try:
        return Report.model_validate(value)
    except ValidationError as error:
        raise ReportError(_problems(error)) from None


def _problems(error: ValidationError) -> str:
    """The first problems, each with the place of its field."""
    lines = []
    for problem in error.errors(include_url=False):
        place = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in problem["loc"])
        line = f"report{place}: {problem['msg'].removeprefix('Value error, ')}"
        if isinstance(problem["input"], str | int | float | None):
            line += f", not {problem['input']!r:.80}"
        lines.append(line)
    more = len(lines) - SHOWN_ERRORS
    return "; ".join(lines[:SHOWN_ERRORS]) + (f"; and {more} more" if more > 0 else "")


def write_report(folder: Path | str, report: Report) -> None:
    """Check the report and write report.json, .md and .html into `folder`, each atomically."""
    # here, not above: they show the models of this module
    from eval.reporting.page import render_page
    from eval.reporting.text import render_markdown

    report = checked(report)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_file(folder / "report.md") as file:
        file.write(render_markdown(report))
    with atomic_file(folder / "report.html") as file:
        file.write(render_page(report))
    with atomic_file(folder / "report.json") as file:
        json.dump(report.model_dump(mode="json"), file, indent=2, allow_nan=False)
        file.write("\n")


def read_report(path: Path | str) -> Report:
    """A checked report from a report.json. Raises `ReportError` where it is absent or broken."""
    path = Path(path)
    try:
        return Report.model_validate_json(path.read_text(encoding="utf-8"), strict=True)
    except FileNotFoundError:
        raise ReportError(f"no report at {path}: run the evaluation to its end first") from None
    except ValidationError as error:
        if error.errors()[0]["type"] == "json_invalid":
            raise ReportError(
                f"{path} is not whole JSON ({error.errors()[0]['msg']}): evaluate again"
            ) from None
        raise ReportError(f"{path}: {_problems(error)}") from None
