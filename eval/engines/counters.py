"""vLLM's own counts of speculation: the Prometheus page at /metrics, or request by request.

The page has the counters vllm:spec_decode_* since the server's start (docs.vllm.ai). With
--per-request-spec-decode-metrics each answer has its counts in `metrics.speculative_decoding`.
"""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np
from pydantic import BaseModel, ValidationError

from eval.measuring.runs import Floats

COUNTERS = ["drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"]
COUNTER = re.compile(
    rf"^vllm:spec_decode_num_(?P<name>{'|'.join(COUNTERS)})(?:_total)?"
    r"(?:\{(?P<labels>.*)\})? (?P<value>\S+)",
    re.MULTILINE,
)
POSITION = re.compile(r',?position="(\d+)"')

# (place in COUNTERS, position, labels of the engine) -> count
Series = dict[tuple[int, int, str], float]


class CountersError(ValueError):
    """Counts that cannot be read: says where, why, and what to do."""


def read_series(text: str) -> Series:
    """The counters of a Prometheus exposition, of each engine by itself; empty if it has none."""
    series: Series = defaultdict(float)
    for match in COUNTER.finditer(text):
        position = POSITION.search(match["labels"] or "")
        engine = POSITION.sub("", match["labels"] or "")
        key = COUNTERS.index(match["name"]), int(position[1] if position else 0), engine
        try:
            series[key] += float(match["value"])
        except ValueError:
            raise CountersError(
                f"{match[0]!r} holds no number; is this what /metrics answered?"
            ) from None
    return dict(series)


def total(series: Series) -> Floats | None:
    """[drafts, draft tokens, accepted tokens, accepted at position 0, at 1, …], of all engines.

    None if one of the first three is absent.
    """
    sums: dict[tuple[int, int], float] = defaultdict(float)
    for (metric, position, _), value in series.items():
        sums[metric, position] += value
    if not {0, 1, 2} <= {metric for metric, _ in sums}:
        return None
    return np.array([sums[place] for place in sorted(sums)])


def growth(before: Series, now: Series) -> Series:
    """What came between two readings. An engine with a counter that fell has started anew."""
    restarted = {key[2] for key, value in before.items() if now.get(key, 0.0) < value}
    return {
        key: value - (0.0 if key[2] in restarted else before.get(key, 0.0))
        for key, value in now.items()
    }


class Speculation(BaseModel):
    """`metrics.speculative_decoding` of an answer, as far as it is needed (vLLM 0.32)."""

    acceptance_histogram: list[int]  # [j]: drafts of which exactly j tokens were accepted
    num_draft_tokens: int
    num_spec_tokens: int

    @property
    def counts(self) -> list[int]:
        """[drafts, draft tokens, accepted tokens, accepted at position 0, at 1, …]."""
        at = [sum(self.acceptance_histogram[i:]) for i in range(self.num_spec_tokens + 1)]
        return [at[0], self.num_draft_tokens, sum(at[1:]), *at[1:]]


class _Metrics(BaseModel):
    speculative_decoding: Speculation | None = None


class _Line(BaseModel):
    metrics: _Metrics | None = None
    category: str | None = None


def read_requests(text: str) -> list[tuple[str | None, list[int]]]:
    """(category, counts) of each answer that speculated, from vLLM's answers, one a line.

    A `category` beside what vLLM wrote is what the request was about. Raises CountersError for a
    line that cannot be read, and where no answer has counts.
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
            speculated.append((answer.category, counts.counts))
    if not speculated:
        raise CountersError(
            "no answer has metrics.speculative_decoding: start vLLM with "
            "--per-request-spec-decode-metrics summary, and keep its answers as they are."
        )
    return speculated
