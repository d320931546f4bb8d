"""A draft on held-out prompts while it is trained: the trainer's evaluation, and when it is due.

Some training prompts are never trained on, nor is what nearly repeats them. The target answers them
as it does the others, and the draft is measured on these answers, teacher-forced: before the first
step and at shares of the training (MEASURED_AT). The trainer keeps the best weights, and may stop
early.
"""

from __future__ import annotations

import bisect
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from datasets import Dataset
from tqdm import tqdm
from transformers import EvalPrediction, TrainerCallback, TrainerControl, TrainerState
from trl import SFTConfig

from align.files import write_json
from distill.clock import TrainingClock
from distill.teacher.answers import USED
from distill.teacher.store import Answers, CachedAnswer, Store
from distill.training_set import answer_rows
from eval.measuring.intervals import share
from eval.prompts import PromptSet
from eval.reporting.fields import HeldOutCurve, HeldOutPoint

HELD_OUT = "held_out"  # folder of the measurements
FIRST_INDEX = 2**30  # of the answers to held-out prompts: no two answers of a run share one
SEEN = "seen.json"
MEASURED_AT = (0, 1 / 32, 1 / 16, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8, 1)
SHARE = 0.05  # of the steps' time that measurements take at most, the first and the last aside
FORWARD = 1 / 3  # of a step's time is a forward pass
PADDING = -100  # with which transformers pads what an evaluation gathers


@dataclass
class Seen:
    """A measurement: after how many steps, and of how many different tokens trained on.

    Sums of each held-out prompt: accepted, lacking (`losses.acceptance`), positions, the target
    calls that a simulated chain of gamma drafted tokens would take, and, over all drafted tokens
    that are trained, accepted and how many.
    """

    step: int
    tokens: int
    sums: list[list[float]]

    @property
    def alpha(self) -> float:
        accepted, _, positions, *_ = map(sum, zip(*self.sums, strict=True))
        return accepted / positions

    @property
    def drafted(self) -> float:
        """The share accepted of all drafted tokens that are trained, given those before them.

        The weights with the highest share are the best: later masks and heads still learn when
        alpha, which is of the first token alone, no longer changes.
        """
        accepted, _, positions, _, *drafted = map(sum, zip(*self.sums, strict=True))
        total, tokens = drafted or (accepted, positions)
        return total / tokens

    @property
    def lacking(self) -> float:
        _, lacking, positions, *_ = map(sum, zip(*self.sums, strict=True))
        return lacking / positions

    @property
    def tau(self) -> float:
        """Tokens per target call; the first token of an answer is the prefill's."""
        _, _, positions, calls, *_ = map(sum, zip(*self.sums, strict=True))
        return (positions - len(self.sums)) / calls if calls else 1.0


@dataclass
class Followed:
    """What a run has written of its measurements. gamma: of the simulated tau."""

    gamma: int
    measurements: list[Seen]


def held_out_answers(folder: Path) -> Sequence[CachedAnswer]:
    """The target's answers to the held-out prompts of a run; none where it has not noted any."""
    if not (path := folder / USED).exists():
        return []
    used = json.loads(path.read_text())
    return Answers(Store(Path(used["store"])), used["held_out"], FIRST_INDEX)


def simulated_calls(accepted: Sequence[float], gamma: int) -> float:
    """Expected target calls for tokens that are accepted with these chances, gamma drafted each.

    A call emits what was accepted in a row, and one token more (arXiv 2211.17192). Chances of text
    that the target wrote: the same text goes on whatever is drafted.
    """
    calls = [0.0] * (len(accepted) + gamma + 2)
    for at in range(len(accepted) - 1, -1, -1):
        expected, reached = 1.0, 1.0
        for drafted in range(gamma):
            chance = accepted[at + drafted] if at + drafted < len(accepted) else 1.0
            expected += reached * (1 - chance) * calls[at + drafted + 1]
            reached *= chance
        calls[at] = expected + reached * calls[at + gamma + 1]
    return calls[0]


class HeldOut(TrainerCallback):
    """When the draft is evaluated, on which rows, by which metrics; prints and keeps the results.

    rows: what to give the trainer as `eval_dataset`: all of them each time, so that the best
    weights and an early stop never rest on a few.
    """

    def __init__(
        self,
        folder: Path,
        config: SFTConfig,
        trained: Dataset,
        answers: Iterable[CachedAnswer],
        gamma: int,
        clock: TrainingClock | None = None,
    ) -> None:
        """folder: the run's. trained: the rows that are trained on. answers: the held-out ones."""
        self.folder, self.gamma = folder / HELD_OUT, gamma
        self.batch = config.train_batch_size * config.gradient_accumulation_steps
        self.batch *= config.world_size
        self.trained_rows = len(trained)
        self.rows, self.clock = answer_rows(answers), clock
        self.cost = FORWARD * len(self.rows) / self.batch  # of a measurement, in steps
        self.passed = 0  # of MEASURED_AT
        self.tokens = sum(trained["tokens"])
        self.measurements: list[Seen] = []
        self.sums: list[list[float]] = []  # of `Seen`, of the latest evaluation

    def progress(self, state: TrainerState) -> float:
        """How much of the training is over, by steps or by time, from 0 to 1."""
        by_time = 0.0 if self.clock is None else self.clock.progress
        return max(by_time, state.global_step / max(1, state.max_steps))

    def metrics(self, prediction: EvalPrediction) -> dict[str, float]:
        """alpha, drafted and the simulated tau, of what `prediction_step` gives of all rows."""
        self.sums = []
        for accepted, *others in zip(*prediction.predictions, strict=True):
            predicted = accepted != PADDING
            chances = accepted[predicted].tolist()
            calls = simulated_calls(chances[1:], self.gamma)
            lacking, drafted, tokens = (float(part[predicted].sum()) for part in others)
            self.sums.append([sum(chances), lacking, len(chances), calls, drafted, tokens])
        latest = Seen(0, 0, self.sums)
        return {"alpha": latest.alpha, "drafted": latest.drafted, "tau": latest.tau}

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.measurements = [
            measurement
            for measurement in read_followed(self.folder).measurements
            if measurement.step <= state.global_step
        ]
        self.passed = bisect.bisect_right(MEASURED_AT, self.progress(state))
        if state.best_global_step:  # the folder may have moved since
            best = Path(args.output_dir) / f"checkpoint-{state.best_global_step}"
            state.best_model_checkpoint = str(best)

    def on_step_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        progress = self.progress(state)
        due = bisect.bisect_right(MEASURED_AT, progress) > self.passed
        # the first measurement, before any step, does not count
        affordable = self.cost * len(self.measurements) <= SHARE * state.global_step
        control.should_evaluate = progress >= 1 or (due and affordable)

    def on_evaluate(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        part = min(1.0, state.global_step * self.batch / self.trained_rows)
        latest = Seen(state.global_step, round(part * self.tokens), self.sums)
        self.measurements.append(latest)
        better = state.best_metric is None or latest.drafted > state.best_metric
        control.should_save = control.should_save or (better and state.global_step > 0)
        self.passed = bisect.bisect_right(MEASURED_AT, self.progress(state))
        if PartialState().is_main_process:
            rows = [asdict(measurement) for measurement in self.measurements]
            write_json(self.folder / SEEN, {"gamma": self.gamma, "seen": rows})
            lacks = f" (up to {latest.lacking:.3f} more: the cut)" if latest.lacking > 5e-4 else ""
            line = f"step {latest.step}: held-out alpha {latest.alpha:.3f}{lacks}, "
            if latest.drafted == latest.alpha:
                line += f"simulated tau {latest.tau:.2f} at gamma {self.gamma}"
            else:  # the chain would take each token to be as likely as the first
                line += f"{latest.drafted:.3f} of all drafted tokens"
            tqdm.write(line + (", the best so far" if better else ""), file=sys.stdout)

    def on_train_end(
        self, args: Any, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if best := best_of(self.measurements):
            last = state.global_step
            print(f"held-out alpha {best.alpha:.3f} after step {best.step} of {last}: kept")


def read_followed(folder: Path) -> Followed:
    """The measurements of a run; none where it has written none."""
    path = folder / SEEN
    if not path.exists():
        return Followed(0, [])
    written = json.loads(path.read_text())
    return Followed(written["gamma"], [Seen(**fields) for fields in written["seen"]])


def held_out_curve(folder: Path, held_out: PromptSet) -> HeldOutCurve | None:
    """alpha by the tokens trained on, for the report of a run; None where nothing was followed."""
    followed = read_followed(folder / HELD_OUT)
    if not followed.measurements:
        return None
    kept = best_of(followed.measurements)
    points = [
        HeldOutPoint(
            step=measurement.step,
            tokens=measurement.tokens,
            alpha=share(
                "alpha",
                [
                    (prompt.group, row[0], row[2])
                    for prompt, row in zip(held_out.prompts, measurement.sums, strict=True)
                ],
            ),
            tau=measurement.tau,
            kept=measurement is kept,
        )
        for measurement in followed.measurements
    ]
    return HeldOutCurve(gamma=followed.gamma, points=points)


def best_of(measurements: Sequence[Seen]) -> Seen | None:
    """The measurement of the best weights, the first of equals; None where there is none."""
    return max(measurements, key=lambda measurement: measurement.drafted, default=None)
