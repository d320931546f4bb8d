"""The first lines of a report, which the page, the terminal and report.md share."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from eval.decoding.drafters import LOOKUP
from eval.measuring.intervals import Measured
from eval.measuring.output_check import Ledger
from eval.reporting.fields import REFERENCE, Report, name_and_length

NAMES = {  # shown names of a training run's drafts, in order
    "untuned": "base draft",
    "lookup": "n-gram speculation",
    "tuned": "distilled draft",
    "tuned+lookup": "n-gram, then distilled draft",
}
REFERENCE_NOTE = (
    "* in the reference decoder only: vLLM 0.32 serves n-gram speculation or a draft; llama-server "
    "can combine them (n-gram first)."
)


@dataclass(frozen=True)
class Top:
    """The first lines of a report; a line without data is empty."""

    verdict: str
    output: str
    speedups: dict[int, list[tuple[str, Measured]]]  # by load: shown name (* REFERENCE_NOTE), value
    note: str
    memory: str
    commands: list[str]  # to run next
    setting: str


def top(report: Report) -> Top:
    """The first lines of the report."""
    drafts = [(name, report.drafts[name]) for name in in_order(report)]
    starred = {
        name for name, draft in drafts if report.engine == REFERENCE and not draft.serves_alone
    }
    return Top(
        verdict=verdict(report),
        output=_output(report),
        speedups={
            load: [
                (label(name) + "*" * (name in starred), speedups[load])
                for name, draft in drafts
                if load in (speedups := draft.speedup_by_load)
            ]
            for load in loads_of(report)
        },
        note=REFERENCE_NOTE if starred else "",
        memory=_memory(report),
        commands=list(_commands(report)),
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


def recommended(report: Report, load: int = 1) -> str | None:
    """The name of the draft with the highest lower bound of the speed-up; None if none is above 1x.

    N-gram speculation needs no draft, so it is preferred to drafts that are not shown to be faster.
    load: requests at a time. Drafts with mismatches are left out. Of the reference decoder's
    drafts, so are those that vLLM cannot serve.
    """
    bounds = {
        name: speedups[load].bounds[0]
        for name, draft in report.drafts.items()
        if name not in report.broken
        and (draft.serves_alone or report.engine != REFERENCE)
        and load in (speedups := draft.speedup_by_load)
        and speedups[load].bounds[0] > 1
    }
    best = max(bounds, key=lambda name: bounds[name], default=None)
    ngram = next((name for name in bounds if report.drafts[name].path == LOOKUP), None)
    return best if best is None or _beats(report, best, ngram, load) else ngram


def _beats(report: Report, name: str, ngram: str | None, load: int) -> bool:
    """Whether a draft is shown to be faster than n-gram speculation, or this is not recommended."""
    if ngram in (None, name):
        return True
    gains = [g.speedup for g in report.gain if (g.draft, g.over) == (name, ngram)]
    if load == 1 and gains:
        return gains[0].bounds[0] > 0
    speedup, alone = (report.drafts[each].speedup_by_load[load] for each in (name, ngram))
    return speedup.bounds[0] > alone.mean


def verdict(report: Report) -> str:
    """One line: what to do, the speed-up, and the engine in which it was measured."""
    engine, loads = measured_in(report), loads_of(report)
    broken = ", ".join(map(label, report.broken))
    start = f"Do NOT serve {broken}: outputs mismatch the target's. " if broken else ""
    if loads[1:]:
        return f"{start}{_by_load(report, loads)} Measured in {engine}."
    name = recommended(report)
    if name is None:
        if all(draft.speedup.ci95 is None for draft in report.drafts.values()):
            most = max(d.speedup.clusters or d.speedup.n for d in report.drafts.values())
            return (
                f"{start}No verdict: {most} prompts (or groups) in {engine} are too few for an "
                "interval."
            )
        return f"{start}No draft is shown to be faster than the target alone in {engine}."
    draft = report.drafts[name]
    shown = _with_length(report, name)
    ngram = next((d for d in report.drafts.values() if d.path == LOOKUP), None)
    alone = f"; n-gram speculation alone {ngram.speedup.mean:.2f}x" if ngram else ""
    if draft is ngram:
        alone = "; no draft is shown to be faster than this" if len(report.drafts) > 1 else ""
    if report.engine != REFERENCE:
        return (
            f"{start}Serve {shown} for one request at a time: {times(draft.speedup)}, measured in "
            f"{engine}{alone}. Several at a time were not measured; add --concurrency 4,8."
        )
    return (
        f"{start}Test {shown} in your engine: {times(draft.speedup)}, measured in {engine} (no "
        f"server, one request at a time){alone}."
    )


def loads_of(report: Report) -> list[int]:
    """The measured numbers of requests at a time."""
    return sorted({load for draft in report.drafts.values() for load in draft.speedup_by_load})


def _recommended_at_loads(report: Report) -> list[str]:
    """The drafts that are recommended at a load, each once."""
    names = dict.fromkeys(recommended(report, load) for load in loads_of(report))
    return [name for name in names if name is not None]


def _by_load(report: Report, loads: list[int]) -> str:
    """What to serve at each load; neighbouring loads with the same draft are one clause."""
    clauses: list[str] = []
    for name, same in groupby(loads, lambda load: recommended(report, load)):
        few, *more = same
        at = f"at {few} to {more[-1]}" if more else f"at {few}"
        if not clauses:
            at += " request at a time" if [few, *more] == [1] else " requests at a time"
        if name is None:
            clauses.append(f"no draft {at}, because none is shown to be faster")
            continue
        speedups = report.drafts[name].speedup_by_load
        figures = ", ".join(
            times(speedups[load]) + (f" at {load}" if more else "") for load in (few, *more)
        )
        clauses.append(f"{_with_length(report, name)} {at} ({figures})")
    return f"Serve {'; '.join(clauses)}. More than {loads[-1]}: not measured."


def _with_length(report: Report, name: str) -> str:
    """The shown name of a draft, with its draft length."""
    length = report.drafts[name].gamma
    known = length and not name_and_length(name)[1]
    return f"{label(name)} (draft length {length})" if known else label(name)


def _output(report: Report) -> str:
    """The sum of the output checks of all drafts, as text."""
    checks = [draft.lossless for draft in report.drafts.values()]
    total = Ledger(
        prompts=sum(check.prompts for check in checks),
        divergences=[entry for check in checks for entry in check.divergences],
    )
    drafts = f", {len(checks)} drafts together" if checks[1:] else ""
    return f"{total} ({report.dtype}, greedy{drafts})"


def _memory(report: Report) -> str:
    """Memory to serve a draft model: the distilled, else the recommended, else the last one.

    It is the size of the full-vocabulary checkpoint, because engines load this one.
    """
    names = ["tuned"] if "tuned" in report.drafts else []
    for name in (*names, *_recommended_at_loads(report), *reversed(report.drafts)):
        draft = report.drafts[name]
        if draft.serves_alone and draft.path != LOOKUP and (memory := draft.memory):
            count = memory.full_form_bytes or memory.draft_bytes
            return (
                f"{size(count)} to serve {label(name)}, +{count / memory.target_bytes:.0%} of the "
                "target (full-vocabulary checkpoint)"
            )
    return ""


def _commands(report: Report) -> Iterator[str]:
    """The next command for each draft that is recommended at a load."""
    # the traffic of llama.cpp and SGLang cannot be watched
    if report.engine in ("llama.cpp", "sglang"):
        return
    for name in _recommended_at_loads(report):
        if report.engine == "vllm":
            folder = str(report.provenance.get("output_dir", "."))
            words = ["python", "-m", "eval.drift", folder, "--draft", name]
            yield shlex.join([*words, "--metrics", "http://localhost:8000"])
            continue
        if "removed" in report.provenance:  # by distill.adapt, with the draft
            continue
        draft = report.drafts[name]
        words = ["python", "-m", "eval.run"]
        tuned = Path(report.drafts["tuned"].path) if "tuned" in report.drafts else None
        if tuned is not None and "draft" in tuned.parts:
            words += ["--run", str(Path(*tuned.parts[: tuned.parts.index("draft")]))]
        else:
            words += ["--target", report.target, "--draft", f"{name}={draft.path}"]
            words += ["--prompts", report.prompts.source]
        yield shlex.join([*words, "--engine", "vllm", "--gamma", str(draft.gamma or 3)])


def _setting(report: Report) -> str:
    """A line with target, machine, date and number of prompts."""
    machine = report.environment
    count = machine.cores
    cores = f", {count} core{'s' * (count > 1)}" if count else ""
    hardware = f"{machine.hardware}{cores}" if machine.hardware else report.device
    target, loads = report.target_named, loads_of(report)
    parts = [
        f"{target.rpartition('/')[2] if target.startswith('pypi:') else target}, {report.dtype}",
        hardware,
        machine.date[:16].replace("T", " ") + " UTC",
        f"{', '.join(map(str, loads))} requests at a time" if loads[1:] else "batch 1",
        f"temperature {report.decoding.temperature:g}",
        f"{report.prompts.n} prompts, {report.last[1].speedup.n} timed",
    ]
    return " · ".join(parts)
