"""The report's fields of the output check, which compares greedy outputs token by token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field, computed_field

from eval.decoding.prompt_run import PromptRun
from eval.measuring.intervals import Count, Part, Positive, Quantity


class Divergence(Part):
    """The first token at which a greedy output with a draft differs from the target's."""

    prompt: str
    position: Count = Field(description="token of the output, from 0")
    target: str = Field(description="the token without a draft")
    drafted: str = Field(description="the token with it")
    gap: Quantity | None = Field(description="between the two tokens' log-probabilities, in nats")
    error: Quantity | None = Field(
        description="between two forwards' logits there (for a server: over the output)"
    )
    tie: bool
    judged: bool = Field(True, description="false: the log-probabilities to judge it are missing")
    why: str = Field("", description="what the gap and the error do not say")

    @property
    def verdict(self) -> str:
        """The class of the divergence."""
        return "near-tie" if self.tie else "mismatch" if self.judged else "not judged"


class Ledger(Part):
    """The output check: exact matches, near-tie divergences, mismatches, divergences not judged.

    A divergence is a near-tie if the target's rounding error decides between its two tokens. It is
    not judged if the server that judges failed; then it is no sign of a fault.
    """

    prompts: Positive
    divergences: list[Divergence]

    @computed_field  # type: ignore[prop-decorator]
    @property
    def identical(self) -> int:
        """The number of exact matches."""
        return self.prompts - len(self.divergences)

    @computed_field  # type: ignore[prop-decorator]
    @property
    def tie_divergences(self) -> int:
        return sum(entry.tie for entry in self.divergences)

    @computed_field(description="mismatches; must be 0")  # type: ignore[prop-decorator]
    @property
    def unexplained(self) -> int:
        return len(self.divergences) - self.tie_divergences - self.not_judged

    @computed_field  # type: ignore[prop-decorator]
    @property
    def not_judged(self) -> int:
        return sum(not entry.judged for entry in self.divergences)

    @computed_field(description="of the near-tie divergences, in nats")  # type: ignore[prop-decorator]
    @property
    def largest_gap(self) -> float | None:
        """The largest gap of a near-tie divergence, in nats; None without near-ties."""
        return max((d.gap for d in self.divergences if d.tie and d.gap is not None), default=None)

    def __str__(self) -> str:
        text = f"{self.identical} of {self.prompts} outputs token-identical"
        if self.tie_divergences:
            gap = self.largest_gap
            largest = "" if gap is None else f" (largest gap {gap:.2g} nats)"
            plural = "s" * (self.tie_divergences > 1)
            text += f", {self.tie_divergences} near-tie divergence{plural}{largest}"
        if self.unexplained:
            text += f", {self.unexplained} MISMATCH{'ES' * (self.unexplained > 1)}"
        if self.not_judged:
            text += f", {self.not_judged} not judged"
        return text


def divergence(
    baseline: PromptRun, run: PromptRun, text_of: Callable[[list[int]], Any]
) -> dict[str, Any]:
    """The fields of a `Divergence` of two outputs that differ, with tie False.

    text_of: returns the text of a list of one token, or of [] if an output ends there.
    """
    pairs = list(zip(baseline.tokens, run.tokens, strict=False))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return {
        "prompt": run.prompt_id,
        "position": position,
        "target": text_of(baseline.tokens[position : position + 1]),
        "drafted": text_of(run.tokens[position : position + 1]),
        "gap": None,
        "error": None,
        "tie": False,
    }
