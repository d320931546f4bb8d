"""Drafts measured behind vLLM servers, each against the target alone, on the same prompts.

Servers are asked one request at a time, then several at a time (eval/engines/load.py). Servers
that run already take turns; servers that are started here run one at a time.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from align.sources import load_config, resolve_checkpoint
from eval.decoding.loop import Decoding
from eval.engines.comparison import Comparison, Start, take_turns, there_and_back
from eval.engines.local_vllm import METHODS, gpu_arguments, loadable_draft, serve_vllm, speculation
from eval.engines.server import ServerError
from eval.engines.vllm import Response, VllmServer
from eval.measuring.evaluation import context_length, decoding_facts, prompt_facts
from eval.measuring.intervals import Measured, measure, share
from eval.measuring.output_check import ledger
from eval.measuring.runs import REFERENCE_ONLY, DraftLog, RunLog, Speculation
from eval.prompts import PromptSet
from eval.reporting.build import build_report
from eval.reporting.fields import Report

PATIENCE = 600.0  # seconds without a byte from a server started here: on a CPU it answers slowly
WARM_UP = 16  # tokens of a first response that is not counted
STEPS = ("tau", "mean_drafted", "accepted_over_drafted", "per_position")
UNTOLD = {
    **REFERENCE_ONLY,
    **dict.fromkeys(STEPS, "a server does not tell a cut last step apart: see counters"),
    "memory": "a server does not tell what its models weigh",
}


@dataclass(frozen=True)
class ServedDraft:
    """A draft behind a server. gamma: its draft length; None where it is not known here."""

    name: str
    path: str
    gamma: int | None


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
    starts = [_running(server) for server in (baseline, *drafts.values())]
    comparison = Comparison(starts, prompts.prompts, decoding, loads)
    comparison.run(take_turns)
    served = [ServedDraft(name, server.address, gamma) for name, server in drafts.items()]
    named = target or baseline.model
    return _report(comparison, served, prompts, provenance, named, baseline.host)


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
        loadable = {
            draft: loadable_draft(draft, path, config, Path(scratch))
            for draft in drafts.values()
            if draft not in METHODS
        }
        on_gpus = gpu_arguments(config, [folder for folder, _ in loadable.values()])
        # with a prefix cache the second request of a prompt costs less than its first
        arguments = ["--no-enable-prefix-caching", *on_gpus]

        @contextmanager
        def serving(draft: str = "", gamma: int = 0) -> Iterator[VllmServer]:
            folder, own_ids = loadable.get(draft, (draft, False))
            drafting = speculation(folder, gamma, own_ids=own_ids) if draft else []
            drafting += arguments
            # in the target's dtype, as `vllm serve` does it
            with serve_vllm(
                path, *drafting, positions=positions, dtype="auto", eager=not on_gpus
            ) as url:
                server = VllmServer(url, PATIENCE, connections=max([1, *loads]))
                _warm_up(server, prompts, decoding)
                yield server

        served: list[ServedDraft] = []
        starts: list[Start] = [serving]
        for gamma, (name, draft) in product(gammas, drafts.items()):
            name = f"{name}, gamma {gamma}" if gammas[1:] else name
            served.append(ServedDraft(name, draft, gamma))
            starts.append(partial(serving, draft, gamma))
        comparison = Comparison(starts, prompts.prompts, decoding, loads)
        comparison.run(there_and_back)
    provenance = provenance | {"vllm_arguments": arguments}
    device, dtype = "cuda" if on_gpus else "cpu", str(config.dtype or "auto")
    dtype = dtype.removeprefix("torch.")
    return _report(comparison, served, prompts, provenance, target, device, dtype)


def _running(server: VllmServer) -> Start:
    return lambda: nullcontext(server)


def _warm_up(server: VllmServer, prompts: PromptSet, decoding: Decoding) -> Speculation | None:
    """The server's counts with a first response."""
    return server.decode(prompts.prompts[0], replace(decoding, max_new_tokens=WARM_UP)).counters


def _report(
    comparison: Comparison,
    drafts: Sequence[ServedDraft],
    prompts: PromptSet,
    provenance: dict[str, Any],
    target: str,
    device: str,
    dtype: str = "dtype of the server",
) -> Report:
    """The report of the drafts that decoded prompts; `failures` of its provenance are the others.

    Raises ServerError where none did.
    """
    numbered = list(enumerate(drafts, 1))
    logs = [_log(comparison, i, draft) for i, draft in numbered if comparison.pairs(i)]
    failures = "; ".join(
        f"{draft.name} {failure}" for i, draft in numbered if (failure := comparison.failure(i))
    )
    if not logs:
        raise ServerError(failures)
    used = {run.prompt_id for log in logs for run in log.runs}
    decoding = comparison.decoding
    run = RunLog(
        target=target,
        engine="vllm",
        device=device,
        dtype=dtype,
        decoding=decoding_facts(
            decoding,
            [o.timed.ended for (server, _), o in comparison.outputs.items() if not server],
            gamma=logs[-1].gamma,
            gamma_policy=logs[-1].gamma_policy,
            # greedy tokens are compared one by one; how the server judges sampled ones is unknown
            verification="greedy match" if decoding.sampling.greedy else "the server's own rule",
            stop_tokens=None,
        ),
        prompts=prompt_facts(
            replace(prompts, prompts=[p for p in prompts.prompts if p.id in used], ids=[])
        ),
        provenance=provenance | ({"failures": failures} if failures else {}),
    )
    return build_report(run, logs)


def _log(comparison: Comparison, server: int, draft: ServedDraft) -> DraftLog:
    """The log of a draft on the prompts that its server and the baseline decoded."""
    pairs = comparison.pairs(server)
    plain, drafted = ([comparison.outputs[s, i].timed for i in pairs] for s in (0, server))
    counters, no_counters = _counters(drafted)
    by_load, no_load = comparison.by_load(server)
    missing = {
        "prompts": comparison.failure(server) if len(pairs) < len(comparison.prompts) else "",
        "by_load": no_load,
        **UNTOLD,
        "counters": no_counters,
    }
    return DraftLog(
        name=draft.name,
        path=draft.path,
        form="served",
        vocabulary={"relation": "of the server", "strategy": "of the server", "coverage": None},
        runs=[response.run for response in drafted],
        baseline=[response.run for response in plain],
        lossless=ledger(len(pairs), comparison.divergent(server)),
        gamma=draft.gamma,
        gamma_policy="fixed" if draft.gamma else "of the server",
        by_load=by_load,
        counters=counters,
        missing={field: reason for field, reason in missing.items() if reason},
    )


def _counters(responses: Sequence[Response]) -> tuple[dict[str, Any] | None, str]:
    """The `counters` of the report, or None and the reason."""
    counted = [(r.run, r.counters) for r in responses if r.counters is not None]
    if not counted:
        return None, (
            "the server has no counters vllm:spec_decode_* at /metrics: speculation is off, "
            "--disable-log-stats is set, or it is no vLLM"
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
