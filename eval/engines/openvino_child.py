"""OpenVINO GenAI, asked by child.py: one JSON object a line on stdin and on stdout.

    python -P openvino_child.py     the Python of an environment with openvino-genai

What a target call drafted is not told: gamma tokens, fewer where the limit would cut them. Which
tokens they were is known of the accepted ones; the others are -1.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found]
import openvino_genai as genai  # type: ignore[import-not-found]

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the libraries print is no answer


class Calls(genai.StreamerBase):
    """The tokens of each target call, and when they were there."""

    def __init__(self) -> None:
        super().__init__()
        self.emitted: list[list[int]] = []
        self.times = [time.perf_counter()]

    def write(self, tokens: int | list[int]) -> Any:
        self.times.append(time.perf_counter())
        self.emitted.append([tokens] if isinstance(tokens, int) else list(tokens))
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass


class Engine:
    def load(
        self, target: str, drafts: list[str], threads: int, stops: list[int]
    ) -> dict[str, Any]:
        hints = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": threads}
        for gguf in (target, *drafts):  # its IR lies beside it then
            try:
                genai.LLMPipeline(gguf, "CPU", enable_save_ov_model=True, **hints)
            except RuntimeError as error:
                raise RuntimeError(f"{gguf}: {error}") from None
        folder, *others = (str(Path(gguf).parent) for gguf in (target, *drafts))
        self.stops = stops
        self.alone = genai.LLMPipeline(folder, "CPU", **hints)
        self.drafted = [
            genai.LLMPipeline(
                folder, "CPU", draft_model=genai.draft_model(other, "CPU", **hints), **hints
            )
            for other in others
        ]
        about = {"vocab_size": 0, "first_other_token": None}  # compared before
        versions = {"openvino-genai": genai.__version__}
        models = [about] * (1 + len(drafts))
        return {"dtype": "float32", "stops": stops, "versions": versions, "models": models}

    def decode(
        self, ids: list[int], draft: int | None, gamma: int, max_new_tokens: int
    ) -> dict[str, Any]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample = max_new_tokens, False
        config.stop_token_ids = set(self.stops)
        if draft is not None:
            config.num_assistant_tokens = gamma
        calls = Calls()
        pipeline = self.alone if draft is None else self.drafted[draft]
        pipeline.generate(openvino.Tensor(np.array([ids], dtype=np.int64)), config, calls)
        drafted, done = [], 0
        for call, block in enumerate(calls.emitted):
            possible = min(gamma, max_new_tokens - done - 1) if call and draft is not None else 0
            rejected = max(0, possible - len(block) + 1)
            drafted.append(block[:-1] + [-1] * rejected)
            done += len(block)
        seconds = [b - a for a, b in zip(calls.times, calls.times[1:], strict=False)]
        return {"drafted": drafted, "emitted": calls.emitted, "seconds": seconds}


engine = Engine()
for line in sys.stdin:
    asked = json.loads(line)
    try:
        answer = {"answer": getattr(engine, asked.pop("ask"))(**asked)}
    except Exception as error:  # whatever the libraries raise is the answer
        answer = {"error": str(error)}
    print(json.dumps(answer), file=answers, flush=True)
