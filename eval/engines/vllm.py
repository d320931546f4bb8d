"""A vLLM server, asked prompt by prompt: which tokens it emitted when, and what it drafted.

Outputs are streamed with token ids. What was drafted and accepted is read from /metrics before and
after each request (counters vllm:spec_decode_*, docs.vllm.ai).
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from eval.decoding.loop import Decoding, seed_of
from eval.decoding.prompt_run import PromptRun
from eval.engines.counters import Series, between, read_series
from eval.engines.server import UNPENALISED, Server, ServerError
from eval.measuring.runs import Speculation
from eval.prompts import Prompt, chat_request


@dataclass(frozen=True)
class Response:
    """A server's output to one prompt.

    run: tokens and times; what was drafted is not in it. prompt_ids: empty where the server does
    not tell them. ended: an end-of-text token ended it. counters: the server's counts of
    speculation meanwhile; None where the server has no counters.
    """

    run: PromptRun
    prompt_ids: list[int]
    ended: bool
    counters: Speculation | None = None


class VllmServer(Server):
    """A vLLM server with its counters of speculation."""

    def counters(self) -> Series:
        """The server's counters of speculation now; empty where it has none."""
        try:
            return read_series(self.text("/metrics"))
        except ServerError:  # speed can be measured without them
            return {}

    def decode(self, prompt: Prompt, decoding: Decoding) -> Response:
        """One prompt with the growth of the counters, while the server has no other request."""
        before = self.counters()
        response = self.answer(prompt, decoding)
        return replace(response, counters=between(before, self.counters()))

    def answer(self, prompt: Prompt, decoding: Decoding) -> Response:
        """One prompt, streamed. Each message of the stream brings one speculation step."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": decoding.max_new_tokens,
            "temperature": decoding.sampling.temperature,
            "top_p": decoding.sampling.top_p,
            "top_k": decoding.sampling.top_k or -1,
            "seed": seed_of(decoding.seed, prompt.id),
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            **UNPENALISED,
        }
        if prompt.messages is None:
            path, body = "/v1/completions", body | {"prompt": prompt.prompt}
        else:
            path, body = "/v1/chat/completions", body | chat_request(prompt)
        times, steps = [time.perf_counter()], []
        prompt_ids: list[int] = []
        prompt_tokens, finish = 0, None
        for message in self.stream(path, body, f" to prompt {prompt.id!r}"):
            now = time.perf_counter()
            prompt_tokens = (message.get("usage") or {}).get("prompt_tokens", prompt_tokens)
            prompt_ids = message.get("prompt_token_ids") or prompt_ids  # of a chat
            for choice in message.get("choices", []):
                prompt_ids = choice.get("prompt_token_ids") or prompt_ids
                finish = choice.get("finish_reason") or finish
                if ids := choice.get("token_ids"):
                    steps.append(ids)
                    times.append(now)
        if finish is None:
            raise ServerError(f"{self.url} broke off in the middle of prompt {prompt.id!r}.")
        if not steps:
            raise ServerError(
                f"{self.url} sent no token ids for prompt {prompt.id!r}; use a vLLM that knows "
                f"return_token_ids (0.10.2 or later)."
            )
        run = PromptRun.of(prompt, prompt_tokens, np.diff(times).tolist(), steps)
        return Response(run, prompt_ids, finish == "stop")
