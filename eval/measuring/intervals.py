"""A measured number and its interval: one bootstrap over prompts, or over their groups.

A measured number is a ratio of sums over prompts. Prompts are what is resampled, not tokens: the
tokens of one answer depend on each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Generic, Self, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from eval.measuring.runs import Floats

RESAMPLES = 10_000
SEED = 20240817

T = TypeVar("T")
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Quantity = Annotated[float, Field(ge=0)]
# Prompt id -> its group and its columns, whose totals a statistic is a function of
Rows = dict[str, tuple[str | None, tuple[float, ...]]]


class NothingToMeasure(ValueError):
    """The log holds nothing that the asked number could be computed from."""


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
    ci95: tuple[float, float] = Field(
        description="95%, percentile bootstrap over prompts, or over their documents where they "
        "name a group (10,000 resamples, fixed seed); n is the number of prompts."
    )
    n: Positive

    def __format__(self, form: str) -> str:
        """`0.51 [0.49,0.53]` with the form `.2f`."""
        low, high = self.ci95
        return f"{self.mean:{form}} [{low:{form}},{high:{form}}]"

    def within(self, share: float) -> bool:
        """Whether the interval ends within that share of the number."""
        low, high = self.ci95
        return max(high - self.mean, self.mean - low) <= share * abs(self.mean)

    @model_validator(mode="after")
    def _interval_runs_forwards(self) -> Self:
        if self.ci95[0] > self.ci95[1]:
            raise ValueError(f"ci95 runs backwards: {list(self.ci95)}")
        return self


class Share(Measured):
    """A measured share."""

    mean: float = Field(ge=0, le=1)


class TokensPerCall(Measured):
    """A measured number of tokens per target call: one at least."""

    mean: float = Field(ge=1)


class Both(Part, Generic[T]):
    """A number without a draft and with it."""

    baseline: T
    speculative: T


def bootstrap_totals(columns: Floats, resamples: int = RESAMPLES, seed: int = SEED) -> Floats:
    """Column sums of `resamples` draws, with replacement, of as many rows as there are.

    columns: (prompts, K), one row a prompt. Returns (resamples, K). The seed is fixed, so two
    calls on equally many prompts draw the same ones.
    """
    n, width = columns.shape
    rng = np.random.default_rng(seed)
    totals = np.empty((resamples, width))
    chunk = max(1, 2_000_000 // (n * width))  # bounds memory to tens of megabytes
    for start in range(0, resamples, chunk):
        stop = min(start + chunk, resamples)
        drawn = rng.integers(0, n, size=(stop - start, n))
        totals[start:stop] = columns[drawn].sum(axis=1)
    return totals


def ratio(totals: Floats) -> Floats:
    """The first column's total over that of the second."""
    return totals[..., 0] / totals[..., 1]


def measure(
    name: str,
    rows: Sequence[Sequence[float]],
    statistic: Callable[[Floats], Floats] = ratio,
    groups: Sequence[str | None] | None = None,
) -> Measured:
    """`statistic` of the column totals, with its 95% percentile bootstrap interval.

    rows: one a prompt, K columns. statistic: (..., K) totals -> (...) values. groups: of each row;
    rows of one group are drawn together, one without a group alone. Raises `NothingToMeasure`
    without rows, ValueError where the result is not a finite number.
    """
    if not rows:
        raise NothingToMeasure(f"no prompt holds anything to measure {name} on")
    columns = np.asarray(rows, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = statistic(columns.sum(axis=0))
        values = statistic(bootstrap_totals(_by_group(columns, groups) if groups else columns))
    if not (np.isfinite(mean) and np.isfinite(values).all()):
        raise ValueError(
            f"{name} is not a finite number ({mean} over all prompts): a time or a count in the "
            f"log is zero or missing"
        )
    low, high = np.percentile(values, [2.5, 97.5])
    return Measured(mean=float(mean), ci95=(float(low), float(high)), n=len(columns))


def _by_group(columns: Floats, groups: Sequence[str | None]) -> Floats:
    """Sums of the rows of each group: what is drawn as a whole can as well be added up before."""
    places: dict[str | int, int] = {}
    index = [
        places.setdefault(i if group is None else group, len(places))
        for i, group in enumerate(groups)
    ]
    sums = np.zeros((len(places), columns.shape[1]))
    np.add.at(sums, index, columns)
    return sums


def measure_rows(name: str, rows: Rows, statistic: Callable[[Floats], Floats] = ratio) -> Measured:
    """`measure` of rows that know their groups."""
    columns = [columns for _, columns in rows.values()]
    return measure(name, columns, statistic, [group for group, _ in rows.values()])


def share(name: str, rows: Sequence[tuple[str | None, float, float]]) -> Share:
    """Sum over count of one row (group, sum, count) a prompt; each sum within 0 and its count."""
    sums = [(min(max(total, 0.0), count), count) for _, total, count in rows]
    return Share.model_validate(measure(name, sums, groups=[row[0] for row in rows]))


def difference(
    name: str, rows: Rows, over: Rows, statistic: Callable[[Floats], Floats] = ratio
) -> Measured | None:
    """`statistic` of some rows minus that of others, both on the same resampled prompts.

    None where they share no prompt.
    """
    paired = {
        key: (group, (*columns, *over[key][1]))
        for key, (group, columns) in rows.items()
        if key in over
    }

    def apart(totals: Floats) -> Floats:
        width = totals.shape[-1] // 2
        return statistic(totals[..., :width]) - statistic(totals[..., width:])

    return measure_rows(f"gain of {name}", paired, apart) if paired else None
