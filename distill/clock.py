"""The time of a run: one clock for all stages, stored in the run's folder.

In a run with `minutes` each stage ends at its share of them (`Shares`): the target generates
outputs, with their hidden states; the draft is trained; the drafts are measured. A resumed run also
counts the time before its interruption.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from accelerate import PartialState

from align.errors import UserError
from align.files import read_json, write_json
from align.machine import from_first
from distill.teacher.store import Answers

CLOCK = "clock.json"
SAVING = 0.02  # share of `minutes` that training leaves for saving and export
SAFETY = 0.9  # share of the time left that a round of outputs fills, at the last round's speed
KEPT_EVERY = 5.0  # seconds between two writes of the time


class Shares(NamedTuple):
    """Shares of `minutes` at which the outputs, the training and the reference decoder end.

    The rest is for an engine.
    """

    answered: float
    trained: float
    decoded: float


HERE, IN_ENGINE = Shares(1 / 3, 0.72, 1.0), Shares(0.27, 0.55, 0.7)


class Clock:
    """Seconds that a run has taken, with the time before interruptions.

    training: the second at which training began; None before. ending: seconds that training takes
    after its last step. Within the clock's `with` block the
    time is written every KEPT_EVERY seconds, so that a kill loses no more.
    """

    def __init__(self, folder: Path, minutes: float | None, shares: Shares = HERE) -> None:
        """minutes: the run's time budget; None: the recipe's counts alone limit the run."""
        self.path, self.minutes, self.shares = folder / CLOCK, minutes, shares
        kept: dict[str, Any] = {"seconds": 0.0, "training": None, "ending": 0.0}
        if self.path.exists():
            kept |= read_json(self.path)
        self.training: float | None = kept["training"]
        self.ending: float = kept["ending"]
        # starting Python and importing packages is part of the run's time
        age = time.time() - psutil.Process().create_time()
        self.start = time.monotonic() - age - kept["seconds"]
        self.ended = threading.Event()
        self.keeper = threading.Thread(target=self._keep_until_ended, daemon=True)

    def __enter__(self) -> Clock:
        self.keeper.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.keeper.join()

    def _keep_until_ended(self) -> None:
        over = False
        while not over:
            over = self.ended.wait(KEPT_EVERY)
            if self.path.exists():  # `claim_folder` has been passed
                with suppress(UserError):  # a full disk ends the run where it needs the disk
                    self.keep()

    def seconds(self) -> float:
        return time.monotonic() - self.start

    def left(self, share: float) -> float:
        """Seconds until this share of the minutes is over, by this process's clock; or infinity."""
        return math.inf if self.minutes is None else 60 * self.minutes * share - self.seconds()

    def keep(self) -> None:
        """Write the time that the run has taken. Call it after `claim_folder`."""
        if PartialState().is_main_process:
            times = {"seconds": self.seconds(), "training": self.training, "ending": self.ending}
            write_json(self.path, times)

    def stage(self, name: str) -> None:
        """Print the name of a stage that begins, with the time."""
        minutes, seconds = divmod(round(self.seconds()), 60)
        print(f"\n[{minutes:3d}:{seconds:02d}] {name}", flush=True)
        if self.path.exists():  # `claim_folder` has been passed
            self.keep()

    def training_progress(self) -> float:
        """The share of the training time that is over, at most 1; 0 without minutes.

        All processes must call it, and get the first process's share. The training time begins with
        the first call, and includes the time before an interruption.
        """
        if self.minutes is None:
            return 0.0
        planned = 60 * self.minutes * (self.shares.trained - SAVING - self.shares.answered)
        end = 60 * self.minutes * self.shares.answered + planned
        if self.training is None:
            self.training = self.seconds()
            self.keep()
            if self.training > end - planned / 2 and PartialState().is_main_process:
                print(
                    f"Warning: training has {max(0.0, end - self.training):.0f} of its "
                    f"{planned:.0f} seconds, because earlier stages took longer; raise minutes."
                )
        allowed = max(1.0, end - self.ending - self.training)
        return float(from_first(min(1.0, (self.seconds() - self.training) / allowed)))


def answers_in_time(
    clock: Clock,
    total: int,
    lacking: list[int],
    batch: int,
    start: Callable[[], None],
    answer: Callable[[int], Answers],
    again: bool = False,
) -> Answers:
    """The target's outputs for the first prompts. The run's time limits their number.

    total: number of prompts. lacking: the indices of prompts whose output or its hidden states are
    not cached, ascending. batch: prompts in a batch. start: loads or starts the target; called only
    if some are lacking. answer: returns the outputs for the first n prompts, and caches what they
    lack. again: whether a start as long as the first follows the outputs. The speed of a round
    determines the size of the next round. The first round is small, because a whole batch may take
    longer than the time for all outputs.
    """
    first, starting = max(1, batch // 8), clock.seconds()
    completed, new = 0, min(first, len(lacking))
    if new and from_first(clock.left(clock.shares.answered) <= 0 and lacking[0] >= batch):
        new = 0  # a resumed run has enough outputs
    if new:
        start()  # here, because its time says nothing of a round's speed
    another = again * (clock.seconds() - starting)
    while True:
        completed += new
        began = clock.seconds()
        answers = answer(lacking[completed] if completed < len(lacking) else total)
        if new == 0 or completed == len(lacking):
            return answers
        left, took = from_first(
            (clock.left(clock.shares.answered) - another, clock.seconds() - began)
        )
        more = int(SAFETY * left * new / took)
        if more < max(1, first // 2):
            if completed == first and PartialState().is_main_process:
                print(
                    f"Warning: the first {completed} outputs took {took:.0f} seconds, and their "
                    "share of the minutes is too short for more; raise minutes."
                )
            return answers
        new = min(more, len(lacking) - completed)
