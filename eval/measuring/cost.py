"""When a draft pays: arithmetic on measured step costs, before and after anything is trained.

The speed-up of a draft of length gamma is tau * t_target(1) / (gamma * t_draft + t_target(gamma+1))
with tau = (1 - alpha^(gamma+1)) / (1 - alpha), which holds if every position is accepted with the
same probability, independently (arXiv 2211.17192, equation 1). The paper takes a verification as
free (t_target(gamma+1) = t_target(1)); here its measured time is used.
"""

from __future__ import annotations

from typing import NamedTuple

from eval.measuring.log import StepCosts
from eval.reporting.report import CurvePoint, Payoff, Placement, Waterfall

# Below this a speed-up is lost in the noise of a serving machine.
WORTH_IT = 1.05

TOKEN_BYTES = 8  # of a token id on a link: int64
Q_BYTES = 4  # of a probability: fp32


class Link(NamedTuple):
    """Between target and draft: seconds of a round trip, bytes a second."""

    round_trip: float
    bandwidth: float


# Stated, not measured: PCIe 4.0 with 16 lanes, and Ethernet of 10 Gbit/s within a data centre.
LINKS = {
    "the same device": None,
    "another device": Link(20e-6, 25e9),
    "another host": Link(500e-6, 1.25e9),
}


def iid_tau(alpha: float, gamma: int) -> float:
    """Tokens per target call, bonus token included: (1 - alpha^(gamma+1)) / (1 - alpha).

    Summed as 1 + alpha + … + alpha^gamma, which needs no special case at alpha = 1.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is a share of probability, between 0 and 1, not {alpha}")
    if gamma < 0:
        raise ValueError(f"gamma is a number of drafted tokens, 0 or more, not {gamma}")
    return float(sum(alpha**i for i in range(gamma + 1)))


def expected_speedup(alpha: float, gamma: int, costs: StepCosts) -> float:
    """Decode-phase speed-up over the plain target at batch 1, without overhead."""
    return speedup_at(iid_tau(alpha, gamma), gamma, costs)


def best_gamma(alpha: float, costs: StepCosts) -> tuple[int, float]:
    """The draft length with the highest expected speed-up, and that speed-up.

    Looks at 1..costs.max_gamma, the lengths whose verification was timed; the shortest wins a tie.
    """
    if costs.max_gamma < 1:
        raise ValueError(
            "no draft length can be priced: time target calls on at least 2 tokens, not only on 1"
        )
    speedups = [expected_speedup(alpha, gamma, costs) for gamma in range(1, costs.max_gamma + 1)]
    best = max(speedups)
    return speedups.index(best) + 1, best


def ceiling_speedup(costs: StepCosts) -> float:
    """The speed-up of a perfect draft (alpha = 1) at its best length: no training can pass it."""
    return best_gamma(1.0, costs)[1]


def speedup_at(tau: float, gamma: int, costs: StepCosts) -> float:
    """Decode-phase speed-up of tau tokens a call with drafts of gamma tokens, without overhead."""
    return tau * costs.target_step / float(costs.draft(gamma) + costs.verify(gamma + 1.0))


def gamma_curve(alpha: float, taus: dict[int, float], costs: StepCosts) -> list[CurvePoint]:
    """The expected speed-up at every length that was timed; taus: replayed ones, by length."""
    return [
        CurvePoint(
            gamma=gamma,
            predicted=expected_speedup(alpha, gamma, costs),
            replayed=speedup_at(taus[gamma], gamma, costs) if gamma in taus else None,
            ceiling=expected_speedup(1.0, gamma, costs),
        )
        for gamma in range(1, costs.max_gamma + 1)
    ]


def waterfall(
    tau: float, gamma: float, costs: StepCosts, decode_speedup: float, speedup: float
) -> Waterfall:
    """From what `gamma` drafted tokens a call could give, down to the wall clock.

    tau is the ideal: drafting free, and a wide target call as cheap as one on a single token.
    """
    drafting = float(costs.draft(gamma)) / costs.target_step
    width = float(costs.verify(gamma + 1.0)) / costs.target_step
    return Waterfall(
        all_accepted=gamma + 1.0,
        tau=tau,
        after_draft_steps=tau / (1 + drafting),
        predicted=tau / (width + drafting),
        decode=decode_speedup,
        wall=speedup,
    )


def bytes_per_block(tau: float, gamma: float, q_rows: int = 0) -> float:
    """Bytes over a link for one block: tau token ids to the draft, gamma back, with their q.

    What was emitted goes to the draft, which then drafts gamma tokens on its own; a sampled token
    is verified by the very q that it was drawn from (arXiv 2211.17192), so that q goes along.
    q_rows: probabilities of each q that is sent, 0 when greedy.
    """
    return (tau + gamma) * TOKEN_BYTES + gamma * q_rows * Q_BYTES


def placements(tau: float, gamma: float, costs: StepCosts, q_rows: int = 0) -> list[Placement]:
    """What the draft costs on each of LINKS, its own step taken as the measured one.

    A block takes t = gamma * t_draft + t_target(gamma + 1) at home. Elsewhere it takes one round
    trip r more, and its bytes b over the bandwidth w: the speed-up is
    tau * t_target(1) / (t + r + b / w), which is 1 at r = tau * t_target(1) - t - b / w.
    """
    block = float(costs.draft(gamma) + costs.verify(gamma + 1.0))
    alone = tau * costs.target_step
    found = []
    for where, link in LINKS.items():
        moved = bytes_per_block(tau, gamma, q_rows) if link else 0.0
        transfer = moved / link.bandwidth if link else 0.0
        added = link.round_trip + transfer if link else 0.0
        most = alone - block - transfer
        found.append(
            Placement(
                where=where,
                round_trips=1 if link else 0,
                bytes_per_block=moved,
                round_trip_ms=1000 * link.round_trip if link else 0.0,
                gigabytes_per_s=link.bandwidth / 1e9 if link else None,
                added_ms=1000 * added,
                speedup=alone / (block + added),
                break_even_round_trip_ms=1000 * most if link and most > 0 else None,
            )
        )
    return found


def elsewhere(costs: StepCosts, q_rows: int = 0) -> list[str]:
    """What it costs to run the draft elsewhere, a sentence a link, before alpha is known.

    Of a perfect draft at its best length: what it cannot bear none can.
    """
    gamma = best_gamma(1.0, costs)[0]
    lines = []
    for one in placements(gamma + 1.0, gamma, costs, q_rows):
        most = one.break_even_round_trip_ms
        pays = "never pays there" if most is None else f"pays up to a round trip of {most:.3g} ms"
        if one.round_trips:
            lines.append(
                f"Draft on {one.where} ({one.round_trip_ms:g} ms, {one.gigabytes_per_s:g} GB/s): "
                f"{one.round_trips} round trip and {one.bytes_per_block:,.0f} bytes a block of "
                f"gamma {gamma}, +{one.added_ms:.3g} ms; a perfect draft would reach "
                f"{one.speedup:.2f}x there and {pays}."
            )
    return lines


def break_even_alpha(costs: StepCosts) -> float | None:
    """The smallest alpha at which some draft length reaches 1x; None if not even alpha = 1 does."""
    if ceiling_speedup(costs) <= 1:
        return None
    low, high = 0.0, 1.0
    if best_gamma(low, costs)[1] >= 1:
        return low
    for _ in range(50):  # the speed-up rises with alpha at every length, so bisection is exact
        middle = (low + high) / 2
        if best_gamma(middle, costs)[1] >= 1:
            high = middle
        else:
            low = middle
    return high


def price(costs: StepCosts) -> str:
    """What these costs allow, in a sentence, before any alpha is known."""
    ceiling, needed = ceiling_speedup(costs), break_even_alpha(costs)
    lengths = f"up to {costs.max_gamma} drafted tokens"
    if needed is None:
        return (
            f"Cannot pay: even a perfect draft would reach {ceiling:.2f}x with {lengths}. "
            f"Take a cheaper draft (fewer layers first, then a trimmed head)."
        )
    return (
        f"Can pay: a perfect draft would reach {ceiling:.2f}x with {lengths}; "
        f"it breaks even at alpha {needed:.2f}."
    )


def payoff(costs: StepCosts, alpha: float) -> Payoff:
    """The pay-off block of a report for a draft of this alpha."""
    gamma, speedup = best_gamma(alpha, costs)
    ceiling, needed = ceiling_speedup(costs), break_even_alpha(costs)
    if needed is None:
        verdict = price(costs)
    else:
        pays = "Pays" if speedup >= WORTH_IT else "Does not pay"
        verdict = (
            f"{pays} at alpha {alpha:.2f}: {speedup:.2f}x expected at its best length, gamma "
            f"{gamma}. Break-even is at alpha {needed:.2f}; a perfect draft would reach "
            f"{ceiling:.2f}x."
        )
    return Payoff(
        ceiling_speedup=ceiling,
        break_even_alpha=needed,
        best_gamma=gamma,
        best_gamma_speedup=speedup,
        verdict=verdict,
    )
