"""The speed-up of a draft at a steady load: N requests in flight, or new requests at a rate.

Speculation uses compute that a small batch leaves idle, so the speed-up falls with the load. The
first and the last requests of a pass do not count, because then fewer requests are in flight. At a
rate, a pass lasts until the number in flight was steady for some mean latencies, or has grown so
long that the server is overloaded.
Outputs are not compared here, because bf16 sums depend on the other requests in the batch.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.engines.counters import between
from eval.engines.server import ServerError
from eval.measuring.intervals import FEWEST_CLUSTERS, Both, Floats, StartError, measure
from eval.measuring.metrics import Percentiles, itl_ms, speedup_of
from eval.measuring.runs import Speculation
from eval.prompts import Prompt
from eval.reporting.fields import Load

WARM_UP = 16  # tokens of outputs that are not timed
PASSES = 2  # of each load: servers that run one at a time do one of them early and one late
BATCHES = FEWEST_CLUSTERS // PASSES  # of requests that count, in a pass
AT_RATE = 4  # fewest requests of a batch at a rate
GAPS = 100  # times between requests whose mean is exactly that of the rate
WARM, STEADY = 3, 10  # mean latencies before requests count, and while they count, at a rate
# A server that is not steady after so many of its first latencies, or that has so many requests in
# flight (vLLM's largest default of max_num_seqs), may be overloaded.
FIRST_LATENCIES, MOST_IN_FLIGHT = 25, 1024
GROWS, T_OF_GROWTH = 0.2, 4.54  # share of the mean in flight; t of a slope, 99% of 3 freedoms
GOODPUT = ("ttft", "tpot", "e2el")  # names of limits, as in `vllm bench serve --goodput`


class Pass(NamedTuple):
    """The requests of one pass; at a rate they are repeated until the pass ends.

    edge, batch: with a number in flight, the first and the last `edge` requests do not count; the
    others are BATCHES batches of `batch` requests. At a rate, BATCHES batches have at least as
    many. seed: of the random times between requests at a rate, the same for all servers.
    """

    load: Load
    prompts: Sequence[Prompt]
    edge: int
    batch: int
    seed: tuple[int, int]

    def arrivals(self) -> Iterator[tuple[Prompt, float]]:
        """Prompts and the seconds at which they arrive at the rate, without an end."""
        rng, due, prompts = np.random.default_rng(self.seed), 0.0, cycle(self.prompts)
        while True:
            gaps = rng.exponential(size=GAPS)
            for gap in gaps / gaps.mean() / self.load.rate:
                yield next(prompts), due
                due += gap


class Window(NamedTuple):
    """The requests of a pass that count: from number `first` to the one before number `last`.

    overloaded: the pass was ended because the number of requests in flight grows.
    """

    first: int
    last: int
    overloaded: bool = False


class Request(NamedTuple):
    """A request of a pass. start: seconds since the pass began."""

    start: float
    run: PromptRun


class Batch(NamedTuple):
    """Requests in a row. seconds: from the first one's start until the next batch starts.

    completed: the runs that end in this time, at a rate; else `runs`.
    """

    runs: list[PromptRun]
    completed: list[PromptRun]
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
    window: Window

    @property
    def batches(self) -> Iterator[Batch]:
        """The batches that count."""
        bounds = np.linspace(self.window.first, self.window.last, BATCHES + 1).astype(int)
        for first, last in pairwise(bounds.tolist()):
            begin, end = self.requests[first].start, self.requests[last].start
            runs = completed = [request.run for request in self.requests[first:last]]
            if self.asked.load.rate:
                ends = [
                    (request.start + request.run.seconds, request.run) for request in self.requests
                ]
                completed = [run for at, run in ends if begin <= at < end]
            yield Batch(runs, completed, end - begin)

    def in_flight(self, parts: int) -> Floats:
        """The mean number of requests in flight in so many equal parts of the window."""
        starts = np.array([request.start for request in self.requests])
        seconds = np.array([request.run.seconds for request in self.requests])
        first, last = starts[self.window.first], starts[self.window.last]
        return _in_flight(starts, seconds, np.linspace(first, last, parts + 1))


def _in_flight(starts: Floats, seconds: Floats, bounds: Floats) -> Floats:
    """The mean number of requests in flight between neighbouring bounds, which are times."""
    ends = starts + np.nan_to_num(seconds, nan=np.inf)
    overlap = np.minimum(ends[:, None], bounds[1:]) - np.maximum(starts[:, None], bounds[:-1])
    mean: Floats = overlap.clip(0).sum(0) / np.diff(bounds)
    return mean


def window_of(starts: Sequence[float], seconds: Sequence[float], fewest: int) -> Window | None:
    """The requests at a rate that count; None: the pass goes on.

    starts, seconds: of the requests so far; nan: still in flight. fewest: requests that count. The
    first of them arrives after WARM mean latencies, the last one after STEADY more.
    """
    begins, took = np.array(starts), np.array(seconds)
    done = took[~np.isnan(took)]
    if len(took) - len(done) >= MOST_IN_FLIGHT:
        return Window(len(took) // 2, len(took) - 1, True)
    if len(done) < BATCHES * AT_RATE:
        return None
    latency = done[len(done) // 2 :].mean()
    first, last = np.searchsorted(begins, [WARM * latency, (WARM + STEADY) * latency]).tolist()
    last = max(last, first + fewest)
    if last < len(took) and not np.isnan(took[first:last]).any():
        return Window(first, last)
    now, unloaded = begins[-1], done[: BATCHES * AT_RATE].mean()
    if not FIRST_LATENCIES * unloaded < now < (WARM + STEADY) * latency:
        return None
    counts = _in_flight(begins, took, np.linspace(now / 2, now, BATCHES + 1))
    return Window(len(took) // 2, len(took) - 1, True) if _grows(counts) else None


def _grows(counts: Floats) -> bool:
    """Whether the number in flight, its means in BATCHES equal times, has a slope above 0."""
    parts = np.arange(BATCHES) - (BATCHES - 1) / 2
    slope = parts @ counts / (parts @ parts)
    residuals = counts - counts.mean() - slope * parts
    error = (residuals @ residuals / (BATCHES - 2) / (parts @ parts)) ** 0.5
    usual = max(GROWS * counts.mean(), 2 * counts.mean() ** 0.5)  # a count varies by its root
    return bool(slope * BATCHES > usual and slope > T_OF_GROWTH * error)


def passes(load: Load, prompts: Sequence[Prompt], seed: int) -> list[Pass]:
    """The passes of a load. Each prompt counts once or more often, in order."""
    batch = max(load.concurrency or AT_RATE, -(-len(prompts) // (PASSES * BATCHES)))
    edge, counted = load.concurrency or AT_RATE, BATCHES * batch
    all_passes = []
    for number in range(PASSES):
        indices = range(number * counted - edge, (number + 1) * counted + edge)
        if load.rate:
            indices = range(number * counted, number * counted + len(prompts))
        requests = [prompts[i % len(prompts)] for i in indices]
        all_passes.append(Pass(load, requests, edge, batch, (seed, number)))
    return all_passes


def timed_pass(server: Any, asked: Pass, decoding: Decoding) -> TimedPass:
    """The pass at this server, an EngineServer. Raises ServerError if a request fails."""
    before = server.counters()
    begin = time.perf_counter()

    def request(prompt: Prompt) -> tuple[Request, Speculation | None]:
        start = time.perf_counter() - begin
        output = server.generate(prompt, decoding)
        return Request(start, output.run), output.counters

    if asked.load.rate:
        requests, counts, window = _at_rate(asked, request, begin)
    else:
        with ThreadPoolExecutor(asked.load.concurrency) as threads:
            requests, counts = zip(*threads.map(request, asked.prompts), strict=True)
        window = Window(asked.edge, len(requests) - asked.edge)
    with_outputs = [
        each for each in counts if each
    ]  # with the outputs; else the server's counters grew
    counters = Speculation.sum(with_outputs) if with_outputs else between(before, server.counters())
    return TimedPass(asked, [*requests], counters, window)


def warm_up(server: Any, asked: Pass, decoding: Decoding) -> None:
    """A short batch, because a GPU's first batches compile kernels."""
    batch = asked._replace(load=Load(concurrency=asked.edge), prompts=asked.prompts[: asked.edge])
    most = min(WARM_UP, decoding.max_new_tokens)  # a server's context may be as short
    timed_pass(server, batch, replace(decoding, max_new_tokens=most))


def _at_rate(
    asked: Pass, request: Callable[[Prompt], tuple[Request, Speculation | None]], begin: float
) -> tuple[Sequence[Request], Sequence[Speculation | None], Window]:
    """Requests at the rate until the pass has its window, and their counts."""
    starts, seconds, failed = list[float](), list[float](), list[bool]()

    def counted(number: int, prompt: Prompt) -> tuple[Request, Speculation | None]:
        try:
            result = request(prompt)
        except ServerError:
            failed.append(True)
            raise
        seconds[number] = result[0].run.seconds
        return result

    window, check, futures = None, 0.0, []
    with ThreadPoolExecutor(MOST_IN_FLIGHT) as threads:
        for prompt, due in asked.arrivals():
            time.sleep(max(0.0, begin + due - time.perf_counter()))
            if len(starts) >= check:
                window, check = window_of(starts, seconds, BATCHES * asked.batch), 1.02 * check + 1
            if window or failed:
                break
            starts.append(time.perf_counter() - begin)
            seconds.append(math.nan)
            futures.append(threads.submit(counted, len(starts) - 1, prompt))
    requests, counts = zip(*[future.result() for future in futures], strict=True)
    assert window is not None  # else a request has failed
    return requests, counts, window


def overload(pairs: Sequence[tuple[TimedPass, TimedPass]]) -> dict[str, Any] | None:
    """The fields of an `Overload` if a server is overloaded. pairs: as in `load_point`."""
    if not pairs[0][0].asked.load.rate:
        return None
    sides = [*zip(*pairs, strict=True)]
    names = [
        name
        for name, side in zip(("target", "draft"), sides, strict=True)
        if any(passed.window.overloaded for passed in side)
        or _grows(np.mean([passed.in_flight(BATCHES) for passed in side], axis=0))
    ]
    if not names:
        return None
    fields = _of_both(sides)
    tokens = fields["tokens_per_s"]
    return {
        "request_rate": pairs[0][0].asked.load.rate,
        "servers": names,
        "requests_per_s": fields["requests_per_s"],
        "tokens_per_s": Both(baseline=tokens.baseline.mean, speculative=tokens.speculative.mean),
    }


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
    fields = _of_both(sides, limits or {}, started)
    good, itl = fields.pop("good_per_s"), fields["itl_ms"]
    counted = [passed.counters for passed in sides[1] if passed.counters]
    lengths = [(c.drafts + c.accepted, c.drafts) for c in counted if c.drafts]
    load = pairs[0][0].asked.load
    return fields | {
        "concurrency": load.concurrency or None,
        "request_rate": load.rate or None,
        "requests": min(sum(len(batch.runs) for batch in side) for side in batches),
        "speedup": measure(
            "speedup",
            [one.totals + other.totals for one, other in zip(*batches, strict=True)],
            speedup_of,
            started=started,
            servers=[[0], [2]],
        ),
        "itl_ms": None if None in (itl.baseline, itl.speculative) else itl,
        "goodput": {"limits_ms": limits, "requests_per_s": good} if limits else None,
        "mean_acceptance_length": measure("mean_acceptance_length", lengths) if lengths else None,
    }


def _of_both(
    sides: Sequence[Sequence[TimedPass]],
    limits: Mapping[str, float] = MappingProxyType({}),
    started: StartError | None = None,
) -> dict[str, Both[Any]]:
    """The numbers of both servers at one load. sides: their passes, without and with the draft."""

    def numbers(passes: Sequence[TimedPass]) -> dict[str, Any]:
        batches = [batch for passed in passes for batch in passed.batches]
        runs = [run for batch in batches for run in batch.runs]
        completed = [run for batch in batches for run in batch.completed]
        seconds = sum(batch.seconds for batch in batches)
        rates = [(sum(len(run.tokens) for run in b.completed), b.seconds) for b in batches]
        return {
            "in_flight": float(np.mean([passed.in_flight(1)[0] for passed in passes])),
            "tokens_per_s": measure("tokens_per_s", rates, started=started, servers=[[1]]),
            "ttft_ms": Percentiles.of([run.prefill_seconds for run in runs]),
            "itl_ms": itl_ms(runs) if any(run.block_tokens for run in runs) else None,
            "e2e_ms": Percentiles.of([run.seconds for run in runs]),
            "requests_per_s": len(completed) / seconds,
            "good_per_s": sum(_is_good(run, limits) for run in completed) / seconds,
        }

    plain, with_draft = map(numbers, sides)
    return {name: Both(baseline=plain[name], speculative=with_draft[name]) for name in plain}


def _is_good(run: PromptRun, limits: Mapping[str, float]) -> bool:
    """Whether a request is within all limits."""
    later = (run.seconds - run.prefill_seconds) / max(1, len(run.tokens) - 1)
    took = dict(zip(GOODPUT, (run.prefill_seconds, later, run.seconds), strict=True))
    return all(1000 * took[name] <= limit for name, limit in limits.items())
