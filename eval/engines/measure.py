"""Measures drafts in servers, each compared with the target alone on the same prompts.

Servers get one request at a time, then several at a time (eval/engines/load.py). Servers
that run already take turns; servers that are started here run one at a time.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from align.checkpoint import Checkpoint, weights_sha256
from align.errors import UserError, masked_arguments
from eval.decoding.drafters import LOOKUP
from eval.engines.comparison import Comparison
from eval.engines.contender import Contender, Output, Task, runs_already
from eval.engines.engine_server import EngineServer, Launcher
from eval.engines.llama_cpp import LlamaServer
from eval.engines.load import WARM_UP
from eval.engines.server import PATIENT, Server, ServerError
from eval.engines.sglang import SglangServer
from eval.engines.visits import take_turns, there_and_back
from eval.engines.vllm import VllmServer
from eval.measuring.environment import environment
from eval.measuring.evaluation import context_length
from eval.measuring.intervals import Measured, measure, share
from eval.measuring.runs import AT_LONGEST, REFERENCE_ONLY, Speculation
from eval.reporting.fields import Report

FIRST = 8  # prompts that are tried before a server is said to refuse them
REFUSED = 400, 413, 422  # HTTP statuses of a prompt that is refused, as one that is too long
TEMPLATE = 64  # most tokens of a chat template in a turn
PATIENCE = 600.0  # most seconds without a byte from a server started here, which may use a CPU
SLOTS = 16  # requests at a time that a server takes at a request rate, if it needs a number
# Variables that change an engine's speed or outputs. Others may have secrets or addresses, as the
# VLLM_SERVICE_HOST that Kubernetes sets for a service named vllm.
CONFIGURES = re.compile(
    r"(?:OMP|KMP|MKL|NUMBA|GGML)_\w+|CUDA_VISIBLE_DEVICES"
    r"|VLLM_(?:USE|ENABLE|DISABLE|ROCM|MOE|MARLIN|FLASHINFER|ALLREDUCE)_\w+|VLLM_ATTENTION_BACKEND"
    r"|VLLM_BATCH_INVARIANT|VLLM_CPU_(?:KVCACHE_SPACE|OMP_THREADS_BIND|NUM_OF_RESERVED_CPU)"
    r"|LLAMA_ARG_(?:(?:UB|B)ATCH|CACHE_TYPE_[KV]|(?:N_)?CPU_MOE|DEVICE|FLASH_ATTN|KV_\w+|MAIN_GPU|MLOCK"
    r"|MMAP|N(?:_GPU_LAYERS|UMA)\w*|REPACK|SPEC_\w+|SPLIT_MODE|SWA_FULL|TENSOR_SPLIT|THREADS\w*)"
)
N_GRAMS = {LOOKUP, "suffix"}  # drafts that find nothing in some outputs
IDLE = (
    "drafted nothing, so its server did not load it, and a speed-up would not be its own. Read the "
    "server's log; `python -m align.check` compares the vocabularies."
)
CLIENTS: list[type[EngineServer]] = [VllmServer, LlamaServer, SglangServer]
STEPS = ("tau", "mean_drafted", "accepted_over_drafted", "per_position")
UNTOLD = {
    **REFERENCE_ONLY,
    **dict.fromkeys(STEPS, "a server does not report whether the last step was cut; see counters"),
    "memory": "a server does not report the size of its models",
}


SPECULATES = (
    "The target alone speculates; take speculation out of --server_args, its files, and the "
    "environment (LLAMA_ARG_SPEC_TYPE)."
)


def client_of(url: str, engine: str | None) -> type[EngineServer]:
    """The client for a running server, by the owner that its models name.

    engine: as the user names it; None: not named. It decides if the owner is unknown, as behind a
    gateway. Raises UserError if the server names another engine.
    """
    owner = Server(url).models[0].get("owned_by")
    owning = next((client for client in CLIENTS if client.owner == owner), None)
    named = next((client for client in CLIENTS if client.engine == engine), VllmServer)
    if engine and owning not in (None, named):
        raise UserError(f"{url} is owned by {owner!r}, not {engine}; omit --engine.")
    return owning or named


def measure_servers(
    drafts: Mapping[str, EngineServer],
    baseline: EngineServer,
    task: Task,
    draft_length: int | None = None,
    specs: Mapping[str, str] = MappingProxyType({}),
) -> Report:
    """The report of running servers, by the name of the draft, compared with a plain server.

    draft_length: of the servers. specs: their drafts as the user states them, because most
    servers do not report them. Raises ServerError if nothing can be measured: a server does
    not answer, serves another target, is another engine, or is the baseline and speculates.
    """
    for server in drafts.values():
        if server.model != baseline.model:
            raise ServerError(
                f"{server.url} serves {server.model!r}, but {baseline.url} serves "
                f"{baseline.model!r}; serve one target under one name (--served-model-name)."
            )
        versions = [one.version for one in (server, baseline)]
        unlike = None not in versions and versions[0] != versions[1]  # a gateway may hide them
        engines = [f"{one.engine} {one.version or ''}".strip() for one in (server, baseline)]
        if server.engine != baseline.engine or unlike:
            raise ServerError(
                f"{server.url} is {engines[0]}, but {baseline.url} is {engines[1]}, so the draft "
                f"is not the only difference; serve both by one engine of one version."
            )
        _warm_up(server, task)
    if (counters := _warm_up(baseline, task).counters) and counters.drafts:
        raise ServerError(
            f"{baseline.url} is the baseline, but it speculates; start it without speculation, or "
            f"swap --base_url and --baseline_url."
        )
    machine = environment(baseline.engine, baseline.version, torch.device("cpu"))
    # unknown, because the servers may run on another machine
    machine |= dict.fromkeys(("hardware", "cores", "threads", "load_average"))
    contenders = [Contender(runs_already(baseline), identity=_identity(baseline))]
    for name, server in drafts.items():
        facts = _facts(specs.get(name, f"running server {name}"), draft_length)
        short, whole = (each.models[0].get("max_model_len") for each in (server, baseline))
        if short and whole and short < whole:
            facts["context"] = short
        weights = weights_sha256(Path(specs[name])) if name in specs else None
        identity = [*_identity(server), draft_length, facts["path"], weights]
        contenders.append(Contender(runs_already(server), name, facts, identity))
    for server in (baseline, *drafts.values()):
        server.retries = PATIENT
    comparison = Comparison(contenders, task)
    comparison.run(take_turns)
    report = _report(
        comparison,
        "the server's own rule",  # a running server does not report it
        target=baseline.model,
        device="device of the server",
        dtype="dtype of the server",
        environment=machine,
    )
    text = report.model_dump_json()  # reports are published, so reasons have no address
    for server in sorted(
        [baseline, *drafts.values()], key=lambda each: len(each.url), reverse=True
    ):
        text = text.replace(server.url, "server").replace(f"host='{server.host}'", "server")
    return Report.model_validate_json(text)


def measure_started(
    launcher_type: type[Launcher],
    target: Checkpoint,
    drafts: Mapping[str, str],
    gammas: Sequence[int],
    task: Task,
    arguments: Sequence[str] = (),
    ngram_gamma: int | None = None,
) -> Report:
    """The report of drafts, by name; a server is started for each draft and the baseline.

    gammas: draft lengths; if there are several, the names of drafts in the report have them.
    ngram_gamma: of n-gram speculation, if it has another one. arguments: of each server, with
    priority over ours. Raises UserError if the engine is missing, and ServerError if nothing can be
    measured.
    """
    prompts, decoding = task.prompts, task.decoding
    longest = max(*gammas, ngram_gamma or 0)
    positions = context_length(prompts.ids, decoding.max_new_tokens, longest)
    # a later turn has no more tokens than bytes, besides those of the template
    positions += max(
        sum(
            len(text.encode()) + TEMPLATE + decoding.max_new_tokens
            for text in prompt.follow_ups or []
        )
        for prompt in prompts.prompts
    )
    positions = min(positions, launcher_type.longest(target))
    slots = max([1, *(load.concurrency or SLOTS for load in task.loads)])
    with tempfile.TemporaryDirectory() as scratch:
        launcher = launcher_type(
            target, drafts.values(), Path(scratch), positions, slots, arguments
        )
        if launcher.unreadable.keys() >= {*drafts.values()}:
            raise ServerError("; ".join(launcher.unreadable.values()))
        machine = machine_of(launcher)
        method = None if decoding.sampling.greedy else decoding.draft_sample_method
        # The lengths of prompts, drafts and loads change `launcher.arguments`, and no result.
        shared = [
            launcher_type.__name__,
            launcher.installed,
            [*arguments],
            machine["server_variables"],
            target.spec,
            _files(target),
        ]
        reported: list[list[Any]] = []  # what servers tell of themselves

        @contextmanager
        def serving(
            draft: str = "", draft_length: int = 0, name: str = "target"
        ) -> Iterator[EngineServer]:
            if draft in launcher.unreadable:
                raise ServerError(launcher.unreadable[draft])
            with launcher.serve(draft, draft_length, method) as url:
                server = launcher.client(url, PATIENCE)
                first = _warm_up(server, task)
                if idle([first]) and draft not in N_GRAMS | {""}:
                    raise ServerError(IDLE)
                if not draft and first.counters and first.counters.drafts:
                    raise ServerError(SPECULATES)
                facts = {"engine_version": server.version}
                reported.append([json.dumps(shared), name, launcher.runner, facts])
                if task.journal:  # for a later process, which may start no server
                    task.journal.add("servers", reported[-1])
                yield server

        # every draft at its longest comes last, in the order given; the last one decides
        planned = [
            (-longer, draft_length, name, draft)
            for name, draft in drafts.items()
            for longer, draft_length in enumerate(
                [ngram_gamma]
                if ngram_gamma and draft == LOOKUP
                else reversed(launcher.lengths(draft, gammas))
            )
        ]
        contenders = [Contender(serving, identity=shared)]
        for _, draft_length, name, draft in sorted(planned, key=itemgetter(0)):
            named = f"{name}, gamma {draft_length}" if gammas[1:] else name
            facts = _facts(draft, draft_length, draft_length in gammas or draft == LOOKUP)
            facts["context"] = launcher.contexts.get(draft)
            if draft not in launcher.unreadable:
                facts["serve"] = masked_arguments(launcher.command(draft, draft_length, method))
            identity = [shared, draft, draft_length, _files(launcher.opened.get(draft)), method]
            contenders.append(
                Contender(partial(serving, draft, draft_length, named), named, facts, identity)
            )
        comparison = Comparison(contenders, task)
        comparison.run(partial(there_and_back, starts=task.starts))
        runners: dict[str, str] = {}
        for about, name, runner, facts in (
            task.journal.results.get("servers", []) if task.journal else reported
        ):
            if about == json.dumps(shared):
                machine |= facts
                runners |= {name: runner} if runner else {}
        machine["runners"] = runners or None
    return _report(
        comparison,
        launcher.rule,
        target=target.spec,
        target_quantization=target.gguf_kind,
        device=launcher.device,
        dtype=launcher.dtype,
        environment=machine,
    )


def machine_of(launcher: Launcher) -> dict[str, Any]:
    """The fields of `Environment` for servers that are started here."""
    variables = {
        name: value
        for name, value in sorted((launcher.variables | os.environ).items())
        if CONFIGURES.fullmatch(name)
    }
    return environment(launcher.client.engine, None, torch.device("cpu")) | {
        "threads": None,
        "hardware": launcher.hardware,
        "server_arguments": masked_arguments(launcher.arguments),
        "server_variables": variables,
    }


def idle(outputs: Iterable[Output]) -> bool:
    """Whether a server counted no drafted token in outputs that were long enough for a draft."""
    long = [o for o in outputs if o.counters is not None and len(o.run.tokens) > 2]
    return bool(long) and not any(o.counters and o.counters.drafted for o in long)


def _warm_up(server: EngineServer, task: Task) -> Output:
    """Send a first, short request; its output.

    Raises ServerError if the server refuses the first prompts, or fails.
    """
    short = replace(task.decoding, max_new_tokens=min(WARM_UP, task.decoding.max_new_tokens))
    *others, last = task.prompts.prompts[:FIRST]
    for prompt in others:
        try:
            return server.decode(prompt, short)
        except ServerError as error:
            if error.status not in REFUSED:
                raise
    return server.decode(last, short)


def _identity(server: EngineServer) -> list[Any]:
    """What changes with a running server."""
    return [server.address, server.model, server.version]


def _files(model: Checkpoint | None) -> list[Any]:
    """What changes with a model's weights: a revision of the Hub; the files of a folder."""
    if model is None:
        return []
    files = [model.source] if model.source.is_file() else model.files
    facts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return [model.source.name, facts]


def _facts(path: str, draft_length: int | None, asked: bool = True) -> dict[str, Any]:
    """The facts of a contender. asked: whether this length was asked for, and not a longer one."""
    fixed = "fixed" if asked else AT_LONGEST
    return {
        "path": path,
        "form": "served",
        "vocabulary": {"relation": "of the server", "strategy": "of the server", "coverage": None},
        "gamma": draft_length or None,
        "gamma_policy": fixed if draft_length else "of the server",
        "missing": UNTOLD,
    }


def _report(comparison: Comparison, rule: str, **facts: Any) -> Report:
    """The report of the drafts that decoded prompts, with their servers' counters.

    rule: of the servers, as in `Comparison.report`.
    """
    logs = []
    for draft in comparison.drafting:
        if pairs := comparison.pairs(draft):
            outputs = [draft.outputs[i].timed for i in pairs]
            if idle(outputs) and draft.facts["path"] not in N_GRAMS:
                draft.gone = draft.gone or IDLE
                continue
            log = comparison.log(draft)
            most = comparison.decoding.max_new_tokens - (log.gamma or 0)
            counters, reason = _counters(outputs, most)
            missing = log.missing | ({"counters": reason} if reason else {})
            logs.append(replace(log, about=log.about | {"counters": counters}, missing=missing))
    engine = facts["environment"]["engine"]
    return comparison.report(logs, rule, None, engine=engine, **facts)


def _counters(outputs: Sequence[Output], most: int) -> tuple[dict[str, Any] | None, str]:
    """The `counters` of the report and "", or None and the reason. most: see `_tokens_per_step`."""
    counted = [(r.run, r.counters) for r in outputs if r.counters is not None]
    if not counted:
        return None, (
            "the server has no counters spec_decode_* at /metrics and sends none with its outputs: "
            "speculation is off, or the server needs --metrics (llama-server) or has "
            "--disable-log-stats (vLLM)"
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
    groups = [run.group for run, _ in drafting]
    lengths = [(counts.accepted + counts.drafts, counts.drafts) for _, counts in drafting]
    return (
        {
            "num_drafts": round(drafts),
            "num_draft_tokens": round(drafted),
            "num_accepted_tokens": round(accepted),
            "mean_acceptance_length": measure("mean_acceptance_length", lengths, groups=groups),
            "tokens_per_step": _tokens_per_step(outputs, accepted, most),
            "acceptance_rate": share(
                "acceptance_rate", [(run.group, c.accepted, c.drafted) for run, c in drafting]
            ),
            "per_position": [  # a shorter draft accepts nothing at later positions
                share(
                    "acceptance",
                    [(run.group, sum(c.accepted_at[i : i + 1]), c.drafts) for run, c in drafting],
                )
                for i in range(len(accepted_at))
            ],
        },
        "",
    )


def _tokens_per_step(outputs: Sequence[Output], accepted: float, most: int) -> Measured | None:
    """Tokens per target call after the prefill, also of calls that no draft was made for.

    A message has a call's tokens. None if messages have more than the accepted tokens and one more
    each, because then some have the tokens of several calls; or if no call is whole. most: tokens
    of an output before which a call has room for a whole draft (`PromptRun.whole_blocks`).
    """
    steps = [output.run.block_tokens for output in outputs]
    if sum(sum(tokens) - len(tokens) for tokens in steps) > accepted:
        return None
    sums, groups = [], []
    for output, tokens in zip(outputs, steps, strict=True):
        before = accumulate(tokens[:-1], initial=output.run.prefill_tokens)
        whole = [count for count, start in zip(tokens, before, strict=False) if start < most]
        if whole:
            sums.append((sum(whole), len(whole)))
            groups.append(output.run.group)
    return measure("tokens_per_step", sums, groups=groups) if sums else None
