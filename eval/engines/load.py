"""What a draft is worth while a server decodes several requests at a time.

Speculation uses compute that a target call leaves idle, and many requests leave none. Outputs are
not compared here, because bf16 sums depend on what else is in the batch.
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

ROUNDS = 4  # at each load, at least
FULL = 2  # requests of a round, in units of the load; while the last ones end, it is not full


class Round(NamedTuple):
    """Prompts that every server decodes with `load` requests in flight."""

    load: int
    prompts: Sequence[Prompt]


class TimedRound(NamedTuple):
    """One server's round. counters: the server's counts meanwhile; None where it has none."""

    runs: list[PromptRun]
    seconds: float
    counters: Speculation | None

    @property
    def tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)


def load_rounds(prompts: Sequence[Prompt], load: int) -> list[Round]:
    """The rounds at this load, each with other prompts.

    Every prompt is asked, and at least 8 times as many requests as the load are sent; prompts
    repeat where there are fewer.
    """
    size = FULL * load
    count = max(ROUNDS, len(prompts) // size)
    requests = [prompts[i % len(prompts)] for i in range(count * size)]
    return [Round(load, requests[i : i + size]) for i in range(0, len(requests), size)]


def timed_round(server: Any, asked: Round, decoding: Decoding) -> TimedRound:
    """The round at this server (eval/engines/vllm.py).

    Raises ServerError for the first request that fails.
    """
    before = server.counters()
    start = time.perf_counter()
    with ThreadPoolExecutor(asked.load) as threads:
        answer = partial(server.answer, decoding=decoding)
        runs = [response.run for response in threads.map(answer, asked.prompts)]
    seconds = time.perf_counter() - start
    return TimedRound(runs, seconds, between(before, server.counters()))


def load_point(load: int, rounds: Sequence[tuple[TimedRound, TimedRound]]) -> dict[str, Any]:
    """A LoadPoint of the report. rounds: without the draft and with it; intervals are over them."""
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
