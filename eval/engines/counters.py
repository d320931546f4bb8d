"""vLLM's counters of speculation: vllm:spec_decode_* on its Prometheus page /metrics.

The counters start at 0 with an engine's process (docs.vllm.ai).
"""

from __future__ import annotations

import re
from collections import defaultdict

from align.errors import UserError
from eval.measuring.runs import Speculation

COUNTER = re.compile(
    r"^vllm:spec_decode_num_"
    r"(?P<name>drafts_created|drafts|draft_tokens|accepted_tokens(?:_per_pos)?)(?:_total)?"
    r"(?:\{(?P<labels>.*)\})? (?P<value>\S+)",
    re.MULTILINE,
)
POSITION = re.compile(r',?position="(\d+)"')
STARTED = "drafts_created"  # not a count: its value is the time at which the process started

# (name of the counter, position in the draft, labels of the engine) -> count
Series = dict[tuple[str, int, str], float]


class CountersError(UserError):
    """Counters that cannot be read or subtracted."""


def read_series(text: str) -> Series:
    """The counters of each engine on a Prometheus page; empty if it has none.

    Raises CountersError for a value that is not a number.
    """
    series: Series = defaultdict(float)
    for match in COUNTER.finditer(text):
        position = POSITION.search(match["labels"] or "")
        engine = POSITION.sub("", match["labels"] or "")
        key = match["name"], int(position[1] if position else 0), engine
        try:
            series[key] += float(match["value"])
        except ValueError:
            raise CountersError(
                f"The line {match[0]!r} has no number; give an unchanged page of vLLM's /metrics."
            ) from None
    return dict(series)


def total(series: Series) -> Speculation | None:
    """The sum of all engines' counts; None if a counter is missing."""
    sums: dict[tuple[str, int], float] = {}
    for (name, position, _), value in series.items():
        sums[name, position] = sums.get((name, position), 0.0) + value
    accepted_at = [sums[key] for key in sorted(sums) if key[0] == "accepted_tokens_per_pos"]
    try:
        drafts, drafted = sums["drafts", 0], sums["draft_tokens", 0]
        counts = Speculation(drafts, drafted, sums["accepted_tokens", 0], accepted_at)
    except KeyError:
        return None
    return counts if accepted_at else None


def growth(before: Series, now: Series) -> Series:
    """The counts between two readings.

    An engine that was restarted (a later start, or a counter that fell) is counted from 0. Raises
    CountersError if a process is older than in the first reading, because another replica was read.
    """
    restarted = set()
    for key, value in before.items():
        counted = now.get(key, value if key[0] == STARTED else 0.0)
        if key[0] == STARTED and counted < value:
            raise CountersError(
                "These counters come from an older process than the earlier reading, so they are "
                "of another replica. Read each replica's /metrics separately, with its own file."
            )
        if counted < value or (key[0] == STARTED and counted > value):
            restarted.add(key[2])
    return {
        key: value - (0.0 if key[2] in restarted else before.get(key, 0.0))
        for key, value in now.items()
        if key[0] != STARTED
    }


def between(before: Series, now: Series) -> Speculation | None:
    """The total between two readings; None without counters, or if another replica was read."""
    try:
        return total(growth(before, now)) if before else None
    except CountersError:
        return None
