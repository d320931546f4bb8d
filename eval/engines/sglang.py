"""A running SGLang server as an engine, by its own API.

Its OpenAI API has no token ids in a chat's stream, and no counts of speculation for a request.
Names of paths and fields are those of docs.sglang.io (basic_usage/native_api) and of SGLang's
`managers/tokenizer_manager.py`.
"""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np

from eval.decoding.loop import Decoding, seed_of
from eval.decoding.prompt_run import PromptRun
from eval.engines.contender import Output
from eval.engines.conversation import chat_request, json_schema
from eval.engines.engine_server import EngineServer
from eval.engines.near_ties import TOP, Logprobs
from eval.engines.server import UNPENALISED, ServerError, passing
from eval.measuring.runs import Speculation
from eval.prompts import Prompt

# An output's counts of accepted and of drafted tokens, and of steps by accepted tokens: their names
# now, and before May 2026.
ACCEPTED = "spec_num_correct_drafts", "spec_accept_token_num"
DRAFTED = "spec_num_proposed_drafts", "spec_draft_token_num"
STEPS_BY_ACCEPTED = "spec_correct_drafts_histogram", "spec_accept_histogram"


class SglangServer(EngineServer):
    """An SGLang server as an `Engine`."""

    engine, owner, version_at = "sglang", "sglang", ("/server_info", "version")

    def decode(self, prompt: Prompt, decoding: Decoding) -> Output:
        """As in EngineServer; the counts are the request's own."""
        return self._patiently(lambda: self.streamed(prompt, decoding))

    def streamed(self, prompt: Prompt, decoding: Decoding) -> Output:
        """As in EngineServer, with counts; each message with tokens is a speculation step."""
        ids, sampling, schema = self._prompt_ids(prompt), decoding.sampling, json_schema(prompt)
        parameters: dict[str, Any] = {
            "max_new_tokens": decoding.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "ignore_eos": decoding.ignore_eos,
            "sampling_seed": seed_of(decoding.seed, prompt.id) % 2**31,  # of 32 bits
            **UNPENALISED,
        }
        if schema is not None:
            parameters["json_schema"] = json.dumps(schema or {"type": "object"})
        body = {"input_ids": ids, "sampling_params": parameters, "stream": True}
        times, steps = [time.perf_counter()], list[list[int]]()
        about: dict[str, Any] = {}
        count, text = 0, ""
        for message in self.messages("/generate", body, prompt):
            now, about, output = time.perf_counter(), message["meta_info"], message["output_ids"]
            before, count = count, about["completion_tokens"]
            if count > before:
                steps.append(output[before - count :])
                times.append(now)
            # with --incremental-streaming-output a message has only the new tokens and text
            text = message["text"] if len(output) == count else text + message["text"]
        finish = about.get("finish_reason") or {"type": "abort"}
        aborted = finish["type"] == "abort"
        if aborted or not steps:
            # the status tells whether the request itself was at fault
            self.break_off(prompt, aborted and passing(finish.get("status_code") or 503))
        run = PromptRun.of(prompt, len(ids), np.diff(times).tolist(), steps)
        return Output(run, ids, finish["type"] == "stop", counts_of(about), text)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        request: dict[str, Any] = {"prompt": prompt.prompt}
        if prompt.messages is not None:
            request = chat_request(prompt)
            if prompt.tools:  # with "none" the server would not show them to its template
                request["tool_choice"] = "auto"
        return list(map(int, self.ask("/tokenize", request)["tokens"]))

    def written(self, prompt: list[int], count: int) -> tuple[list[int], list[Logprobs]]:
        return self._asked(prompt, count, "output")

    def read_wide(self, prompt: list[int], output: list[int]) -> list[Logprobs]:
        # one new token, because servers generate at least one; it is ignored
        tokens, logprobs = self._asked(prompt + output, 1, "input", len(output))
        if tokens != output:
            raise ServerError(f"{self.url} returned other tokens than the request had")
        return logprobs

    def _asked(
        self, ids: list[int], count: int, side: str, last: int = 0
    ) -> tuple[list[int], list[Logprobs]]:
        """Tokens of the greedy output of `count` tokens after `ids`, with Logprobs.

        side: "input": the `last` tokens of `ids` instead. Raises ServerError if a token has none.
        """
        body = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": count, "temperature": 0.0, **UNPENALISED},
            "return_logprob": True,
            "top_logprobs_num": TOP,
            # of the first token it has none
            "logprob_start_len": len(ids) - last - 1,
        }
        about = self.ask("/generate", body)["meta_info"]
        try:
            generated = about[f"{side}_token_logprobs"][-last:]
            tops = about[f"{side}_top_logprobs"][-last:]
            rows = [[said, *top] for said, top in zip(generated, tops, strict=True)]
            tokens = [int(token) for _, token, *_ in generated]
            return tokens, [{int(i): float(logprob) for logprob, i, *_ in row} for row in rows]
        except (LookupError, TypeError, ValueError):
            raise ServerError("the server returned no log-probabilities") from None


def counts_of(about: dict[str, Any]) -> Speculation | None:
    """The counts in the `meta_info` of an output; None if they are in no known form.

    A server that does not speculate, because its draft is not loaded, sends none.
    """
    accepted, drafted, histogram = (
        next((about[name] for name in names if name in about), None)
        for names in (ACCEPTED, DRAFTED, STEPS_BY_ACCEPTED)
    )
    if "spec_verify_ct" not in about:
        return Speculation(0, 0, 0, [])
    if accepted is None or drafted is None:
        return None
    steps, accepted_at = about["spec_verify_ct"], list[float]()
    if histogram:  # it ends with the largest number of accepted tokens
        length = max(round(drafted / steps), len(histogram) - 1)
        accepted_at = [sum(histogram[i + 1 :]) for i in range(length)]
    return Speculation(steps, drafted, accepted, accepted_at)
