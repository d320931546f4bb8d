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

ROUNDS = 4  # the fewest rounds at each concurrency
FULL = 2  # requests of a round / concurrency; above 1, because fewer run at a round's end


class Round(NamedTuple):
    """Prompts that each server decodes with `concurrency` requests in flight."""

    concurrency: int
    prompts: Sequence[Prompt]


class TimedRound(NamedTuple):
    """One server's round. counters: the server's counts in this round; None if it has none."""

    runs: list[PromptRun]
    seconds: float
    counters: Speculation | None

    @property
    def tokens(self) -> int:
        return sum(len(run.tokens) for run in self.runs)


def concurrent_rounds(prompts: Sequence[Prompt], concurrency: int) -> list[Round]:
    """At least ROUNDS rounds of FULL * concurrency requests, which use the prompts in order.

    If there are too few prompts, prompts repeat; prompts that do not fill a round are left out.
    """
    size = FULL * concurrency
    count = max(ROUNDS, len(prompts) // size)
    requests = [prompts[i % len(prompts)] for i in range(count * size)]
    return [Round(concurrency, requests[i : i + size]) for i in range(0, len(requests), size)]


def timed_round(server: Any, asked: Round, decoding: Decoding) -> TimedRound:
    """The round at this server, a VllmServer. Raises ServerError if a request fails."""
    before = server.counters()
    start = time.perf_counter()
    with ThreadPoolExecutor(asked.concurrency) as threads:
        generate = partial(server.generate, decoding=decoding)
        runs = [output.run for output in threads.map(generate, asked.prompts)]
    seconds = time.perf_counter() - start
    return TimedRound(runs, seconds, between(before, server.counters()))


def load_point(concurrency: int, rounds: Sequence[tuple[TimedRound, TimedRound]]) -> dict[str, Any]:
    """The fields of a `LoadPoint`. rounds: pairs without and with the draft; intervals use them."""
    rates = [
        (plain.seconds, plain.tokens, with_draft.seconds, with_draft.tokens)
        for plain, with_draft in rounds
    ]
    counted = [with_draft.counters for _, with_draft in rounds if with_draft.counters]
    lengths = [(c.drafts + c.accepted, c.drafts) for c in counted if c.drafts]
    plain_runs = [run for plain, _ in rounds for run in plain.runs]
    draft_runs = [run for _, with_draft in rounds for run in with_draft.runs]
    several = all(any(run.block_tokens for run in runs) for runs in (plain_runs, draft_runs))
    return {
        "concurrency": concurrency,
        "requests": len(plain_runs),
        "tokens_per_s": Both(
            baseline=measure("tokens_per_s", rates, lambda t: t[..., 1] / t[..., 0]),
            speculative=measure("tokens_per_s", rates, lambda t: t[..., 3] / t[..., 2]),
        ),
        "speedup": measure("speedup", rates, speedup_of),
        "itl_ms": Both(baseline=itl_ms(plain_runs), speculative=itl_ms(draft_runs))
        if several
        else None,
        "mean_acceptance_length": measure("mean_acceptance_length", lengths) if lengths else None,
    }
