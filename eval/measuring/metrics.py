"""The numbers of a report, as pure functions of the raw log of an evaluation.

The log (eval/measuring/log.py) is one `PromptRun` a prompt and decoder and one `Agreement` a prompt
and draft. Every measured number is a ratio of sums over prompts, and its interval comes from one
bootstrap over prompts, or over their groups (not over tokens: the tokens of one answer depend on
each other). docs/metrics.md says in prose what is in each number and what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from eval.measuring.log import Agreement, DraftLog, Floats, PromptRun, StepCosts
from eval.reporting.report import (
    Both,
    CategoryNumbers,
    Costs,
    Latency,
    Measured,
    Memory,
    PositionAcceptance,
    Share,
    TemperaturePoint,
)

RESAMPLES = 10_000
SEED = 20240817

# A loop is a stretch of at least LOOP_TOKENS tokens that repeats a pattern of at most LOOP_PERIOD
# tokens at least LOOP_REPEATS times. The floor keeps "...", "===" and deep indentation out.
LOOP_PERIOD = 64
LOOP_REPEATS = 3
LOOP_TOKENS = 8

T = TypeVar("T")
# Prompt id -> its group and its columns, whose totals a statistic is a function of
Rows = dict[str, tuple[str | None, tuple[float, ...]]]


class NothingToMeasure(ValueError):
    """The log holds nothing that the asked number could be computed from."""


# --- The interval ---


def bootstrap_totals(columns: Floats, resamples: int = RESAMPLES, seed: int = SEED) -> Floats:
    """Column sums of `resamples` draws, with replacement, of as many rows as there are.

    columns: (prompts, K), one row a prompt. Returns (resamples, K). The seed is fixed, so two
    calls on equally many prompts draw the same ones.
    """
    n, width = columns.shape
    rng = np.random.default_rng(seed)
    totals = np.empty((resamples, width))
    chunk = max(1, 2_000_000 // (n * width))  # bounds memory to tens of megabytes
    for start in range(0, resamples, chunk):
        stop = min(start + chunk, resamples)
        drawn = rng.integers(0, n, size=(stop - start, n))
        totals[start:stop] = columns[drawn].sum(axis=1)
    return totals


def ratio(totals: Floats) -> Floats:
    """The first column's total over that of the second."""
    return totals[..., 0] / totals[..., 1]


def measure(
    name: str,
    rows: Sequence[Sequence[float]],
    statistic: Callable[[Floats], Floats] = ratio,
    groups: Sequence[str | None] | None = None,
) -> Measured:
    """`statistic` of the column totals, with its 95% percentile bootstrap interval.

    rows: one a prompt, K columns. statistic: (..., K) totals -> (...) values. groups: of each row;
    rows of one group are drawn together, one without a group alone. Raises `NothingToMeasure`
    without rows, ValueError where the result is not a finite number.
    """
    if not rows:
        raise NothingToMeasure(f"no prompt holds anything to measure {name} on")
    columns = np.asarray(rows, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = statistic(columns.sum(axis=0))
        values = statistic(bootstrap_totals(_by_group(columns, groups) if groups else columns))
    if not (np.isfinite(mean) and np.isfinite(values).all()):
        raise ValueError(
            f"{name} is not a finite number ({mean} over all prompts): a time or a count in the "
            f"log is zero or missing"
        )
    low, high = np.percentile(values, [2.5, 97.5])
    return Measured(mean=float(mean), ci95=(float(low), float(high)), n=len(columns))


def _by_group(columns: Floats, groups: Sequence[str | None]) -> Floats:
    """Sums of the rows of each group: what is drawn as a whole can as well be added up before."""
    places: dict[str | int, int] = {}
    index = [
        places.setdefault(i if group is None else group, len(places))
        for i, group in enumerate(groups)
    ]
    sums = np.zeros((len(places), columns.shape[1]))
    np.add.at(sums, index, columns)
    return sums


def measure_rows(name: str, rows: Rows, statistic: Callable[[Floats], Floats] = ratio) -> Measured:
    """`measure` of rows that know their groups."""
    columns = [columns for _, columns in rows.values()]
    return measure(name, columns, statistic, [group for group, _ in rows.values()])


def difference(
    name: str, mine: Rows, over: Rows, statistic: Callable[[Floats], Floats] = ratio
) -> Measured | None:
    """`statistic` of some rows minus that of others, both on the same resampled prompts.

    None where they share no prompt.
    """
    both = {
        key: (group, (*columns, *over[key][1]))
        for key, (group, columns) in mine.items()
        if key in over
    }

    def apart(totals: Floats) -> Floats:
        width = totals.shape[-1] // 2
        return statistic(totals[..., :width]) - statistic(totals[..., width:])

    return measure_rows(f"gain of {name}", both, apart) if both else None


# --- The log ---


def check_runs(runs: Sequence[PromptRun], blocks: bool = True) -> None:
    """Raise ValueError, naming the prompt, for a log that contradicts itself.

    blocks: whether drafted and accepted tokens are known.
    """
    seen: set[str] = set()
    for run in runs:
        problem = _problem(run) or (_block_problem(run) if blocks else None)
        if run.prompt_id in seen:
            problem = "it occurs twice"
        if problem:
            raise ValueError(f"the log of prompt {run.prompt_id!r} cannot be used: {problem}")
        seen.add(run.prompt_id)


def _problem(run: PromptRun) -> str | None:
    calls, first = len(run.block_tokens), run.prefill_tokens
    if not len(run.block_seconds) == len(run.drafted) == len(run.accepted) == calls:
        return "block_seconds, block_tokens, drafted and accepted differ in length"
    if first < 1 or len(run.tokens) != first + sum(run.block_tokens):
        return f"{len(run.tokens)} tokens, but {first} + {sum(run.block_tokens)} were emitted"
    if run.prefill_seconds <= 0 or any(seconds <= 0 for seconds in run.block_seconds):
        return "a time is zero or negative"
    return None


def _block_problem(run: PromptRun) -> str | None:
    last = len(run.block_tokens) - 1
    blocks = zip(run.block_tokens, run.drafted, run.accepted, strict=True)
    for i, (emitted, drafted, accepted) in enumerate(blocks):
        cut = i == last and run.last_truncated
        # a drafted token that ends the text is the end of its draft, and nothing follows it
        ended = i == last and 1 <= emitted == accepted == drafted
        if not 0 <= accepted <= drafted:
            return f"block {i} accepted {accepted} of {drafted} drafted tokens"
        if not (emitted == accepted + 1 or ended or (cut and 1 <= emitted <= accepted)):
            return f"block {i} emitted {emitted} tokens with {accepted} accepted (one more is due)"
    return None


def pair(
    runs: Sequence[PromptRun], baseline: Sequence[PromptRun]
) -> list[tuple[PromptRun, PromptRun]]:
    """(run, baseline run) of each prompt, in the order of `runs`.

    Raises ValueError where the two logs are not of the same prompts.
    """
    others = {run.prompt_id: run for run in baseline}
    _same_prompts([run.prompt_id for run in runs], list(others))
    return [(run, others[run.prompt_id]) for run in runs]


def _same_prompts(ids: Iterable[str], other_ids: Iterable[str]) -> None:
    odd = sorted(set(ids) ^ set(other_ids))
    if odd:
        raise ValueError(
            f"a paired comparison needs the same prompts on both sides, but {len(odd)} are on one "
            f"side only, {odd[0]!r} among them"
        )


# --- Acceptance ---


def alpha(agreements: Sequence[Agreement]) -> Measured:
    """Mean over positions of sum_x min(p, q) (arXiv 2211.17192, theorem 3.5)."""
    return measure_rows("alpha", _alpha_rows(agreements))


def both(metric: Callable[[Sequence[PromptRun]], T], log: DraftLog) -> Both[T]:
    """A metric of the runs without a draft and with it."""
    return Both(baseline=metric(log.baseline), speculative=metric(log.runs))


def share(name: str, rows: Sequence[tuple[str | None, float, float]]) -> Share:
    """Sum over count of one row (group, sum, count) a prompt; each sum within 0 and its count."""
    sums = [(min(max(total, 0.0), count), count) for _, total, count in rows]
    return Share.model_validate(measure(name, sums, groups=[row[0] for row in rows]))


def _alpha_rows(agreements: Sequence[Agreement]) -> Rows:
    rows: Rows = {}
    for one in agreements:
        total, positions = one.alpha_sum, float(one.positions)
        # bf16 or fp32 sums of probabilities may pass 1 in the last digits
        if not -1e-3 * positions <= total <= (1 + 1e-3) * positions:
            raise ValueError(
                f"prompt {one.prompt_id!r}: alpha_sum {total} is not within 0 and the "
                f"{one.positions} positions it was summed over"
            )
        if positions:
            rows[one.prompt_id] = one.group, (min(max(total, 0.0), positions), positions)
    return rows


def _whole(run: PromptRun) -> tuple[float, ...]:
    """Tokens, target calls, drafted, accepted and seconds of a run's whole blocks."""
    parts = (run.block_tokens, [1] * run.whole_blocks, run.drafted, run.accepted, run.block_seconds)
    return tuple(float(sum(part[: run.whole_blocks])) for part in parts)


def _block_rows(runs: Sequence[PromptRun]) -> Rows:
    return {run.prompt_id: (run.group, _whole(run)) for run in runs if run.whole_blocks}


def tau(runs: Sequence[PromptRun]) -> Measured:
    """Block efficiency: tokens emitted per target call in the decode phase.

    The bonus token is in; what the prefill emitted and a last block that the length limit cut are
    out.
    """
    return measure_rows("tau", _block_rows(runs))


def mean_drafted(runs: Sequence[PromptRun]) -> float:
    """Drafted tokens per target call, over the blocks that tau is taken on."""
    totals = np.sum([_whole(run) for run in runs], axis=0)
    if not runs or not totals[1]:
        raise NothingToMeasure("no target call of the decode phase is whole")
    return float(totals[2] / totals[1])


def drafted_calls(runs: Sequence[PromptRun]) -> Measured:
    """Share of target calls with a drafted token to verify: under 1 where a drafter has none."""
    rows = _run_rows(
        [run for run in runs if run.whole_blocks],
        lambda run: (sum(n > 0 for n in run.drafted[: run.whole_blocks]), run.whole_blocks),
    )
    return measure_rows("drafted_calls", rows)


def accepted_over_drafted(runs: Sequence[PromptRun]) -> Measured:
    """Accepted over drafted tokens, over the blocks that tau is taken on."""
    rows = {key: row for key, row in _block_rows(runs).items() if row[1][2]}
    return measure_rows("accepted_over_drafted", rows, lambda t: t[..., 3] / t[..., 2])


def per_position(runs: Sequence[PromptRun]) -> list[PositionAcceptance]:
    """Acceptance at i = 1..longest draft, over the whole blocks that drafted at least i tokens.

    marginal: share of these whose first i tokens were all accepted; conditional: the same among
    those of them whose first i-1 were. With drafts of one length conditional_i is
    marginal_i / marginal_(i-1); with ragged ones it is that ratio within one set of drafts, so
    it never passes 1.
    """
    blocks = [
        list(zip(run.drafted[: run.whole_blocks], run.accepted[: run.whole_blocks], strict=True))
        for run in runs
    ]
    longest = max((drafted for run in blocks for drafted, _ in run), default=0)
    if not longest:
        raise NothingToMeasure("nothing was drafted")
    result = []
    for i in range(1, longest + 1):
        reached = [[accepted for drafted, accepted in run if drafted >= i] for run in blocks]
        rows = [
            (run.group, sum(a >= i for a in places), sum(a >= i - 1 for a in places), len(places))
            for run, places in zip(runs, reached, strict=True)
        ]
        passed = [(group, hits, tries) for group, hits, tries, _ in rows if tries]
        result.append(
            PositionAcceptance(
                position=i,
                drafts=sum(row[3] for row in rows),
                marginal=share("marginal", [(row[0], row[1], row[3]) for row in rows if row[3]]),
                conditional=share("conditional", passed) if passed else None,
            )
        )
    return result


def replayed_blocks(agreed: Sequence[bool], gamma: int, stopped: bool) -> list[int]:
    """Tokens that each whole block of greedy decoding with `gamma` drafted tokens would emit.

    agreed: for each token of the target's answer, whether argmax q is that token, teacher-forced.
    stopped: the last token ends the text. Exact: up to its first wrong token a draft has seen
    nothing but the target's text, and what it drafts beyond does not count. Where no token ends the
    text, drafts near its end are as short as there is room, and a last block so cut is left out.
    """
    emitted, at = [], 1  # the first token comes from the prefill
    cut = False
    while at < len(agreed):
        room = len(agreed) - at if stopped else len(agreed) - at - 1
        drafted = min(gamma, room)
        right = 0
        while right < drafted and agreed[at + right]:
            right += 1
        emitted.append(min(right + 1, len(agreed) - at))
        at += emitted[-1]
        cut = drafted < gamma and not stopped
    return emitted[:-1] if cut else emitted


def replayed(agreement: Agreement, gamma: int) -> list[int]:
    """`replayed_blocks` of one answer."""
    right = [value == 1.0 for value in agreement.values]
    return replayed_blocks(right, gamma, agreement.stopped)


def replayed_tau(agreements: Sequence[Agreement], gamma: int) -> Measured:
    """tau of greedy decoding with drafts of `gamma` tokens, from the log of alpha alone."""
    rows: Rows = {}
    for one in agreements:
        if emitted := replayed(one, gamma):
            rows[one.prompt_id] = one.group, (sum(emitted), len(emitted))
    return measure_rows("replayed tau", rows)


# --- Cost and speed ---


def c(costs: StepCosts) -> float:
    """Time of a draft of one token over time of one target step."""
    costs.verify(1.0)  # the costs are positive
    return float(costs.draft(1.0)) / costs.target_step


def verify_ratio(costs: StepCosts, gamma: float) -> float:
    """Time of a target call on gamma + 1 tokens over the time of one on a single token."""
    return float(costs.verify(gamma + 1.0)) / costs.target_step


def _predicted(tau: Floats, gamma: Floats, costs: StepCosts) -> Floats:
    block = costs.draft(gamma) + costs.verify(gamma + 1.0)
    return tau * costs.target_step / block


def predicted_speedup(runs: Sequence[PromptRun], costs: StepCosts) -> Measured:
    """tau * t_target(1) / (gamma * t_draft + t_target(gamma + 1)), gamma the mean drafted length.

    The interval is that of tau and gamma; the step costs are taken as exact.
    """
    return measure_rows(
        "predicted_speedup",
        _block_rows(runs),
        lambda t: _predicted(t[..., 0] / t[..., 1], t[..., 2] / t[..., 1], costs),
    )


def _speed_rows(runs: Sequence[PromptRun], baseline: Sequence[PromptRun]) -> Rows:
    return {
        run.prompt_id: (run.group, (base.seconds, len(base.tokens), run.seconds, len(run.tokens)))
        for run, base in pair(runs, baseline)
    }


def _decode_rows(runs: Sequence[PromptRun], baseline: Sequence[PromptRun]) -> Rows:
    """Seconds and tokens as above, of whole blocks alone; target calls and drafted tokens."""
    rows: Rows = {}
    for run, base in pair(runs, baseline):
        if run.whole_blocks and base.whole_blocks:
            tokens, calls, drafted, _, seconds = _whole(run)
            base_tokens, *_, base_seconds = _whole(base)
            columns = (base_seconds, base_tokens, seconds, tokens, calls, drafted)
            rows[run.prompt_id] = run.group, columns
    return rows


def speedup_of(totals: Floats) -> Floats:
    """Seconds a token without a draft over the same with it, of both sums of each in this order."""
    return ratio(totals[..., :2]) / ratio(totals[..., 2:])


def speedup(runs: Sequence[PromptRun], baseline: Sequence[PromptRun]) -> Measured:
    """Wall seconds per emitted token without a draft over the same with it, prefill included."""
    return measure_rows("speedup", _speed_rows(runs, baseline), speedup_of)


def decode_speedup(runs: Sequence[PromptRun], baseline: Sequence[PromptRun]) -> Measured:
    """`speedup` without the prefill, over the blocks that tau is taken on."""
    return measure_rows("decode_speedup", _decode_rows(runs, baseline), speedup_of)


def decode_efficiency(
    runs: Sequence[PromptRun], baseline: Sequence[PromptRun], costs: StepCosts
) -> Measured:
    """decode_speedup over predicted_speedup: 1 means no overhead beyond the two models."""

    def efficiency(t: Floats) -> Floats:
        return speedup_of(t) / _predicted(t[..., 3] / t[..., 4], t[..., 5] / t[..., 4], costs)

    return measure_rows("decode_efficiency", _decode_rows(runs, baseline), efficiency)


def _run_rows(
    runs: Sequence[PromptRun], columns: Callable[[PromptRun], tuple[float, float]]
) -> Rows:
    return {run.prompt_id: (run.group, columns(run)) for run in runs}


def tokens_per_s(runs: Sequence[PromptRun]) -> Measured:
    """Emitted tokens per wall second, prefill included."""
    return measure_rows("tokens_per_s", _run_rows(runs, lambda run: (len(run.tokens), run.seconds)))


# Prompts decoded together, all from the start on: the batch took as long as its slowest row.
Batch = Sequence[PromptRun]


def by_batch(batches: Sequence[Batch], baseline: Sequence[Batch]) -> dict[str, Any]:
    """tokens_per_s, speedup and tau of batches decoded with a draft, and of the same without.

    A batch is what is resampled, n the number of batches. Raises ValueError where two batches of a
    pair hold other prompts.
    """
    rows: list[tuple[float, ...]] = []
    for batch, base in zip(batches, baseline, strict=True):
        pair(batch, base)
        rows.append((*_batch_row(base), *_batch_row(batch)))
    whole = [[_whole(run)[:2] for run in batch if run.whole_blocks] for batch in batches]
    return {
        "tokens_per_s": Both(
            baseline=measure("tokens_per_s", rows, lambda t: t[..., 1] / t[..., 0]),
            speculative=measure("tokens_per_s", rows, lambda t: t[..., 3] / t[..., 2]),
        ),
        "speedup": measure("speedup", rows, speedup_of),
        "tau": measure("tau", [np.sum(batch, axis=0) for batch in whole if batch]),
    }


def _batch_row(batch: Batch) -> tuple[float, float]:
    """Seconds and tokens."""
    return max(run.seconds for run in batch), sum(len(run.tokens) for run in batch)


def ttft_ms(runs: Sequence[PromptRun]) -> Measured:
    """Milliseconds from the start to the first token, mean over prompts."""
    return measure_rows("ttft_ms", _run_rows(runs, lambda run: (1000 * run.prefill_seconds, 1)))


def itl_ms(runs: Sequence[PromptRun]) -> Latency:
    """Inter-token latency, milliseconds: a block's time is spread evenly over its tokens."""
    seconds = np.array([s for run in runs for s in run.block_seconds])
    tokens = np.array([k for run in runs for k in run.block_tokens], dtype=np.int64)
    if not tokens.sum():
        raise NothingToMeasure("itl_ms: no token was emitted after the prefill of an answer")
    p50, p95 = np.percentile(np.repeat(1000 * seconds / tokens, tokens), [50, 95])
    return Latency(p50=float(p50), p95=float(p95), tokens=int(tokens.sum()))


# --- Vanity check, comparison, categories ---


def looped(tokens: Sequence[int]) -> NDArray[np.bool_]:
    """(T,) True where a token stands in a repeated loop.

    A loop of period d is a maximal stretch in which every token from the (d+1)th on equals the
    one d before it. It counts if d <= 64, the pattern stands there at least 3 times, and the
    stretch has at least 8 tokens. Loops are easy to draft and flatter a report.
    """
    ids = np.asarray(tokens)
    flags = np.zeros(len(ids), dtype=bool)
    for period in range(1, min(LOOP_PERIOD, len(ids) // LOOP_REPEATS) + 1):
        same = np.r_[False, ids[period:] == ids[:-period], False]
        starts, stops = np.flatnonzero(same[1:] != same[:-1]).reshape(-1, 2).T
        shortest = max(LOOP_REPEATS * period, LOOP_TOKENS)
        for start, stop in zip(starts, stops, strict=True):
            if stop - start + period >= shortest:
                flags[start : stop + period] = True
    return flags


def loop_share(runs: Sequence[PromptRun]) -> Measured:
    """Share of the emitted tokens that stand in repeated loops (see `looped`)."""
    rows = _run_rows(runs, lambda run: (float(looped(run.tokens).sum()), len(run.tokens)))
    return measure_rows("loop_share", rows)


def gain(log: DraftLog, over: DraftLog) -> dict[str, Any]:
    """alpha, tau and speedup minus those of another draft, paired by prompt (fields of `Gain`).

    None where one of the two has no such number, or they share no prompt that has it.
    """
    rows = _speed_rows(log.runs, log.baseline), _speed_rows(over.runs, over.baseline)
    _same_prompts(*rows)
    found = {"speedup": difference("speedup", *rows, speedup_of), "alpha": None, "tau": None}
    if log.agreement is not None and over.agreement is not None:
        _same_prompts(*([a.prompt_id for a in one] for one in (log.agreement, over.agreement)))
        sides = _alpha_rows(log.agreement), _alpha_rows(over.agreement)
        found["alpha"] = difference("alpha", *sides)
    if "tau" not in log.missing | over.missing:
        found["tau"] = difference("tau", _block_rows(log.runs), _block_rows(over.runs))
    return {"draft": log.name, "over": over.name, **found}


def by_category(log: DraftLog) -> dict[str, CategoryNumbers]:
    """alpha, tau and speedup of each category; prompts without one are left out."""
    agreements = log.agreement or []
    pairs = pair(log.runs, log.baseline)
    names = {one.category for one in agreements} | {run.category for run in log.runs}
    result = {}
    for name in sorted(name for name in names if name is not None):
        mine = [(run, base) for run, base in pairs if run.category == name]
        runs, baseline = [run for run, _ in mine], [base for _, base in mine]
        numbers = {
            "alpha": or_none(alpha, [a for a in agreements if a.category == name]),
            "tau": None if "tau" in log.missing else or_none(tau, runs),
            "speedup": or_none(speedup, runs, baseline),
        }
        result[name] = CategoryNumbers.model_validate(numbers)
    return result


def or_none(metric: Callable[..., Measured], *logs: Sequence[object]) -> Measured | None:
    """The metric of the logs; None where they hold nothing to measure it on."""
    try:
        return metric(*logs)
    except NothingToMeasure:
        return None


# --- A draft's block of the report, number by number ---


def _known(value: T | None, what: str) -> T:
    if value is None:
        raise NothingToMeasure(f"the log holds no {what}")
    return value


def timed(log: DraftLog) -> StepCosts:
    """The log's step costs. Raises `NothingToMeasure` where it has none."""
    return _known(log.costs, "step costs")


def paid(log: DraftLog) -> StepCosts:
    """The step costs with the draft's spread over all it drafted: what was looked up took none."""
    costs, share = timed(log), 1 - log.free_share
    step, block = costs.draft_step * share, costs.draft_block * share
    return replace(costs, draft_step=step, draft_block=block)


def agreed(log: DraftLog) -> list[Agreement]:
    """The log of alpha. Raises `NothingToMeasure` where there is none."""
    return _known(log.agreement, "teacher-forced distributions")


def blocks(log: DraftLog) -> list[PromptRun]:
    """The runs. Raises `NothingToMeasure` where it is not known what they drafted and accepted."""
    if reason := log.missing.get("tau"):
        raise NothingToMeasure(reason)
    return log.runs


def costs_ms(costs: StepCosts) -> Costs:
    """The step costs in milliseconds."""
    verify = sorted(costs.target_verify.items())
    return Costs(
        draft_step_ms=1000 * costs.draft_step,
        draft_block_ms=1000 * costs.draft_block,
        target_step_ms=1000 * costs.target_step,
        target_verify_ms={str(width): 1000 * seconds for width, seconds in verify},
        context_length=costs.context_length,
    )


def memory(log: DraftLog) -> Memory:
    """Bytes of the two models in the form measured."""
    sizes = _known(log.memory, "bytes")
    overhead = sizes["draft_bytes"] / sizes["target_bytes"]
    return Memory(**sizes, overhead=overhead, full_form_bytes=log.full_form_bytes)


def by_temperature(log: DraftLog) -> list[TemperaturePoint]:
    """tau and speed-up as decoded at each temperature asked for."""
    points = [
        {"temperature": temperature, "tau": tau(runs), "speedup": speedup(runs, baseline)}
        for temperature, (runs, baseline) in log.by_temperature.items()
    ]
    return [TemperaturePoint.model_validate(point) for point in points]


# Field of a draft's block (eval/reporting/report.py) -> what it is in the draft's log. A new number
# is a field there, a function and a line here, and a row in eval/reporting/tables.py.
NUMBERS: dict[str, Callable[[DraftLog], Any]] = {
    "alpha": lambda log: alpha(agreed(log)),
    "tau": lambda log: tau(blocks(log)),
    "mean_drafted": lambda log: mean_drafted(blocks(log)),
    "drafted_calls": lambda log: drafted_calls(blocks(log)),
    "accepted_over_drafted": lambda log: accepted_over_drafted(blocks(log)),
    "per_position": lambda log: per_position(blocks(log)),
    "costs": lambda log: costs_ms(timed(log)),
    "c": lambda log: c(timed(log)),
    "verify_ratio": lambda log: verify_ratio(timed(log), mean_drafted(blocks(log))),
    "predicted_speedup": lambda log: predicted_speedup(blocks(log), paid(log)),
    "speedup": lambda log: speedup(log.runs, log.baseline),
    "decode_speedup": lambda log: decode_speedup(blocks(log), log.baseline),
    "decode_efficiency": lambda log: decode_efficiency(blocks(log), log.baseline, paid(log)),
    "tokens_per_s": lambda log: both(tokens_per_s, log),
    "ttft_ms": lambda log: both(ttft_ms, log),
    "itl_ms": lambda log: both(itl_ms, log),
    "loop_share": lambda log: both(loop_share, log),
    "memory": memory,
    "by_category": by_category,
    "by_temperature": by_temperature,
}
