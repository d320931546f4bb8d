"""The raw log of an evaluation: what was decoded, agreed and timed, before any statistic."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from eval.decoding.prompt_run import PromptRun

Floats = NDArray[np.float64]


class Speculation(NamedTuple):
    """An engine's counts of speculation.

    drafts: target calls that verified a draft. drafted, accepted: draft tokens. accepted_at: drafts
    whose token was accepted, by position [draft length].
    """

    drafts: float
    drafted: float
    accepted: float
    accepted_at: list[float]

    @classmethod
    def sum(cls, counts: Iterable[Speculation]) -> Speculation:
        """The sum of counts that have one draft length."""
        drafts, drafted, accepted, accepted_at = zip(*counts, strict=True)
        by_position = [sum(at_position) for at_position in zip(*accepted_at, strict=True)]
        return cls(sum(drafts), sum(drafted), sum(accepted), by_position)


def check_runs(runs: Sequence[PromptRun], blocks: bool = True) -> None:
    """Raise ValueError, naming the prompt, for a log that contradicts itself."""
    prompt_ids: set[str] = set()
    for run in runs:
        problem = "it occurs twice" if run.prompt_id in prompt_ids else run.problem(blocks)
        if problem:
            raise ValueError(f"the log of prompt {run.prompt_id!r} cannot be used: {problem}")
        prompt_ids.add(run.prompt_id)


@dataclass(frozen=True)
class Answer:
    """The target's answer that alpha was taken on, in token ids; shared by all drafts.

    prompt: all that it was given. entropy: bits of the target's distribution that each token was
    drawn from, at temperature 1. before: the text that it continues, empty after a chat template.
    """

    prompt_id: str
    prompt: list[int]
    tokens: list[int]
    entropy: list[float]
    before: bytes = b""
    group: str | None = None


@dataclass
class Agreement:
    """sum_x min(p, q) summed over the positions of one target-generated answer, teacher-forced.

    At temperature 0 a position adds 1 where argmax p = argmax q, else 0. values: what each position
    added. guesses: argmax q at each, as a target id; -1 where nothing is proposed. prompt_tokens:
    None where only the answer is known.
    """

    prompt_id: str
    category: str | None
    alpha_sum: float
    positions: int
    values: list[float] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    group: str | None = None
    prompt_tokens: int | None = None


@dataclass
class StepCosts:
    """Seconds of isolated steps at the run's mean context length, batch size 1.

    A step is forward, head, and argmax or the warpers; the random draw is not timed. draft_block:
    what a draft takes once, however many tokens it has, besides a draft_step for each. rounds: what
    these are the medians of, a round of all steps each.
    """

    draft_step: float
    target_step: float
    target_verify: dict[int, float]  # key: number of tokens in the call, 1..max_gamma+1
    context_length: int
    draft_block: float = 0.0
    rounds: list[StepCosts] = field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        if self.target_step <= 0 or self.draft_step < 0 or min(self.target_verify.values()) <= 0:
            raise ValueError(f"step costs must be seconds, the target's above 0, got {self}")

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        verify = {int(width): seconds for width, seconds in fields["target_verify"].items()}
        rounds = [cls.from_json(costs) for costs in fields["rounds"]]
        return cls(**fields | {"target_verify": verify, "rounds": rounds})

    def interval(self, number: Callable[[StepCosts], float]) -> tuple[float, float] | None:
        """The 95% interval of a number made from step costs, of its median over the rounds.

        A round's steps were timed within the same moment, so what slows all of them cancels out of
        a ratio. It says nothing of slower hours. None of fewer than 6 rounds.
        """
        if len(self.rounds) < 6:
            return None
        values = sorted(map(number, self.rounds))
        beyond = int((len(values) - 1.96 * math.sqrt(len(values))) / 2)  # of Binomial(n, 1/2)
        middle = number(self)
        return min(values[beyond], middle), max(values[-1 - beyond], middle)

    @property
    def max_gamma(self) -> int:
        """The longest draft whose verification was timed."""
        return max(self.target_verify) - 1

    def draft(self, tokens: float | Floats) -> Floats:
        """Seconds of a draft of so many tokens; none takes none."""
        block = self.draft_block * np.minimum(tokens, 1.0)
        return np.asarray(block + self.draft_step * np.asarray(tokens), dtype=np.float64)

    def verify(self, tokens: float | Floats) -> Floats:
        """Seconds of a target call on `tokens` tokens; between timed widths, a straight line.

        Raises ValueError for a width beyond the widest one timed.
        """
        widths = np.array(sorted(self.target_verify), dtype=np.float64)
        widest = float(np.max(tokens))
        if widest > widths[-1] + 1e-9:
            raise ValueError(
                f"target calls were timed up to {int(widths[-1])} tokens, but {widest:g} are "
                f"needed; time them up to gamma + 1"
            )
        seconds = np.array([self.target_verify[int(width)] for width in widths])
        return np.asarray(np.interp(tokens, widths, seconds), dtype=np.float64)


# Fields of a draft in the report that only the reference decoder can measure, with the reasons.
REFERENCE_ONLY = {
    **dict.fromkeys(("alpha", "atlas"), "it gives no distributions: see --engine torch"),
    **dict.fromkeys(
        ("costs", "c", "verify_ratio", "predicted_speedup", "decode_efficiency", "payoff"),
        "its single steps are not timed: see --engine torch",
    ),
}


@dataclass(frozen=True)
class DraftLog:
    """One draft on the prompts of a run; `runs` and `baseline` are interleaved, prompt by prompt.

    What an engine cannot measure is None, and `missing` says why: report field -> reason.
    gamma: the draft length chosen for this draft. memory: {target_bytes, draft_bytes,
    kv_bytes_per_token: {target, draft}} in the form measured. lossless: the ledger of greedy texts.
    by_load: points of eval/engines/load.py. counters: a server's own.
    """

    name: str
    path: str
    form: str
    vocabulary: dict[str, Any]
    runs: list[PromptRun]
    baseline: list[PromptRun]
    lossless: dict[str, Any]
    gamma: int | None
    gamma_policy: str
    agreement: list[Agreement] | None = None
    costs: StepCosts | None = None
    memory: dict[str, Any] | None = None
    full_form_bytes: int | None = None
    by_load: list[dict[str, Any]] = field(default_factory=list)
    counters: dict[str, Any] | None = None
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunLog:
    """What all drafts of a run have in common; decoding and prompts as in the report.

    over_stock_generate: tokens/s of the baseline over stock `generate`, {mean, ci95, n}, None where
    the baseline is stock. answers: the texts that alpha was taken on. spell: bytes of a token id.
    special: ids that are no text. target_quantization: of the file the target's weights came from,
    None where they were whole. environment: fields of the report's `environment`.
    """

    target: str
    engine: str
    device: str
    dtype: str
    decoding: dict[str, Any]
    prompts: dict[str, Any]
    provenance: dict[str, Any]
    over_stock_generate: Any = None
    answers: list[Answer] = field(default_factory=list)
    spell: Callable[[int], bytes] = lambda token: b""
    special: frozenset[int] = frozenset()
    target_quantization: str | None = None
    environment: dict[str, Any] | None = None
