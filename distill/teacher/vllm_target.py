"""What generates the target's outputs, and the vLLM that a run starts if outputs are missing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from accelerate import PartialState

from align.machine import from_first
from distill.models import Pair, target_device
from distill.prompt_sets import Prompts
from distill.recipe import Recipe
from distill.teacher.answers import (
    AnsweringTarget,
    LocalTarget,
    Made,
    open_store,
    to_answer,
    who_answers,
)
from distill.teacher.logged import LocalReader, Log, ServerReader
from distill.teacher.server_target import ServerTarget, open_server, server_store
from distill.teacher.store import names_of, stores_of
from eval.decoding.target import Target
from eval.engines.server import Server
from eval.engines.start_vllm import gpu_arguments, serve_vllm, vllm_python

LOGPROBS = 20  # vLLM's default --max-logprobs
# on a CPU vLLM 0.32 crashes at a seeded request whose prompt is prefilled in chunks
ON_CPU = ["--enforce-eager", "--max-num-batched-tokens", "32768"]


def answering_target(
    recipe: Recipe, pair: Pair, prompts: Prompts, load: Callable[[], Target]
) -> AnsweringTarget:
    """The target in this process, in a vLLM of this run, or behind a server."""
    settings, stores = recipe.answer_settings(pair.target.stops), stores_of(recipe.folder)
    prompted = prompts.held_out.ids + to_answer(
        prompts.training.ids, recipe.answers_per_prompt, recipe.max_answers
    )
    words = pair.target.vocabulary
    if recipe.answers == "logged":
        log = Log([prompts.held_out, prompts.training], recipe.answer_temperature, words)
        if not recipe.remote_target:
            store = open_store(settings, pair.target, recipe.dtype, stores)
            return LocalReader(store, settings, load, log=log)
        server = open_server(str(recipe.answer_url), recipe.answer_model, settings)
        store = server_store(server, settings, recipe.folder, log.names(prompted), stores)
        return ServerReader(store, settings, pair.target, prompted, server, log=log)
    device, taught = target_device(recipe), recipe.train_on_prompts
    by, why = from_first(who_answers(recipe.answers, device, taught))
    if PartialState().is_main_process:
        print(f"answers: {by}, because {why}")
    if by == "server":
        server = open_server(str(recipe.answer_url), recipe.answer_model, settings)
        store = server_store(server, settings, recipe.folder, names_of(prompted), stores)
        return ServerTarget(store, settings, pair.target, prompted, server)
    store = open_store(settings, pair.target, recipe.dtype, stores)
    if by == "vllm":
        return VllmTarget(store, settings, pair.target, prompted, dtype=recipe.dtype)
    names = names_of(prompted[len(prompts.held_out.ids) :], taught)
    return LocalTarget(
        store, settings, load, pair.layers, pair.fit_layers, names, recipe.fit_tokens
    )


@dataclass(kw_only=True)
class VllmTarget(ServerTarget):
    """A target in a vLLM that the run starts. Its outputs share the reference decoder's store.

    Model and dtype are the same, so the outputs differ only as those of two batch sizes do.
    """

    by = "vllm"
    patience = Server.retries  # none, because vLLM is not restarted
    dtype: str
    stack: ExitStack = field(default_factory=ExitStack)

    def check(self) -> None:
        """Raise EngineMissing if an output is missing and vLLM is not installed."""
        if not self.store.has_all(self.names(self.prompts)):
            vllm_python()

    def __exit__(self, *error: Any) -> None:
        self.running = None
        self.stack.__exit__(*error)  # `started_server` adds the end of the server's log to an error

    def made(self, missing: Mapping[str, list[int]], taught: bool) -> Made:
        if missing:
            self.start()
        return super().made(missing, taught)

    def arguments(self) -> list[str]:
        """vLLM's arguments for this target, long enough for each prompt with its output."""
        positions = max(map(len, self.prompts)) + self.settings.decoding.max_new_tokens
        # vLLM refuses float32 for most quantised targets
        dtype = "auto" if self.target.quantisation else self.dtype
        arguments = ["--dtype", dtype, "--max-model-len", str(positions)]
        return arguments + (gpu_arguments(self.target) or ON_CPU)

    def start(self) -> None:
        if self.running is not None or not PartialState().is_main_process:
            return
        arguments = ["--max-logprobs", str(max(LOGPROBS, self.settings.top_k)), *self.arguments()]
        print(f"starting vLLM with {' '.join(arguments)}", flush=True)
        url = self.stack.enter_context(serve_vllm(self.target.folder, *arguments))
        self.running = open_server(url, None, self.settings)
        self._check_server()
