"""Where a draft is rejected: outputs of the target with the acceptance of each token."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from eval.measuring.intervals import Part
from eval.measuring.runs import Agreement, RunLog

HEAT_TOKENS = 16  # the shortest output for a heat map


class HeatMap(Part):
    """One output of the target, token by token."""

    prompt: str
    alpha: float
    tokens: list[str]
    values: list[float] = Field(description="acceptance of each token")
    guesses: list[str] = Field(description="the token that the draft prefers")


def heat_maps(agreements: Sequence[Agreement], run: RunLog, shown: Sequence[str]) -> list[HeatMap]:
    """The `heat_map` of a draft. shown: ids of its prompts."""
    outputs = {output.prompt_id: output.tokens for output in run.answers}
    by_prompt = {agreement.prompt_id: agreement for agreement in agreements}

    def text_of(token: int) -> str:
        """The token's bytes as text; incomplete characters become U+FFFD."""
        return run.spell(token).decode("utf-8", "replace") if token >= 0 else ""

    return [
        HeatMap(
            prompt=prompt,
            alpha=agreement.alpha_sum / agreement.positions,
            tokens=["" if token in run.special else text_of(token) for token in outputs[prompt]],
            values=[round(value, 3) for value in agreement.values],
            guesses=[text_of(guess) for guess in agreement.guesses],
        )
        for prompt, agreement in ((prompt, by_prompt[prompt]) for prompt in shown)
    ]


def telling_prompts(agreements: Sequence[Agreement]) -> list[str]:
    """The prompts whose outputs have the lowest, the middle and the highest acceptance rate."""
    long = [a for a in agreements if a.positions >= HEAT_TOKENS]
    order = [a.prompt_id for a in sorted(long, key=lambda a: a.alpha_sum / a.positions)]
    return list(dict.fromkeys([order[0], order[len(order) // 2], order[-1]])) if order else []
