"""The rejection atlas: where a draft is rejected, and which tokens it confuses.

Its source is the teacher-forced log: an `Agreement` and an `TargetOutput` for each prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from eval.measuring.intervals import Part, Positive, Share, share
from eval.measuring.runs import Agreement, RunLog, TargetOutput

EXAMPLES = 12
ENTROPY_EDGES = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)  # bits


class Confusion(Part):
    """A token of the target, and the likeliest token of the draft at its position."""

    target: str
    draft: str
    count: Positive


class Bucket(Part):
    """The acceptance rate between two bounds; `to` null: no upper bound."""

    low: Annotated[float, Field(alias="from")]
    high: Annotated[float | None, Field(alias="to")]
    positions: Positive
    alpha: Share


class Atlas(Part):
    """Where a draft is rejected, and which tokens it confuses."""

    by_output_position: list[Bucket]
    by_entropy: list[Bucket] = Field(description="bits of the target's distribution")
    confusions: list[Confusion] = Field(description="the most frequent, acceptance below 0.5")


def build_atlas(agreements: Sequence[Agreement], run: RunLog) -> Atlas:
    """The `atlas` block of a draft."""
    by_prompt = {answer.prompt_id: answer for answer in run.answers}
    answers = [by_prompt[agreement.prompt_id] for agreement in agreements]
    return Atlas(
        by_output_position=_by_output_position(agreements),
        by_entropy=_by_entropy(agreements, answers),
        confusions=_confusions(agreements, answers, run),
    )


def _confusions(
    agreements: Sequence[Agreement], answers: Sequence[TargetOutput], run: RunLog
) -> list[Confusion]:
    """The EXAMPLES most frequent pairs of the target's token and the draft's."""

    def text_of(token: int) -> str:
        """A token's text: incomplete characters become U+FFFD; "" if nothing was proposed."""
        return run.spell(token).decode("utf-8", "replace") if token >= 0 else ""

    counts = Counter(
        (b"" if token in run.special else run.spell(token), guess)
        for agreement, answer in zip(agreements, answers, strict=True)
        for token, guess, value in zip(
            answer.tokens, agreement.guesses, agreement.values, strict=True
        )
        if value < 0.5
    )
    return [
        Confusion(target=piece.decode("utf-8", "replace"), draft=text_of(guess), count=count)
        for (piece, guess), count in counts.most_common(EXAMPLES)
    ]


def _buckets(
    agreements: Sequence[Agreement],
    edges: Sequence[tuple[float, float | None]],
    quantities: Sequence[Sequence[float]],
) -> list[Bucket]:
    """The acceptance rate by bucket, without empty buckets.

    edges: (low, high) of each bucket. quantities: of each position of each output.
    """
    sums = []  # of each output: group, sum of values by bucket, positions by bucket
    for agreement, quantity in zip(agreements, quantities, strict=True):
        bucket = np.searchsorted([low for low, _ in edges], quantity, side="right") - 1
        total = np.bincount(bucket, agreement.values, len(edges))
        sums.append((agreement.group, total, np.bincount(bucket, minlength=len(edges))))
    buckets = []
    for i, (low, high) in enumerate(edges):
        rows = [(group, float(total[i]), float(n[i])) for group, total, n in sums if n[i]]
        if rows:
            positions = int(sum(n for _, _, n in rows))
            alpha = share("alpha of a bucket", rows)
            buckets.append(Bucket(low=low, high=high, positions=positions, alpha=alpha))
    return buckets


def _by_output_position(agreements: Sequence[Agreement]) -> list[Bucket]:
    """The acceptance rate at output tokens 1-8, 9-16, 17-32, and so on by doubling."""
    ends = [8]
    while ends[-1] < max(len(a.values) for a in agreements):
        ends.append(2 * ends[-1])
    edges = list(zip([1, *(end + 1 for end in ends[:-1])], ends, strict=True))
    return _buckets(agreements, edges, [range(1, len(a.values) + 1) for a in agreements])


def _by_entropy(agreements: Sequence[Agreement], answers: Sequence[TargetOutput]) -> list[Bucket]:
    """The acceptance rate by the entropy of the target's distribution."""
    edges = list(zip(ENTROPY_EDGES, [*ENTROPY_EDGES[1:], None], strict=True))
    return _buckets(agreements, edges, [answer.entropy for answer in answers])
