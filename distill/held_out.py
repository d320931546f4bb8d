"""The acceptance rate on held-out prompts during training, and when it is measured.

Some training prompts and their near-duplicates are never trained on. The draft is measured on the
target's outputs for them, teacher-forced: before the first step and at shares of the training
(MEASURED_AT). The trainer keeps the weights with the highest `Measurement.draft_acceptance_rate`,
and may stop early.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from accelerate import PartialState
from tqdm import tqdm

from align.files import read_json, write_json
from align.machine import from_first
from distill.checkpoint import best_measurement
from distill.clock import Clock
from distill.teacher.store import name_of
from eval.measuring.intervals import share
from eval.prompts import PromptSet
from eval.reporting.fields import HeldOutCurve, HeldOutPoint

FIRST_INDEX = 2**30  # index of the first held-out output: no two outputs of a run share one
MEASUREMENTS = "held_out/measurements.json"  # in a run's folder
MEASURED_AT = (0, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1)
SHARE = 0.05  # most time of measurements over time of steps; the first and the last do not count
FORWARD = 1 / 3  # time of a forward pass over time of a training step


@dataclass
class Measurement:
    """The acceptance on held-out prompts after `step` training steps.

    tokens: the number of different tokens that were trained on. The lists have a number for each
    held-out prompt. accepted, lacking: the results of `losses.acceptance` for the first token of a
    draft, summed over the prompt's response positions. positions: the number of these positions.
    draft_accepted: the sum of the acceptance rates of all draft tokens that are trained.
    draft_tokens: the number of these tokens.
    """

    step: int
    tokens: int
    accepted: list[float]
    lacking: list[float]
    positions: list[int]
    draft_accepted: list[float]
    draft_tokens: list[float]

    @property
    def acceptance_rate(self) -> float:
        """The acceptance rate of the first token of a draft, as in a report."""
        return sum(self.accepted) / sum(self.positions)

    @property
    def draft_acceptance_rate(self) -> float:
        """The acceptance rate of all draft tokens that are trained, each after the right tokens.

        The weights with the highest rate are the best, because later tokens of pard, eagle3, medusa
        and dflash still improve when the first does not. Other kinds train the first token alone.
        """
        return sum(self.draft_accepted) / sum(self.draft_tokens)

    def __str__(self) -> str:
        text = f"held-out acceptance rate {self.draft_acceptance_rate:.3f}"
        if self.draft_tokens == self.positions:
            return text
        return f"{text} of all draft tokens, {self.acceptance_rate:.3f} of the first"


class HeldOut:
    """Decides when the draft is measured, and prints and stores the measurements.

    Each measurement uses all held-out outputs, because few would make the choice of the best
    weights and an early stop uncertain.
    """

    def __init__(self, folder: Path, prompts: list[str], cost: float, clock: Clock) -> None:
        """folder: the run's. prompts: their names. cost: of a measurement, in steps."""
        self.folder, self.prompts, self.cost, self.clock = folder, prompts, cost, clock
        self.passed = 0  # of MEASURED_AT
        self.pauses: list[float] = []  # seconds of each measurement, and of saving better weights
        self.measurements: dict[int, Measurement] = {}

    @property
    def in_order(self) -> list[Measurement]:
        return sorted(self.measurements.values(), key=lambda each: each.step)

    @property
    def best(self) -> Measurement | None:
        return best_of(self.in_order)

    def resume(self, step: int, progress: float) -> None:
        """Continue after `step`. The best weights may be of a later step of a killed process."""
        written = from_first(read_measurements(self.folder))
        self.measurements = {each.step: each for each in written if each.step <= step}
        if fields := from_first(best_measurement(self.folder)):
            saved = Measurement(**fields)
            self.measurements[saved.step] = saved
        self.passed = bisect.bisect_right(MEASURED_AT, progress)

    def due(self, step: int, progress: float) -> bool:
        """Whether to measure after this step. progress: the share of the training that is over."""
        due = bisect.bisect_right(MEASURED_AT, progress) > self.passed
        # without the first measurement, but with this one
        earlier = sum(measured <= step for measured in self.measurements)
        affordable = self.cost * earlier <= SHARE * step
        return progress >= 1 or (due and affordable and self.in_time())

    def in_time(self) -> bool:
        """Whether another pause as the ones before keeps to SHARE. All processes must call it.

        A run without `minutes` measures after the same steps on every machine.
        """
        if self.clock.minutes is None or not self.pauses:
            return True
        spent = sum(self.pauses)
        another = spent + spent / len(self.pauses)
        seconds = self.clock.seconds() - (self.clock.training or 0.0)
        return bool(from_first(another <= SHARE * (seconds - spent)))

    def record(self, latest: Measurement, progress: float) -> bool:
        """Whether the latest measurement is the best so far, so that the weights are to be saved.

        A base draft needs no saving. progress: the share of the training that is over.
        """
        self.passed = bisect.bisect_right(MEASURED_AT, progress)
        self.measurements[latest.step] = latest
        best = self.best is latest
        if PartialState().is_main_process:
            measurements = [asdict(each) for each in self.in_order]
            written = {"prompts": self.prompts, "measurements": measurements}
            write_json(self.folder / MEASUREMENTS, written)
            line = f"step {latest.step}: {latest}"
            if latest.step == 0:
                line += f" (training can add {1 - latest.draft_acceptance_rate:.3f} at most)"
            lacking = sum(latest.lacking) / sum(latest.positions)
            if lacking > 5e-4:
                line += f" (up to {lacking:.3f} more: not all tokens are cached)"
            tqdm.write(line + (", the best so far" if best else ""), file=sys.stdout)
        return best and latest.step > 0

    def without_gain(self, step: int) -> int:
        """The number of measurements since the best one until this step.

        The base draft does not count, because the first steps may worsen it.
        """
        trained = [each for each in self.in_order if 0 < each.step <= step]
        best = best_of(trained)
        return 0 if best is None else len(trained) - 1 - trained.index(best)


def read_measurements(folder: Path) -> list[Measurement]:
    """The measurements that a run has written."""
    path = folder / MEASUREMENTS
    if not path.exists():
        return []
    return [Measurement(**fields) for fields in read_json(path)["measurements"]]


def held_out_curve(folder: Path, held_out: PromptSet) -> HeldOutCurve | None:
    """The acceptance rate by tokens trained on, for a run's report; None if not measured."""
    measurements = read_measurements(folder)
    if not measurements:
        return None
    kept = best_of(measurements)
    group_of = {
        name_of(ids): prompt.group
        for ids, prompt in zip(held_out.ids, held_out.prompts, strict=True)
    }
    # a logged output that is left out has no number
    groups = [group_of[name] for name in read_json(folder / MEASUREMENTS)["prompts"]]
    points = [
        HeldOutPoint(
            step=measurement.step,
            tokens=measurement.tokens,
            alpha=share(
                "alpha", list(zip(groups, measurement.accepted, measurement.positions, strict=True))
            ),
            kept=measurement is kept,
        )
        for measurement in measurements
    ]
    return HeldOutCurve(points=points)


def best_of(measurements: Sequence[Measurement]) -> Measurement | None:
    """The first measurement with the highest `draft_acceptance_rate`; None without measurements."""
    return max(measurements, key=lambda each: each.draft_acceptance_rate, default=None)
