"""Engines that run in a process of their own, started here: what is asked of them, and the report.

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
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from eval.decoding.loop import Decoding
from eval.engines.environments import environment
from eval.engines.log import decoding, log_blocks, missing, prompt_run, prompts_used
from eval.measuring.build import build_report
from eval.measuring.evaluation import device_name
from eval.measuring.journal import Journal
from eval.measuring.log import DraftLog, PromptRun, RunLog
from eval.measuring.losslessness import divergence, ledger, tie
from eval.measuring.timing import in_turns
from eval.prompts import Prompt, PromptSet
from eval.reporting.report import Report

GAMMA_POLICY = "fixed"
PATIENCE = 600.0  # seconds for one answer; a large model may load for minutes


class EngineError(ValueError):
    """An engine did not do what it was asked: what it said, and what to do."""


class ChildEngine:
    """An engine that has loaded a target and drafts for it; its process ends with the `with`.

    name: as the report calls it. command: starts it in `folder`, its environment. drafts: files or
    folders by name. about: what the engine says of itself and its models. more: of what `load` is
    asked. Raises EngineError for what cannot be loaded, and for a draft of another vocabulary.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        folder: Path,
        target: Path,
        drafts: Mapping[str, Path],
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
            files = [str(path) for path in drafts.values()]
            self.about = self.ask("load", target=str(target), drafts=files, **more)
            for draft, about in zip(drafts, self.about["models"][1:], strict=True):
                self._check_vocabulary(draft, about)
        except BaseException:
            self.close()
            raise

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

    def decode(self, draft: int | None, prompt: Prompt, ids: list[int], how: Decoding, gamma: int
               ) -> PromptRun:  # fmt: skip
        """One prompt, decoded alone (None) or with the draft of that number."""
        blocks = self.blocks(draft, prompt, ids, how, gamma)
        run = prompt_run(prompt, len(ids), blocks["seconds"], blocks["emitted"])
        return log_blocks(run, blocks["drafted"], blocks["emitted"], gamma, how.max_new_tokens)

    def blocks(self, draft: int | None, prompt: Prompt, ids: list[int], how: Decoding, gamma: int
               ) -> dict[str, Any]:  # fmt: skip
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


def measure_child(
    engine: ChildEngine,
    timed: PromptSet,
    how: Decoding,
    gamma: int,
    journal: Journal,
    provenance: dict[str, Any],
) -> Report:
    """The report of every draft against the target alone, both in this engine, on the same prompts.

    how: greedy, with the engine's own stop tokens. journal: keeps the runs, for a process that
    takes over. Raises EngineError for a temperature above 0, and where the engine fails midway.
    """
    if not how.sampling.greedy:
        raise EngineError(
            f"temperature {how.sampling.temperature:g}: with {engine.name} greedy text is measured "
            f"only; give --temperature 0."
        )
    files = [engine.target, *engine.drafts.values()]
    device = device_name(torch.device("cpu"))
    journal.begin(
        [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in files],
        list(engine.drafts),
        (timed.ids, [(prompt.id, prompt.category, prompt.group) for prompt in timed.prompts]),
        asdict(how) | {"stops": sorted(how.stops)},
        gamma,
        (device, engine.about["versions"]),
    )
    rows = list(zip(timed.prompts, timed.ids, strict=True))
    ways = [
        partial(engine.decode, which, how=how, gamma=gamma)
        for which in (None, *range(len(engine.drafts)))
    ]
    for way in ways:  # warm-up, not counted
        way(*rows[0])
    baseline, *runs = in_turns(ways, rows, journal, "speed at T=0", PromptRun.from_json)
    target, *drafts = engine.about["models"]
    logs = [
        DraftLog(
            name=name,
            path=str(path),
            form="full",
            vocabulary=_vocabulary(target["vocab_size"], about["vocab_size"]),
            runs=drafted,
            baseline=baseline,
            lossless=_compare(engine, number, timed, how, gamma, baseline, drafted),
            gamma=gamma,
            gamma_policy=GAMMA_POLICY,
            memory={
                "target_bytes": target["bytes"],
                "draft_bytes": about["bytes"],
                "kv_bytes_per_token": {
                    "target": target["kv_bytes_per_token"],
                    "draft": about["kv_bytes_per_token"],
                },
            },
            full_form_bytes=about["bytes"],
            missing=missing(engine.name),
        )
        for number, ((name, path), about, drafted) in enumerate(
            zip(engine.drafts.items(), drafts, runs, strict=True)
        )
    ]
    log = RunLog(
        target=str(engine.target),
        engine=engine.name,
        device=device,
        dtype=engine.about["dtype"],
        decoding=decoding(
            how,
            [run.tokens[-1] in how.stops for run in baseline],
            gamma=gamma,
            gamma_policy=GAMMA_POLICY,
        ),
        prompts=prompts_used(timed),
        provenance=provenance | engine.about["versions"] | {"resumed": journal.resumed},
    )
    return build_report(log, logs)


def _vocabulary(target: int, draft: int) -> dict[str, Any]:
    """Ids that both have are the same tokens: it was checked."""
    if target == draft:
        return {"relation": "identical", "strategy": "direct", "coverage": 1.0}
    return {"relation": "padded", "strategy": "padded", "coverage": min(draft / target, 1.0)}


def _compare(
    engine: ChildEngine,
    draft: int,
    timed: PromptSet,
    how: Decoding,
    gamma: int,
    baseline: Sequence[PromptRun],
    runs: Sequence[PromptRun],
) -> dict[str, Any]:
    """The ledger of greedy texts.

    A divergence is a tie where the engine's logits at that position, read one by one and in the
    draft's blocks, explain the gap between the two tokens. There is no fp32 to ask as well.
    """
    entries = []
    for prompt, ids, base, run in zip(timed.prompts, timed.ids, baseline, runs, strict=True):
        if base.tokens == run.tokens:
            continue
        entry = divergence(base, run, lambda ids: f"token {ids[0]}" if ids else "end")
        at = entry["position"]
        if at < min(len(base.tokens), len(run.tokens)):  # lengths can never differ by a tie
            blocks = engine.blocks(draft, prompt, ids, how, gamma)
            same = list(chain(*blocks["emitted"])) == run.tokens  # else not even the same twice
            logits = engine.explain(blocks, ids, at) if same else None
            if logits is not None:
                entry |= tie(*logits, base.tokens[at], run.tokens[at])
        entries.append(entry)
    return ledger(len(runs), entries)
