"""The order in which servers do the same tasks, so that none has a better hour than the others.

Servers that run at once take turns, another one first each time. Where memory holds one of them,
the first does every other task before the others and the rest after them: a machine that slows
down steadily, as it gets warm, favours none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from eval.engines.server import ServerError
from eval.engines.vllm import VllmServer

Start = Callable[[], AbstractContextManager[VllmServer]]  # of a server that serves in the block


def running(server: VllmServer) -> Start:
    """Of a server that runs already, and goes on."""
    return lambda: nullcontext(server)


@dataclass(frozen=True)
class Task:
    """What each server does once. where: for an error, as "after 2 of 3 prompts"."""

    do: Callable[[VllmServer], Any]
    where: str


class Turns:
    """Tasks that servers do, the first of which is the baseline.

    `made` has what they made of them [tasks][servers]; it is whole for the first `reached` tasks,
    and `failure` says why there are no more.

    check: is called with a server that has started and its number; finish: once it has done its
    tasks, for the baseline after all others. Raises ServerError where no server is to be had, a
    check fails, or the first task.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        tasks: Sequence[Task],
        check: Callable[[int, VllmServer], None],
        finish: Callable[[int, VllmServer], None],
    ) -> None:
        self.starts, self.tasks, self.check, self.finish = starts, tasks, check, finish
        self.made: list[list[Any]] = [[None] * len(starts) for _ in tasks]
        self.reached, self.failure = len(tasks), ""
        self.progress = tqdm(total=len(tasks) * len(starts), desc="servers", unit="task")

    def together(self) -> None:
        """All servers run at once."""
        with self.progress, ExitStack() as running:
            servers = [running.enter_context(start()) for start in self.starts]
            for number, server in enumerate(servers):
                self.check(number, server)
            for place in range(len(self.tasks)):
                first = place % len(servers)
                for number in [*range(first, len(servers)), *range(first)]:
                    self._do(place, number, servers[number])
            for number in [*range(1, len(servers)), 0]:
                self.finish(number, servers[number])

    def one_after_another(self) -> None:
        """One server runs at a time, the baseline twice."""
        whole = range(len(self.tasks))
        visits = [(0, whole[::2]), *((number, whole) for number in range(1, len(self.starts)))]
        with self.progress:
            for visit, (number, places) in enumerate([*visits, (0, whole[1::2])]):
                with self.starts[number]() as server:
                    self.check(number, server)
                    for place in places:
                        self._do(place, number, server)
                    if visit:  # the baseline comes again
                        self.finish(number, server)

    def _do(self, place: int, number: int, server: VllmServer) -> None:
        if place >= self.reached:
            return
        try:
            self.made[place][number] = self.tasks[place].do(server)
        except ServerError as error:
            self.reached, self.failure = place, f"{self.tasks[place].where}: {error}"
            if not place:
                raise ServerError(self.failure) from None
        self.progress.update()
