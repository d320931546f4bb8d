"""A vLLM that the run starts on this machine for missing answers, and ends after them."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from accelerate import PartialState

from align.machine import from_first
from align.sources import load_config, resolve_checkpoint
from align.vocabulary import Vocabulary
from distill.prompt_sets import Prompts
from distill.recipe import Recipe
from distill.teacher.answers import open_store, who_answers
from distill.teacher.served import ServedTarget
from distill.teacher.store import Store
from eval.engines.environment import vllm_python
from eval.engines.local_vllm import serve_vllm, tensor_parallel
from eval.engines.server import Server

LOGPROBS = 20  # a token, which vLLM gives unless it is told otherwise
# on a CPU vLLM 0.32 crashes at a seeded request whose prompt it reads in chunks
UNCHUNKED = ["--max-num-batched-tokens", "32768"]


def served_target(recipe: Recipe, target: Vocabulary, prompts: Prompts) -> ServedTarget | None:
    """The target where vLLM answers for it, the recipe's own or one started here; else None."""
    by, why = from_first(who_answers(recipe))
    if PartialState().is_main_process:
        print(f"answers: {by}, since {why}")
    if by == "server":
        return ServedTarget(recipe, target, prompts)
    if by == "vllm":
        return StartedVllm(recipe, target, prompts, open_store(recipe, target))
    return None


class StartedVllm(ServedTarget):
    """The target of a recipe in that vLLM. Its answers are kept with those of our own loop.

    They are the same model's in the same dtype, and differ as those of two batch sizes do.
    """

    by = "vllm"
    patience = Server.retries  # none: it is not started a second time

    def __init__(self, recipe: Recipe, target: Vocabulary, prompts: Prompts, store: Store) -> None:
        super().__init__(recipe, target, prompts)
        self.store = store
        self.running = ExitStack()  # the server, from the first answer that lacks until `close`

    def check(self) -> None:
        """Raises EngineMissing where there is no vLLM and an answer is lacking."""
        if self._unanswered():
            vllm_python()

    def close(self) -> None:
        self.running.close()
        self.__dict__.pop("server", None)

    def _answer(self, unanswered: list[int]) -> None:
        try:
            if "server" not in self.__dict__:
                self._start()
            super()._answer(unanswered)
        except BaseException:  # an interruption must not leave a server behind, either
            self.close()
            raise

    def _start(self) -> None:
        gpus = torch.cuda.device_count()
        arguments = ["--max-logprobs", str(max(LOGPROBS, self.recipe.cache_top_k))]
        if gpus:
            parts = tensor_parallel(gpus, load_config(self.recipe.target))
            arguments += ["--tensor-parallel-size", str(parts)]
        else:
            arguments += UNCHUNKED
        print(f"vLLM starts, with {' '.join(arguments)}", flush=True)
        url = self.running.enter_context(
            serve_vllm(
                resolve_checkpoint(self.recipe.target),
                *arguments,
                positions=max(map(len, self.prompts)) + self.recipe.answer_max_new_tokens,
                dtype=self.recipe.dtype,
                eager=not gpus,
            )
        )
        self.server = self._server(url)
        self._check_server()
