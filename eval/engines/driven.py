"""Engines that are called from here, prompt by prompt, and draft a fixed number of tokens a time.

What is asked of such an engine, and the report of its drafts against its target alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.log import decoding, missing, prompts_used
from eval.measuring.journal import Journal
from eval.measuring.losslessness import divergence, ledger
from eval.measuring.runs import DraftLog, PromptRun, RunLog
from eval.measuring.timing import in_turns
from eval.prompts import Prompt, PromptSet
from eval.reporting.report import Report, build_report


@dataclass(frozen=True)
class LoadedDraft:
    """A draft as an engine has loaded it; memory, full_form_bytes: None where it does not tell."""

    name: str
    path: str
    vocabulary: dict[str, Any]
    memory: dict[str, Any] | None
    full_form_bytes: int | None


@dataclass(frozen=True)
class Parting:
    """Where greedy text with a draft (`drafted`) parts from the target's own, in these tokens."""

    prompt: Prompt
    ids: list[int]
    how: Decoding
    gamma: int
    drafted: list[int]
    position: int
    tokens: tuple[int, int]


class DrivenEngine(ABC):
    """An engine with a target and drafts for it.

    name: as the report calls it. loaded: its drafts. known_by: what tells its models from others.
    """

    name: str
    gamma_policy = "fixed"
    target: Any  # str(target) is its name in the report
    loaded: list[LoadedDraft]
    known_by: list[Any]
    device: str
    dtype: str
    versions: dict[str, str]

    @abstractmethod
    def decode(
        self, draft: int | None, prompt: Prompt, ids: list[int], how: Decoding, gamma: int
    ) -> PromptRun:
        """One prompt, decoded alone (None) or with the draft of that number."""

    @abstractmethod
    def tie(self, draft: int, at: Parting) -> dict[str, Any]:
        """`losslessness.tie` there; empty where the engine does not show its logits."""

    def text_of(self, tokens: list[int]) -> str:
        """Of a token, or of none where a text ends."""
        return f"token {tokens[0]}" if tokens else "end"


def measure_driven(
    engine: DrivenEngine,
    timed: PromptSet,
    how: Decoding,
    gamma: int,
    journal: Journal,
    provenance: dict[str, Any],
) -> Report:
    """The report of every draft against the target alone, both in this engine, on the same prompts.

    journal: keeps the runs, for a process that takes over. Raises what the engine raises midway.
    """
    journal.begin(
        engine.known_by,
        [draft.name for draft in engine.loaded],
        (timed.ids, [(prompt.id, prompt.category, prompt.group) for prompt in timed.prompts]),
        asdict(how) | {"stops": sorted(how.stops)},
        gamma,
        (engine.device, engine.dtype, engine.versions),
    )
    rows = list(zip(timed.prompts, timed.ids, strict=True))

    def in_all_ways(how: Decoding) -> list[list[PromptRun]]:
        """Every prompt without a draft and with each: [baseline, *drafts]."""
        numbers = (None, *range(len(engine.loaded)))
        ways = [partial(engine.decode, number, how=how, gamma=gamma) for number in numbers]
        for way in ways:  # warm-up, not counted
            way(*rows[0])
        stage = f"speed at T={how.sampling.temperature:g}"
        return in_turns(ways, rows, journal, stage, PromptRun.from_json)

    baseline, *runs = in_all_ways(how)
    greedy = replace(how, sampling=Sampling())  # losslessness is always measured greedily
    plain, *greedy_runs = [baseline, *runs] if how.sampling.greedy else in_all_ways(greedy)
    logs = [
        DraftLog(
            **{field: getattr(draft, field) for field in LoadedDraft.__dataclass_fields__},
            form="full",
            runs=runs[number],
            baseline=baseline,
            lossless=_compare(engine, number, timed, greedy, gamma, plain, greedy_runs[number]),
            gamma=gamma,
            gamma_policy=engine.gamma_policy,
            missing=missing(engine.name),
        )
        for number, draft in enumerate(engine.loaded)
    ]
    run = RunLog(
        target=str(engine.target),
        engine=engine.name,
        device=engine.device,
        dtype=engine.dtype,
        decoding=decoding(
            how,
            [run.tokens[-1] in how.stops for run in baseline],
            gamma=gamma,
            gamma_policy=engine.gamma_policy,
        ),
        prompts=prompts_used(timed),
        provenance=provenance | engine.versions | {"resumed": journal.resumed},
    )
    return build_report(run, logs)


def _compare(
    engine: DrivenEngine,
    draft: int,
    timed: PromptSet,
    how: Decoding,
    gamma: int,
    baseline: Sequence[PromptRun],
    runs: Sequence[PromptRun],
) -> dict[str, Any]:
    """The ledger of greedy texts."""
    entries = []
    for prompt, ids, base, run in zip(timed.prompts, timed.ids, baseline, runs, strict=True):
        if base.tokens != run.tokens:
            entry = divergence(base, run, engine.text_of)
            at = entry["position"]
            if at < min(len(base.tokens), len(run.tokens)):  # lengths can never differ by a tie
                tokens = base.tokens[at], run.tokens[at]
                where = Parting(prompt, ids, how, gamma, run.tokens, at, tokens)
                entry |= engine.tie(draft, where)
            entries.append(entry)
    return ledger(len(runs), entries)
