"""The test for drift: how often it is wrong where nothing moved, and what it finds where it did."""

import math

import numpy as np
import pytest

from eval.decoding.prompt_run import PromptRun
from eval.measuring.intervals import share
from eval.measuring.runs import Speculation
from eval.prompts import Prompt
from eval.reporting.build import build_report
from eval.reporting.traffic import (
    Estimate,
    NotComparable,
    compare,
    counted_acceptance,
    drafts_lacking,
    measured_acceptance,
)

GAMMA = 3


def texts(rng, number, alpha, spread=0.1, drafts=30):
    """Counts of answers whose alpha differs from text to text, as vLLM counts them."""
    found = []
    for own in np.clip(rng.normal(alpha, spread, number), 0.02, 0.98):
        right = rng.random((GAMMA, drafts)) < own
        at = np.logical_and.accumulate(right).sum(axis=1)
        found.append(Speculation(drafts, drafts * GAMMA, at.sum(), at.tolist()))
    return found


def as_report(rows):
    """As `measured_acceptance` gives it, of these outputs."""
    drafts = sum(row.drafts for row in rows)
    shares = ([(None, row.accepted_at[i], row.drafts) for row in rows] for i in range(GAMMA))
    return [Estimate.of(share("x", share_rows), drafts) for share_rows in shares]


def moved(report, traffic):
    return any(one.moved for one in compare(report, traffic))


def test_a_report_of_few_prompts_is_never_found_as_measured():
    """Mutant: a difference that is not significant passes for an equivalence."""
    rng = np.random.default_rng(5)
    report = as_report(texts(rng, 15, 0.6, spread=0.3))
    differences = compare(
        report, counted_acceptance(Speculation.sum(texts(rng, 10_000, 0.6)), report)
    )
    assert not any(difference.moved or difference.as_measured for difference in differences[:1])
    assert drafts_lacking(differences) == math.inf
    with pytest.raises(NotComparable, match="report of 9 prompts"):
        as_report(texts(rng, 9, 0.6))


def weeks(rng, number, alpha, hours=168, spread=0.15, hourly=66):
    """Each week a report of 100 prompts at 0.6, then calls each hour as `--since` makes them.

    Returns the verdicts (number, hours): 1 moved, 0 as measured, 2 inconclusive. An hour has
    about 2,000 drafts, of texts that differ.
    """
    verdicts = np.empty((number, hours), dtype=int)
    for week in range(number):
        report = as_report(texts(rng, 100, 0.6, spread))
        own = np.clip(rng.normal(alpha, spread, (hours, hourly)), 0.02, 0.98)
        places = [np.full(own.shape, 30)]
        for _ in range(GAMMA):
            places.append(rng.binomial(places[-1], own))
        drafts, *places = (place.sum(axis=1) for place in places)
        window = np.zeros(3 + GAMMA)
        for hour, row in enumerate(np.stack([drafts, drafts * GAMMA, sum(places), *places], 1)):
            window = window + row
            counts = Speculation(*window[:3], window[3:].tolist())
            differences = compare(report, counted_acceptance(counts, report))
            lacking = drafts_lacking(differences)
            verdicts[week, hour] = any(d.moved for d in differences) or 2 * bool(lacking)
            if lacking in (0, math.inf):
                window = np.zeros(3 + GAMMA)
    return verdicts


def test_a_week_of_hourly_calls_has_false_alarms_in_one_of_a_hundred_at_most():
    verdicts = weeks(np.random.default_rng(6), 150, 0.6)
    assert np.mean((verdicts == 1).any(axis=1)) <= 0.01
    assert np.mean(verdicts == 0) > 0.6


def test_a_drop_of_a_tenth_is_found_within_a_day_and_never_as_measured():
    verdicts = weeks(np.random.default_rng(7), 100, 0.5, hours=24)
    assert np.mean((verdicts == 1).any(axis=1)) >= 0.65
    assert np.mean(verdicts == 0) <= 0.025
    half_as_much_again = weeks(np.random.default_rng(8), 100, 0.45, hours=1)
    assert np.mean(half_as_much_again == 1) >= 0.7


def test_drafts_of_one_text_are_not_taken_as_independent():
    """40 answers differ from 40 others by more than 1,200 coins from 1,200 others."""
    rng = np.random.default_rng(1)
    report = as_report(texts(rng, 40, 0.6, spread=0.3))
    traffic = counted_acceptance(Speculation.sum(texts(rng, 40, 0.6)), report)
    coin = np.sqrt(0.6 * 0.4 / 1200)
    assert traffic[0].error == report[0].error > 2 * coin
    assert compare(report, traffic)[0].chance(0.05) > 2 * np.hypot(coin, coin) * 2


def test_few_drafts_hide_a_small_change_and_show_a_large_one():
    rng = np.random.default_rng(3)
    report = as_report(texts(rng, 100, 0.6))
    few = Speculation.sum(texts(rng, 5, 0.6))
    assert not moved(report, counted_acceptance(few, report))
    lacking = drafts_lacking(compare(report, counted_acceptance(few, report)))
    assert 0 < lacking < 95 * 30
    enough = Speculation.sum(texts(rng, 5 + math.ceil(lacking / 30), 0.6))
    assert drafts_lacking(compare(report, counted_acceptance(enough, report))) == 0
    assert moved(report, counted_acceptance(Speculation(150, 450, 0, [0, 0, 0]), report))


def test_nothing_accepted_on_either_side_is_no_difference():
    rows = [Speculation(30, 90, 0, [0, 0, 0])] * 20
    report = as_report(rows)
    assert not moved(report, counted_acceptance(Speculation.sum(rows), report))


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ([100, 400, 90, 60, 20, 10, 0], "drafts 4 tokens, but"),
        ([100, 300, 90, 20, 60, 10], "contradict each other"),
        ([100, 300, 190, 120, 60, 10], "contradict each other"),
    ],
)
def test_counts_that_say_nothing_of_the_report(counts, reason):
    report = as_report(texts(np.random.default_rng(4), 20, 0.6))
    with pytest.raises(NotComparable, match=reason):
        counted_acceptance(Speculation(*counts[:3], counts[3:]), report)


def test_of_shorter_drafts_the_first_position_is_judged():
    """Lengths by load: a draft of any length has a first token."""
    report = as_report(texts(np.random.default_rng(4), 100, 0.6))
    for accepted, is_moved in ((600, False), (400, True)):
        counts = Speculation(1000, 2000, accepted + 250, [accepted, 200, 50])
        (difference,) = compare(report, counted_acceptance(counts, report))
        assert (difference.position, difference.moved) == (1, is_moved)
        assert difference.traffic.mean == accepted / 1000


def short_outputs(longest):
    """40 outputs of one whole draft, and one whose token at position `longest` ends the text."""
    return [
        PromptRun.of(Prompt(str(i), prompt="x"), 20, [1.0] * 3, [[1], [1] * 4, [1] * longest])
        for i in range(40)
    ]


@pytest.mark.parametrize(
    ("longest", "means", "behind_end"),
    [(1, [1, 0.5, 0.5], [0, 0.5, 0.5]), (2, [1, 1, 0.5], [0, 0, 0.5]), (3, [1, 1, 1], [0, 0, 0])],
)
def test_drafts_that_end_an_output_are_a_range(run_info, measurement, longest, means, behind_end):
    """Engines count on behind the end; the reference decoder's drafts are cut there."""
    runs = short_outputs(longest)
    for run in runs:
        run.drafted, run.accepted = [3, longest], [3, longest]
    report = build_report(run_info, [measurement("tuned", 0.6, runs=runs)])
    promised = measured_acceptance(report, report.drafts["tuned"])
    assert [place.mean for place in promised] == means
    assert [place.behind_end for place in promised] == behind_end
    for at_end in (40, 20, 0):  # so many drafts go on right, as an engine counts them
        at = [80, *(80 if mean == 1 else 40 + at_end for mean in means[1:])]
        counts = Speculation(80, 240, sum(at), at)
        differences = compare(promised, counted_acceptance(counts, promised))
        assert not any(difference.moved for difference in differences)
        assert all(d.as_measured for d in differences) == (behind_end[-1] == 0)
    assert drafts_lacking(differences) == (math.inf if behind_end[-1] else 0)
    counts = Speculation(8000, 24_000, 16_800, [8000, 8000, 800])  # fewer than without any
    assert compare(promised, counted_acceptance(counts, promised))[2].moved


@pytest.mark.parametrize(
    ("behind_end", "traffic", "moved", "as_measured", "lacking"),
    [
        (0.05, 0.54, False, True, 0),
        (0.05, 0.47, False, True, 0),
        (0.3, 0.6, False, False, math.inf),  # within the range, which shows nothing
        (0.3, 0.44, True, False, 0),
        (0.3, 0.86, True, False, 0),
    ],
)
def test_a_range_is_as_measured_only_if_both_ends_are_near(
    behind_end, traffic, moved, as_measured, lacking
):
    report = [Estimate(0.5, 0.006, 100, 8000, behind_end)]
    differences = compare(report, [Estimate(traffic, 0.006, 100, 8000)])
    assert (differences[0].moved, differences[0].as_measured) == (moved, as_measured)
    assert drafts_lacking(differences) == lacking


def test_positions_that_no_draft_reached_are_never_accepted(run_info, measurement):
    """All outputs ended before: the draft length is the report's, not the longest draft's."""
    runs = short_outputs(1)
    for run in runs:
        run.block_tokens, run.drafted, run.accepted = [1, 1], [2, 1], [0, 1]
    report = build_report(run_info, [measurement("tuned", 0.6, runs=runs)])
    draft = report.drafts["tuned"]
    assert (len(draft.per_position), draft.gamma) == (2, 3)
    promised = measured_acceptance(report, draft)
    assert [place.mean for place in promised] == [0.5, 0, 0]
    assert [place.behind_end for place in promised] == [0, 0.5, 0.5]
    counts = Speculation(80, 240, 60, [40, 20, 0])
    assert not any(d.moved for d in compare(promised, counted_acceptance(counts, promised)))


def test_what_a_report_promises(run_info, measurement):
    report = build_report(run_info, [measurement("tuned", 0.6)])
    draft = report.drafts["tuned"]
    promised = measured_acceptance(report, draft)
    assert [one.mean for one in promised] == [place.marginal.mean for place in draft.per_position]
    assert promised[0].drafts == 400
    stops = build_report(run_info, [measurement("tuned", 0.6, gamma_policy="stops below 0.4")])
    with pytest.raises(NotComparable, match=r"stops below 0.4.*--gamma N"):
        measured_acceptance(stops, stops.drafts["tuned"])
    report.engine = "transformers"
    with pytest.raises(NotComparable, match="several lengths"):
        measured_acceptance(report, draft)
