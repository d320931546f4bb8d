"""The speed-up of a draft while a server decodes several requests at a time.

Speculation uses compute that a small batch leaves idle, so the speed-up falls with concurrency.
Outputs are not compared here, because bf16 sums depend on the other requests in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.engines.counters import between
from eval.measuring.intervals import Both, measure
from eval.measuring.metrics import itl_ms, speedup_of
from eval.measuring.runs import Speculation
from eval.prompts import Prompt

ROUNDS = 4  # the fewest rounds at each load
FULL = 2  # requests of a round / load; above 1, because a round ends with fewer requests in flight


class Round(NamedTuple):
    """Prompts that each server decodes with `load` requests in flight."""

    load: int
    prompts: Sequence[Prompt]


class TimedRound(NamedTuple):
    """One server's round. counters: the server's counts in this round; None if it has none."""

    runs: list[PromptRun]
    seconds: float
    counters: Speculation | None

    @property
    def tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)


def load_rounds(prompts: Sequence[Prompt], load: int) -> list[Round]:
    """At least ROUNDS rounds of FULL * load requests; together they use the prompts in order.

    If there are too few prompts, prompts repeat; prompts that do not fill a round are left out.
    """
    size = FULL * load
    count = max(ROUNDS, len(prompts) // size)
    requests = [prompts[i % len(prompts)] for i in range(count * size)]
    return [Round(load, requests[i : i + size]) for i in range(0, len(requests), size)]


def timed_round(server: Any, asked: Round, decoding: Decoding) -> TimedRound:
    """The round at this server, a VllmServer. Raises ServerError if a request fails."""
    before = server.counters()
    start = time.perf_counter()
    with ThreadPoolExecutor(asked.load) as threads:
        answer = partial(server.answer, decoding=decoding)
        runs = [response.run for response in threads.map(answer, asked.prompts)]
    seconds = time.perf_counter() - start
    return TimedRound(runs, seconds, between(before, server.counters()))


def load_point(load: int, rounds: Sequence[tuple[TimedRound, TimedRound]]) -> dict[str, Any]:
    """The fields of a `LoadPoint`. rounds: pairs without and with the draft; intervals use them."""
    rates = [
        (plain.seconds, plain.tokens, drafted.seconds, drafted.tokens) for plain, drafted in rounds
    ]
    counted = [drafted.counters for _, drafted in rounds if drafted.counters]
    lengths = [(c.drafts + c.accepted, c.drafts) for c in counted if c.drafts]
    plain_runs = [run for plain, _ in rounds for run in plain.runs]
    drafted_runs = [run for _, drafted in rounds for run in drafted.runs]
    return {
        "concurrency": load,
        "requests": len(plain_runs),
        "tokens_per_s": Both(
            baseline=measure("tokens_per_s", rates, lambda t: t[..., 1] / t[..., 0]),
            speculative=measure("tokens_per_s", rates, lambda t: t[..., 3] / t[..., 2]),
        ),
        "speedup": measure("speedup", rates, speedup_of),
        "itl_ms": Both(baseline=itl_ms(plain_runs), speculative=itl_ms(drafted_runs)),
        "mean_acceptance_length": measure("mean_acceptance_length", lengths) if lengths else None,
    }
