"""The acceptance rate on held-out prompts during training, and when it is measured.

Some training prompts and their near-duplicates are never trained on. The draft is measured on the
target's outputs for them, teacher-forced: before the first step and at shares of the training
(MEASURED_AT). The trainer keeps the weights with the highest `Measurement.draft_acceptance_rate`,
and may stop early.
"""

from __future__ import annotations

import bisect
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from tqdm import tqdm
from transformers import EvalPrediction, TrainerCallback, TrainerState
from trl import SFTConfig

from align.files import write_json
from align.machine import from_first
from align.sources import read_json
from distill.clock import TrainingClock
from distill.teacher.store import CachedAnswer, name_of
from distill.training_set import answer_rows
from eval.measuring.intervals import share
from eval.prompts import PromptSet
from eval.reporting.fields import HeldOutCurve, HeldOutPoint

FIRST_INDEX = 2**30  # index of the first held-out output: no two outputs of a run share one
METRIC = "draft_acceptance_rate"  # its name in the trainer
MEASUREMENTS = "held_out/measurements.json"  # in a run's folder
MEASURED_AT = (0, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1)
SHARE = 0.05  # most time of measurements over time of steps; the first and the last do not count
FORWARD = 1 / 3  # time of a forward pass over time of a training step
PADDING = -100  # transformers pads the gathered results of an evaluation with this value


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


class HeldOut(TrainerCallback):
    """Decides when the draft is evaluated, computes the metrics, prints and stores the results.

    rows: the trainer's `eval_dataset`. Each measurement uses all rows, because few rows would make
    the choice of the best weights and an early stop uncertain.
    """

    def __init__(
        self,
        folder: Path,
        config: SFTConfig,
        trained: Dataset,
        answers: Iterable[CachedAnswer],
        clock: TrainingClock | None = None,
    ) -> None:
        """folder: the run's. trained: the training rows. answers: the held-out outputs."""
        self.folder = folder
        self.batch = config.train_batch_size * config.gradient_accumulation_steps
        self.batch *= config.world_size
        self.trained_rows = len(trained)
        self.rows, self.clock = answer_rows(answers, FIRST_INDEX), clock
        self.prompts = [name_of(answer.prompt_ids) for answer in answers]
        self.cost = FORWARD * len(self.rows) / self.batch  # of a measurement, in steps
        self.passed = 0  # of MEASURED_AT
        self.pauses: list[float] = []  # seconds of each measurement, and of saving better weights
        self.pause: float | None = None  # the time at which one began
        self.tokens = sum(trained["tokens"])
        self.measurements: list[Measurement] = []
        self.sums: list[list[Any]] = []  # the columns of the latest `Measurement`

    def progress(self, state: TrainerState) -> float:
        """The share of the training that is over, by steps or by time, whichever is larger."""
        by_time = 0.0 if self.clock is None else self.clock.progress
        return max(by_time, state.global_step / max(1, state.max_steps))

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """The metrics of a measurement, from the results of `prediction_step`."""
        gathered: Any = prediction.predictions
        accepted, lacking, draft_accepted, draft_tokens = gathered  # each [B, T]
        predicted = accepted != PADDING
        columns = accepted, lacking, predicted, draft_accepted, draft_tokens
        self.sums = [(column * predicted).sum(1).tolist() for column in columns]
        latest = Measurement(0, 0, *self.sums)
        return {"alpha": latest.acceptance_rate, METRIC: latest.draft_acceptance_rate}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.measurements = [
            measurement
            for measurement in from_first(read_measurements(self.folder))
            if measurement.step <= state.global_step
        ]
        self.passed = bisect.bisect_right(MEASURED_AT, self.progress(state))
        if state.best_global_step:  # the folder may have moved since
            best = Path(args.output_dir) / f"checkpoint-{state.best_global_step}"
            state.best_model_checkpoint = str(best)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self.clock is not None and self.pause is not None:
            self.pauses.append(self.clock.seconds() - self.pause)
            self.pause = None

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        progress = self.progress(state)
        due = bisect.bisect_right(MEASURED_AT, progress) > self.passed
        # without the first measurement, but with this one
        affordable = self.cost * len(self.measurements) <= SHARE * state.global_step
        control.should_evaluate = progress >= 1 or (due and affordable and self.in_time())
        if control.should_evaluate and self.clock is not None:
            self.pause = self.clock.seconds()

    def in_time(self) -> bool:
        """Whether another pause as the ones before keeps to SHARE. All processes must call it.

        Saving a draft of 0.5B parameters with its optimiser's state took as long as 25 steps on an
        H100. A run without `minutes` measures after the same steps on every machine.
        """
        if self.clock is None or not self.pauses:
            return True
        spent = sum(self.pauses)
        another = spent + spent / len(self.pauses)
        return bool(from_first(another <= SHARE * (self.clock.seconds() - spent)))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seen = min(1.0, state.global_step * self.batch / self.trained_rows)
        latest = Measurement(state.global_step, round(seen * self.tokens), *self.sums)
        self.measurements.append(latest)
        rate = latest.draft_acceptance_rate
        better = state.best_metric is None or rate > state.best_metric
        control.should_save = control.should_save or (better and state.global_step > 0)
        self.passed = bisect.bisect_right(MEASURED_AT, self.progress(state))
        if PartialState().is_main_process:
            measurements = [asdict(each) for each in self.measurements]
            written = {"prompts": self.prompts, "measurements": measurements}
            write_json(self.folder / MEASUREMENTS, written)
            line = f"step {latest.step}: {latest}"
            if latest.step == 0:
                line += f" (training can add {1 - rate:.3f} at most)"
            lacking = sum(latest.lacking) / sum(latest.positions)
            if lacking > 5e-4:
                line += f" (up to {lacking:.3f} more: not all tokens are cached)"
            best = best_of(self.measurements) is latest  # `better` ignores the base draft
            tqdm.write(line + (", the best so far" if best else ""), file=sys.stdout)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if best := best_of(self.measurements):
            print(f"kept: the draft after step {best.step} of {state.global_step}, {best}")


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
