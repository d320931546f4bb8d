"""The test for drift: how often it is wrong where nothing moved, and what it finds where it did."""

import dataclasses

import numpy as np
import pytest

from eval.measuring.intervals import share
from eval.measuring.traffic import (
    Acceptance,
    Estimate,
    NotComparable,
    answered_acceptance,
    compare,
    counted_acceptance,
    drafts_lacking,
    measured_acceptance,
)
from eval.reporting.report import build_report

GAMMA = 3


def texts(rng, number, alpha, spread=0.1, drafts=30):
    """Counts of answers whose alpha differs from text to text, as vLLM counts them."""
    found = []
    for own in np.clip(rng.normal(alpha, spread, number), 0.02, 0.98):
        right = rng.random((GAMMA, drafts)) < own
        at = np.logical_and.accumulate(right).sum(axis=1)
        found.append(np.array([drafts, drafts * GAMMA, at.sum(), *at], dtype=float))
    return found


def as_report(rows):
    """As `measured_acceptance` gives it, of these answers."""
    drafts = sum(row[0] for row in rows)
    places = [share("x", [(None, row[i], row[0]) for row in rows]) for i in range(3, 3 + GAMMA)]
    return Acceptance([Estimate.of(place, drafts) for place in places], {})


def moved(report, traffic):
    return any(one.moved for one in compare(report, traffic))


def test_same_traffic_is_as_measured_and_other_traffic_moved():
    rng = np.random.default_rng(0)
    alarms, found = 0, 0
    for _ in range(100):
        report = as_report(texts(rng, 40, 0.6))
        same, other = (np.sum(texts(rng, 150, alpha), axis=0) for alpha in (0.6, 0.45))
        alarms += moved(report, counted_acceptance(same, report))
        found += moved(report, counted_acceptance(other, report))
    assert alarms <= 3  # 1 in 100 is meant
    assert found >= 95


def test_drafts_of_one_text_are_not_taken_as_independent():
    """40 answers differ from 40 others by more than 1,200 coins from 1,200 others."""
    rng = np.random.default_rng(1)
    report = as_report(texts(rng, 40, 0.6, spread=0.3))
    traffic = counted_acceptance(np.sum(texts(rng, 40, 0.6), axis=0), report)
    coin = np.sqrt(0.6 * 0.4 / 1200)
    assert traffic.positions[0].error == report.positions[0].error > 2 * coin
    assert compare(report, traffic)[0].chance > 2.5 * np.hypot(coin, coin) * 2


def test_answers_bring_their_own_errors_and_categories():
    rng = np.random.default_rng(2)
    code, prose = texts(rng, 60, 0.6), texts(rng, 60, 0.4)
    report = as_report(code + prose)
    of = {"code": 0.6, "prose": 0.4}
    answers = [(name, row) for name, alpha in of.items() for row in texts(rng, 60, alpha)]
    first = answered_acceptance(answers, report)
    assert first.categories["code"].mean == pytest.approx(1 + 0.6 + 0.36 + 0.22, abs=0.15)
    report = dataclasses.replace(report, categories=first.categories)
    assert not moved(report, first)
    # as much is accepted in all, but prose where code was
    turned = [("code" if name == "prose" else "prose", row) for name, row in answers]
    found = {one.name: one.moved for one in compare(report, answered_acceptance(turned, report))}
    assert found["category code"]
    assert found["category prose"]
    assert not found["position 1"]


def test_few_drafts_hide_a_small_change_and_show_a_large_one():
    rng = np.random.default_rng(3)
    report = as_report(texts(rng, 100, 0.6))
    few = np.sum(texts(rng, 5, 0.6), axis=0)
    assert not moved(report, counted_acceptance(few, report))
    assert drafts_lacking(report, counted_acceptance(few, report)) == 95 * 30
    enough = np.sum(texts(rng, 100, 0.6), axis=0)
    assert drafts_lacking(report, counted_acceptance(enough, report)) == 0
    assert moved(report, counted_acceptance(np.array([150.0, 450, 0, 0, 0, 0]), report))
    with pytest.raises(NotComparable, match="too few drafts to tell: 7 answers"):
        answered_acceptance([(None, row) for row in texts(rng, 7, 0.6)], report)
    mixed = [(None, np.ones(6))] * 20 + [(None, np.ones(7))]
    with pytest.raises(NotComparable, match="several draft lengths"):
        answered_acceptance(mixed, report)


def test_nothing_accepted_on_either_side_is_no_difference():
    row = np.array([30.0, 90, 0, 0, 0, 0])
    report = as_report([row] * 20)
    assert not moved(report, counted_acceptance(20 * row, report))


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ([0, 0, 0, 0, 0, 0], "too few drafts to tell: not one came"),
        ([100, 400, 90, 60, 20, 10, 0], "drafts 4 tokens, the report's gamma is 3"),
        ([100, 200, 90, 60, 20, 10], r"drafted 2.00 tokens a draft, not 3"),
        ([100, 300, 90, 20, 60, 10], "the counts contradict each other"),
        ([100, 300, 190, 120, 60, 10], "the counts contradict each other"),
    ],
)
def test_counts_that_say_nothing_of_the_report(counts, reason):
    report = as_report(texts(np.random.default_rng(4), 20, 0.6))
    with pytest.raises(NotComparable, match=reason):
        counted_acceptance(np.array(counts, dtype=float), report)


def test_what_a_report_promises(run_info, measurement):
    draft = build_report(run_info, [measurement("tuned", 0.6)]).drafts["tuned"]
    promised = measured_acceptance(draft, "torch")
    assert [one.mean for one in promised.positions] == [
        place.marginal.mean for place in draft.per_position
    ]
    assert promised.positions[0].drafts == 400
    assert promised.categories.keys() == {"even", "odd"}
    assert promised.categories["odd"].mean == draft.by_category["odd"].tau.mean
    few = build_report(run_info, [measurement("tuned", 0.6, prompts=14)]).drafts["tuned"]
    assert measured_acceptance(few, "torch").categories == {}
    with pytest.raises(NotComparable, match="not of one length"):
        measured_acceptance(draft, "transformers")
    stops = measurement("tuned", 0.6, gamma_policy="stops below 0.4")
    with pytest.raises(NotComparable, match=r"stops below 0.4.*--gamma N"):
        measured_acceptance(build_report(run_info, [stops]).drafts["tuned"], "torch")
