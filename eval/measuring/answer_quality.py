"""How much of the target's outputs is copied.

Copies are what n-gram speculation drafts for nothing, so a speed-up is read beside their share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eval.measuring.intervals import Part, Share, share
from eval.measuring.runs import Answer, RunLog

COPY_TOKENS = 8  # in a row that stand earlier as well: shorter ones are the language's own
COPIED_LITTLE, COPIED_MUCH = 0.1, 0.3  # of an answer, for categories
COPY_CATEGORIES = (  # the least copied first
    f"below {COPIED_LITTLE:.0%} copied",
    f"{COPIED_LITTLE:.0%} to {COPIED_MUCH:.0%} copied",
    f"above {COPIED_MUCH:.0%} copied",
)


class CopyShare(Part):
    """Share of the answers' tokens in copies of COPY_TOKENS tokens or more."""

    either: Share
    of_prompt: Share
    of_answer: Share = Field(description="of what stands earlier in the answer")


class Answers(Part):
    """The target's own answers to the evaluation prompts."""

    copy_share: CopyShare = Field(
        description="share of the answers' tokens in stretches of at least 8 that stand earlier, "
        "in the prompt or in the answer"
    )


def copied(prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.bool_]:
    """(2, T) for the answer's tokens: in a copy of the prompt, in a copy of the answer before.

    A copy is a stretch of COPY_TOKENS tokens of the answer that stands in the prompt, or that
    begins earlier in the answer; a loop copies itself.
    """
    flags = np.zeros((2, len(answer)), dtype=bool)
    of_prompt, of_answer = _stretches(prompt), set[tuple[int, ...]]()
    for at in range(len(answer) - COPY_TOKENS + 1):
        stretch = tuple(answer[at : at + COPY_TOKENS])
        flags[0, at : at + COPY_TOKENS] |= stretch in of_prompt
        flags[1, at : at + COPY_TOKENS] |= stretch in of_answer
        of_answer.add(stretch)
    return flags


def _stretches(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    starts = range(len(tokens) - COPY_TOKENS + 1)
    return {tuple(tokens[at : at + COPY_TOKENS]) for at in starts}


def copy_categories(answers: Sequence[Answer]) -> dict[str, str]:
    """Prompt id -> how much of its answer is copied, in words."""
    categories = {}
    for answer in answers:
        part = copied(answer.prompt, answer.tokens).any(axis=0).mean()
        place = int(part >= COPIED_LITTLE) + int(part > COPIED_MUCH)
        categories[answer.prompt_id] = COPY_CATEGORIES[place]
    return categories


def described(run: RunLog) -> Answers | None:
    """`Answers` of a run's log; None where the log holds no answers."""
    if not run.answers:
        return None
    flags = [copied(answer.prompt, answer.tokens) for answer in run.answers]

    def share_of(name: str, parts: list[int]) -> Share:
        rows = [
            (answer.group, float(flag[parts].any(axis=0).sum()), float(flag.shape[1]))
            for answer, flag in zip(run.answers, flags, strict=True)
        ]
        return share(name, rows)

    return Answers(
        copy_share=CopyShare(
            either=share_of("copy_share", [0, 1]),
            of_prompt=share_of("copy_share of the prompt", [0]),
            of_answer=share_of("copy_share of the answer", [1]),
        ),
    )
