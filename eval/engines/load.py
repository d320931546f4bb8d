"""What a draft is worth while a vLLM server decodes several texts at a time.

Speculation lives on what a target call leaves idle, and many texts leave nothing. At each load so
many requests are kept in flight; texts are not compared, as bf16 sums depend on what else is in
the batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from eval.decoding.loop import Decoding
from eval.engines.vllm import VllmServer, grown
from eval.measuring.intervals import Both, measure
from eval.measuring.metrics import itl_ms, speedup_of
from eval.measuring.runs import Floats, PromptRun
from eval.prompts import Prompt

ROUNDS = 4  # at each load, at least
FULL = 2  # requests of a round, in units of the load: while the last ones end it is not full


@dataclass(frozen=True)
class Round:
    """Requests of one server, so many at a time. grown: its counters, None where it has none."""

    runs: list[PromptRun]
    seconds: float
    grown: Floats | None

    @property
    def row(self) -> tuple[float, float]:
        """Seconds and tokens."""
        return self.seconds, sum(len(run.tokens) for run in self.runs)


def load_rounds(
    prompts: Sequence[Prompt], decoding: Decoding, load: int
) -> list[Callable[[VllmServer], Round]]:
    """What every server does at so many requests at a time: rounds, each with other prompts.

    A server answers all prompts, at least 8 times as many requests as the load; prompts are asked
    again where there are fewer.
    """
    size = FULL * load
    count = max(ROUNDS, len(prompts) // size)
    asked = [prompts[i % len(prompts)] for i in range(count * size)]
    parts = [asked[start : start + size] for start in range(0, len(asked), size)]
    return [partial(_round, prompts=part, decoding=decoding, load=load) for part in parts]


def _round(server: VllmServer, prompts: Sequence[Prompt], decoding: Decoding, load: int) -> Round:
    before = server.counters()
    start = time.perf_counter()
    with ThreadPoolExecutor(load) as threads:
        answers = list(threads.map(partial(server.answer, decoding=decoding), prompts))
    seconds = time.perf_counter() - start
    return Round([answer.run for answer in answers], seconds, grown(before, server.counters()))


def load_point(load: int, rounds: Sequence[tuple[Round, Round]]) -> dict[str, Any]:
    """A LoadPoint of the report, from rounds without and with the draft, which are what varies."""
    rows = [(*plain.row, *drafted.row) for plain, drafted in rounds]
    counted = [drafted.grown for _, drafted in rounds if drafted.grown is not None]
    lengths = [(drafts + accepted, drafts) for drafts, _, accepted, *_ in counted if drafts]
    plain_runs, drafted_runs = (
        [run for side in sides for run in side.runs] for sides in zip(*rounds, strict=True)
    )
    return {
        "concurrency": load,
        "requests": sum(len(plain.runs) for plain, _ in rounds),
        "tokens_per_s": Both(
            baseline=measure("tokens_per_s", rows, lambda t: t[..., 1] / t[..., 0]),
            speculative=measure("tokens_per_s", rows, lambda t: t[..., 3] / t[..., 2]),
        ),
        "speedup": measure("speedup", rows, speedup_of),
        "itl_ms": Both(baseline=itl_ms(plain_runs), speculative=itl_ms(drafted_runs)),
        "mean_acceptance_length": measure("mean_acceptance_length", lengths) if lengths else None,
    }
