"""What is compared: an engine, alone or with a draft, its outputs, and what it is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple, Protocol

from pydantic import Field

from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.engines.load import TimedPass
from eval.engines.near_ties import Logprobs
from eval.engines.visits import Work
from eval.measuring.journal import Journal
from eval.measuring.runs import Speculation
from eval.prompts import Prompt, PromptSet
from eval.reporting.fields import Load


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
    reading: Annotated[list[Logprobs] | Any, Field(union_mode="left_to_right")] = None


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

    def is_up(self) -> bool:
        """Whether the engine still runs, after an error."""

    def logprob(self, output: Output) -> float | str:
        """The mean log-probability of the output's tokens, in nats; or why it is not known."""


@dataclass(eq=False)
class Contender:
    """The engine alone or with one draft, and its results so far.

    running: returns a context in which the engine runs. name: the draft's; "" for the baseline.
    facts: fields of the draft's report that are known in advance, and `missing` as in DraftLog.
    identity: JSON that changes with the engine and its draft, whose results a journal keeps.
    outputs, passes: results by number of the task. divergences (judged ones), logprobs (of sampled
    outputs): by number of the prompt. failed: tasks that failed, with the reason. gone: why the
    first visit that ended early did so, or "".
    """

    running: Callable[[], AbstractContextManager[Engine]]
    name: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    identity: Any = None
    outputs: dict[int, PromptOutputs] = field(default_factory=dict)
    passes: dict[int, TimedPass] = field(default_factory=dict)
    divergences: dict[int, dict[str, Any]] = field(default_factory=dict)
    logprobs: dict[int, float] = field(default_factory=dict)
    failed: dict[Work, str] = field(default_factory=dict)
    gone: str = ""


def runs_already(engine: Engine) -> Callable[[], AbstractContextManager[Engine]]:
    """`running` for an engine that is not started here."""
    return lambda: nullcontext(engine)


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
