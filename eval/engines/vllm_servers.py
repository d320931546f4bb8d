"""Speculation behind vLLM servers: one drafts nothing, others do, the same report.

Prompts go to the servers in turn, one request at a time; then, where it is asked for, several at a
time (eval/engines/load.py). What a server does not tell, the report names as missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.driven import MISSING, decoding_facts, prompts_used
from eval.engines.forks import explain
from eval.engines.load import load_curve
from eval.engines.server import ServerError
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
    overlap: int | None = None,
    loads: Sequence[int] = (),
) -> Report:
    """The report of speculative servers, by the names of their drafts, against a plain one.

    target, overlap: as of `report_of`. Otherwise as `compare`.
    """
    compared = compare(speculative, baseline, prompts.prompts, decoding, loads)
    target = target or baseline.model
    return report_of([compared], baseline, prompts.source, decoding, provenance, target, overlap)


def compare(
    speculative: Mapping[str, VllmServer],
    baseline: VllmServer,
    prompts: Sequence[Prompt],
    decoding: Decoding,
    loads: Sequence[int] = (),
    paths: Mapping[str, str] | None = None,
) -> Compared:
    """Speculative servers, by the names of their drafts, against a plain one, in turns.

    All are asked the same prompts, which each renders itself. loads: numbers of requests at a time
    at which everything is measured once more. paths: of the drafts; None: the servers' hosts.

    A server that fails after the first prompts: the logs have those, `missing` says what happened.
    Raises `ServerError` where nothing can be measured: a server is down from the start, does not
    speculate, or speculates as the baseline.
    """
    for server in speculative.values():
        if server.model != baseline.model:
            raise ServerError(
                f"{server.url} serves {server.model!r}, {baseline.url} {baseline.model!r}; serve "
                f"the same target twice (--served-model-name, if only the names differ)."
            )
    _warm_up(speculative.values(), baseline, prompts[0], decoding)
    servers = [baseline, *speculative.values()]
    answers, failure = _in_turns(servers, prompts, decoding)
    done = list(prompts[: len(answers)])
    greedy, greedy_failure = answers, None
    if not decoding.sampling.greedy:  # losslessness is always measured greedily
        greedily = replace(decoding, sampling=Sampling())
        greedy, greedy_failure = _in_turns(servers, done, greedily)
    by_load, load_failure = load_curve(baseline, speculative, done, decoding, loads)
    logs = []
    for number, (name, server) in enumerate(speculative.items(), 1):
        counters, no_counters = _counters_block([row[number] for row in answers])
        lacking = {
            "prompts": failure,
            "lossless": greedy_failure,
            "by_load": load_failure,
            **UNTOLD,
            "counters": no_counters,
        }
        log = DraftLog(
            name=name,
            path=server.host if paths is None else paths[name],
            form="served",
            vocabulary={"relation": "of the server", "strategy": "of the server", "coverage": None},
            runs=[row[number].run for row in answers],
            baseline=[row[0].run for row in answers],
            lossless=_ledger(server, baseline, [(row[0], row[number]) for row in greedy]),
            gamma=len(counters["acceptance_per_position"]) or None if counters else None,
            gamma_policy="of the server",
            by_load=by_load[name],
            counters=counters,
            missing={field: reason for field, reason in lacking.items() if reason},
        )
        logs.append(log)
    return Compared(logs, done, [row[0].ended for row in answers])


def report_of(
    parts: Sequence[Compared],
    baseline: VllmServer,
    source: str,
    decoding: Decoding,
    provenance: dict[str, Any],
    target: str,
    overlap: int | None = None,
    device: str | None = None,
    dtype: str = "dtype of the server",
) -> Report:
    """The report of drafts that were compared with the same baseline, a part after the other.

    source: of the prompts. target: what the report calls it. overlap: of the prompts with the
    training data, where that is known. device: None names the server's host.
    """
    logs = [log for part in parts for log in part.logs]
    run = RunLog(
        target=target,
        engine="vllm",
        device=device or baseline.host,
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
        prompts=prompts_used(PromptSet(source, parts[0].prompts, []))
        | {"overlap_with_training": overlap},
        provenance=provenance,
    )
    return build_report(run, logs)


def _warm_up(
    speculative: Iterable[VllmServer], baseline: VllmServer, prompt: Prompt, decoding: Decoding
) -> None:
    """One answer of each; their counters, where they have any, say which ones speculate."""
    shortly = replace(decoding, max_new_tokens=16)
    for server in speculative:
        for length in (shortly, decoding):  # a method without a model finds nothing at times
            grown = server.decode(prompt, length).counters
            if grown is None or grown[0] > 0:
                break
        else:
            raise ServerError(
                f"{server.url} has drafted nothing in its first answer: speculation is off; start "
                f"it with --speculative-config, or swap --base_url and --baseline_url."
            )
    grown = baseline.decode(prompt, shortly).counters
    if grown is not None and grown[0] > 0:
        raise ServerError(
            f"{baseline.url} speculates, too: a baseline must not; start it without "
            f"--speculative-config."
        )


def _in_turns(
    servers: Sequence[VllmServer], prompts: Sequence[Prompt], decoding: Decoding
) -> tuple[list[list[Answer]], str | None]:
    """The answers of all servers to each prompt, another one first each time, and what ended it.

    Raises ServerError where even the first prompt failed.
    """
    rows: list[list[Answer]] = []
    for turn, prompt in enumerate(tqdm(prompts, desc="servers", unit="prompt")):
        first = turn % len(servers)
        order = [*servers[first:], *servers[:first]]
        try:
            answers = {server: server.decode(prompt, decoding) for server in order}
        except ServerError as error:
            failure = f"after {turn} of {len(prompts)} prompts: {error}"
            if not rows:
                raise ServerError(failure) from None
            return rows, failure
        rows.append([answers[server] for server in servers])
    return rows, None


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
    speculative: VllmServer, baseline: VllmServer, pairs: Sequence[tuple[Answer, Answer]]
) -> dict[str, Any]:
    """The ledger of the greedy texts of the baseline and of the server that speculates."""
    entries = []
    for plain, drafted in pairs:
        texts = plain.run.tokens, drafted.run.tokens
        if texts[0] == texts[1]:
            continue
        entry = divergence(plain.run, drafted.run, lambda ids: f"token {ids[0]}" if ids else "end")
        if entry["position"] < min(map(len, texts)):  # lengths can never differ by a tie
            entry |= explain(baseline, speculative, plain.prompt_ids, texts, entry["position"])
        entries.append(entry)
    return ledger(len(pairs), entries)
