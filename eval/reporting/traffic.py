"""Whether a draft is accepted in traffic as its report says, by position and by category.

Three verdicts. *Moved*: the difference passes what chance explains, of the report and of the
traffic together, at 1% over a week of hourly calls and all comparisons of a call (Bonferroni), so
no call needs to know of the others. *As measured*: the 95% interval of each difference lies within
MARGIN (an equivalence test). Else *not told apart*: more drafts are needed, or a report of more
prompts. Drafts of one text depend on each other. So the report's error is that of its interval over
prompts, and that of bare counters comes from it: their texts are taken to vary as the report's do,
with as many drafts each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy.special import stdtrit

from eval.measuring.intervals import FEWEST_CLUSTERS, Measured, measure, share
from eval.measuring.runs import Speculation
from eval.reporting.fields import DraftReport

# Of calls whose traffic has not moved: a third of 1% a week of hourly calls. So far out shares have
# heavier tails than t, and in simulations this keeps to 1%.
FALSE_ALARMS = 0.01 / 3 / (7 * 24)
MARGIN = 0.10  # of accepted share at a position; a report of 40 prompts knows it to +-0.055
FULL_LENGTH = 0.98  # of a draft: near the length limit a few are shorter


class NotComparable(ValueError):
    """Counts that say nothing of this report: why, and what to do."""


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
                f"a report of {measured.clusters} prompts (or groups of them) knows acceptance too "
                f"badly: measure on {FEWEST_CLUSTERS} at least."
            )
        low, high = measured.ci95
        freedom = measured.freedom or (measured.clusters or measured.n) - 1.0
        return cls(
            measured.mean, (high - low) / 2 / float(stdtrit(freedom, 0.975)), freedom, drafts
        )


@dataclass(frozen=True)
class Acceptance:
    """positions: share of drafts whose first i tokens all passed, i = 1…gamma.

    categories: tokens a target call, by category; of those with an interval.
    """

    positions: list[Estimate]
    categories: dict[str, Estimate]


@dataclass(frozen=True)
class Difference:
    """traffic - report. level: false alarms allowed of this comparison; margin: of differences
    that count as none.
    """

    name: str
    report: Estimate
    traffic: Estimate
    level: float
    margin: float

    @property
    def by(self) -> float:
        return self.traffic.mean - self.report.mean

    def chance(self, level: float) -> float:
        """The difference that chance alone exceeds in a share `level` of cases."""
        error = math.hypot(self.report.error, self.traffic.error)
        return float(stdtrit(self.freedom, 1 - level / 2)) * error

    @property
    def freedom(self) -> float:
        return min(self.report.freedom, self.traffic.freedom)

    @property
    def moved(self) -> bool:
        return abs(self.by) > self.chance(self.level)

    @property
    def as_measured(self) -> bool:
        return abs(self.by) + self.chance(0.05) <= self.margin

    @property
    def lacking(self) -> float:
        """How many times its drafts the traffic needs, for an interval of half the margin.

        Never more than make it twice as certain as the report: beyond that only a report of more
        prompts tells more, and a window of many hours would hide a change in the last.
        """
        allowed = (
            self.margin / 2 / float(stdtrit(self.freedom, 0.975))
        ) ** 2 - self.report.error**2
        return self.traffic.error**2 / max(allowed, self.report.error**2 / 4)


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
    enough = {name: tau for name, tau in by_category.items() if tau.ci95}
    return Acceptance(places, {name: Estimate.of(tau, tau.n) for name, tau in enough.items()})


def counted_acceptance(counts: Speculation, report: Acceptance) -> Acceptance:
    """The acceptance by an engine's counters, without categories."""
    _check_lengths(counts, report)
    drafts = counts.drafts
    return Acceptance(
        [
            Estimate(
                accepted / drafts,
                place.error * math.sqrt(place.drafts / drafts),
                place.freedom,
                drafts,
            )
            for accepted, place in zip(counts.accepted_at, report.positions, strict=True)
        ],
        {},
    )


def answered_acceptance(
    answers: Sequence[tuple[str | None, Speculation]], report: Acceptance
) -> Acceptance:
    """The acceptance by (category, counts) of each response.

    Raises NotComparable where they are too few.
    """
    if len(answers) < FEWEST_CLUSTERS:
        raise NotComparable(
            f"too few drafts to tell: {len(answers)} answers, and {FEWEST_CLUSTERS} are the least."
        )
    counted = [counts for _, counts in answers]
    if len({len(counts.accepted_at) for counts in counted}) > 1:
        raise NotComparable("the answers are of several draft lengths; give those of one.")
    total = Speculation.sum(counted)
    _check_lengths(total, report)
    categories = {}
    for name in sorted({name for name, _ in answers if name is not None}):
        emitted = [(c.drafts + c.accepted, c.drafts) for category, c in answers if category == name]
        if len(emitted) >= FEWEST_CLUSTERS:
            categories[name] = Estimate.of(measure(f"tau of {name}", emitted), len(emitted))
    return Acceptance(
        [
            Estimate.of(
                share("acceptance", [(None, c.accepted_at[i], c.drafts) for c in counted]),
                total.drafts,
            )
            for i in range(len(total.accepted_at))
        ],
        categories,
    )


def _check_lengths(counts: Speculation, report: Acceptance) -> None:
    gamma, (drafts, drafted, _, places) = len(report.positions), counts
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
            f"where a grammar forbade them): acceptance by position differs with it. Give counters "
            f"of a time in which all drafts had {gamma} tokens."
        )


def compare(report: Acceptance, traffic: Acceptance) -> list[Difference]:
    """Every position, and every category that both have."""
    shared = [name for name in report.categories if name in traffic.categories]
    gamma = len(report.positions)
    level = FALSE_ALARMS / (gamma + len(shared))
    differences = [
        Difference(f"position {i}", *_sides_of_shares(promised, counted), level, MARGIN)
        for i, (promised, counted) in enumerate(
            zip(report.positions, traffic.positions, strict=True), start=1
        )
    ]
    return differences + [
        # of tokens a call, every position as far off as it may be
        Difference(
            f"category {name}",
            report.categories[name],
            traffic.categories[name],
            level,
            gamma * MARGIN,
        )
        for name in shared
    ]


def _sides_of_shares(report: Estimate, traffic: Estimate) -> tuple[Estimate, Estimate]:
    """The same, each error raised to that of as many independent drafts at least."""
    accepted = report.mean * report.drafts + traffic.mean * traffic.drafts
    pooled = accepted / (report.drafts + traffic.drafts)
    least = math.sqrt(pooled * (1 - pooled))

    def side(estimate: Estimate) -> Estimate:
        return replace(estimate, error=max(estimate.error, least / math.sqrt(estimate.drafts)))

    return side(report), side(traffic)


def drafts_lacking(differences: Sequence[Difference]) -> float:
    """How many more drafts may tell; 0: told; infinite: more will not, a better report may."""
    unclear = [d.lacking for d in differences if not d.as_measured]
    if not unclear or any(difference.moved for difference in differences):
        return 0.0
    more = (max(unclear) - 1) * differences[0].traffic.drafts
    return more if more > 0 else math.inf
