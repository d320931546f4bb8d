"""Compares the acceptance of a draft in traffic with its report, position by position.

Three verdicts. *Moved*: the difference is larger than chance explains, given the errors of report
and traffic. The level is 1% false alarms per week of hourly calls, divided by the number of calls
and of positions (Bonferroni). *As measured*: the 95% interval of each difference is within MARGIN
(an equivalence test). Otherwise *inconclusive*: more drafts, or a report of more prompts, are
needed. Drafts of one output depend on each other, so the report's error is that of its interval
over prompts. Counters have no interval, so the traffic's error is computed from the report's: its
outputs are assumed to vary, and to have as many drafts, as the report's. Engines count what they
accept behind the end of an output, too; the reference decoder's report gives a range there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from scipy.special import stdtrit

from align.errors import UserError
from eval.measuring.intervals import FEWEST_CLUSTERS, Measured
from eval.measuring.metrics import PromptSums
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
FULL_LENGTH = 0.98  # mean / longest draft; drafts near the length limit are shorter


class NotComparable(UserError):
    """Counts that cannot be compared with this report."""


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error, the error's degrees of freedom, and the number of drafts.

    behind_end: share of drafts that may be accepted in addition, by an engine that drafts on behind
    the end of an output.
    """

    mean: float
    error: float
    freedom: float
    drafts: float
    behind_end: float = 0.0

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
    """Acceptance in traffic and in the report, at a position.

    level: the allowed share of false alarms of this comparison.
    """

    position: int
    report: Estimate
    traffic: Estimate
    level: float

    @property
    def highest(self) -> float:
        """The upper end of the report's range; its mean is the lower one."""
        return self.report.mean + self.report.behind_end

    @property
    def mean(self) -> float:
        """The traffic's acceptance minus the nearest value of the report's range."""
        accepted = self.traffic.mean
        return accepted - min(max(accepted, self.report.mean), self.highest)

    def chance(self, level: float) -> float:
        """The difference that chance alone exceeds in a share `level` of comparisons."""
        error = math.hypot(self.report.error, self.traffic.error)
        return float(stdtrit(self.report.freedom, 1 - level / 2)) * error

    @property
    def moved(self) -> bool:
        return abs(self.mean) > self.chance(self.level)

    @property
    def as_measured(self) -> bool:
        accepted = self.traffic.mean
        farthest = max(accepted - self.report.mean, self.highest - accepted)
        return farthest + self.chance(0.05) <= MARGIN

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
        inf: the report's range alone is as wide as the margin.
        """
        if self.report.behind_end >= MARGIN:
            return math.inf
        half = (MARGIN - self.report.behind_end) / 2 / float(stdtrit(self.report.freedom, 0.975))
        allowed = half**2 - self.report.error**2
        return self.traffic.error**2 / max(allowed, self.report.error**2 / 4)


def measured_acceptance(
    report: Report,
    draft: DraftReport,
    temperature: float | None = None,
    draft_sample_method: str | None = None,
) -> list[Estimate]:
    """A report's share of drafts whose first i tokens were all accepted, for i up to its length.

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
        shares, drafts = draft.counters.per_position, draft.counters.num_drafts
    elif report.engine == "transformers" or not draft.gamma_policy.startswith("fixed"):
        raise NotComparable(
            f"The report's drafts have several lengths ({draft.gamma_policy}), but an engine's "
            f"have one. Measure with --engine vllm, or with --gamma N and --engine torch."
        )
    else:
        measured = draft.per_position or []
        shares, drafts = [place.marginal for place in measured], sum(p.drafts for p in measured[:1])
    places = [Estimate.of(share, drafts) for share in shares]
    if not places:
        raise NotComparable(
            "The report has no intervals of the acceptance by position; measure again."
        )
    # if all outputs are shorter than the draft length, no draft reaches its last positions
    draft_length = draft.gamma or len(places)
    places += [replace(places[-1], mean=0.0)] * (draft_length - len(places))
    if draft.counters:
        return places
    behind_end = _behind_end(draft.per_prompt, draft_length)
    return [
        replace(place, behind_end=share) for place, share in zip(places, behind_end, strict=True)
    ]


def _behind_end(table: Iterable[PromptSums], draft_length: int) -> list[float]:
    """The share of drafts that ended an output before position i up to its length.

    The reference decoder cuts a draft behind an accepted end-of-text token, and no token of the
    target follows. An engine's draft goes on, and so do its counters.
    """
    drafts, lengths = 0, []
    for row in table:
        if row.accepted_at and row.drafted:
            drafts += row.accepted_at[0]
            if (row.accepted or 0) + (row.blocks or 0) > (row.block_tokens or 0):
                lengths.append(max(row.drafted - draft_length * (row.accepted_at[0] - 1), 1))
    return [sum(length < i for length in lengths) / drafts for i in range(1, draft_length + 1)]


def _refuse_other_rules(report: Report, draft_sample_method: str | None) -> None:
    """Raise NotComparable unless sampled tokens were drafted and verified as in the traffic."""
    decoding, method = report.decoding, report.decoding.draft_sample_method
    by_token = report.engine == REFERENCE and decoding.verification == "rejection sampling"
    # vLLM samples drafts without top_k and top_p
    unlike = method == "probabilistic" and (decoding.top_k or decoding.top_p < 1)
    other_rule = report.engine != "vllm" and (not by_token or unlike)
    if other_rule or draft_sample_method not in (None, method):
        raise NotComparable(
            f"The report has {decoding.verification} of {report.engine} with draft_sample_method "
            f"{method or 'not known'}, and vLLM drafts or accepts by another rule in the traffic. "
            "Measure with --engine vllm and the traffic's --draft_sample_method."
        )


def counted_acceptance(counts: Speculation, report: Sequence[Estimate]) -> list[Estimate]:
    """The same shares from an engine's counts with drafts > 0.

    If the engine drafted fewer tokens at times (a high load, lengths by load, a grammar), only that
    of position 1, which every draft has. Raises NotComparable for counts that contradict each
    other or are of another draft length.
    """
    draft_length, (drafts, drafted, _, accepted_at) = len(report), counts
    chain = [drafts, *accepted_at, 0]
    if chain != sorted(chain, reverse=True):
        raise NotComparable(
            f"The counts contradict each other: {drafts:g} drafts, accepted by position "
            f"{accepted_at}. Give an unchanged page of /metrics, and --since an earlier page."
        )
    if len(accepted_at) != draft_length:
        raise NotComparable(
            f"The engine drafts {len(accepted_at)} tokens, but the report's draft length is "
            f"{draft_length}, so acceptance differs. Give a report measured with "
            f"--gamma {len(accepted_at)}."
        )
    full = drafted >= FULL_LENGTH * draft_length * drafts
    return [
        Estimate(
            accepted / drafts, place.error * math.sqrt(place.drafts / drafts), place.freedom, drafts
        )
        for accepted, place in zip(accepted_at if full else accepted_at[:1], report, strict=False)
    ]


def compare(report: Sequence[Estimate], traffic: Sequence[Estimate]) -> list[Difference]:
    """The difference at each position of the traffic."""
    level = FALSE_ALARMS / len(report)
    differences = []
    for position, sides in enumerate(zip(report, traffic, strict=False), start=1):
        drafts = sum(side.drafts for side in sides)
        share = sum(side.mean * side.drafts for side in sides) / drafts
        # an error cannot be smaller than that of as many independent drafts
        least = math.sqrt(share * (1 - share))
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
