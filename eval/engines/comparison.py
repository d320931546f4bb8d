"""Compares an engine with each draft and without a draft, on the same prompts and in a fair order.

The order is fair on a machine that slows down steadily. Contenders that run at the same time take
turns at each prompt. Servers that are started one at a time decode all prompts in order, and then,
each started again, in the opposite order. The difference between a server's times on the same
prompts is what a start, or the time of the visit, changes.

The work is a table of tasks: a stage (OUTPUTS, AGAIN, JUDGE, TIMED) and the number of a prompt or
a pass, for each contender. A task is done (it has a result), failed (it has a reason), or open.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import Field, TypeAdapter
from tqdm import tqdm

from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Sampling
from eval.engines.divergences import Logprobs, not_judged
from eval.engines.load import (
    PASSES,
    Pass,
    Request,
    TimedPass,
    Window,
    load_point,
    overload,
    passes,
    timed_pass,
)
from eval.engines.server import ServerError
from eval.measuring.evaluation import decoding_facts, prompt_facts
from eval.measuring.intervals import FEWEST_CLUSTERS, Starts
from eval.measuring.journal import Journal
from eval.measuring.output_check import divergence
from eval.measuring.runs import DraftLog, RunLog, Speculation, TargetOutput
from eval.prompts import Prompt, PromptSet, after, turns_of
from eval.reporting.build import build_report
from eval.reporting.fields import Load, Report

WARM_UP = 16  # tokens of outputs that are not timed
TRIES = 2  # most starts of a server in a visit; the second one after a failure
FAILED_SHARE = 0.2  # a server that fails at a larger share of the prompts is given up
OUTPUTS, AGAIN, JUDGE, TIMED = "outputs", "again", "judge", "passes"
DIVERGENCES, LOGPROBS, FAILED = "divergences", "logprobs", "failed"
Work = tuple[str, int]  # a task: its stage, and the number of its prompt or pass


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


class Noted(NamedTuple):
    """A `Pass` as a journal has it: with the ids of its prompts."""

    prompts: list[str]
    edge: int
    batch: int


# The results of a contender as a journal has them, by their field.
NOTED: dict[str, TypeAdapter[Any]] = {
    OUTPUTS: TypeAdapter(PromptOutputs),
    AGAIN: TypeAdapter(PromptRun),
    TIMED: TypeAdapter(tuple[Noted, list[Request], Speculation | None, Window]),
    DIVERGENCES: TypeAdapter(dict[str, Any]),
    LOGPROBS: TypeAdapter(float),
    FAILED: TypeAdapter(str),
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

    def answers(self) -> bool:
        """Whether the engine still runs, after an error."""

    def logprob(self, output: Output) -> float | str:
        """The mean log-probability of the output's tokens, in nats; or why it is not known."""


@dataclass(eq=False)
class Contender:
    """The engine alone or with one draft, and its results so far.

    running: returns a context in which the engine runs. name: the draft's; "" for the baseline.
    facts: fields of the draft's report that are known in advance, and `missing` as in DraftLog.
    identity: JSON that changes with the engine and its draft, whose results a journal keeps.
    outputs, divergences, logprobs: by number of the prompt; divergences are judged ones, logprobs
    are of sampled outputs. again: outputs of later starts, whose prompts are numbered on: with n
    prompts, n + i is prompt i of the second start. passes: by number of the pass. failed: prompts
    at which a running engine failed, with the reason. failed_tasks: other tasks, with the reason.
    gone: why the first visit that ended early did so, or "".
    """

    running: Callable[[], AbstractContextManager[Engine]]
    name: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    identity: Any = None
    outputs: dict[int, PromptOutputs] = field(default_factory=dict)
    again: dict[int, PromptRun] = field(default_factory=dict)
    passes: dict[int, TimedPass] = field(default_factory=dict)
    divergences: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: dict[int, float] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    failed_tasks: dict[Work, str] = field(default_factory=dict)
    gone: str = ""


def runs_already(engine: Engine) -> Callable[[], AbstractContextManager[Engine]]:
    """`running` for an engine that is not started here."""
    return lambda: nullcontext(engine)


class Visit(NamedTuple):
    """The work of a contender in one `running` context: prompts, then passes, by number.

    judges: after the prompts, the contender (the baseline) explains the divergences of all drafts,
    and reads sampled outputs. again: prompts of an earlier visit that are timed again, as in
    `Contender`. tries: the most starts; 1: the engine runs already.
    """

    contender: int  # 0: the baseline
    prompts: Sequence[int]
    passes: Sequence[int]
    judges: bool = False
    again: Sequence[int] = ()
    tries: int = 1

    @property
    def tasks(self) -> list[Work]:
        """The tasks in order; what is judged is not lost if the machine's time ends later."""
        tasks = [*((OUTPUTS, i) for i in self.prompts), *[(JUDGE, 0)] * self.judges]
        return [*tasks, *((AGAIN, i) for i in self.again), *((TIMED, i) for i in self.passes)]


@dataclass(frozen=True)
class Task:
    """What engines are asked. limits: of the goodput, as in `load_point`.

    provenance: of the report. journal: has the results so far; None: no results are kept. seconds:
    time of all visits; so many prompts are decoded as the first visit has time for. starts: of each
    server that is started here.
    """

    prompts: PromptSet
    decoding: Decoding
    provenance: dict[str, Any] = field(default_factory=dict)
    loads: Sequence[Load] = ()
    limits: dict[str, float] | None = None
    journal: Journal | None = None
    seconds: float | None = None
    starts: int = 2


# numbers of the prompts of each conversation
Conversations = Sequence[Sequence[int]]


def take_turns(contenders: int, prompts: Conversations, passes: int) -> Iterator[Visit]:
    """Visits of contenders that run at the same time; the first one changes each time."""
    orders = [[*range(first, contenders), *range(first)] for first in range(contenders)]
    for i, conversation in enumerate(prompts):
        yield from (Visit(c, conversation, []) for c in orders[i % contenders])
    yield Visit(0, [], [], judges=True)
    yield from (Visit(c, [], [i]) for i in range(passes) for c in orders[i % contenders])


def there_and_back(
    contenders: int, prompts: Conversations, passes: int, starts: int = 2
) -> Iterator[Visit]:
    """The visits of contenders that run one at a time: A B C, C B A, A B C, and so on.

    All prompts are decoded in each visit of a contender, half of the passes in each of the first
    two. The baseline judges as soon as it runs again.
    """
    count = sum(map(len, prompts))
    for start in range(starts):
        order = range(contenders) if start % 2 == 0 else reversed(range(contenders))
        numbers = range(start * count, (start + 1) * count)
        timed = range(passes)[start::PASSES] if start < PASSES else []
        for c in order:
            if start == 0:
                yield Visit(c, numbers, timed, tries=TRIES)
            else:
                yield Visit(c, [], timed, c == 0 and start == 1, numbers, TRIES)
    if starts == 1:
        yield Visit(0, [], [], judges=True, tries=TRIES)


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
        self.contenders, (self.baseline, *self.drafting) = contenders, contenders
        self.task, self.text_of = task, text_of
        conversations = [turns_of(prompt) for prompt in task.prompts.prompts]
        every = [turn for turns in conversations for turn in turns]
        self.prompts = replace(task.prompts, prompts=every)
        ends = [0, *accumulate(map(len, conversations))]
        self.conversations = [range(start, end) for start, end in pairwise(ends)]
        # the conversation of each prompt
        self.turns = [turns for turns in self.conversations for _ in turns]
        self.passes = range(PASSES * len(task.loads))
        self.decoding = task.decoding
        self.greedy = replace(task.decoding, sampling=Sampling())
        self.unread = ""  # why the sampled outputs were not read
        # prompts at which a contender may fail before it is given up
        self.most_failures = max(1, int(FAILED_SHARE * len(every)))
        self.count, self.first_ends = len(every), math.inf  # prompts, and when the first visit ends

    def run(self, order: Callable[[int, Conversations, int], Iterator[Visit]]) -> None:
        """Make all visits in this order, with those tasks that are open."""
        visits = [*order(len(self.contenders), self.conversations, len(self.passes))]
        self._resume({number for visit in visits for number in visit.again})
        if self.task.seconds is not None:
            self.first_ends = time.monotonic() + self.task.seconds / len(visits)
        work = sum(len(visit.tasks) for visit in visits)
        done = sum(len(c.outputs) + len(c.again) + len(c.passes) for c in self.contenders)
        with tqdm(total=work, initial=done, desc="compared", unit="task") as bar:
            for visit in visits:
                contender = self.contenders[visit.contender]
                if visit.tries > 1 or not contender.gone:
                    self._visit(contender, visit, bar)

    @property
    def left_out(self) -> dict[int, str]:
        """Why prompts are left out for all contenders: a running engine failed at them.

        So are the later turns of a conversation.
        """
        failed = [entry for contender in self.contenders for entry in contender.failed.items()]
        return {
            later: why
            for number, why in sorted(failed)
            for later in self.turns[number]
            if later >= number
        }

    def pairs(self, contender: Contender) -> list[int]:
        """The numbers of the prompts that the baseline and this contender decoded."""
        both = self.baseline.outputs.keys() & contender.outputs.keys()
        return sorted(both - self.left_out.keys())

    def _again(self, contender: Contender) -> list[dict[int, PromptRun]]:
        """The outputs of each later start, by number of the prompt."""
        count = len(self.turns)
        starts: dict[int, dict[int, PromptRun]] = {}
        for number, run in sorted(contender.again.items()):
            starts.setdefault(number // count, {})[number % count] = run
        return [*starts.values()]

    def starts(self) -> Starts | None:
        """The times of servers that were started again, on the prompts that all starts decoded."""
        seconds_per_token = {}
        for contender in filter(lambda c: c.again, self.contenders):
            again = self._again(contender)
            both = set.intersection(*({*runs} for runs in again))
            first = {i: contender.outputs[i].timed.run for i in both}
            runs = [[start[i] for i in both] for start in (first, *again)]
            seconds_per_token[contender.name or "target"] = [
                sum(run.seconds for run in one) / sum(len(run.tokens) for run in one)
                for one in runs
            ]
        return Starts(seconds_per_token=seconds_per_token) if seconds_per_token else None

    def failures(self, contender: Contender) -> list[str]:
        """What this contender did not do, besides prompts that are left out, and why."""
        reasons = [contender.gone, *contender.failed_tasks.values()]
        return [*dict.fromkeys(filter(None, reasons))]

    def divergent(self, contender: Contender) -> list[dict[str, Any]]:
        """The fields of a `Divergence` for each greedy output that differs from the baseline's."""
        reason = not_judged("; ".join(self.failures(self.baseline)))
        entries = self._divergences(contender)
        return [e if e["judged"] or "why" in e else e | reason for e in entries.values()]

    def by_load(
        self, contender: Contender
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
        """`LoadPoint`s and `Overload`s of loads with all passes, and why others lack passes."""
        starts, plain = self.starts(), self.baseline.passes
        points, overloads = list[dict[str, Any]](), list[dict[str, Any]]()
        for first in self.passes[::PASSES]:
            numbers = self.passes[first : first + PASSES]
            if all(i in plain and i in contender.passes for i in numbers):
                pairs = [(plain[i], contender.passes[i]) for i in numbers]
                started = starts.behind(PASSES) if starts else None  # each start does one pass
                if over := overload(pairs):
                    overloads.append(over)
                else:
                    points.append(load_point(pairs, self.task.limits, started))
        reasons = [*self.failures(self.baseline), *self.failures(contender)]
        undone = len(points) + len(overloads) < len(self.task.loads)
        return points, overloads, "; ".join(reasons) if undone else ""

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
        for side in (self.baseline, contender):
            for i, logprob in side.logprobs.items():
                side.outputs[i].timed.run.logprob = logprob
        starts = self.starts()
        complete = (
            [runs for runs in self._again(side) if {*pairs} <= runs.keys()]
            for side in (self.baseline, contender)
        )
        again = [*zip(*complete, strict=False)]  # a start that is not complete does not count
        by_load, overloads, no_load = self.by_load(contender)
        about = dict(contender.facts)
        missing = about.pop("missing") | ({"by_load": no_load} if no_load else {})
        missing |= {"sampled_check": self.unread} if self.unread else {}
        if len(pairs) + len(self.left_out) < self.count:
            reasons = [*self.failures(self.baseline), *self.failures(contender)]
            missing |= {"prompts": "; ".join(reasons) or "another server failed at them"}
        return DraftLog(
            name=contender.name,
            about=about | {"lossless": lossless, "by_load": by_load, "overloads": overloads},
            runs=with_draft,
            baseline=plain,
            missing=missing,
            again=[(base[i], runs[i]) for base, runs in again for i in pairs],
            started=starts.behind(1 + len(again)) if starts else None,
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
            f"{contender.name or 'target'} {failure}"
            for contender in self.contenders
            for failure in self.failures(contender)
        )
        if not logs:
            raise ServerError(failures or next(iter(self.left_out.values())))
        used = {run.prompt_id for log in logs for run in log.runs}
        prompts = [prompt for prompt in self.prompts.prompts if prompt.id in used]
        outputs = [o for o in self.baseline.outputs.values() if o.timed.run.prompt_id in used]
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
                "prompts": prompt_facts(replace(self.prompts, prompts=prompts, ids=[]))
                | {"left_out": [*self.left_out.values()], "other_ids": self.other_ids(outputs)},
                "starts": self.starts(),
                "provenance": self.task.provenance | ({"failures": failures} if failures else {}),
            },
            answers=[
                TargetOutput(run.prompt_id, prompt_ids, run.tokens, [], group=run.group)
                for run, prompt_ids, *_ in (output.greedy for output in outputs)
            ],
        )
        return build_report(run, logs)

    def other_ids(self, outputs: Sequence[PromptOutputs]) -> list[str] | None:
        """The ids of prompts that the engine renders otherwise than the task; None: not known."""
        rendered = self.task.prompts
        if not any(map(any, rendered.ids)):  # no tokenizer is there: no ids, or zeros
            return None
        ids = {p.id: ids for p, ids in zip(rendered.prompts, rendered.ids, strict=True)}
        timed = [output.timed for output in outputs if output.timed.run.prompt_id in ids]
        return [o.run.prompt_id for o in timed if o.prompt_ids != ids[o.run.prompt_id]]

    def _visit(self, contender: Contender, visit: Visit, bar: tqdm) -> None:
        """Do the open tasks of the visit; after a failure of the engine, start it once more."""
        gone, task = "", None
        for _ in range(visit.tries):
            if not any(self._open(contender, *task) for task in visit.tasks):
                break
            task, warm = None, set[Load]()
            try:
                with contender.running() as engine:
                    for task in visit.tasks:
                        self._cut(visit, *task)
                        if self._open(contender, *task):
                            self._perform(contender, engine, *task, warm)
                            bar.update()
                return
            except ServerError as error:  # here, because `running` may add to the error
                gone = str(error)
                if task and task[0] == OUTPUTS:
                    contender.failed[task[1]] = gone
                elif task:
                    contender.failed_tasks[task] = gone
        if gone:
            contender.gone = contender.gone or gone
            if visit.prompts and (not task or task[0] == OUTPUTS):
                contender.failed.clear()  # an engine that is given up leaves out no prompts

    def _cut(self, visit: Visit, stage: str, number: int) -> None:
        """Leave out this prompt and the later ones if the time of the first visit is over."""
        first = visit.contender == 0 and stage == OUTPUTS and number == self.turns[number][0]
        if first and number >= FEWEST_CLUSTERS and time.monotonic() > self.first_ends:
            self.count = min(self.count, number)

    def _open(self, contender: Contender, stage: str, number: int) -> bool:
        """Whether the task is neither done nor failed, and of use for a comparison."""
        if (stage, number) in contender.failed_tasks:
            return False
        if stage == JUDGE:
            entries = [e for draft in self.drafting for e in self._divergences(draft).values()]
            return bool(self._unread()) or not all(entry["judged"] for entry in entries)
        plain, prompt = self.baseline, number % len(self.turns)
        needed = number in plain.passes if stage == TIMED else prompt in plain.outputs
        if plain.gone and contender is not plain and not needed:
            return False
        if stage == TIMED:
            earlier = {*range(number - number % PASSES, number)}  # passes of this load
            both = plain.passes.keys() & contender.passes.keys()
            undone = number not in contender.passes and (stage, number) not in plain.failed_tasks
            return undone and both >= earlier
        if prompt in self.left_out or prompt >= self.count:
            return False
        if stage == AGAIN:
            return number not in contender.again and prompt in self.pairs(contender)
        return number not in contender.outputs

    def _perform(
        self, contender: Contender, engine: Engine, stage: str, number: int, warm: set[Load]
    ) -> None:
        """Do a task. Raises ServerError if the engine is gone, or fails at too many prompts.

        warm: loads for which the engine has had batches.
        """
        count = len(self.prompts.prompts)
        doing = f"after {len(contender.outputs)} of {count} prompts"
        try:
            if stage == OUTPUTS:
                self._keep(contender, stage, number, self._output(contender, engine, number))
            elif stage == AGAIN:
                doing = f"started again, after {len(contender.again)} of {count} prompts"
                asked = self._asked(contender, number % len(self.turns))
                run = engine.decode(asked, self.decoding).run
                self._keep(contender, stage, number, run)
            elif stage == JUDGE:
                self._judge(engine)
            else:
                load_pass = self._pass(number)
                doing = f"at {load_pass.load}"
                if load_pass.load not in warm:  # a GPU's first batches compile kernels
                    first = load_pass._replace(
                        load=Load(concurrency=load_pass.edge),
                        prompts=load_pass.prompts[: load_pass.edge],
                    )
                    timed_pass(engine, first, replace(self.decoding, max_new_tokens=WARM_UP))
                    warm.add(load_pass.load)
                self._keep(contender, stage, number, timed_pass(engine, load_pass, self.decoding))
        except ServerError as error:
            failure = ServerError(f"{doing}: {error}")
            if not engine.answers():
                raise failure from None
            if stage == OUTPUTS:
                self._keep(contender, FAILED, number, str(error))
            else:
                contender.failed_tasks[stage, number] = str(failure)
            prompts = len(contender.failed) + sum(s == AGAIN for s, _ in contender.failed_tasks)
            if stage in (OUTPUTS, AGAIN) and prompts > self.most_failures:
                raise failure from None

    def _pass(self, number: int) -> Pass:
        """The pass of this number; the one of the baseline if it is done."""
        if number in self.baseline.passes:
            return self.baseline.passes[number].asked
        firsts = [turns[0] for turns in self.conversations]
        prompts = [self.prompts.prompts[i] for i in firsts if i not in self.left_out]
        every = passes(self.task.loads[number // PASSES], prompts, self.decoding.seed)
        return every[number % PASSES]

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
        if number == self.turns[number][0]:
            return prompt
        before = contender.outputs[number - 1].timed.text
        return after(prompt, self._asked(contender, number - 1), before)

    def _comparable(self, contender: Contender, number: int) -> bool:
        """Whether the prompts were equal: after a divergence, later turns are not."""
        plain, with_draft = (c.outputs[number].greedy for c in (self.baseline, contender))
        return plain.prompt_ids == with_draft.prompt_ids

    def _judge(self, engine: Engine) -> None:
        for contender, number in self._unread():
            logprob = engine.logprob(contender.outputs[number].timed)
            if isinstance(logprob, str):
                self.unread = logprob
                break
            self._keep(contender, LOGPROBS, number, logprob)
        for contender in self.drafting:
            for i, entry in self._divergences(contender).items():
                if not entry["judged"]:
                    plain, with_draft = self.baseline.outputs[i].greedy, contender.outputs[i]
                    entry |= {"judged": True}
                    entry |= engine.explain(plain, with_draft, entry["position"], self.greedy)
                    self._keep(contender, DIVERGENCES, i, entry)

    def _divergences(self, contender: Contender) -> dict[int, dict[str, Any]]:
        """The fields of a `Divergence` of each output that differs, by number of the prompt."""
        entries = {}
        for i in self.pairs(contender):
            plain, with_draft = (c.outputs[i].greedy.run for c in (self.baseline, contender))
            if plain.tokens != with_draft.tokens and self._comparable(contender, i):
                entry = divergence(plain, with_draft, self.text_of)
                # an output that is only cut short has no second token, so it is a mismatch
                cut = entry["position"] == min(len(plain.tokens), len(with_draft.tokens))
                entries[i] = contender.divergences.get(i, entry | {"judged": cut})
        return entries

    def _keep(self, contender: Contender, kind: str, number: int, result: Any) -> None:
        """Keep a result of this kind (a field of the contender), also in the journal."""
        getattr(contender, kind)[number] = result
        # a divergence that is not judged is judged by the next process
        if self.task.journal and (kind != DIVERGENCES or result["judged"]):
            if kind == TIMED:
                asked: Pass = result.asked
                ids = [prompt.id for prompt in asked.prompts]
                result = [Noted(ids, asked.edge, asked.batch), *result[1:]]
            stage = f"{kind} of {contender.name or 'target'}"
            self.task.journal.add(stage, [self._key(contender, kind, number), result])

    def _resume(self, again: Iterable[int]) -> None:
        """Take the results that the journal has of these contenders, prompts and settings.

        again: the numbers of prompts of later starts.
        """
        if self.task.journal is None:
            return
        self.task.journal.begin("results by contender, stage and prompt")
        by_id = {prompt.id: prompt for prompt in self.prompts.prompts}
        numbers = {TIMED: self.passes, AGAIN: again}
        for contender in self.contenders:
            for kind, form in NOTED.items():
                stage = f"{kind} of {contender.name or 'target'}"
                values = dict(self.task.journal.results.get(stage, []))
                for number in numbers.get(kind, range(len(self.turns))):
                    if (key := self._key(contender, kind, number)) in values:
                        result = form.validate_python(values[key])
                        if kind == TIMED:
                            noted: Noted = result[0]
                            asked = self._pass(number)._replace(
                                prompts=[by_id[i] for i in noted.prompts],
                                edge=noted.edge,
                                batch=noted.batch,
                            )
                            result = TimedPass(asked, *result[1:])
                        getattr(contender, kind)[number] = result
            if len(contender.failed) > self.most_failures:  # given up, so all are tried again
                contender.failed.clear()

    def _key(self, contender: Contender, kind: str, number: int) -> str:
        """A hash of everything on which a result depends."""
        about = [contender.identity, self.baseline.identity if kind == DIVERGENCES else None, kind]
        if kind == TIMED:
            about += [self.task.loads[number // PASSES], number % PASSES]
            prompts: Sequence[int] = [turns[0] for turns in self.conversations]
        else:
            start, number = divmod(number, len(self.turns))
            prompts = self.turns[number]
            about += [start, number - prompts[0]]
        settings = asdict(self.decoding) | {"stops": sorted(self.decoding.stops)}
        about += [settings, [asdict(self.prompts.prompts[i]) for i in prompts]]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]

    def _unread(self) -> list[tuple[Contender, int]]:
        """The sampled outputs whose log-probabilities are not known yet, by number."""
        if self.decoding.sampling.greedy:
            return []
        return [(c, i) for c in self.contenders for i in c.outputs if i not in c.logprobs]
