"""The report of an evaluation: report.json (draftsmith-report/1), report.md, report.html.

The models below are the one place that says which fields a report has, what they mean and what
must hold between them; `report_schema` is the JSON Schema made from them. A report is built by
eval/measuring/build.py and shown by text.py and page.py. docs/metrics.md has the long definitions.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from align.atomic import atomic_file

SCHEMA: Final = "draftsmith-report/1"
SHOWN_ERRORS = 3

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Quantity = Annotated[float, Field(ge=0)]
T = TypeVar("T")


class ReportError(ValueError):
    """A report that lacks a field, holds a value that is no number, or contradicts itself."""


class Part(BaseModel):
    """A part of a report: every number finite, fields that a newer version added passed over."""

    model_config = ConfigDict(
        allow_inf_nan=False,
        from_attributes=True,  # a Measured may stand where a Share is asked for, and is checked
        revalidate_instances="always",  # what was changed since is checked again
        validate_by_name=True,  # `from`, `class` and `schema` cannot be names in Python
        validate_by_alias=True,
        serialize_by_alias=True,
    )


class Measured(Part):
    """A number, its interval, and the prompts it rests on."""

    mean: float
    ci95: tuple[float, float] = Field(
        description="95%, percentile bootstrap over prompts, or over their documents where they "
        "name a group (10,000 resamples, fixed seed); n is the number of prompts."
    )
    n: Positive

    def __format__(self, form: str) -> str:
        """`0.51 [0.49,0.53]` with the form `.2f`."""
        low, high = self.ci95
        return f"{self.mean:{form}} [{low:{form}},{high:{form}}]"

    @model_validator(mode="after")
    def _interval_runs_forwards(self) -> Self:
        if self.ci95[0] > self.ci95[1]:
            raise ValueError(f"ci95 runs backwards: {list(self.ci95)}")
        return self


class Share(Measured):
    """A measured share."""

    mean: float = Field(ge=0, le=1)


class TokensPerCall(Measured):
    """A measured number of tokens per target call: one at least."""

    mean: float = Field(ge=1)


class Both(Part, Generic[T]):
    """A number without a draft and with it."""

    baseline: T
    speculative: T


class Divergence(Part):
    """Where a greedy text with a draft parts from the target's own."""

    prompt: str
    position: Count = Field(description="token of the answer, from 0")
    target: str = Field(description="the token without a draft")
    drafted: str = Field(description="the token with it")
    gap: Quantity | None = Field(description="between the two tokens' logits")
    error: Quantity | None = Field(description="between two forwards' logits there")
    tie: bool


class Ledger(Part):
    """Greedy texts with and without the draft, compared token by token."""

    prompts: Positive
    identical: Count
    tie_divergences: Count
    unexplained: Count = Field(description="must be 0")
    divergences: list[Divergence]

    @model_validator(mode="after")
    def _counts_add_up(self) -> Self:
        if self.identical + self.tie_divergences + self.unexplained != self.prompts:
            raise ValueError(
                f"{self.identical} identical, {self.tie_divergences} ties and {self.unexplained} "
                f"unexplained do not make up {self.prompts} prompts"
            )
        return self


class Vocabulary(Part):
    """How the draft's vocabulary relates to the target's, and what is done about it."""

    relation: str
    strategy: str
    coverage: float | None


class PositionAcceptance(Part):
    """Acceptance at one place of the draft, over drafts that got this far."""

    position: Positive
    drafts: Count = Field(description="blocks that drafted at least so many tokens")
    marginal: Share = Field(description="share of these whose tokens up to here all passed")
    conditional: Share | None = Field(description="the same among those that passed up to here")


class Costs(Part):
    """Isolated forwards at the run's mean context length, batch size 1, milliseconds."""

    draft_step_ms: Quantity
    draft_block_ms: Quantity = Field(default=0.0, description="once a draft, besides its steps")
    target_step_ms: Quantity
    target_verify_ms: dict[str, Quantity] = Field(description="by number of tokens in the call")
    context_length: Count


class Latency(Part):
    """Inter-token latency over the decode-phase tokens, milliseconds."""

    p50: Quantity
    p95: Quantity
    tokens: Count


class OfBoth(Part):
    """A count of the target's and of the draft's."""

    target: Count
    draft: Count


class Memory(Part):
    """Bytes in the form measured."""

    target_bytes: Positive
    draft_bytes: Count
    kv_bytes_per_token: OfBoth
    overhead: Quantity = Field(
        description="bytes of the draft (shared tensors not counted) / of the target, as measured."
    )
    full_form_bytes: Count | None = Field(description="of the form that other engines load")

    @model_validator(mode="after")
    def _overhead_is_that_of_the_bytes(self) -> Self:
        overhead = self.draft_bytes / self.target_bytes
        if not math.isclose(self.overhead, overhead, rel_tol=1e-6):
            raise ValueError(f"overhead is {self.overhead}, but its bytes give {overhead}")
        return self


class Payoff(Part):
    """When the draft pays, from step costs and alpha; best_gamma is taken at the measured alpha."""

    ceiling_speedup: Quantity = Field(description="at alpha = 1")
    break_even_alpha: float | None = Field(description="null: not even alpha = 1 breaks even")
    best_gamma: Count
    best_gamma_speedup: Quantity
    verdict: str


class Waterfall(Part):
    """Speed-ups as one cost after the other is counted."""

    all_accepted: Quantity
    tau: Quantity = Field(description="drafting free, a wide target call as cheap as a narrow one")
    after_draft_steps: Quantity
    predicted: Quantity
    decode: Quantity
    wall: Quantity


class Placement(Part):
    """What a block costs with the draft in one place, over a link that is stated, not measured."""

    where: str
    round_trips: Count = Field(description="a block")
    bytes_per_block: Quantity = Field(description="token ids both ways; when sampling, q as well")
    round_trip_ms: Quantity = Field(description="of the link")
    gigabytes_per_s: Quantity | None = Field(description="of the link; null: there is none")
    added_ms: Quantity = Field(description="a block")
    speedup: Quantity = Field(description="in the decode phase, without other overhead")
    break_even_round_trip_ms: Quantity | None = Field(
        description="the longest one with which it still pays; null: none, or there is no link"
    )


class CurvePoint(Part):
    """Expected speed-up at one draft length."""

    gamma: Positive
    predicted: Quantity = Field(description="from alpha, positions taken as independent")
    replayed: Quantity | None = Field(description="from the replayed tau; null when sampling")
    ceiling: Quantity = Field(description="at alpha = 1")


class Decoded(Part):
    """What a run came to."""

    tau: TokensPerCall
    speedup: Measured


class SweepPoint(Decoded):
    """Measured with one fixed draft length."""

    gamma: Positive


class TemperaturePoint(Decoded):
    """Decoded at one temperature."""

    temperature: Quantity


class BatchPoint(Decoded):
    """Decoded in batches of one size; a batch is what is resampled, n the number of batches."""

    batch_size: Positive
    prompts: Positive
    lossless: Ledger | None = Field(description="against the same batch alone; null if sampled")
    tokens_per_s: Both[Measured] = Field(description="of all rows together")


class CategoryNumbers(Part):
    """One category of prompts; null where they hold nothing to measure it on."""

    alpha: Share | None
    tau: TokensPerCall | None
    speedup: Measured | None


class Confusion(Part):
    """A token of the target that the draft took for another."""

    target: str
    draft: str
    count: Positive
    before: str = Field(description="the text before one such place")


class TokenClass(Part):
    """The target's tokens of one class."""

    name: Annotated[str, Field(alias="class")]
    positions: Positive
    alpha: Share
    rejected: Quantity = Field(description="sum of 1 - alpha over its tokens")
    lost_speedup: float = Field(
        description="what the expected speed-up at the best gamma would gain if the draft were "
        "right throughout that class."
    )
    examples: list[Confusion]


class Bucket(Part):
    """alpha between two bounds; `to` null: no upper one."""

    low: Annotated[float, Field(alias="from")]
    high: Annotated[float | None, Field(alias="to")]
    positions: Positive
    alpha: Share


class RuleAcceptance(Part):
    """alpha under three verification rules at one temperature, from one teacher-forced log."""

    temperature: Quantity
    exact: Share = Field(description="rejection sampling: sum min(p, q)")
    greedy_match: Share = Field(description="the draft proposes argmax q: p(argmax q)")
    target_probability: Share = Field(description="x drawn from q passes with p(x): sum q p")


class HeatMap(Part):
    """One answer of the target, token by token."""

    prompt: str
    alpha: float
    tokens: list[str]
    values: list[float] = Field(description="acceptance of each token")
    guesses: list[str] = Field(description="what the draft has for it")


class Atlas(Part):
    """Which tokens the draft gets wrong, what that costs, and where."""

    scheme: str = Field(description="classes of code or of prose")
    classes: list[TokenClass]
    by_output_position: list[Bucket]
    by_entropy: list[Bucket] = Field(description="bits of the target's distribution")
    verification_rules: list[RuleAcceptance]
    heat_map: list[HeatMap]


class OtherPrompts(Part):
    """alpha on prompts of another domain."""

    source: str
    sha256: str
    alpha: Share


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
        "forwards, gamma the mean drafted length."
    )
    speedup: Measured = Field(
        description="wall seconds per emitted token without a draft / with it; prefill in; same "
        "target, engine, dtype and run, interleaved prompt by prompt."
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
    waterfall: Waterfall | None
    placement: list[Placement] | None = Field(
        default=[], description="the draft on the same device, on another one, on another host"
    )
    gamma_curve: list[CurvePoint] | None
    gamma_sweep: list[SweepPoint] = Field(description="where one was asked for")
    by_batch_size: list[BatchPoint] = Field(description="where sizes were asked for")
    by_temperature: list[TemperaturePoint] = Field(description="where they were asked for")
    lossless: Ledger
    by_category: dict[str, CategoryNumbers]
    atlas: Atlas | None
    other_prompts: OtherPrompts | None = Field(description="where they were asked for")
    counters: Counters | None = Field(description="of a server")
    missing: list[Missing]
    per_prompt: list[PromptSums]

    def ledgers(self, name: str) -> Iterator[tuple[str, Ledger]]:
        """Every comparison of greedy texts with the target's own, by what to call it."""
        yield name, self.lossless
        for point in self.by_batch_size:
            if point.lossless:
                yield f"{name} in batches of {point.batch_size}", point.lossless

    @property
    def changed_texts(self) -> int:
        """How many texts came out other than the target's own, with no tie to explain it."""
        return sum(ledger.unexplained for _, ledger in self.ledgers(""))

    @model_validator(mode="after")
    def _null_has_a_reason(self) -> Self:
        explained = {
            "sha256",
            "gamma",
            "other_prompts",
            "counters",
            *(one.field for one in self.missing),
        }
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


class HeldOutPoint(Part):
    """The draft on held-out prompts, at some step of its training."""

    step: Positive
    tokens: Positive = Field(description="different tokens that it was trained on until then")
    alpha: float = Field(ge=0, le=1)
    tau: float = Field(ge=1, description="simulated: a chain of `gamma` drafted tokens")


class Forecast(Part):
    """What more different training tokens would bring, on prompts held out of training."""

    tokens: Positive = Field(description="different tokens that the draft was trained on")
    alpha: Share = Field(description="of the draft that was kept, on held-out prompts")
    trained_alpha: Share | None = Field(
        None,
        description="after training, on as many answers that it was trained on: a ceiling of what "
        "more text can bring to this draft; null where training was not followed to its end",
    )
    at_3x: Share = Field(description="alpha there with 3 times the different tokens")
    at_10x: Share = Field(description="and with 10 times")
    gamma: Positive = Field(description="of the simulated tau")
    curve: Annotated[list[HeldOutPoint], Field(min_length=1)]
    method: str


class Replayed(Part):
    """A candidate on texts of the target, its steps priced by measured ones."""

    alpha: Share = Field(description="of the tokens of these texts, drafted right as the first")
    speedup: Measured = Field(description="predicted, at the best draft length")
    gamma: Positive
    stop_below: float = Field(ge=0, le=1, description="as of `DraftLength`; 0: never")


class Candidate(Part):
    """A kind of draft, and what its comparison with others found."""

    drafter: str
    layers: Positive | None = Field(description="kept of the target; null for other kinds")
    c: Quantity = Field(
        description="draft time of a token over a target step, in a draft of the longest length"
    )
    ceiling_speedup: Quantity = Field(description="of a perfect draft at this cost")
    untuned: Replayed | None = Field(None, description="as prepared; null: priced only")
    healed: Replayed | None = Field(None, description="trained briefly; null: not among the best")
    chosen: bool

    @property
    def name(self) -> str:
        """What to call it."""
        if self.layers is None:
            return self.drafter
        return f"{self.drafter}, {self.layers} layer{'s' * (self.layers > 1)}"


class DrafterChoice(Part):
    """What `drafter: auto` compared."""

    candidates: Annotated[list[Candidate], Field(min_length=1)]
    ruled_out: dict[str, str] = Field(description="kinds that the recipe rules out, and why")
    healed_seconds: Quantity = Field(description="of training, for each that was trained")


class Findings(Part):
    """What an evaluation found, without the warnings and the headline made from it."""

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
    drafts: dict[str, DraftReport] = Field(min_length=1, description="by name")
    gain: list[Gain] = Field(description="difference to the draft named, on the same prompts.")
    provenance: dict[str, JsonValue]
    forecast: Forecast | None = Field(
        None, description="what more training data would bring; null: see `no_forecast`"
    )
    no_forecast: str | None = Field(
        None, description="why there is none; null also where no training was followed"
    )
    choice: DrafterChoice | None = Field(
        None, description="how the kind of draft was chosen; null where the recipe named it"
    )

    @property
    def target_named(self) -> str:
        """The target, and how its file is quantised where it is."""
        quantised = self.target_quantization
        return f"{self.target} (GGUF {quantised})" if quantised else self.target

    @property
    def last(self) -> tuple[str, DraftReport]:
        """The draft that the headline is about."""
        return list(self.drafts.items())[-1]

    @property
    def tuned(self) -> tuple[str, DraftReport]:
        """The draft that is published: a training run's tuned one by itself, else the last."""
        return ("tuned", self.drafts["tuned"]) if "tuned" in self.drafts else self.last

    def ledgers(self) -> list[tuple[str, Ledger]]:
        """Those of all drafts, by what to call them."""
        return [one for name, draft in self.drafts.items() for one in draft.ledgers(name)]

    @model_validator(mode="after")
    def _a_forecast_or_the_reason(self) -> Self:
        if self.forecast and self.no_forecast:
            raise ValueError(f"there is a forecast, and no_forecast says {self.no_forecast!r}")
        return self

    @model_validator(mode="after")
    def _gains_are_differences(self) -> Self:
        for i, entry in enumerate(self.gain):
            for name in (entry.draft, entry.over):
                if name not in self.drafts:
                    raise ValueError(f"gain[{i}] compares with {name!r}, which is no draft of it")
            mine, other = self.drafts[entry.draft], self.drafts[entry.over]
            _check_difference(f"gain[{i}].alpha", entry.alpha, mine.alpha, other.alpha)
            _check_difference(f"gain[{i}].tau", entry.tau, mine.tau, other.tau)
            _check_difference(f"gain[{i}].speedup", entry.speedup, mine.speedup, other.speedup)
        return self


def _check_difference(
    where: str, gained: Measured | None, mine: Measured | None, other: Measured | None
) -> None:
    # a gain may rest on fewer prompts than either side's own number; then they may differ
    if gained and mine and other and mine.n == other.n == gained.n:
        apart = mine.mean - other.mean
        if not math.isclose(gained.mean, apart, rel_tol=1e-6, abs_tol=1e-9):
            raise ValueError(
                f"{where} is {gained.mean}, but the drafts' own numbers are {apart} apart"
            )


class Report(Findings):
    """What an evaluation of speculative decoding found. docs/metrics.md defines every number.

    A draft that is not lossless is a finding, not an error: it must stand among the warnings.
    """

    warnings: list[str] = Field(description="what to know before quoting a number")
    headline: str

    @model_validator(mode="after")
    def _changed_texts_are_not_hidden(self) -> Self:
        for which, ledger in self.ledgers():
            if ledger.unexplained and not_lossless(which, ledger) not in self.warnings:
                raise ValueError(f"{which} is not lossless and the warnings do not say so")
        return self


def not_lossless(which: str, ledger: Ledger) -> str:
    """The warning that a draft changes the output."""
    return (
        f"NOT LOSSLESS: with draft {which}, {ledger.unexplained} of {ledger.prompts} prompts gave "
        f"other tokens than the target alone, with no tie to explain it. Do not serve this draft."
    )


def report_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of a report.json."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **Report.model_json_schema(),
        "title": SCHEMA,
    }


M = TypeVar("M", bound=Findings)


def checked(model: type[M], value: Any) -> M:
    """The value as that model. Raises `ReportError`, naming the fields and what is wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise ReportError(_problems(error)) from None


def _problems(error: ValidationError) -> str:
    """The first problems, each with the place of its field."""
    lines = []
    for one in error.errors(include_url=False):
        place = "".join(f"[{at}]" if isinstance(at, int) else f".{at}" for at in one["loc"])
        line = f"report{place}: {one['msg'].removeprefix('Value error, ')}"
        if isinstance(one["input"], str | int | float | None):
            line += f", not {one['input']!r:.80}"
        lines.append(line)
    more = len(lines) - SHOWN_ERRORS
    return "; ".join(lines[:SHOWN_ERRORS]) + (f"; and {more} more" if more > 0 else "")


def write_report(folder: Path | str, report: Report) -> None:
    """Check the report and write report.json, .md and .html into `folder`, each atomically."""
    # here, not above: they show the models of this module
    from eval.reporting.page import render_page
    from eval.reporting.text import render_markdown

    report = checked(Report, report)
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
