"""Engines that run in a process of their own, started here.

A process reads one JSON object a line, and answers each with one: `{"answer": …}`, or
`{"error": "…"}`. Prompts are token ids, text is greedy, batches are of one prompt.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from eval.decoding.loop import Decoding
from eval.engines.driven import DrivenEngine, LoadedDraft, Parting
from eval.engines.environments import environment
from eval.engines.log import log_blocks
from eval.measuring.evaluation import device_name
from eval.measuring.losslessness import tie
from eval.measuring.runs import PromptRun
from eval.prompts import Prompt

PATIENCE = 600.0  # seconds for one answer; a large model may load for minutes


class EngineError(ValueError):
    """An engine did not do what it was asked: what it said, and what to do."""


class ChildEngine(DrivenEngine):
    """An engine that has loaded a target and drafts for it; its process ends with the `with`.

    name: as the report calls it. command: starts it in `folder`, its environment. drafts: files or
    folders by name. files: what it loads in place of these, where they were converted for it.
    about: what it says of itself and its models. more: of what `load` is asked. Raises EngineError
    for what cannot be loaded, and for a draft of another vocabulary.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        target: Path,
        drafts: Mapping[str, Path],
        files: Mapping[Path, Path] | None = None,
        **more: Any,
    ) -> None:
        self.name, self.target, self.drafts = name, target, dict(drafts)
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - what it says beside answers
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._words,
            text=True,
            env=environment(folder),
        )
        try:
            own, *others = (str((files or {}).get(p, p)) for p in (target, *drafts.values()))
            self.about = self.ask("load", target=own, drafts=others, **more)
            target_about, *abouts = self.about["models"]
            for draft, about in zip(drafts, abouts, strict=True):
                self._check_vocabulary(draft, about)
        except BaseException:
            self.close()
            raise
        self.loaded = [
            LoadedDraft(
                name,
                str(path),
                _vocabulary(target_about["vocab_size"], about["vocab_size"]),
                _memory(target_about, about),
                about.get("bytes"),
            )
            for (name, path), about in zip(drafts.items(), abouts, strict=True)
        ]
        stats = [(path.absolute(), path.stat()) for path in (target, *drafts.values())]
        self.known_by = [(str(path), stat.st_size, stat.st_mtime_ns) for path, stat in stats]
        self.device = device_name(torch.device("cpu"))
        self.dtype, self.versions = self.about["dtype"], self.about["versions"]

    def _check_vocabulary(self, name: str, about: dict[str, Any]) -> None:
        if about["first_other_token"] is not None:
            at, ours, theirs = about["first_other_token"]
            raise EngineError(
                f"Draft {name!r}: {self.drafts[name]} has another vocabulary than {self.target} "
                f"(token {at} is {theirs!r}, the target's is {ours!r}), so it cannot draft for it "
                f"without loss; tune the draft for this target (distill/train.py)."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process."""
        self._process.kill()  # it holds nothing that could be lost
        self._process.communicate()
        self._words.close()

    @property
    def stops(self) -> frozenset[int]:
        """Every id that ends a text."""
        return frozenset(self.about["stops"])

    def ask(self, what: str, **about: Any) -> Any:
        """Its answer. Raises EngineError where it has none: it died, hangs or failed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Timer(PATIENCE, self._process.kill)
        late.start()
        try:
            self._process.stdin.write(json.dumps({"ask": what, **about}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            late.cancel()
        if not line:
            status = self._process.wait()
            raise EngineError(
                f"{self.name} ended while it was asked to {what} (status {status}; -9: memory ran "
                f"out, or it was silent for {PATIENCE:g} s). It said: {self._last_words()}. Give "
                f"it memory and run the same command again."
            )
        try:
            answer = json.loads(line)
            if "error" not in answer:
                return answer["answer"]
        except (ValueError, TypeError, KeyError):
            raise EngineError(
                f"{self.name} answered {line[:100]!r} where JSON with an answer is due: its "
                f"environment is damaged; delete it and install it again."
            ) from None
        if what == "load":
            raise EngineError(
                f"{self.name} cannot load {answer['error']} ({self._last_words()}); the file is "
                f"cut, or of a kind that this version does not know: make it anew."
            )
        raise EngineError(f"{self.name} failed to {what}: {answer['error']}")

    def _last_words(self) -> str:
        size = os.fstat(self._words.fileno()).st_size
        said = os.pread(self._words.fileno(), size, 0).decode("utf-8", "replace")
        lines = [line.strip() for line in said.splitlines() if line.strip()]
        told = [line for line in lines if "rror" in line or "failed" in line]
        return " / ".join((told or lines)[:3])[:400] or "nothing"

    def decode(
        self, draft: int | None, prompt: Prompt, ids: list[int], how: Decoding, gamma: int
    ) -> PromptRun:
        """Raises EngineError for a temperature above 0."""
        if not how.sampling.greedy:
            raise EngineError(
                f"temperature {how.sampling.temperature:g}: with {self.name} greedy text is "
                f"measured only; give --temperature 0."
            )
        blocks = self.blocks(draft, prompt, ids, how, gamma)
        run = PromptRun.of(prompt, len(ids), blocks["seconds"], blocks["emitted"])
        return log_blocks(run, blocks["drafted"], blocks["emitted"], gamma, how.max_new_tokens)

    def blocks(
        self, draft: int | None, prompt: Prompt, ids: list[int], how: Decoding, gamma: int
    ) -> dict[str, Any]:
        """`drafted`, `emitted` and `seconds` of each target call, the prefill first."""
        found: dict[str, Any] = self.ask(
            "decode", ids=ids, draft=draft, gamma=gamma, max_new_tokens=how.max_new_tokens
        )
        calls = list(zip(found["drafted"], found["emitted"], strict=True))
        possible = all(
            emitted and emitted[:-1] == drafted[: len(emitted) - 1] for drafted, emitted in calls
        )
        tokens = sum(len(emitted) for _, emitted in calls)
        if not possible or tokens > how.max_new_tokens or len(found["seconds"]) != len(calls):
            raise EngineError(
                f"{self.name}'s answer to prompt {prompt.id!r} cannot be: {len(calls)} calls with "
                f"{tokens} tokens of at most {how.max_new_tokens}, each call some tokens of its "
                f"draft and one more; none of it is used."
            )
        return found

    def explain(
        self, blocks: dict[str, Any], ids: list[int], position: int
    ) -> tuple[Tensor, Tensor] | None:
        """The target's logits [V] for a token of an answer: read one by one, and in its blocks.

        None where the engine does not show them.
        """
        return None

    def tie(self, draft: int, at: Parting) -> dict[str, Any]:
        """Of the logits read one by one and in the draft's blocks: there is no fp32 to ask, too."""
        blocks = self.blocks(draft, at.prompt, at.ids, at.how, at.gamma)
        same = list(chain(*blocks["emitted"])) == at.drafted  # else not even the same twice
        logits = self.explain(blocks, at.ids, at.position) if same else None
        return {} if logits is None else tie(*logits, *at.tokens)


def _memory(target: dict[str, Any], draft: dict[str, Any]) -> dict[str, Any] | None:
    """What both take, as the engine says; None where it does not."""
    if "bytes" not in target:
        return None
    kv_bytes = {"target": target["kv_bytes_per_token"], "draft": draft["kv_bytes_per_token"]}
    taken = {"target_bytes": target["bytes"], "draft_bytes": draft["bytes"]}
    return taken | {"kv_bytes_per_token": kv_bytes}


def _vocabulary(target: int, draft: int) -> dict[str, Any]:
    """Ids that both have are the same tokens: it was checked."""
    if target == draft:
        return {"relation": "identical", "strategy": "direct", "coverage": 1.0}
    return {"relation": "padded", "strategy": "padded", "coverage": min(draft / target, 1.0)}
