"""The numbers of a report, all made from one table with a row of sums for each prompt.

Every measured number is a ratio of sums over prompts; intervals.py makes its interval.
docs/metrics.md says in prose what is in each number and what is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, computed_field, model_serializer

from eval.decoding.prompt_run import PromptRun
from eval.measuring.intervals import (
    Count,
    Ends,
    Measured,
    NothingToMeasure,
    Part,
    Positive,
    Quantity,
    Share,
    above_zero,
    around,
    measure,
    ratio,
    share,
    within_one,
)
from eval.measuring.runs import Agreement, Floats, StepCosts

# --- The table ---


class PromptSums(Part):
    """The sums of one prompt, from which every mean and interval of a draft is made.

    A block is a speculation step that counts: a last one that the length limit cut does not. What
    was not measured is None, and left out of the report.
    """

    id: str
    category: str | None = None
    group: str | None = None
    prompt_tokens: Count | None = None
    alpha_sum: Quantity | None = None
    positions: Count | None = None
    tokens: Count | None = None
    seconds: Quantity | None = None
    prefill_seconds: Quantity | None = None
    baseline_tokens: Count | None = None
    baseline_seconds: Quantity | None = None
    baseline_prefill_seconds: Quantity | None = None
    baseline_block_tokens: Count | None = None
    baseline_block_seconds: Quantity | None = None
    calls: Count | None = Field(default=None, description="target calls of the decode phase")
    blocks: Count | None = Field(default=None, description="of these, the whole ones; so below")
    block_tokens: Count | None = None
    block_seconds: Quantity | None = None
    drafted: Count | None = None
    looked_up: Count | None = Field(default=None, description="of these, by n-grams before a draft")
    accepted: Count | None = None
    accepted_at: list[Count] | None = Field(
        default=None,
        description="drafts, then those whose first i tokens were all accepted, i = 1, 2, …",
    )

    @model_serializer(mode="wrap")
    def _without_nulls(self, fields: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in fields(self).items() if value is not None}


def prompt_table(
    runs: Sequence[PromptRun],
    baseline: Sequence[PromptRun],
    agreements: Iterable[Agreement] = (),
    steps_known: bool = True,
) -> list[PromptSums]:
    """The rows of a draft's prompts: the timed ones, then those with an acceptance rate alone.

    steps_known: whether the runs tell what was drafted and accepted. Raises ValueError for a run
    that contradicts itself, and if the baseline has other prompts.
    """
    alone = {run.prompt_id: run for run in baseline}
    if sorted(run.prompt_id for run in runs) != sorted(alone):
        raise ValueError(
            "the runs and the baseline are not of the same prompts, or a prompt occurs twice"
        )
    rows: dict[str, dict[str, Any]] = {}
    for run in runs:
        base = alone[run.prompt_id]
        if problem := run.problem(steps_known) or base.problem(steps_known):
            raise ValueError(f"the log of prompt {run.prompt_id!r} cannot be used: {problem}")
        row = rows[run.prompt_id] = {
            "id": run.prompt_id,
            "category": run.category,
            "group": run.group,
            "prompt_tokens": run.prompt_tokens,
            "tokens": len(run.tokens),
            "seconds": run.seconds,
            "prefill_seconds": run.prefill_seconds,
            "baseline_tokens": len(base.tokens),
            "baseline_seconds": base.seconds,
            "baseline_prefill_seconds": base.prefill_seconds,
        }
        if steps_known:
            row |= _steps(run)
        if steps_known and base.whole_blocks:
            whole = slice(base.whole_blocks)
            row["baseline_block_tokens"] = sum(base.block_tokens[whole])
            row["baseline_block_seconds"] = sum(base.block_seconds[whole])
    for response in agreements:
        total, positions = response.alpha_sum, response.positions
        # fp32 sums of probabilities may pass 1 in the last digits
        if not -1e-3 * positions <= total <= (1 + 1e-3) * positions:
            raise ValueError(
                f"prompt {response.prompt_id!r}: alpha_sum {total} is not within 0 and the "
                f"{positions} positions it was summed over"
            )
        row = rows.setdefault(
            response.prompt_id,
            {
                "id": response.prompt_id,
                "category": response.category,
                "group": response.group,
                "prompt_tokens": response.prompt_tokens,
            },
        )
        row |= {"alpha_sum": min(max(total, 0.0), positions), "positions": positions}
    return [PromptSums(**row) for row in rows.values()]


def _steps(run: PromptRun) -> dict[str, Any]:
    whole = slice(run.whole_blocks)
    drafted = run.drafted[whole]
    accepted = [count for count, length in zip(run.accepted[whole], drafted, strict=True) if length]
    return {
        "calls": len(run.block_tokens),
        "blocks": run.whole_blocks,
        "block_tokens": sum(run.block_tokens[whole]),
        "block_seconds": sum(run.block_seconds[whole]),
        "drafted": sum(drafted),
        "looked_up": sum(run.free[whole]),
        "accepted": sum(run.accepted[whole]),
        "accepted_at": [
            sum(count >= i for count in accepted) for i in range(max(drafted, default=0) + 1)
        ],
    }


def replayed_steps(agreed: Sequence[bool], draft_length: int) -> list[int]:
    """Tokens that each whole speculation step of greedy decoding would emit.

    agreed: for each token of the target's response, whether the draft's argmax is that token,
    teacher-forced. Exact for a draft that drafts every token as its first, because up to its first
    wrong token it has seen nothing but the target's text. The response ends at its length limit.
    Near it a draft is as short as there is room, and a last step so cut is left out.
    """
    emitted, position, drafted = [], 1, draft_length  # the first token comes from the prefill
    while position < len(agreed):
        drafted = min(draft_length, len(agreed) - position - 1)
        right = 0
        while right < drafted and agreed[position + right]:
            right += 1
        emitted.append(right + 1)
        position += emitted[-1]
    return emitted if drafted == draft_length else emitted[:-1]


def replayed_table(responses: Sequence[Sequence[bool]], draft_length: int) -> list[PromptSums]:
    """The table of greedy decoding that is replayed from responses, each as `agreed` above."""
    return [
        PromptSums(
            id=str(i),
            category=None,
            alpha_sum=sum(agreed),
            positions=len(agreed),
            block_tokens=sum(steps),
            blocks=len(steps),
        )
        for i, agreed in enumerate(responses)
        for steps in [replayed_steps(agreed, draft_length)]
    ]


# --- Numbers ---


class Number(NamedTuple):
    """A number that is computed from the totals of some columns of the table.

    A prompt counts where all columns are measured and the last is not 0.
    """

    name: str
    columns: tuple[str, ...]
    statistic: Callable[[Floats], Floats] = ratio  # (..., columns) totals -> (...) values
    ends: Ends = above_zero


def speedup_of(totals: Floats) -> Floats:
    """Seconds a token without a draft over the same with it, of both sums of each in this order."""
    return ratio(totals[..., :2]) / ratio(totals[..., 2:])


# arXiv 2211.17192, theorem 3.5
ACCEPTANCE_RATE = Number("alpha", ("alpha_sum", "positions"), ends=within_one)
MEAN_ACCEPTANCE_LENGTH = Number("tau", ("block_tokens", "blocks"))
ACCEPTED_OVER_DRAFTED = Number("accepted_over_drafted", ("accepted", "drafted"), ends=within_one)
SPEEDUP = Number(
    "speedup", ("baseline_seconds", "baseline_tokens", "seconds", "tokens"), speedup_of
)
TOKENS_PER_S = Number("tokens_per_s", ("tokens", "seconds"))
BASELINE_TOKENS_PER_S = Number("tokens_per_s", ("baseline_tokens", "baseline_seconds"))
COMPARED = (ACCEPTANCE_RATE, MEAN_ACCEPTANCE_LENGTH, SPEEDUP)  # by category and between drafts


def predicted_speedup(costs: StepCosts) -> Number:
    """tau * t_target(1) / (gamma * t_draft + t_target(gamma + 1)), gamma the mean drafted length.

    Tokens of n-gram speculation count in gamma for the target alone. The interval is that of tau
    and gamma.
    """

    def predicted(totals: Floats) -> Floats:
        emitted, drafted, looked_up, blocks = np.moveaxis(totals, -1, 0)
        step = costs.draft((drafted - looked_up) / blocks) + costs.verify(drafted / blocks + 1.0)
        return np.asarray(emitted / blocks * costs.target_step / step, dtype=np.float64)

    columns = ("block_tokens", "drafted", "looked_up", "blocks")
    return Number("predicted_speedup", columns, predicted)


def decode_efficiency(costs: StepCosts) -> Number:
    """Decode-phase speed-up over `predicted_speedup`: 1 means no overhead beyond the two models."""
    predicted = predicted_speedup(costs)
    measured = ("baseline_block_seconds", "baseline_block_tokens", "block_seconds")
    return Number(
        "decode_efficiency",
        (*measured, *predicted.columns),
        lambda totals: speedup_of(totals[..., :4]) / predicted.statistic(totals[..., 3:]),
    )


def _rows(number: Number, table: Iterable[PromptSums]) -> dict[str, tuple[PromptSums, list[float]]]:
    """The columns of each prompt that counts, by its id."""
    rows = {}
    for row in table:
        values = [getattr(row, column) for column in number.columns]
        if None not in values and values[-1]:
            rows[row.id] = row, values
    return rows


def measured(number: Number, table: Iterable[PromptSums]) -> Measured:
    """The number over the table. Raises `NothingToMeasure` where no prompt counts."""
    rows = _rows(number, table).values()
    groups = [row.group for row, _ in rows]
    return measure(
        number.name, [values for _, values in rows], number.statistic, groups, number.ends
    )


def measured_or_none(number: Number, table: Iterable[PromptSums]) -> Measured | None:
    """The number over the table; None where no prompt counts."""
    try:
        return measured(number, table)
    except NothingToMeasure:
        return None


def difference(
    number: Number, table: Iterable[PromptSums], over: Iterable[PromptSums]
) -> Measured | None:
    """The number of one table minus that of another, paired by prompt.

    None where no prompt counts in both.
    """
    mine, other = _rows(number, table), _rows(number, over)
    pairs = [(row, values + other[key][1]) for key, (row, values) in mine.items() if key in other]

    def apart(totals: Floats) -> Floats:
        width = len(number.columns)
        return number.statistic(totals[..., :width]) - number.statistic(totals[..., width:])

    if not pairs:
        return None
    columns, groups = [values for _, values in pairs], [row.group for row, _ in pairs]
    return measure(f"gain of {number.name}", columns, apart, groups, around)


def mean_drafted(table: Iterable[PromptSums]) -> float:
    """Drafted tokens per target call, over the whole blocks."""
    return measured(Number("mean_drafted", ("drafted", "blocks"), ends=around), table).mean


class PositionAcceptance(Part):
    """Acceptance at one position of the draft, over all drafts, as vLLM's counters have it."""

    position: Positive
    drafts: Count = Field(description="all drafts: whole blocks with a drafted token")
    marginal: Share = Field(description="share of drafts whose tokens up to here were all accepted")
    conditional: Share | None = Field(
        description="the same, among drafts whose tokens before were all accepted"
    )


def per_position(table: Iterable[PromptSums]) -> list[PositionAcceptance]:
    """Acceptance at i = 1..longest draft, over all drafts of the whole blocks.

    marginal_i: share of drafts whose first i tokens were all accepted; a shorter draft has not
    accepted i. conditional_i is marginal_i / marginal_(i-1).
    """
    drafting = [(row.group, row.accepted_at) for row in table if row.accepted_at and row.drafted]
    if not drafting:
        raise NothingToMeasure("nothing was drafted")
    longest = max(len(counts) for _, counts in drafting)
    padded = [(group, counts + [0] * (longest - len(counts))) for group, counts in drafting]

    def among(earlier: int, i: int) -> Share | None:
        """Drafts whose first i tokens were accepted, among those whose first `earlier` were."""
        rows = [(group, counts[i], counts[earlier]) for group, counts in padded if counts[earlier]]
        return share("acceptance", rows) if rows else None

    return [
        PositionAcceptance.model_validate(
            {
                "position": i,
                "drafts": sum(counts[0] for _, counts in drafting),
                "marginal": among(0, i),
                "conditional": among(i - 1, i),
            }
        )
        for i in range(1, longest)
    ]


def cost_ratio(costs: StepCosts) -> float:
    """Time of a draft of one token over time of one target step."""
    return float(costs.draft(1.0)) / costs.target_step


def verify_ratio(costs: StepCosts, draft_length: float) -> float:
    """Time of a target call on draft_length + 1 tokens over the time of one on a single token."""
    return float(costs.verify(draft_length + 1.0)) / costs.target_step


def ttft_ms(table: Sequence[PromptSums], column: str) -> Measured:
    """Milliseconds from the start to the first token, mean over prompts, from that column."""
    timed = [(row.group, seconds) for row in table if (seconds := getattr(row, column)) is not None]
    milliseconds = [(1000 * seconds, 1.0) for _, seconds in timed]
    return measure("ttft_ms", milliseconds, groups=[group for group, _ in timed])


class Latency(Part):
    """Inter-token latency over the decode-phase tokens, milliseconds."""

    p50: Quantity
    p95: Quantity
    tokens: Count


def itl_ms(runs: Sequence[PromptRun]) -> Latency:
    """Inter-token latency, milliseconds: a block's time is spread evenly over its tokens."""
    seconds = np.array([s for run in runs for s in run.block_seconds])
    tokens = np.array([k for run in runs for k in run.block_tokens], dtype=np.int64)
    if not tokens.sum():
        raise NothingToMeasure("itl_ms: no token was emitted after the prefill")
    p50, p95 = np.percentile(np.repeat(1000 * seconds / tokens, tokens), [50, 95])
    return Latency(p50=float(p50), p95=float(p95), tokens=int(tokens.sum()))


class OfBoth(Part):
    """A count of the target's and of the draft's."""

    target: Count
    draft: Count


class Memory(Part):
    """Bytes in the form measured."""

    target_bytes: Positive
    draft_bytes: Count = Field(description="shared tensors not counted")
    kv_bytes_per_token: OfBoth
    full_form_bytes: Count | None = Field(description="of the form that other engines load")

    @computed_field(description="draft_bytes / target_bytes")  # type: ignore[prop-decorator]
    @property
    def overhead(self) -> float:
        """Bytes of the draft over bytes of the target."""
        return self.draft_bytes / self.target_bytes


# --- Classes of prompts ---


class CategoryNumbers(Part):
    """One category of prompts; null where they hold nothing to measure it on."""

    alpha: Share | None
    tau: Measured | None
    speedup: Measured | None


def by_class(
    table: Iterable[PromptSums],
    class_of: Callable[[PromptSums], str | None],
    order: Iterable[str] | None = None,
) -> dict[str, CategoryNumbers]:
    """The `COMPARED` numbers of each class of prompts; prompts without a class are left out.

    order: of all classes; None: by name.
    """
    classes: dict[str, list[PromptSums]] = {}
    for row in table:
        if (name := class_of(row)) is not None:
            classes.setdefault(name, []).append(row)
    return {
        name: CategoryNumbers.model_validate(
            {number.name: measured_or_none(number, classes[name]) for number in COMPARED}
        )
        for name in order or sorted(classes)
        if name in classes
    }


CONTEXTS = {  # classes of prompts by length: the most tokens that a prompt of the class has
    "below 512 tokens": 511,
    "512 to 2,048 tokens": 2_048,
    "2,048 to 8,192 tokens": 8_192,
    "above 8,192 tokens": math.inf,
}


def context_class(row: PromptSums) -> str | None:
    """The class of the prompt's length; None where it is not known, as a server's 0."""
    tokens = row.prompt_tokens
    return next(name for name, most in CONTEXTS.items() if tokens <= most) if tokens else None
