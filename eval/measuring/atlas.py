"""The rejection atlas: where a draft is rejected, and which tokens it confuses.

Its source is the teacher-forced log: an `Agreement` and an `TargetOutput` for each prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from eval.measuring.intervals import Part, Positive, Share, share
from eval.measuring.runs import Agreement, RunLog, TargetOutput

EXAMPLES = 12
ENTROPY_EDGES = (0.0, 0.1, 0.5, 1.0, 2.0, 4.0)  # bits
HEAT_TOKENS = 16  # the shortest output for a heat map


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


class HeatMap(Part):
    """One output of the target, token by token."""

    prompt: str
    alpha: float
    tokens: list[str]
    values: list[float] = Field(description="acceptance of each token")
    guesses: list[str] = Field(description="the token that the draft prefers")


class Atlas(Part):
    """Where a draft is rejected, and which tokens it confuses."""

    by_output_position: list[Bucket]
    by_entropy: list[Bucket] = Field(description="bits of the target's distribution")
    confusions: list[Confusion] = Field(description="the most frequent, acceptance below 0.5")
    heat_map: list[HeatMap]


def build_atlas(agreements: Sequence[Agreement], run: RunLog, shown: Sequence[str]) -> Atlas:
    """The `atlas` block of a draft. shown: ids of the prompts of the heat map."""
    by_prompt = {answer.prompt_id: answer for answer in run.answers}
    answers = [by_prompt[agreement.prompt_id] for agreement in agreements]
    pieces = [
        [b"" if t in run.special else run.spell(t) for t in answer.tokens] for answer in answers
    ]

    def spelt(guess: int) -> str:
        return text_of(run.spell(guess) if guess >= 0 else b"")

    heat_maps = {
        agreement.prompt_id: HeatMap(
            prompt=agreement.prompt_id,
            alpha=agreement.alpha_sum / agreement.positions,
            tokens=[text_of(piece) for piece in spelling],
            values=[round(value, 3) for value in agreement.values],
            guesses=[spelt(guess) for guess in agreement.guesses],
        )
        for agreement, spelling in zip(agreements, pieces, strict=True)
        if agreement.prompt_id in shown
    }
    return Atlas(
        by_output_position=_by_output_position(agreements),
        by_entropy=_by_entropy(agreements, answers),
        confusions=_confusions(agreements, pieces, spelt),
        heat_map=[heat_maps[prompt] for prompt in shown],
    )


def _confusions(
    agreements: Sequence[Agreement], pieces: Sequence[list[bytes]], spelt: Callable[[int], str]
) -> list[Confusion]:
    """The EXAMPLES most frequent pairs of the target's token and the draft's."""
    counts = Counter(
        (piece, guess)
        for agreement, spelling in zip(agreements, pieces, strict=True)
        for piece, guess, value in zip(spelling, agreement.guesses, agreement.values, strict=True)
        if value < 0.5
    )
    return [
        Confusion(target=text_of(piece), draft=spelt(guess), count=count)
        for (piece, guess), count in counts.most_common(EXAMPLES)
    ]


def text_of(piece: bytes) -> str:
    """A token's bytes as text; incomplete characters become U+FFFD."""
    return piece.decode("utf-8", "replace")


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


def telling_prompts(agreements: Sequence[Agreement]) -> list[str]:
    """The prompts whose outputs have the lowest, the middle and the highest acceptance rate."""
    long = [a for a in agreements if a.positions >= HEAT_TOKENS]
    order = [a.prompt_id for a in sorted(long, key=lambda a: a.alpha_sum / a.positions)]
    return list(dict.fromkeys([order[0], order[len(order) // 2], order[-1]])) if order else []
