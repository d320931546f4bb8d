"""Intervals: how often they hold the truth, what they rest on, and what they look like."""

import numpy as np
import pytest
from scipy.special import stdtrit

from eval.measuring import intervals
from eval.measuring.intervals import Measured, StartError, above_zero, around, measure, ratio, share
from eval.measuring.metrics import speedup_of

# --- data that look like ours: (trials, prompts, columns) ---------------------------------------


def speeds(rng, shape, spread=0.35):
    """Seconds and tokens of answers of up to 128 tokens, without a draft and with it."""
    tokens = np.minimum(np.ceil(rng.lognormal(4.3, 0.8, shape)), 128)
    plain = 0.1 * rng.lognormal(0, 0.8, shape) + 0.04 * tokens
    return np.stack([plain, tokens, plain / rng.lognormal(0.35, spread, shape), tokens], axis=-1)


def looked_up(rng, shape):
    """Tokens and calls behind prompt lookup: what copies takes few calls."""
    tokens = np.minimum(np.ceil(rng.lognormal(4.3, 0.8, shape)), 128)
    tau = np.maximum(1.05, rng.lognormal(1.0, 0.5, shape))
    return np.stack([tokens, np.ceil(tokens / tau)], axis=-1)


def shares(rng, shape, agreed=(3, 2), positions=3.5):
    """Agreed positions and positions: short answers and very long ones."""
    counts = np.ceil(np.minimum(rng.lognormal(positions, 0.8, shape), 4_000))
    hits = rng.binomial(counts.astype(int), rng.beta(*agreed, shape))
    return np.stack([hits, counts], axis=-1).astype(float)


def two_shares(rng, shape):
    """Two drafts on the same answers."""
    other = shares(rng, shape)
    gained = rng.normal(0.08, 0.12, shape) * other[..., 1]
    mine = np.clip(other[..., 0] + gained, 0, other[..., 1])
    return np.concatenate([mine[..., None], other[..., 1:], other], axis=-1)


def two_speeds(rng, shape):
    other = speeds(rng, shape)
    mine = other.copy()
    mine[..., 2] /= rng.lognormal(0.1, 0.2, shape)
    return np.concatenate([mine, other], axis=-1)


def documents(rng, shape):
    """Two clauses of each document, which are alike; one row is one clause."""
    trials, groups = shape
    alike = np.repeat(rng.beta(3, 2, (trials, groups)), 2, axis=1)
    counts = np.ceil(rng.lognormal(3.5, 0.8, alike.shape)).astype(int)
    return np.stack([rng.binomial(counts, alike), counts], axis=-1).astype(float)


def as_share(rows):
    return share("it", [(None, *row) for row in rows])


def as_gain(statistic):
    return lambda rows: measure("it", [*rows], apart(statistic), ends=around)


def by_document(rows):
    return share("it", [(str(i // 2), *row) for i, row in enumerate(rows)])


def apart(statistic):
    return lambda t: statistic(t[..., : t.shape[-1] // 2]) - statistic(t[..., t.shape[-1] // 2 :])


# name: (data, statistic of column totals, how it is measured)
CASES = {
    "speed-up": (speeds, speedup_of, lambda rows: measure("it", [*rows], speedup_of)),
    "tau behind lookup": (looked_up, ratio, lambda rows: measure("it", [*rows])),
    "alpha": (shares, ratio, as_share),
    "alpha near 1": (lambda rng, shape: shares(rng, shape, (9, 1)), ratio, as_share),
    "third position": (lambda rng, shape: shares(rng, shape, (1, 5), 2.5), ratio, as_share),
    "gain of alpha": (two_shares, apart(ratio), as_gain(ratio)),
    "gain of speed-up": (two_speeds, apart(speedup_of), as_gain(speedup_of)),
    "alpha by document": (documents, ratio, by_document),
}
TRIALS = 1_500


def coverage(case, clusters, measured):
    """Share of trials whose interval holds the ratio of the expected sums."""
    data, statistic, _ = CASES[case]
    rng = np.random.default_rng(1)
    truth = statistic(data(rng, (1, 400_000))[0].sum(axis=0))
    ends = np.array([measured(rows) for rows in data(rng, (TRIALS, clusters))])
    return np.mean((ends[:, 0] <= truth) & (truth <= ends[:, 1]))


@pytest.mark.parametrize(("clusters", "bar"), [(32, 0.93), (12, 0.90)])
@pytest.mark.parametrize("case", CASES)
def test_intervals_cover(case, clusters, bar):
    assert coverage(case, clusters, lambda rows: CASES[case][2](rows).ci95) >= bar


def test_clauses_of_one_document_are_not_independent():
    """Mutant: without their groups."""
    assert coverage("alpha by document", 32, lambda rows: as_share(rows).ci95) < 0.90


# --- what they look like ------------------------------------------------------------------------


def test_intervals_stay_where_the_number_can_be():
    rng = np.random.default_rng(3)
    for _ in range(200):
        low, high = as_share(shares(rng, 12, (1, 12), 1.0)).ci95
        assert 0 <= low < high <= 1
        low, high = measure("it", [*speeds(rng, 10, spread=2.0)], speedup_of).ci95
        assert 0 < low < high


def test_a_share_that_was_always_so_is_not_certain():
    low, high = share("it", [(None, 30, 30)] * 24).ci95
    assert high == pytest.approx(1)
    assert 0.8 < low < 0.9  # of 24 prompts at most 3 in 20 could be otherwise
    assert share("it", [(None, 0, 30)] * 24).ci95 == pytest.approx((1 - high, 1 - low))
    assert share("it", [(None, 15, 30)] * 24).ci95 == (0.5, 0.5)  # each alike


def test_below_ten_clusters_there_is_a_range_and_no_interval():
    rows = [(float(i), 10.0) for i in range(1, 10)]
    few = measure("it", rows)
    assert few == Measured(mean=0.5, ci95=None, n=9, clusters=9, range=(0.1, 0.9))
    assert f"{few:.2f}" == "0.50 (0.10 to 0.90)"
    assert few.bounds == (-np.inf, np.inf)
    enough = measure("it", [*rows, (5.0, 10.0)])
    assert f"{enough:.2f}" == "0.50 [0.35,0.72]"
    by_group = measure("it", [*rows, (5.0, 10.0)], groups=["x", "x", *"abcdefgh"])
    assert (by_group.ci95, by_group.n, by_group.clusters) == (None, 10, 9)


def test_a_group_varies_as_a_whole():
    rows = [(float(i), float(i + 1)) for i in range(1, 25)]
    names = ["x", None, *"abcdefghij", "x", *[None] * 11]
    measured = measure("it", rows, groups=names)
    # the same as rows that were added up before
    added = measure("it", [np.add(rows[0], rows[12]), *rows[1:12], *rows[13:]])
    assert measured.mean == pytest.approx(added.mean)
    assert measured.ci95 == pytest.approx(added.ci95)
    assert (measured.n, measured.clusters, added.n) == (24, 23, 23)
    assert measure("it", rows, groups=[None] * 24) == measure("it", rows)


def test_half_widths_over_prompts_and_over_starts_are_added_in_squares():
    """Each has its own t; numbers without seconds stay as they are."""
    rows = [*speeds(np.random.default_rng(5), 24)]

    def half(*started):
        measured = measure("it", rows, speedup_of, None, above_zero, *started)
        return np.log(measured.ci95[1] / measured.mean)

    error, t = StartError(0.03, 4), stdtrit(4, 0.975)
    both = half(error, [[0], [2]])  # the speed-up has the error of two servers
    assert both == pytest.approx(np.hypot(half(), t * 0.03 * np.sqrt(2)), rel=0.02)
    wide = measure("it", rows, speedup_of, None, above_zero, error, [[0], [2]])
    assert wide.over_starts == pytest.approx(wide.mean * t * 0.03 * np.sqrt(2), rel=0.02)
    assert half(error, [[0, 2]]) == pytest.approx(half())  # one server
    assert half(error, [[], []]) == half(StartError(0, 4), [[0]]) == half()


def test_the_error_is_that_of_the_delta_method():
    """The jackknife against the linearised error of a ratio, on prompts enough."""
    rows = shares(np.random.default_rng(4), 400)
    total, count = rows.sum(axis=0)
    linear = (rows[:, 0] - total / count * rows[:, 1]) / count
    error, _ = intervals._error(ratio(rows.sum(axis=0) - rows) - total / count)
    assert error == pytest.approx(np.sqrt((linear**2).sum()), rel=0.02)
