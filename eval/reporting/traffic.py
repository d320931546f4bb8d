"""Whether a draft is accepted in traffic as its report says, position by position.

Three verdicts. *Moved*: the difference passes what chance explains, of the report and of the
traffic together, at 1% over a week of hourly calls and all comparisons of a call (Bonferroni), so
no call needs to know of the others. *As measured*: the 95% interval of each difference lies within
MARGIN (an equivalence test). Else *inconclusive*: more drafts are needed, or a report of more
prompts. Drafts of one output depend on each other. So the report's error is that of its interval
over prompts. Counters have no interval, so the traffic's error comes from the report's: its outputs
are assumed to vary as the report's do, with as many drafts each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy.special import stdtrit

from eval.measuring.intervals import FEWEST_CLUSTERS, Measured
from eval.measuring.runs import Speculation
from eval.reporting.fields import DraftReport

# Of calls whose traffic has not moved: a third of 1% a week of hourly calls. So far out shares have
# heavier tails than t, and in simulations this keeps to 1%.
FALSE_ALARMS = 0.01 / 3 / (7 * 24)
MARGIN = 0.10  # of accepted share at a position; a report of 40 prompts knows it to +-0.055
FULL_LENGTH = 0.98  # of a draft: near the length limit a few are shorter


class NotComparable(ValueError):
    """Counts that cannot be compared with this report: why, and what to do."""


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error and that error's degrees of freedom, and the drafts behind it."""

    mean: float
    error: float
    freedom: float
    drafts: float

    @classmethod
    def of(cls, measured: Measured, drafts: float) -> Estimate:
        """Raises NotComparable where it has no interval."""
        if measured.ci95 is None:
            raise NotComparable(
                f"A report of {measured.clusters} prompts (or groups of them) has no interval: "
                f"measure on {FEWEST_CLUSTERS} at least."
            )
        low, high = measured.ci95
        freedom = measured.freedom or (measured.clusters or measured.n) - 1.0
        return cls(
            measured.mean, (high - low) / 2 / float(stdtrit(freedom, 0.975)), freedom, drafts
        )


@dataclass(frozen=True)
class Difference:
    """Acceptance in traffic minus acceptance in the report, at a position.

    level: the share of false alarms that this comparison may have.
    """

    position: int
    report: Estimate
    traffic: Estimate
    level: float

    @property
    def mean(self) -> float:
        return self.traffic.mean - self.report.mean

    def chance(self, level: float) -> float:
        """The difference that chance alone exceeds in a share `level` of cases."""
        error = math.hypot(self.report.error, self.traffic.error)
        return float(stdtrit(self.report.freedom, 1 - level / 2)) * error

    @property
    def moved(self) -> bool:
        return abs(self.mean) > self.chance(self.level)

    @property
    def as_measured(self) -> bool:
        return abs(self.mean) + self.chance(0.05) <= MARGIN

    @property
    def lacking(self) -> float:
        """How many times its drafts the traffic needs, for an interval of half the margin.

        Never more than make it twice as certain as the report: beyond that only a report of more
        prompts tells more, and a window of many hours would hide a change in the last.
        """
        half = MARGIN / 2 / float(stdtrit(self.report.freedom, 0.975))
        allowed = half**2 - self.report.error**2
        return self.traffic.error**2 / max(allowed, self.report.error**2 / 4)


def measured_acceptance(draft: DraftReport, engine: str) -> list[Estimate]:
    """A report's share of drafts whose first i tokens were all accepted, for i = 1…gamma.

    Raises NotComparable where not all drafts of the report had gamma tokens.
    """
    if draft.counters:
        places = [
            Estimate.of(place, draft.counters.num_drafts) for place in draft.counters.per_position
        ]
    elif engine == "transformers" or not draft.gamma_policy.startswith("fixed"):
        raise NotComparable(
            f"The report's drafts are not of one length ({draft.gamma_policy}), those of a serving "
            f"engine are. Measure with --engine vllm, or with --gamma N and --engine torch."
        )
    else:
        places = [Estimate.of(place.marginal, place.drafts) for place in draft.per_position or []]
    if not places:
        raise NotComparable(
            "The report has no acceptance by position with intervals; measure again."
        )
    return places


def counted_acceptance(counts: Speculation, report: Sequence[Estimate]) -> list[Estimate]:
    """The same by an engine's counters, of which drafts is above 0.

    Raises NotComparable where they contradict each other, or are of another draft length.
    """
    gamma, (drafts, drafted, _, accepted_at) = len(report), counts
    chain = [drafts, *accepted_at, 0]
    if chain != sorted(chain, reverse=True):
        raise NotComparable(
            f"The counts contradict each other: {drafts:g} drafts, accepted by position "
            f"{accepted_at}. Give what /metrics said as it is, and to --since what it said before."
        )
    if len(accepted_at) != gamma:
        raise NotComparable(
            f"The engine drafts {len(accepted_at)} tokens, the report's gamma is {gamma}: "
            f"acceptance differs with it. Give a report measured with --gamma {len(accepted_at)}."
        )
    if drafted < FULL_LENGTH * gamma * drafts:
        raise NotComparable(
            f"The engine drafted {drafted / drafts:.2f} tokens a draft, not {gamma} (by load, or "
            f"where a grammar forbade them). Give counters of a time in which all drafts had "
            f"{gamma} tokens."
        )
    return [
        Estimate(
            accepted / drafts, place.error * math.sqrt(place.drafts / drafts), place.freedom, drafts
        )
        for accepted, place in zip(accepted_at, report, strict=True)
    ]


def compare(report: Sequence[Estimate], traffic: Sequence[Estimate]) -> list[Difference]:
    """The differences at all positions."""
    level = FALSE_ALARMS / len(report)
    differences = []
    for position, sides in enumerate(zip(report, traffic, strict=True), start=1):
        accepted, drafts = (
            sum(side.mean * side.drafts for side in sides),
            sum(side.drafts for side in sides),
        )
        # no error is below that of as many independent drafts
        least = math.sqrt(accepted / drafts * (1 - accepted / drafts))
        promised, counted = (
            replace(side, error=max(side.error, least / math.sqrt(side.drafts))) for side in sides
        )
        differences.append(Difference(position, promised, counted, level))
    return differences


def drafts_lacking(differences: Sequence[Difference]) -> float:
    """How many more drafts may tell; 0: told; infinite: more will not, a better report may."""
    unclear = [d.lacking for d in differences if not d.as_measured]
    if not unclear or any(difference.moved for difference in differences):
        return 0.0
    more = (max(unclear) - 1) * differences[0].traffic.drafts
    return more if more > 0 else math.inf
