"""Engines that are called from here, prompt by prompt, and draft a fixed number of tokens a time.

What such an engine must do, what its log can hold, and the report of its drafts against its target
alone. An engine shows which tokens it emitted when, and not all that went on in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.measuring.journal import Journal
from eval.measuring.losslessness import divergence, ledger
from eval.measuring.runs import Answer, DraftLog, PromptRun, RunLog
from eval.measuring.timing import in_turns
from eval.prompts import Prompt, PromptSet
from eval.reporting.report import Report, build_report

# Fields of a draft in the report that are made from distributions, and from the time of steps.
DISTRIBUTIONS = "alpha atlas"
STEPS = "costs c verify_ratio predicted_speedup decode_efficiency payoff"
# Fields that every engine outside leaves null, each with the reason.
MISSING = {
    **dict.fromkeys(DISTRIBUTIONS.split(), "it gives no distributions: see --engine torch"),
    **dict.fromkeys(STEPS.split(), "its single steps are not timed: see --engine torch"),
}


@dataclass(frozen=True)
class LoadedDraft:
    """A draft as an engine has loaded it; memory as in a DraftLog."""

    name: str
    path: str
    vocabulary: dict[str, Any]
    memory: dict[str, Any]
    full_form_bytes: int


class DrivenEngine(ABC):
    """An engine with a target and drafts for it.

    name, target: as the report calls them. stops: every id that ends a text. loaded: its drafts.
    known_by: what tells its models from others.
    """

    name: str
    gamma_policy = "fixed"
    target: str
    gamma: int
    stops: frozenset[int]
    loaded: list[LoadedDraft]
    known_by: list[Any]
    device: str
    dtype: str
    versions: dict[str, str]

    @abstractmethod
    def decode(
        self, draft: int | None, prompt: Prompt, ids: list[int], decoding: Decoding
    ) -> PromptRun:
        """One prompt, decoded alone (None) or with the draft of that number."""

    @abstractmethod
    def tie(
        self,
        draft: int,
        prompt: Prompt,
        ids: list[int],
        decoding: Decoding,
        texts: tuple[list[int], list[int]],
        position: int,
    ) -> dict[str, Any]:
        """`losslessness.tie` where greedy texts, the target's own and the drafted one, part.

        `{why}` alone where the engine's text is another when it is asked again.
        """

    def text_of(self, tokens: list[int]) -> str:
        """Of a token, or of none where a text ends."""
        return f"token {tokens[0]}" if tokens else "end"


def measure_driven(
    engine: DrivenEngine,
    timed: PromptSet,
    decoding: Decoding,
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
        asdict(decoding) | {"stops": sorted(decoding.stops)},
        engine.gamma,
        (engine.device, engine.dtype, engine.versions),
    )
    rows = list(zip(timed.prompts, timed.ids, strict=True))

    def in_all_ways(decoding: Decoding) -> list[list[PromptRun]]:
        """Every prompt without a draft and with each: [baseline, *drafts]."""
        numbers = (None, *range(len(engine.loaded)))
        ways = [partial(engine.decode, number, decoding=decoding) for number in numbers]
        for way in ways:  # warm-up, not counted
            way(*rows[0])
        stage = f"speed at T={decoding.sampling.temperature:g}"
        return in_turns(ways, rows, journal, stage, PromptRun.from_json)

    baseline, *runs = in_all_ways(decoding)
    greedy = replace(decoding, sampling=Sampling())  # losslessness is always measured greedily
    plain, *greedy_runs = [baseline, *runs] if decoding.sampling.greedy else in_all_ways(greedy)
    logs = [
        DraftLog(
            **vars(draft),
            form="full",
            runs=runs[number],
            baseline=baseline,
            lossless=_compare(engine, number, timed, greedy, plain, greedy_runs[number]),
            gamma=engine.gamma,
            gamma_policy=engine.gamma_policy,
            missing=MISSING,
        )
        for number, draft in enumerate(engine.loaded)
    ]
    run = RunLog(
        target=engine.target,
        engine=engine.name,
        device=engine.device,
        dtype=engine.dtype,
        decoding=decoding_facts(
            decoding,
            [run.tokens[-1] in decoding.stops for run in baseline],
            gamma=engine.gamma,
            gamma_policy=engine.gamma_policy,
        ),
        prompts=prompts_used(timed),
        provenance=provenance | engine.versions | {"resumed": journal.resumed},
        answers=[
            Answer(prompt.id, ids, run.tokens, [], group=prompt.group)
            for prompt, ids, run in zip(timed.prompts, timed.ids, plain, strict=True)
        ],
    )
    return build_report(run, logs)


def _compare(
    engine: DrivenEngine,
    draft: int,
    timed: PromptSet,
    decoding: Decoding,
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
                texts = base.tokens, run.tokens
                entry |= engine.tie(draft, prompt, ids, decoding, texts, at)
            entries.append(entry)
    return ledger(len(runs), entries)


# --- What the logs of all engines outside have in common ---


def log_blocks(
    run: PromptRun,
    drafted: Sequence[list[int]],
    emitted: Sequence[list[int]],
    gamma: int,
    max_new_tokens: int,
) -> PromptRun:
    """The run with what was drafted for each block, and how much of it was accepted.

    drafted, emitted: of each target call, that of the prefill first: transformers drafts for it,
    too. A drafted token was accepted where it was emitted: the target's own choice after a
    rejection is another one, also when sampled (its residual is 0 at the rejected token).
    gamma, max_new_tokens: an engine drafts fewer than gamma where the limit would cut the block.
    """
    done = run.prefill_tokens
    for i, (draft, block) in enumerate(zip(drafted[1:], emitted[1:], strict=True)):
        pairs = enumerate(zip(draft, block, strict=False))
        accepted = next((i for i, (a, b) in pairs if a != b), min(len(draft), len(block)))
        # an accepted end of text ends the draft, and no token of the target's own follows it
        run.drafted[i] = len(block) if accepted == len(block) else len(draft)
        run.accepted[i] = accepted
        run.last_truncated = len(draft) == max_new_tokens - done - 1 < gamma
        done += len(block)
    return run


def decoding_facts(decoding: Decoding, ended: Sequence[bool], **of_engine: Any) -> dict[str, Any]:
    """`RunLog.decoding`; ended: whether each answer of the baseline ended by itself.

    of_engine: what it says of its own decoding, gamma and gamma_policy at least.
    """
    return {
        **asdict(decoding.sampling),
        "max_new_tokens": decoding.max_new_tokens,
        "verification": "greedy match" if decoding.sampling.greedy else "rejection sampling",
        "stop_tokens": len(decoding.stops),
        "ended_by_stop": sum(ended) / len(ended),
        **of_engine,
    }


def prompts_used(prompts: PromptSet) -> dict[str, Any]:
    """`RunLog.prompts`; what else is known of prompts takes the target's distributions."""
    unknown = dict.fromkeys(("bits_per_token", "random_bits"))
    about = {"source": prompts.source, "n": len(prompts.prompts), "sha256": prompts.sha256}
    about |= {"overlap_with_training": prompts.overlap}
    asked = {"in_chat_form": prompts.in_chat_form}
    return about | unknown | asked | {"chat_template_kwargs": prompts.chat_template_kwargs}
