"""Measures drafts in vLLM servers, each compared with the target alone on the same prompts.

Servers get one request at a time, then several at a time (eval/engines/load.py). Servers
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

from align.errors import UserError
from align.sources import gguf_kind, load_config, resolve_checkpoint
from eval.decoding.build import longest_context
from eval.decoding.loop import Decoding
from eval.engines.comparison import (
    WARM_UP,
    Comparison,
    Contender,
    Output,
    runs_already,
    take_turns,
    there_and_back,
)
from eval.engines.load import Load
from eval.engines.local_vllm import METHODS, gpu_arguments, loadable_draft, serve_vllm, speculation
from eval.engines.server import ServerError
from eval.engines.vllm import VllmServer
from eval.measuring.environment import environment
from eval.measuring.evaluation import context_length
from eval.measuring.intervals import Measured, measure, share
from eval.measuring.runs import REFERENCE_ONLY, Speculation
from eval.prompts import PromptSet
from eval.reporting.fields import Report

TEMPLATE = 64  # most tokens of a chat template in a turn
PATIENCE = 600.0  # most seconds without a byte from a server started here, which may use a CPU
STEPS = ("tau", "mean_drafted", "accepted_over_drafted", "per_position")
UNTOLD = {
    **REFERENCE_ONLY,
    **dict.fromkeys(STEPS, "a server does not report whether the last step was cut; see counters"),
    "memory": "a server does not report the size of its models",
}


def measure_servers(
    drafts: Mapping[str, VllmServer],
    baseline: VllmServer,
    prompts: PromptSet,
    decoding: Decoding,
    provenance: dict[str, Any],
    target: str | None = None,
    gamma: int | None = None,
    loads: Sequence[Load] = (),
    limits: dict[str, float] | None = None,
) -> Report:
    """The report of running servers, by the name of the draft, compared with a plain server.

    target: the target's name in the report; None: the name in the servers. gamma: the servers'
    draft length. limits: of the goodput. Raises ServerError if nothing can be measured: a
    server does not answer, serves another target, or is the baseline and speculates.
    """
    for server in drafts.values():
        if server.model != baseline.model:
            raise ServerError(
                f"{server.url} serves {server.model!r}, but {baseline.url} serves "
                f"{baseline.model!r}; serve one target under one name (--served-model-name)."
            )
        _warm_up(server, prompts, decoding)
    if (counters := _warm_up(baseline, prompts, decoding)) and counters.drafts:
        raise ServerError(
            f"{baseline.url} is the baseline, but it speculates; start it without "
            f"--speculative-config, or swap --base_url and --baseline_url."
        )
    machine = environment("vllm", baseline.version, torch.device("cpu"))
    # unknown, because the servers may run on another machine
    machine |= dict.fromkeys(("hardware", "cores", "threads", "load_average"))
    contenders = [Contender(runs_already(baseline))]
    for name, server in drafts.items():
        facts = _facts(server.address, gamma)
        contenders.append(Contender(runs_already(server), name, facts))
    comparison = Comparison(contenders, prompts, decoding, loads, limits)
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
    loads: Sequence[Load] = (),
    limits: dict[str, float] | None = None,
) -> Report:
    """The report of drafts in vLLM, by name; a server is started for each draft and the baseline.

    target, drafts: specs, quantised checkpoints included; drafts as in `speculation`. gammas: draft
    lengths; if there are several, the names of drafts in the report have them. limits: of the
    goodput. Raises EngineMissing, and ServerError if nothing can be measured.
    """
    path = resolve_checkpoint(target, quantised=True)
    config = load_config(str(path))
    positions = context_length(prompts.ids, decoding.max_new_tokens, max(gammas))
    # a later turn has no more tokens than characters, besides those of the template
    positions += max(
        sum(len(text) + TEMPLATE + decoding.max_new_tokens for text in prompt.follow_ups or [])
        for prompt in prompts.prompts
    )
    positions = min(positions, longest_context(config.get_text_config()))
    with tempfile.TemporaryDirectory() as scratch:
        loadable: dict[str, tuple[str | Path, bool]] = {draft: (draft, False) for draft in METHODS}
        unreadable: dict[str, str] = {}
        for draft in {*drafts.values()} - METHODS.keys():
            try:
                loadable[draft] = loadable_draft(draft, path, config, Path(scratch))
            except (UserError, OSError) as error:  # other drafts can still be measured
                unreadable[draft] = str(error)
        if unreadable.keys() >= {*drafts.values()}:
            raise ServerError("; ".join(unreadable.values()))
        folders = [folder for folder, _ in loadable.values() if isinstance(folder, Path)]
        on_gpus = gpu_arguments(config, folders)
        # The dtype is the default of `vllm serve`. The prefix cache is off, because with it the
        # second request of a prompt is faster than the first.
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
                server = VllmServer(url, PATIENCE)
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
        comparison = Comparison(contenders, prompts, decoding, loads, limits)
        comparison.run(there_and_back)
    return _report(
        comparison,
        provenance,
        target=target,
        target_quantization=gguf_kind(target),
        device=device.type,
        dtype=str(config.dtype or "auto").removeprefix("torch."),
        environment=machine,
    )


def _warm_up(server: VllmServer, prompts: PromptSet, decoding: Decoding) -> Speculation | None:
    """Send a first, short request; the server's counts for it."""
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
    # a server does not report its rule for sampled tokens
    rule = "the server's own rule"
    return comparison.report(logs, provenance, rule, None, engine="vllm", **facts)


def _counters(outputs: Sequence[Output]) -> tuple[dict[str, Any] | None, str]:
    """The `counters` of the report and "", or None and the reason."""
    counted = [(r.run, r.counters) for r in outputs if r.counters is not None]
    if not counted:
        return None, (
            "the server has no counters vllm:spec_decode_* at /metrics: speculation is off, "
            "--disable-log-stats is set, or it is not vLLM"
        )
    drafts, drafted, accepted, accepted_at = Speculation.sum(counts for _, counts in counted)
    tokens = sum(len(output.run.tokens) for output in outputs)
    # each draft emits the accepted tokens and one more; the last draft of each output may be cut
    if accepted + drafts > tokens + (len(accepted_at) + 1) * len(counted):
        return None, (
            f"they grew by {accepted + drafts:.0f} tokens, but this run received {tokens}: other "
            "clients used the server; measure again while it is idle"
        )
    drafting = [(run, counts) for run, counts in counted if counts.drafts]
    if not any(counts.drafted for _, counts in drafting):
        return None, "they did not grow during this run: nothing was drafted"

    def length(category: str | None = None) -> Measured:
        """Mean acceptance length on the prompts of a category; None: all prompts."""
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
