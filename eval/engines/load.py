"""The speed-up of a draft at a steady load: N requests in flight, or new requests at a rate.

Speculation uses compute that a small batch leaves idle, so the speed-up falls with the load. The
first and the last requests of a pass do not count, because then fewer requests are in flight.
Outputs are not compared here, because bf16 sums depend on the other requests in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.engines.counters import between
from eval.measuring.intervals import FEWEST_CLUSTERS, Both, StartError, measure
from eval.measuring.metrics import Percentiles, itl_ms, speedup_of
from eval.measuring.runs import Speculation
from eval.prompts import Prompt

PASSES = 2  # of each load: servers that run one at a time do one of them early and one late
BATCHES = FEWEST_CLUSTERS // PASSES  # of requests that count, in a pass
AT_RATE = 4  # fewest requests of a batch at a rate
GOODPUT = ("ttft", "tpot", "e2el")  # names of limits, as in `vllm bench serve --goodput`


class Load(NamedTuple):
    """A steady load: `concurrency` requests in flight, or `rate` new requests per second."""

    concurrency: int | None = None
    rate: float | None = None

    def __str__(self) -> str:
        if self.concurrency:
            return f"{self.concurrency} requests at a time"
        return f"{self.rate:g} requests per second"


class Pass(NamedTuple):
    """The requests of one pass. starts: seconds from its begin to each request, in order.

    edge, batch: the first and the last `edge` requests do not count; the others are BATCHES
    batches of `batch` requests.
    """

    load: Load
    prompts: Sequence[Prompt]
    starts: Sequence[float]
    edge: int
    batch: int


class Request(NamedTuple):
    """A request of a pass. start: seconds since the pass began."""

    start: float
    run: PromptRun


class Batch(NamedTuple):
    """Requests in a row. seconds: from the first one's start until the next batch starts."""

    runs: list[PromptRun]
    seconds: float

    @property
    def totals(self) -> tuple[float, int]:
        """Seconds of the requests, and their tokens."""
        return sum(run.seconds for run in self.runs), sum(len(run.tokens) for run in self.runs)


class TimedPass(NamedTuple):
    """One server's pass. counters: the server's counts of speculation; None if it has none."""

    asked: Pass
    requests: list[Request]
    counters: Speculation | None

    @property
    def batches(self) -> Iterator[Batch]:
        """The batches that count."""
        edge, size = self.asked.edge, self.asked.batch
        for first in range(edge, edge + BATCHES * size, size):
            batch, after = self.requests[first : first + size], self.requests[first + size]
            yield Batch([request.run for request in batch], after.start - batch[0].start)

    @property
    def occupied(self) -> float:
        """Seconds in which requests are in flight, summed, while the batches that count run."""
        starts = np.array([request.start for request in self.requests])
        ends = starts + [request.run.seconds for request in self.requests]
        first, last = starts[self.asked.edge], starts[-self.asked.edge]
        return float((np.minimum(ends, last) - np.maximum(starts, first)).clip(0).sum())


def passes(load: Load, prompts: Sequence[Prompt], seed: int) -> list[Pass]:
    """The passes of a load. Each prompt counts once or more often, in order.

    seed: of the random times between requests at a rate, which are the same for all servers.
    """
    batch = max(load.concurrency or AT_RATE, -(-len(prompts) // (PASSES * BATCHES)))
    edge, counted = load.concurrency or batch, BATCHES * batch
    made = []
    for number in range(PASSES):
        indices = range(number * counted - edge, (number + 1) * counted + edge)
        starts = np.zeros(len(indices))
        if load.rate:
            gaps = np.random.default_rng([seed, number]).exponential(1 / load.rate, len(indices))
            starts = gaps.cumsum() - gaps[0]
        requests = [prompts[i % len(prompts)] for i in indices]
        made.append(Pass(load, requests, starts.tolist(), edge, batch))
    return made


def timed_pass(server: Any, asked: Pass, decoding: Decoding) -> TimedPass:
    """The pass at this server, an EngineServer. Raises ServerError if a request fails."""
    before = server.counters()
    begin = time.perf_counter()

    def request(prompt: Prompt, due: float) -> tuple[Request, Speculation | None]:
        time.sleep(max(0.0, begin + due - time.perf_counter()))
        start = time.perf_counter() - begin
        output = server.generate(prompt, decoding)
        return Request(start, output.run), output.counters

    with ThreadPoolExecutor(asked.load.concurrency or len(asked.prompts)) as threads:
        requests, counts = zip(*threads.map(request, asked.prompts, asked.starts), strict=True)
    told = [each for each in counts if each]  # with the outputs; else the server's counters grew
    counters = Speculation.sum(told) if told else between(before, server.counters())
    return TimedPass(asked, [*requests], counters)


def load_point(
    pairs: Sequence[tuple[TimedPass, TimedPass]],
    limits: Mapping[str, float] | None = None,
    started: StartError | None = None,
) -> dict[str, Any]:
    """The fields of a `LoadPoint`. pairs: passes of one load, without and with the draft.

    limits: most milliseconds by name in GOODPUT; None: no goodput. started: as in `measure`.
    """
    sides = [*zip(*pairs, strict=True)]
    batches = [[batch for passed in side for batch in passed.batches] for side in sides]
    plain, with_draft = (
        _numbers(*side, limits or {}, started) for side in zip(sides, batches, strict=True)
    )
    both = {name: Both(baseline=plain[name], speculative=with_draft[name]) for name in plain}
    good, no_times = both.pop("good_per_s"), None in (plain["itl_ms"], with_draft["itl_ms"])
    counted = [passed.counters for passed in sides[1] if passed.counters]
    lengths = [(c.drafts + c.accepted, c.drafts) for c in counted if c.drafts]
    load = pairs[0][0].asked.load
    return both | {
        "concurrency": load.concurrency,
        "request_rate": load.rate,
        "requests": sum(len(batch.runs) for batch in batches[0]),
        "speedup": measure(
            "speedup",
            [one.totals + other.totals for one, other in zip(*batches, strict=True)],
            speedup_of,
            started=started,
            servers=[[0], [2]],
        ),
        "itl_ms": None if no_times else both["itl_ms"],
        "goodput": {"limits_ms": limits, "requests_per_s": good} if limits else None,
        "mean_acceptance_length": measure("mean_acceptance_length", lengths) if lengths else None,
    }


def _numbers(
    passes: Sequence[TimedPass],
    batches: Sequence[Batch],
    limits: Mapping[str, float],
    started: StartError | None,
) -> dict[str, Any]:
    """The numbers of one server at one load."""
    runs = [run for batch in batches for run in batch.runs]
    seconds = sum(batch.seconds for batch in batches)
    rates = [(batch.totals[1], batch.seconds) for batch in batches]
    return {
        "in_flight": sum(passed.occupied for passed in passes) / seconds,
        "tokens_per_s": measure("tokens_per_s", rates, started=started, servers=[[1]]),
        "ttft_ms": Percentiles.of([run.prefill_seconds for run in runs]),
        "itl_ms": itl_ms(runs) if any(run.block_tokens for run in runs) else None,
        "e2e_ms": Percentiles.of([run.seconds for run in runs]),
        "good_per_s": sum(_is_good(run, limits) for run in runs) / seconds,
    }


def _is_good(run: PromptRun, limits: Mapping[str, float]) -> bool:
    """Whether a request is within all limits."""
    later = (run.seconds - run.prefill_seconds) / max(1, len(run.tokens) - 1)
    took = dict(zip(GOODPUT, (run.prefill_seconds, later, run.seconds), strict=True))
    return all(1000 * took[name] <= limit for name, limit in limits.items())
