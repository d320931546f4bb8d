"""Speculation behind vLLM servers: one drafts nothing, others do, the same report.

Every server answers each prompt, one request at a time; then, where it is asked for, several at a
time (eval/engines/load.py). What a server does not tell, the report names as missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.driven import MISSING, decoding_facts, prompts_used
from eval.engines.forks import Row, explain, read_text
from eval.engines.load import load_point, load_rounds
from eval.engines.server import ServerError
from eval.engines.turns import Start, Task, Turns, running
from eval.engines.vllm import Answer, VllmServer
from eval.measuring.intervals import Measured, measure, share
from eval.measuring.losslessness import divergence, ledger
from eval.measuring.runs import DraftLog, RunLog
from eval.prompts import Prompt, PromptSet
from eval.reporting.report import Report, build_report

# Fields that are made from blocks.
BLOCKS = "tau mean_drafted accepted_over_drafted per_position decode_speedup"
UNTOLD = {
    **MISSING,
    **dict.fromkeys(BLOCKS.split(), "it counts cut blocks and no others apart: see counters"),
    "memory": "it does not tell what its models weigh",
}


@dataclass(frozen=True)
class Compared:
    """Drafts against a baseline, on the prompts that all answered. ended: by itself, of each."""

    logs: list[DraftLog]
    prompts: list[Prompt]
    ended: list[bool]


def measure_servers(
    speculative: Mapping[str, VllmServer],
    baseline: VllmServer,
    prompts: PromptSet,
    decoding: Decoding,
    provenance: dict[str, Any],
    target: str | None = None,
    loads: Sequence[int] = (),
) -> Report:
    """The report of servers that run, by the names of their drafts, against a plain one.

    target: as of `report_of`. Otherwise as `compare`.
    """
    for server in speculative.values():
        if server.model != baseline.model:
            raise ServerError(
                f"{server.url} serves {server.model!r}, {baseline.url} {baseline.model!r}; serve "
                f"the same target twice (--served-model-name, if only the names differ)."
            )
    compared = compare(
        {name: running(server) for name, server in speculative.items()},
        running(baseline),
        prompts.prompts,
        decoding,
        {name: server.host for name, server in speculative.items()},
        loads,
    )
    target, device = target or baseline.model, baseline.host
    return report_of([compared], prompts, decoding, provenance, target, device)


def compare(
    speculative: Mapping[str, Start],
    baseline: Start,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    paths: Mapping[str, str],
    loads: Sequence[int] = (),
    together: bool = True,
) -> Compared:
    """Speculative servers, by the names of their drafts, against a plain one.

    All are asked the same prompts, which each renders itself. paths: of the drafts. loads: numbers
    of requests at a time at which everything is measured once more. together: they run at the same
    time and take turns (eval/engines/turns.py).

    A server that fails after the first prompts: the logs have those, `missing` says what happened.
    Raises `ServerError` where nothing can be measured: a server is down from the start, does not
    speculate, or speculates as the baseline.
    """
    tasks = [
        Task(
            partial(_answers, prompt=prompt, decoding=decoding),
            f"after {i} of {len(prompts)} prompts",
        )
        for i, prompt in enumerate(prompts)
    ]
    rounds = {}  # of each load: the places of its tasks
    for load in loads:
        first = len(tasks)
        where = f"at {load} requests at a time"
        tasks += [Task(do, where) for do in load_rounds(prompts, decoding, load)]
        rounds[load] = range(first, len(tasks))
    reads: dict[tuple[int, int], list[Row] | str] = {}  # by draft and prompt
    ledgers: list[dict[str, Any]] = []

    def check(number: int, server: VllmServer) -> None:
        _warm_up(server, number > 0, prompts[0], decoding)

    def finish(number: int, server: VllmServer) -> None:
        if number:
            for place, row in enumerate(turns.made[: len(prompts)]):
                if row[number] is not None and (number, place) not in reads:
                    reads[number, place] = _read_again(server, row[0], row[number])
            return
        done = [place for place in turns.whole if place < len(prompts)]
        for draft in range(1, 1 + len(speculative) if done else 1):
            greedy = [(turns.made[place][0][1], turns.made[place][draft][1]) for place in done]
            ledgers.append(_ledger(server, greedy, [reads[draft, place] for place in done]))

    starts, title = [baseline, *speculative.values()], f"servers of {', '.join(speculative)}"
    turns = Turns(starts, tasks, len(prompts), check, finish, title)
    if together:
        turns.together()
    else:
        turns.one_after_another()
    places = [place for place in turns.whole if place < len(prompts)]
    if not places or not ledgers:
        raise ServerError(turns.failure)
    answers = [[answer for answer, _ in turns.made[place]] for place in places]
    logs = []
    for number, (name, texts) in enumerate(zip(speculative, ledgers, strict=True), 1):
        counters, no_counters = _counters_block([row[number] for row in answers])
        lacking = {
            "prompts": turns.failure if len(places) < len(prompts) else "",
            "by_load": turns.failure if loads else "",
            **UNTOLD,
            "counters": no_counters,
        }
        log = DraftLog(
            name=name,
            path=paths[name],
            form="served",
            vocabulary={"relation": "of the server", "strategy": "of the server", "coverage": None},
            runs=[row[number].run for row in answers],
            baseline=[row[0].run for row in answers],
            lossless=texts,
            gamma=len(counters["acceptance_per_position"]) or None if counters else None,
            gamma_policy="of the server",
            by_load=[
                load_point(load, [(turns.made[i][0], turns.made[i][number]) for i in at])
                for load, at in rounds.items()
                if set(at) <= set(turns.whole)
            ],
            counters=counters,
            missing={field: reason for field, reason in lacking.items() if reason},
        )
        logs.append(log)
    used = [prompts[place] for place in places]
    return Compared(logs, used, [row[0].ended for row in answers])


def report_of(
    parts: Sequence[Compared],
    prompts: PromptSet,
    decoding: Decoding,
    provenance: dict[str, Any],
    target: str,
    device: str,
    dtype: str = "dtype of the server",
) -> Report:
    """The report of drafts that were compared with the same baseline, a part after the other.

    prompts: those that were asked. target, device: what the report calls them.
    """
    logs = [log for part in parts for log in part.logs]
    run = RunLog(
        target=target,
        engine="vllm",
        device=device,
        dtype=dtype,
        decoding=decoding_facts(
            decoding,
            parts[0].ended,
            gamma=logs[-1].gamma,
            gamma_policy=logs[-1].gamma_policy,
            # greedily the tokens themselves are compared; sampled, nobody can see the rule
            verification="greedy match" if decoding.sampling.greedy else "the server's own rule",
            stop_tokens=None,
        ),
        prompts=prompts_used(replace(prompts, prompts=parts[0].prompts, ids=[])),
        provenance=provenance,
    )
    return build_report(run, logs)


def _warm_up(server: VllmServer, drafts: bool, prompt: Prompt, decoding: Decoding) -> None:
    """A first answer; the server's counters, where it has any, say whether it speculates."""
    shortly = replace(decoding, max_new_tokens=16)
    grown = server.decode(prompt, shortly).counters
    if drafts and grown is not None and not grown[0]:
        grown = server.decode(prompt, decoding).counters  # lookup finds nothing at times
    if grown is None or drafts == (grown[0] > 0):
        return
    if drafts:
        raise ServerError(
            f"{server.url} has drafted nothing in its first answer: speculation is off; start "
            f"it with --speculative-config, or swap --base_url and --baseline_url."
        )
    raise ServerError(
        f"{server.url} speculates, too: a baseline must not; start it without --speculative-config."
    )


def _answers(server: VllmServer, prompt: Prompt, decoding: Decoding) -> tuple[Answer, Answer]:
    """A server's answer to a prompt, and its greedy one: losslessness is always measured so."""
    answer = server.decode(prompt, decoding)
    if decoding.sampling.greedy:
        return answer, answer
    return answer, server.decode(prompt, replace(decoding, sampling=Sampling()))


def _read_again(
    server: VllmServer, plain: tuple[Answer, Answer] | None, drafted: tuple[Answer, Answer]
) -> list[Row] | str:
    """What the server that wrote a greedy text with a draft says of it, if it may part.

    plain: of the baseline; None: it comes later.
    """
    text = drafted[1].run.tokens
    if plain and plain[1].run.tokens == text:
        return "it does not part"
    return read_text(server, drafted[1].prompt_ids, text)


def _counters_block(answers: Sequence[Answer]) -> tuple[dict[str, Any] | None, str | None]:
    """The `counters` of the report, or the reason why there are none."""
    grown = [(answer.run, answer.counters) for answer in answers if answer.counters is not None]
    if not grown:
        return None, (
            "the server has no counters vllm:spec_decode_* at /metrics: speculation is off, "
            "--disable-log-stats is set, or it is no vLLM"
        )
    drafts, drafted, accepted, *accepted_at = np.sum([row for _, row in grown], axis=0).tolist()
    tokens = sum(len(answer.run.tokens) for answer in answers)
    # a draft emits one token beside the accepted ones; a last one may be cut by its whole length
    if accepted + drafts > tokens + (len(accepted_at) + 1) * len(grown):
        return None, (
            f"they grew by {accepted + drafts:.0f} tokens while this run was sent {tokens}: others "
            f"used the server; measure again while it is idle"
        )
    drafting = [(run, row) for run, row in grown if row[0]]
    if not any(row[1] for _, row in drafting):
        return None, "they did not grow while this run was served"

    def length(category: str | None = None) -> Measured:
        """Of the prompts of a category, or all of them."""
        of = [(run, row) for run, row in drafting if category in (None, run.category)]
        sums = [(row[2] + row[0], row[0]) for _, row in of]
        return measure("mean_acceptance_length", sums, groups=[run.group for run, _ in of])

    return {
        "num_drafts": round(drafts),
        "num_draft_tokens": round(drafted),
        "num_accepted_tokens": round(accepted),
        "mean_acceptance_length": length(),
        "acceptance_rate": share(
            "acceptance_rate", [(run.group, row[2], row[1]) for run, row in drafting]
        ),
        "acceptance_per_position": [count / drafts for count in accepted_at],
        "per_position": [
            share("acceptance", [(run.group, row[place], row[0]) for run, row in drafting])
            for place in range(3, 3 + len(accepted_at))
        ],
        "by_category": {
            category: length(category)
            for category in sorted({run.category for run, _ in drafting if run.category})
        },
    }, None


def _ledger(
    baseline: VllmServer,
    pairs: Sequence[tuple[Answer, Answer]],
    reads: Sequence[list[Row] | str],
) -> dict[str, Any]:
    """The ledger of the greedy texts of the baseline and of a server that speculates.

    reads: `read_text` of each drafted text.
    """
    entries = []
    for (plain, drafted), read in zip(pairs, reads, strict=True):
        texts = plain.run.tokens, drafted.run.tokens
        if texts[0] == texts[1]:
            continue
        entry = divergence(plain.run, drafted.run, lambda ids: f"token {ids[0]}" if ids else "end")
        if entry["position"] < min(map(len, texts)):  # lengths can never differ by a tie
            entry |= explain(baseline, read, plain.prompt_ids, texts, entry["position"])
        entries.append(entry)
    return ledger(len(pairs), entries)
