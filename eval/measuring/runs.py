"""The raw log of an evaluation: what was decoded, agreed and timed, before any statistic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from eval.prompts import Prompt

Floats = NDArray[np.float64]


@dataclass
class PromptRun:
    """One prompt decoded once, with a draft or without (the baseline).

    Decoded alone, its seconds are its own; in a batch they are those of all rows together. The
    first token comes from the prefill, each later one from a *block*: one target call.
    `tokens` has prefill_tokens + sum(block_tokens) entries, EOS included where it was emitted.
    """

    prompt_id: str
    category: str | None
    prompt_tokens: int
    tokens: list[int]
    prefill_seconds: float  # start -> first token emitted
    block_seconds: list[float]  # decode phase, one entry a target call
    block_tokens: list[int]  # tokens emitted by that call (baseline: all 1)
    drafted: list[int]  # tokens drafted for that call (baseline: all 0)
    accepted: list[int]  # of these, how many verification accepted
    last_truncated: bool  # the last block was, or could have been, cut by max_new_tokens
    group: str | None = None  # prompts of one document or source share it; None: its own
    prefill_tokens: int = 1  # tokens that the prefill emitted: more where an engine drafts for it
    free: list[int] = field(default_factory=list)  # of `drafted`, how many took no draft step

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Self:
        return cls(**fields)

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        prompt_tokens: int,
        seconds: Sequence[float],
        emitted: Sequence[Sequence[int]],
    ) -> Self:
        """From the seconds and tokens of target calls, the prefill first.

        `drafted` and `accepted` are left at 0 for the caller to fill in.
        """
        return cls(
            prompt_id=prompt.id,
            category=prompt.category,
            group=prompt.group,
            prompt_tokens=prompt_tokens,
            tokens=[token for block in emitted for token in block],
            prefill_tokens=len(emitted[0]),
            prefill_seconds=seconds[0],
            block_seconds=list(seconds[1:]),
            block_tokens=[len(block) for block in emitted[1:]],
            drafted=[0] * len(emitted[1:]),
            accepted=[0] * len(emitted[1:]),
            last_truncated=False,
        )

    @property
    def seconds(self) -> float:
        """Wall time of the whole answer, prefill included."""
        return self.prefill_seconds + sum(self.block_seconds)

    @property
    def whole_blocks(self) -> int:
        """How many blocks count towards tau: all but a last one that was cut."""
        return len(self.block_tokens) - int(self.last_truncated and bool(self.block_tokens))

    def problem(self, blocks: bool) -> str | None:
        """How it contradicts itself; blocks: whether drafted and accepted tokens are known."""
        calls, first = len(self.block_tokens), self.prefill_tokens
        if not len(self.block_seconds) == len(self.drafted) == len(self.accepted) == calls:
            return "block_seconds, block_tokens, drafted and accepted differ in length"
        if first < 1 or len(self.tokens) != first + sum(self.block_tokens):
            return f"{len(self.tokens)} tokens, but {first} + {sum(self.block_tokens)} were emitted"
        if self.prefill_seconds <= 0 or any(seconds <= 0 for seconds in self.block_seconds):
            return "a time is zero or negative"
        counts = zip(self.block_tokens, self.drafted, self.accepted, strict=True)
        for i, (emitted, drafted, accepted) in enumerate(counts if blocks else ()):
            cut = i == calls - 1 and self.last_truncated
            # a drafted token that ends the text is the end of its draft, and nothing follows it
            ended = i == calls - 1 and 1 <= emitted == accepted == drafted
            if not 0 <= accepted <= drafted:
                return f"block {i} accepted {accepted} of {drafted} drafted tokens"
            if not (emitted == accepted + 1 or ended or (cut and 1 <= emitted <= accepted)):
                return (
                    f"block {i} emitted {emitted} tokens with {accepted} accepted (one more is due)"
                )
        return None


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
    is_function, passes: of an answer to a prompt that asks for a Python function; None where it
    does not, or was not run.
    """

    prompt_id: str
    prompt: list[int]
    tokens: list[int]
    entropy: list[float]
    before: bytes = b""
    group: str | None = None
    is_function: bool | None = None
    passes: bool | None = None


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
        if self.target_step <= 0 or self.draft_step < 0 or min(self.target_verify.values()) <= 0:
            raise ValueError(f"step costs must be seconds, the target's above 0, got {self}")
        seconds = np.array([self.target_verify[int(width)] for width in widths])
        return np.asarray(np.interp(tokens, widths, seconds), dtype=np.float64)


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
    None where they were whole.
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
