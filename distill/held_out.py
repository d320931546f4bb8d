"""The tokens a step on held-out prompts during training, and when they are measured.

Some training prompts and their near-duplicates are never trained on. The draft is measured on the
target's outputs for them, teacher-forced: before the first step and at shares of the training
(MEASURED_AT). The trainer keeps the best weights (`HeldOut.best`), and may stop early.
"""

from __future__ import annotations

import bisect
import sys
from dataclasses import asdict, dataclass
from operator import attrgetter
from pathlib import Path

from accelerate import PartialState
from tqdm import tqdm

from align.files import read_json, write_json
from align.machine import from_first
from distill.checkpoint import best_measurement
from distill.clock import Clock
from eval.measuring.intervals import Measured, around, measure, ratio, share
from eval.prompts import Prompt
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
    emitted: the expected tokens of the steps whose drafts begin at these positions, as long as the
    drafts that are trained. Siblings and pruned drafts train the first token alone. change: the
    share of the change of the weights that was taken (`DraftTrainer.step_back`).
    """

    step: int
    tokens: int
    accepted: list[float]
    lacking: list[float]
    positions: list[int]
    emitted: list[float]
    change: float = 1.0

    @property
    def acceptance_rate(self) -> float:
        """The acceptance rate of the first token of a draft, as in a report."""
        return sum(self.accepted) / sum(self.positions)

    @property
    def tokens_per_step(self) -> float:
        """Later draft tokens may still improve when the acceptance rate of the first does not."""
        return sum(self.emitted) / sum(self.positions)

    def __str__(self) -> str:
        rate = f"acceptance rate {self.acceptance_rate:.3f}"
        part = f", with {self.change:g} of the change" if self.change < 1 else ""
        return f"held-out prompts {self.tokens_per_step:.3f} tokens a step, {rate}{part}"


class HeldOut:
    """Decides when the draft is measured, and prints and stores the measurements.

    Each measurement uses all held-out outputs, because few would make the choice of the best
    weights and an early stop uncertain.
    """

    def __init__(self, folder: Path, prompts: list[Prompt], cost: float, clock: Clock) -> None:
        """folder: the run's. prompts: of each output. cost: of a measurement, in steps."""
        self.folder, self.prompts, self.cost, self.clock = folder, prompts, cost, clock
        self.passed = 0  # of MEASURED_AT
        self.pauses: list[float] = []  # seconds of each measurement, and of saving better weights
        self.measurements: dict[int, Measurement] = {}

    @property
    def in_order(self) -> list[Measurement]:
        return sorted(self.measurements.values(), key=lambda each: each.step)

    @property
    def best(self) -> Measurement | None:
        """The measurement with the most tokens a step, of those that are `better` than the base
        draft's; without one the base draft's.
        """
        if not self.measurements:
            return None
        base, *later = self.in_order
        return max(filter(self.better, later), key=attrgetter("tokens_per_step"), default=base)

    def gain(self, later: Measurement, category: str | None = None) -> Measured:
        """The gain in tokens a step over the base draft, paired, on all prompts or a category."""
        base = self.in_order[0]
        more = [new - old for new, old in zip(later.emitted, base.emitted, strict=True)]
        columns = zip(self.prompts, more, base.positions, strict=True)
        of_prompts = [row for row in columns if category in (None, row[0].category)]
        groups = [prompt.group for prompt, *_ in of_prompts]
        return measure("gain", [row[1:] for row in of_prompts], ratio, groups, around)

    def better(self, later: Measurement) -> bool:
        """Whether it shows a gain over the base draft, and no loss in a category of prompts.

        Too few prompts for an interval show the gain of their mean, and no loss.
        """
        gain = self.gain(later)
        categories = {prompt.category for prompt in self.prompts}
        lost = any(self.gain(later, category).bounds[1] < 0 for category in categories)
        return (gain.bounds[0] if gain.ci95 else gain.mean) > 0 and not lost

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
        kept = self.best
        assert kept is not None
        if PartialState().is_main_process:
            written = {
                "groups": [prompt.group for prompt in self.prompts],
                "kept": kept.step,
                "measurements": [asdict(each) for each in self.in_order],
            }
            write_json(self.folder / MEASUREMENTS, written)
            line = f"step {latest.step}: {latest}"
            lacking = sum(latest.lacking) / sum(latest.positions)
            if lacking > 5e-4:
                line += f" (up to {lacking:.3f} more: not all tokens are cached)"
            tqdm.write(line + ", the best so far" * (kept is latest), file=sys.stdout)
        return kept is latest and latest.step > 0

    def without_gain(self, step: int) -> int:
        """The number of measurements since the best one until this step.

        The base draft does not count, because the first steps may worsen it.
        """
        trained = [each.tokens_per_step for each in self.in_order if 0 < each.step <= step]
        return len(trained) - 1 - trained.index(max(trained)) if trained else 0


def read_measurements(folder: Path) -> list[Measurement]:
    """The measurements that a run has written."""
    path = folder / MEASUREMENTS
    if not path.exists():
        return []
    return [Measurement(**fields) for fields in read_json(path)["measurements"]]


def held_out_curve(folder: Path) -> HeldOutCurve | None:
    """The acceptance rate by tokens trained on, for a run's report; None if not measured."""
    measurements = read_measurements(folder)
    if not measurements:
        return None
    written = read_json(folder / MEASUREMENTS)
    groups = written["groups"]
    points = [
        HeldOutPoint(
            step=measurement.step,
            tokens=measurement.tokens,
            alpha=share(
                "alpha", list(zip(groups, measurement.accepted, measurement.positions, strict=True))
            ),
            kept=measurement.step == written["kept"],
        )
        for measurement in measurements
    ]
    return HeldOutCurve(points=points)
