"""The numbers of a report, computed from a table with one row of sums per prompt.

Every measured number is a ratio of sums over prompts; intervals.py computes its interval.
docs/report.md defines each number in prose.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from pydantic import Field, SerializerFunctionWrapHandler, computed_field, model_serializer

from eval.decoding.prompt_run import PromptRun
from eval.measuring.cost import StepCosts
from eval.measuring.intervals import (
    Count,
    Ends,
    Floats,
    Measured,
    NothingToMeasure,
    Part,
    Positive,
    Quantity,
    Share,
    StartError,
    above_zero,
    around,
    measure,
    ratio,
    share,
    within_one,
)
from eval.measuring.runs import Agreement

# --- The table ---


class PromptSums(Part):
    """The sums of one prompt, from which all means and intervals of a draft are computed.

    A block is a whole speculation step, one that the length limit cannot have cut. A value that
    was not measured is None and is left out of the report.
    """

    id: str
    category: str | None = None
    group: str | None = None
    prompt_tokens: Count | None = None
    alpha_sum: Quantity | None = None
    positions: Count | None = None
    outputs: Positive | None = Field(
        default=None, description="of each side, whose tokens and seconds are summed here"
    )
    tokens: Count | None = None
    seconds: Quantity | None = None
    prefill_seconds: Quantity | None = None
    baseline_tokens: Count | None = None
    baseline_seconds: Quantity | None = None
    baseline_prefill_seconds: Quantity | None = None
    logprob: float | None = Field(
        default=None, description="mean of a sampled output's tokens under the target, in nats"
    )
    baseline_logprob: float | None = None
    baseline_block_tokens: Count | None = None
    baseline_block_seconds: Quantity | None = None
    blocks: Count | None = Field(default=None, description="whole steps; the next six count these")
    block_tokens: Count | None = None
    block_seconds: Quantity | None = None
    drafted: Count | None = None
    looked_up: Count | None = Field(default=None, description="of these, by n-grams before a draft")
    drafting: Count | None = Field(default=None, description="steps with tokens of the model")
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
    again: Iterable[tuple[PromptRun, PromptRun]] = (),
) -> list[PromptSums]:
    """A draft's rows: the timed prompts, then prompts that have only an acceptance rate.

    runs, baseline: of the same prompts. steps_known: whether the runs have drafted and accepted
    tokens. again: as in `DraftLog`. Raises ValueError for steps that contradict themselves.
    """
    alone = {run.prompt_id: run for run in baseline}
    pairs = [(alone[run.prompt_id], run) for run in runs]
    rows: dict[str, dict[str, Any]] = {}
    for base, run in pairs:
        if steps_known and (problem := run.problem()):
            raise ValueError(f"the log of prompt {run.prompt_id!r} cannot be used: {problem}")
        row = rows[run.prompt_id] = _about(run) | {"outputs": 0}
        row |= {"logprob": run.logprob, "baseline_logprob": base.logprob}
        if steps_known:
            row |= _steps(run)
        if steps_known and base.whole_blocks:
            whole = slice(base.whole_blocks)
            row["baseline_block_tokens"] = sum(base.block_tokens[whole])
            row["baseline_block_seconds"] = sum(base.block_seconds[whole])
    for base, run in [*pairs, *again]:
        row = rows[run.prompt_id]
        row["outputs"] += 1
        for side, one in (("baseline_", base), ("", run)):
            sums = len(one.tokens), one.seconds, one.prefill_seconds
            for name, value in zip(("tokens", "seconds", "prefill_seconds"), sums, strict=True):
                row[side + name] = row.get(side + name, 0) + value
    for agreement in agreements:
        row = rows.setdefault(agreement.prompt_id, _about(agreement))
        positions = agreement.positions
        # fp32 sums of probabilities may exceed 1 by rounding
        row |= {"alpha_sum": min(agreement.alpha_sum, positions), "positions": positions}
    return [PromptSums(**row) for row in rows.values()]


def _about(one: PromptRun | Agreement) -> dict[str, Any]:
    """The columns that identify a prompt."""
    about = {name: getattr(one, name) for name in ("category", "group", "prompt_tokens")}
    return {"id": one.prompt_id, **about}


def _steps(run: PromptRun) -> dict[str, Any]:
    whole = slice(run.whole_blocks)
    drafted = run.drafted[whole]
    accepted = [count for count, length in zip(run.accepted[whole], drafted, strict=True) if length]
    free = run.free[whole] or [0] * len(drafted)
    return {
        "blocks": run.whole_blocks,
        "block_tokens": sum(run.block_tokens[whole]),
        "block_seconds": sum(run.block_seconds[whole]),
        "drafted": sum(drafted),
        "looked_up": sum(free),
        "drafting": sum(map(operator.gt, drafted, free)),
        "accepted": sum(run.accepted[whole]),
        "accepted_at": [
            sum(count >= i for count in accepted) for i in range(max(drafted, default=0) + 1)
        ],
    }


def replayed_steps(agreed: Sequence[bool], draft_length: int) -> list[int]:
    """Tokens that each whole speculation step of greedy decoding would emit.

    agreed: for each token of the target's output, whether the draft's teacher-forced argmax is
    that token. Exact for a draft that computes later tokens as it computes the first, because
    before its first wrong token it reads only the target's text. The output counts as ended by
    the length limit. Whole steps: as in `PromptRun.whole_blocks`.
    """
    emitted, position = list[int](), 1  # the first token comes from the prefill
    while position + draft_length < len(agreed):
        right = 0
        while right < draft_length and agreed[position + right]:
            right += 1
        emitted.append(right + 1)
        position += emitted[-1]
    return emitted


def replayed_table(outputs: Sequence[Sequence[bool]], draft_length: int) -> list[PromptSums]:
    """The table of simulated greedy decoding. outputs: `agreed` of `replayed_steps`, each."""
    rows = []
    for i, agreed in enumerate(outputs):
        steps = replayed_steps(agreed, draft_length)
        counts: dict[str, Any] = {"alpha_sum": sum(agreed), "positions": len(agreed)}
        rows.append(PromptSums(id=str(i), **counts, block_tokens=sum(steps), blocks=len(steps)))
    return rows


# --- Numbers ---


class Number(NamedTuple):
    """A number that is computed from the totals of some columns of the table.

    A prompt counts if all these columns are measured and the last one is not 0.
    """

    name: str
    columns: tuple[str, ...]
    statistic: Callable[[Floats], Floats] = ratio  # (..., columns) totals -> (...) values
    ends: Ends = above_zero


def speedup_of(totals: Floats) -> Floats:
    """(a / b) / (c / d) of totals (..., 4): seconds and tokens without a draft, then with it."""
    return ratio(totals[..., :2]) / ratio(totals[..., 2:])


def milliseconds(totals: Floats) -> Floats:
    """Milliseconds per output of totals (..., 2): seconds, outputs."""
    return 1000 * ratio(totals)


# arXiv 2211.17192, theorem 3.5
ACCEPTANCE_RATE = Number("alpha", ("alpha_sum", "positions"), ends=within_one)
MEAN_ACCEPTANCE_LENGTH = Number("tau", ("block_tokens", "blocks"))
ACCEPTED_OVER_DRAFTED = Number("accepted_over_drafted", ("accepted", "drafted"), ends=within_one)
SPEEDUP = Number(
    "speedup", ("baseline_seconds", "baseline_tokens", "seconds", "tokens"), speedup_of
)
TOKENS_PER_S = Number("tokens_per_s", ("tokens", "seconds"))
BASELINE_TOKENS_PER_S = Number("tokens_per_s", ("baseline_tokens", "baseline_seconds"))
TTFT_MS = Number("ttft_ms", ("prefill_seconds", "outputs"), milliseconds)
BASELINE_TTFT_MS = Number("ttft_ms", ("baseline_prefill_seconds", "outputs"), milliseconds)
MEAN_DRAFTED = Number("mean_drafted", ("drafted", "blocks"), ends=around)
COMPARED = (ACCEPTANCE_RATE, MEAN_ACCEPTANCE_LENGTH, SPEEDUP)  # for categories and gains


def predicted_speedup(costs: StepCosts) -> Number:
    """tau * t_target(1) / (t_draft(gamma) + t_target(gamma + 1)); gamma is the mean drafted length.

    Tokens that n-gram speculation drafts before a draft model cost no draft step, and a step with
    these alone costs no pass of the model. The interval covers tau and gamma, not the step costs.
    """

    def predicted(totals: Floats) -> Floats:
        emitted, drafted, looked_up, drafting, blocks = np.moveaxis(totals, -1, 0)
        draft = costs.draft((drafted - looked_up) / blocks, drafting / blocks)
        step = draft + costs.verify(drafted / blocks + 1.0)
        return np.asarray(emitted / blocks * costs.target_step_ms / step, dtype=np.float64)

    columns = ("block_tokens", "drafted", "looked_up", "drafting", "blocks")
    return Number("predicted_speedup", columns, predicted)


def predicted_with_prefill(costs: StepCosts) -> Number:
    """`predicted_speedup` for whole outputs: drafts shorten the decode phase, not the prefill."""
    decode = predicted_speedup(costs)

    def predicted(totals: Floats) -> Floats:
        alone, alone_prefill, prefill = np.moveaxis(totals[..., :3], -1, 0)
        decoding = (alone - alone_prefill) / decode.statistic(totals[..., 3:])
        return np.asarray(alone / (prefill + decoding), dtype=np.float64)

    prefills = ("baseline_seconds", "baseline_prefill_seconds", "prefill_seconds")
    return Number("predicted_with_prefill", (*prefills, *decode.columns), predicted)


def decode_efficiency(costs: StepCosts) -> Number:
    """Decode-phase speed-up / `predicted_speedup`; 1 means no overhead besides the two models."""
    predicted = predicted_speedup(costs)
    measured = ("baseline_block_seconds", "baseline_block_tokens", "block_seconds")
    return Number(
        "decode_efficiency",
        (*measured, *predicted.columns),
        lambda totals: speedup_of(totals[..., :4]) / predicted.statistic(totals[..., 3:]),
    )


def _rows(number: Number, table: Iterable[PromptSums]) -> dict[str, tuple[PromptSums, list[float]]]:
    """The row and its columns of each prompt that counts, by prompt id."""
    rows = {}
    for row in table:
        values = [getattr(row, column) for column in number.columns]
        if None not in values and values[-1]:
            rows[row.id] = row, values
    return rows


def _seconds(number: Number, baseline: bool) -> list[int]:
    """The columns of the number that have the seconds of the baseline, or of the draft."""
    return [
        i
        for i, column in enumerate(number.columns)
        if "seconds" in column and column.startswith("baseline") == baseline
    ]


def measured(
    number: Number, table: Iterable[PromptSums], started: StartError | None = None
) -> Measured:
    """The number over the table. Raises `NothingToMeasure` if no prompt counts."""
    rows = _rows(number, table).values()
    return measure(
        number.name,
        [values for _, values in rows],
        number.statistic,
        [row.group for row, _ in rows],
        number.ends,
        started,
        [_seconds(number, True), _seconds(number, False)],
    )


def measured_or_none(
    number: Number, table: Iterable[PromptSums], started: StartError | None = None
) -> Measured | None:
    """The number over the table; None if no prompt counts."""
    try:
        return measured(number, table, started)
    except NothingToMeasure:
        return None


def difference(
    number: Number,
    table: Iterable[PromptSums],
    over: Iterable[PromptSums],
    started: StartError | None = None,
    rival: Number | None = None,
) -> Measured | None:
    """The number of one table minus the number of another, paired by prompt.

    The two have one baseline. rival: the other's number, if it differs; of the same columns. None
    if no prompt counts in both tables.
    """
    mine, other = _rows(number, table), _rows(number, over)
    pairs = [(row, values + other[key][1]) for key, (row, values) in mine.items() if key in other]

    width = len(number.columns)
    alone, drafting = _seconds(number, True), _seconds(number, False)
    servers = [[*alone, *(width + i for i in alone)], drafting, [width + i for i in drafting]]

    def apart(totals: Floats) -> Floats:
        others = (rival or number).statistic(totals[..., width:])
        return number.statistic(totals[..., :width]) - others

    if not pairs:
        return None
    columns, groups = [values for _, values in pairs], [row.group for row, _ in pairs]
    return measure(f"gain of {number.name}", columns, apart, groups, around, started, servers)


class PositionAcceptance(Part):
    """Acceptance at one position of the draft, over all drafts, defined as in vLLM's counters."""

    position: Positive
    drafts: Count = Field(description="all drafts: whole steps with a drafted token")
    marginal: Share = Field(description="share of drafts whose tokens up to here were all accepted")
    conditional: Share | None = Field(
        description="the same, among drafts whose tokens before were all accepted"
    )


def per_position(table: Iterable[PromptSums]) -> list[PositionAcceptance]:
    """Acceptance at positions i = 1..longest draft, over all drafts of whole steps.

    marginal_i: share of drafts whose first i tokens were all accepted, which is false for a draft
    shorter than i. conditional_i is marginal_i / marginal_(i-1).
    """
    drafting = [(row.group, row.accepted_at) for row in table if row.accepted_at and row.drafted]
    if not drafting:
        raise NothingToMeasure("nothing was drafted")
    longest = max(len(counts) for _, counts in drafting)
    padded = [(group, counts + [0] * (longest - len(counts))) for group, counts in drafting]

    def among(earlier: int, i: int) -> Share | None:
        """The share of drafts with i accepted tokens among drafts with `earlier` accepted ones."""
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
    """Time of a draft of one token / time of one target step."""
    return float(costs.draft(1.0)) / costs.target_step_ms


class Percentiles(Part):
    """Percentiles of a time in milliseconds."""

    p50: Quantity
    p95: Quantity
    p99: Quantity

    @classmethod
    def of(cls, seconds: Sequence[float] | Floats) -> Self:
        """The percentiles of times in seconds."""
        p50, p95, p99 = (1000 * np.percentile(seconds, [50, 95, 99])).tolist()
        return cls(p50=p50, p95=p95, p99=p99)


def itl_ms(runs: Sequence[PromptRun]) -> Percentiles:
    """Time between tokens in the decode phase; that of a step is spread evenly over its tokens."""
    seconds = np.array([s for run in runs for s in run.block_seconds])
    tokens = np.array([k for run in runs for k in run.block_tokens], dtype=np.int64)
    if not tokens.sum():
        raise NothingToMeasure("no token was emitted after the prefill")
    return Percentiles.of(np.repeat(seconds / tokens, tokens))


class OfBoth(Part):
    """A count for the target and one for the draft."""

    target: Count
    draft: Count


class Memory(Part):
    """Bytes in memory of the models, as measured and as engines load them."""

    target_bytes: Positive
    draft_bytes: Count = Field(description="shared tensors not counted")
    kv_bytes_per_token: OfBoth

    @computed_field(description="draft_bytes / target_bytes")  # type: ignore[prop-decorator]
    @property
    def overhead(self) -> float:
        """Bytes of the draft / bytes of the target."""
        return self.draft_bytes / self.target_bytes


# --- Categories ---


class CategoryNumbers(Part):
    """The numbers of one category; null if its prompts have no values for a number."""

    alpha: Share | None
    tau: Measured | None
    speedup: Measured | None


def by_category(
    table: Iterable[PromptSums], started: StartError | None = None
) -> dict[str, CategoryNumbers]:
    """The `COMPARED` numbers of each category; prompts without a category are left out."""
    categories: dict[str, list[PromptSums]] = {}
    for row in table:
        if row.category is not None:
            categories.setdefault(row.category, []).append(row)
    return {
        name: CategoryNumbers.model_validate(
            {number.name: measured_or_none(number, rows, started) for number in COMPARED}
        )
        for name, rows in sorted(categories.items())
    }
