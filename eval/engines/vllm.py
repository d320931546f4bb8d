"""A vLLM server as an engine: output tokens with their times, by vLLM's OpenAI API."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from eval.decoding.loop import Decoding, seed_of
from eval.decoding.prompt_run import PromptRun
from eval.engines.contender import Output
from eval.engines.conversation import chat_request
from eval.engines.engine_server import EngineServer
from eval.engines.near_ties import TOP, Logprobs
from eval.engines.server import UNPENALISED, ServerError, token_ids
from eval.prompts import Prompt


class VllmServer(EngineServer):
    """A vLLM server as an `Engine`."""

    engine, owner, version_at = "vllm", "vllm", ("/version", "version")

    def streamed(self, prompt: Prompt, decoding: Decoding) -> Output:
        """As in EngineServer; each message with tokens is a speculation step."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.sampling.temperature,
            "top_p": decoding.sampling.top_p,
            "top_k": decoding.sampling.top_k or -1,
            "seed": seed_of(decoding.seed, prompt.id),
            "ignore_eos": decoding.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **UNPENALISED,
        }
        if prompt.messages is None:
            path, body = "/v1/completions", body | {"prompt": prompt.prompt}
        else:
            path, body = "/v1/chat/completions", body | chat_request(prompt)
        times, steps, text = [time.perf_counter()], [], ""
        prompt_ids: list[int] = []
        usage: dict[str, int] = {}
        finish = None
        for message in self.messages(path, body, prompt):
            now = time.perf_counter()
            usage = message.get("usage") or usage
            prompt_ids = message.get("prompt_token_ids") or prompt_ids  # in a chat completion
            for choice in message.get("choices") or []:
                prompt_ids = choice.get("prompt_token_ids") or prompt_ids
                finish = choice.get("finish_reason") or finish
                text += choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                if ids := choice.get("token_ids"):
                    steps.append(ids)
                    times.append(now)
        if finish in (None, "abort", "error"):
            self.break_off(prompt)
        sent = sum(map(len, steps))
        if not prompt_ids or not sent or sent != (usage.get("completion_tokens") or sent):
            raise ServerError(
                f"{self.url} sent {sent} token ids for prompt {prompt.id!r}, but counted "
                f"{usage.get('completion_tokens')} tokens; use vLLM 0.14 or later, which supports "
                f"return_token_ids."
            )
        seconds = np.diff(times).tolist()
        run = PromptRun.of(prompt, len(prompt_ids), seconds, steps)
        return Output(run, prompt_ids, finish == "stop", text=text)

    def written(self, prompt: list[int], count: int) -> tuple[list[int], list[Logprobs]]:
        return self._asked(prompt, max_tokens=count)

    def read_wide(self, prompt: list[int], output: list[int]) -> list[Logprobs]:
        # max_tokens=1, because servers generate at least one token; it is ignored
        tokens, logprobs = self._asked(prompt + output, max_tokens=1, echo=True)
        positions = slice(len(prompt), len(prompt) + len(output))
        if tokens[positions] != output:
            raise ServerError(f"{self.url} returned other tokens than the request had")
        return logprobs[positions]

    def _asked(self, ids: list[int], **request: Any) -> tuple[list[int], list[Logprobs]]:
        """The tokens that the server generates after `ids` (echo=True: `ids` first), Logprobs each.

        Raises ServerError if a token has none; only the first token of a prompt may have none.
        """
        body = {"model": self.model, "prompt": ids, "temperature": 0.0, **UNPENALISED, **request}
        settings = {"logprobs": TOP, "return_tokens_as_token_ids": True}
        answer = self.ask("/v1/completions", body | settings)
        try:
            sent = answer["choices"][0]["logprobs"]
            tokens = token_ids(sent["tokens"])
            tops = [top or {} for top in sent["top_logprobs"]]
            logprobs = [
                dict(zip(token_ids(top), map(float, top.values()), strict=True)) for top in tops
            ]
            complete = [
                token in known and all(map(math.isfinite, known.values()))
                for token, known in zip(tokens, logprobs, strict=True)
                if known
            ]
        except (LookupError, TypeError, AttributeError, ValueError):
            complete = []
        if (
            not complete
            or not all(complete)
            or len(complete) < len(tokens) - request.get("echo", False)
        ):
            raise ServerError("the server returned no log-probabilities")
        return tokens, logprobs
