"""Pay-off arithmetic: against the published table, by hand, and against a simulation."""

import numpy as np
import pytest

from eval.measuring import cost, metrics
from eval.measuring.log import DraftLog, StepCosts


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
    assert "Cannot pay" in cost.price(costs)
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
    assert "breaks even at alpha 0.10" in cost.price(costs)


def test_costs_of_single_tokens_alone_are_refused():
    with pytest.raises(ValueError, match="at least 2 tokens"):
        cost.best_gamma(0.5, StepCosts(0.1, 1.0, {1: 1.0}, 100))


def test_placement_by_hand():
    """3 ids to the draft, 4 back with a q of 1,000 each; 4 * 1 + 10 ms a block of 3 tokens."""
    costs = StepCosts(0.001, 0.010, {1: 0.010, 5: 0.010}, 100)
    home, device, host = cost.placements(3.0, 4, costs, q_rows=1000)
    assert (home.where, home.round_trips, home.bytes_per_block) == ("the same device", 0, 0)
    assert home.speedup == pytest.approx(30 / 14)
    assert home.break_even_round_trip_ms is home.gigabytes_per_s is None
    moved = 8 * (3 + 4) + 4 * 1000 * 4
    assert host.bytes_per_block == device.bytes_per_block == moved == 16_056
    transfer = 1000 * moved / 1.25e9
    assert host.added_ms == pytest.approx(0.5 + transfer)
    assert host.speedup == pytest.approx(30 / (14.5 + transfer))
    assert host.break_even_round_trip_ms == pytest.approx(16 - transfer)
    assert device.added_ms == pytest.approx(0.02 + 1000 * moved / 25e9)
    assert home.speedup > device.speedup > host.speedup


def test_at_its_break_even_round_trip_a_draft_gains_nothing(monkeypatch):
    costs = StepCosts(0.001, 0.010, {1: 0.010, 4: 0.012}, 100)
    host = cost.placements(2.5, 3, costs)[-1]
    longest = cost.Link(host.break_even_round_trip_ms / 1000, cost.LINKS[host.where].bandwidth)
    monkeypatch.setitem(cost.LINKS, host.where, longest)
    assert cost.placements(2.5, 3, costs)[-1].speedup == pytest.approx(1)


def test_a_draft_that_does_not_pay_pays_nowhere_else():
    slow = StepCosts(0.02, 0.010, {1: 0.010, 3: 0.011}, 100)
    assert all(p.break_even_round_trip_ms is None for p in cost.placements(1.5, 2, slow))
    assert all(line.endswith("never pays there.") for line in cost.elsewhere(slow))
    fine = cost.elsewhere(StepCosts(0.001, 0.010, {1: 0.010, 3: 0.011}, 100), q_rows=50_000)
    assert len(fine) == 2  # 30 - 13 - 0.3 ms: 8 * (3 + 2) bytes of ids and 2 * 4 * 50,000 of q
    assert "Draft on another host (0.5 ms, 1.25 GB/s): 1 round trip and 400,040 bytes" in fine[1]
    assert "pays up to a round trip of 16.7 ms" in fine[1]


def test_placement_is_what_a_simulation_of_the_loop_gives():
    """Blocks one after the other, each message on the clock; every token accepted with 0.7."""
    rng = np.random.default_rng(1)
    costs, gamma, q_rows = StepCosts(0.002, 0.020, {1: 0.020, 5: 0.022}, 100), 4, 300
    link = cost.LINKS["another host"]
    clock, emitted, sent, blocks = 0.0, 0, 0, 20_000
    last = 1  # tokens that the draft has not seen
    for _ in range(blocks):
        request, reply = 8 * last, gamma * (8 + 4 * q_rows)
        clock += link.round_trip / 2 + request / link.bandwidth
        clock += gamma * costs.draft_step
        clock += link.round_trip / 2 + reply / link.bandwidth
        clock += costs.target_verify[gamma + 1]
        last = 1 + int((rng.random(gamma) < 0.7).cumprod().sum())
        emitted, sent = emitted + last, sent + request + reply
    host = cost.placements(emitted / blocks, gamma, costs, q_rows)[-1]
    assert host.bytes_per_block == pytest.approx(sent / blocks, rel=1e-3)
    assert host.speedup == pytest.approx(emitted * costs.target_step / clock, rel=1e-3)


def test_a_pass_once_a_draft_counts_once():
    """What a parallel draft costs: the same pass for one token or four, and a choice for each."""
    costs = StepCosts(0.001, 0.010, {1: 0.010, 2: 0.010, 5: 0.012}, 100, draft_block=0.004)
    assert [float(costs.draft(n)) for n in (0, 1, 4)] == pytest.approx([0, 0.005, 0.008])
    assert cost.speedup_at(2.0, 4, costs) == pytest.approx(2.0 * 0.010 / (0.008 + 0.012))
    assert cost.waterfall(2.0, 4, costs, 1.0, 1.0).after_draft_steps == pytest.approx(2.0 / 1.8)
    assert metrics.c(costs) == pytest.approx(0.5)
    (here, *_) = cost.placements(2.0, 4, costs)
    assert here.speedup == pytest.approx(1.0)


def test_looked_up_tokens_take_no_step_and_leave_c_and_the_ceiling_as_measured():
    costs = StepCosts(0.004, 0.010, {1: 0.010, 3: 0.011}, 100)
    log = DraftLog("d", "d", "full", {}, [], [], {}, 2, "fixed", costs=costs, free_share=0.75)
    assert metrics.NUMBERS["c"](log) == pytest.approx(0.4)
    assert metrics.timed(log) is costs  # what `payoff` is made of
    assert metrics.paid(log).draft_step == pytest.approx(0.001)
