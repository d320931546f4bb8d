"""vLLM's counters of speculation, vllm:spec_decode_* of its Prometheus page /metrics.

They count from the start of an engine's process (docs.vllm.ai).
"""

from __future__ import annotations

import re
from collections import defaultdict

from eval.measuring.runs import Speculation

COUNTER = re.compile(
    r"^vllm:spec_decode_num_"
    r"(?P<name>drafts_created|drafts|draft_tokens|accepted_tokens(?:_per_pos)?)(?:_total)?"
    r"(?:\{(?P<labels>.*)\})? (?P<value>\S+)",
    re.MULTILINE,
)
POSITION = re.compile(r',?position="(\d+)"')
STARTED = "drafts_created"  # its value is a time: when the process began to count

# (name of the counter, position, labels of the engine) -> count
Series = dict[tuple[str, int, str], float]


class CountersError(ValueError):
    """Counts that cannot be read or subtracted: says where, why, and what to do."""


def read_series(text: str) -> Series:
    """The counters of a Prometheus exposition, of each engine by itself; empty if it has none."""
    series: Series = defaultdict(float)
    for match in COUNTER.finditer(text):
        position = POSITION.search(match["labels"] or "")
        engine = POSITION.sub("", match["labels"] or "")
        key = match["name"], int(position[1] if position else 0), engine
        try:
            series[key] += float(match["value"])
        except ValueError:
            raise CountersError(
                f"{match[0]!r} holds no number; give a page of vLLM's /metrics as it is."
            ) from None
    return dict(series)


def total(series: Series) -> Speculation | None:
    """The counts of all engines together; None where a counter is missing."""
    sums: dict[tuple[str, int], float] = {}
    for (name, position, _), value in series.items():
        sums[name, position] = sums.get((name, position), 0.0) + value
    accepted_at = [sums[key] for key in sorted(sums) if key[0] == "accepted_tokens_per_pos"]
    try:
        drafts, drafted = sums["drafts", 0], sums["draft_tokens", 0]
        return Speculation(drafts, drafted, sums["accepted_tokens", 0], accepted_at)
    except KeyError:
        return None


def growth(before: Series, now: Series) -> Series:
    """The counts between two readings.

    An engine whose process started after the first reading, or with a counter that fell, counts
    from 0. Raises CountersError if its process started before that of the first reading: then
    another replica was read.
    """
    restarted = set()
    for key, value in before.items():
        counted = now.get(key, value if key[0] == STARTED else 0.0)
        if key[0] == STARTED and counted < value:
            raise CountersError(
                "These counters are of an older process than the earlier reading, so another "
                "replica was read; read one replica's /metrics, with a file for each."
            )
        if counted < value or (key[0] == STARTED and counted > value):
            restarted.add(key[2])
    return {
        key: value - (0.0 if key[2] in restarted else before.get(key, 0.0))
        for key, value in now.items()
        if key[0] != STARTED
    }


def between(before: Series, now: Series) -> Speculation | None:
    """The total between two readings; None without counters, or where replicas take turns."""
    try:
        return total(growth(before, now)) if before else None
    except CountersError:
        return None
