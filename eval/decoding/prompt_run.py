"""The log of one decoded prompt: its output, and tokens and seconds of each speculation step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from eval.prompts import Prompt


@dataclass
class PromptRun:
    """One prompt decoded once, with a draft or without a draft (the baseline).

    The first token comes from the prefill. Later tokens come from speculation steps; each step is
    one target call. `tokens` has prefill_tokens + sum(block_tokens) entries, with an emitted EOS.
    """

    prompt_id: str
    category: str | None
    prompt_tokens: int
    tokens: list[int]
    prefill_seconds: float  # start -> first token emitted
    block_seconds: list[float]  # decode phase, one entry a speculation step
    block_tokens: list[int]  # tokens that the step emitted (baseline: all 1)
    drafted: list[int]  # tokens that the step drafted (baseline: all 0)
    accepted: list[int]  # drafted tokens that verification accepted
    late: int  # last steps that began too near max_new_tokens for a whole draft and one token more
    group: str | None = None  # prompts of one document or source share it; None: no other prompt
    prefill_tokens: int = 1  # tokens that the prefill emitted; several if an engine drafts for it
    free: list[int] = field(default_factory=list)  # drafted tokens that took no step of a model
    # mean log-probability of its tokens under the target, at temperature 1; sampled outputs only
    logprob: float | None = None

    @classmethod
    def of(
        cls,
        prompt: Prompt,
        prompt_tokens: int,
        seconds: Sequence[float],
        emitted: Sequence[Sequence[int]],
    ) -> Self:
        """A run from the seconds and tokens of each target call; the prefill is the first call.

        `drafted` and `accepted` are 0; the caller sets them.
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
            late=0,
        )

    @property
    def seconds(self) -> float:
        """Wall time of the whole output, with the prefill."""
        return self.prefill_seconds + sum(self.block_seconds)

    @property
    def whole_blocks(self) -> int:
        """The number of speculation steps that had room for a whole draft.

        Which steps these are does not depend on their own lengths. If only a last step that is cut
        did not count, long steps would be missing in the mean.
        """
        return len(self.block_tokens) - self.late

    def problem(self) -> str | None:
        """How drafted, accepted and emitted tokens of a step contradict each other, or None."""
        calls = len(self.block_tokens)
        steps = zip(self.block_tokens, self.drafted, self.accepted, strict=True)
        for i, (emitted, drafted, accepted) in enumerate(steps):
            cut = i == calls - 1 and self.late > 0
            # if a drafted token ends the text, no token of the target follows
            ended = i == calls - 1 and 1 <= emitted == accepted == drafted
            if not 0 <= accepted <= drafted:
                return f"step {i} accepted {accepted} of {drafted} drafted tokens"
            if not (emitted == accepted + 1 or ended or (cut and 1 <= emitted <= accepted)):
                return (
                    f"step {i} emitted {emitted} tokens with {accepted} accepted (one more is due)"
                )
        return None
