"""Whether a draft changed a word: greedy texts compared, and every difference explained or counted.

Legend: B rows of a batch, T tokens of a block, V the target's vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from tqdm import tqdm

from eval.decoding.build import build_decoder
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.forward import Decoder, starts
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import Target
from eval.measuring.agreement import target_texts
from eval.measuring.intervals import Count, Part, Positive, Quantity
from eval.measuring.runs import PromptRun
from eval.prompts import Batch

PARTS_IN_FP32: dict[str, Any] = {"tie": False, "why": "the texts part in fp32, too"}


class Divergence(Part):
    """Where a greedy text with a draft parts from the target's own."""

    prompt: str
    position: Count = Field(description="token of the answer, from 0")
    target: str = Field(description="the token without a draft")
    drafted: str = Field(description="the token with it")
    gap: Quantity | None = Field(description="between the two tokens' logits")
    error: Quantity | None = Field(
        description="between two forwards' logits there (of a server: over the text)"
    )
    tie: bool
    why: str = Field("", description="why it is no tie, where gap and error do not say so")


class Ledger(Part):
    """Greedy texts with and without the draft, compared token by token.

    As a text it has the three words that a report uses for them: a text is identical, the same up
    to ties (it parts where the target cannot tell two tokens apart), or changed (unexplained).
    """

    prompts: Positive
    identical: Count
    tie_divergences: Count
    unexplained: Count = Field(description="must be 0")
    divergences: list[Divergence]

    @model_validator(mode="after")
    def _counts_add_up(self) -> Self:
        if self.identical + self.tie_divergences + self.unexplained != self.prompts:
            raise ValueError(
                f"{self.identical} identical, {self.tie_divergences} ties and {self.unexplained} "
                f"unexplained do not make up {self.prompts} prompts"
            )
        return self

    def __str__(self) -> str:
        return (
            f"{self.prompts} texts: {self.identical} identical, {self.tie_divergences} "
            f"same up to ties, {self.unexplained} changed"
        )

    @property
    def verdict(self) -> str:
        """The worst of the three words that holds for a text of these."""
        if self.unexplained:
            return "changed"
        return "same up to ties" if self.tie_divergences else "identical"


def ledger(prompts: int, divergences: list[dict[str, Any]]) -> dict[str, Any]:
    """The fields of a `Ledger`: so many prompts were compared, and these of them parted."""
    ties = sum(entry["tie"] for entry in divergences)
    return {
        "prompts": prompts,
        "identical": prompts - len(divergences),
        "tie_divergences": ties,
        "unexplained": len(divergences) - ties,
        "divergences": divergences,
    }


def divergence(
    baseline: PromptRun, run: PromptRun, text_of: Callable[[list[int]], Any]
) -> dict[str, Any]:
    """The ledger's entry of two texts that differ, not explained (yet) as a tie.

    text_of: of the token where they part; of no token where a text ends there.
    """
    pairs = list(zip(baseline.tokens, run.tokens, strict=False))
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return {
        "prompt": run.prompt_id,
        "position": at,
        "target": text_of(baseline.tokens[at : at + 1]),
        "drafted": text_of(run.tokens[at : at + 1]),
        "gap": None,
        "error": None,
        "tie": False,
    }


def tie(single: Tensor, wide: Tensor, target: int, drafted: int) -> dict[str, Any]:
    """`{gap, error, tie}`: can the error of two forwards have changed the order of two tokens?

    single, wide: the logits [V] of both forwards at the position where two texts part. Each of the
    two logits may be off by the error, so a gap of up to twice the error can be a tie.
    """
    gap = abs(float(single[target] - single[drafted]))
    error = float((single - wide).abs().max())
    return {"gap": gap, "error": error, "tie": gap <= 2 * error}


class LosslessCheck:
    """Compares greedy tokens with and without a draft; explains or counts each first divergence.

    A divergence is a tie when `tie` says so of the target's two forwards at that very position,
    each replayed in its run's own blocks and batch, and the prompt's outputs agree in fp32.
    """

    def __init__(self, target: Target, decoding: Decoding) -> None:
        self.target, self.decoding = target, decoding
        self.exact_texts: dict[str, list[int]] = {}  # prompt id -> the target's text in fp32

    @cached_property
    def exact(self) -> Decoder:
        """The target in fp32, on the weights it has."""
        return build_decoder(self.target.model, self.target.decoder.context_length, fp32=True)

    def ledger(
        self,
        drafter: Drafter,
        length: DraftLength,
        batches: Sequence[Batch],
        baseline: Sequence[Sequence[PromptRun]],
        runs: Sequence[Sequence[PromptRun]],
    ) -> dict[str, Any]:
        """`ledger` of greedy runs [batches][rows], which were decoded in these batches.

        Its divergences hold token ids.
        """
        divergences: list[dict[str, Any]] = []
        near: list[tuple[Batch, dict[int, dict[str, Any]]]] = []  # batch, its rows that may be ties
        for batch, base, mine in tqdm(
            list(zip(batches, baseline, runs, strict=True)), desc="compare texts", unit="batch"
        ):
            entries = self._divergences(batch, base, mine, length)
            divergences += entries.values()
            if ties := {row: entry for row, entry in entries.items() if entry["tie"]}:
                near.append((batch, ties))
        if near:
            self._read_exactly([(batch, list(ties)) for batch, ties in near])
        for (prompts, ids), ties in tqdm(near, desc="check ties in fp32", unit="batch"):
            exact = decode(self.exact, drafter, prompts, ids, self.decoding, length)
            for row, entry in ties.items():
                if exact[row].tokens != self.exact_texts[exact[row].prompt_id]:
                    entry |= PARTS_IN_FP32
        return ledger(sum(len(prompts) for prompts, _ in batches), divergences)

    def _divergences(
        self,
        batch: Batch,
        baseline: Sequence[PromptRun],
        runs: Sequence[PromptRun],
        length: DraftLength,
    ) -> dict[int, dict[str, Any]]:
        """The first divergence of each row that has one; `tie`: as far as its logits say."""
        entries: dict[int, dict[str, Any]] = {}
        near: dict[int, int] = {}  # a text that merely ends earlier can never be a tie
        for row, (base, run) in enumerate(zip(baseline, runs, strict=True)):
            if base.tokens != run.tokens:
                entries[row] = divergence(base, run, list)
                if entries[row]["target"] and entries[row]["drafted"]:
                    near[row] = entries[row]["position"]
        if near:
            single = self._logits_at(near, batch[1], baseline, 0)
            wide = self._logits_at(near, batch[1], runs, length.gamma)
            for row in near:
                (target,), (drafted,) = entries[row]["target"], entries[row]["drafted"]
                entries[row] |= tie(single[row], wide[row], target, drafted)
        return entries

    @torch.inference_mode()
    def _logits_at(
        self,
        wanted: dict[int, int],
        ids: Sequence[list[int]],
        runs: Sequence[PromptRun],
        gamma: int,
    ) -> dict[int, Tensor]:
        """The target's logits [V] for token number `wanted[row]` of rows of a batch, replayed."""
        decoder = self.target.decoder
        # as many slots as decode took: large batches attend to all of them
        cache = decoder.new_cache(
            len(ids), max(map(len, ids)) + self.decoding.max_new_tokens + gamma
        )
        logits_of: dict[int, Tensor] = {}
        for row, prompt in enumerate(ids):
            tokens = torch.tensor([prompt], device=decoder.device)
            logits = decoder.forward(tokens, 0, cache.row(row), last_only=True)
            if wanted.get(row) == 0:
                logits_of[row] = logits[0, -1].float()
        rows, done = list(range(len(ids))), [1] * len(ids)
        turn = 0
        while len(logits_of) < len(wanted):
            going_on = [i for i, row in enumerate(rows) if turn < len(runs[row].block_tokens)]
            if len(going_on) < len(rows):
                rows = [rows[i] for i in going_on]
                cache = cache.keep_rows(torch.tensor(going_on, device=decoder.device))
            width = 1 + max(runs[row].drafted[turn] for row in rows)
            blocks = []
            for row in rows:
                block = runs[row].tokens[done[row] - 1 : done[row] - 1 + width]
                # what a row drafted beyond its text is not known and changes nothing before it
                blocks.append(block + block[-1:] * (width - len(block)))
            tokens = torch.tensor(blocks, device=decoder.device)
            start = starts([len(ids[row]) + done[row] - 1 for row in rows])
            logits = decoder.forward(tokens, start, cache)
            for i, row in enumerate(rows):
                at = wanted.get(row, -1) - done[row]
                done[row] += runs[row].block_tokens[turn]
                if 0 <= at < runs[row].block_tokens[turn]:
                    logits_of[row] = logits[i, at].float()
            turn += 1
        return logits_of

    def _read_exactly(self, near: Sequence[tuple[Batch, list[int]]]) -> None:
        """The target's fp32 texts of these rows of batches, where not known yet."""
        ids = {
            prompts[row].id: prompt_ids[row]
            for (prompts, prompt_ids), rows in near
            for row in rows
            if prompts[row].id not in self.exact_texts
        }
        if ids:
            exact = dataclasses.replace(self.target, decoder=self.exact)
            texts = target_texts(exact, list(ids.values()), self.decoding)
            self.exact_texts |= zip(ids, texts, strict=True)
