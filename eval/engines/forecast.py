"""What a draft can gain in an engine, from the times of its steps, before anything is trained.

A step with a draft takes as long as b plain steps. So the draft must emit more than b tokens a step
(its mean acceptance length) to gain, and a draft of length g gains at most (g + 1) / b, while
outputs are generated. The weights hardly matter: an untrained draft of the same shape takes as
long. n-gram speculation takes as long as verifying, the least of all drafts; so that it drafts in
every step, the prompts repeat themselves.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field
from tqdm import tqdm

from align.checkpoint import Checkpoint
from eval.decoding.loop import Decoding
from eval.engines.engine_server import EngineServer, Launcher
from eval.engines.load import WARM_UP, Pass, TimedPass, timed_pass
from eval.engines.measure import PATIENCE, machine_of
from eval.engines.server import ServerError
from eval.measuring.cost import StepCosts, break_even_length, expected_speedup
from eval.measuring.evaluation import context_length
from eval.measuring.intervals import Part, Positive, Quantity
from eval.measuring.runs import Speculation
from eval.prompts import Prompt, PromptSet
from eval.reporting.fields import Environment, Load

COPIES = 16  # of a part of a prompt, which an output then continues
SEAMS = 16  # more tokens of the copies, where their ends are tokenized in another way
NEW_TOKENS = 128  # most tokens of an output
STEPS = 100  # fewest timed steps of a request
DRAFTING = 0.5  # fewest steps that draft, as a share: the time of the others is subtracted


class Gain(Part):
    """What drafts of one length can gain at one load."""

    draft: str
    draft_length: Positive
    concurrency: Positive
    plain_step_ms: Quantity
    step_ms: Quantity = Field(description="of a step that drafts, the draft's time included")
    break_even: Quantity = Field(description="mean acceptance length that gives 1x: step / plain")
    perfect_speedup: Quantity = Field(description="if all drafted tokens are accepted")


class Forecast(Part):
    """The content of forecast.json."""

    schema_name: Annotated[Literal["draftsmith-forecast/1"], Field(alias="schema")]
    target: str
    prompt_tokens: Quantity = Field(description="mean; outputs follow")
    environment: Environment
    gains: list[Gain]


class Step(NamedTuple):
    """A mean step of a request. drafting: the share of steps that drafted."""

    seconds: float
    drafting: float


def repeating(prompts: PromptSet, text_of: Callable[[list[int]], str] | None) -> list[Prompt]:
    """Raw prompts of about the same lengths, each COPIES of a prompt's middle.

    text_of: the text of token ids; None: the ids are not known.
    """

    def middle(whole: Any) -> Any:
        half = len(whole) // 2
        return whole[half : half + max(1, len(whole) // COPIES)]

    return [
        Prompt(
            prompt.id, prompt=COPIES * (text_of(middle(ids)) if text_of else middle(prompt.text))
        )
        for prompt, ids in zip(prompts.prompts, prompts.ids, strict=True)
    ]


def timed_step(
    server: EngineServer, prompts: Sequence[Prompt], load: Load, decoding: Decoding
) -> Step:
    """The mean step while all requests of the load are decoded, with or without a draft.

    Raises ServerError if a request fails, or if they never run at the same time.
    """
    count, asked = load.concurrency, cycle(prompts)
    seconds, steps, drafts, in_waves = 0.0, 0.0, 0.0, 0.0

    def wave(decoding: Decoding) -> TimedPass:
        return timed_pass(server, Pass(load, [*islice(asked, count)], 0, count, (0, 0)), decoding)

    wave(replace(decoding, max_new_tokens=WARM_UP))  # a GPU's first batches compile kernels
    while steps < STEPS * count:
        timed = wave(decoding)
        runs = [(request.start, request.run) for request in timed.requests]
        written = sum(sum(run.block_tokens) for _, run in runs)
        counts = timed.counters or Speculation(0.0, 0.0, 0.0, [])
        # A step that drafts nothing emits one token. A last step may be cut, but is counted whole.
        in_steps = max(counts.drafts, written - counts.accepted)
        drafts += counts.drafts
        in_waves += in_steps
        first = max(start + run.prefill_seconds for start, run in runs)
        last = min(start + run.seconds for start, run in runs)
        for start, run in runs:
            ends = start + np.cumsum([run.prefill_seconds, *run.block_seconds[:-1]])
            within = np.flatnonzero((ends >= first) & (ends < last))
            if len(within) < 2:
                raise ServerError(
                    f"{server.url} does not decode {count} requests at a time; let it take as many "
                    "(vLLM: --max-num-seqs), or give shorter prompts."
                )
            seconds += float(ends[within[-1]] - ends[within[0]])
            tokens = sum(run.block_tokens[within[0] : within[-1]])
            steps += tokens * in_steps / (in_steps + counts.accepted)
    return Step(seconds / steps, drafts / in_waves)


def forecast_gains(
    launcher_type: type[Launcher],
    target: Checkpoint,
    drafts: Mapping[str, str],
    gammas: Sequence[int],
    prompts: PromptSet,
    text_of: Callable[[list[int]], str] | None,
    decoding: Decoding,
    loads: Sequence[Load],
    arguments: Sequence[str] = (),
) -> Forecast:
    """What drafts of the lengths `gammas` can gain; a server is started for each, and without one.

    drafts: by name. text_of: as in `repeating`. loads: numbers of requests at a time. arguments: of
    each server, with priority over ours. Raises UserError if the engine is missing, and ServerError
    if a draft cannot be served.
    """
    new = min(decoding.max_new_tokens, NEW_TOKENS)
    decoding = replace(decoding, max_new_tokens=new, ignore_eos=True)
    asked = repeating(prompts, text_of)
    positions = context_length(prompts.ids, new, max(gammas)) + SEAMS
    positions = min(positions, launcher_type.longest(target))
    slots = max(load.concurrency for load in loads)
    method = None if decoding.sampling.greedy else decoding.draft_sample_method
    with tempfile.TemporaryDirectory() as scratch:
        launcher = launcher_type(
            target, drafts.values(), Path(scratch), positions, slots, arguments
        )
        if launcher.unreadable:
            raise ServerError("; ".join(launcher.unreadable.values()))
        machine, plain, gains = machine_of(launcher), dict[Load, Step](), list[Gain]()
        served = [("", "", 0)] + [
            (name, draft, length)
            for name, draft in drafts.items()
            for length in launcher.lengths(draft, gammas)
        ]
        for name, draft, length in tqdm(served, desc="step times", unit="server"):
            with launcher.serve(draft, length, method) as url:
                server = launcher.client(url, PATIENCE)
                machine["engine_version"] = server.version
                for load in loads:
                    step = timed_step(server, asked, load, decoding)
                    plain.setdefault(load, step)
                    if draft and step.drafting < DRAFTING:
                        print(f"Warning: {name} drafted in {step.drafting:.0%} of steps: not timed")
                    elif draft:
                        gains.append(_gain(name, length, load, plain[load], step))
        if not gains:
            raise ServerError("Nothing was timed: the warnings say why; read the servers' logs.")
    return Forecast(
        schema_name="draftsmith-forecast/1",
        target=target.spec,
        prompt_tokens=float(np.mean([*map(len, prompts.ids)])),
        environment=Environment(**machine),
        gains=gains,
    )


def _gain(draft: str, length: int, load: Load, plain: Step, step: Step) -> Gain:
    """The gain of drafts whose mean step, with steps that draft nothing, is `step`."""
    seconds = (step.seconds - (1 - step.drafting) * plain.seconds) / step.drafting
    plain_ms, step_ms = 1000 * plain.seconds, 1000 * seconds
    costs = StepCosts(0.0, plain_ms, {1: plain_ms, length + 1: step_ms}, 0)
    return Gain(
        draft=draft,
        draft_length=length,
        concurrency=load.concurrency,
        plain_step_ms=plain_ms,
        step_ms=step_ms,
        break_even=break_even_length(length, costs),
        perfect_speedup=expected_speedup([1.0] * length, costs),
    )


def print_gains(gains: Sequence[Gain]) -> None:
    """Print a table of the gains."""
    width = max(5, *(len(gain.draft) for gain in gains))
    print(
        f"{'draft':>{width}}  length  requests  plain step, ms  with draft  break-even, "
        "tokens a step  perfect draft"
    )
    for gain in gains:
        print(
            f"{gain.draft:>{width}}  {gain.draft_length:>6}  {gain.concurrency:>8}  "
            f"{gain.plain_step_ms:>14.1f}  {gain.step_ms:>10.1f}  {gain.break_even:>25.2f}  "
            f"{gain.perfect_speedup:>12.2f}x"
        )
