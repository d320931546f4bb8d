"""Whether a draft changed a word: greedy texts compared, and every difference explained or counted.

Legend: B rows of a batch, T tokens of a block, V the target's vocabulary.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from eval.decoding.batched import decode_batch, starts
from eval.decoding.drafting import Draft, StringDraft
from eval.decoding.drafts import Target
from eval.decoding.forward import Decoder, build_decoder
from eval.decoding.loop import Decoding, DraftLength, decode_speculative
from eval.measuring import metrics
from eval.measuring.metrics import PromptRun
from eval.measuring.timing import target_texts
from eval.prompts import Prompt

# Prompts decoded together, and their ids.
Batch = tuple[Sequence[Prompt], Sequence[list[int]]]


def tie(single: Tensor, wide: Tensor, target: int, drafted: int) -> dict[str, Any]:
    """`{gap, error, tie}`: do two tokens' logits lie no further apart than two forwards differ?

    single, wide: the logits [V] of both forwards at the position where two texts part.
    """
    gap = abs(float(single[target] - single[drafted]))
    error = float((single - wide).abs().max())
    return {"gap": gap, "error": error, "tie": gap <= error}


def _texts_differ(baseline: Sequence[PromptRun], runs: Sequence[PromptRun]) -> list[bool]:
    return [base.tokens != run.tokens for base, run in zip(baseline, runs, strict=True)]


class LosslessCheck:
    """Compares greedy tokens with and without a draft; explains or counts each first divergence.

    A divergence is a tie when the two tokens' logits lie no further apart than the target's two
    forwards at that very position differ, each replayed in its run's own blocks and batch, and the
    prompt's outputs agree in fp32.
    """

    def __init__(self, target: Target, how: Decoding, length: DraftLength) -> None:
        self.target, self.how, self.length = target, how, length
        self.exact_texts: dict[str, list[int]] = {}  # prompt id -> the target's text in fp32

    @cached_property
    def exact(self) -> Decoder:
        """The target in fp32."""
        model = copy.deepcopy(self.target.model).float()
        return build_decoder(model, self.target.decoder.context_length)

    def ledger(
        self,
        draft: Draft | StringDraft,
        batches: Sequence[Batch],
        baseline: Sequence[Sequence[PromptRun]],
        runs: Sequence[Sequence[PromptRun]],
    ) -> dict[str, Any]:
        """`{prompts, identical, tie_divergences, unexplained, divergences}` of greedy runs.

        batches: the prompts as they were decoded together, in batches of one where each was alone;
        baseline and runs likewise. divergences: where each text parts, as token ids, and what the
        two forwards say there.
        """
        rows = zip(batches, baseline, runs, strict=True)
        other = [row for row in rows if any(_texts_differ(*row[1:]))]
        found = [
            self._divergences(prompts, ids, base, mine)
            for (prompts, ids), base, mine in tqdm(
                other, desc="replay", unit="batch", disable=not other
            )
        ]
        near = []
        for (batch, _, _), entries in zip(other, found, strict=True):
            rows_near = [row for row, entry in entries.items() if entry["tie"]]
            if rows_near:
                near.append((batch, rows_near, entries))
        self._read_exactly([(batch, rows_near) for batch, rows_near, _ in near])
        bar = tqdm(near, desc="check ties in fp32", unit="batch", disable=not near)
        for (prompts, ids), rows_near, entries in bar:
            agreed = self._agree_exactly(draft, prompts, ids, rows_near)
            for row, same in zip(rows_near, agreed, strict=True):
                entries[row]["tie"] = same
        return metrics.ledger(
            sum(len(prompts) for prompts, _ in batches),
            [entry for entries in found for entry in entries.values()],
        )

    def _divergences(
        self,
        prompts: Sequence[Prompt],
        ids: Sequence[list[int]],
        baseline: Sequence[PromptRun],
        runs: Sequence[PromptRun],
    ) -> dict[int, dict[str, Any]]:
        """The first divergence of each row that has one; `tie`: its gap is within the error."""
        found: dict[int, dict[str, Any]] = {}
        near: dict[int, int] = {}  # a text that merely ends earlier can never be a tie
        for row, differ in enumerate(_texts_differ(baseline, runs)):
            if not differ:
                continue
            prompt, texts = prompts[row], (baseline[row].tokens, runs[row].tokens)
            at = metrics.first_divergence(*texts)
            target, drafted = (text[at : at + 1] for text in texts)
            found[row] = {"prompt": prompt.id, "position": at, "target": target, "drafted": drafted}
            found[row] |= {"gap": None, "error": None, "tie": False}
            if target and drafted:
                near[row] = at
        if near:
            single, wide = (self._logits_at(near, ids, both) for both in (baseline, runs))
            for row in near:
                (target,), (drafted,) = found[row]["target"], found[row]["drafted"]
                found[row] |= tie(single[row], wide[row], target, drafted)
        return found

    @torch.inference_mode()
    def _logits_at(
        self, wanted: dict[int, int], ids: Sequence[list[int]], runs: Sequence[PromptRun]
    ) -> dict[int, Tensor]:
        """The target's logits [V] for token number `wanted[row]` of rows of a batch, replayed."""
        decoder = self.target.decoder
        # as many slots as decode_batch took: large batches attend to all of them
        gamma = self.length.gamma if any(any(run.drafted) for run in runs) else 0
        cache = decoder.new_cache(len(ids), max(map(len, ids)) + self.how.max_new_tokens + gamma)
        found: dict[int, Tensor] = {}
        for row, prompt in enumerate(ids):
            tokens = torch.tensor([prompt], device=decoder.device)
            logits = decoder.forward(tokens, 0, cache.row(row), last_only=True)
            if wanted.get(row) == 0:
                found[row] = logits[0, -1].float()
        rows, done = list(range(len(ids))), [1] * len(ids)
        turn = 0
        while len(found) < len(wanted):
            left = [i for i, row in enumerate(rows) if turn < len(runs[row].block_tokens)]
            if len(left) < len(rows):
                rows = [rows[i] for i in left]
                cache = cache.keep_rows(torch.tensor(left, device=decoder.device))
            blocks = []
            for row in rows:
                drafted = runs[row].drafted[turn]
                block = runs[row].tokens[done[row] - 1 : done[row] + drafted]
                # what a row drafted beyond its text is not known and changes nothing before it
                blocks.append(block + block[-1:] * (drafted + 1 - len(block)))
            tokens = torch.tensor(blocks, device=decoder.device)
            start = starts([len(ids[row]) + done[row] - 1 for row in rows])
            logits = decoder.forward(tokens, start, cache)
            for i, row in enumerate(rows):
                at = wanted.get(row, -1) - done[row]
                done[row] += runs[row].block_tokens[turn]
                if 0 <= at < runs[row].block_tokens[turn]:
                    found[row] = logits[i, at].float()
            turn += 1
        return found

    def _read_exactly(self, near: Sequence[tuple[Batch, Sequence[int]]]) -> None:
        """The target's fp32 texts of these rows of batches, where not known yet."""
        ids = {
            prompts[row].id: ids[row]
            for (prompts, ids), rows in near
            for row in rows
            if prompts[row].id not in self.exact_texts
        }
        if ids:
            exact = dataclasses.replace(self.target, decoder=self.exact)
            texts = target_texts(exact, list(ids.values()), self.how)
            self.exact_texts |= zip(ids, texts, strict=True)

    def _agree_exactly(
        self,
        draft: Draft | StringDraft,
        prompts: Sequence[Prompt],
        ids: Sequence[list[int]],
        rows: Sequence[int],
    ) -> list[bool]:
        """For these rows of a batch, whether the fp32 text with the draft is the one without."""
        if len(prompts) == 1:  # decode_batch knows no draft with a vocabulary of its own
            runs = [
                decode_speculative(self.exact, draft, prompts[0], ids[0], self.how, self.length)
            ]
        else:
            runs = decode_batch(self.exact, draft, prompts, ids, self.how, self.length)
        return [runs[row].tokens == self.exact_texts[prompts[row].id] for row in rows]
