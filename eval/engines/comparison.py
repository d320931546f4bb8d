"""Servers that decode the same prompts, in an order that favours none of them.

A machine that slows down steadily favours no server: servers that run at once take turns; of
servers that are started one at a time, each does half of the work and, in the opposite order, the
other half.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from tqdm import tqdm

from eval.decoding.loop import Decoding
from eval.decoding.verification import Sampling
from eval.engines.divergences import Row, explain, read_text
from eval.engines.load import TimedRound, load_point, load_rounds, timed_round
from eval.engines.server import ServerError
from eval.engines.vllm import Response, VllmServer
from eval.measuring.output_check import divergence
from eval.prompts import Prompt

Start = Callable[[], AbstractContextManager[VllmServer]]  # a context in which a server runs


@dataclass(frozen=True)
class Visit:
    """What a server does in a row, by number: these prompts, then these rounds.

    judges: after its prompts it explains where the drafted texts diverge from its own.
    """

    server: int  # 0: the baseline
    prompts: Sequence[int]
    rounds: Sequence[int]
    judges: bool = False


def take_turns(servers: int, prompts: int, rounds: int) -> list[Visit]:
    """All servers run at once: each prompt, and each round, has another server first."""
    orders = [[*range(first, servers), *range(first)] for first in range(servers)]
    return [
        *(Visit(s, [i], []) for i in range(prompts) for s in orders[i % servers]),
        Visit(0, [], [], judges=True),
        *(Visit(s, [], [i]) for i in range(rounds) for s in orders[i % servers]),
    ]


def there_and_back(servers: int, prompts: int, rounds: int) -> list[Visit]:
    """One server runs at a time: A B C, each with half of the work, then C B A."""
    last = servers - 1
    (p0, p1), (r0, r1) = ((range(count)[0::2], range(count)[1::2]) for count in (prompts, rounds))
    return [
        *(Visit(s, p0, r0) for s in range(last)),
        Visit(last, [*p0, *p1], [*r0, *r1]),
        *(Visit(s, p1, r1, judges=s == 0) for s in reversed(range(last))),
    ]


@dataclass(frozen=True)
class Output:
    """A server's output to a prompt, and its greedy one: losslessness is always measured so.

    reading: what a drafting server says of its greedy text (`read_text`).
    """

    timed: Response
    greedy: Response
    reading: list[Row] | str


class Comparison:
    """What servers made of the same prompts and rounds; server 0 is the baseline.

    outputs, rounds: by server and number. divergences: by server and prompt, as far as the baseline
    has judged them. failures, load_failures: by server, why its prompts and its rounds end. Rows
    from before a failure stay, and so do those of other servers.
    """

    def __init__(
        self,
        starts: Sequence[Start],
        prompts: Sequence[Prompt],
        decoding: Decoding,
        loads: Sequence[int],
    ) -> None:
        self.starts, self.prompts, self.decoding = starts, prompts, decoding
        self.asked = [asked for load in loads for asked in load_rounds(prompts, load)]
        self.outputs: dict[tuple[int, int], Output] = {}
        self.rounds: dict[tuple[int, int], TimedRound] = {}
        self.divergences: dict[tuple[int, int], dict[str, Any]] = {}
        self.failures: dict[int, str] = {}
        self.load_failures: dict[int, str] = {}

    def run(self, order: Callable[[int, int, int], list[Visit]]) -> None:
        """All visits in this order, as far as the servers serve."""
        work = len(self.prompts), len(self.asked)
        with tqdm(total=len(self.starts) * sum(work), desc="servers", unit="task") as bar:
            for visit in order(len(self.starts), *work):
                prompts = [] if visit.server in self.failures else visit.prompts
                if 0 in self.failures:  # a drafted output is compared with the baseline's
                    prompts = [i for i in prompts if (0, i) in self.outputs]
                failed = {0, visit.server} & (self.failures.keys() | self.load_failures.keys())
                rounds = [] if failed else visit.rounds
                if prompts or rounds or visit.judges:
                    self._visit(replace(visit, prompts=prompts, rounds=rounds), bar)

    def pairs(self, server: int) -> list[int]:
        """The numbers of the prompts that the baseline and this server decoded."""
        made = self.outputs.keys()
        return [i for i in range(len(self.prompts)) if (0, i) in made and (server, i) in made]

    def failure(self, server: int) -> str:
        """Why the prompts of this server end; empty where they do not."""
        return self.failures.get(server) or self.failures.get(0, "")

    def divergent(self, server: int) -> list[dict[str, Any]]:
        """The ledger's entries: where this server's greedy texts diverge from the baseline's."""
        entries = []
        for i in self.pairs(server):
            plain, drafted = self.outputs[0, i].greedy, self.outputs[server, i].greedy
            if plain.run.tokens != drafted.run.tokens:
                unjudged = {"why": f"not explained: {self.failure(0)}"}
                entry = self.divergences.get((server, i))
                entries.append(entry or _divergence(plain, drafted) | unjudged)
        return entries

    def by_load(self, server: int) -> tuple[list[dict[str, Any]], str]:
        """The LoadPoints of this server at loads with all rounds, and why other loads have none."""
        points, made = [], self.rounds.keys()
        for load, numbers in groupby(range(len(self.asked)), lambda i: self.asked[i].load):
            keys = [((0, i), (server, i)) for i in numbers]
            if all(plain in made and drafted in made for plain, drafted in keys):
                points.append(load_point(load, [(self.rounds[a], self.rounds[b]) for a, b in keys]))
        reason = self.load_failures.get(server) or self.load_failures.get(0, "")
        return points, reason or self.failure(server)

    def _visit(self, visit: Visit, bar: tqdm) -> None:
        failures, where, failure = self.failures, "", None
        try:
            with self.starts[visit.server]() as server:
                try:
                    for number in visit.prompts:
                        done = sum(by == visit.server for by, _ in self.outputs)
                        where = f"after {done} of {len(self.prompts)} prompts: "
                        self.outputs[visit.server, number] = self._output(visit, server, number)
                        bar.update()
                except ServerError as error:
                    failure = error
                if visit.judges:  # also what was decoded before a failure
                    self._judge(server)
                if failure:
                    raise failure
                failures = self.load_failures
                for number in visit.rounds:
                    asked = self.asked[number]
                    where = f"at {asked.load} requests at a time: "
                    self.rounds[visit.server, number] = timed_round(server, asked, self.decoding)
                    bar.update()
        except ServerError as error:  # the context may have said more of it
            failures.setdefault(visit.server, f"{where}{error}")

    def _output(self, visit: Visit, server: VllmServer, number: int) -> Output:
        timed = greedy = server.decode(self.prompts[number], self.decoding)
        if not self.decoding.sampling.greedy:
            greedily = replace(self.decoding, sampling=Sampling())
            greedy = server.decode(self.prompts[number], greedily)
        plain = self.outputs.get((0, number))
        if visit.server == 0 or (plain and plain.greedy.run.tokens == greedy.run.tokens):
            return Output(timed, greedy, "it was not asked to read its text")
        return Output(timed, greedy, read_text(server, greedy.prompt_ids, greedy.run.tokens))

    def _judge(self, baseline: VllmServer) -> None:
        for (server, i), output in self.outputs.items():
            plain, drafted = self.outputs.get((0, i)), output.greedy
            if plain and plain.greedy.run.tokens != drafted.run.tokens:
                texts = plain.greedy.run.tokens, drafted.run.tokens
                entry = _divergence(plain.greedy, drafted)
                if (at := entry["position"]) < min(map(len, texts)):  # lengths differ by no tie
                    entry |= explain(baseline, output.reading, plain.greedy.prompt_ids, texts, at)
                self.divergences[server, i] = entry


def _divergence(plain: Response, drafted: Response) -> dict[str, Any]:
    return divergence(plain.run, drafted.run, lambda ids: f"token {ids[0]}" if ids else "end")
