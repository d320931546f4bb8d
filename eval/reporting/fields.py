"""The fields of report.json (schema draftsmith-report/1): what they mean, what must hold of them.

The models of a measured quantity stand where it is measured (eval/measuring/); the whole report is
here. Reading a report needs no torch. docs/metrics.md has the long definitions.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from align.sources import abridged
from eval.measuring.atlas import Atlas
from eval.measuring.copy_share import Answers
from eval.measuring.cost import Payoff
from eval.measuring.intervals import (
    Both,
    Count,
    Measured,
    Part,
    Positive,
    Quantity,
    Share,
)
from eval.measuring.metrics import (
    CategoryNumbers,
    Costs,
    Latency,
    Memory,
    PositionAcceptance,
)
from eval.measuring.output_check import Ledger
from eval.measuring.runs import Agreement

SCHEMA: Final = "draftsmith-report/1"
SHOWN_ERRORS = 3
REFERENCE = "torch"  # the engine's name of our reference decoder
# Paths of drafts without a model of their own (eval/decoding/drafters/lookup.py)
NGRAM, NGRAM_FIRST = "prompt-lookup", "lookup-first:"


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
    tau: Measured | None = Field(
        description="tokens emitted per target call in the decode phase: with the bonus token, "
        "without the prefill token and a last block that the length limit cut."
    )
    mean_drafted: Quantity | None = Field(description="tokens per target call")
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
    decode_efficiency: Measured | None = Field(
        description="decode-phase speed-up / predicted speed-up; 1: no overhead beyond the models."
    )
    tokens_per_s: Both[Measured] = Field(description="emitted tokens / seconds, prefill in")
    ttft_ms: Both[Measured] = Field(description="time to the first token.")
    itl_ms: Both[Latency] = Field(description="between tokens, a block's time spread over its own.")
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
    def serves_alone(self) -> bool:
        """Whether an engine can serve it: n-gram speculation before a draft is ours alone."""
        return not self.path.startswith(NGRAM_FIRST)

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


class Environment(Part):
    """The machine and the engine; null where it is not known."""

    engine: str
    engine_version: str | None
    hardware: str | None = Field(description="model name of the GPU, or of the CPU")
    cores: Positive | None = Field(description="CPU cores that the process may use")
    threads: Positive | None = Field(description="that compute, on a CPU")
    date: str = Field(description="start of the evaluation, ISO 8601 in UTC")
    load_average: Quantity | None = Field(description="over one minute, at the start")
    server_arguments: list[str] | None


class HeldOutPoint(Part):
    """The draft on prompts held out of training, at some step of it."""

    step: Count = Field(description="0: before training")
    tokens: Count = Field(description="different tokens that it was trained on until then")
    alpha: Share
    kept: bool = Field(description="these weights became the draft")


class HeldOutCurve(Part):
    """alpha while the draft was trained, on prompts held out of training."""

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
    environment: Environment | None = None
    drafts: dict[str, DraftReport] = Field(min_length=1, description="by name")
    gain: list[Gain] = Field(description="difference to the draft named, on the same prompts.")
    provenance: dict[str, JsonValue]
    held_out: HeldOutCurve | None = Field(
        None, description="null: no prompts were held out, or no training was followed"
    )

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
