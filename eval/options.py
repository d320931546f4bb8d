"""The options of `python -m eval.run`, and their defaults from a training run."""

from __future__ import annotations

import json
import math
import os
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BeforeValidator
from ruamel.yaml import YAML, YAMLError

from align.check import Strategy
from align.command_line import AtLeastNone, Count, NotNegative, Options, Positive, UpToOne, option
from align.errors import UserError
from align.files import read_json
from eval.chat_template import LongPrompts
from eval.decoding.drafters import LOOKUP
from eval.decoding.verification import SampleMethod
from eval.engines.engine_server import Launcher
from eval.engines.llama_cpp import LlamaLauncher
from eval.engines.load import GOODPUT, PASSES
from eval.engines.measure import CLIENTS
from eval.engines.start_vllm import VllmLauncher
from eval.reporting.fields import Load

STARTED: dict[str, type[Launcher]] = {"vllm": VllmLauncher, "llama.cpp": LlamaLauncher}
IN_PROCESS = ["torch", "transformers"]
ENGINES = [*IN_PROCESS, *(client.engine for client in CLIENTS)]


def _numbers(kind: type[int] | type[float], example: str, text: str) -> list[Any]:
    """The finite numbers above 0 of a list, sorted, each once."""
    with suppress(ValueError):
        numbers = sorted({kind(part) for part in text.split(",")})
        if all(0 < number < math.inf for number in numbers):
            return numbers
    raise ValueError(f"should be numbers above 0, as {example}")


def _limits(text: str) -> dict[str, float]:
    parts = [part.partition(":") for part in text.split(",")]
    with suppress(ValueError):
        limits = {name: float(limit) for name, _, limit in parts}
        if limits.keys() <= {*GOODPUT} and all(0 < limit < math.inf for limit in limits.values()):
            return limits
    raise ValueError(f"should be limits in ms of {', '.join(GOODPUT)}, as ttft:500,tpot:50")


def _object(text: str) -> dict[str, Any]:
    with suppress(json.JSONDecodeError):
        if isinstance(value := json.loads(text), dict):
            return value
    raise ValueError('should be a JSON object, as {"enable_thinking": false}')


Lengths = Annotated[Sequence[int], BeforeValidator(partial(_numbers, int, "2,4"))]
Sizes = Annotated[Sequence[int], BeforeValidator(partial(_numbers, int, "1,2,4,8"))]
Rates = Annotated[Sequence[float], BeforeValidator(partial(_numbers, float, "0.5,2,8"))]
Limits = Annotated[dict[str, float], BeforeValidator(_limits)]
Object = Annotated[dict[str, Any], BeforeValidator(_object)]
Words = Annotated[Sequence[str], BeforeValidator(shlex.split)]


@dataclass(frozen=True)
class RunOptions(Options):
    """What is measured, and how. tuning, training: files of a training run's prompts.

    overlap: training prompts that nearly repeat a prompt, if it is known.
    """

    target: str = option("Hub id, folder, GGUF or pypi: file", "", group="target, drafts, prompts")
    draft: Sequence[str] = option(
        "[NAME=]SPEC, repeatable; prompt-lookup needs no model; with --base_url NAME=URL: what "
        "this server drafts with, by your word",
        (),
    )
    prompts: str = option("Hub data set, pypi: file or .jsonl", "")
    instruction: str | None = option("user message; {prompt} stands for the prompt", None)
    chat_template_kwargs: Object | None = option(
        'arguments of the chat template, as {"enable_thinking": false}', None, metavar="JSON"
    )
    max_prompt_length: Count | None = option("most tokens of a prompt; default: what fits", None)
    long_prompts: LongPrompts = option("longer prompts", "error")
    run: Path | None = option("output folder of a training run: its settings are defaults", None)
    output_dir: Path = option(
        "folder of the report; with --run: RUN, RUN-ENGINE or RUN-served", Path("outputs/eval")
    )
    max_prompts: Count | None = option("most prompts; the seed draws them", None)
    seed: AtLeastNone = option("seed of prompts and samples", 42)

    temperature: NotNegative = option("0: greedy", 0.0, group="decoding")
    top_k: Count | None = option("likeliest tokens that are sampled from; default: all", None)
    top_p: UpToOne = option("their probability; 1: all tokens", 1.0)
    verification: Literal["block", "token"] = option("verify by block, or by token", "block")
    draft_sample_method: SampleMethod | None = option(
        "where tokens are sampled; default: probabilistic, in vLLM greedy", None
    )
    max_new_tokens: Count = option("most tokens of an output", 128)
    gamma: Lengths = option(
        "draft length; default: chosen on prompts that are not evaluated; servers take several, as "
        "2,4; with --base_url: the draft length of the servers",
        (),
    )
    ngram_gamma: Count | None = option("draft length of n-grams in vLLM; default: --gamma", None)
    max_gamma: Count = option("longest draft length that is tried", 6)
    speed_prompts: Count = option("most prompts that are timed", 40)
    tuning_prompts: Count = option("prompts to choose the length on", 8)
    strategy: Literal["auto"] | Strategy = option("vocabulary map", "auto")
    dtype: Literal["bfloat16", "float16", "float32"] = option("dtype of all models", "bfloat16")
    device: str = option(
        "device of all models; auto: the target's layers over all GPUs, the draft on the first",
        "cuda" if torch.cuda.is_available() else "cpu",
    )

    engine: str = option(
        "decoder; default: torch, or the running server's", "", group="engine", choices=ENGINES
    )
    base_url: Sequence[str] = option(
        "[NAME=]URL of a running server with a draft, repeatable; default: servers start here", ()
    )
    baseline_url: str = option("a running server of the same target without a draft", "")
    minutes: Positive | None = option("time limit in servers started here: fewer prompts", None)
    starts: Count | None = option("starts of each server here, with all prompts; default: 2", None)
    server_args: Words = option('for servers started here, as "--tensor-parallel-size 2"', ())
    forecast: bool = option(
        "only time steps in servers started here, and say what drafts can gain at most; default "
        "--draft: prompt-lookup",
        False,
    )

    concurrency: Sizes = option(
        "also measure with N requests at a time, as 1,4,8,32", (), group="loads, of servers"
    )
    request_rate: Rates = option("also with N new requests per second, at random times", ())
    goodput: Limits | None = option("most ms of a good request: ttft:500,tpot:50,e2el:3000", None)

    fail_under_alpha: float | None = option(
        "exit status 1 if the last draft's lower bound is below", None, group="gates"
    )
    fail_under_speedup: float | None = option("the same for its speed-up", None)

    tuning: Path | None = None
    training: Path | None = None
    overlap: int | None = None

    @property
    def running(self) -> bool:
        """Whether running servers are measured."""
        return bool(self.base_url or self.baseline_url)

    @property
    def loads(self) -> list[Load]:
        sizes = [Load(concurrency=size) for size in self.concurrency]
        return sizes + [Load(rate=rate) for rate in self.request_rate]

    @property
    def draft_length(self) -> int | None:
        return self.gamma[0] if self.gamma else None

    def refusals(self) -> Iterator[str]:
        engine, serves = self.engine, self.running or self.engine in STARTED
        measured = "a running server" if self.running else f"engine {engine}"
        if (processes := os.environ.get("WORLD_SIZE", "1")) != "1":
            yield f"one process measures, not {processes} at once; start it with python -m eval.run"
        if not self.running and engine not in (*IN_PROCESS, *STARTED):
            yield f"engine {engine} is not started here; give --base_url and --baseline_url"
        measures, started = not self.forecast, serves and not self.running
        applies = {
            "concurrency": serves,
            "request_rate": serves and measures,
            "server_args": started,
            "goodput": serves and measures,
            "minutes": started and measures,
            "starts": started and measures,
            "ngram_gamma": engine == "vllm" and started and measures,
            "forecast": started,
            "fail_under_alpha": measures,
            "fail_under_speedup": measures,
            "draft_sample_method": self.running or engine in ("torch", "vllm"),
            "strategy": engine == "torch" or self.run is not None,
            "max_prompt_length": not self.running or self.run is not None,
        }
        for name, applied in applies.items():
            if not applied and getattr(self, name) != getattr(RunOptions, name):
                yield f"--{name} has no effect with {measured}; omit it"
        for argument in self.server_args if engine == "vllm" else ():
            if argument.replace("_", "-").startswith(("--spec-", "--speculative-", "-sc")):
                yield f"{argument} makes the target alone draft, too, or verify with loss; omit it"
        if serves and self.long_prompts == "truncate_left":
            yield f"{measured} renders whole prompts; give --long_prompts drop, or other --prompts"
        if self.loads and self.starts and self.starts < PASSES:
            yield f"a load needs {PASSES} starts; omit --starts {self.starts}"
        if self.loads and self.minutes:
            yield "--minutes limits one request at a time, not loads; omit --minutes, or the loads"
        if len(self.gamma) > 1 and not started:
            yield f"{measured} takes one --gamma, not {', '.join(map(str, self.gamma))}"
        if self.goodput and not self.loads:
            yield "--goodput needs a load; give --concurrency or --request_rate"
        report = self.output_dir / "report" / "report.json"
        in_run = self.run is not None and self.output_dir.resolve() == self.run.resolve()
        others = engine != "torch" and in_run and report.exists()
        if others and read_json(report).get("engine") == "torch":
            yield f"{measured} needs another --output_dir: the run has its decoder's report there"
        if self.running:
            if not (self.base_url and self.baseline_url and self.prompts):
                yield "running servers need --base_url, --baseline_url and --prompts"
            if engine in IN_PROCESS:
                yield f"--base_url has no effect with engine {engine}; omit one of them"
            if self.instruction and not self.target:
                yield "--instruction is for chat templates; give --target, whose tokenizer has one"
            return
        if not (self.target and self.draft and self.prompts):
            yield "give --target, --draft and --prompts, or --run DIR"
        if engine != "torch" and not self.gamma:
            yield f"engine {engine} needs --gamma, because it does not choose a draft length"


def defaults(given: dict[str, Any]) -> dict[str, Any]:
    """The defaults that depend on other options. given: the command's."""
    served = "base_url" in given or "baseline_url" in given
    values: dict[str, Any] = {} if served else {"engine": "torch"}
    if "forecast" in given:
        values["draft"] = [LOOKUP]
    if "run" in given:
        values |= _of_run(given["run"], given, "served" if served else given.get("engine", "torch"))
    return values


def _of_run(folder: Path, given: dict[str, Any], engine: str) -> dict[str, Any]:
    """The defaults from a finished training run. engine: "served" for running servers."""
    try:
        recipe = YAML(typ="safe", pure=True).load(folder / "recipe.yaml")
    except (OSError, YAMLError, UnicodeDecodeError):
        recipe = None
    if not isinstance(recipe, dict) or "draft" not in recipe or not (folder / "draft").is_dir():
        raise UserError(
            f"{folder} is not the folder of a finished training run, because recipe.yaml or draft/ "
            "is missing or damaged; finish the run, or give --target, --draft and --prompts."
        )
    keys = "target temperature top_k top_p max_new_tokens dtype instruction chat_template_kwargs"
    keys += " max_prompt_length long_prompts"
    defaults = {key: recipe[key] for key in keys.split() if recipe.get(key) is not None}
    defaults |= {"output_dir": folder, "tuning": folder / "prompts" / "tuning.jsonl"}
    if engine != "torch":
        defaults["output_dir"] = Path(f"{os.path.abspath(folder)}-{engine}")
    tuned = folder / "draft"
    drafts = [f"tuned={tuned}"]
    if recipe["draft"]:  # nobody serves a base draft that was made from the target
        drafts.insert(0, f"untuned={recipe['draft']}")
    if given.get("engine") != "transformers":  # that engine is measured with checkpoints only
        drafts.insert(-1, "lookup=prompt-lookup")
    if given.get("engine") in (None, "torch", "llama.cpp"):  # others put no n-grams before a draft
        drafts.append(f"tuned+lookup=lookup-first:{tuned}")
    defaults["draft"] = drafts
    if "prompts" in given:
        defaults["training"] = folder / "prompts" / "train.jsonl"
    else:
        for name in given.keys() & {"instruction", "chat_template_kwargs"}:
            raise UserError(
                f"--{name} does nothing to the prompts of {folder}, because they are stored with "
                "their instruction; give --prompts, or omit the option."
            )
        defaults["overlap"] = 0  # the run dropped training prompts that overlap
        defaults["prompts"] = str(folder / "prompts" / "eval.jsonl")
    defaults["strategy"] = read_json(folder / "vocab_check.json").get("used", "auto")
    return defaults
