"""Speculation behind OpenAI-compatible vLLM servers: one drafts, one does not, the same report.

Prompts go to both servers in turn, one request at a time, streamed with token ids. What the draft
was accepted is read from the speculative server's /metrics before and after each request (counters
vllm:spec_decode_*, docs.vllm.ai). What a server does not tell, the report names as missing.
"""

from __future__ import annotations

import json
import re
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from eval.decoding.verification import Sampling
from eval.engines.outside import draft_block, emitted_run
from eval.measuring import metrics
from eval.measuring.metrics import PromptRun
from eval.prompts import Prompt, prompts_sha256
from eval.reporting.report import SCHEMA, finished

TIMEOUT = 120.0  # seconds without a byte from a server
NAME = "served"  # of the draft in the report
COUNTER = re.compile(
    r"^vllm:spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)(?:_total)?"
    r"(?:\{(?P<labels>.*)\})? (?P<value>\S+)$",
    re.MULTILINE,
)
NO_DISTRIBUTIONS = "a server does not give the distributions of target and draft"
NO_STEPS = "single steps cannot be timed through a server"
OTHER_BLOCKS = "the server counts cut blocks and no others apart: see counters for its own figure"
REASONS = {
    "alpha": NO_DISTRIBUTIONS,
    "tau": OTHER_BLOCKS,
    "mean_drafted": OTHER_BLOCKS,
    "accepted_over_drafted": OTHER_BLOCKS,
    "per_position": OTHER_BLOCKS,
    "costs": NO_STEPS,
    "c": NO_STEPS,
    "verify_ratio": NO_STEPS,
    "predicted_speedup": NO_STEPS,
    "decode_speedup": OTHER_BLOCKS,
    "decode_efficiency": NO_STEPS,
    "memory": "a server does not tell what its models weigh",
    "payoff": NO_STEPS,
    "waterfall": NO_STEPS,
    "gamma_curve": NO_STEPS,
    "atlas": NO_DISTRIBUTIONS,
}


class ServerError(ValueError):
    """A server that cannot be measured: says which, why, and what to do."""


@dataclass(frozen=True)
class Counters:
    """vLLM's counters of speculation since the server started."""

    drafts: float
    draft_tokens: float
    accepted_tokens: float
    per_position: tuple[float, ...]

    def since(self, before: Counters) -> Counters:
        places = zip(self.per_position, before.per_position, strict=True)
        return Counters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            tuple(now - then for now, then in places),
        )


def parse_counters(text: str) -> Counters | None:
    """The counters in a Prometheus exposition, summed over engines; None if absent."""
    sums: dict[str, float] = defaultdict(float)
    places: dict[int, float] = defaultdict(float)
    for match in COUNTER.finditer(text):
        value = float(match["value"])
        if match[1] == "accepted_tokens_per_pos":
            position = re.search(r'position="(\d+)"', match["labels"] or "")
            if position:
                places[int(position[1])] += value
        else:
            sums[match[1]] += value
    if len(sums) < 3:
        return None
    per_position = tuple(places[i] for i in sorted(places))
    return Counters(sums["drafts"], sums["draft_tokens"], sums["accepted_tokens"], per_position)


@dataclass(frozen=True)
class Run:
    """One answer of a server, and whether it ended by itself."""

    run: PromptRun
    stopped: bool


class Server:
    """One OpenAI-compatible server; `url` with or without its /v1."""

    def __init__(self, url: str, timeout: float = TIMEOUT) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{url!r} is no address of a server; write http://HOST:PORT.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self.timeout = timeout

    def _open(self, path: str, body: dict[str, Any] | None = None, about: str = "") -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + path, data, {"Content-Type": "application/json"}
        )
        try:
            return urllib.request.urlopen(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            said = error.read(300).decode("utf-8", "replace")
            raise ServerError(f"{self.url}{path} answered {error.code}{about}: {said}") from None
        except (OSError, HTTPException) as error:
            raise self._failure(error) from None

    def _failure(self, error: Exception) -> ServerError:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return ServerError(
                f"{self.url} sent nothing for {self.timeout:g} s: it is overloaded, or still "
                f"loading; wait, or ask for fewer tokens."
            )
        return ServerError(
            f"{self.url} cannot be reached or broke off ({reason}): start it, or check the address."
        )

    def model(self) -> str:
        """The name of the model it serves."""
        with self._open("/v1/models") as response:
            try:
                return str(json.load(response)["data"][0]["id"])
            except (ValueError, LookupError, TypeError):
                raise ServerError(
                    f"{self.url}/v1/models does not list a model; is this an OpenAI-compatible "
                    f"server?"
                ) from None

    def counters(self) -> Counters | None:
        """Its counters of speculation; None where it has none."""
        with self._open("/metrics") as response:
            return parse_counters(response.read().decode("utf-8", "replace"))

    def decode(self, model: str, prompt: Prompt, sampling: Sampling, tokens: int, seed: int) -> Run:
        """One prompt, streamed; a block is what one message of the stream brings."""
        body: dict[str, Any] = {
            "model": model,
            "max_tokens": tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        if prompt.messages is None:
            path, body = "/v1/completions", body | {"prompt": prompt.prompt}
        else:
            path, body = "/v1/chat/completions", body | {"messages": prompt.messages}
        clock = time.perf_counter()
        blocks: list[tuple[float, list[int]]] = []
        prompt_tokens, finish = 0, None
        try:
            with self._open(path, body, f" to prompt {prompt.id!r}") as response:
                for line in response:
                    if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                        continue
                    message = json.loads(line[len(b"data: ") :])
                    now = time.perf_counter()
                    prompt_tokens = (message.get("usage") or {}).get("prompt_tokens", prompt_tokens)
                    for choice in message.get("choices", []):
                        finish = choice.get("finish_reason") or finish
                        if ids := choice.get("token_ids"):
                            blocks.append((now - clock, ids))
                            clock = now
        except (OSError, HTTPException) as error:
            raise self._failure(error) from None
        except json.JSONDecodeError as error:
            raise ServerError(f"{self.url} sent what is not JSON ({error}).") from None
        if finish is None:
            raise ServerError(f"{self.url} broke off in the middle of prompt {prompt.id!r}.")
        if not blocks:
            raise ServerError(
                f"{self.url} sent no token ids for prompt {prompt.id!r}; use a vLLM that knows "
                f"return_token_ids (0.10.2 or later)."
            )
        return Run(emitted_run(prompt, prompt_tokens, blocks), finish == "stop")


@dataclass
class Log:
    """What was measured so far: the runs of both servers, and the counters' growth a prompt."""

    baseline: list[Run]
    speculative: list[Run]
    counters: list[Counters]
    failure: str | None = None


def measure_servers(
    speculative: Server,
    baseline: Server,
    prompts: Sequence[Prompt],
    source: str,
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
    provenance: dict[str, Any],
) -> dict[str, Any]:
    """The report of a speculative server against a plain one, on the same prompts.

    A server that fails after the first prompts: the report has those, `missing` says what happened.
    Raises `ServerError` where nothing can be measured: a server is down from the start, does not
    speculate, or speculates as the baseline.
    """
    model, plain_model = speculative.model(), baseline.model()
    if model != plain_model:
        raise ServerError(
            f"{speculative.url} serves {model!r}, {baseline.url} {plain_model!r}; serve the same "
            f"target twice (--served-model-name, if only the names differ)."
        )
    counted = _check_speculation(speculative, baseline, model, prompts[0], sampling, seed)
    log = Log([], [], [])
    _interleave(log, speculative, baseline, model, prompts, sampling, max_new_tokens, seed, counted)
    if not log.speculative:
        raise ServerError(str(log.failure))
    greedy = log
    if not sampling.greedy:  # losslessness is always measured greedily
        greedy, done = Log([], [], []), prompts[: len(log.speculative)]
        _interleave(
            greedy, speculative, baseline, model, done, Sampling(), max_new_tokens, seed, False
        )
        if not greedy.speculative:
            raise ServerError(str(greedy.failure))
    return _build(
        log, greedy, speculative, model, prompts, source, sampling, max_new_tokens, provenance
    )


def _check_speculation(
    speculative: Server,
    baseline: Server,
    model: str,
    prompt: Prompt,
    sampling: Sampling,
    seed: int,
) -> bool:
    """Warm both servers up, and see by their counters which of them speculates.

    Returns whether the speculative one has counters at all.
    """
    grown: list[Counters | None] = []
    for server in (speculative, baseline):
        try:
            before = server.counters()
        except ServerError:  # no /metrics: speed can be measured all the same
            before = None
        server.decode(model, prompt, sampling, 16, seed)
        after = server.counters() if before else None
        grown.append(after.since(before) if after and before else None)
    if grown[0] is not None and grown[0].drafts == 0:
        raise ServerError(
            f"{speculative.url} has drafted nothing in its first answer: speculation is off; start "
            f"it with --speculative-config, or swap --base_url and --baseline_url."
        )
    if grown[1] is not None and grown[1].drafts > 0:
        raise ServerError(
            f"{baseline.url} speculates, too: a baseline must not; start it without "
            f"--speculative-config."
        )
    return grown[0] is not None


def _interleave(
    log: Log,
    speculative: Server,
    baseline: Server,
    model: str,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    max_new_tokens: int,
    seed: int,
    counted: bool,
) -> None:
    """Fill the log prompt by prompt, the servers taking turns; a failure ends it."""
    for turn, prompt in enumerate(tqdm(prompts, desc="servers", unit="prompt")):
        try:
            if turn % 2:
                plain = baseline.decode(model, prompt, sampling, max_new_tokens, seed)
            before = speculative.counters() if counted else None
            drafted = speculative.decode(model, prompt, sampling, max_new_tokens, seed)
            after = speculative.counters() if counted else None
            if not turn % 2:
                plain = baseline.decode(model, prompt, sampling, max_new_tokens, seed)
        except ServerError as error:
            log.failure = f"after {turn} of {len(prompts)} prompts: {error}"
            return
        log.baseline.append(plain)
        log.speculative.append(drafted)
        if before and after:
            log.counters.append(after.since(before))


def _build(
    log: Log,
    greedy: Log,
    server: Server,
    model: str,
    prompts: Sequence[Prompt],
    source: str,
    sampling: Sampling,
    max_new_tokens: int,
    provenance: dict[str, Any],
) -> dict[str, Any]:
    runs, baseline = ([one.run for one in side] for side in (log.speculative, log.baseline))
    counters, no_counters = _counters_block(log)
    missing = [{"field": field, "reason": reason} for field, reason in REASONS.items()]
    if no_counters:
        missing.append({"field": "counters", "reason": no_counters})
    for part, failure in (("prompts", log.failure), ("lossless", greedy.failure)):
        if failure and (part == "prompts" or greedy is not log):
            missing.insert(0, {"field": part, "reason": failure})
    done = prompts[: len(runs)]
    per_position = counters["acceptance_per_position"] if counters else []
    draft = draft_block(runs, baseline, _ledger(greedy)) | {
        "path": urlsplit(server.url).hostname,
        "form": "served",
        "vocabulary": {"relation": "of the server", "strategy": "of the server", "coverage": None},
        "counters": counters,
        "missing": missing,
    }
    stopped = sum(one.stopped for one in log.baseline) / len(log.baseline)
    return finished(
        {
            "schema": SCHEMA,
            "target": model,
            "engine": "vllm",
            "device": urlsplit(server.url).hostname,
            "dtype": "dtype of the server",
            "baseline": {
                "tokens_per_s": draft["tokens_per_s"]["baseline"],
                "over_stock_generate": None,
            },
            "decoding": {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k,
                "top_p": sampling.top_p,
                "max_new_tokens": max_new_tokens,
                "gamma": len(per_position) or None,
                "gamma_policy": "of the server",
                # greedily the tokens themselves are compared; sampled, nobody can see the rule
                "verification": "greedy match" if sampling.greedy else "the server's own rule",
                "stop_tokens": None,
                "ended_by_stop": stopped,
            },
            "prompts": {
                "source": source,
                "n": len(done),
                "sha256": prompts_sha256(done),
                "overlap_with_training": None,
                "bits_per_token": None,
                "random_bits": None,
            },
            "drafts": {NAME: draft},
            "gain": [],
            "provenance": provenance,
        }
    )


def _counters_block(log: Log) -> tuple[dict[str, Any] | None, str | None]:
    """The `counters` of the report, or the reason why there are none."""
    if not log.counters:
        return None, (
            "the server has no counters vllm:spec_decode_* at /metrics: speculation is off, "
            "--disable-log-stats is set, or it is no vLLM"
        )
    drafts, drafted, accepted = (
        sum(getattr(c, key) for c in log.counters)
        for key in ("drafts", "draft_tokens", "accepted_tokens")
    )
    tokens = sum(len(one.run.tokens) for one in log.speculative)
    # a draft emits one token beside the accepted ones; a last one may be cut by its whole length
    longest = max(len(c.per_position) for c in log.counters) + 1
    if accepted + drafts > tokens + longest * len(log.counters):
        return None, (
            f"they grew by {accepted + drafts:.0f} tokens while this run was sent {tokens}: others "
            f"used the server; measure again while it is idle"
        )
    rows = [(c.accepted_tokens + c.drafts, c.drafts) for c in log.counters if c.drafts]
    rates = [(c.accepted_tokens, c.draft_tokens) for c in log.counters if c.draft_tokens]
    if not rows or not rates:
        return None, "they did not grow while this run was served"
    places = [sum(c.per_position[i] for c in log.counters) for i in range(longest - 1)]
    return {
        "num_drafts": round(drafts),
        "num_draft_tokens": round(drafted),
        "num_accepted_tokens": round(accepted),
        "mean_acceptance_length": metrics.measure(
            "mean_acceptance_length", rows, lambda t: t[..., 0] / t[..., 1]
        ),
        "acceptance_rate": metrics.measure(
            "acceptance_rate", rates, lambda t: t[..., 0] / t[..., 1]
        ),
        "acceptance_per_position": [place / drafts for place in places],
    }, None


def _ledger(log: Log) -> dict[str, Any]:
    """Greedy tokens of the two servers compared; a server gives no logits to explain ties by."""
    entries = []
    for plain, drafted in zip(log.baseline, log.speculative, strict=True):
        one, other = plain.run.tokens, drafted.run.tokens
        if one == other:
            continue
        at = metrics.first_divergence(one, other)
        sides = [f"token {text[at]}" if at < len(text) else "end" for text in (one, other)]
        entries.append(
            {
                "prompt": plain.run.prompt_id,
                "position": at,
                "target": sides[0],
                "drafted": sides[1],
                "gap": None,
                "error": None,
                "tie": False,
            }
        )
    return metrics.ledger(len(log.baseline), entries)
