"""How much of the target's responses is copied from the prompt or from the response before.

N-gram speculation drafts copies without a model, so a speed-up is read beside their share.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eval.measuring.intervals import Part, Share, share
from eval.measuring.runs import Answer

COPY_TOKENS = 8  # in a row that occur earlier as well: shorter runs are the language's own
COPIED_LITTLE, COPIED_MUCH = 0.1, 0.3  # of a response, for classes
COPY_CLASSES = (  # the least copied first
    f"below {COPIED_LITTLE:.0%} copied",
    f"{COPIED_LITTLE:.0%} to {COPIED_MUCH:.0%} copied",
    f"above {COPIED_MUCH:.0%} copied",
)


class CopyShare(Part):
    """Share of the responses' tokens in copies of COPY_TOKENS tokens or more."""

    either: Share
    of_prompt: Share
    of_answer: Share = Field(description="of an earlier part of the response")


class Answers(Part):
    """The target's own responses to the evaluation prompts."""

    copy_share: CopyShare = Field(
        description="share of the responses' tokens in runs of at least 8 that occur earlier, "
        "in the prompt or in the response"
    )


def copied(prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.bool_]:
    """(2, T) for the response's tokens: in a copy of the prompt, in a copy of the response before.

    A copy is a run of COPY_TOKENS tokens of the response that occurs in the prompt, or that begins
    earlier in the response; a loop copies itself.
    """
    flags = np.zeros((2, len(answer)), dtype=bool)
    starts = range(len(prompt) - COPY_TOKENS + 1)
    in_prompt = {tuple(prompt[start : start + COPY_TOKENS]) for start in starts}
    in_answer = set[tuple[int, ...]]()
    for start in range(len(answer) - COPY_TOKENS + 1):
        run = tuple(answer[start : start + COPY_TOKENS])
        flags[0, start : start + COPY_TOKENS] |= run in in_prompt
        flags[1, start : start + COPY_TOKENS] |= run in in_answer
        in_answer.add(run)
    return flags


def copy_classes(answers: Sequence[Answer]) -> dict[str, str]:
    """Prompt id -> how much of its response is copied, in words."""
    classes = {}
    for answer in answers:
        mean = copied(answer.prompt, answer.tokens).any(axis=0).mean()
        level = int(mean >= COPIED_LITTLE) + int(mean > COPIED_MUCH)
        classes[answer.prompt_id] = COPY_CLASSES[level]
    return classes


def described(answers: Sequence[Answer]) -> Answers | None:
    """The copy share of the responses; None where there are none."""
    if not answers:
        return None
    flags = [(answer.group, copied(answer.prompt, answer.tokens)) for answer in answers]

    def share_of(sources: list[int]) -> Share:
        rows = [
            (group, float(flag[sources].any(axis=0).sum()), float(flag.shape[1]))
            for group, flag in flags
        ]
        return share("copy_share", rows)

    return Answers(
        copy_share=CopyShare(
            either=share_of([0, 1]), of_prompt=share_of([0]), of_answer=share_of([1])
        )
    )
