"""When a draft pays: arithmetic on measured step costs, before and after anything is trained.

The speed-up of a draft of length gamma is tau * t_target(1) / (gamma * t_draft + t_target(gamma+1))
with tau = (1 - alpha^(gamma+1)) / (1 - alpha), which holds if every position is accepted with the
same probability, independently (arXiv 2211.17192, equation 1). The paper takes a verification as
free (t_target(gamma+1) = t_target(1)); here its measured time is used. A draft that runs elsewhere
adds a round trip, and its bytes over the bandwidth, to each block's time (docs/serving.md).
"""

from __future__ import annotations

from pydantic import Field

from eval.measuring.intervals import Count, Part, Quantity
from eval.measuring.runs import StepCosts

# Below this a speed-up is lost in the noise of a serving machine.
WORTH_IT = 1.05


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
    block = float(costs.draft(gamma) + costs.verify(gamma + 1.0))
    return iid_tau(alpha, gamma) * costs.target_step / block


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


class Payoff(Part):
    """When the draft pays, from step costs and alpha; best_gamma is taken at the measured alpha.

    `costs.ci95` has what the step costs leave open of ceiling and break-even.
    """

    ceiling_speedup: Quantity = Field(description="at alpha = 1")
    break_even_alpha: float | None = Field(description="null: not even alpha = 1 breaks even")
    best_gamma: Count
    best_gamma_speedup: Quantity
    verdict: str


def _between(ends: tuple[float, float] | None) -> str:
    return f" ({ends[0]:.2f} to {ends[1]:.2f} by the spread of the step costs)" if ends else ""


def payoff(costs: StepCosts, alpha: float) -> Payoff:
    """For a draft of this alpha."""
    gamma, speedup = best_gamma(alpha, costs)
    ceiling, needed = ceiling_speedup(costs), break_even_alpha(costs)
    if needed is None:
        verdict = (
            f"Cannot pay: even a perfect draft reaches {ceiling:.2f}x with up to "
            f"{costs.max_gamma} drafted tokens. Take a cheaper draft (fewer layers first, then a "
            "trimmed vocabulary)."
        )
    else:
        pays = "Pays" if speedup >= WORTH_IT else "Does not pay"
        verdict = (
            f"{pays} at alpha {alpha:.2f}: {speedup:.2f}x expected at its best length, gamma "
            f"{gamma}. Break-even is at alpha {needed:.2f}; a perfect draft would reach "
            f"{ceiling:.2f}x{_between(costs.interval(ceiling_speedup))}."
        )
    return Payoff(
        ceiling_speedup=ceiling,
        break_even_alpha=needed,
        best_gamma=gamma,
        best_gamma_speedup=speedup,
        verdict=verdict,
    )
