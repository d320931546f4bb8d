"""The numbers of a report, as pure functions of the raw log of an evaluation.

The log is one `PromptRun` a prompt and decoder and one `Agreement` a prompt and draft. Every
measured number is a ratio of sums over prompts, and its interval comes from one bootstrap over
prompts (not over tokens: the tokens of one answer depend on each other). docs/metrics.md says in
prose what is in each number and what is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from eval.measuring.log import Agreement, Floats, PromptRun, StepCosts

RESAMPLES = 10_000
SEED = 20240817

# A loop is a stretch of at least LOOP_TOKENS tokens that repeats a pattern of at most LOOP_PERIOD
# tokens at least LOOP_REPEATS times. The floor keeps "...", "===" and deep indentation out.
LOOP_PERIOD = 64
LOOP_REPEATS = 3
LOOP_TOKENS = 8


class NothingToMeasure(ValueError):
    """The log holds nothing that the asked number could be computed from."""


class Measured(TypedDict):
    """A number with its 95% interval and the prompts it rests on."""

    mean: float
    ci95: list[float]
    n: int


class PositionAcceptance(TypedDict):
    """Acceptance at one place of the draft. `conditional` is None if no draft got that far."""

    position: int
    drafts: int
    marginal: Measured
    conditional: Measured | None


# ---------------------------------------------------------------------------------------------
# The interval


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


def measure(
    name: str, rows: Sequence[Sequence[float]], statistic: Callable[[Floats], Floats]
) -> Measured:
    """`statistic` of the column totals, with its 95% percentile bootstrap interval.

    rows: one a prompt, K columns. statistic: (..., K) totals -> (...) values. Raises
    `NothingToMeasure` without rows, ValueError where the result is not a finite number.
    """
    if not rows:
        raise NothingToMeasure(f"{name}: no prompt holds anything to measure it on")
    columns = np.asarray(rows, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = statistic(columns.sum(axis=0))
        values = statistic(bootstrap_totals(columns))
    if not (np.isfinite(mean) and np.isfinite(values).all()):
        raise ValueError(
            f"{name} is not a finite number ({mean} over all prompts): a time or a count in the "
            f"log is zero or missing"
        )
    low, high = np.percentile(values, [2.5, 97.5])
    return {"mean": float(mean), "ci95": [float(low), float(high)], "n": len(columns)}


def _ratio(totals: Floats) -> Floats:
    return totals[..., 0] / totals[..., 1]


# ---------------------------------------------------------------------------------------------
# The log


def check_runs(runs: Sequence[PromptRun]) -> None:
    """Raise ValueError, naming the prompt, for a log that contradicts itself."""
    seen: set[str] = set()
    for run in runs:
        problem = _problem(run)
        if run.prompt_id in seen:
            problem = "it occurs twice"
        if problem:
            raise ValueError(f"the log of prompt {run.prompt_id!r} cannot be used: {problem}")
        seen.add(run.prompt_id)


def _problem(run: PromptRun) -> str | None:
    blocks = len(run.block_tokens)
    if not len(run.block_seconds) == len(run.drafted) == len(run.accepted) == blocks:
        return "block_seconds, block_tokens, drafted and accepted differ in length"
    if len(run.tokens) != 1 + sum(run.block_tokens):
        return f"{len(run.tokens)} tokens, but 1 + {sum(run.block_tokens)} were emitted by calls"
    if run.prefill_seconds <= 0 or any(seconds <= 0 for seconds in run.block_seconds):
        return "a time is zero or negative"
    for i, (emitted, drafted, accepted) in enumerate(
        zip(run.block_tokens, run.drafted, run.accepted, strict=True)
    ):
        if not 0 <= accepted <= drafted:
            return f"block {i} accepted {accepted} of {drafted} drafted tokens"
        if i < run.whole_blocks and emitted != accepted + 1:
            return f"block {i} emitted {emitted} tokens with {accepted} accepted (one more is due)"
        if not 1 <= emitted <= accepted + 1:
            return f"block {i} emitted {emitted} tokens with {accepted} accepted"
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


def _same_prompts(ids: Sequence[str], other_ids: Sequence[str]) -> None:
    odd = sorted(set(ids) ^ set(other_ids))
    if odd:
        raise ValueError(
            f"a paired comparison needs the same prompts on both sides, but {len(odd)} are on one "
            f"side only, {odd[0]!r} among them"
        )


# ---------------------------------------------------------------------------------------------
# Acceptance


def alpha(agreements: Sequence[Agreement]) -> Measured:
    """Mean over positions of sum_x min(p, q) (arXiv 2211.17192, theorem 3.5)."""
    return measure("alpha", [_agreement_row(a) for a in agreements if a.positions], _ratio)


def both(
    metric: Callable[[Sequence[PromptRun]], Any],
    baseline: Sequence[PromptRun],
    runs: Sequence[PromptRun],
) -> dict[str, Any]:
    """A metric of the runs without a draft and with it."""
    return {"baseline": metric(baseline), "speculative": metric(runs)}


def share(name: str, rows: Sequence[tuple[float, float]]) -> Measured:
    """Sum over count of one row (sum, count) a prompt; each sum within 0 and its count."""
    return measure(name, [(min(max(total, 0.0), count), count) for total, count in rows], _ratio)


def _agreement_row(agreement: Agreement) -> tuple[float, float]:
    total, positions = agreement.alpha_sum, agreement.positions
    # bf16 or fp32 sums of probabilities may pass 1 in the last digits
    if not -1e-3 * positions <= total <= (1 + 1e-3) * positions:
        raise ValueError(
            f"prompt {agreement.prompt_id!r}: alpha_sum {total} is not within 0 and the "
            f"{positions} positions it was summed over"
        )
    return min(max(total, 0.0), float(positions)), float(positions)


def _whole(run: PromptRun) -> tuple[float, float, float, float, float]:
    """Tokens, target calls, drafted, accepted and seconds of a run's whole blocks."""
    k = run.whole_blocks
    return (
        float(sum(run.block_tokens[:k])),
        float(k),
        float(sum(run.drafted[:k])),
        float(sum(run.accepted[:k])),
        float(sum(run.block_seconds[:k])),
    )


def tau(runs: Sequence[PromptRun]) -> Measured:
    """Block efficiency: tokens emitted per target call in the decode phase.

    The bonus token is in; the prefill token and a cut last block are out.
    """
    return measure("tau", [_whole(run)[:2] for run in runs if run.whole_blocks], _ratio)


def mean_drafted(runs: Sequence[PromptRun]) -> float:
    """Drafted tokens per target call, over the blocks that tau is taken on."""
    totals = [sum(column) for column in zip(*(_whole(run) for run in runs), strict=True)]
    if not totals or not totals[1]:
        raise NothingToMeasure("mean drafted length: no whole block in the log")
    return totals[2] / totals[1]


def accepted_over_drafted(runs: Sequence[PromptRun]) -> Measured:
    """Accepted over drafted tokens, over the blocks that tau is taken on."""
    rows = [(accepted, drafted) for _, _, drafted, accepted, _ in map(_whole, runs) if drafted]
    return measure("accepted_over_drafted", rows, _ratio)


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
        raise NothingToMeasure("per_position: nothing was drafted in a whole block")
    result: list[PositionAcceptance] = []
    for i in range(1, longest + 1):
        reached = [[accepted for drafted, accepted in run if drafted >= i] for run in blocks]
        rows = [
            (sum(a >= i for a in run), len(run), sum(a >= i - 1 for a in run)) for run in reached
        ]
        marginal = measure("per_position", [row[:2] for row in rows if row[1]], _ratio)
        tried = [(row[0], row[2]) for row in rows if row[2]]
        conditional = measure("per_position", tried, _ratio) if tried else None
        drafts = sum(row[1] for row in rows)
        result.append(
            {"position": i, "drafts": drafts, "marginal": marginal, "conditional": conditional}
        )
    return result


def replayed_blocks(agreed: Sequence[bool], gamma: int) -> list[int]:
    """Accepted tokens of each whole block that greedy decoding with `gamma` tokens would take.

    agreed: for each token of the target's answer, whether the draft's likeliest is the same,
    teacher-forced. Exact for greedy decoding of an answer that ends at the length limit: up to its
    first wrong token a draft has seen nothing but the target's text, and what it drafts beyond does
    not count.
    """
    accepted, at = [], 1  # the first token comes from the prefill
    cut = False
    while at < len(agreed):
        drafted = min(gamma, len(agreed) - at - 1)
        right = 0
        while right < drafted and agreed[at + right]:
            right += 1
        accepted.append(right)
        at += right + 1
        cut = drafted < gamma
    return accepted[:-1] if cut else accepted


def replayed_tau(agreements: Sequence[Agreement], gamma: int) -> Measured:
    """tau of greedy decoding with drafts of `gamma` tokens, from the log of alpha alone."""
    blocks = [replayed_blocks([v == 1.0 for v in a.values], gamma) for a in agreements]
    rows = [(sum(block) + len(block), len(block)) for block in blocks if block]
    return measure("replayed tau", rows, _ratio)


# ---------------------------------------------------------------------------------------------
# Cost and speed


def c(costs: StepCosts) -> float:
    """Time of one draft step over time of one target step."""
    costs.verify(1.0)  # the costs are positive
    return costs.draft_step / costs.target_step


def verify_ratio(costs: StepCosts, gamma: float) -> float:
    """Time of a target call on gamma + 1 tokens over the time of one on a single token."""
    return float(costs.verify(gamma + 1.0)) / costs.target_step


def _predicted(tau: Floats, gamma: Floats, costs: StepCosts) -> Floats:
    block = gamma * costs.draft_step + costs.verify(gamma + 1.0)
    return tau * costs.target_step / block


def predicted_speedup(runs: Sequence[PromptRun], costs: StepCosts) -> Measured:
    """tau * t_target(1) / (gamma * t_draft + t_target(gamma + 1)), gamma the mean drafted length.

    The interval is that of tau and gamma; the step costs are taken as exact.
    """
    rows = [_whole(run)[:3] for run in runs if run.whole_blocks]
    return measure(
        "predicted_speedup",
        rows,
        lambda t: _predicted(t[..., 0] / t[..., 1], t[..., 2] / t[..., 1], costs),
    )


def _speed_row(run: PromptRun, baseline: PromptRun) -> tuple[float, ...]:
    return baseline.seconds, len(baseline.tokens), run.seconds, len(run.tokens)


def _speedup(totals: Floats) -> Floats:
    return (totals[..., 0] / totals[..., 1]) / (totals[..., 2] / totals[..., 3])


def speedup(runs: Sequence[PromptRun], baseline: Sequence[PromptRun]) -> Measured:
    """Wall seconds per emitted token without a draft over the same with it, prefill included."""
    return measure("speedup", [_speed_row(*both) for both in pair(runs, baseline)], _speedup)


def decode_speedup(runs: Sequence[PromptRun], baseline: Sequence[PromptRun]) -> Measured:
    """`speedup` without the prefill, over the blocks that tau is taken on."""
    return measure("decode_speedup", _decode_rows(runs, baseline), _decode_speedup)


def _decode_rows(
    runs: Sequence[PromptRun], baseline: Sequence[PromptRun]
) -> list[tuple[float, ...]]:
    rows: list[tuple[float, ...]] = []
    for run, base in pair(runs, baseline):
        tokens, calls, drafted, _, seconds = _whole(run)
        base_tokens, _, _, _, base_seconds = _whole(base)
        if calls and base_tokens:
            rows.append((base_seconds, base_tokens, seconds, tokens, calls, drafted))
    return rows


def _decode_speedup(totals: Floats) -> Floats:
    return _speedup(totals[..., :4])


def decode_efficiency(
    runs: Sequence[PromptRun], baseline: Sequence[PromptRun], costs: StepCosts
) -> Measured:
    """decode_speedup over predicted_speedup: 1 means no overhead beyond the two models."""

    def efficiency(t: Floats) -> Floats:
        predicted = _predicted(t[..., 3] / t[..., 4], t[..., 5] / t[..., 4], costs)
        return _decode_speedup(t) / predicted

    return measure("decode_efficiency", _decode_rows(runs, baseline), efficiency)


def tokens_per_s(runs: Sequence[PromptRun]) -> Measured:
    """Emitted tokens per wall second, prefill included."""
    return measure("tokens_per_s", [(len(run.tokens), run.seconds) for run in runs], _ratio)


# Prompts decoded together, all from the start on: the batch took as long as its slowest row.
Batch = Sequence[PromptRun]


class BatchNumbers(TypedDict):
    """What batches of one size came to; a batch is what is resampled, n the number of batches."""

    tokens_per_s: dict[str, Measured]
    speedup: Measured
    tau: Measured


def by_batch(batches: Sequence[Batch], baseline: Sequence[Batch]) -> BatchNumbers:
    """tokens_per_s, speedup and tau of batches decoded with a draft, and of the same without.

    Raises ValueError where two batches of a pair hold other prompts.
    """
    rows: list[tuple[float, ...]] = []
    for batch, base in zip(batches, baseline, strict=True):
        pair(batch, base)
        rows.append((*_batch_row(base), *_batch_row(batch)))
    whole = [[_whole(run)[:2] for run in batch if run.whole_blocks] for batch in batches]
    return {
        "tokens_per_s": {
            "baseline": measure("tokens_per_s", rows, lambda t: t[..., 1] / t[..., 0]),
            "speculative": measure("tokens_per_s", rows, lambda t: t[..., 3] / t[..., 2]),
        },
        "speedup": measure("speedup", rows, _speedup),
        "tau": measure("tau", [np.sum(batch, axis=0) for batch in whole if batch], _ratio),
    }


def _batch_row(batch: Batch) -> tuple[float, float]:
    """Seconds and tokens."""
    return max(run.seconds for run in batch), sum(len(run.tokens) for run in batch)


def ttft_ms(runs: Sequence[PromptRun]) -> Measured:
    """Milliseconds from the start to the first token, mean over prompts."""
    return measure("ttft_ms", [(1000 * run.prefill_seconds, 1) for run in runs], _ratio)


class Latency(TypedDict):
    """Percentiles over the decode-phase tokens, milliseconds."""

    p50: float
    p95: float
    tokens: int


def itl_ms(runs: Sequence[PromptRun]) -> Latency:
    """Inter-token latency, milliseconds: a block's time is spread evenly over its tokens."""
    seconds = np.array([s for run in runs for s in run.block_seconds])
    tokens = np.array([k for run in runs for k in run.block_tokens], dtype=np.int64)
    if not tokens.sum():
        raise NothingToMeasure("itl_ms: no token was emitted after the first one of an answer")
    each = np.repeat(1000 * seconds / tokens, tokens)
    p50, p95 = np.percentile(each, [50, 95])
    return {"p50": float(p50), "p95": float(p95), "tokens": int(tokens.sum())}


# ---------------------------------------------------------------------------------------------
# Vanity check, comparison, categories


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
    rows = [(float(looped(run.tokens).sum()), len(run.tokens)) for run in runs]
    return measure("loop_share", rows, _ratio)


def _difference(
    name: str,
    rows: dict[str, tuple[float, ...]],
    over: dict[str, tuple[float, ...]],
    statistic: Callable[[Floats], Floats],
) -> Measured:
    """`statistic` of rows minus that of `over`, both on the same resampled prompts."""
    both = [(*row, *over[key]) for key, row in rows.items() if key in over]
    width = len(both[0]) // 2 if both else 0
    return measure(name, both, lambda t: statistic(t[..., :width]) - statistic(t[..., width:]))


def alpha_gain(agreements: Sequence[Agreement], over: Sequence[Agreement]) -> Measured:
    """alpha minus the alpha of another draft, paired by prompt."""
    _same_prompts([a.prompt_id for a in agreements], [a.prompt_id for a in over])
    mine, others = (
        {a.prompt_id: _agreement_row(a) for a in side if a.positions} for side in (agreements, over)
    )
    return _difference("gain of alpha", dict(mine), dict(others), _ratio)


def tau_gain(runs: Sequence[PromptRun], over: Sequence[PromptRun]) -> Measured:
    """tau minus the tau of another draft, on the prompts where both have a whole block."""
    _same_prompts([run.prompt_id for run in runs], [run.prompt_id for run in over])
    mine, others = (
        {run.prompt_id: _whole(run)[:2] for run in side if run.whole_blocks}
        for side in (runs, over)
    )
    return _difference("gain of tau", dict(mine), dict(others), _ratio)


def speedup_gain(
    runs: Sequence[PromptRun],
    baseline: Sequence[PromptRun],
    over: Sequence[PromptRun],
    over_baseline: Sequence[PromptRun],
) -> Measured:
    """speedup minus the speedup of another draft, paired by prompt."""
    _same_prompts([run.prompt_id for run in runs], [run.prompt_id for run in over])
    mine = {run.prompt_id: _speed_row(run, base) for run, base in pair(runs, baseline)}
    others = {run.prompt_id: _speed_row(run, base) for run, base in pair(over, over_baseline)}
    return _difference("gain of speedup", mine, others, _speedup)


class CategoryNumbers(TypedDict):
    """One category's numbers; None where its prompts hold nothing to measure it on."""

    alpha: Measured | None
    tau: Measured | None
    speedup: Measured | None


def by_category(
    agreements: Sequence[Agreement], runs: Sequence[PromptRun], baseline: Sequence[PromptRun]
) -> dict[str, CategoryNumbers]:
    """alpha, tau and speedup of each category; prompts without one are left out."""
    pairs = pair(runs, baseline)
    categories = [a.category for a in agreements] + [run.category for run in runs]
    result: dict[str, CategoryNumbers] = {}
    for name in sorted({category for category in categories if category is not None}):
        mine = [(run, base) for run, base in pairs if run.category == name]
        here = [run for run, _ in mine]
        result[name] = {
            "alpha": _or_none(alpha, [a for a in agreements if a.category == name]),
            "tau": _or_none(tau, here),
            "speedup": _or_none(speedup, here, [base for _, base in mine]),
        }
    return result


def _or_none(metric: Callable[..., Measured], *logs: Sequence[object]) -> Measured | None:
    try:
        return metric(*logs)
    except NothingToMeasure:
        return None


def first_divergence(one: Sequence[int], other: Sequence[int]) -> int:
    """The position where two texts that differ part; where one ends, that is its length."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def ledger(prompts: int, divergences: list[dict[str, Any]]) -> dict[str, Any]:
    """The report's `lossless`: so many prompts were compared, and these of them parted."""
    ties = sum(entry["tie"] for entry in divergences)
    return {
        "prompts": prompts,
        "identical": prompts - len(divergences),
        "tie_divergences": ties,
        "unexplained": len(divergences) - ties,
        "divergences": divergences,
    }
