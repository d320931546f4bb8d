"""The cost estimate: the speed-up of a draft, computed from measured step costs and acceptance.

Drafts of g tokens give the speed-up L(g) * t_target(1) / (t_draft(g) + t_target(g + 1)). L(g) =
1 + m_1 + … + m_g is the mean acceptance length; m_i is the share of drafts whose first i tokens are
all accepted. If m_i is not measured, m_i = a^i: every position has the same acceptance rate a,
independently of the others (arXiv 2211.17192, equation 1). The paper assumes t_target(g + 1) =
t_target(1); here the measured time of verification is used. A draft on another machine adds a round
trip and the transfer of its output to each speculation step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import pydantic.dataclasses
from pydantic import Field
from scipy.optimize import bisect

from eval.measuring.intervals import Count, Floats, Part, Quantity


@pydantic.dataclasses.dataclass(config=Part.model_config)
class StepCosts:
    """Median milliseconds of isolated steps at the run's mean context length, batch size 1.

    A step is forward, head, and argmax or logits processors; the random draw is not timed.
    """

    draft_step_ms: Quantity
    target_step_ms: Quantity
    target_verify_ms: Annotated[
        dict[int, Quantity], Field(description="by number of tokens in the call")
    ]
    context_length: Count
    draft_block_ms: Quantity = Field(default=0.0, description="for each draft, besides its steps")

    @property
    def longest_draft(self) -> int:
        """The longest draft whose verification was timed."""
        return max(self.target_verify_ms) - 1

    def draft(self, tokens: float | Floats, drafts: float | Floats = 1.0) -> Floats:
        """Milliseconds of this number of drafts with this number of tokens together."""
        block = self.draft_block_ms * np.minimum(tokens, drafts)
        return np.asarray(block + self.draft_step_ms * np.asarray(tokens), dtype=np.float64)

    def verify(self, tokens: float | Floats) -> Floats:
        """Milliseconds of a target call on this number of tokens, interpolated between widths."""
        widths, timed = zip(*sorted(self.target_verify_ms.items()), strict=True)
        assert np.max(tokens) <= widths[-1] + 1e-9
        return np.asarray(np.interp(tokens, widths, timed), dtype=np.float64)


def same_at_every_position(acceptance_rate: float, draft_length: int) -> list[float]:
    """m_1 … m_g if each position is accepted with this probability, independently."""
    return [acceptance_rate**i for i in range(1, draft_length + 1)]


def break_even_length(draft_length: int, costs: StepCosts) -> float:
    """The mean acceptance length with a speed-up of 1: the plain steps that a step costs."""
    step = float(costs.draft(draft_length) + costs.verify(draft_length + 1.0))
    return step / costs.target_step_ms


def expected_speedup(accepted: Sequence[float], costs: StepCosts) -> float:
    """Decode-phase speed-up of drafts of g = len(accepted) tokens over the target alone.

    accepted: m_1 … m_g. Batch size 1; overhead outside the models is not counted.
    """
    return (1 + sum(accepted)) / break_even_length(len(accepted), costs)


def best_draft_length(accepted: Sequence[float], costs: StepCosts) -> tuple[int, float]:
    """The draft length up to len(accepted) with the highest expected speed-up, and this speed-up.

    If speed-ups are equal, the shortest length is returned.
    """
    speedups = [
        expected_speedup(accepted[:length], costs) for length in range(1, len(accepted) + 1)
    ]
    best = max(speedups)
    return speedups.index(best) + 1, best


def ceiling_speedup(costs: StepCosts) -> float:
    """The speed-up of a perfect draft at its best length: the limit of any training."""
    return _best_at(1.0, costs)


def break_even_acceptance_rate(costs: StepCosts) -> float | None:
    """The smallest acceptance rate with a speed-up of 1 at its best draft length.

    None if even an acceptance rate of 1 is not faster than the target alone.
    """
    if ceiling_speedup(costs) <= 1:
        return None
    if _best_at(0.0, costs) >= 1:
        return 0.0
    return float(bisect(lambda rate: _best_at(rate, costs) - 1, 0.0, 1.0))


def _best_at(acceptance_rate: float, costs: StepCosts) -> float:
    accepted = same_at_every_position(acceptance_rate, costs.longest_draft)
    return best_draft_length(accepted, costs)[1]


class Payoff(Part):
    """The cost estimate of a draft, from its step costs and its acceptance by position."""

    ceiling_speedup: Quantity = Field(description="of a perfect draft")
    break_even_alpha: float | None = Field(
        description="same acceptance rate at every position; null: not even 1 breaks even"
    )
    best_gamma: Count = Field(
        description="by acceptance at each position; up to the drafted length"
    )
    best_gamma_speedup: Quantity
    verdict: str = Field(description="pays, does not pay, cannot pay, or inconclusive")


def payoff(costs: StepCosts, accepted: Sequence[float], bounds: tuple[float, float]) -> Payoff:
    """The cost estimate of a draft with the acceptance by position m_1 … m_g.

    bounds: of the measured speed-up, which decides whether the draft pays.
    """
    draft_length, speedup = best_draft_length(accepted, costs)
    needed = break_even_acceptance_rate(costs)
    verdict = "pays" if bounds[0] > 1 else "inconclusive"
    if bounds[1] < 1:
        verdict = "cannot pay" if needed is None else "does not pay"
    return Payoff(
        ceiling_speedup=ceiling_speedup(costs),
        break_even_alpha=needed,
        best_gamma=draft_length,
        best_gamma_speedup=speedup,
        verdict=verdict,
    )
