"""vLLM's counters of speculation, vllm:spec_decode_*: on a page /metrics, or in Prometheus.

The counters start at 0 with a server's process (docs.vllm.ai). Ray Serve puts `ray_` before their
names, and Ray and collectors of OpenTelemetry write `_` for the colon.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from urllib.parse import urlencode

from align.errors import UserError
from eval.engines.server import Server, ServerError
from eval.measuring.runs import Speculation

NAMES = "drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"
PREFIXES = "vllm:", "ray_vllm:", "ray_vllm_", "vllm_"  # of vLLM's names; the first is its own
LINE = re.compile(
    rf"^(?:(?:{'|'.join(PREFIXES)}|llamacpp:)spec_decode_num_"
    rf"(?P<name>{'|'.join(NAMES)})(?:_total)?|process_start_time_seconds)"
    r"(?:\{(?P<labels>.*)\})? (?P<value>\d\S*)",
    re.MULTILINE,
)
POSITION = re.compile(r'\bposition="(\d+)"')
STARTED = "process_start_time_seconds", 0  # not a count: it identifies the process

SEVERAL = (
    "The address is of several processes, as of a load balancer, whose counters cannot be "
    "subtracted. Give --prometheus, which sums over replicas, or the address of one replica."
)

# (name of the counter, position in the draft) -> count of all engines of a process
Series = dict[tuple[str, int], float]


class CountersError(UserError):
    """Counters that cannot be read, subtracted or summed."""


def read_series(text: str) -> Series:
    """The counters on a process's page /metrics and its start; empty if it has none."""
    series: Series = defaultdict(float)
    for match in LINE.finditer(text):
        position = POSITION.search(match["labels"] or "")
        key = (match["name"], int(position[1] if position else 0)) if match["name"] else STARTED
        series[key] += float(match["value"])
    return dict(series)


def total(series: Series) -> Speculation | None:
    """The counts as a Speculation; None if a counter is missing."""
    accepted_at = [series[key] for key in sorted(series) if key[0] == NAMES[-1]]
    try:
        drafts, drafted, accepted = (series[name, 0] for name in NAMES[:3])
    except KeyError:
        return None
    if drafts and not accepted_at:
        return None
    return Speculation(drafts, drafted, accepted, accepted_at)


def continues(before: Series, now: Series) -> bool:
    """Whether one process can have both readings: its start is the same, and no counter fell."""
    fell = any(now.get(key, 0.0) < value for key, value in before.items())
    return now.get(STARTED) == before.get(STARTED) and not fell


def growth(before: Series, now: Series) -> Series:
    """The counts between two readings.

    A process that was restarted (a later start, or a counter that fell) is counted from 0. Raises
    CountersError if the process is older than in the first reading: it is another replica.
    """
    counts = {key: value for key, value in now.items() if key != STARTED}
    if now.get(STARTED, 0.0) < before.get(STARTED, 0.0):
        raise CountersError(SEVERAL)
    if not continues(before, now):
        return counts
    return {key: value - before.get(key, 0.0) for key, value in counts.items()}


def between(before: Series, now: Series) -> Speculation | None:
    """The total between two readings; None without counters, or if another replica was read."""
    try:
        return total(growth(before, now)) if before else None
    except CountersError:
        return None


def increase(
    name: str,
    window: str,
    selector: str = "",
    position: int | None = None,
    by: str = "model_name",
    prefix: str = PREFIXES[0],
) -> str:
    """PromQL: growth of one of NAMES in a window (`3600s`), summed over replicas.

    Prometheus recognises restarts. It extrapolates to the window's ends, by a factor that all
    counters of a process share because they are read together. So shares keep their value, and
    counts are off by what is drafted between two readings at most.
    """
    return f"sum by ({by}) (increase({counter(name, selector, position, prefix)}[{window}]))"


def counter(name: str, selector: str, position: int | None, prefix: str) -> str:
    """PromQL: the series of one of NAMES."""
    labels = [selector.strip("{} ,"), "" if position is None else f'position="{position}"']
    return f"{prefix}spec_decode_num_{name}_total{{{','.join(filter(None, labels))}}}"


class Prometheus(Server):
    """A Prometheus, whose password or tenant are not the key of the model's server."""

    variable = "DRAFTSMITH_PROMETHEUS_HEADERS"

    def secret_headers(self, value: str) -> dict[str, str]:
        """The headers of a JSON object."""
        try:
            return {name: str(header) for name, header in json.loads(value).items()}
        except (ValueError, AttributeError):
            raise UserError(
                f'{self.variable} is no JSON object; write {{"X-Scope-OrgID": "…"}} or '
                '{"Authorization": "Basic …"}.'
            ) from None


def read_prometheus(
    url: str, window: str, selector: str, until: float, prefixes: Iterable[str]
) -> Series:
    """The growth of a model's counters over all replicas, in a window that ends at a Unix time.

    prefixes: of the counters' names; the first that Prometheus has is taken. The growth is empty if
    no replica has counters at that time, because in a long window the last ones would hide this.
    Raises ServerError without an answer to the query, CountersError for counters
    of several models.
    """
    server = Prometheus(url)

    def ask(query: str) -> list[tuple[dict[str, str], float]]:
        answer = server.text(f"/api/v1/query?{urlencode({'query': query, 'time': until})}")
        try:
            rows = json.loads(answer)["data"]["result"]
            return [(row["metric"], float(row["value"][1])) for row in rows]
        except (ValueError, LookupError, TypeError):
            raise ServerError(f"{url} does not answer as Prometheus does; correct it.") from None

    models: list[str] = []
    for prefix in prefixes:
        rows = ask(counter("drafts", selector, None, prefix))
        if models := sorted({labels.get("model_name", "") for labels, _ in rows}):
            break
    if len(models) > 1:
        raise CountersError(
            f"{url} has counters of several models ({', '.join(models)}); choose one, as "
            f"--selector '{{model_name=\"{models[0]}\"}}'."
        )
    return {
        (name, int(labels.get("position", 0))): round(count)
        for name in NAMES
        for labels, count in ask(increase(name, window, selector, None, "position", prefix))
        if models
    }
