"""The order in which servers do the same tasks, so that none has a better hour than the others.

Servers that run at once take turns, another one first each time. Where memory holds one of them,
each does half of the tasks, and then, in the opposite order, each the other half: a machine that
slows down steadily, as it gets warm, favours none.
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

    `made` has what they made of them [tasks][servers], None where a server failed; `failure` says
    how the first one did, and what it has not done, no other is asked for.

    check: is called with a server that has started and its number; finish: each time it has done
    its part of the first `count` tasks, for the baseline once, after all others. Raises ServerError
    where a server does not start, or a check fails; not if that is when it starts for its other
    half: what all have done by then is kept.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        tasks: Sequence[Task],
        count: int,
        check: Callable[[int, VllmServer], None],
        finish: Callable[[int, VllmServer], None],
        title: str = "servers",
    ) -> None:
        self.starts, self.tasks, self.count = starts, tasks, count
        self.check, self.finish = check, finish
        self.made: list[list[Any]] = [[None] * len(starts) for _ in tasks]
        self.lost: set[int] = set()  # tasks
        self.failure = ""
        self.progress = tqdm(total=len(tasks) * len(starts), desc=title, unit="task")

    @property
    def whole(self) -> list[int]:
        """The tasks that all servers have done."""
        return [place for place, row in enumerate(self.made) if None not in row]

    def together(self) -> None:
        """All servers run at once."""
        with self.progress, ExitStack() as stack:
            servers = [stack.enter_context(start()) for start in self.starts]
            for number, server in enumerate(servers):
                self.check(number, server)
            places = range(len(self.tasks))
            for part in (places[: self.count], places[self.count :]):
                for place in part:
                    first = place % len(servers)
                    for number in [*range(first, len(servers)), *range(first)]:
                        self._do(number, servers[number], [place], places[place:])
                if part == places[: self.count]:
                    for number in [*range(1, len(servers)), 0]:
                        self.finish(number, servers[number])

    def one_after_another(self) -> None:
        """One server runs at a time: A B C, half of the tasks each, then C B A, the other half."""
        last = len(self.starts) - 1
        outward = [(number, [0]) for number in range(last)]
        homeward = [(number, [1]) for number in reversed(range(last))]
        places = range(len(self.tasks))
        parts = (places[: self.count], places[self.count :])
        with self.progress:
            for number, halves in [*outward, (last, [0, 1]), *homeward]:
                try:
                    with self.starts[number]() as server:
                        self.check(number, server)
                        for part in parts:
                            for half in halves:
                                self._do(number, server, part[half::2], part[half::2])
                            if part == parts[0] and (number or halves == [1]):
                                self.finish(number, server)
                except ServerError as error:
                    if not self.whole:
                        raise
                    self.failure = self.failure or str(error)
                    self.lost |= {i for half in halves for part in parts for i in part[half::2]}

    def _do(
        self, number: int, server: VllmServer, places: Sequence[int], lost: Sequence[int]
    ) -> None:
        """These tasks, as far as no server has failed in them; with one that fails, these lost."""
        for place in places:
            if place in self.lost:
                continue
            try:
                self.made[place][number] = self.tasks[place].do(server)
            except ServerError as error:
                self.failure = self.failure or f"{self.tasks[place].where}: {error}"
                self.lost |= set(lost[lost.index(place) :])
            self.progress.update()
