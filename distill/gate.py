"""The gate of the loop: whether a new draft is shown to be faster than the served one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from scipy.special import stdtrit

from eval.reporting.fields import ONE_AT_A_TIME, REFERENCE, Load, Report
from eval.reporting.traffic import Estimate

PUBLISHED, REFUSED, FAILED, NOTHING = range(4)  # exit statuses of distill.adapt
# Share of calls that may publish a draft that is not faster: 1 in 100 series of 20 weekly calls
FALSE_PUBLICATIONS = 0.01 / 20
# Share of a speed-up by which a server start may change it (docs/lab-notes.md), if the intervals
# do not cover starts.
SERVER_START = 0.05


def lower_bound(recent: Sequence[Report]) -> float:
    """The speed-up of the new draft minus that of the served one, at least.

    recent: of evaluations on the same prompts, which differ by their servers' starts. One-sided, at
    the level FALSE_PUBLICATIONS, as `measure` adds half-widths over prompts and over starts. Raises
    NotComparable if a report has too few prompts for an interval.
    """
    speedups = [report.stated_speedup(report.gain[0]) for report in recent]
    freedom, starts = Estimate.of(speedups[0], 0).freedom, recent[0].starts
    over_starts = [speedup.over_starts or 0.0 for speedup in speedups]
    # the same prompts again leave the error over prompts as it is
    over_prompts = fmean(
        math.sqrt(max((speedup.bounds[1] - speedup.mean) ** 2 - half**2, 0.0))
        for speedup, half in zip(speedups, over_starts, strict=True)
    )
    parts = [(over_prompts, freedom, 1)]
    if starts:
        parts.append((math.hypot(*over_starts) / len(recent), starts.freedom, len(recent)))
    halves = [
        half * float(stdtrit(freedom * times, FALSE_PUBLICATIONS) / stdtrit(freedom, 0.975))
        for half, freedom, times in parts
    ]
    mean = fmean(speedup.mean for speedup in speedups)
    return mean - math.hypot(*halves) - start_margin(recent[0])


def undecided(recent: Report) -> bool:
    """Whether further starts of the servers may show the gain.

    Two starts leave so few degrees of freedom that a gain of 0.2 is shown in 1 of 10 calls if a
    server's speed differs by 3% between starts, and with four in 7 of 10. A draft that is not
    faster is still published in 1 of 2,000 calls at most (docs/lab-notes.md).
    """
    shown = recent.stated_speedup(recent.gain[0]).bounds[0] > 0
    return recent.starts is not None and shown and lower_bound([recent]) <= 0


def start_margin(report: Report) -> float:
    """What a server start may change in the served draft's speed-up, besides the intervals."""
    if report.engine == REFERENCE or report.starts:
        return 0.0
    return SERVER_START * report.stated_speedup(report.drafts[report.gain[0].over]).mean


def gained(recent: Sequence[Report]) -> tuple[bool, str]:
    """Whether the new draft is shown to be faster on the newest day, and its gain as text.

    recent: as in `judged`. Raises NotComparable for too few prompts.
    """
    newest, low = recent[-1], lower_bound(recent)
    gain = newest.gain[0]
    more = newest.stated_speedup(gain)
    new = newest.stated_speedup(newest.drafts[gain.draft])
    text = f"speed-up {more:+.2f} to {new:.2f} on the newest day, at least {low:+.2f}"
    return low > 0, text


def judged(recent: Sequence[Report], earlier: Report | None, margin: float) -> tuple[int, str]:
    """The gate: an exit status and its reason.

    recent, earlier: the first `gain` of each is the new draft over the served one, on the newest
    day of traffic (of one or two evaluations) and on the run's evaluation prompts, which are
    measured if the new draft has `gained`. margin: share of the served draft's speed-up that may
    be lost on the earlier prompts. Raises NotComparable for too few prompts.
    """
    faster, shown = gained(recent)
    if not faster or earlier is None:
        return NOTHING, f"no gain is shown: {shown}."
    gain = recent[-1].gain[0]
    new = recent[-1].stated_speedup(recent[-1].drafts[gain.draft])
    on_recent = [(report, "the newest day") for report in recent]
    for report, prompts in (*on_recent, (earlier, "the earlier prompts")):
        if gain.draft in report.broken:
            return REFUSED, f"the new draft changes the target's outputs on {prompts}."
        new_loads, served_loads = (report.speedups(name) for name in (gain.draft, gain.over))
        if lacking := [str(load) for load in served_loads if load not in new_loads]:
            return REFUSED, (
                f"on {prompts}, with {lacking[0]}, the new draft is overloaded or fails, and the "
                "served one does not."
            )
        for load, loss in losses(report).items():
            if loss > margin and (load != ONE_AT_A_TIME or report is earlier):
                return REFUSED, (
                    f"on {prompts}, with {load}, the new draft may lose {loss:.0%} of the served "
                    f"draft's speed-up, more than --margin {margin:g} allows ({shown})."
                )
    change = earlier.stated_speedup(earlier.gain[0])
    slower = "" if new.bounds[0] > 1 else " There no draft is shown to be faster than none."
    return PUBLISHED, f"{shown}; on the earlier prompts {change:+.2f}.{slower}"


def losses(report: Report) -> dict[Load, float]:
    """The share of the served draft's speed-up that the new one may lose, at most, by load.

    One request at a time is compared prompt by prompt. At other loads the two intervals are added
    as if they were independent, which is too wide, because the requests are the same.
    """
    gain = report.gain[0]
    new, served = (report.speedups(name) for name in (gain.draft, gain.over))
    most = {
        load: served[load].mean
        - new[load].mean
        + math.hypot(
            new[load].mean - new[load].bounds[0], served[load].bounds[1] - served[load].mean
        )
        for load in new
        if load in served  # else the served draft is overloaded or fails there
    }
    most[ONE_AT_A_TIME] = -report.stated_speedup(gain).bounds[0]
    return {load: (start_margin(report) + loss) / served[load].mean for load, loss in most.items()}
