"""Steady loads: requests in flight, simulated servers, and the draft lengths that they propose."""

import itertools
import threading
from dataclasses import replace

import numpy as np
import pytest
from scipy.special import stdtrit

from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Sampling
from eval.engines.load import (
    Request,
    TimedPass,
    Window,
    load_point,
    overload,
    passes,
    timed_pass,
    window_of,
)
from eval.engines.server import ServerError
from eval.engines.vllm import VllmServer
from eval.measuring.intervals import StartError
from eval.prompts import Prompt
from eval.reporting.fields import Load, LoadPoint, Overload
from tests.fake_vllm import Constant

PROMPTS = [Prompt(str(i), prompt=f"say {i}") for i in range(40)]
DECODING = Decoding(Sampling(), frozenset(), 20)


def test_each_prompt_counts_and_the_edges_do_not():
    first, second = passes(Load(concurrency=2), PROMPTS, 0)
    assert (first.edge, first.batch) == (2, 4)
    ids = [[prompt.id for prompt in asked.prompts] for asked in (first, second)]
    assert ids[0][2:-2] + ids[1][2:-2] == [prompt.id for prompt in PROMPTS]
    assert ids[0][:2] + ids[0][-2:] == ["38", "39", "20", "21"]
    assert [len(asked.prompts) for asked in passes(Load(concurrency=32), PROMPTS, 0)] == [
        7 * 32
    ] * 2


def test_requests_arrive_at_the_rate_and_at_the_same_times_for_all_servers():
    def starts(number):
        asked = passes(Load(rate=5.0), PROMPTS, 0)[number]
        return [due for _, due in itertools.islice(asked.arrivals(), 4000)]

    assert starts(0) == starts(0) != starts(1)
    gaps = np.diff(starts(0))
    assert gaps.mean() == pytest.approx(0.2, rel=0.05)
    assert gaps.std() == pytest.approx(0.2, rel=0.05)  # as a Poisson process has


class Together(Constant):
    """It writes nothing before so many prompts wait."""

    def __init__(self, count):
        super().__init__()
        self.all_here = threading.Barrier(count, timeout=300)

    def write(self, ids, body):
        self.all_here.wait()
        return super().write(ids, body)


@pytest.mark.parametrize("load", [Load(concurrency=1), Load(concurrency=4), Load(rate=50.0)])
def test_a_server_gets_the_load_and_is_counted(fake, load):
    plain, drafting = (fake(k, Together(load.concurrency or 1), delay=0.02) for k in (1, 3))
    clients = [VllmServer(server.url) for server in (plain, drafting)]
    asked = passes(load, PROMPTS, 0)
    pairs = [tuple(timed_pass(client, each, DECODING) for client in clients) for each in asked]
    limits = {"e2el": 10_000.0, "ttft": 15.0}
    point = LoadPoint.model_validate(load_point(pairs, limits))
    bodies = [sorted(body["prompt"] for body in server.streamed) for server in (plain, drafting)]
    assert load.rate or bodies[0] == bodies[1]
    # 7 steps of 20 tokens after the first one, 2 drafted tokens accepted in each
    assert point.mean_acceptance_length.mean == 3.0
    assert point.requests == 40 or load.rate
    assert point.requests >= 40
    assert point.goodput.requests_per_s.baseline == 0.0  # the first token comes after 20 ms
    e2e = point.e2e_ms.baseline
    assert e2e.p50 <= e2e.p95 <= e2e.p99
    for one in (one for pair in pairs for one in pair):
        if load.rate:
            arrivals = zip(one.requests, one.asked.arrivals(), strict=False)
            assert all(request.start >= due for request, (_, due) in arrivals)
    if load.concurrency:
        assert (plain.most_active, drafting.most_active) == (load.concurrency,) * 2
        in_flight = point.in_flight.baseline, point.in_flight.speculative
        assert 0 < min(in_flight) <= max(in_flight) <= load.concurrency * (1 + 1e-9)


def test_a_repeated_request_is_timed_from_its_first_try(fake):
    """The second and the third repetition wait for 0.1 and 0.2 s."""
    server, asked = (
        fake(3, faults=[*[None] * 5, *[503] * 3]),
        passes(Load(concurrency=1), PROMPTS, 0)[0],
    )
    passed = timed_pass(VllmServer(server.url, 5.0), asked, DECODING)
    first, after = passed.requests[5:7]
    assert 0.3 < first.run.prefill_seconds < first.run.seconds < after.start - first.start
    point = load_point([(passed, passed)])
    assert point["ttft_ms"].speculative.p99 > 200 > point["ttft_ms"].speculative.p50


def test_outputs_of_one_token_have_no_time_between_tokens(fake):
    clients = [VllmServer(fake(length).url) for length in (1, 3)]
    one = replace(DECODING, max_new_tokens=1)
    asked = passes(Load(concurrency=4), PROMPTS, 0)[0]
    assert (
        load_point([tuple(timed_pass(client, asked, one) for client in clients)])["itl_ms"] is None
    )


# --- Simulated servers, whose speed is known ---


def served(asked, lengths, step, emitted):
    """The pass at a simulated server. step(k): seconds of a step of k requests; emitted: tokens."""
    time, waiting, active, started, requests = 0.0, list(range(len(asked.prompts))), {}, {}, {}
    while waiting or active:
        while waiting and len(active) < asked.load.concurrency:
            active[number := waiting.pop(0)] = 0
            started[number] = time
        time += step(len(active))
        for number in list(active):
            active[number] += emitted
            if active[number] == (length := lengths[number % len(lengths)]):
                del active[number]
                times = [(time - started[number]) / length] * length
                run = PromptRun.of(asked.prompts[number], 1, times, [[0]] * length)
                requests[number] = Request(started[number], run)
    window = Window(asked.edge, len(requests) - asked.edge)
    return TimedPass(asked, [requests[number] for number in sorted(requests)], None, window)


@pytest.mark.parametrize("concurrency", [1, 8, 32])
@pytest.mark.parametrize("mean", [1e6, 35])  # all of one length; of varied length
def test_the_speedup_at_a_load_is_unbiased(concurrency, mean):
    """Where outputs vary in length, rounds that wait for all requests err by up to 11%."""
    rng = np.random.default_rng(concurrency)
    lengths = [2 * int(1 + min(63, x)) for x in rng.exponential(mean, 40)]

    def plain(k):
        return 0.020 + 0.0004 * k

    def drafting(k):
        return 0.030 + 0.0016 * k

    asked = passes(Load(concurrency=concurrency), PROMPTS, 0)
    pairs = [(served(a, lengths, plain, 1), served(a, lengths, drafting, 2)) for a in asked]
    point = load_point(pairs)
    truth = 2 * plain(concurrency) / drafting(concurrency)
    assert point["speedup"].mean == pytest.approx(truth, rel=0.02)
    assert point["in_flight"].baseline == pytest.approx(concurrency, rel=0.03)
    assert point["in_flight"].speculative == pytest.approx(concurrency, rel=0.03)
    wider, over_starts = load_point(pairs, None, StartError(0.03, 4)), 0.03 * stdtrit(4, 0.975)
    for value, servers in ((wider["speedup"], 2), (wider["tokens_per_s"].baseline, 1)):
        assert np.log(value.ci95[1] / value.mean) > 0.95 * over_starts * servers**0.5


def at_rate(asked, lengths, step, emitted, count=None):
    """The pass at a simulated server of SLOTS slots. count: requests of a pass that goes on."""
    time, check, window = 0.0, 0.0, None
    waiting, active, starts, seconds, firsts, prompts, runs = [], {}, [], [], {}, [], {}
    arrivals = asked.arrivals()
    prompt, due = next(arrivals)
    while due < np.inf or waiting or active:
        while due <= max(time, 0.0 if waiting or active else due) < np.inf:
            time = max(time, due)
            if count is None and len(starts) >= check:
                window, check = window_of(starts, seconds, 5 * asked.batch), 1.02 * check + 1
            if window or len(starts) == count:
                due = np.inf
                break
            waiting.append(len(starts))
            starts.append(due)
            seconds.append(np.nan)
            prompts.append(prompt)
            prompt, due = next(arrivals)
        while waiting and len(active) < SLOTS:
            active[waiting.pop(0)] = 0
        time += step(len(active)) if active else 0.0
        for number in list(active):
            firsts.setdefault(number, time - starts[number])
            active[number] += emitted
            if active[number] == (length := lengths[int(prompts[number].id)]):
                del active[number]
                seconds[number] = time - starts[number]
                later = (seconds[number] - firsts[number]) / (length - 1)
                times = [firsts[number], *[later] * (length - 1)]
                runs[number] = PromptRun.of(prompts[number], 1, times, [[0]] * length)
    requests = [Request(start, runs[number]) for number, start in enumerate(starts)]
    return TimedPass(asked, requests, None, window or Window(400, len(requests) - 400))


SLOTS = 64


@pytest.mark.parametrize(
    ("rate", "overloaded"),
    [(1, []), (4, []), (6, []), (8, ["draft"]), (16, ["target", "draft"])],
)
def test_numbers_at_a_rate_are_those_of_4000_requests(rate, overloaded):
    """Capacities are 10.5 and 6.9 requests per second."""
    prompts = [Prompt(str(i), prompt="x") for i in range(600)]
    lengths = [2 * int(6 + min(60, x)) for x in np.random.default_rng(5).exponential(28, 600)]

    def pair(asked, count=None):
        return (
            at_rate(asked, lengths, lambda k: 0.040 + 0.001 * k, 1, count),
            at_rate(asked, lengths, lambda k: 0.060 + 0.004 * k, 2, count),
        )

    pairs = [pair(asked) for asked in passes(Load(rate=rate), prompts, 1)]
    truth = [pair(passes(Load(rate=rate), prompts, 99)[0], 4000)]
    over, limits = overload(pairs), {"ttft": 500.0, "e2el": 6000.0}
    assert (over["servers"] if over else []) == overloaded
    assert over is None or Overload.model_validate(over)
    said, true = load_point(pairs, limits), load_point(truth, limits)
    for field in ("requests_per_s", "tokens_per_s"):
        for side in ("baseline", "speculative"):
            values = [getattr((over or said)[field], side), getattr(true[field], side)]
            values = [v if isinstance(v, float) else v.mean for v in values]
            assert values[0] == pytest.approx(values[1], rel=0.03)
    if not overloaded:
        assert said["speedup"].mean == pytest.approx(true["speedup"].mean, rel=0.03)
        good = [point["goodput"]["requests_per_s"] for point in (said, true)]
        assert good[0].baseline == pytest.approx(good[1].baseline, rel=0.03)
        assert good[0].speculative == pytest.approx(good[1].speculative, rel=0.03)
        LoadPoint.model_validate(said)


def test_a_request_that_fails_at_a_rate_ends_the_pass(fake):
    asked = passes(Load(rate=200.0), PROMPTS, 0)[0]
    with pytest.raises(ServerError, match="400"):
        timed_pass(VllmServer(fake(1, refused="say 3").url), asked, DECODING)
