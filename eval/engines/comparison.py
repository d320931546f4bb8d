"""Compares an engine with each draft and without a draft, on the same prompts and in a fair order.

The order is fair on a machine that slows down steadily. Contenders that run at the same time take
turns at each prompt. Servers that are started one at a time decode all prompts in order, and then,
each started again, in the opposite order. The difference between a server's two times on the same
prompts is what a start, or the time of the visit, changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import Field, TypeAdapter
from tqdm import tqdm

from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Sampling
from eval.engines.divergences import Logprobs, not_judged
from eval.engines.load import PASSES, Load, Request, TimedPass, load_point, passes, timed_pass
from eval.engines.server import ServerError
from eval.measuring.evaluation import decoding_facts, prompt_facts
from eval.measuring.intervals import Starts
from eval.measuring.journal import Journal
from eval.measuring.output_check import divergence
from eval.measuring.runs import DraftLog, RunLog, Speculation, TargetOutput
from eval.prompts import Prompt, PromptSet, after, turns_of
from eval.reporting.build import build_report
from eval.reporting.fields import Report

WARM_UP = 16  # tokens of outputs that are not timed


class Output(NamedTuple):
    """An engine's output for one prompt.

    run: tokens and times; drafted and accepted tokens are 0 for a server. ended: whether a stop
    token ended the output. counters: a server's counts of speculation for this output; None if it
    has none. text: of a server's output.
    """

    run: PromptRun
    prompt_ids: list[int]
    ended: bool
    counters: Speculation | None = None
    text: str = ""


class PromptOutputs(NamedTuple):
    """The timed output for a prompt, and the greedy output for the output check.

    reading: the result of `Engine.read` for the greedy output, or None.
    """

    timed: Output
    greedy: Output
    reading: Annotated[list[Logprobs] | Any, Field(union_mode="left_to_right")]


# The results of a contender as a journal has them, by their field.
NOTED: dict[str, TypeAdapter[Any]] = {
    "outputs": TypeAdapter(PromptOutputs),
    "again": TypeAdapter(PromptRun),
    "passes": TypeAdapter(tuple[list[Request], Speculation | None]),
    "divergences": TypeAdapter(dict[str, Any]),
}


class Engine(Protocol):
    """An engine that runs the target, alone or with a draft."""

    def decode(self, prompt: Prompt, decoding: Decoding) -> Output:
        """The output for one prompt, while nothing else is decoded."""

    def read(self, greedy: Output) -> Any:
        """The data that `explain` needs about a greedy output of this engine that diverges."""

    def explain(
        self, plain: Output, with_draft: PromptOutputs, position: int, greedy: Decoding
    ) -> dict[str, Any]:
        """Fields of a `Divergence` that say whether it is a near-tie.

        plain: the greedy output of this engine, which has no draft. position: of the divergence.
        """

    def logprob(self, output: Output) -> float | str:
        """The mean log-probability of the output's tokens, in nats; or why it is not known."""


@dataclass(eq=False)
class Contender:
    """The engine alone or with one draft, and its results so far.

    running: returns a context in which the engine runs. name: the draft's; "" for the baseline.
    facts: fields of the draft's report that are known in advance, and `missing` as in DraftLog.
    outputs, again, divergences: by number of the prompt; `again` has the outputs of a second start,
    divergences are explained ones. passes: by number of the pass. failures: why the "prompts", or
    the passes of a load (by its text), ended early; earlier results are kept.
    """

    running: Callable[[], AbstractContextManager[Engine]]
    name: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    outputs: dict[int, PromptOutputs] = field(default_factory=dict)
    again: dict[int, PromptRun] = field(default_factory=dict)
    passes: dict[int, TimedPass] = field(default_factory=dict)
    divergences: dict[int, dict[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def runs_already(engine: Engine) -> Callable[[], AbstractContextManager[Engine]]:
    """`running` for an engine that is not started here."""
    return lambda: nullcontext(engine)


class Visit(NamedTuple):
    """The work of a contender in one `running` context: prompts, then passes, by number.

    judges: after the prompts, the contender (the baseline) explains the divergences of all drafts,
    and reads sampled outputs. again: prompts of an earlier visit that are timed again.
    """

    contender: int  # 0: the baseline
    prompts: Sequence[int]
    passes: Sequence[int]
    judges: bool = False
    again: Sequence[int] = ()


@dataclass(frozen=True)
class Task:
    """What engines are asked. limits: of the goodput, as in `load_point`.

    provenance: of the report. journal: has the results so far; None: no results are kept.
    """

    prompts: PromptSet
    decoding: Decoding
    provenance: dict[str, Any] = field(default_factory=dict)
    loads: Sequence[Load] = ()
    limits: dict[str, float] | None = None
    journal: Journal | None = None


# numbers of the prompts of each conversation
Conversations = Sequence[Sequence[int]]


def take_turns(contenders: int, prompts: Conversations, passes: int) -> Iterator[Visit]:
    """Visits of contenders that run at the same time; the first one changes each time."""
    orders = [[*range(first, contenders), *range(first)] for first in range(contenders)]
    for i, conversation in enumerate(prompts):
        yield from (Visit(c, conversation, []) for c in orders[i % contenders])
    yield Visit(0, [], [], judges=True)
    yield from (Visit(c, [], [i]) for i in range(passes) for c in orders[i % contenders])


def there_and_back(contenders: int, prompts: Conversations, passes: int) -> Iterator[Visit]:
    """The visits of contenders that run one at a time: A B C, then C B A.

    All prompts are decoded in both visits of a contender, half of the passes in each.
    """
    every = [i for turns in prompts for i in turns]
    first, second = range(passes)[0::2], range(passes)[1::2]
    yield from (Visit(c, every, first) for c in range(contenders))
    yield from (Visit(c, [], second, c == 0, every) for c in reversed(range(contenders)))


class Comparison:
    """The baseline and contenders with a draft, on the same prompts and at the same concurrency."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        task: Task,
        text_of: Callable[[list[int]], str] = lambda ids: f"token {ids[0]}" if ids else "end",
    ) -> None:
        """contenders: the baseline first. text_of: the text of one token id, or of no id if an
        output ends.
        """
        self.baseline, *self.drafting = contenders
        self.task, self.text_of = task, text_of
        conversations = [turns_of(prompt) for prompt in task.prompts.prompts]
        every = [turn for turns in conversations for turn in turns]
        self.prompts = replace(task.prompts, prompts=every)
        ends = [0, *accumulate(map(len, conversations))]
        self.conversations = [range(start, end) for start, end in pairwise(ends)]
        self.decoding = task.decoding
        self.greedy = replace(task.decoding, sampling=Sampling())
        first_turns, seed = [turns[0] for turns in conversations], task.decoding.seed
        self.passes = [p for load in task.loads for p in passes(load, first_turns, seed)]
        self.unread = ""  # why the sampled outputs were not read

    def run(self, order: Callable[[int, Conversations, int], Iterator[Visit]]) -> None:
        """Make all visits in this order, without the work of contenders that failed."""
        contenders = [self.baseline, *self.drafting]
        self._resume(contenders)
        visits = [*order(len(contenders), self.conversations, len(self.passes))]
        work = sum(len(v.prompts) + len(v.again) + len(v.passes) for v in visits)
        done = sum(len(c.outputs) + len(c.again) + len(c.passes) for c in contenders)
        with tqdm(total=work, initial=done, desc="compared", unit="task") as bar:
            for visit in visits:
                contender = contenders[visit.contender]
                prompts = [i for i in visit.prompts if i not in contender.outputs]
                if "prompts" in contender.failures:
                    prompts = []
                elif "prompts" in self.baseline.failures:  # outputs need a baseline's output
                    prompts = [i for i in prompts if i in self.baseline.outputs]
                failed = contender.failures.keys() | self.baseline.failures.keys()
                again = [
                    i for i in visit.again if i not in contender.again and "prompts" not in failed
                ]
                loaded = [
                    i
                    for i in visit.passes
                    if i not in contender.passes
                    and not failed & {"prompts", str(self.passes[i].load)}
                ]
                unjudged = map(self._unjudged, self.drafting)
                judges = visit.judges and any([*unjudged, self._unread()])
                visit = Visit(visit.contender, prompts, loaded, judges, again)
                if any(visit[1:]):
                    self._visit(contender, visit, bar)

    def pairs(self, contender: Contender) -> list[int]:
        """The numbers of the prompts that the baseline and this contender decoded."""
        return sorted(self.baseline.outputs.keys() & contender.outputs.keys())

    def starts(self) -> Starts | None:
        """The times of servers that were started twice, on the prompts that both starts decoded."""
        seconds_per_token = {
            contender.name or "target": [
                sum(run.seconds for run in runs) / sum(len(run.tokens) for run in runs)
                for runs in (
                    [contender.outputs[i].timed.run for i in contender.again],
                    contender.again.values(),
                )
            ]
            for contender in (self.baseline, *self.drafting)
            if contender.again
        }
        return Starts(seconds_per_token=seconds_per_token) if seconds_per_token else None

    def failures(self, contender: Contender) -> dict[str, str]:
        """Why the "prompts", or the passes of a load, of this draft or the baseline ended early."""
        return self.baseline.failures | contender.failures

    def divergent(self, contender: Contender) -> list[dict[str, Any]]:
        """The fields of a `Divergence` for each greedy output that differs from the baseline's."""
        reason = not_judged(self.baseline.failures.get("prompts", ""))
        unjudged = {i: entry | reason for i, entry in self._unjudged(contender).items()}
        return [entry for _, entry in sorted((contender.divergences | unjudged).items())]

    def by_load(self, contender: Contender) -> tuple[list[dict[str, Any]], str]:
        """The `LoadPoint`s of loads whose passes are complete, and why others are not complete."""
        points, starts = [], self.starts()
        for load in self.task.loads:
            numbers = [i for i, asked in enumerate(self.passes) if asked.load == load]
            if self.baseline.passes.keys() & contender.passes.keys() >= set(numbers):
                pairs = [(self.baseline.passes[i], contender.passes[i]) for i in numbers]
                started = starts.behind(PASSES) if starts else None  # each start does one pass
                points.append(load_point(pairs, self.task.limits, started))
        return points, "; ".join(self.failures(contender).values())

    def log(self, contender: Contender) -> DraftLog:
        """The log of a draft on the prompts that the contender and the baseline decoded."""
        pairs = self.pairs(contender)
        plain, with_draft = (
            [side.outputs[i].timed.run for i in pairs] for side in (self.baseline, contender)
        )
        lossless = {
            "prompts": sum(self._comparable(contender, i) for i in pairs),
            "divergences": self.divergent(contender),
        }
        starts = self.starts()
        twice = {*pairs} <= self.baseline.again.keys() & contender.again.keys()
        by_load, no_load = self.by_load(contender)
        about = dict(contender.facts)
        missing = about.pop("missing") | ({"by_load": no_load} if no_load else {})
        missing |= {"sampled_check": self.unread} if self.unread else {}
        if len(pairs) < len(self.prompts.prompts):
            missing |= {"prompts": self.failures(contender)["prompts"]}
        return DraftLog(
            name=contender.name,
            about=about | {"lossless": lossless, "by_load": by_load},
            runs=with_draft,
            baseline=plain,
            missing=missing,
            again=[(self.baseline.again[i], contender.again[i]) for i in pairs if twice],
            started=starts.behind(2 if twice else 1) if starts else None,
        )

    def report(
        self,
        logs: Sequence[DraftLog],
        rule: str,
        stop_tokens: int | None,
        **facts: Any,
    ) -> Report:
        """The report of these logs; provenance.failures names drafts that failed, with the reason.

        rule: the engine's verification of sampled tokens. stop_tokens: their number; None: unknown.
        facts: other fields of the report. Raises ServerError if no draft has a log.
        """
        failures = "; ".join(
            f"{draft.name} {failure}"
            for draft in self.drafting
            for failure in self.failures(draft).values()
        )
        if not logs:
            raise ServerError(failures)
        used = {run.prompt_id for log in logs for run in log.runs}
        prompts = [prompt for prompt in self.prompts.prompts if prompt.id in used]
        outputs = self.baseline.outputs.values()
        decoding = decoding_facts(
            self.decoding,
            [output.timed.ended for output in outputs],
            gamma=logs[-1].gamma,
            gamma_policy=logs[-1].about["gamma_policy"],
            verification="greedy match" if self.decoding.sampling.greedy else rule,
            stop_tokens=stop_tokens,
        )
        run = RunLog(
            about={
                **facts,
                "decoding": decoding,
                "prompts": prompt_facts(replace(self.prompts, prompts=prompts, ids=[])),
                "starts": self.starts(),
                "provenance": self.task.provenance | ({"failures": failures} if failures else {}),
            },
            answers=[
                TargetOutput(run.prompt_id, prompt_ids, run.tokens, [], group=run.group)
                for run, prompt_ids, *_ in (output.greedy for output in outputs)
            ],
        )
        return build_report(run, logs)

    def _visit(self, contender: Contender, visit: Visit, bar: tqdm) -> None:
        stage, doing, count = "prompts", "", len(self.prompts.prompts)
        try:
            with contender.running() as engine:
                try:
                    for number in visit.prompts:
                        doing = f"after {len(contender.outputs)} of {count} prompts: "
                        output = self._output(contender, engine, number)
                        self._keep(contender, "outputs", number, output)
                        bar.update()
                    for number in visit.again:
                        doing = f"started again, after {len(contender.again)} of {count} prompts: "
                        run = engine.decode(self._asked(contender, number), self.decoding).run
                        self._keep(contender, "again", number, run)
                        bar.update()
                finally:
                    if visit.judges:  # after a failure, too, for the outputs decoded before
                        self._judge(engine)
                warm = set[Load]()
                for number in visit.passes:
                    asked = self.passes[number]
                    stage, doing = str(asked.load), f"at {asked.load}: "
                    if asked.load not in warm:  # a GPU's first batches compile kernels
                        first = asked._replace(prompts=asked.prompts[: asked.edge])
                        timed_pass(engine, first, replace(self.decoding, max_new_tokens=WARM_UP))
                        warm.add(asked.load)
                    passed = timed_pass(engine, asked, self.decoding)
                    self._keep(contender, "passes", number, passed)
                    bar.update()
        except ServerError as error:  # here, because `running` may add to the error
            contender.failures.setdefault(stage, f"{doing}{error}")

    def _output(self, contender: Contender, engine: Engine, number: int) -> PromptOutputs:
        prompt = self._asked(contender, number)
        timed = greedy = engine.decode(prompt, self.decoding)
        if not self.decoding.sampling.greedy:
            greedy = engine.decode(prompt, self.greedy)
        plain = self.baseline.outputs.get(number)
        if contender is self.baseline or (plain and plain.greedy.run.tokens == greedy.run.tokens):
            return PromptOutputs(timed, greedy, None)
        return PromptOutputs(timed, greedy, engine.read(greedy))

    def _asked(self, contender: Contender, number: int) -> Prompt:
        """The prompt; a later turn follows the contender's own outputs."""
        prompt = self.prompts.prompts[number]
        if any(turns[0] == number for turns in self.conversations):
            return prompt
        before = contender.outputs[number - 1].timed.text
        return after(prompt, self._asked(contender, number - 1), before)

    def _comparable(self, contender: Contender, number: int) -> bool:
        """Whether the prompts were equal: after a divergence, later turns are not."""
        plain, with_draft = (c.outputs[number].greedy for c in (self.baseline, contender))
        return plain.prompt_ids == with_draft.prompt_ids

    def _judge(self, engine: Engine) -> None:
        for output in self._unread():
            logprob = engine.logprob(output)
            if isinstance(logprob, str):
                self.unread = logprob
                break
            output.run.logprob = logprob
        for contender in self.drafting:
            for i, entry in self._unjudged(contender).items():
                plain, with_draft = self.baseline.outputs[i].greedy, contender.outputs[i]
                position = entry["position"]
                # an output that is only cut short has no second token, so it is a mismatch
                if position < min(len(plain.run.tokens), len(with_draft.greedy.run.tokens)):
                    entry |= engine.explain(plain, with_draft, position, self.greedy)
                self._keep(contender, "divergences", i, entry)

    def _unjudged(self, contender: Contender) -> dict[int, dict[str, Any]]:
        """The fields of a `Divergence` of each output that differs and is not explained yet."""
        entries = {}
        for i in self.pairs(contender):
            plain, with_draft = (c.outputs[i].greedy.run for c in (self.baseline, contender))
            differs = plain.tokens != with_draft.tokens and self._comparable(contender, i)
            if differs and i not in contender.divergences:
                entries[i] = divergence(plain, with_draft, self.text_of)
        return entries

    def _keep(self, contender: Contender, kind: str, number: int, result: Any) -> None:
        """Keep a result of this kind (a field of the contender), also in the journal."""
        getattr(contender, kind)[number] = result
        if self.task.journal:
            noted = result[1:] if kind == "passes" else result  # the pass itself is known
            self.task.journal.add(f"{kind} of {contender.name or 'target'}", [number, noted])

    def _resume(self, contenders: Sequence[Contender]) -> None:
        """Take the results that the journal has."""
        noted = self.task.journal.results if self.task.journal else {}
        for contender in contenders:
            for kind, form in NOTED.items():
                for number, value in noted.get(f"{kind} of {contender.name or 'target'}", []):
                    result = form.validate_python(value)
                    if kind == "passes":
                        result = TimedPass(self.passes[number], *result)
                    getattr(contender, kind)[number] = result

    def _unread(self) -> list[Output]:
        """The sampled outputs whose log-probabilities are not known yet."""
        if self.decoding.sampling.greedy:
            return []
        outputs = [o.timed for c in (self.baseline, *self.drafting) for o in c.outputs.values()]
        return [output for output in outputs if output.run.logprob is None]
