"""Speculation behind OpenAI-compatible vLLM servers: one drafts, one does not, the same report.

Prompts go to both servers in turn, one request at a time, streamed with token ids. How much of the
drafts was accepted is read from the speculative server's /metrics before and after each request
(counters vllm:spec_decode_*, docs.vllm.ai). What a server does not tell, the report names as
missing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tqdm import tqdm

from eval.decoding.loop import Decoding, seed_of
from eval.decoding.verification import Sampling
from eval.engines.counters import read_series, total
from eval.engines.driven import MISSING, decoding_facts, prompts_used
from eval.engines.forks import explain
from eval.engines.server import UNPENALISED, Server, ServerError
from eval.measuring.intervals import Measured, measure, share
from eval.measuring.losslessness import divergence, ledger
from eval.measuring.runs import DraftLog, Floats, PromptRun, RunLog
from eval.prompts import Prompt, PromptSet, chat_request
from eval.reporting.report import Report, build_report

NAME = "served"  # of the draft in the report
# Fields that are made from blocks.
BLOCKS = "tau mean_drafted accepted_over_drafted per_position decode_speedup"
UNTOLD = {
    **MISSING,
    **dict.fromkeys(BLOCKS.split(), "it counts cut blocks and no others apart: see counters"),
    "memory": "it does not tell what its models weigh",
}


@dataclass(frozen=True)
class Answer:
    """An answer of a server; what was drafted for it is not in `run`."""

    run: PromptRun
    prompt_ids: list[int]  # empty where the server does not tell them
    ended: bool  # by itself
    counters: Floats | None  # how much they grew meanwhile; None where the server has none


# One prompt, answered by the baseline and by the server that speculates.
Pair = tuple[Answer, Answer]


class VllmServer(Server):
    """A vLLM server, whose counters tell what its draft was worth."""

    def counters(self) -> Floats | None:
        """Its counters of speculation; None where it has none."""
        try:
            return total(read_series(self.text("/metrics")))
        except ServerError:  # speed can be measured all the same
            return None

    def decode(self, prompt: Prompt, decoding: Decoding) -> Answer:
        """One prompt, streamed. A block is what one message of the stream brings."""
        before = self.counters()
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
        times, blocks = [time.perf_counter()], []
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
                    blocks.append(ids)
                    times.append(now)
        if finish is None:
            raise ServerError(f"{self.url} broke off in the middle of prompt {prompt.id!r}.")
        if not blocks:
            raise ServerError(
                f"{self.url} sent no token ids for prompt {prompt.id!r}; use a vLLM that knows "
                f"return_token_ids (0.10.2 or later)."
            )
        after = self.counters()
        return Answer(
            PromptRun.of(prompt, prompt_tokens, np.diff(times).tolist(), blocks),
            prompt_ids,
            finish == "stop",
            None if before is None or after is None else after - before,
        )


def measure_servers(
    speculative: VllmServer,
    baseline: VllmServer,
    prompts: PromptSet,
    decoding: Decoding,
    provenance: dict[str, Any],
    name: str = NAME,
    target: str | None = None,
    overlap: int | None = None,
) -> Report:
    """The report of a speculative server against a plain one, on the same prompts, rendered there.

    name: of the draft in it. target: what the report calls it; None: as the servers do. overlap: of
    the prompts with the training data, where that is known.

    A server that fails after the first prompts: the report has those, `missing` says what happened.
    Raises `ServerError` where nothing can be measured: a server is down from the start, does not
    speculate, or speculates as the baseline.
    """
    if speculative.model != baseline.model:
        raise ServerError(
            f"{speculative.url} serves {speculative.model!r}, {baseline.url} {baseline.model!r}; "
            f"serve the same target twice (--served-model-name, if only the names differ)."
        )
    _warm_up(speculative, baseline, prompts.prompts[0], replace(decoding, max_new_tokens=16))
    pairs, failure = _interleave(speculative, baseline, prompts.prompts, decoding)
    done = prompts.prompts[: len(pairs)]
    greedy, greedy_failure = pairs, None
    if not decoding.sampling.greedy:  # losslessness is always measured greedily
        greedily = replace(decoding, sampling=Sampling())
        greedy, greedy_failure = _interleave(speculative, baseline, done, greedily)
    counters, no_counters = _counters_block(pairs)
    lacking = {
        "prompts": failure,
        "lossless": greedy_failure,
        **UNTOLD,
        "counters": no_counters,
    }
    draft = DraftLog(
        name=name,
        path=speculative.host,
        form="served",
        vocabulary={"relation": "of the server", "strategy": "of the server", "coverage": None},
        runs=[drafted.run for _, drafted in pairs],
        baseline=[plain.run for plain, _ in pairs],
        lossless=_compare(speculative, baseline, greedy),
        gamma=len(counters["acceptance_per_position"]) or None if counters else None,
        gamma_policy="of the server",
        counters=counters,
        missing={field: reason for field, reason in lacking.items() if reason},
    )
    run = RunLog(
        target=target or speculative.model,
        engine="vllm",
        device=speculative.host,
        dtype="dtype of the server",
        decoding=decoding_facts(
            decoding,
            [plain.ended for plain, _ in pairs],
            gamma=draft.gamma,
            gamma_policy=draft.gamma_policy,
            # greedily the tokens themselves are compared; sampled, nobody can see the rule
            verification="greedy match" if decoding.sampling.greedy else "the server's own rule",
            stop_tokens=None,
        ),
        prompts=prompts_used(PromptSet(prompts.source, done, []))
        | {"overlap_with_training": overlap},
        provenance=provenance,
    )
    return build_report(run, [draft])


def _warm_up(
    speculative: VllmServer, baseline: VllmServer, prompt: Prompt, decoding: Decoding
) -> None:
    """One answer of each; their counters, where they have any, say which one speculates."""
    grown, plain_grown = (s.decode(prompt, decoding).counters for s in (speculative, baseline))
    if grown is not None and grown[0] == 0:
        raise ServerError(
            f"{speculative.url} has drafted nothing in its first answer: speculation is off; start "
            f"it with --speculative-config, or swap --base_url and --baseline_url."
        )
    if plain_grown is not None and plain_grown[0] > 0:
        raise ServerError(
            f"{baseline.url} speculates, too: a baseline must not; start it without "
            f"--speculative-config."
        )


def _interleave(
    speculative: VllmServer, baseline: VllmServer, prompts: Sequence[Prompt], decoding: Decoding
) -> tuple[list[Pair], str | None]:
    """The answers, prompt by prompt, the servers taking turns, and the failure that ended it.

    Raises ServerError where even the first prompt failed.
    """
    pairs: list[Pair] = []
    for turn, prompt in enumerate(tqdm(prompts, desc="servers", unit="prompt")):
        order = (baseline, speculative) if turn % 2 else (speculative, baseline)
        try:
            answers = {server: server.decode(prompt, decoding) for server in order}
        except ServerError as error:
            failure = f"after {turn} of {len(prompts)} prompts: {error}"
            if not pairs:
                raise ServerError(failure) from None
            return pairs, failure
        pairs.append((answers[baseline], answers[speculative]))
    return pairs, None


def _counters_block(pairs: Sequence[Pair]) -> tuple[dict[str, Any] | None, str | None]:
    """The `counters` of the report, or the reason why there are none."""
    grown = [(answer.run, answer.counters) for _, answer in pairs if answer.counters is not None]
    if not grown:
        return None, (
            "the server has no counters vllm:spec_decode_* at /metrics: speculation is off, "
            "--disable-log-stats is set, or it is no vLLM"
        )
    drafts, drafted, accepted, *accepted_at = np.sum([row for _, row in grown], axis=0).tolist()
    tokens = sum(len(answer.run.tokens) for _, answer in pairs)
    # a draft emits one token beside the accepted ones; a last one may be cut by its whole length
    if accepted + drafts > tokens + (len(accepted_at) + 1) * len(grown):
        return None, (
            f"they grew by {accepted + drafts:.0f} tokens while this run was sent {tokens}: others "
            f"used the server; measure again while it is idle"
        )
    drafting = [(run, row) for run, row in grown if row[0]]
    if not any(row[1] for _, row in drafting):
        return None, "they did not grow while this run was served"

    def length(category: str | None = None) -> Measured:
        """Of the prompts of a category, or all of them."""
        of = [(run, row) for run, row in drafting if category in (None, run.category)]
        sums = [(row[2] + row[0], row[0]) for _, row in of]
        return measure("mean_acceptance_length", sums, groups=[run.group for run, _ in of])

    return {
        "num_drafts": round(drafts),
        "num_draft_tokens": round(drafted),
        "num_accepted_tokens": round(accepted),
        "mean_acceptance_length": length(),
        "acceptance_rate": share(
            "acceptance_rate", [(run.group, row[2], row[1]) for run, row in drafting]
        ),
        "acceptance_per_position": [count / drafts for count in accepted_at],
        "per_position": [
            share("acceptance", [(run.group, row[place], row[0]) for run, row in drafting])
            for place in range(3, 3 + len(accepted_at))
        ],
        "by_category": {
            category: length(category)
            for category in sorted({run.category for run, _ in drafting if run.category})
        },
    }, None


def _compare(
    speculative: VllmServer, baseline: VllmServer, pairs: Sequence[Pair]
) -> dict[str, Any]:
    """The ledger of the two servers' greedy texts."""
    entries = []
    for plain, drafted in pairs:
        texts = plain.run.tokens, drafted.run.tokens
        if texts[0] == texts[1]:
            continue
        entry = divergence(plain.run, drafted.run, lambda ids: f"token {ids[0]}" if ids else "end")
        if entry["position"] < min(map(len, texts)):  # lengths can never differ by a tie
            entry |= explain(baseline, speculative, plain.prompt_ids, texts, entry["position"])
        entries.append(entry)
    return ledger(len(pairs), entries)
