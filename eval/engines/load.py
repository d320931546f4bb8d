"""What a draft is worth while a vLLM server decodes several texts at a time.

Speculation lives on what a target call leaves idle, and many texts leave nothing. At each load so
many requests are kept in flight, first of one server, then of the next; texts are not compared, as
bf16 sums depend on what else is in the batch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from tqdm import tqdm

from eval.decoding.loop import Decoding
from eval.engines.server import ServerError
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


def load_curve(
    baseline: VllmServer,
    speculative: Mapping[str, VllmServer],
    prompts: Sequence[Prompt],
    decoding: Decoding,
    loads: Sequence[int],
) -> tuple[dict[str, list[dict[str, Any]]], str | None]:
    """`by_load` of the report for each draft, and the failure that ended it.

    loads: requests at a time. At each every server answers all prompts, at least 8 times as many
    requests as the load; prompts are asked again where there are fewer.
    """
    curve: dict[str, list[dict[str, Any]]] = {name: [] for name in speculative}
    servers = [baseline, *speculative.values()]
    for load in loads:
        size = FULL * load
        count = max(ROUNDS, len(prompts) // size)
        asked = [prompts[i % len(prompts)] for i in range(count * size)]
        rounds: list[list[Round]] = []
        for turn in tqdm(range(count), desc=f"{load} at a time", unit="round"):
            first = turn % len(servers)
            part = asked[turn * size : (turn + 1) * size]
            try:
                round_of = {
                    server: _round(server, part, decoding, load)
                    for server in [*servers[first:], *servers[:first]]
                }
            except ServerError as error:
                return curve, f"at {load} requests at a time: {error}"
            rounds.append([round_of[server] for server in servers])
        for number, name in enumerate(speculative, 1):
            curve[name].append(_point(load, [(row[0], row[number]) for row in rounds]))
    return curve, None


def _round(server: VllmServer, prompts: Sequence[Prompt], decoding: Decoding, load: int) -> Round:
    before = server.counters()
    start = time.perf_counter()
    with ThreadPoolExecutor(load) as threads:
        answers = list(threads.map(partial(server.answer, decoding=decoding), prompts))
    seconds = time.perf_counter() - start
    return Round([answer.run for answer in answers], seconds, grown(before, server.counters()))


def _point(load: int, rounds: Sequence[tuple[Round, Round]]) -> dict[str, Any]:
    """A LoadPoint of the report: what varies is the round."""
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
