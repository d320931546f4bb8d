"""llama.cpp, which takes GGUF files: llama_cpp.mjs in a process of node, asked line by line.

The process reads one JSON object a line, and answers each with one: `{"answer": …}`, or
`{"error": "…"}`. Prompts are token ids, text is greedy, batches are of one prompt.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from itertools import chain
from typing import Any, Self

import torch
from torch import Tensor

from align.sources import resolve_file
from eval.decoding.loop import Decoding
from eval.engines.driven import DrivenEngine, LoadedDraft, log_blocks
from eval.engines.environments import LLAMA_CPP_SCRIPT, environment, installed, node
from eval.measuring.evaluation import device_name
from eval.measuring.losslessness import tie
from eval.measuring.runs import PromptRun
from eval.prompts import Prompt

PATIENCE = 600.0  # seconds for one answer; a large model may load for minutes


class EngineError(ValueError):
    """llama.cpp did not do what it was asked: what it said, and what to do."""


class LlamaCpp(DrivenEngine):
    """llama.cpp with GGUF files, by their specs, on the CPU; its process ends with the `with`.

    positions: that a prompt, its answer and a draft may take. Raises EngineMissing where it is not
    installed, EngineError for files that it cannot load and a draft of another vocabulary.
    """

    name = "llama.cpp"

    def __init__(self, target: str, drafts: Mapping[str, str], gamma: int, positions: int) -> None:
        folder = installed("llama.cpp")
        paths = [resolve_file(spec) for spec in (target, *drafts.values())]
        for path in paths:
            with open(path, "rb") as file:
                if file.read(4) != b"GGUF":
                    raise EngineError(
                        f"{path} is no GGUF file, and llama.cpp reads no others; write the "
                        f"checkpoint as one (python -m align.to_gguf)."
                    )
        self.target, self.gamma = str(paths[0]), gamma
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - what it says beside answers
        threads = str(torch.get_num_threads())
        self._process = subprocess.Popen(
            [node("node"), str(LLAMA_CPP_SCRIPT), str(folder), threads],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            env=environment(folder),
        )
        try:
            about = self.ask("load", files=list(map(str, paths)), context=positions)
            of_target, *of_drafts = about["models"]
            self.loaded = [
                self._loaded(name, str(path), of_target, of_draft)
                for name, path, of_draft in zip(drafts, paths[1:], of_drafts, strict=True)
            ]
        except BaseException:
            self.__exit__()
            raise
        self.stops = frozenset(about["stops"])
        stats = [(path.absolute(), path.stat()) for path in paths]
        self.known_by = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        self.device = device_name(torch.device("cpu"))
        self.dtype, self.versions = about["dtype"], about["versions"]

    def _loaded(
        self, name: str, path: str, target: dict[str, Any], draft: dict[str, Any]
    ) -> LoadedDraft:
        if draft["first_other_token"] is not None:
            at, of_target, of_draft = draft["first_other_token"]
            raise EngineError(
                f"Draft {name!r}: {path} has another vocabulary than {self.target} (token {at} is "
                f"{of_draft!r}, the target's is {of_target!r}), so it cannot draft for it without "
                f"loss; tune the draft for this target (distill/train.py)."
            )
        coverage = min(draft["vocab_size"] / target["vocab_size"], 1.0)
        same = draft["vocab_size"] == target["vocab_size"]
        relation, strategy = ("identical", "direct") if same else ("padded", "padded")
        vocabulary = {"relation": relation, "strategy": strategy, "coverage": coverage}
        kv_bytes = {"target": target["kv_bytes_per_token"], "draft": draft["kv_bytes_per_token"]}
        taken = {"target_bytes": target["bytes"], "draft_bytes": draft["bytes"]}
        memory = taken | {"kv_bytes_per_token": kv_bytes}
        return LoadedDraft(name, path, vocabulary, memory, draft["bytes"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # it holds nothing that could be lost
        self._process.communicate()
        self._words.close()

    def ask(self, request: str, **about: Any) -> Any:
        """Its answer. Raises EngineError where it has none: it died, hangs or failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Timer(PATIENCE, self._process.kill)
        late.start()
        try:
            self._process.stdin.write(json.dumps({"ask": request, **about}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late.cancel()
        if not line:
            raise EngineError(
                f"llama.cpp ended while it was asked to {request} (status {self._process.wait()}; "
                f"-9: memory ran out, or it was silent for {PATIENCE:g} s). It said: "
                f"{self._last_words()}. Give it memory and run the same command again."
            )
        try:
            answer = json.loads(line)
            if "error" not in answer:
                return answer["answer"]
        except (ValueError, TypeError, KeyError):
            raise EngineError(
                f"llama.cpp answered {line[:100]!r} where JSON with an answer is due: its "
                f"environment is damaged; delete it and install it again."
            ) from None
        remedy = f" ({self._last_words()}); the file is cut, or of a kind that it does not know"
        raise EngineError(
            f"llama.cpp failed to {request}: {answer['error']}{remedy if request == 'load' else ''}"
        )

    def _last_words(self) -> str:
        size = os.fstat(self._words.fileno()).st_size
        said = os.pread(self._words.fileno(), size, 0).decode("utf-8", "replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        told = [line for line in lines if "rror" in line or "failed" in line]
        return " / ".join((told or lines)[:3])[:400] or "nothing"

    def decode(
        self, draft: int | None, prompt: Prompt, ids: list[int], decoding: Decoding
    ) -> PromptRun:
        """Raises EngineError for a temperature above 0."""
        if not decoding.sampling.greedy:
            raise EngineError(
                f"temperature {decoding.sampling.temperature:g}: with llama.cpp greedy text is "
                f"measured only; give --temperature 0."
            )
        blocks = self.blocks(draft, prompt, ids, decoding)
        run = PromptRun.of(prompt, len(ids), blocks["seconds"], blocks["emitted"])
        return log_blocks(
            run, blocks["drafted"], blocks["emitted"], self.gamma, decoding.max_new_tokens
        )

    def blocks(
        self, draft: int | None, prompt: Prompt, ids: list[int], decoding: Decoding
    ) -> dict[str, Any]:
        """`drafted`, `emitted` and `seconds` of each target call, the prefill first."""
        blocks: dict[str, Any] = self.ask(
            "decode", ids=ids, draft=draft, gamma=self.gamma, max_new_tokens=decoding.max_new_tokens
        )
        calls = list(zip(blocks["drafted"], blocks["emitted"], strict=True))
        possible = all(
            emitted and emitted[:-1] == drafted[: len(emitted) - 1] for drafted, emitted in calls
        )
        tokens = sum(len(emitted) for _, emitted in calls)
        if not possible or tokens > decoding.max_new_tokens or len(blocks["seconds"]) != len(calls):
            raise EngineError(
                f"llama.cpp's answer to prompt {prompt.id!r} cannot be: {len(calls)} calls with "
                f"{tokens} tokens of at most {decoding.max_new_tokens}, each call some tokens of "
                f"its draft and one more; none of it is used."
            )
        return blocks

    def logits(
        self, blocks: dict[str, Any], ids: list[int], position: int
    ) -> tuple[Tensor, Tensor]:
        """The target's logits [V] for a token of an answer: read one by one, and in its blocks."""
        calls = {name: blocks[name] for name in ("drafted", "emitted")}
        single, wide = self.ask("logits", ids=ids, position=position, **calls)
        return torch.tensor(single), torch.tensor(wide)

    def tie(
        self,
        draft: int,
        prompt: Prompt,
        ids: list[int],
        decoding: Decoding,
        texts: tuple[list[int], list[int]],
        position: int,
    ) -> dict[str, Any]:
        """Of the logits read one by one and in the draft's blocks: a file has no fp32 to ask."""
        blocks = self.blocks(draft, prompt, ids, decoding)
        if list(chain(*blocks["emitted"])) != texts[1]:  # not even the same twice
            return {"why": "asked again, it wrote another text"}
        return tie(*self.logits(blocks, ids, position), texts[0][position], texts[1][position])
