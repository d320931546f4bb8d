"""A measured number and its interval: Student's t over prompts, or over groups of prompts.

A measured number is a ratio of sums over prompts. Tokens of one output depend on each other, so
prompts are the samples. Prompts that share a group are one sample, a cluster. A server's speed also
differs between its starts; if servers were started again, the intervals of speeds cover this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, computed_field
from scipy.special import stdtrit

from align.errors import UserError

FEWEST_CLUSTERS = 10  # intervals of fewer clusters cover less than 95% (docs/lab-notes.md)

T = TypeVar("T")
Floats = NDArray[np.float64]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Quantity = Annotated[float, Field(ge=0)]


class NothingToMeasure(UserError):
    """No prompt has the values from which a number is computed."""


class Part(BaseModel):
    """A part of a report. All numbers are finite; fields of a newer version are ignored."""

    model_config = ConfigDict(
        allow_inf_nan=False,
        from_attributes=True,  # a Measured is accepted for a Share, and checked
        revalidate_instances="always",  # instances may have changed since they were checked
        validate_by_name=True,  # `from`, `class` and `schema` cannot be names in Python
        validate_by_alias=True,
        serialize_by_alias=True,
    )


class Measured(Part):
    """A number, its interval, and the number of prompts."""

    mean: float
    ci95: tuple[float, float] | None = Field(
        description="95%, Student's t over prompts, or over their documents where they name a "
        f"group; none below {FEWEST_CLUSTERS} of these. n is the number of prompts. Speeds of "
        "servers that were started again: over starts, too."
    )
    n: Positive
    clusters: Positive | None = Field(
        None, description="documents where prompts name a group, else prompts"
    )
    freedom: float | None = Field(None, description="of the interval's t over prompts")
    over_starts: Quantity | None = Field(
        None, description="half-width of the interval over starts alone; null: not covered"
    )
    range: tuple[float, float] | None = Field(
        None, description="the lowest and the highest of a cluster alone"
    )

    def __format__(self, form: str) -> str:
        """`0.51 [0.49,0.53]` for `.2f`; without an interval the range, `0.51 (0.40 to 0.60)`."""
        text = f"{self.mean:{form}}"
        if self.ci95:
            low, high = self.ci95
            return f"{text} [{low:{form}},{high:{form}}]"
        return f"{text} ({self.range[0]:{form}} to {self.range[1]:{form}})" if self.range else text

    @property
    def bounds(self) -> tuple[float, float]:
        """The interval; (-inf, inf) if there is none."""
        return self.ci95 or (-math.inf, math.inf)


class Share(Measured):
    """A measured share."""

    mean: float = Field(ge=0, le=1)


class Both(Part, Generic[T]):
    """A number without a draft (`baseline`) and with a draft."""

    baseline: T
    speculative: T


class StartError(NamedTuple):
    """The standard error of a server's speed by its starts, as a share; its degrees of freedom."""

    error: float
    freedom: float


class Starts(Part):
    """How far a server's speed differs between its starts, on the same prompts."""

    seconds_per_token: dict[str, list[Annotated[float, Field(gt=0)]]] = Field(
        description="of each start, by server; `target`: the server without a draft"
    )

    @computed_field(description="starts beyond each server's first")  # type: ignore[prop-decorator]
    @property
    def freedom(self) -> int:
        return sum(len(starts) - 1 for starts in self.seconds_per_token.values())

    @computed_field(  # type: ignore[prop-decorator]
        description="standard deviation of a server's speed between starts, as a share of the "
        "speed, pooled over servers"
    )
    @property
    def deviation(self) -> float:
        logs = [np.log(starts) for starts in self.seconds_per_token.values()]
        squares = sum(float(((one - one.mean()) ** 2).sum()) for one in logs)
        return math.sqrt(squares / self.freedom)

    def behind(self, starts: int) -> StartError:
        """The error of a server's mean speed over so many starts."""
        return StartError(self.deviation / math.sqrt(starts), self.freedom)


def ratio(totals: Floats) -> Floats:
    """The first column's total divided by the second's: (..., 2) -> (...)."""
    return totals[..., 0] / totals[..., 1]


# (mean, standard error, quantile of Student's t, clusters) -> the two ends of the interval
Ends = Callable[[float, float, float, int], tuple[float, float]]


def around(mean: float, error: float, t: float, clusters: int) -> tuple[float, float]:
    """The interval of a number that may have either sign."""
    return mean - t * error, mean + t * error


def above_zero(mean: float, error: float, t: float, clusters: int) -> tuple[float, float]:
    """The interval of a positive number, symmetric in its logarithm."""
    factor = math.exp(t * error / mean) if error else 1.0
    return mean / factor, mean * factor


def within_one(mean: float, error: float, t: float, clusters: int) -> tuple[float, float]:
    """The interval of a share: Wilson's, for the number of independent trials that have this error.

    A share of 0 or 1 has no measured error, so each cluster counts as one trial.
    """
    variance = mean * (1 - mean)
    width = t**2 * (error**2 / variance if variance else 1 / clusters)
    centre = (mean + width / 2) / (1 + width)
    half = math.sqrt(width * variance + width**2 / 4) / (1 + width)
    return max(centre - half, 0.0), min(centre + half, 1.0)


def _error(deviations: Floats) -> tuple[float, float]:
    """The jackknife's standard error, and the degrees of freedom of this error.

    deviations: (clusters,), the change of the number without each cluster. If a few clusters cause
    most of the error, the error is uncertain. The degrees of freedom are therefore Satterthwaite's,
    from the kurtosis: 2n / (kurtosis - 1), at most n - 1.
    """
    n = len(deviations)
    squares = (deviations - deviations.mean()) ** 2
    freedom = n - 1.0
    if squares.any():
        kurtosis = n * (squares**2).sum() / squares.sum() ** 2
        freedom = 2 * n / max(kurtosis - 1, 2 * n / (n - 1))
    return math.sqrt((n - 1) / n * (deviations**2).sum()), freedom


def _columns(servers: Iterable[Sequence[int]], count: int) -> Floats:
    """A row for each server: 1 in its columns (of `count`), else 0."""
    return np.array([[float(i in columns) for i in range(count)] for columns in servers])


def measure(
    name: str,
    rows: Sequence[Sequence[float]],
    statistic: Callable[[Floats], Floats] = ratio,
    groups: Sequence[str | None] | None = None,
    ends: Ends = above_zero,
    started: StartError | None = None,
    servers: Iterable[Sequence[int]] = (),
) -> Measured:
    """`statistic` of the column totals, with its 95% interval from FEWEST_CLUSTERS clusters on.

    rows: the columns of each prompt. statistic: (..., columns) totals -> (...) values. groups: the
    group of each row. Rows of one group are one cluster; a row without a group is a cluster alone.
    ends: the kind of interval. started: None if the interval does not cover starts. servers: the
    columns of each server that have its seconds. The squares of the half-widths over prompts and
    over starts, each with its own t, are added: this covers 95% or more (Banerjee 1960, Sankhya
    22). Raises `NothingToMeasure` without rows.
    """
    if not rows:
        raise NothingToMeasure(f"no prompt has the values for {name}")
    sums: dict[str | int, Floats] = {}
    for i, (row, group) in enumerate(zip(rows, groups or [None] * len(rows), strict=True)):
        key = i if group is None else group
        sums[key] = sums.get(key, 0.0) + np.asarray(row, dtype=np.float64)
    columns = np.array(list(sums.values()))
    totals, clusters = columns.sum(axis=0), len(columns)
    mean = float(statistic(totals))
    with np.errstate(divide="ignore", invalid="ignore"):  # a cluster's count may be 0
        by_cluster = statistic(columns)
    by_cluster = by_cluster[np.isfinite(by_cluster)]
    ci95 = freedom = over_starts = None
    if clusters >= FEWEST_CLUSTERS:
        error, freedom = _error(statistic(totals - columns) - mean)
        t = float(stdtrit(freedom, 0.975))
        if started:
            slower = totals * (1 + started.error * _columns(servers, len(totals)))
            between = math.hypot(*(statistic(slower) - mean))
            over_starts = between * float(stdtrit(started.freedom, 0.975))
            error = math.hypot(error, over_starts / t)
        ci95 = ends(mean, error, t, clusters)
    return Measured(
        mean=mean,
        ci95=ci95,
        freedom=freedom,
        over_starts=over_starts,
        n=len(rows),
        clusters=clusters,
        range=(by_cluster.min(), by_cluster.max()) if len(by_cluster) else None,
    )


def share(name: str, rows: Sequence[tuple[str | None, float, float]]) -> Share:
    """The share sum / count of rows (group, sum, count) by prompt; sums are clipped to 0..count."""
    sums = [(min(max(total, 0.0), count), count) for _, total, count in rows]
    groups = [group for group, _, _ in rows]
    return Share.model_validate(measure(name, sums, groups=groups, ends=within_one))
