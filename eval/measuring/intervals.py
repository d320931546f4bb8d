"""A measured number and its interval: Student's t over prompts, or over their groups.

A measured number is a ratio of sums over prompts. Prompts are what varies, not tokens: the tokens
of one answer depend on each other. Prompts that share a group count as one: a cluster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Generic, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator
from scipy.special import stdtrit

from eval.measuring.runs import Floats

FEWEST_CLUSTERS = 10  # of fewer no interval covers as it says (docs/lab-notes.md)

T = TypeVar("T")
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Quantity = Annotated[float, Field(ge=0)]


class NothingToMeasure(ValueError):
    """No prompt has what a number is computed from."""


class Part(BaseModel):
    """A part of a report: every number finite, fields that a newer version added passed over."""

    model_config = ConfigDict(
        allow_inf_nan=False,
        from_attributes=True,  # a Measured may stand where a Share is asked for, and is checked
        revalidate_instances="always",  # what was changed since is checked again
        validate_by_name=True,  # `from`, `class` and `schema` cannot be names in Python
        validate_by_alias=True,
        serialize_by_alias=True,
    )


class Measured(Part):
    """A number, its interval, and the prompts it rests on."""

    mean: float
    ci95: tuple[float, float] | None = Field(
        description="95%, Student's t over prompts, or over their documents where they name a "
        f"group; none below {FEWEST_CLUSTERS} of these. n is the number of prompts."
    )
    n: Positive
    clusters: Positive | None = Field(
        None, description="documents where prompts name a group, else prompts"
    )
    freedom: float | None = Field(None, description="of the interval's t")
    range: tuple[float, float] | None = Field(
        None, description="the lowest and the highest of a cluster alone"
    )

    def __format__(self, form: str) -> str:
        """`0.51 [0.49,0.53]` with the form `.2f`; `0.51 (0.40 to 0.60)`, the range of too few."""
        text = f"{self.mean:{form}}"
        if self.ci95:
            low, high = self.ci95
            return f"{text} [{low:{form}},{high:{form}}]"
        return f"{text} ({self.range[0]:{form}} to {self.range[1]:{form}})" if self.range else text

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval; without one nothing is ruled out."""
        return self.ci95 or (-math.inf, math.inf)

    @model_validator(mode="after")
    def _interval_runs_forwards(self) -> Self:
        if self.ci95 and self.ci95[0] > self.ci95[1]:
            raise ValueError(f"ci95 runs backwards: {list(self.ci95)}")
        return self


class Share(Measured):
    """A measured share."""

    mean: float = Field(ge=0, le=1)


class Both(Part, Generic[T]):
    """A number without a draft and with it."""

    baseline: T
    speculative: T


def ratio(totals: Floats) -> Floats:
    """The first column's total over that of the second."""
    return totals[..., 0] / totals[..., 1]


# An interval's two ends from mean, standard error, quantile of Student's t, and clusters
Ends = Callable[[float, float, float, int], tuple[float, float]]


def around(mean: float, error: float, t: float, clusters: int) -> tuple[float, float]:
    """The interval of a number that may have either sign."""
    return mean - t * error, mean + t * error


def above_zero(mean: float, error: float, t: float, clusters: int) -> tuple[float, float]:
    """The interval of a positive number, on the scale of its logarithm."""
    factor = math.exp(t * error / mean) if error else 1.0
    return mean / factor, mean * factor


def within_one(mean: float, error: float, t: float, clusters: int) -> tuple[float, float]:
    """The interval of a share: Wilson's, for as many independent trials as have this error.

    A share of 0 or 1 does not vary, and so does not show its error: a cluster counts as one trial.
    """
    variance = mean * (1 - mean)
    width = t**2 * (error**2 / variance if variance else 1 / clusters)
    centre = (mean + width / 2) / (1 + width)
    half = math.sqrt(width * variance + width**2 / 4) / (1 + width)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _error(deviations: Floats) -> tuple[float, float]:
    """The jackknife's standard error, and its degrees of freedom.

    deviations: (clusters,), how much the number changes without each cluster. The error is itself
    uncertain if a few clusters make most of it. Its degrees of freedom are therefore
    Satterthwaite's, from the kurtosis: 2n / (kurtosis - 1), n - 1 at most.
    """
    n = len(deviations)
    squares = (deviations - deviations.mean()) ** 2
    freedom = n - 1.0
    if squares.any():
        kurtosis = n * (squares**2).sum() / squares.sum() ** 2
        freedom = 2 * n / max(kurtosis - 1, 2 * n / (n - 1))
    return math.sqrt((n - 1) / n * (deviations**2).sum()), freedom


def measure(
    name: str,
    rows: Sequence[Sequence[float]],
    statistic: Callable[[Floats], Floats] = ratio,
    groups: Sequence[str | None] | None = None,
    ends: Ends = above_zero,
) -> Measured:
    """`statistic` of the column totals, with its 95% interval.

    rows: K columns for each prompt. statistic: (..., K) totals -> (...) values. groups: the group
    of each row; rows of one group are one cluster, a row without a group is its own. ends: the
    interval by the values that the number can take. Raises `NothingToMeasure` without rows,
    ValueError where the result is not a finite number.
    """
    if not rows:
        raise NothingToMeasure(f"no prompt holds anything to measure {name} on")
    sums: dict[str | int, Floats] = {}
    for i, (row, group) in enumerate(zip(rows, groups or [None] * len(rows), strict=True)):
        key = i if group is None else group
        sums[key] = sums.get(key, 0.0) + np.asarray(row, dtype=np.float64)
    columns = np.array(list(sums.values()))
    totals, clusters = columns.sum(axis=0), len(columns)
    enough = clusters >= FEWEST_CLUSTERS
    with np.errstate(divide="ignore", invalid="ignore"):
        mean, by_cluster = float(statistic(totals)), statistic(columns)
        deviations = statistic(totals - columns) - mean if enough else np.zeros(0)
    if not (math.isfinite(mean) and np.isfinite(deviations).all()):
        raise ValueError(
            f"{name} is not a finite number ({mean} over all prompts): a time or a count in the "
            f"log is zero or missing"
        )
    by_cluster = by_cluster[np.isfinite(by_cluster)]
    ci95 = freedom = None
    if enough:
        error, freedom = _error(deviations)
        ci95 = ends(mean, error, float(stdtrit(freedom, 0.975)), clusters)
    return Measured(
        mean=mean,
        ci95=ci95,
        freedom=freedom,
        n=len(rows),
        clusters=clusters,
        range=(by_cluster.min(), by_cluster.max()) if len(by_cluster) else None,
    )


def share(name: str, rows: Sequence[tuple[str | None, float, float]]) -> Share:
    """Sum over count of one row (group, sum, count) a prompt; each sum within 0 and its count."""
    sums = [(min(max(total, 0.0), count), count) for _, total, count in rows]
    groups = [group for group, _, _ in rows]
    return Share.model_validate(measure(name, sums, groups=groups, ends=within_one))
