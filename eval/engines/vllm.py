"""A vLLM server as an engine: output tokens with their times, and counts of speculation.

Outputs are streamed with token ids. The counts are differences of the counters vllm:spec_decode_*
at /metrics (docs.vllm.ai) before and after each request.
"""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import numpy as np

from eval.decoding.loop import Decoding, seed_of
from eval.decoding.prompt_run import PromptRun
from eval.engines.comparison import Output, PromptOutputs
from eval.engines.counters import Series, between, read_series
from eval.engines.divergences import Logprobs, explain, read_output
from eval.engines.server import UNPENALISED, Server, ServerError
from eval.prompts import Prompt, chat_request


class VllmServer(Server):
    """A vLLM server as an `Engine`. Its methods raise ServerError if a request fails."""

    @cached_property
    def version(self) -> str | None:
        """vLLM's version; None if the server does not report it."""
        try:
            return str(self.ask("/version")["version"])
        except (ServerError, LookupError, TypeError):
            return None

    def counters(self) -> Series:
        """The server's counters of speculation now; empty if it has none."""
        try:
            return read_series(self.text("/metrics"))
        except ServerError:  # speed can be measured without counters
            return {}

    def decode(self, prompt: Prompt, decoding: Decoding) -> Output:
        """The output for one prompt with its counts; the server must have no other request."""
        before = self.counters()
        output = self.generate(prompt, decoding)
        return output._replace(counters=between(before, self.counters()))

    def generate(self, prompt: Prompt, decoding: Decoding) -> Output:
        """The output for one prompt, streamed; each message with tokens is a speculation step."""
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
        times, steps, text = [time.perf_counter()], [], ""
        prompt_ids: list[int] = []
        usage: dict[str, int] = {}
        finish = None
        for message in self.stream(path, body, f" to prompt {prompt.id!r}"):
            now = time.perf_counter()
            if error := message.get("error"):
                raise ServerError(f"{self.url} failed at prompt {prompt.id!r}: {error}")
            usage = message.get("usage") or usage
            prompt_ids = message.get("prompt_token_ids") or prompt_ids  # in a chat completion
            for choice in message.get("choices", []):
                prompt_ids = choice.get("prompt_token_ids") or prompt_ids
                finish = choice.get("finish_reason") or finish
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
                if ids := choice.get("token_ids"):
                    steps.append(ids)
                    times.append(now)
        if finish is None:
            raise ServerError(
                f"{self.url} broke off in its output for prompt {prompt.id!r}; read its log."
            )
        sent = sum(map(len, steps))
        if not sent or sent != usage.get("completion_tokens", sent):
            raise ServerError(
                f"{self.url} sent {sent} token ids for prompt {prompt.id!r}, but counted "
                f"{usage.get('completion_tokens')} tokens; use vLLM 0.14 or later, which supports "
                f"return_token_ids."
            )
        seconds = np.diff(times).tolist()
        run = PromptRun.of(prompt, usage.get("prompt_tokens", 0), seconds, steps)
        return Output(run, prompt_ids, finish == "stop", text=text)

    def read(self, greedy: Output) -> list[Logprobs] | str:
        """The log-probabilities of this server for its own output, or why there are none."""
        return read_output(self, greedy.prompt_ids, greedy.run.tokens)

    def explain(
        self, plain: Output, with_draft: PromptOutputs, position: int, greedy: Decoding
    ) -> dict[str, Any]:
        """As in `Engine`, by log-probabilities of this server and of the server with the draft."""
        outputs = plain.run.tokens, with_draft.greedy.run.tokens
        return explain(self, with_draft.reading, plain.prompt_ids, outputs, position)
