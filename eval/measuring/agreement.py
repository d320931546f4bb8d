"""The acceptance rate: how far draft and target agree on the target's outputs, teacher-forced.

Legend: V the target's vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from align.errors import UserError
from eval.decoding.drafters.causal_lm import teacher_forced_logits
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.forward import PIECE, HiddenStates
from eval.decoding.generation import generate_batched, tokens_bar
from eval.decoding.loop import Decoding, seed_of
from eval.decoding.target import Target
from eval.decoding.verification import agreement, warp
from eval.measuring.journal import Enough, Journal, all_of_them
from eval.measuring.runs import Agreement
from eval.prompts import Prompt, PromptSet

BATCH = 48


def target_texts(
    target: Target, prompts: Mapping[str, list[int]], decoding: Decoding
) -> list[list[int]]:
    """The token ids of the target's output for each prompt, for the acceptance rate.

    prompts: token ids by prompt id; a prompt's random numbers depend on its id.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    seeds = [seed_of(decoding.seed, prompt_id) for prompt_id in prompts]
    rows = min(BATCH, len(prompts))
    with tokens_bar(len(prompts), decoding) as bar:
        generated = generate_batched(
            target.decoder, list(prompts.values()), decoding, rows, seeds, bar=bar
        )
        for output in generated:
            outputs[output.index] = output.tokens
    return outputs


@torch.inference_mode()
def measure_agreement(
    target: Target,
    drafters: Mapping[str, Drafter],
    prompts: PromptSet,
    texts: Sequence[list[int]],
    decoding: Decoding,
    journal: Journal,
    enough: Enough = all_of_them,
) -> dict[str, list[Agreement]]:
    """The acceptance rates by draft's name [prompts], from one target pass.

    Raises UserError if the target's logits are NaN or infinite.
    """
    layers = {layer for drafter in drafters.values() for layer in drafter.layers}

    def measure(_: int, row: tuple[Prompt, list[int], list[int]], without: list[int]) -> list[Any]:
        prompt, ids, text = row
        about = prompt.id, prompt.category, 0.0, len(text)
        agreements = [Agreement(*about, prompt.group, len(ids)) for _ in drafters]
        # A piece is read as the output to all text before it, because the logits of a long output
        # would fill the memory.
        for start in range(0, len(text), PIECE):
            before, piece = [*ids, *text[:start]], text[start : start + PIECE]
            states: HiddenStates = dict.fromkeys(layers)
            read = [*before, *piece[:-1]]
            scores = teacher_forced_logits(target.decoder, read, len(before), states)
            if not scores.float().logsumexp(-1).isfinite().all():
                raise UserError(
                    f"{target.checkpoint.spec} computes NaN or infinite logits in its output for "
                    f"prompt {prompt.id}: its weights are damaged, or too large for float16. Fetch "
                    "the checkpoint again, or use --dtype bfloat16 or float32."
                )
            p = warp(scores[0], decoding.sampling)
            for number, drafter in enumerate(drafters.values()):
                if number not in without:
                    continue
                q = drafter.teacher_forced(before, piece, decoding.draft_sampling, states)
                agreements[number].alpha_sum += float(agreement(p, q).sum())
        return [agreements[number] for number in without]

    rows = list(zip(prompts.prompts, prompts.ids, texts, strict=True))
    stages = [f"acceptance rate of {name}" for name in drafters]
    # as many prompts as for other drafts in an earlier process
    counts = {stage.partition(" of ")[0]: len(done) for stage, done in journal.results.items()}
    least = counts.get("acceptance rate", 0)
    rates = journal.together(
        *(stages, rows, measure, lambda fields: Agreement(**fields), "prompt"),
        lambda number: number >= least and enough(number),
    )
    return dict(zip(drafters, rates, strict=True))
