"""The numbers of a report, as pure functions of the raw log of an evaluation (runs.py).

Every measured number is a ratio of sums over prompts, its interval that of intervals.py.
docs/metrics.md says in prose what is in each number and what is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import Field, model_validator

from eval.decoding.prompt_run import PromptRun
from eval.measuring.cost import break_even_alpha, ceiling_speedup
from eval.measuring.intervals import (
    Count,
    Measured,
    NothingToMeasure,
    Part,
    Positive,
    Quantity,
    Rows,
    Share,
    difference,
    measure_rows,
    ratio,
    share,
)
from eval.measuring.runs import Agreement, DraftLog, Floats, StepCosts

T = TypeVar("T")


def pair(
    runs: Sequence[PromptRun], baseline: Sequence[PromptRun]
) -> list[tuple[PromptRun, PromptRun]]:
    """(run, baseline run) of each prompt, in the order of `runs`.

    Raises ValueError where the two logs are not of the same prompts.
    """
    by_prompt = {run.prompt_id: run for run in baseline}
    _same_prompts([run.prompt_id for run in runs], list(by_prompt))
    return [(run, by_prompt[run.prompt_id]) for run in runs]


def _same_prompts(ids: Iterable[str], other_ids: Iterable[str]) -> None:
    odd = sorted(set(ids) ^ set(other_ids))
    if odd:
        raise ValueError(
            f"a paired comparison needs the same prompts on both sides, but {len(odd)} are on one "
            f"side only, {odd[0]!r} among them"
        )


# --- Acceptance ---


def alpha(agreements: Sequence[Agreement]) -> Share:
    """Mean over positions of sum_x min(p, q) (arXiv 2211.17192, theorem 3.5)."""
    rows = _alpha_rows(agreements).values()
    return share("alpha", [(group, total, positions) for group, (total, positions) in rows])


def _alpha_rows(agreements: Sequence[Agreement]) -> Rows:
    rows: Rows = {}
    for answer in agreements:
        total, positions = answer.alpha_sum, float(answer.positions)
        # bf16 or fp32 sums of probabilities may pass 1 in the last digits
        if not -1e-3 * positions <= total <= (1 + 1e-3) * positions:
            raise ValueError(
                f"prompt {answer.prompt_id!r}: alpha_sum {total} is not within 0 and the "
                f"{answer.positions} positions it was summed over"
            )
        if positions:
            rows[answer.prompt_id] = answer.group, (min(max(total, 0.0), positions), positions)
    return rows


class StepSums(NamedTuple):
    """Sums over the whole speculation steps of a prompt, or of many: floats or arrays (...)."""

    emitted: Any
    steps: Any  # target calls
    drafted: Any
    accepted: Any
    by_model: Any  # drafted tokens that took a draft step: n-gram speculation takes none
    seconds: Any

    @classmethod
    def of(cls, columns: Floats) -> Self:
        """From columns (..., 6) in the order above."""
        return cls(*np.moveaxis(columns, -1, 0))


def _step_rows(runs: Sequence[PromptRun]) -> Rows:
    """`StepSums` of each prompt; prompts without a whole step are left out."""
    rows: Rows = {}
    for run in runs:
        if whole := run.whole_blocks:
            columns = run.block_tokens, run.drafted, run.accepted, run.free, run.block_seconds
            emitted, drafted, accepted, free, seconds = (
                float(sum(column[:whole])) for column in columns
            )
            sums = StepSums(emitted, float(whole), drafted, accepted, drafted - free, seconds)
            rows[run.prompt_id] = run.group, sums
    return rows


def tau(runs: Sequence[PromptRun]) -> Measured:
    """Mean acceptance length: tokens emitted per target call in the decode phase.

    The bonus token counts. Tokens of the prefill and of a last step that the length limit cut do
    not count.
    """
    return measure_rows("tau", _step_rows(runs))


def mean_drafted(runs: Sequence[PromptRun]) -> float:
    """Drafted tokens per target call, over the whole speculation steps."""
    rows = _step_rows(runs)
    if not rows:
        raise NothingToMeasure("no target call of the decode phase is whole")
    totals = StepSums.of(np.sum([sums for _, sums in rows.values()], axis=0))
    return float(totals.drafted / totals.steps)


def accepted_over_drafted(runs: Sequence[PromptRun]) -> Share:
    """Accepted over drafted tokens, over the whole speculation steps."""
    rows = [(group, StepSums(*columns)) for group, columns in _step_rows(runs).values()]
    drafting = [(group, sums.accepted, sums.drafted) for group, sums in rows if sums.drafted]
    return share("accepted_over_drafted", drafting)


class PositionAcceptance(Part):
    """Acceptance at one position of the draft, over all drafts, as vLLM's counters have it."""

    position: Positive
    drafts: Count = Field(description="all drafts: whole blocks with a drafted token")
    marginal: Share = Field(description="share of drafts whose tokens up to here were all accepted")
    conditional: Share | None = Field(
        description="the same, among drafts whose tokens before were all accepted"
    )


def per_position(runs: Sequence[PromptRun]) -> list[PositionAcceptance]:
    """Acceptance at i = 1..longest draft, over all drafts of the whole blocks.

    marginal_i: share of drafts whose first i tokens were all accepted; a shorter draft has not
    accepted i. conditional_i is marginal_i / marginal_(i-1).
    """
    longest = max((max(run.drafted[: run.whole_blocks], default=0) for run in runs), default=0)
    if not longest:
        raise NothingToMeasure("nothing was drafted")
    drafts = []  # group, and accepted tokens of each draft, by prompt
    for run in runs:
        pairs = list(zip(run.drafted, run.accepted, strict=True))[: run.whole_blocks]
        if accepted := [count for drafted, count in pairs if drafted]:
            drafts.append((run.group, np.array(accepted)))

    def rows(least: int, i: int) -> list[tuple[str | None, float, float]]:
        """Drafts with i accepted tokens or more, among those with `least` or more, by prompt."""
        counts = [(group, (n >= i).sum(), (n >= least).sum()) for group, n in drafts]
        return [row for row in counts if row[2]]

    return [
        PositionAcceptance(
            position=i,
            drafts=sum(len(counts) for _, counts in drafts),
            marginal=share("marginal", rows(0, i)),
            conditional=share("conditional", passed) if (passed := rows(i - 1, i)) else None,
        )
        for i in range(1, longest + 1)
    ]


def replayed_blocks(agreed: Sequence[bool], gamma: int) -> list[int]:
    """Tokens that each whole block of greedy decoding with `gamma` drafted tokens would emit.

    agreed: for each token of the target's answer, whether argmax q is that token, teacher-forced.
    Exact for a draft that drafts every token as its first: up to its first wrong token it has seen
    nothing but the target's text. The answer ends at its length limit: near it drafts are as short
    as there is room, and a last block so cut is left out.
    """
    emitted, at, drafted = [], 1, gamma  # the first token comes from the prefill
    while at < len(agreed):
        drafted = min(gamma, len(agreed) - at - 1)
        right = 0
        while right < drafted and agreed[at + right]:
            right += 1
        emitted.append(right + 1)
        at += emitted[-1]
    return emitted if drafted == gamma else emitted[:-1]


def replayed_tau(agreements: Sequence[Agreement], gamma: int) -> Measured:
    """tau of greedy decoding with drafts of `gamma` tokens, from the log of alpha alone."""
    rows: Rows = {}
    for answer in agreements:
        if blocks := replayed_blocks([value == 1.0 for value in answer.values], gamma):
            rows[answer.prompt_id] = answer.group, (sum(blocks), len(blocks))
    return measure_rows("replayed tau", rows)


# --- Cost and speed ---


class Costs(Part):
    """Isolated forwards at the run's mean context length, batch size 1, milliseconds."""

    draft_step_ms: Quantity
    draft_block_ms: Quantity = Field(default=0.0, description="once a draft, besides its steps")
    target_step_ms: Quantity
    target_verify_ms: dict[str, Quantity] = Field(description="by number of tokens in the call")
    context_length: Count
    ci95: dict[str, tuple[float, float]] = Field(
        {},
        description="of the median over the rounds in which the steps were timed: of the steps and "
        "of what is computed from them, by name; prompts as they are. A break-even of 1: none.",
    )

    @classmethod
    def of(cls, costs: StepCosts, runs: Sequence[PromptRun]) -> Self:
        """The step costs in milliseconds, with what they leave open of numbers on these runs."""
        numbers: dict[str, Callable[[StepCosts], float]] = {
            "draft_step_ms": lambda steps: 1000 * steps.draft_step,
            "target_step_ms": lambda steps: 1000 * steps.target_step,
            "c": c,
            "ceiling_speedup": ceiling_speedup,
            "break_even_alpha": lambda steps: 1.0 if (a := break_even_alpha(steps)) is None else a,
        }
        if rows := _step_rows(runs):
            gamma, totals = mean_drafted(runs), np.sum([sums for _, sums in rows.values()], axis=0)
            numbers["verify_ratio"] = lambda steps: verify_ratio(steps, gamma)
            numbers["predicted_speedup"] = lambda steps: float(_predicted(totals, steps))
        intervals = {name: costs.interval(number) for name, number in numbers.items()}
        verify = sorted(costs.target_verify.items())
        return cls(
            draft_step_ms=1000 * costs.draft_step,
            draft_block_ms=1000 * costs.draft_block,
            target_step_ms=1000 * costs.target_step,
            target_verify_ms={str(width): 1000 * seconds for width, seconds in verify},
            context_length=costs.context_length,
            ci95={name: ends for name, ends in intervals.items() if ends},
        )

    def steps(self) -> StepCosts:
        """The step costs in seconds again."""
        return StepCosts(
            self.draft_step_ms / 1000,
            self.target_step_ms / 1000,
            {int(width): ms / 1000 for width, ms in self.target_verify_ms.items()},
            self.context_length,
            self.draft_block_ms / 1000,
        )


def c(costs: StepCosts) -> float:
    """Time of a draft of one token over time of one target step."""
    return float(costs.draft(1.0)) / costs.target_step


def verify_ratio(costs: StepCosts, gamma: float) -> float:
    """Time of a target call on gamma + 1 tokens over the time of one on a single token."""
    return float(costs.verify(gamma + 1.0)) / costs.target_step


def _predicted(columns: Floats, costs: StepCosts) -> Floats:
    """From `StepSums` as columns (..., 6)."""
    sums = StepSums.of(columns)
    step = costs.draft(sums.by_model / sums.steps) + costs.verify(sums.drafted / sums.steps + 1.0)
    return np.asarray(sums.emitted / sums.steps * costs.target_step / step, dtype=np.float64)


def predicted_speedup(runs: Sequence[PromptRun], costs: StepCosts) -> Measured:
    """tau * t_target(1) / (gamma * t_draft + t_target(gamma + 1)), gamma the mean drafted length.

    Tokens of n-gram speculation count in gamma for the target alone. The interval is that of tau
    and gamma; `Costs.ci95` has the uncertainty of the step costs.
    """
    return measure_rows("predicted_speedup", _step_rows(runs), lambda t: _predicted(t, costs))


def _speed_rows(runs: Sequence[PromptRun], baseline: Sequence[PromptRun]) -> Rows:
    return {
        run.prompt_id: (run.group, (base.seconds, len(base.tokens), run.seconds, len(run.tokens)))
        for run, base in pair(runs, baseline)
    }


def speedup_of(totals: Floats) -> Floats:
    """Seconds a token without a draft over the same with it, of both sums of each in this order."""
    return ratio(totals[..., :2]) / ratio(totals[..., 2:])


def speedup(runs: Sequence[PromptRun], baseline: Sequence[PromptRun]) -> Measured:
    """Wall seconds per emitted token without a draft over the same with it, prefill included."""
    return measure_rows("speedup", _speed_rows(runs, baseline), speedup_of)


def decode_efficiency(
    runs: Sequence[PromptRun], baseline: Sequence[PromptRun], costs: StepCosts
) -> Measured:
    """Decode-phase speed-up over predicted_speedup: 1 means no overhead beyond the two models.

    Both are over the whole speculation steps, without the prefill.
    """
    pair(runs, baseline)
    mine, other = _step_rows(runs), _step_rows(baseline)
    rows: Rows = {key: (mine[key][0], mine[key][1] + other[key][1]) for key in mine if key in other}

    def efficiency(columns: Floats) -> Floats:
        drafting, plain = StepSums.of(columns[..., :6]), StepSums.of(columns[..., 6:])
        decode_speedup = plain.seconds / plain.emitted * drafting.emitted / drafting.seconds
        return np.asarray(decode_speedup / _predicted(columns[..., :6], costs))

    return measure_rows("decode_efficiency", rows, efficiency)


def _run_rows(
    runs: Sequence[PromptRun], columns: Callable[[PromptRun], tuple[float, float]]
) -> Rows:
    return {run.prompt_id: (run.group, columns(run)) for run in runs}


def tokens_per_s(runs: Sequence[PromptRun]) -> Measured:
    """Emitted tokens per wall second, prefill included."""
    return measure_rows("tokens_per_s", _run_rows(runs, lambda run: (len(run.tokens), run.seconds)))


def ttft_ms(runs: Sequence[PromptRun]) -> Measured:
    """Milliseconds from the start to the first token, mean over prompts."""
    return measure_rows("ttft_ms", _run_rows(runs, lambda run: (1000 * run.prefill_seconds, 1)))


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
        raise NothingToMeasure("itl_ms: no token was emitted after the prefill of an answer")
    p50, p95 = np.percentile(np.repeat(1000 * seconds / tokens, tokens), [50, 95])
    return Latency(p50=float(p50), p95=float(p95), tokens=int(tokens.sum()))


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


def memory(log: DraftLog) -> Memory:
    """Bytes of the two models in the form measured."""
    sizes = known(log.memory, "bytes")
    overhead = sizes["draft_bytes"] / sizes["target_bytes"]
    return Memory(**sizes, overhead=overhead, full_form_bytes=log.full_form_bytes)


# --- Comparison, categories ---


def gain(log: DraftLog, over: DraftLog) -> dict[str, Any]:
    """alpha, tau and speedup minus those of another draft, paired by prompt.

    None where one of the two has no such number, or they share no prompt that has it.
    """
    speeds = _speed_rows(log.runs, log.baseline), _speed_rows(over.runs, over.baseline)
    _same_prompts(*speeds)
    gained = {"alpha": None, "tau": None, "speedup": difference("speedup", *speeds, speedup_of)}
    if log.agreement is not None and over.agreement is not None:
        alphas = _alpha_rows(log.agreement), _alpha_rows(over.agreement)
        _same_prompts(*alphas)
        gained["alpha"] = known(difference("alpha", *alphas), "prompts")
    if "tau" not in log.missing | over.missing:
        gained["tau"] = difference("tau", _step_rows(log.runs), _step_rows(over.runs))
    return {"draft": log.name, "over": over.name, **gained}


class CategoryNumbers(Part):
    """One category of prompts; null where they hold nothing to measure it on."""

    alpha: Share | None
    tau: Measured | None
    speedup: Measured | None


def by_category(
    log: DraftLog,
    category_of: Callable[[PromptRun | Agreement], str | None],
    order: Iterable[str] | None = None,
) -> dict[str, CategoryNumbers]:
    """alpha, tau and speedup of each category; prompts without one are left out.

    order: of all categories; None: by name.
    """
    agreements = log.agreement or []
    names = {category_of(a) for a in agreements} | {category_of(run) for run in log.runs}
    numbers = {}
    for name in order or sorted(name for name in names if name is not None):
        if name not in names:
            continue
        pairs = [(r, base) for r, base in pair(log.runs, log.baseline) if category_of(r) == name]
        runs, baseline = [run for run, _ in pairs], [base for _, base in pairs]
        values = {
            "alpha": or_none(alpha, [a for a in agreements if category_of(a) == name]),
            "tau": None if "tau" in log.missing else or_none(tau, runs),
            "speedup": or_none(speedup, runs, baseline),
        }
        numbers[name] = CategoryNumbers.model_validate(values)
    return numbers


CONTEXTS = {  # classes of prompts by length: the most tokens that one has
    "below 512 tokens": 511,
    "512 to 2,048 tokens": 2_048,
    "2,048 to 8,192 tokens": 8_192,
    "above 8,192 tokens": math.inf,
}


def by_context(log: DraftLog) -> dict[str, CategoryNumbers]:
    """`by_category` by the prompt's length, the shortest first; unknown lengths are left out."""

    def length(row: PromptRun | Agreement) -> str | None:
        tokens = row.prompt_tokens  # 0: a server did not tell
        return next(name for name, most in CONTEXTS.items() if tokens <= most) if tokens else None

    return by_category(log, length, CONTEXTS)


def or_none(metric: Callable[..., Measured], *logs: Sequence[object]) -> Measured | None:
    """The metric of the logs; None where they hold nothing to measure it on."""
    try:
        return metric(*logs)
    except NothingToMeasure:
        return None


# --- What a draft's log holds; each raises `NothingToMeasure` where it does not ---


def known(value: T | None, name: str) -> T:
    if value is None:
        raise NothingToMeasure(f"the log holds no {name}")
    return value


def timed(log: DraftLog) -> StepCosts:
    """The step costs."""
    return known(log.costs, "step costs")


def agreed(log: DraftLog) -> list[Agreement]:
    """The log of alpha."""
    return known(log.agreement, "teacher-forced distributions")


def blocks(log: DraftLog) -> list[PromptRun]:
    """The runs, where it is known what they drafted and accepted."""
    if reason := log.missing.get("tau"):
        raise NothingToMeasure(reason)
    return log.runs
