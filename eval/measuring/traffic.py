"""Whether a draft is accepted in traffic as its report says, by position and by category.

A difference counts where it passes what chance explains, of the report and of the traffic together:
both standard errors, normal theory, 1% over all comparisons of a call (Bonferroni). Drafts of one
text depend on each other. So the report's error comes from its bootstrap over prompts, and that of
bare counters from it: their texts are taken to vary as the report's do, with as many drafts each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from eval.measuring.intervals import FEWEST_CLUSTERS, Measured, measure, share
from eval.measuring.runs import Floats
from eval.reporting.report import DraftReport

FALSE_ALARMS = 0.01  # of calls whose traffic has not moved, at most
FEW_PROMPTS = FEWEST_CLUSTERS  # fewer have no interval
FULL_LENGTH = 0.98  # of a draft: near the length limit a few are shorter
_Z95 = NormalDist().inv_cdf(0.975)


class NotComparable(ValueError):
    """Counts that say nothing of this report: why, and what to do."""


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error, and how many drafts it rests on."""

    mean: float
    error: float
    drafts: float

    @classmethod
    def of(cls, measured: Measured, drafts: float) -> Estimate:
        low, high = measured.bounds
        return cls(measured.mean, (high - low) / 2 / _Z95, drafts)


@dataclass(frozen=True)
class Acceptance:
    """positions: share of drafts whose first i tokens all passed, i = 1…gamma.

    categories: tokens a target call, by category; of those with FEW_PROMPTS prompts at least.
    """

    positions: list[Estimate]
    categories: dict[str, Estimate]


@dataclass(frozen=True)
class Difference:
    """traffic - report, and how far chance may take it."""

    name: str
    report: Estimate
    traffic: Estimate
    chance: float

    @property
    def by(self) -> float:
        return self.traffic.mean - self.report.mean

    @property
    def moved(self) -> bool:
        return abs(self.by) > self.chance


def measured_acceptance(draft: DraftReport, engine: str) -> Acceptance:
    """What a draft's report promises to an engine that always drafts gamma tokens.

    Raises NotComparable where the report was measured otherwise.
    """
    if counters := draft.counters:
        places = [Estimate.of(place, counters.num_drafts) for place in counters.per_position]
        by_category = counters.by_category
    else:
        if engine == "transformers" or not draft.gamma_policy.startswith("fixed"):
            raise NotComparable(
                f"its drafts are not of one length ({draft.gamma_policy}), those of a serving "
                f"engine are: measure the draft at your engine's length first, python -m eval.run "
                f"--run DIR --draft tuned=DIR/draft --gamma N --output_dir DIR-served, or through "
                f"the engine with --engine vllm, and give that report."
            )
        per_position = draft.per_position or []
        places = [Estimate.of(place.marginal, place.drafts) for place in per_position]
        by_category = {name: c.tau for name, c in draft.by_category.items() if c.tau is not None}
    if not places:
        raise NotComparable(
            "it has no acceptance by position with intervals: measure again with this version."
        )
    enough = {name: tau for name, tau in by_category.items() if tau.n >= FEW_PROMPTS}
    return Acceptance(places, {name: Estimate.of(tau, tau.n) for name, tau in enough.items()})


def counted_acceptance(counts: Floats, report: Acceptance) -> Acceptance:
    """Of an engine's counters (eval/engines/counters.py), the traffic's categories unknown."""
    _check_lengths(counts, report)
    drafts = float(counts[0])
    return Acceptance(
        [
            Estimate(accepted / drafts, place.error * math.sqrt(place.drafts / drafts), drafts)
            for accepted, place in zip(counts[3:].tolist(), report.positions, strict=True)
        ],
        {},
    )


def answered_acceptance(
    answers: Sequence[tuple[str | None, Floats]], report: Acceptance
) -> Acceptance:
    """Of (category, counts) of each answer. Raises NotComparable where they are too few."""
    if len(answers) < FEW_PROMPTS:
        raise NotComparable(
            f"too few drafts to tell: {len(answers)} answers, and {FEW_PROMPTS} are the least."
        )
    rows = [counts for _, counts in answers]
    if len({len(row) for row in rows}) > 1:
        raise NotComparable("the answers are of several draft lengths; give those of one.")
    counts = np.sum(rows, axis=0)
    _check_lengths(counts, report)
    categories = {}
    for name in sorted({name for name, _ in answers if name is not None}):
        emitted = [(row[0] + row[2], row[0]) for of, row in answers if of == name]
        if len(emitted) >= FEW_PROMPTS:
            categories[name] = Estimate.of(measure(f"tau of {name}", emitted), len(emitted))
    return Acceptance(
        [
            Estimate.of(share("acceptance", [(None, row[i], row[0]) for row in rows]), counts[0])
            for i in range(3, len(counts))
        ],
        categories,
    )


def _check_lengths(counts: Floats, report: Acceptance) -> None:
    gamma, (drafts, drafted, _, *places) = len(report.positions), counts.tolist()
    if not drafts:
        raise NotComparable("too few drafts to tell: not one came.")
    chain = [drafts, *places, 0]
    if chain != sorted(chain, reverse=True):
        raise NotComparable(
            f"the counts contradict each other: {drafts:g} drafts, accepted by position {places}; "
            f"give what /metrics said as it is, and to --since what it said before."
        )
    if len(places) != gamma:
        raise NotComparable(
            f"the engine drafts {len(places)} tokens, the report's gamma is {gamma}: acceptance "
            f"differs with it. Give a report that was measured with --gamma {len(places)}."
        )
    if drafted < FULL_LENGTH * gamma * drafts:
        raise NotComparable(
            f"the engine drafted {drafted / drafts:.2f} tokens a draft, not {gamma} (by load, or "
            f"where a grammar forbade them): acceptance by position differs with it."
        )


def compare(report: Acceptance, traffic: Acceptance) -> list[Difference]:
    """Every position, and every category that both have."""
    both = [name for name in report.categories if name in traffic.categories]
    number = len(report.positions) + len(both)
    critical = NormalDist().inv_cdf(1 - FALSE_ALARMS / number / 2)
    places = enumerate(zip(report.positions, traffic.positions, strict=True), start=1)
    differences = [
        Difference(f"position {i}", *sides, critical * _error_of_shares(*sides))
        for i, sides in places
    ]
    for name in both:
        sides = report.categories[name], traffic.categories[name]
        error = math.hypot(*(side.error for side in sides))
        differences.append(Difference(f"category {name}", *sides, critical * error))
    return differences


def _error_of_shares(report: Estimate, traffic: Estimate) -> float:
    """Of their difference; each error at least that of as many independent drafts."""
    accepted = report.mean * report.drafts + traffic.mean * traffic.drafts
    pooled = accepted / (report.drafts + traffic.drafts)
    least = math.sqrt(pooled * (1 - pooled))
    return math.hypot(*(max(s.error, least / math.sqrt(s.drafts)) for s in (report, traffic)))


def drafts_lacking(report: Acceptance, traffic: Acceptance) -> int:
    """How many more make the traffic's first position as certain as the report's; 0: enough."""
    known, new = report.positions[0], traffic.positions[0]
    enough = new.drafts * (new.error / known.error) ** 2 if known.error else known.drafts
    return max(0, round(enough - new.drafts))
