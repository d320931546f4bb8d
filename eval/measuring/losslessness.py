"""The output check in this process, on logits (of servers: eval/engines/near_ties.py).

Sampled outputs are only read here (`read_sampled`); sampled_check.py compares them.

Legend: V the target's vocabulary.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from align.machine import free_memory, memory_left
from eval.decoding.build import build_decoder
from eval.decoding.drafters.causal_lm import teacher_forced_logits
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.forward import PIECE, Decoder, in_pieces
from eval.decoding.graphs import BUCKET
from eval.decoding.loop import Decoding, decode
from eval.decoding.prompt_run import PromptRun
from eval.decoding.target import Target
from eval.measuring.journal import Enough, Journal, all_of_them
from eval.measuring.output_check import divergence
from eval.prompts import Prompt, PromptSet

WIDEST_TIE = {torch.bfloat16: 1.0, torch.float16: 0.25, torch.float32: 0.01}  # logits (nats)
DIVERGES_IN_FP32: dict[str, Any] = {"tie": False, "why": "the outputs diverge in fp32, too"}
NOT_IN_FP32 = {"why": "not compared in fp32: the memory is too small for a copy of the target"}


def tie(
    single: Tensor, wide: Tensor, target: int, drafted: int, dtype: torch.dtype
) -> dict[str, Any]:
    """`{gap, error, tie}`: whether rounding can have swapped the order of two tokens.

    single, wide: the logits [V] of two forwards at the position where two outputs diverge. Each of
    the two tokens' logits may be wrong by the error, so a gap of up to twice the error can be a
    near-tie. The dtype's cap is needed because a broken kernel, too, has a large error.
    """
    tokens = [target, drafted]
    gap = abs(float(single[target] - single[drafted]))
    error = float((single[tokens] - wide[tokens]).abs().max())
    return {"gap": gap, "error": error, "tie": gap <= min(2 * error, WIDEST_TIE[dtype])}


@torch.inference_mode()
def read_sampled(
    target: Decoder, prompts: PromptSet, runs: Mapping[str, Sequence[PromptRun]], journal: Journal
) -> None:
    """Set `logprob` of runs of these prompts; the target reads each output in one forward.

    runs: by the label of their contender in the journal.
    """

    def read(
        _: int, row: tuple[list[int], tuple[PromptRun, ...]], without: list[int]
    ) -> list[float]:
        ids, same_prompt = row
        logprobs = []
        for tokens in (same_prompt[number].tokens for number in without):
            total = 0.0
            for start in range(0, len(tokens), PIECE):  # logits of long outputs fill the memory
                before, piece = [*ids, *tokens[:start]], tokens[start : start + PIECE]
                logits = teacher_forced_logits(target, [*before, *piece[:-1]], len(before))[0]
                chosen = torch.tensor(piece, device=logits.device)[:, None]
                total += float(logits.float().log_softmax(-1).gather(1, chosen).sum())
            logprobs.append(total / len(tokens))
        return logprobs

    rows = list(zip(prompts.ids, zip(*runs.values(), strict=True), strict=True))
    stages = [f"sampled outputs of {label}" for label in runs]
    read_back = journal.together(stages, rows, read, float, "prompt")
    for same_contender, logprobs in zip(runs.values(), read_back, strict=True):
        for run, logprob in zip(same_contender, logprobs, strict=True):
            run.logprob = logprob


class LosslessCheck:
    """Compares greedy outputs with and without a draft; only the first divergence is explained.

    A divergence is a near-tie if `tie` is true of the logits of both runs at its position, computed
    by repeating each run's forwards, and if the prompt's outputs are equal in fp32 (where the
    memory holds an fp32 copy of the target; else the entry's `why` says so). Outputs of recorded
    forwards (graphs.py) are also compared with a forward that is not recorded.
    """

    def __init__(
        self, target: Target, decoding: Decoding, text_of: Callable[[list[int]], str]
    ) -> None:
        """text_of: returns the text of the target's token ids."""
        self.target, self.decoding, self.text_of = target, decoding, text_of
        self.exact_outputs: dict[str, list[int]] = {}  # the target's fp32 outputs by prompt id
        self.refuted: dict[tuple[Any, ...], dict[str, Any] | None] = {}  # by prompt id and run

    @cached_property
    def fits_in_fp32(self) -> bool:
        """Whether the target is in fp32, or the memory holds a copy of it in fp32."""
        free_memory()  # of earlier stages
        needed = Counter[torch.device]()
        for weight in self.target.model.parameters():
            needed[weight.device] += 5 * weight.numel()  # 4 bytes, and 1 for the caches
        return self.target.model.dtype == torch.float32 or all(
            memory_left(device) >= size for device, size in needed.items()
        )

    @cached_property
    def exact(self) -> Decoder:
        """The decoder of the target in fp32, of a copy unless the target is in fp32."""
        model = self.target.model
        if model.dtype != torch.float32:
            model = copy.deepcopy(model).float()
        return build_decoder(model, self.target.decoder.context_length)

    def ledger(
        self,
        drafter: Drafter,
        draft_length: int,
        prompts: PromptSet,
        baseline: Sequence[PromptRun],
        runs: Sequence[PromptRun],
        enough: Enough = all_of_them,
    ) -> dict[str, Any]:
        """The fields of a `Ledger` for greedy runs of these prompts without and with the draft.

        enough: if true, prompts with a near-tie that is not checked in fp32 yet are left out.
        """
        entries: list[dict[str, Any]] = []
        near: list[tuple[Prompt, list[int], dict[str, Any]]] = []  # to be checked in fp32
        rows = zip(prompts.prompts, prompts.ids, baseline, runs, strict=True)
        for prompt, ids, base, run in rows:
            refuted = self._refuted(prompt.id, ids, base, ()) or self._refuted(
                prompt.id, ids, run, drafter.layers
            )
            if refuted is not None:
                entries.append(refuted)
                continue
            if base.tokens == run.tokens:
                continue
            entry = divergence(base, run, self.text_of)
            position = entry["position"]
            # an output that is only cut short has no second token, so it is a mismatch
            if position < min(len(base.tokens), len(run.tokens)):
                single = self._logits_at(position, ids, base, 0)
                wide = self._logits_at(position, ids, run, draft_length)
                tokens = base.tokens[position], run.tokens[position]
                entry |= tie(single, wide, *tokens, self.target.decoder.dtype)
            if entry["tie"] and not self.fits_in_fp32:
                entry |= NOT_IN_FP32
            elif entry["tie"]:
                near.append((prompt, ids, entry))
            entries.append(entry)
        for number, (prompt, ids, entry) in enumerate(
            tqdm(near, desc="check ties in fp32", unit="prompt")
        ):
            if number and enough(number):
                left_out = [later for *_, later in near[number:]]
                entries = [entry for entry in entries if entry not in left_out]
                return {"prompts": len(runs) - len(left_out), "divergences": entries}
            row = prompt, ids, self.decoding
            if prompt.id not in self.exact_outputs:
                self.exact_outputs[prompt.id] = decode(self.exact, None, *row).tokens
            exact = decode(self.exact, drafter, *row, draft_length)
            if exact.tokens != self.exact_outputs[prompt.id]:
                entry |= DIVERGES_IN_FP32
        return {"prompts": len(runs), "divergences": entries}

    @torch.inference_mode()
    def _refuted(
        self, prompt: str, ids: list[int], run: PromptRun, layers: Sequence[int]
    ) -> dict[str, Any] | None:
        """The fields of a `Divergence` if recorded forwards compute wrong logits, else None.

        layers: numbers of the hidden states that the forwards of the run returned. The last step
        of each recording (a width and a bucket of slots) is read by a forward that is not
        recorded, then by the recorded one, because two outputs can be equally wrong.
        """
        decoder, tokens, key = self.target.decoder, run.tokens, (prompt, *run.tokens, *run.drafted)
        if not decoder.recorded or key in self.refuted:
            return self.refuted.get(key)
        self.refuted[key] = None
        cache = decoder.new_cache(1, len(ids) + len(tokens))
        text = torch.tensor([[*ids, *tokens]], device=decoder.device)
        list(in_pieces(decoder, text[:, :-1], 0, cache))
        firsts = accumulate(run.block_tokens, initial=1)  # each step's first token
        steps = {
            (drafted, (len(ids) + first + drafted - 1) // BUCKET): first
            for drafted, first in zip(run.drafted, firsts, strict=False)
            if first + drafted <= len(tokens)
        }
        for (drafted, _), first in sorted(steps.items(), key=lambda step: -step[1]):
            start = len(ids) + first - 1
            read = text[:, start : start + drafted + 1]
            # the latest step first, because a wrong forward may also write wrong keys
            want = decoder.forward(read, start, cache.unrecorded())[0]
            got = decoder.forward(read, start, cache, states=dict.fromkeys(layers))[0]
            error = ((got - want).norm(dim=-1) / want.norm(dim=-1)).max()
            if not float(error) < torch.finfo(decoder.dtype).eps ** 0.5:
                self.refuted[key] = {
                    "prompt": prompt,
                    "position": first,
                    "target": self.text_of([int(want[0].argmax())]),
                    "drafted": self.text_of([tokens[first]]),
                    "gap": float(want[0].max() - want[0, tokens[first]]),
                    "error": None,
                    "tie": False,
                    "why": "the target computes other logits without CUDA graphs",
                }
        return self.refuted[key]

    @torch.inference_mode()
    def _logits_at(
        self, position: int, ids: list[int], run: PromptRun, draft_length: int
    ) -> Tensor:
        """The target's logits [V] for the token at `position` of a run, from the same forwards."""
        decoder = self.target.decoder
        # as many slots as in `decode`, because logits may depend on them
        cache = decoder.new_cache(1, len(ids) + self.decoding.max_new_tokens + draft_length)
        *_, logits = in_pieces(decoder, torch.tensor([ids], device=decoder.device), 0, cache)
        first, count = 0, 1  # `logits` predict `count` tokens of the run, from token `first` on
        steps = iter(zip(run.drafted, run.block_tokens, strict=True))
        while position >= first + count:
            first += count
            drafted, count = next(steps)
            read = run.tokens[first - 1 : first + drafted]
            # rejected tokens are not logged; other tokens replace them, as no logits before change
            read += read[-1:] * (1 + drafted - len(read))
            tokens = torch.tensor([read], device=decoder.device)
            logits = decoder.forward(tokens, len(ids) + first - 1, cache)
        return logits[0, position - first].float()
