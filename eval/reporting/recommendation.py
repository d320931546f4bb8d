"""Recommends one configuration to serve: a draft, with its draft length at each measured load."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Sequence
from statistics import fmean
from typing import NamedTuple

from eval.decoding.drafters import LOOKUP
from eval.reporting.fields import (
    ONE_AT_A_TIME,
    REFERENCE,
    DraftReport,
    Load,
    Report,
    name_and_length,
)

# vLLM serves it with its first model runner, where vLLM 0.33 ignores the schedule for it.
UNSCHEDULED = "suffix"

Schedule = list[tuple[int, int, int]]  # (first, last number of requests at a time, draft length)


class Recommendation(NamedTuple):
    """A draft as one server can serve it.

    fastest: its name in the report, by the loads at which it is shown to be faster than the target
    alone. off: the loads at which its schedule switches it off. slow: the other loads, without
    rates that overload the target alone and not the draft's server. schedule: vLLM's
    num_speculative_tokens_per_batch_size; empty for one length at all loads.
    """

    fastest: dict[Load, str]
    off: list[Load]
    slow: list[Load]
    schedule: Schedule


def loads_of(report: Report) -> list[Load]:
    """The measured loads."""
    return sorted({load for draft in report.drafts.values() for load in draft.speedup_by_load})


def recommended(report: Report, among: Collection[str] | None = None) -> Recommendation | None:
    """The surest configuration; None if no draft is shown to be faster than the target alone.

    among: names of drafts; None: all drafts.

    One that is slow at no load is preferred; then the one whose lowest bound of the speed-up over
    all loads (1 where it is switched off) is highest; then the mean of these bounds decides. N-gram
    speculation needs no draft, so it is preferred to drafts that are not shown to be faster. Drafts
    with mismatches are left out. Of the reference decoder's drafts, so are those that vLLM cannot
    serve.
    """
    names: dict[str, list[str]] = {}
    for name in report.drafts if among is None else among:
        draft = report.drafts[name]
        if name not in report.broken and (not draft.not_in_vllm or report.engine != REFERENCE):
            names.setdefault(name_and_length(name)[0], []).append(name)

    def sureness(choice: Recommendation) -> tuple[bool, float, float]:
        logs = [math.log(_bound(report, name, load)) for load, name in choice.fastest.items()]
        logs += [0.0] * len(choice.off + choice.slow)
        return not choice.slow, min(logs), fmean(logs)

    choices = [
        configuration
        for lengths in names.values()
        for configuration in _configurations(report, lengths)
        if configuration.fastest
    ]
    best = max(choices, key=sureness, default=None)
    ngrams = [
        choice
        for choice in choices
        if report.drafts[next(iter(choice.fastest.values()))].path == LOOKUP
    ]
    ngram = max(ngrams, key=sureness, default=None)
    return best if best is None or ngram is None or _beats(report, best, ngram) else ngram


def schedule_by_load(drafts: Sequence[DraftReport]) -> Schedule:
    """The draft length by the number of requests at a time; empty if no such load was measured.

    drafts: one draft at several lengths. The length is the one with the highest lower bound of the
    speed-up above 1x, else 0. The speed-up falls with the load, so a load between two measured ones
    has the length of the higher one. Loads above the highest measured one have length 0.
    """
    best: dict[int, tuple[float, int]] = {}  # (bound, length) by requests at a time
    for draft in drafts if any(point.concurrency for d in drafts for point in d.by_load) else ():
        for load, speedup in draft.speedup_by_load.items():
            if load.concurrency:
                bound = speedup.bounds[0], draft.gamma or 0
                best[load.concurrency] = max(best.get(load.concurrency, (1.0, 0)), bound)
    schedule: Schedule = []
    for last, (_, length) in sorted([*best.items(), (max(best, default=0) + 1, (1.0, 0))]):
        first = schedule[-1][1] + 1 if schedule else 1
        if schedule and schedule[-1][2] == length:
            first = schedule.pop()[0]
        schedule.append((first, last, length))
    return schedule if best else []


def scheduled(command: Sequence[str], schedule: Schedule) -> list[str]:
    """The command of a vLLM server with the schedule in its --speculative-config."""
    words = [*command]
    if schedule:
        at = words.index("--speculative-config") + 1
        lengths = {"num_speculative_tokens_per_batch_size": schedule}
        words[at] = json.dumps(json.loads(words[at]) | lengths)
    return words


def _configurations(report: Report, names: Sequence[str]) -> Iterator[Recommendation]:
    """What one server can serve of a draft. names: in the report, of its lengths."""
    drafts = {name: report.drafts[name] for name in names}
    overloads = {o.load for draft in report.drafts.values() for o in draft.overloads}
    kept_up = {o.load for d in drafts.values() for o in d.overloads if "draft" not in o.servers}
    loads = sorted({*loads_of(report), *overloads} - kept_up)
    schedule: Schedule = []
    if report.engine == "vllm" and all(d.gamma and d.path != UNSCHEDULED for d in drafts.values()):
        schedule = schedule_by_load([*drafts.values()])
    if not schedule:
        for name, draft in drafts.items():
            gains = [load for load in draft.speedup_by_load if _bound(report, name, load) > 1]
            losses = [load for load in loads if load not in gains]
            yield Recommendation(dict.fromkeys(gains, name), [], losses, [])
        return
    fastest, off, slow = dict[Load, str](), list[Load](), list[Load]()
    for load in loads:
        lengths = {
            name: _length(schedule, load, draft)
            for name, draft in drafts.items()
            if load in draft.speedup_by_load
        }
        faster = [n for n, length in lengths.items() if length == drafts[n].gamma]
        if faster and _bound(report, faster[0], load) > 1:
            fastest[load] = faster[0]
        elif lengths and not any(lengths.values()):
            off.append(load)
        else:
            slow.append(load)
    fixed = not off and len({*fastest.values()}) == 1
    yield Recommendation(fastest, off, slow, [] if fixed else schedule)


def _length(schedule: Schedule, load: Load, draft: DraftReport) -> int:
    """The draft length of the schedule at the load, for as many requests as were in flight."""
    at_once = {point.load: point.at_once for point in draft.by_load}.get(load, load.concurrency)
    return next((length for _, last, length in schedule if at_once <= last), 0)


def _bound(report: Report, name: str, load: Load) -> float:
    """The lower bound of the stated speed-up."""
    return report.speedups(name)[load].bounds[0]


def _beats(report: Report, best: Recommendation, ngram: Recommendation) -> bool:
    """Whether a configuration is shown to be faster than n-gram speculation at a load."""
    for load, name in best.fastest.items():
        alone = ngram.fastest.get(load)
        gains = [g for g in report.gain if (g.draft, g.over) == (name, alone)]
        if alone in (None, name):
            return True
        if load == ONE_AT_A_TIME and gains:
            faster = report.stated_speedup(gains[0]).bounds[0] > 0
        else:
            faster = _bound(report, name, load) > report.speedups(alone)[load].mean
        if faster:
            return True
    return False
