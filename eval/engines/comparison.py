"""An engine with each draft and without one, on the same prompts and in fair order.

A machine that slows down steadily favours nobody: contenders that run at once take turns; of
servers that are started one at a time, each does half of the work and, in the opposite order, the
other half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from tqdm import tqdm

from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Sampling
from eval.engines.load import TimedRound, load_point, load_rounds, timed_round
from eval.engines.server import ServerError
from eval.measuring.evaluation import decoding_facts, prompt_facts
from eval.measuring.output_check import divergence, ledger
from eval.measuring.runs import Answer, DraftLog, RunLog, Speculation
from eval.prompts import Prompt, PromptSet
from eval.reporting.build import build_report
from eval.reporting.fields import Report


class Response(NamedTuple):
    """An engine's output to one prompt.

    run: tokens and times; of a server, not what was drafted. prompt_ids: empty where a server does
    not tell them. ended: an end-of-text token ended it. counters: a server's counts of speculation
    meanwhile; None where it has none.
    """

    run: PromptRun
    prompt_ids: list[int]
    ended: bool
    counters: Speculation | None = None


class Output(NamedTuple):
    """The output to a prompt, and the greedy one: losslessness is always measured so.

    reading: what `read` gave for the greedy one.
    """

    timed: Response
    greedy: Response
    reading: Any


class Engine(Protocol):
    """The target as an engine runs it, alone or with a draft."""

    def decode(self, prompt: Prompt, decoding: Decoding) -> Response:
        """The output to one prompt, while nothing else is decoded."""

    def read(self, greedy: Response) -> Any:
        """What `explain` needs of a greedy output that diverges."""

    def explain(
        self, plain: Response, drafted: Output, position: int, greedy: Decoding
    ) -> dict[str, Any]:
        """Fields of a `Divergence`: is it a tie? plain: the greedy output of this engine, which has
        no draft. position: the first token that differs.
        """


@dataclass(eq=False)
class Contender:
    """The engine alone or with one draft, and what it has decoded so far.

    running: a context in which it runs. name: of the draft. facts: fields of its DraftLog that are
    known before. outputs: by number of the prompt. rounds: by number. divergences: by prompt, as
    far as the baseline has judged them. failures: why its "prompts" or its "rounds" ended early;
    what it decoded before stays.
    """

    running: Callable[[], AbstractContextManager[Engine]]
    name: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    outputs: dict[int, Output] = field(default_factory=dict)
    rounds: dict[int, TimedRound] = field(default_factory=dict)
    divergences: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def runs_already(engine: Engine) -> Callable[[], AbstractContextManager[Engine]]:
    """`running` of an engine that is not started here."""
    return lambda: nullcontext(engine)


class Visit(NamedTuple):
    """What a contender does in one go, by number: these prompts, then these rounds.

    judges: after its prompts the baseline explains where drafted outputs diverge from its own.
    """

    contender: int  # 0: the baseline
    prompts: Sequence[int]
    rounds: Sequence[int]
    judges: bool = False


def take_turns(contenders: int, prompts: int, rounds: int) -> Iterator[Visit]:
    """All run at once: each prompt, and each round, has another contender first."""
    orders = [[*range(first, contenders), *range(first)] for first in range(contenders)]
    yield from (Visit(c, [i], []) for i in range(prompts) for c in orders[i % contenders])
    yield Visit(0, [], [], judges=True)
    yield from (Visit(c, [], [i]) for i in range(rounds) for c in orders[i % contenders])


def there_and_back(contenders: int, prompts: int, rounds: int) -> Iterator[Visit]:
    """One runs at a time: A B C, each with half of the work, then C B A."""
    last = contenders - 1
    (p0, p1), (r0, r1) = ((range(count)[0::2], range(count)[1::2]) for count in (prompts, rounds))
    yield from (Visit(c, p0, r0) for c in range(last))
    yield Visit(last, [*p0, *p1], [*r0, *r1])
    yield from (Visit(c, p1, r1, judges=c == 0) for c in reversed(range(last)))


class Comparison:
    """The baseline and contenders with a draft on the same prompts, and at the same loads."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        prompts: PromptSet,
        decoding: Decoding,
        loads: Sequence[int] = (),
        text_of: Callable[[list[int]], str] = lambda ids: f"token {ids[0]}" if ids else "end",
    ) -> None:
        """contenders: the baseline first. loads: numbers of requests at a time. text_of: the text
        of a token, or of none where an output ends.
        """
        self.baseline, *self.drafting = contenders
        self.prompts, self.decoding, self.loads, self.text_of = prompts, decoding, loads, text_of
        self.greedy = replace(decoding, sampling=Sampling())
        self.rounds = [asked for load in loads for asked in load_rounds(prompts.prompts, load)]

    def run(self, order: Callable[[int, int, int], Iterator[Visit]]) -> None:
        """All visits in this order, as far as the contenders work."""
        contenders = [self.baseline, *self.drafting]
        work = len(self.prompts.prompts), len(self.rounds)
        with tqdm(total=len(contenders) * sum(work), desc="compared", unit="task") as bar:
            for visit in order(len(contenders), *work):
                contender, prompts = contenders[visit.contender], visit.prompts
                if "prompts" in contender.failures:
                    prompts = []
                elif "prompts" in self.baseline.failures:  # nothing to compare an output with
                    prompts = [i for i in prompts if i in self.baseline.outputs]
                failed = contender.failures or self.baseline.failures
                rounds = [] if failed else visit.rounds
                judges = visit.judges and bool(self.baseline.outputs)
                visit = visit._replace(prompts=prompts, rounds=rounds, judges=judges)
                if any(visit[1:]):
                    self._visit(contender, visit, bar)

    def pairs(self, contender: Contender) -> list[int]:
        """The numbers of the prompts that the baseline and this contender decoded."""
        return sorted(self.baseline.outputs.keys() & contender.outputs.keys())

    def failure(self, contender: Contender) -> str:
        """Why the prompts of this contender end; empty where they do not."""
        baseline = self.baseline.failures.get("prompts", "")
        return contender.failures.get("prompts", baseline)

    def divergent(self, contender: Contender) -> list[dict[str, Any]]:
        """The ledger's entries: where its greedy outputs diverge from the baseline's."""
        unjudged = {"why": f"not explained: {self.failure(self.baseline)}"}
        return [
            contender.divergences.get(i, entry | unjudged)
            for i in self.pairs(contender)
            if (entry := self._divergence(contender, i))
        ]

    def by_load(self, contender: Contender) -> tuple[list[dict[str, Any]], str]:
        """The LoadPoints at loads with all rounds, and why other loads have none."""
        points = []
        for load in self.loads:
            numbers = [i for i, asked in enumerate(self.rounds) if asked.load == load]
            if self.baseline.rounds.keys() & contender.rounds.keys() >= set(numbers):
                pairs = [(self.baseline.rounds[i], contender.rounds[i]) for i in numbers]
                points.append(load_point(load, pairs))
        baseline = self.baseline.failures.get("rounds", self.failure(contender))
        return points, contender.failures.get("rounds", baseline)

    def log(self, contender: Contender) -> DraftLog:
        """The log of a draft on the prompts that it and the baseline decoded."""
        pairs = self.pairs(contender)
        plain, drafted = (
            [side.outputs[i].timed.run for i in pairs] for side in (self.baseline, contender)
        )
        by_load, no_load = self.by_load(contender)
        missing = contender.facts["missing"] | ({"by_load": no_load} if no_load else {})
        if len(pairs) < len(self.prompts.prompts):
            missing |= {"prompts": self.failure(contender)}
        return DraftLog(
            **contender.facts | {"missing": missing},
            name=contender.name,
            runs=drafted,
            baseline=plain,
            lossless=ledger(len(pairs), self.divergent(contender)),
            by_load=by_load,
        )

    def report(
        self,
        logs: Sequence[DraftLog],
        provenance: dict[str, Any],
        rule: str,
        stop_tokens: int | None,
        **facts: Any,
    ) -> Report:
        """The report of these logs; `failures` of its provenance names the drafts that failed.

        rule: how the engine verifies sampled tokens. stop_tokens: how many it knows; None: not
        told. facts: fields of a RunLog. Raises ServerError where there is no log.
        """
        failed = {draft.name: self.failure(draft) for draft in self.drafting}
        failures = "; ".join(f"{name} {failure}" for name, failure in failed.items() if failure)
        if not logs:
            raise ServerError(failures)
        used = {run.prompt_id for log in logs for run in log.runs}
        prompts = [prompt for prompt in self.prompts.prompts if prompt.id in used]
        outputs = self.baseline.outputs.values()
        run = RunLog(
            decoding=decoding_facts(
                self.decoding,
                [output.timed.ended for output in outputs],
                gamma=logs[-1].gamma,
                gamma_policy=logs[-1].gamma_policy,
                verification="greedy match" if self.decoding.sampling.greedy else rule,
                stop_tokens=stop_tokens,
            ),
            prompts=prompt_facts(replace(self.prompts, prompts=prompts, ids=[])),
            provenance=provenance | ({"failures": failures} if failures else {}),
            answers=[
                Answer(run.prompt_id, prompt_ids, run.tokens, [], group=run.group)
                for run, prompt_ids, *_ in (output.greedy for output in outputs)
                if prompt_ids
            ],
            **facts,
        )
        return build_report(run, logs)

    def _visit(self, contender: Contender, visit: Visit, bar: tqdm) -> None:
        stage, doing = "prompts", ""
        try:
            with contender.running() as engine:
                try:
                    for number in visit.prompts:
                        done = f"{len(contender.outputs)} of {len(self.prompts.prompts)}"
                        doing = f"after {done} prompts: "
                        contender.outputs[number] = self._output(contender, engine, number)
                        bar.update()
                finally:
                    if visit.judges:  # also what was decoded before a failure
                        self._judge(engine)
                stage = "rounds"
                for number in visit.rounds:
                    doing = f"at {self.rounds[number].load} requests at a time: "
                    timed = timed_round(engine, self.rounds[number], self.decoding)
                    contender.rounds[number] = timed
                    bar.update()
        except ServerError as error:  # the context may have said more of it
            contender.failures.setdefault(stage, f"{doing}{error}")

    def _output(self, contender: Contender, engine: Engine, number: int) -> Output:
        prompt = self.prompts.prompts[number]
        timed = greedy = engine.decode(prompt, self.decoding)
        if not self.decoding.sampling.greedy:
            greedy = engine.decode(prompt, self.greedy)
        plain = self.baseline.outputs.get(number)
        if contender is self.baseline or (plain and plain.greedy.run.tokens == greedy.run.tokens):
            return Output(timed, greedy, None)
        return Output(timed, greedy, engine.read(greedy))

    def _judge(self, engine: Engine) -> None:
        for contender in self.drafting:
            for i in self.pairs(contender):
                if entry := self._divergence(contender, i):
                    plain, drafted = self.baseline.outputs[i].greedy, contender.outputs[i]
                    position = entry["position"]
                    # an output that merely ends earlier is never a tie
                    if position < min(len(plain.run.tokens), len(drafted.greedy.run.tokens)):
                        entry |= engine.explain(plain, drafted, position, self.greedy)
                    contender.divergences[i] = entry

    def _divergence(self, contender: Contender, number: int) -> dict[str, Any] | None:
        """The entry of two greedy outputs that differ, not explained yet; None where they agree."""
        plain, drafted = (c.outputs[number].greedy.run for c in (self.baseline, contender))
        if plain.tokens == drafted.tokens:
            return None
        return divergence(plain, drafted, self.text_of)
