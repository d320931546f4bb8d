"""Pay-off arithmetic: against the published table, by hand, and against a simulation."""

import numpy as np
import pytest

from eval.measuring import cost, metrics
from eval.measuring.cost import StepCosts


def free_verification(c, longest=30):
    """The paper's cost model: a target call costs the same for any number of tokens."""
    return StepCosts(c, 1.0, dict.fromkeys(range(1, longest + 2), 1.0), 100)


def speedup(acceptance_rate, draft_length, costs):
    return cost.expected_speedup(cost.same_at_every_position(acceptance_rate, draft_length), costs)


def test_the_acceptance_length_is_what_a_simulation_gives():
    rng = np.random.default_rng(0)
    accepted = (rng.random((200_000, 4)) < 0.7).cumprod(axis=1).mean(axis=0)
    assert cost.same_at_every_position(0.7, 4) == pytest.approx(accepted.tolist(), abs=0.02)
    assert cost.same_at_every_position(0.0, 2) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("c", "alpha", "expected"), [(0.05, 0.9, 4.67), (0.1, 0.7, 1.98), (0.35, 0.9, 1.71)]
)
def test_best_speedup_with_free_verification(c, alpha, expected):
    accepted = cost.same_at_every_position(alpha, 30)
    length, best = cost.best_draft_length(accepted, free_verification(c))
    assert best == pytest.approx(expected, abs=0.005)
    assert best == pytest.approx((1 - alpha ** (length + 1)) / (1 - alpha) / (length * c + 1))


@pytest.mark.parametrize("c", [0.05, 0.2, 0.5, 0.9])
def test_with_free_verification_a_draft_breaks_even_at_alpha_equal_c(c):
    """arXiv 2211.17192, corollary 3.9: some gamma improves on plain decoding where alpha > c."""
    assert cost.break_even_acceptance_rate(free_verification(c)) == pytest.approx(c, abs=1e-9)


def test_measured_verification_counts():
    costs = StepCosts(0.1, 1.0, {1: 1.0, 2: 1.2, 3: 1.3, 5: 2.0}, 100)
    assert speedup(0.5, 2, costs) == pytest.approx(1.75 / (0.2 + 1.3))
    # 4 tokens lie between 1.3 s and 2.0 s
    assert speedup(1.0, 3, costs) == pytest.approx(4 / (0.3 + 1.65))
    # (1 + a) = 0.1 + 1.2 at gamma 1; longer drafts need more
    assert cost.break_even_acceptance_rate(costs) == pytest.approx(0.3)
    assert cost.ceiling_speedup(costs) == pytest.approx(5 / 2.4)


def test_ceiling_is_the_best_over_the_timed_lengths_only():
    assert cost.ceiling_speedup(free_verification(0.1, longest=1)) == pytest.approx(2 / 1.1)
    assert cost.ceiling_speedup(free_verification(0.1, longest=9)) == pytest.approx(10 / 1.9)


def test_a_draft_as_slow_as_the_target_cannot_pay():
    costs = StepCosts(1.0, 1.0, {1: 1.0, 2: 1.1, 3: 1.2}, 100)
    assert cost.break_even_acceptance_rate(costs) is None
    assert cost.payoff(costs, [0.9, 0.8], (0.8, 0.9)).verdict == "cannot pay"


def test_a_free_draft_breaks_even_at_once():
    assert cost.break_even_acceptance_rate(StepCosts(1e-9, 1.0, {1: 1.0, 2: 0.99}, 100)) == 0.0


def test_the_estimate_is_made_from_acceptance_at_each_position():
    """A parallel draft is accepted less and less: its first position says nothing of the others."""
    costs = free_verification(0.1)
    estimate = cost.payoff(costs, cost.same_at_every_position(0.8, 30), (1.1, 2.0))
    assert estimate.best_gamma_speedup == pytest.approx(2.47, abs=0.005)
    assert estimate.break_even_alpha == pytest.approx(0.1)
    assert estimate.ceiling_speedup == pytest.approx(31 / 4)
    assert estimate.verdict == "pays"
    falling = cost.payoff(costs, [0.8, 0.1, 0.0], (0.9, 1.1))
    assert (falling.best_gamma, falling.best_gamma_speedup) == (1, pytest.approx(1.8 / 1.1))
    assert cost.payoff(costs, [0.05, 0.0], (0.8, 0.9)).verdict == "does not pay"


def test_a_pass_once_a_draft_counts_once():
    """What a parallel draft costs: the same pass for one token or four, and a choice for each."""
    costs = StepCosts(0.001, 0.010, {1: 0.010, 2: 0.010, 5: 0.012}, 100, draft_block_ms=0.004)
    assert [float(costs.draft(n)) for n in (0, 1, 4)] == pytest.approx([0, 0.005, 0.008])
    assert speedup(0.0, 4, costs) == pytest.approx(0.010 / (0.008 + 0.012))
    assert metrics.cost_ratio(costs) == pytest.approx(0.5)
