"""The fields of report.json (schema draftsmith-report/1), their meaning and their checks.

The pydantic models of measured quantities are in eval/measuring/. Reading a report needs no torch.
docs/report.md has the long definitions.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from align.errors import UserError, abridged
from eval.decoding.drafters import LOOKUP_FIRST
from eval.measuring.copy_share import TargetOutputs
from eval.measuring.cost import Payoff, StepCosts
from eval.measuring.intervals import Both, Count, Measured, Part, Positive, Quantity, Share, Starts
from eval.measuring.metrics import (
    CategoryNumbers,
    Memory,
    Percentiles,
    PositionAcceptance,
    PromptSums,
)
from eval.measuring.output_check import Ledger
from eval.measuring.sampled_check import FALSE_ALARMS, SampledCheck

SCHEMA: Final = "draftsmith-report/1"
REFERENCE = "torch"  # the reference decoder's engine name


def name_and_length(name: str) -> tuple[str, str]:
    """A draft's name without its draft length, and this length, or ""."""
    base, _, length = name.partition(", gamma ")
    return base, length


class ReportError(UserError):
    """A report that cannot be read, lacks a field, has a wrong value, or contradicts itself."""


class Vocabulary(Part):
    """How the draft's vocabulary relates to the target's, and how it is mapped."""

    relation: str
    strategy: str
    coverage: float | None


class Goodput(Part):
    """Requests per second within all limits, named as in `vllm bench serve --goodput`."""

    limits_ms: dict[str, Quantity]
    requests_per_s: Both[Quantity]


class Load(NamedTuple):
    """A steady load: new requests per second, or requests in flight; the other number is 0.

    Loads sort by their size.
    """

    rate: float = 0
    concurrency: int = 0

    def __str__(self) -> str:
        if self.rate:
            return f"{self.rate:g} requests/s"
        return f"{self.concurrency} request{'s' * (self.concurrency > 1)} at a time"


ONE_AT_A_TIME = Load(0, 1)
FEWEST_OF_P99 = 100  # requests; of fewer the 99th percentile is the slowest one


class LoadPoint(Part):
    """A draft at one steady load. Intervals are over batches of requests; n counts the batches."""

    concurrency: Positive | None = Field(description="requests in flight; null: at a rate")
    request_rate: Quantity | None = Field(None, description="new requests per second")
    requests: Positive = Field(description="that count, of each server")
    in_flight: Both[Quantity] | None = Field(None, description="requests, mean over the time")
    requests_per_s: Both[Quantity] | None = Field(None, description="completed")
    tokens_per_s: Both[Measured] = Field(description="of completed requests, together")
    speedup: Measured = Field(
        description="seconds per token of a request without a draft / with it"
    )
    ttft_ms: Both[Percentiles] | None = None
    itl_ms: Both[Percentiles] | None = Field(description="null: no output has a second token")
    e2e_ms: Both[Percentiles] | None = Field(None, description="of whole requests")
    goodput: Goodput | None = Field(None, description="null: no limits were given")
    mean_acceptance_length: Measured | None = Field(description="null: the server has no counters")

    @property
    def load(self) -> Load:
        """The load of this point."""
        return Load(self.request_rate or 0, self.concurrency or 0)

    @property
    def at_once(self) -> int:
        """Requests in flight with the draft, rounded up."""
        return self.concurrency or (math.ceil(self.in_flight.speculative) if self.in_flight else 0)

    @property
    def tail(self) -> str:
        """The highest percentile that the number of requests supports."""
        return "p99" if self.requests >= FEWEST_OF_P99 else "p95"


class Overload(Part):
    """A request rate at which the number of requests in flight grows. It has no speed-up."""

    request_rate: Quantity = Field(description="new requests per second")
    servers: list[Literal["target", "draft"]] = Field(description="that are overloaded")
    requests_per_s: Both[Quantity] = Field(description="completed")
    tokens_per_s: Both[Quantity] = Field(description="of completed requests")

    @property
    def load(self) -> Load:
        """The rate as a load."""
        return Load(self.request_rate, 0)


class Counters(Part):
    """Counts of speculation by a server, as the server defines them."""

    num_drafts: Count
    num_draft_tokens: Count
    num_accepted_tokens: Count
    mean_acceptance_length: Measured = Field(description="steps without a draft do not count")
    tokens_per_step: Measured | None = Field(
        None,
        description="per target call after the prefill, over whole steps, with those without a "
        "draft; null: messages of the server have several steps",
    )
    acceptance_rate: Measured
    per_position: list[Share] = Field(description="share of drafts accepted up to a position")


class Missing(Part):
    """A field that could not be measured, and why."""

    field: str
    reason: str


class DraftReport(Part):
    """One draft. A number is null only where `missing` gives the reason."""

    path: str
    sha256: str | None = Field(
        default=None,
        description="of the weights measured (of a running server: as its user states them); null: "
        "there is no file of them",
    )
    form: str
    vocabulary: Vocabulary
    gamma: Count | None = Field(description="draft length chosen for it; null: not known")
    gamma_policy: str = Field(description="how the draft length was chosen")
    alpha: Share | None = Field(
        description="mean over positions of sum_x min(p, q) on text the target generated, "
        "teacher-forced; at temperature 0, how often the two argmaxes agree. Does not depend on "
        "gamma."
    )
    tau: Measured | None = Field(
        description="tokens emitted per target call in the decode phase: with the bonus token, "
        "without the prefill token and the last steps, which have no room for a whole draft."
    )
    mean_drafted: Quantity | None = Field(description="tokens per target call")
    accepted_over_drafted: Share | None = Field(
        description="share of drafted tokens that verification accepted, over whole steps. "
        "Falls as gamma grows."
    )
    per_position: Annotated[list[PositionAcceptance], Field(min_length=1)] | None
    costs: StepCosts | None
    c: Quantity | None = Field(description="seconds of one draft step / of one target step.")
    verify_ratio: Quantity | None = Field(
        description="time of a call on mean_drafted + 1 tokens / on one."
    )
    predicted_speedup: Measured | None = Field(
        description="tau * t_target(1) / (t_draft + t_target(mean_drafted + 1)) from isolated "
        "forwards, t_draft the time of mean_drafted tokens. The interval is over prompts; the "
        "forwards' times count as exact."
    )
    predicted_with_prefill: Measured | None = Field(
        None, description="the same for whole outputs, whose prefill no draft shortens."
    )
    speedup: Measured = Field(
        description="wall seconds per emitted token without a draft / with it, prefill included; "
        "same target, engine, dtype and run, prompt by prompt, or one server after another, each "
        "started again."
    )
    decode_efficiency: Measured | None = Field(
        description="decode-phase speed-up / predicted speed-up; 1: no overhead beyond the models."
    )
    tokens_per_s: Both[Measured] = Field(description="emitted tokens / seconds, prefill included")
    ttft_ms: Both[Measured] = Field(description="time to the first token.")
    itl_ms: Both[Percentiles] | None = Field(
        description="between tokens; a step's time is spread over its own."
    )
    memory: Memory | None
    payoff: Payoff | None
    by_load: list[LoadPoint] = Field(default=[], description="concurrency and request rates")
    overloads: list[Overload] = Field(default=[], description="request rates of an overload")
    serve: list[str] = Field(
        default=[], description="the command that serves it; empty: not measured in such a server"
    )
    context: Count | None = Field(
        None, description="most tokens of a text that its server takes, if fewer than the target's"
    )
    lossless: Ledger
    sampled_check: SampledCheck | None = Field(None, description="null: greedy, or not read")
    by_category: dict[str, CategoryNumbers]
    counters: Counters | None = Field(None, description="of a server")
    missing: list[Missing]
    per_prompt: list[PromptSums]

    @property
    def speedup_by_load(self) -> dict[Load, Measured]:
        """One request at a time is of the prompts."""
        by_load = {point.load: point.speedup for point in self.by_load}
        return dict(sorted((by_load | {ONE_AT_A_TIME: self.speedup}).items()))

    @property
    def not_in_vllm(self) -> str:
        """Why vLLM does not serve a draft of the reference decoder; "" if it does."""
        if self.path.startswith(LOOKUP_FIRST):
            return (
                "vLLM 0.32 serves n-gram speculation or a draft; llama-server can combine them "
                "(n-gram first)"
            )
        if self.form == "uno":
            return "SGLang alone serves uno drafts"
        if self.form == "medusa" and (self.vocabulary.coverage or 0.0) < 1:
            return "vLLM does not load a trimmed Medusa head (draft_vocab_size: null makes a whole)"
        return ""

    @model_validator(mode="after")
    def _null_has_a_reason(self) -> Self:
        explained = {"sha256", "gamma", "counters", "sampled_check", "predicted_with_prefill"}
        explained |= {"context", *(entry.field for entry in self.missing)}
        for name in type(self).model_fields:
            if getattr(self, name) is None and name not in explained:
                raise ValueError(f"{name} is null, and `missing` does not say why")
        return self


class Gain(Part):
    """The numbers of a draft minus the numbers of another draft, on the same prompts."""

    draft: str
    over: str
    alpha: Measured | None
    tau: Measured | None
    speedup: Measured
    predicted_with_prefill: Measured | None = Field(None, description="null: steps not timed")


class Baseline(Part):
    """The target without a draft."""

    tokens_per_s: Measured
    over_stock_generate: Measured | None = Field(description="tokens/s over stock `generate`'s")


class DecodingSetting(Part):
    """How the outputs were decoded."""

    temperature: Quantity
    top_k: Count | None
    top_p: float
    max_new_tokens: Count
    gamma: Count | None = Field(description="the last draft's")
    gamma_policy: str
    verification: str
    draft_sample_method: str | None = Field(
        None,
        description="how drafts propose sampled tokens, as asked for; null: greedy, or not known",
    )
    stop_tokens: Count | None = Field(description="0: the end is ignored; null: not known")
    ended_by_stop: float = Field(ge=0, le=1, description="share of the baseline's outputs")


class PromptsUsed(Part):
    """The evaluation prompts."""

    source: str
    n: Count
    sha256: str
    left_out: list[str] = Field(
        [], description="why others were left out for all: a server failed at them; one entry each"
    )
    overlap_with_training: float | None = Field(description="0: a run drops it; null: not known")
    in_chat_form: float = Field(0, ge=0, le=1, description="share in the chat template")
    chat_template_kwargs: list[dict[str, JsonValue]] = Field([], description="of the messages")
    chat_template: bool | None = Field(None, description="whether the target has one")
    other_ids: list[str] | None = Field(
        None, description="prompts whose token ids in the engine are others than in transformers"
    )


class Environment(Part):
    """The machine and the engine; null: not known."""

    engine: str
    engine_version: str | None
    hardware: str | None = Field(description="model name of the GPU, or of the CPU")
    cores: Positive | None = Field(description="CPU cores that the process may use")
    threads: Positive | None = Field(description="threads that compute, on a CPU")
    date: str = Field(description="start of the evaluation, ISO 8601 in UTC")
    load_average: Quantity | None = Field(description="over one minute, at the start")
    server_arguments: list[str] | None
    server_variables: dict[str, str] | None = Field(None, description="of the environment")
    runners: dict[str, str] | None = Field(
        None, description="vLLM's model runner (first, second), by draft and `target`"
    )


class HeldOutPoint(Part):
    """The draft at one training step, measured on prompts held out of training."""

    step: Count = Field(description="0: before training")
    tokens: Count = Field(description="different tokens trained on until then")
    alpha: Share
    kept: bool = Field(description="these weights became the draft")


class HeldOutCurve(Part):
    """The acceptance rate during training, on prompts held out of it."""

    points: Annotated[list[HeldOutPoint], Field(min_length=1)]


class Report(Part):
    """The results of an evaluation. docs/report.md defines every number."""

    schema_name: Annotated[Literal["draftsmith-report/1"], Field(alias="schema")]
    target: str
    target_quantization: str | None = Field(
        None, description="of the target's GGUF file, e.g. Q4_0"
    )
    engine: str
    device: str
    dtype: str
    baseline: Baseline
    decoding: DecodingSetting
    prompts: PromptsUsed
    answers: TargetOutputs
    environment: Environment
    starts: Starts | None = Field(
        None, description="null: no server was started twice, so no interval covers starts"
    )
    eager: list[str] = Field(
        [], description="`target` and drafts by name: ran on a GPU without CUDA graphs"
    )
    drafts: dict[str, DraftReport] = Field(min_length=1, description="by name")
    gain: list[Gain] = Field(description="difference to the draft named, on the same prompts.")
    provenance: dict[str, JsonValue]
    base_kept: str | None = Field(
        None, description="why `draft/` is the base draft; null: it is the distilled draft"
    )
    held_out: HeldOutCurve | None = Field(
        None, description="null: no prompts were held out, or no training was followed"
    )

    @property
    def target_named(self) -> str:
        """The target's spec, or the distribution of a `pypi:` file, and its GGUF quantisation."""
        quantised = self.target_quantization
        target = abridged(self.target).removeprefix("pypi:").partition("==")[0]
        return f"{target} (GGUF {quantised})" if quantised else target

    @property
    def last(self) -> tuple[str, DraftReport]:
        """Name and numbers of the last draft, which decides the exit status of eval.run."""
        return list(self.drafts.items())[-1]

    @property
    def tuned(self) -> tuple[str, DraftReport]:
        """Name and numbers of the distilled draft, or of the last draft if there is none."""
        return ("tuned", self.drafts["tuned"]) if "tuned" in self.drafts else self.last

    def stated_speedup(self, numbers: DraftReport | Gain) -> Measured:
        """The speed-up of the first lines: the reference decoder's prediction, else as measured."""
        predicted = numbers.predicted_with_prefill if self.engine == REFERENCE else None
        return predicted or numbers.speedup

    def speedups(self, name: str) -> dict[Load, Measured]:
        """The stated speed-up of a draft by load."""
        draft = self.drafts[name]
        return draft.speedup_by_load | {ONE_AT_A_TIME: self.stated_speedup(draft)}

    @property
    def broken(self) -> list[str]:
        """The names of drafts that do not keep the target's output: do not serve them."""
        level = FALSE_ALARMS / len(self.drafts)  # Bonferroni
        return [
            name
            for name, draft in self.drafts.items()
            if draft.lossless.unexplained
            or (draft.sampled_check and draft.sampled_check.p_value < level)
        ]


# --- Reading ---


def checked(value: Any) -> Report:
    """The value as a `Report`. Raises `ReportError` for the first wrong field."""
    try:
        return Report.model_validate(value)
    except ValidationError as error:
        raise ReportError(_problem(error)) from None


def _problem(error: ValidationError) -> str:
    """The first error, with the path of its field."""
    problem = error.errors(include_url=False)[0]
    path = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in problem["loc"])
    return f"report{path}: {problem['msg'].removeprefix('Value error, ')}"


def read_report(path: Path | str) -> Report:
    """The checked report in a report.json, or in the output folder of a run or an evaluation.

    Raises `ReportError` if the file is absent or broken.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "report" / "report.json"
    try:
        return Report.model_validate_json(path.read_bytes(), strict=True)
    except FileNotFoundError:
        raise ReportError(f"no report at {path}; finish the evaluation first") from None
    except ValidationError as error:
        raise ReportError(
            f"{path} is damaged or of another version ({_problem(error)}); evaluate again."
        ) from None
