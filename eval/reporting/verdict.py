"""The first lines of a report, which the page, the terminal and report.md share."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from eval.decoding.drafters import LOOKUP, LOOKUP_FIRST
from eval.measuring.intervals import Measured
from eval.measuring.output_check import Ledger
from eval.reporting.fields import (
    ONE_AT_A_TIME,
    REFERENCE,
    DraftReport,
    Load,
    Report,
    name_and_length,
)
from eval.reporting.recommendation import Recommendation, loads_of, recommended, scheduled

NAMES = {  # shown names of a training run's drafts, in order
    "untuned": "base draft",
    "lookup": "n-gram speculation",
    "tuned": "distilled draft",
    "tuned+lookup": "n-gram, then distilled draft",
}
# of eval.run: those that decide prompts and outputs in any decoder
SAME_OPTIONS = {
    f"--{name}"
    for name in "instruction chat_template_kwargs max_prompt_length max_prompts seed temperature "
    "top_k top_p max_new_tokens".split()
}
LATER = 1.1  # times to the first token differ by less from start to start
LAPTOP = " To serve on a CPU, measure llama.cpp first (--engine llama.cpp)."


@dataclass(frozen=True)
class Top:
    """The first lines of a report; a line without data is empty."""

    verdict: str
    output: str
    title: str  # of the speed-ups
    speedups: dict[Load, list[tuple[str, Measured]]]  # shown name (* see `note`) and value
    note: str
    memory: str
    training: str
    serve: str  # the command of the recommended server
    commands: list[str]  # to run next
    setting: str


def top(report: Report) -> Top:
    """The first lines of the report."""
    drafts = [(name, report.drafts[name]) for name in in_order(report)]
    choice = recommended(report)
    reasons = {name: draft.not_in_vllm for name, draft in drafts if report.engine == REFERENCE}
    starred = {name: reason for name, reason in reasons.items() if reason}
    note = f"* in the reference decoder only: {'; '.join(dict.fromkeys(starred.values()))}."
    return Top(
        verdict=verdict(report),
        output=_output(report),
        title="Speed-up" + " predicted for vLLM" * (report.engine == REFERENCE),
        speedups={
            load: [
                (label(name) + "*" * (name in starred), speedups[load])
                for name, _ in drafts
                if load in (speedups := report.speedups(name))
            ]
            for load in loads_of(report)
        },
        note=note if starred else "",
        memory=_memory(report, choice),
        training=_training(report),
        serve=_serve(report, choice) if choice else "",
        commands=list(_commands(report, choice)) if choice else [],
        setting=_setting(report),
    )


def in_order(report: Report) -> list[str]:
    """The names of the drafts in the order in which they are shown: NAMES first, then others."""
    order = list(NAMES)
    return sorted(
        report.drafts,
        key=lambda name: (
            order.index(base) if (base := name_and_length(name)[0]) in order else len(order)
        ),
    )


def label(name: str) -> str:
    """The name under which a draft is shown."""
    base, length = name_and_length(name)
    shown = NAMES.get(base, base)
    return f"{shown}, draft length {length}" if length else shown


def times(value: Measured) -> str:
    """A speed-up: `1.61x [1.48,1.75]`, or `1.61x (1.20 to 2.10)` without an interval."""
    mean, _, interval = f"{value:.2f}".partition(" ")
    return f"{mean}x {interval}".rstrip()


def size(count: int) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:,.1f} MiB"


def measured_in(report: Report) -> str:
    """The name of the decoder or engine that was measured, with its version."""
    if report.engine == REFERENCE:
        return "the reference decoder"
    version = report.environment.engine_version
    return f"{report.engine} {version}" if version else report.engine


def basis_of(report: Report) -> str:
    """Where the stated speed-up comes from."""
    if report.engine == REFERENCE:
        return "predicted for vLLM from acceptance and step costs in the reference decoder"
    return f"measured in {measured_in(report)}"


def verdict(report: Report) -> str:
    """One line: what to do, the speed-up, and the engine of which it is."""
    engine, loads, basis = measured_in(report), loads_of(report), basis_of(report)
    broken = ", ".join(map(label, report.broken))
    start = f"Do NOT serve {broken}: outputs mismatch the target's. " if broken else ""
    choice = recommended(report)
    if choice is None:
        speedups = [report.stated_speedup(draft) for draft in report.drafts.values()]
        if all(speedup.ci95 is None for speedup in speedups):
            most = max(speedup.clusters or speedup.n for speedup in speedups)
            return (
                f"{start}No verdict: {most} prompts (or groups) in {engine} are too few for an "
                "interval."
            )
        at = f" {together(loads)}" if loads[1:] else ""
        start += f"No draft is shown to be faster than the target alone{at}, as {basis}."
        return start + _too_costly(report)
    if loads[1:] or choice.slow:
        return (
            f"{start}{_by_load(report, choice)} Higher loads: not measured. Measured in {engine}."
        )
    name = choice.fastest[ONE_AT_A_TIME]
    draft = report.drafts[name]
    shown = _with_length(report, name)
    ngram = next((d for d in report.drafts.values() if d.path == LOOKUP), None)
    speedup = times(report.stated_speedup(draft))
    alone = f"; n-gram speculation alone {report.stated_speedup(ngram).mean:.2f}x" if ngram else ""
    if draft is ngram:
        alone = "; no draft is shown to be faster than this" if len(report.drafts) > 1 else ""
    if report.engine != REFERENCE:
        later = "".join(f" First token: {change}." for change in first_tokens(draft).values())
        later = _too_costly(report) + later
        text = f"{start}Serve {shown} for one request at a time: {speedup}, {basis}{alone}.{later}"
        if report.engine == "transformers":
            return text
        return f"{text} Several at a time were not measured; add --concurrency 4,8."
    laptop = LAPTOP if report.device.startswith("cpu") else ""
    return f"{start}Test {shown} in your engine: {speedup}, {basis}{alone}.{laptop}"


def _too_costly(report: Report) -> str:
    """What a step costs of the fastest draft model in an engine, if it is slower than none."""
    models = [
        (draft.speedup.mean, tokens, label(name))
        for name, draft in report.drafts.items()
        if not draft.path.startswith((LOOKUP, LOOKUP_FIRST)) and (tokens := _tokens_a_step(draft))
    ]
    speedup, tokens, name = max(models, default=(1.0, 0.0, ""))
    if speedup >= 1:
        return ""
    cost = f"{tokens / speedup:.1f} plain steps"
    return f" A step of {name} emits {tokens:.1f} tokens and costs {cost}."


def _tokens_a_step(draft: DraftReport) -> float | None:
    """The mean tokens of a server's step, also of steps without a draft; None: not known.

    A model drafts in each step; of other methods the acceptance length is of some steps alone.
    """
    counters = draft.counters
    if counters is None:
        return None
    if counters.tokens_per_step is not None:
        return counters.tokens_per_step.mean
    return counters.mean_acceptance_length.mean if draft.sha256 else None


def _by_load(report: Report, found: Recommendation) -> str:
    """What to serve, its speed-up at each load, and what else changes for a user."""
    drafts = {load: report.drafts[name] for load, name in found.fastest.items()}
    one_length = len({*found.fastest.values()}) == 1
    name = next(iter(found.fastest.values()))
    shown = _with_length(report, name) if one_length else label(name_and_length(name)[0])
    speedups = {
        load: times(draft.speedup_by_load[load])
        + ("" if one_length else f" with draft length {draft.gamma}")
        for load, draft in drafts.items()
    }
    text = f"Serve {shown}: {at_loads(speedups)}."
    if found.off:
        text += f" Its schedule switches it off {together(found.off)}."
    if found.slow:
        text += f" Not {together(found.slow)}, where it is not shown to be faster."
    for title, changes in (("First token", first_tokens), ("Good requests/s", good_requests)):
        changed = {at: change for at, draft in drafts.items() if (change := changes(draft).get(at))}
        text += f" {title}: {at_loads(changed)}." if changed else ""
    return text


def together(loads: Iterable[Load]) -> str:
    """The loads, as `at 1, 4 requests at a time, 2 requests/s`."""
    parts = []
    for _, alike in groupby(loads, lambda load: load.rate > 0):
        *others, last = alike
        parts += [*(f"{load.rate or load.concurrency:g}" for load in others), str(last)]
    return f"at {', '.join(parts)}"


def at_loads(texts: Mapping[Load, str]) -> str:
    """The texts with their loads, as `1.7x at 1 request at a time, 1.4x at 4`."""
    parts, rate = list[str](), None
    for load, text in texts.items():
        same = rate is not None and rate == (load.rate > 0)
        parts.append(f"{text} at {f'{load.rate or load.concurrency:g}' if same else load}")
        rate = load.rate > 0
    return ", ".join(parts)


def first_tokens(draft: DraftReport) -> dict[Load, str]:
    """The times to the first token at the loads at which it comes clearly later with the draft."""
    times_ms = {
        point.load: (point.ttft_ms.baseline.p50, point.ttft_ms.speculative.p50)
        for point in draft.by_load
        if point.ttft_ms
    }
    alone = {ONE_AT_A_TIME: (draft.ttft_ms.baseline.mean, draft.ttft_ms.speculative.mean)}
    return {
        load: f"{with_draft:,.0f} ms instead of {without:,.0f}"
        for load, (without, with_draft) in (alone | times_ms | alone).items()
        if with_draft > LATER * without
    }


def good_requests(draft: DraftReport) -> dict[Load, str]:
    """The good requests per second at the loads, if limits were given."""
    return {
        point.load: f"{good.speculative:.2f} instead of {good.baseline:.2f}"
        for point in draft.by_load
        if point.goodput
        for good in [point.goodput.requests_per_s]
    }


def _with_length(report: Report, name: str) -> str:
    """The shown name of a draft, with its draft length."""
    length = report.drafts[name].gamma
    unnamed = length and not name_and_length(name)[1]
    return f"{label(name)} (draft length {length})" if unnamed else label(name)


def _output(report: Report) -> str:
    """The sum of the output checks of all drafts, as text."""
    checks = [draft.lossless for draft in report.drafts.values()]
    total = Ledger(
        prompts=sum(check.prompts for check in checks),
        divergences=[entry for check in checks for entry in check.divergences],
    )
    drafts = f", {len(checks)} drafts together" if checks[1:] else ""
    return f"{total} ({report.dtype}, greedy{drafts})"


def _memory(report: Report, found: Recommendation | None) -> str:
    """Memory to serve a draft model: the distilled, else the recommended, else the last one."""
    names = ["tuned"] if "tuned" in report.drafts else []
    for name in (*names, *(found.fastest.values() if found else ()), *reversed(report.drafts)):
        draft = report.drafts[name]
        alone = not draft.path.startswith((LOOKUP, LOOKUP_FIRST))
        if alone and (memory := draft.memory):
            to_serve = f"{size(memory.draft_bytes)} to serve {label(name)}"
            return f"{to_serve}, +{memory.overhead:.0%} of the target"
    return ""


def _training(report: Report) -> str:
    """What the training changed on held-out prompts."""
    if report.base_kept is not None:
        return f"the base draft is kept: {report.base_kept}"
    if report.held_out is None:
        return ""
    first, *_ = report.held_out.points
    kept = next((point for point in report.held_out.points if point.kept), first)
    before, after = (f"{point.alpha.mean:.2f}" for point in (first, kept))
    return f"acceptance rate {before} before, {after} after, on {first.alpha.n} held-out prompts"


def _longest(report: Report, found: Recommendation) -> str:
    """The name of the draft at its longest length that is served."""
    return max(found.fastest.values(), key=lambda name: report.drafts[name].gamma or 0)


def _serve(report: Report, found: Recommendation) -> str:
    """The command of a server with the draft and its schedule, as far as it is known."""
    draft = report.drafts[_longest(report, found)]
    words = draft.serve
    if found.schedule and not words:
        config = {"model": "DRAFT", "num_speculative_tokens": draft.gamma}
        words = ["vllm", "serve", "TARGET", "--speculative-config", json.dumps(config)]
    return shlex.join(scheduled(words, found.schedule))


def _commands(report: Report, found: Recommendation) -> Iterator[str]:
    """The next command for the recommended draft."""
    name = _longest(report, found)
    draft = report.drafts[name]
    if report.engine == "vllm":
        folder = str(report.provenance.get("output_dir", "."))
        words = ["python", "-m", "eval.drift", folder, "--draft", name]
        yield shlex.join([*words, "--metrics", "http://localhost:8000"])
    # the traffic of other servers cannot be watched; distill.adapt removes its draft
    elif report.engine not in (REFERENCE, "transformers") or "removed" in report.provenance:
        return
    else:
        words, more = ["python", "-m", "eval.run"], list[str]()
        tuned = report.drafts.get("tuned")
        path = Path("" if tuned is None else tuned.path)
        runs = [folder.parent for folder in (path, *path.parents) if folder.name == "draft"]
        if tuned is not None and runs:
            words += ["--run", str(runs[0])]
            draft = tuned  # its run is measured with n-gram speculation beside it
            if (ngram := report.drafts.get("lookup")) and ngram.gamma:
                more = ["--ngram_gamma", str(ngram.gamma)]
        else:
            words += ["--target", report.target, "--draft", f"{name}={draft.path}"]
            words += ["--prompts", report.prompts.source, *_same_options(report)]
            if "output_dir" in report.provenance:
                words += ["--output_dir", f"{report.provenance['output_dir']}-vllm"]
        words += ["--engine", "vllm", "--gamma", str(draft.gamma or 3)]
        yield shlex.join(words + more)


def _same_options(report: Report) -> list[str]:
    """The options of the report's own command that decide prompts and outputs in an engine, too."""
    command: Any = report.provenance.get("command") or []
    kept = list[str]()
    for option, value in pairwise([*command, ""]):
        name, joined, _ = option.partition("=")
        if name in SAME_OPTIONS:
            kept += [option] if joined else [option, value]
    return kept


def _setting(report: Report) -> str:
    """A line with target, machine, date and number of prompts."""
    machine = report.environment
    count = machine.cores
    cores = f", {count} core{'s' * (count > 1)}" if count else ""
    hardware = f"{machine.hardware}{cores}" if machine.hardware else report.device
    loads = loads_of(report)
    parts = [
        f"{report.target_named}, {report.dtype}",
        hardware,
        machine.date[:16].replace("T", " ") + " UTC",
        together(loads) if loads[1:] else "batch 1",
        f"temperature {report.decoding.temperature:g}",
        f"{report.prompts.n} prompts, {report.last[1].speedup.n} timed",
    ]
    return " · ".join(parts)
