"""What all servers have in common as engines: streamed outputs, and counts of speculation.

vLLM and llama-server have counters spec_decode_* at /metrics (docs.vllm.ai; llama.cpp's
tools/server/README.md). An output's counts are their differences before and after its request.
SGLang sends an output's counts with it.
"""

from __future__ import annotations

import argparse
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar, NoReturn, TypeVar

from align.checkpoint import Checkpoint
from eval.decoding.build import longest_context
from eval.decoding.loop import Decoding
from eval.decoding.verification import SampleMethod
from eval.engines.contender import Engine, Output, PromptOutputs
from eval.engines.counters import NAMES, Series, between, read_series
from eval.engines.near_ties import Judge, Logprobs, explain
from eval.engines.server import AT_ONCE, Server, ServerError, passing
from eval.prompts import Prompt

T = TypeVar("T", int, str)


class EngineServer(Server, Engine, Judge, ABC):
    """A server as an `Engine`. Methods raise ServerError if a request fails.

    engine: its name in reports. owner: `owned_by` of its models. version_at: path and key of its
    version. retries: of a request, also of a stream that broke off; a running server gets more once
    it has answered. Of `decode` only the last try is timed and counted.
    """

    engine: str
    owner: str
    version_at: tuple[str, str]
    retries = AT_ONCE

    @abstractmethod
    def streamed(self, prompt: Prompt, decoding: Decoding) -> Output:
        """The output for one prompt without counts, in one try."""

    @property
    def version(self) -> str | None:
        """The engine's version; None if the server does not report it."""
        path, key = self.version_at
        try:
            return str(self.ask(path)[key])
        except (ServerError, LookupError, TypeError):
            return None

    def explain(
        self, plain: Output, with_draft: PromptOutputs, position: int, greedy: Decoding
    ) -> dict[str, Any]:
        """As in `Engine`, by the log-probabilities of the servers."""
        outputs = plain.run.tokens, with_draft.greedy.run.tokens
        return explain(self, with_draft.reading, plain.prompt_ids, outputs, position)

    def is_up(self) -> bool:
        """As in `Engine`, by its list of models."""
        try:
            return bool(self.text("/v1/models", AT_ONCE))
        except ServerError:
            return False

    def read(self, greedy: Output) -> Any:
        """The log-probabilities of this server for its own output, or why there are none."""
        try:
            return self.read_wide(greedy.prompt_ids, greedy.run.tokens)
        except ServerError as failure:
            return str(failure)

    def logprob(self, output: Output) -> float | str:
        """As in `Engine`, at temperature 1."""
        read = self.read(output)
        if isinstance(read, str):
            return read
        return fmean(seen[token] for seen, token in zip(read, output.run.tokens, strict=True))

    def read_from(self, prompt: list[int], output: list[int], at: int) -> list[Logprobs]:
        return self.read_wide(prompt, output)

    def generate(self, prompt: Prompt, decoding: Decoding) -> Output:
        """The output for one prompt, while the server may have other requests.

        Its prefill begins with the first try, because a user of a loaded server waits as long.
        """
        begins: list[float] = []

        def begun() -> Output:
            begins.append(time.perf_counter())
            return self.streamed(prompt, decoding)

        output = self._patiently(begun)
        output.run.prefill_seconds += begins[-1] - begins[0]
        return output

    def decode(self, prompt: Prompt, decoding: Decoding) -> Output:
        """The output for one prompt with its counts; the server must have no other request."""

        def counted() -> Output:
            before = self.counters()
            output = self.streamed(prompt, decoding)
            return output._replace(counters=between(before, self.counters()))

        return self._patiently(counted)

    def _patiently(self, attempt: Callable[[], Output]) -> Output:
        retries = self.retries
        while True:
            try:
                return attempt()
            except ServerError as error:
                if not error.passing or not retries.total:
                    raise
                retries = retries.increment(error=error)
                retries.sleep()

    def counters(self) -> Series:
        """The server's counters of speculation now; empty if they are not known."""
        try:
            page = self.text("/metrics", AT_ONCE)
        except ServerError:  # speed can be measured without counters
            return {}
        # vLLM has these counters only if it speculates
        idle = dict.fromkeys(((name, 0) for name in NAMES[:3]), 0.0)
        return (idle if f"\n{self.owner}:" in page else {}) | read_series(page)

    def messages(self, path: str, body: dict[str, Any], prompt: Prompt) -> Any:
        """Yields the messages of a streamed output. Raises ServerError for an error among them."""
        for message in self.stream(path, body, f" to prompt {prompt.id!r}"):
            if error := message.get("error"):
                raise ServerError(
                    f"{self.url} failed at prompt {prompt.id!r}: {error}",
                    passing=isinstance(error, dict) and passing(error.get("code")),
                )
            yield message

    def break_off(self, prompt: Prompt, again: bool = True) -> NoReturn:
        """Raise ServerError for an output that did not end as it should. again: ask again."""
        raise ServerError(
            f"{self.url} broke off in its output for prompt {prompt.id!r}; read its log.",
            passing=again,
        )


def option_value(arguments: Sequence[str], default: T, *names: str) -> T:
    """The value of an option of these names among a program's arguments; the last one counts.

    It has the default's type; another value ends the command with status 2.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(*names, default=default, type=type(default), dest="value")
    value: T = parser.parse_known_args(arguments)[0].value
    return value


@dataclass(eq=False)
class Launcher(ABC):
    """An engine's servers of a target on this machine.

    client: of a server. program: finds the engine's program; raises UserError if there is none.
    rule: verification of sampled tokens.
    drafts: specs. scratch: a folder for converted checkpoints. positions: most tokens of a prompt
    with its output. slots: most requests at a time. given: the user's arguments, which have
    priority. opened: the drafts that are models, by their specs.
    installed: JSON that changes with the engine's version. arguments: of all servers. variables:
    of their environment, unless the user sets them. unreadable: reasons by the draft's spec.
    contexts: most tokens of a text that a draft's server takes, if the target alone takes more.
    device: its kind, as cpu or cuda. hardware: its model name. dtype: of the target. runner: the
    model runner of the last started server; None: not known.
    """

    client: ClassVar[type[EngineServer]]
    program: ClassVar[Callable[[], Path]]
    rule: ClassVar[str] = "the server's own rule"

    target: Checkpoint
    drafts: Collection[str]
    scratch: Path
    positions: int
    slots: int
    given: Sequence[str]

    opened: dict[str, Checkpoint] = field(init=False, default_factory=dict)
    installed: list[Any] = field(init=False)
    arguments: list[str] = field(init=False)
    variables: dict[str, str] = field(init=False, default_factory=dict)
    unreadable: dict[str, str] = field(init=False, default_factory=dict)
    contexts: dict[str, int] = field(init=False, default_factory=dict)
    device: str = field(init=False)
    hardware: str = field(init=False)
    dtype: str = field(init=False)
    runner: str | None = field(init=False, default=None)

    @staticmethod
    def longest(target: Checkpoint) -> int:
        """The target's context length in tokens."""
        return longest_context(target.text_config)

    @abstractmethod
    def __post_init__(self) -> None:
        """Convert checkpoints, and set the fields that are not given."""

    def lengths(self, draft: str, gammas: Sequence[int]) -> Sequence[int]:
        """The lengths of a draft: `gammas`, or its longest."""
        most = self.longest_draft(draft)
        return sorted({min(draft_length, most or draft_length) for draft_length in gammas})

    @abstractmethod
    def longest_draft(self, draft: str) -> int | None:
        """The most tokens that a draft was made for; None: any number."""

    @abstractmethod
    def command(
        self, draft: str, draft_length: int, draft_sample_method: SampleMethod | None
    ) -> list[str]:
        """A command that serves the draft for users, without what only a measurement needs."""

    @abstractmethod
    def serve(
        self, draft: str, draft_length: int, draft_sample_method: SampleMethod | None
    ) -> AbstractContextManager[str]:
        """The address of a server, which ends with the block. draft: "" for the target alone."""
