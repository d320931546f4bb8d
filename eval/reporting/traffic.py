"""Compares the acceptance of a draft in traffic with its report, position by position.

Three verdicts. *Moved*: the difference is larger than chance explains, given the errors of report
and traffic. The level is 1% false alarms per week of hourly calls, divided by the number of calls
and of positions (Bonferroni). *As measured*: the 95% interval of each difference is within MARGIN
(an equivalence test). Otherwise *inconclusive*: more drafts, or a report of more prompts, are
needed. Drafts of one output depend on each other, so the report's error is that of its interval
over prompts. Counters have no interval, so the traffic's error is computed from the report's: its
outputs are assumed to vary, and to have as many drafts, as the report's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from scipy.special import stdtrit

from align.errors import UserError
from eval.measuring.intervals import FEWEST_CLUSTERS, Measured
from eval.measuring.runs import Speculation
from eval.reporting.fields import REFERENCE, DraftReport, Report

# Share of false alarms per call. A third of 1% per week, because so far out shares have heavier
# tails than Student's t; in simulations the result is 1% per week.
FALSE_ALARMS = 0.01 / 3 / (7 * 24)
MARGIN = 0.10  # of the accepted share at a position; 40 prompts measure the share to +-0.055
REMEDY = (
    "The draft no longer fits the traffic: train it on logged rows (python -m distill.adapt RUN "
    "--traffic LOGS, docs/serving.md)."
)
FULL_LENGTH = 0.98  # mean draft length / gamma; drafts near the length limit are shorter


class NotComparable(UserError):
    """Counts that cannot be compared with this report."""


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error, the error's degrees of freedom, and the number of drafts."""

    mean: float
    error: float
    freedom: float
    drafts: float

    @classmethod
    def of(cls, measured: Measured, drafts: float) -> Estimate:
        """The estimate of a measured number. Raises NotComparable if it has no interval."""
        if measured.ci95 is None:
            raise NotComparable(
                f"A report of {measured.clusters} prompts (or groups of prompts) has no interval; "
                f"measure on at least {FEWEST_CLUSTERS}."
            )
        low, high = measured.ci95
        freedom = measured.freedom or (measured.clusters or measured.n) - 1.0
        return cls(
            measured.mean, (high - low) / 2 / float(stdtrit(freedom, 0.975)), freedom, drafts
        )


@dataclass(frozen=True)
class Difference:
    """Acceptance in traffic minus acceptance in the report, at a position.

    level: the allowed share of false alarms of this comparison.
    """

    position: int
    report: Estimate
    traffic: Estimate
    level: float

    @property
    def mean(self) -> float:
        return self.traffic.mean - self.report.mean

    def chance(self, level: float) -> float:
        """The difference that chance alone exceeds in a share `level` of comparisons."""
        error = math.hypot(self.report.error, self.traffic.error)
        return float(stdtrit(self.report.freedom, 1 - level / 2)) * error

    @property
    def moved(self) -> bool:
        return abs(self.mean) > self.chance(self.level)

    @property
    def as_measured(self) -> bool:
        return abs(self.mean) + self.chance(0.05) <= MARGIN

    @property
    def verdict(self) -> str:
        if self.moved:
            return "moved away"
        return "as measured" if self.as_measured else "inconclusive"

    @property
    def lacking(self) -> float:
        """The factor by which the traffic's drafts must grow for an interval of half the margin.

        At most, the traffic's error becomes half of the report's. Beyond this, only a report of
        more prompts would help, and many hours of traffic would hide a change in the last hour.
        """
        half = MARGIN / 2 / float(stdtrit(self.report.freedom, 0.975))
        allowed = half**2 - self.report.error**2
        return self.traffic.error**2 / max(allowed, self.report.error**2 / 4)


def measured_acceptance(
    report: Report,
    draft: DraftReport,
    temperature: float | None = None,
    draft_sample_method: str | None = None,
) -> list[Estimate]:
    """A report's share of drafts whose first i tokens were all accepted, for i = 1…gamma.

    temperature, draft_sample_method: of the traffic; None: the report's. Raises NotComparable if
    the report was measured with others, if its engine verifies or drafts sampled tokens by other
    rules than vLLM, or if its drafts had several lengths.
    """
    decoding = report.decoding
    if temperature not in (None, decoding.temperature):
        raise NotComparable(
            f"The traffic has temperature {temperature:g}, but the report's is "
            f"{decoding.temperature:g}, so acceptance differs. Give a report measured with "
            f"--temperature {temperature:g}."
        )
    if decoding.temperature:
        _refuse_other_rules(report, draft_sample_method)
    if draft.counters:
        places = [
            Estimate.of(place, draft.counters.num_drafts) for place in draft.counters.per_position
        ]
    elif report.engine == "transformers" or not draft.gamma_policy.startswith("fixed"):
        raise NotComparable(
            f"The report's drafts have several lengths ({draft.gamma_policy}), but an engine's "
            f"have one. Measure with --engine vllm, or with --gamma N and --engine torch."
        )
    else:
        places = [Estimate.of(place.marginal, place.drafts) for place in draft.per_position or []]
    if not places:
        raise NotComparable(
            "The report has no intervals of the acceptance by position; measure again."
        )
    return places


def _refuse_other_rules(report: Report, draft_sample_method: str | None) -> None:
    """Raise NotComparable unless sampled tokens were drafted and verified as in the traffic."""
    decoding, method = report.decoding, report.decoding.draft_sample_method
    by_token = report.engine == REFERENCE and decoding.verification == "rejection sampling"
    if report.engine != "vllm" and not by_token:
        raise NotComparable(
            f"The report has {decoding.verification} of {report.engine} at temperature "
            f"{decoding.temperature:g}, but vLLM accepts drafts by another rule. Measure with "
            "--engine vllm, or with --engine torch --verification token."
        )
    if draft_sample_method not in (None, method):
        raise NotComparable(
            f"The traffic has draft_sample_method {draft_sample_method}, but the report's is "
            f"{method or 'not known'}, so acceptance differs. Give a report measured with "
            f"--draft_sample_method {draft_sample_method}."
        )
    if by_token and method == "probabilistic" and (decoding.top_k or decoding.top_p < 1):
        raise NotComparable(
            f"The report's drafts were sampled with top_k {decoding.top_k} and top_p "
            f"{decoding.top_p:g}, but vLLM samples drafts without them. Measure with --engine vllm."
        )


def counted_acceptance(counts: Speculation, report: Sequence[Estimate]) -> list[Estimate]:
    """The same shares from an engine's counts with drafts > 0.

    Raises NotComparable for counts that contradict each other or are of another draft length.
    """
    gamma, (drafts, drafted, _, accepted_at) = len(report), counts
    chain = [drafts, *accepted_at, 0]
    if chain != sorted(chain, reverse=True):
        raise NotComparable(
            f"The counts contradict each other: {drafts:g} drafts, accepted by position "
            f"{accepted_at}. Give an unchanged page of /metrics, and --since an earlier page."
        )
    if len(accepted_at) != gamma:
        raise NotComparable(
            f"The engine drafts {len(accepted_at)} tokens, but the report's gamma is {gamma}, so "
            f"acceptance differs. Give a report measured with --gamma {len(accepted_at)}."
        )
    if drafted < FULL_LENGTH * gamma * drafts:
        raise NotComparable(
            f"The engine drafted {drafted / drafts:.2f} tokens per draft instead of {gamma}, "
            f"because of a high load or a grammar. Give counters of a time in which all drafts had "
            f"{gamma} tokens."
        )
    return [
        Estimate(
            accepted / drafts, place.error * math.sqrt(place.drafts / drafts), place.freedom, drafts
        )
        for accepted, place in zip(accepted_at, report, strict=True)
    ]


def compare(report: Sequence[Estimate], traffic: Sequence[Estimate]) -> list[Difference]:
    """The difference at each position."""
    level = FALSE_ALARMS / len(report)
    differences = []
    for position, sides in enumerate(zip(report, traffic, strict=True), start=1):
        accepted, drafts = (
            sum(side.mean * side.drafts for side in sides),
            sum(side.drafts for side in sides),
        )
        # an error cannot be smaller than that of as many independent drafts
        least = math.sqrt(accepted / drafts * (1 - accepted / drafts))
        promised, counted = (
            replace(side, error=max(side.error, least / math.sqrt(side.drafts))) for side in sides
        )
        differences.append(Difference(position, promised, counted, level))
    return differences


def drafts_lacking(differences: Sequence[Difference]) -> float:
    """Further drafts needed for a verdict: 0: there is one; inf: only a larger report can help."""
    unclear = [d.lacking for d in differences if not d.as_measured]
    if not unclear or any(difference.moved for difference in differences):
        return 0.0
    more = (max(unclear) - 1) * differences[0].traffic.drafts
    return more if more > 0 else math.inf
