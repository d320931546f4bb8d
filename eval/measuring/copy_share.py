"""The share of the target's outputs that copies the prompt or an earlier part of the output.

N-gram speculation drafts copies without a model, so a report gives this share with the speed-up.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eval.measuring.intervals import Part, Share, share
from eval.measuring.runs import TargetOutput

COPY_TOKENS = 8  # the shortest copy; shorter runs repeat in any text


class CopyShare(Part):
    """Share of the outputs' tokens in copies of COPY_TOKENS tokens or more."""

    either: Share
    of_prompt: Share
    of_answer: Share = Field(description="of an earlier part of the output")


class TargetOutputs(Part):
    """The target's own outputs to the evaluation prompts."""

    copy_share: CopyShare = Field(
        description="share of the outputs' tokens in runs of at least 8 that occur earlier, "
        "in the prompt or in the output"
    )


def copied(prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.bool_]:
    """Whether each of T output tokens is in a copy of the prompt, or of the output (2, T).

    A copy is a run of COPY_TOKENS tokens of the output that occurs in the prompt, or that also
    begins earlier in the output. A repeated loop is therefore a copy of itself.
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


def described(answers: Sequence[TargetOutput]) -> TargetOutputs:
    """The copy share of the outputs."""
    flags = [(answer.group, copied(answer.prompt, answer.tokens)) for answer in answers]

    def share_of(sources: list[int]) -> Share:
        rows = [
            (group, float(flag[sources].any(axis=0).sum()), float(flag.shape[1]))
            for group, flag in flags
        ]
        return share("copy_share", rows)

    return TargetOutputs(
        copy_share=CopyShare(
            either=share_of([0, 1]), of_prompt=share_of([0]), of_answer=share_of([1])
        )
    )
