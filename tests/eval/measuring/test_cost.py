"""Pay-off arithmetic: against the published table, by hand, and against a simulation."""

import numpy as np
import pytest

from eval.measuring import cost, metrics
from eval.measuring.runs import StepCosts


def free_verification(c, max_gamma=30):
    """The paper's cost model: a target call costs the same for any number of tokens."""
    return StepCosts(c, 1.0, dict.fromkeys(range(1, max_gamma + 2), 1.0), 100)


def test_iid_tau():
    assert cost.iid_tau(0.0, 5) == 1.0
    assert cost.iid_tau(1.0, 5) == 6.0
    assert cost.iid_tau(0.5, 0) == 1.0
    assert cost.iid_tau(0.8, 4) == pytest.approx((1 - 0.8**5) / (1 - 0.8))


def test_iid_tau_is_what_a_simulation_gives():
    rng = np.random.default_rng(0)
    accepted = (rng.random((200_000, 4)) < 0.7).cumprod(axis=1).sum(axis=1)
    assert cost.iid_tau(0.7, 4) == pytest.approx(1 + accepted.mean(), abs=0.02)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_an_impossible_alpha_is_refused(alpha):
    with pytest.raises(ValueError, match="between 0 and 1"):
        cost.iid_tau(alpha, 3)


@pytest.mark.parametrize(
    ("c", "alpha", "expected"),
    [
        (0.05, 0.6, 1.92),
        (0.05, 0.9, 4.67),
        (0.1, 0.7, 1.98),
        (0.2, 0.8, 1.87),
        (0.35, 0.6, 1.19),
        (0.35, 0.9, 1.71),
    ],
)
def test_best_speedup_with_free_verification(c, alpha, expected):
    gamma, speedup = cost.best_gamma(alpha, free_verification(c))
    assert speedup == pytest.approx(expected, abs=0.005)
    assert speedup == pytest.approx(cost.iid_tau(alpha, gamma) / (gamma * c + 1))


@pytest.mark.parametrize("c", [0.05, 0.2, 0.5, 0.9])
def test_with_free_verification_a_draft_breaks_even_at_alpha_equal_c(c):
    """arXiv 2211.17192, corollary 3.9: some gamma improves on plain decoding where alpha > c."""
    assert cost.break_even_alpha(free_verification(c)) == pytest.approx(c, abs=1e-9)


def test_measured_verification_counts():
    costs = StepCosts(0.1, 1.0, {1: 1.0, 2: 1.2, 3: 1.3, 5: 2.0}, 100)
    assert cost.expected_speedup(0.5, 2, costs) == pytest.approx(1.75 / (0.2 + 1.3))
    # 4 tokens lie between 1.3 s and 2.0 s
    assert cost.expected_speedup(1.0, 3, costs) == pytest.approx(4 / (0.3 + 1.65))
    # (1 + a) = 0.1 + 1.2 at gamma 1; longer drafts need more
    assert cost.break_even_alpha(costs) == pytest.approx(0.3)
    assert cost.ceiling_speedup(costs) == pytest.approx(5 / 2.4)


def test_ceiling_is_the_best_over_the_timed_lengths_only():
    assert cost.ceiling_speedup(free_verification(0.1, max_gamma=1)) == pytest.approx(2 / 1.1)
    assert cost.ceiling_speedup(free_verification(0.1, max_gamma=9)) == pytest.approx(10 / 1.9)


def test_a_draft_as_slow_as_the_target_cannot_pay():
    costs = StepCosts(1.0, 1.0, {1: 1.0, 2: 1.1, 3: 1.2}, 100)
    assert cost.break_even_alpha(costs) is None
    assert cost.payoff(costs, 0.9).verdict.startswith("Cannot pay")


def test_a_free_draft_breaks_even_at_once():
    assert cost.break_even_alpha(StepCosts(1e-9, 1.0, {1: 1.0, 2: 0.99}, 100)) == 0.0


def test_payoff():
    costs = free_verification(0.1)
    block = cost.payoff(costs, 0.8)
    assert block.best_gamma_speedup == pytest.approx(2.47, abs=0.005)
    assert block.break_even_alpha == pytest.approx(0.1)
    assert block.ceiling_speedup == pytest.approx(31 / 4)
    assert block.verdict.startswith("Pays at alpha 0.80: 2.47x")
    assert cost.payoff(costs, 0.05).verdict.startswith("Does not pay at alpha 0.05")


def test_costs_of_single_tokens_alone_are_refused():
    with pytest.raises(ValueError, match="at least 2 tokens"):
        cost.best_gamma(0.5, StepCosts(0.1, 1.0, {1: 1.0}, 100))


def test_a_pass_once_a_draft_counts_once():
    """What a parallel draft costs: the same pass for one token or four, and a choice for each."""
    costs = StepCosts(0.001, 0.010, {1: 0.010, 2: 0.010, 5: 0.012}, 100, draft_block=0.004)
    assert [float(costs.draft(n)) for n in (0, 1, 4)] == pytest.approx([0, 0.005, 0.008])
    assert cost.expected_speedup(0.0, 4, costs) == pytest.approx(0.010 / (0.008 + 0.012))
    assert metrics.c(costs) == pytest.approx(0.5)
