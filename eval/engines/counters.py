"""vLLM's own counts of speculation: the Prometheus page at /metrics, or request by request.

The page has the counters vllm:spec_decode_* since the server's start (docs.vllm.ai). With
--per-request-spec-decode-metrics each answer has its counts in `metrics.speculative_decoding`.
"""

from __future__ import annotations

import re
from collections import defaultdict

from pydantic import BaseModel, ValidationError

from eval.measuring.runs import Speculation

COUNTER = re.compile(
    r"^vllm:spec_decode_num_(?P<name>drafts|draft_tokens|accepted_tokens(?:_per_pos)?)(?:_total)?"
    r"(?:\{(?P<labels>.*)\})? (?P<value>\S+)",
    re.MULTILINE,
)
POSITION = re.compile(r',?position="(\d+)"')

# (name of the counter, position, labels of the engine) -> count
Series = dict[tuple[str, int, str], float]


class CountersError(ValueError):
    """Counts that cannot be read: says where, why, and what to do."""


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
                f"{match[0]!r} holds no number; is this what /metrics answered?"
            ) from None
    return dict(series)


def total(series: Series) -> Speculation | None:
    """The counts of all engines together; None where a counter is missing."""
    sums: dict[tuple[str, int], float] = {}
    for (name, position, _), value in series.items():
        sums[name, position] = sums.get((name, position), 0.0) + value
    at = [sums[key] for key in sorted(sums) if key[0] == "accepted_tokens_per_pos"]
    try:
        drafts, drafted = sums["drafts", 0], sums["draft_tokens", 0]
        return Speculation(drafts, drafted, sums["accepted_tokens", 0], at)
    except KeyError:
        return None


def growth(before: Series, now: Series) -> Series:
    """The counts between two readings. An engine with a counter that fell has started anew."""
    restarted = {key[2] for key, value in before.items() if now.get(key, 0.0) < value}
    return {
        key: value - (0.0 if key[2] in restarted else before.get(key, 0.0))
        for key, value in now.items()
    }


def between(before: Series, now: Series) -> Speculation | None:
    """The total between two readings; None where one of them has no counters."""
    return total(growth(before, now)) if before else None


class _Counts(BaseModel):
    """`metrics.speculative_decoding` of a response, as far as it is needed (vLLM 0.32)."""

    acceptance_histogram: list[int]  # [j]: drafts of which exactly j tokens were accepted
    num_draft_tokens: int
    num_spec_tokens: int

    @property
    def speculation(self) -> Speculation:
        drafts, *at = (sum(self.acceptance_histogram[i:]) for i in range(self.num_spec_tokens + 1))
        return Speculation(drafts, self.num_draft_tokens, sum(at), list(map(float, at)))


class _Metrics(BaseModel):
    speculative_decoding: _Counts | None = None


class _Line(BaseModel):
    metrics: _Metrics | None = None
    category: str | None = None


def read_requests(text: str) -> list[tuple[str | None, Speculation]]:
    """(category, counts) of each response that speculated, from vLLM's responses, one a line.

    A `category` beside vLLM's own keys is that of the request. Raises CountersError for a line that
    cannot be read, and where no response has counts.
    """
    speculated = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            answer = _Line.model_validate_json(line)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"])) or "it"
            raise CountersError(
                f"line {number} is no answer of vLLM ({where}: {first['msg']}); give one answer "
                f"(JSON) a line."
            ) from None
        counts = answer.metrics and answer.metrics.speculative_decoding
        if counts and sum(counts.acceptance_histogram):
            speculated.append((answer.category, counts.speculation))
    if not speculated:
        raise CountersError(
            "no answer has metrics.speculative_decoding: start vLLM with "
            "--per-request-spec-decode-metrics summary, and keep its answers as they are."
        )
    return speculated
