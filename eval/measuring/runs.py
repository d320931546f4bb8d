"""The raw logs of an evaluation: outputs, acceptance and times, before any statistic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple

from eval.decoding.prompt_run import PromptRun
from eval.measuring.cost import StepCosts
from eval.measuring.intervals import StartError


class Speculation(NamedTuple):
    """An engine's counts of speculation.

    drafts: the number of target calls that verified draft tokens. drafted: the number of draft
    tokens. accepted: the number of accepted draft tokens. accepted_at [draft length]: at each
    position in the draft, the number of calls that accepted the token there.
    """

    drafts: float
    drafted: float
    accepted: float
    accepted_at: list[float]

    @classmethod
    def sum(cls, counts: Iterable[Speculation]) -> Speculation:
        """The sum of counts. A shorter draft accepts nothing at later positions."""
        drafts, drafted, accepted, accepted_at = zip(*counts, strict=True)
        by_position = [sum(at) for at in zip_longest(*accepted_at, fillvalue=0.0)]
        return cls(sum(drafts), sum(drafted), sum(accepted), by_position)


@dataclass(frozen=True)
class TargetOutput:
    """An output of the target, on which the acceptance rates of all drafts are measured.

    prompt, tokens: token ids.
    """

    prompt_id: str
    prompt: list[int]
    tokens: list[int]
    group: str | None = None


@dataclass
class Agreement:
    """How far target and draft agree on one output, teacher-forced.

    alpha_sum: over positions, of sum_x min(p, q); at temperature 0, 1 if the argmaxes agree.
    """

    prompt_id: str
    category: str | None
    alpha_sum: float
    positions: int
    group: str | None = None
    prompt_tokens: int | None = None


# The policy of a draft length where a longer one was asked for.
AT_LONGEST = "fixed at the longest of this draft"
# Fields of a draft's report that only the reference decoder can measure, and why others cannot.
REFERENCE_ONLY = {
    "alpha": "not measured in an engine; use --engine torch",
    **dict.fromkeys(
        ("costs", "c", "verify_ratio", "predicted_speedup", "decode_efficiency", "payoff"),
        "single steps are not timed in an engine; use --engine torch",
    ),
}


@dataclass(frozen=True)
class DraftLog:
    """One draft on the prompts of a run; `runs` and `baseline` have the same prompts.

    about: the fields of its report that are not computed from the log. agreement, costs: None if
    an engine cannot measure them. again: runs of all prompts by the servers, started again:
    (without the draft, with it); else empty. started: of these servers, as in `measure`. missing:
    why a field of the report was not measured.
    """

    name: str
    about: dict[str, Any]
    runs: list[PromptRun]
    baseline: list[PromptRun]
    agreement: list[Agreement] | None = None
    costs: StepCosts | None = None
    again: list[tuple[PromptRun, PromptRun]] = field(default_factory=list)
    started: StartError | None = None
    missing: dict[str, str] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The draft's spec."""
        return str(self.about["path"])

    @property
    def gamma(self) -> int | None:
        """The draft length; None if a server does not report it."""
        gamma: int | None = self.about["gamma"]
        return gamma


@dataclass(frozen=True)
class RunLog:
    """What all drafts of a run have in common.

    about: the fields of the report that are not computed from logs. over_stock_generate: `Measured`
    tokens/s of the baseline / tokens/s of transformers' `generate`; None outside the reference
    decoder.
    """

    about: dict[str, Any]
    over_stock_generate: Any = None
    answers: list[TargetOutput] = field(default_factory=list)
