"""Drafts measured behind vLLM servers, each against the target alone, on the same prompts.

Servers are asked one request at a time, then several at a time (eval/engines/load.py). Servers
that run already take turns; servers that are started here run one at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from align.sources import load_config, resolve_checkpoint
from eval.decoding.loop import Decoding
from eval.engines.comparison import (
    Comparison,
    Contender,
    Response,
    runs_already,
    take_turns,
    there_and_back,
)
from eval.engines.local_vllm import METHODS, gpu_arguments, loadable_draft, serve_vllm, speculation
from eval.engines.server import ServerError
from eval.engines.vllm import VllmServer
from eval.measuring.environment import environment
from eval.measuring.evaluation import context_length
from eval.measuring.intervals import Measured, measure, share
from eval.measuring.runs import REFERENCE_ONLY, Speculation
from eval.prompts import PromptSet
from eval.reporting.fields import Report

PATIENCE = 600.0  # seconds without a byte from a server started here: on a CPU it answers slowly
WARM_UP = 16  # tokens of a first response that is not counted
STEPS = ("tau", "mean_drafted", "accepted_over_drafted", "per_position")
UNTOLD = {
    **REFERENCE_ONLY,
    **dict.fromkeys(STEPS, "a server does not tell a cut last step apart: see counters"),
    "memory": "a server does not tell what its models weigh",
}


def measure_servers(
    drafts: Mapping[str, VllmServer],
    baseline: VllmServer,
    prompts: PromptSet,
    decoding: Decoding,
    provenance: dict[str, Any],
    target: str | None = None,
    gamma: int | None = None,
    loads: Sequence[int] = (),
) -> Report:
    """The report of servers that run already, by the names of their drafts, against a plain one.

    target: its name in the report; None: the name that the servers give it. gamma: the draft length
    that the servers were started with. loads: numbers of requests at a time. Raises ServerError
    where nothing can be measured: a server is down, or the baseline speculates.
    """
    for server in drafts.values():
        if server.model != baseline.model:
            raise ServerError(
                f"{server.url} serves {server.model!r}, {baseline.url} {baseline.model!r}; serve "
                f"the same target twice (--served-model-name, if only the names differ)."
            )
        _warm_up(server, prompts, decoding)
    if (counters := _warm_up(baseline, prompts, decoding)) and counters.drafts:
        raise ServerError(
            f"{baseline.url} speculates, and a baseline must not; start it without "
            f"--speculative-config, or swap --base_url and --baseline_url."
        )
    machine = environment("vllm", baseline.version, torch.device("cpu"))
    # another machine's, perhaps
    machine |= dict.fromkeys(("hardware", "cores", "threads", "load_average"))
    contenders = [Contender(runs_already(baseline))]
    for name, server in drafts.items():
        facts = _facts(server.address, gamma)
        contenders.append(Contender(runs_already(server), name, facts))
    comparison = Comparison(contenders, prompts, decoding, loads)
    comparison.run(take_turns)
    return _report(
        comparison,
        provenance,
        target=target or baseline.model,
        device=baseline.host,
        dtype="dtype of the server",
        environment=machine,
    )


def measure_started(
    target: str,
    drafts: Mapping[str, str],
    gammas: Sequence[int],
    prompts: PromptSet,
    decoding: Decoding,
    provenance: dict[str, Any],
    loads: Sequence[int] = (),
) -> Report:
    """The report of drafts in vLLM, by name, with a server started here for each and for none.

    target, drafts: specs, quantised ones too; a draft as `speculation` takes it. gammas: draft
    lengths; of several, a draft's name tells its own. loads: numbers of requests at a time.
    Raises EngineMissing, and ServerError where nothing can be measured.
    """
    positions = context_length(prompts.ids, decoding.max_new_tokens, max(gammas))
    path = resolve_checkpoint(target, quantised=True)
    config = load_config(str(path))
    with tempfile.TemporaryDirectory() as scratch:
        loadable: dict[str, tuple[str | Path, bool]] = {draft: (draft, False) for draft in METHODS}
        unreadable: dict[str, str] = {}
        for draft in {*drafts.values()} - METHODS.keys():
            try:
                loadable[draft] = loadable_draft(draft, path, config, Path(scratch))
            except (ValueError, OSError) as error:  # the others can be measured
                unreadable[draft] = str(error)
        if unreadable.keys() >= {*drafts.values()}:
            raise ServerError("; ".join(unreadable.values()))
        folders = [folder for folder, _ in loadable.values() if isinstance(folder, Path)]
        on_gpus = gpu_arguments(config, folders)
        # In the target's dtype, as `vllm serve` has it. With a prefix cache the second request of a
        # prompt costs less than its first.
        arguments = ["--dtype", "auto", "--max-model-len", str(positions)]
        arguments += ["--no-enable-prefix-caching", *(on_gpus or ["--enforce-eager"])]
        device = torch.device("cuda" if on_gpus else "cpu")
        machine = environment("vllm", None, device)
        machine |= {"threads": None, "server_arguments": arguments}

        @contextmanager
        def serving(draft: str = "", gamma: int = 0) -> Iterator[VllmServer]:
            folder, own_ids = loadable.get(draft, ("", False))
            drafting = speculation(folder, gamma, own_ids=own_ids) if draft else []
            with serve_vllm(path, *drafting, *arguments) as url:
                server = VllmServer(url, PATIENCE, connections=max([1, *loads]))
                machine["engine_version"] = server.version
                _warm_up(server, prompts, decoding)
                yield server

        contenders = [Contender(serving)]
        for gamma, (name, draft) in product(gammas, drafts.items()):
            name = f"{name}, gamma {gamma}" if gammas[1:] else name
            contender = Contender(partial(serving, draft, gamma), name, _facts(draft, gamma))
            if draft in unreadable:
                contender.failures["prompts"] = unreadable[draft]
            contenders.append(contender)
        comparison = Comparison(contenders, prompts, decoding, loads)
        comparison.run(there_and_back)
    return _report(
        comparison,
        provenance,
        target=target,
        device=device.type,
        dtype=str(config.dtype or "auto").removeprefix("torch."),
        environment=machine,
    )


def _warm_up(server: VllmServer, prompts: PromptSet, decoding: Decoding) -> Speculation | None:
    """The server's counts with a first response."""
    return server.decode(prompts.prompts[0], replace(decoding, max_new_tokens=WARM_UP)).counters


def _facts(path: str, gamma: int | None) -> dict[str, Any]:
    return {
        "path": path,
        "form": "served",
        "vocabulary": {"relation": "of the server", "strategy": "of the server", "coverage": None},
        "gamma": gamma,
        "gamma_policy": "fixed" if gamma else "of the server",
        "missing": UNTOLD,
    }


def _report(comparison: Comparison, provenance: dict[str, Any], **facts: Any) -> Report:
    """The report of the drafts that decoded prompts, with their servers' counters."""
    logs = []
    for draft in comparison.drafting:
        if pairs := comparison.pairs(draft):
            log = comparison.log(draft)
            counters, reason = _counters([draft.outputs[i].timed for i in pairs])
            missing = log.missing | ({"counters": reason} if reason else {})
            logs.append(replace(log, counters=counters, missing=missing))
    # how a server judges sampled tokens is unknown
    rule = "the server's own rule"
    return comparison.report(logs, provenance, rule, None, engine="vllm", **facts)


def _counters(responses: Sequence[Response]) -> tuple[dict[str, Any] | None, str]:
    """The `counters` of the report, or None and the reason."""
    counted = [(r.run, r.counters) for r in responses if r.counters is not None]
    if not counted:
        return None, (
            "the server has no counters vllm:spec_decode_* at /metrics: speculation is off, "
            "--disable-log-stats is set, or it is not vLLM"
        )
    drafts, drafted, accepted, accepted_at = Speculation.sum(counts for _, counts in counted)
    tokens = sum(len(response.run.tokens) for response in responses)
    # a draft emits one token beside the accepted ones; a last one may be cut by its whole length
    if accepted + drafts > tokens + (len(accepted_at) + 1) * len(counted):
        return None, (
            f"they grew by {accepted + drafts:.0f} tokens while this run was sent {tokens}: others "
            f"used the server; measure again while it is idle"
        )
    drafting = [(run, counts) for run, counts in counted if counts.drafts]
    if not any(counts.drafted for _, counts in drafting):
        return None, "they did not grow while this run was served: nothing was drafted"

    def length(category: str | None = None) -> Measured:
        """Mean acceptance length on the prompts of a category; None: on all."""
        chosen = [(run, c) for run, c in drafting if category in (None, run.category)]
        sums = [(counts.accepted + counts.drafts, counts.drafts) for _, counts in chosen]
        return measure("mean_acceptance_length", sums, groups=[run.group for run, _ in chosen])

    return {
        "num_drafts": round(drafts),
        "num_draft_tokens": round(drafted),
        "num_accepted_tokens": round(accepted),
        "mean_acceptance_length": length(),
        "acceptance_rate": share(
            "acceptance_rate", [(run.group, c.accepted, c.drafted) for run, c in drafting]
        ),
        "acceptance_per_position": [count / drafts for count in accepted_at],
        "per_position": [
            share("acceptance", [(run.group, c.accepted_at[i], c.drafts) for run, c in drafting])
            for i in range(len(accepted_at))
        ],
        "by_category": {
            category: length(category)
            for category in sorted({run.category for run, _ in drafting if run.category})
        },
    }, ""
