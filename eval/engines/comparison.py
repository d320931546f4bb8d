"""Compares an engine with each draft and without a draft, on the same prompts and in a fair order.

The work is a table of tasks (visits.py) for each contender. A task is done (it has a result),
failed (it has a reason), or open.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import accumulate, pairwise
from typing import Any

from pydantic import TypeAdapter
from tqdm import tqdm

from eval.decoding.prompt_run import PromptRun
from eval.decoding.verification import Sampling
from eval.engines.contender import Contender, Engine, PromptOutputs, Task
from eval.engines.conversation import after, turns_of
from eval.engines.load import (
    PASSES,
    Pass,
    TimedPass,
    load_point,
    overload,
    passes,
    timed_pass,
    warm_up,
)
from eval.engines.near_ties import not_judged
from eval.engines.server import ServerError
from eval.engines.visits import JUDGE, OUTPUTS, TIMED, Conversations, Visit, Work
from eval.measuring.evaluation import decoding_facts, prompt_facts, reaching
from eval.measuring.intervals import FEWEST_CLUSTERS, Starts
from eval.measuring.journal import Journal
from eval.measuring.output_check import divergence
from eval.measuring.runs import DraftLog, RunLog, TargetOutput
from eval.prompts import Prompt
from eval.reporting.build import build_report
from eval.reporting.fields import Load, Report

FAILED_SHARE = 0.2  # a server that fails at a larger share of the prompts is given up
DIVERGENCES, LOGPROBS = "divergences", "logprobs"
# The results of a contender as a journal has them, by their field.
KINDS: dict[str, TypeAdapter[Any]] = {
    OUTPUTS: TypeAdapter(PromptOutputs),
    TIMED: TypeAdapter(TimedPass),
    DIVERGENCES: TypeAdapter(dict[str, Any]),
    LOGPROBS: TypeAdapter(float),
}


class Comparison:
    """The baseline and contenders with a draft, on the same prompts and at the same concurrency."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        task: Task,
        text_of: Callable[[list[int]], str] = lambda ids: f"token {ids[0]}" if ids else "end",
    ) -> None:
        """contenders: the baseline first. text_of: of one token id, or of none: an output ends."""
        self.contenders, (self.baseline, *self.drafting) = contenders, contenders
        self.task, self.text_of = task, text_of
        conversations = [turns_of(prompt) for prompt in task.prompts.prompts]
        self.prompts = [turn for turns in conversations for turn in turns]
        self.count = len(self.prompts)
        ends = [0, *accumulate(map(len, conversations))]
        self.conversations = [range(start, end) for start, end in pairwise(ends)]
        # the conversation of each prompt
        self.turns = [turns for turns in self.conversations for _ in turns]
        self.passes = range(PASSES * len(task.loads))
        self.decoding = task.decoding
        self.greedy = replace(task.decoding, sampling=Sampling())
        self.unread = ""  # why the sampled outputs were not read
        self.fewest = reaching(self.prompts, FEWEST_CLUSTERS)  # prompts that give an interval
        # prompts at which a contender may fail before it is given up
        self.most_failures = max(1, int(FAILED_SHARE * self.count))
        # prompts for which there is time, and when the first visit ends
        self.in_time, self.first_ends = self.count, math.inf

    def run(self, order: Callable[[int, Conversations, int], Iterator[Visit]]) -> None:
        """Make all visits in this order, with those tasks that are open."""
        visits = [*order(len(self.contenders), self.conversations, len(self.passes))]
        if self.task.journal:
            self._resume(self.task.journal, {task for visit in visits for task in visit.tasks})
        if self.task.seconds is not None:
            self.first_ends = time.monotonic() + self.task.seconds / len(visits)
        work = sum(len(visit.tasks) for visit in visits)
        done = sum(len(c.outputs) + len(c.passes) for c in self.contenders)
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
            for (stage, number), why in sorted(failed)
            if self._first(stage, number)
            for later in self.turns[number]
            if later >= number
        }

    def _first(self, stage: str, number: int) -> bool:
        """Whether the task is a prompt's output after the first start."""
        return stage == OUTPUTS and number < self.count

    def pairs(self, contender: Contender) -> list[int]:
        """The numbers of the prompts that the baseline and this contender decoded."""
        both = self.baseline.outputs.keys() & contender.outputs.keys() - self.left_out.keys()
        return sorted(number for number in both if number < self.count)

    def _runs(self, contender: Contender) -> list[dict[int, PromptRun]]:
        """The outputs of each start, by number of the prompt."""
        starts: dict[int, dict[int, PromptRun]] = {}
        for number, output in sorted(contender.outputs.items()):
            starts.setdefault(number // self.count, {})[number % self.count] = output.timed.run
        return [*starts.values()]

    def starts(self) -> Starts | None:
        """The times of servers that were started again, on the prompts that all starts decoded."""
        seconds_per_token = {}
        for contender in self.contenders:
            if len(starts := self._runs(contender)) > 1:
                both = set.intersection(*({*runs} for runs in starts))
                seconds_per_token[contender.name or "target"] = [
                    sum(runs[i].seconds for i in both) / sum(len(runs[i].tokens) for i in both)
                    for runs in starts
                ]
        return Starts(seconds_per_token=seconds_per_token) if seconds_per_token else None

    def failures(self, *contenders: Contender) -> list[str]:
        """What these contenders did not do, besides prompts that are left out, and why."""
        reasons = list[str]()
        for contender in contenders:
            tasks = [task for task in contender.failed if not self._first(*task)]
            reasons += [contender.gone, *(contender.failed[task] for task in tasks)]
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
        undone = len(points) + len(overloads) < len(self.task.loads)
        reason = "; ".join(self.failures(self.baseline, contender)) if undone else ""
        return points, overloads, reason

    def log(self, contender: Contender) -> DraftLog:
        """The log of a draft on the prompts that the contender and the baseline decoded."""
        pairs, starts = self.pairs(contender), self.starts()
        for side in (self.baseline, contender):
            for i, logprob in side.logprobs.items():
                side.outputs[i].timed.run.logprob = logprob
        # a start that is not complete does not count
        sides = (
            [runs for runs in self._runs(side) if {*pairs} <= runs.keys()]
            for side in (self.baseline, contender)
        )
        (plain, with_draft), *again = zip(*sides, strict=False)
        by_load, overloads, no_load = self.by_load(contender)
        about = dict(contender.facts)
        missing = about.pop("missing") | ({"by_load": no_load} if no_load else {})
        missing |= {"sampled_check": self.unread} if self.unread else {}
        if len(pairs) + len(self.left_out) < self.in_time:
            reasons = self.failures(self.baseline, contender)
            missing |= {"prompts": "; ".join(reasons) or "another server failed at them"}
        about["lossless"] = {
            "prompts": sum(self._comparable(contender, i) for i in pairs),
            "divergences": self.divergent(contender),
        }
        return DraftLog(
            name=contender.name,
            about=about | {"by_load": by_load, "overloads": overloads},
            runs=[with_draft[i] for i in pairs],
            baseline=[plain[i] for i in pairs],
            missing=missing,
            again=[(base[i], runs[i]) for base, runs in again for i in pairs],
            started=starts.behind(1 + len(again)) if starts else None,
        )

    def report(
        self, logs: Sequence[DraftLog], rule: str, stop_tokens: int | None, **facts: Any
    ) -> Report:
        """The report of these logs; provenance.failures names drafts that failed, with the reason.

        rule: the engine's verification of sampled tokens. stop_tokens: their number, if known.
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
        outputs = [output for i, output in self._first_outputs() if self.prompts[i].id in used]
        decoding = decoding_facts(
            self.decoding,
            [output.timed.ended for output in outputs],
            gamma=logs[-1].gamma,
            gamma_policy=logs[-1].about["gamma_policy"],
            verification="greedy match" if self.decoding.sampling.greedy else rule,
            stop_tokens=stop_tokens,
        )
        prompts = [prompt for prompt in self.prompts if prompt.id in used]
        about = {
            **facts,
            "decoding": decoding,
            "prompts": prompt_facts(replace(self.task.prompts, prompts=prompts, ids=[]))
            | {"left_out": [*self.left_out.values()], "other_ids": self.other_ids()},
            "starts": self.starts(),
            "provenance": self.task.provenance | ({"failures": failures} if failures else {}),
        }
        answers = [
            TargetOutput(run.prompt_id, prompt_ids, run.tokens, run.group)
            for run, prompt_ids, *_ in (output.greedy for output in outputs)
        ]
        return build_report(RunLog(about, answers=answers), logs)

    def _first_outputs(self) -> list[tuple[int, PromptOutputs]]:
        """The outputs of the baseline's first start, with the numbers of their prompts."""
        return [(i, output) for i, output in self.baseline.outputs.items() if i < self.count]

    def other_ids(self) -> list[str] | None:
        """The ids of prompts that the engine renders otherwise than the task; None: not known."""
        rendered = self.task.prompts
        if not any(map(any, rendered.ids)):  # no tokenizer is there: no ids, or zeros
            return None
        ids = {p.id: ids for p, ids in zip(rendered.prompts, rendered.ids, strict=True)}
        timed = [(self.prompts[i].id, output.timed) for i, output in self._first_outputs()]
        return [name for name, o in timed if name in ids and o.prompt_ids != ids[name]]

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
                if task:
                    contender.failed[task] = gone
        if gone:
            contender.gone = contender.gone or gone
            if self._first(*(task or visit.tasks[0])):
                contender.failed.clear()  # an engine that is given up leaves out no prompts

    def _cut(self, visit: Visit, stage: str, number: int) -> None:
        """Leave out this prompt and the later ones if the time of the first visit is over."""
        first = visit.contender == 0 and self._first(stage, number)
        at_start = first and number == self.turns[number][0] and number >= self.fewest
        if at_start and time.monotonic() > self.first_ends:
            self.in_time = min(self.in_time, number)

    def _open(self, contender: Contender, stage: str, number: int) -> bool:
        """Whether the task is neither done nor failed, and of use for a comparison."""
        if (stage, number) in contender.failed:
            return False
        if stage == JUDGE:
            entries = [e for draft in self.drafting for e in self._divergences(draft).values()]
            return bool(self._unread()) or not all(entry["judged"] for entry in entries)
        plain, prompt = self.baseline, number % self.count
        needed = number in plain.passes if stage == TIMED else prompt in plain.outputs
        if plain.gone and contender is not plain and not needed:
            return False
        if stage == TIMED:
            earlier = {*range(number - number % PASSES, number)}  # passes of this load
            done = plain.passes.keys() & contender.passes.keys()
            undone = number not in contender.passes and (stage, number) not in plain.failed
            return undone and done >= earlier
        if number in contender.outputs or prompt in self.left_out or prompt >= self.in_time:
            return False
        return number == prompt or prompt in self.pairs(contender)

    def _perform(
        self, contender: Contender, engine: Engine, stage: str, number: int, warm: set[Load]
    ) -> None:
        """Do a task. Raises ServerError if the engine is gone, or fails at too many prompts.

        warm: loads for which the engine has had batches.
        """
        start = number // self.count if stage == OUTPUTS else 0
        done = sum(number // self.count == start for number in contender.outputs)
        doing = f"{'started again, ' * (start > 0)}after {done} of {self.count} prompts"
        try:
            if stage == OUTPUTS:
                self._keep(contender, stage, number, self._output(contender, engine, number))
            elif stage == JUDGE:
                self._judge(engine)
            else:
                load_pass = self._pass(number)
                doing = f"at {load_pass.load}"
                if load_pass.load not in warm:
                    warm_up(engine, load_pass, self.decoding)
                    warm.add(load_pass.load)
                self._keep(contender, stage, number, timed_pass(engine, load_pass, self.decoding))
        except ServerError as error:
            failure = ServerError(f"{doing}: {error}")
            if not engine.is_up():
                raise failure from None
            left_out = self._first(stage, number)
            contender.failed[stage, number] = str(error if left_out else failure)
            prompts = sum(stage == OUTPUTS for stage, _ in contender.failed)
            if stage == OUTPUTS and prompts > self.most_failures:
                raise failure from None

    def _pass(self, number: int) -> Pass:
        """The pass of this number; the one of the baseline if it is done."""
        if number in self.baseline.passes:
            return self.baseline.passes[number].asked
        firsts = [turns[0] for turns in self.conversations]
        prompts = [self.prompts[i] for i in firsts if i not in self.left_out]
        both_passes = passes(self.task.loads[number // PASSES], prompts, self.decoding.seed)
        return both_passes[number % PASSES]

    def _output(self, contender: Contender, engine: Engine, number: int) -> PromptOutputs:
        prompt = self._asked(contender, number % self.count)
        timed = greedy = engine.decode(prompt, self.decoding)
        if number >= self.count:  # only the time differs
            return PromptOutputs(timed, greedy)
        if not self.decoding.sampling.greedy:
            greedy = engine.decode(prompt, self.greedy)
        plain = self.baseline.outputs.get(number)
        if contender is self.baseline or (plain and plain.greedy.run.tokens == greedy.run.tokens):
            return PromptOutputs(timed, greedy)
        return PromptOutputs(timed, greedy, engine.read(greedy))

    def _asked(self, contender: Contender, number: int) -> Prompt:
        """The prompt; a later turn follows the contender's own outputs."""
        prompt = self.prompts[number]
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
                    if self.prompts[i].response_format:
                        entry |= not_judged("log-probabilities do not know the response_format")
                    else:
                        entry |= engine.explain(plain, with_draft, entry["position"], self.greedy)
                    self._keep(contender, DIVERGENCES, i, entry)

    def _unread(self) -> list[tuple[Contender, int]]:
        """The sampled outputs whose log-probabilities are not known yet, by number."""
        if self.decoding.sampling.greedy:
            return []
        sampled = [(c, i) for c in self.contenders for i in range(self.count)]
        return [(c, i) for c, i in sampled if i in c.outputs and i not in c.logprobs]

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
        """Keep a result, also in the journal. kind: the field of the contender."""
        getattr(contender, kind)[number] = result
        # a divergence that is not judged is judged by the next process
        if self.task.journal and (kind != DIVERGENCES or result["judged"]):
            key = self._key(contender, kind, number)
            self.task.journal.add(f"{kind} of {contender.name or 'target'}", [key, result])

    def _resume(self, journal: Journal, tasks: set[Work]) -> None:
        """Take the results that the journal has of these contenders, tasks and settings."""
        journal.begin("results by contender, stage and prompt", "whole steps")
        work = tasks | {(kind, i) for kind in (DIVERGENCES, LOGPROBS) for i in range(self.count)}
        for contender in self.contenders:
            stages = {kind: f"{kind} of {contender.name or 'target'}" for kind in KINDS}
            values = {kind: dict(journal.results.get(stages[kind], [])) for kind in KINDS}
            for kind, number in sorted(work - {(JUDGE, 0)}):
                if (key := self._key(contender, kind, number)) in values[kind]:
                    result = KINDS[kind].validate_python(values[kind][key])
                    getattr(contender, kind)[number] = result

    def _key(self, contender: Contender, kind: str, number: int) -> str:
        """A hash of everything on which a result depends."""
        about = [contender.identity, self.baseline.identity if kind == DIVERGENCES else None, kind]
        if kind == TIMED:
            about += [self.task.loads[number // PASSES], number % PASSES]
            prompts: Sequence[int] = [turns[0] for turns in self.conversations]
        else:
            start, number = divmod(number, self.count)
            prompts = self.turns[number]
            about += [start, number - prompts[0]]
        settings = asdict(self.decoding) | {"stops": sorted(self.decoding.stops)}
        about += [settings, [asdict(self.prompts[i]) for i in prompts]]
        return hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]
