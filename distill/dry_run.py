"""What a run would take and whether it can pay: a step of each kind, timed at its real shape."""

from __future__ import annotations

import dataclasses
import math
import resource
import statistics
import sys
import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, TrainerCallback

from distill.logit_cache import CachedAnswer
from distill.pipeline import Run
from distill.prepare import build_pruned
from distill.trainer import build_trainer, training_config
from eval.decoding.drafting import Draft
from eval.decoding.drafts import compact_decoder, load_candidate, model_bytes
from eval.measuring.cost import ceiling_speedup, price
from eval.measuring.metrics import StepCosts
from eval.measuring.timing import ALPHA_BATCH, step_costs

TIMED_STEPS = 4  # of training; the first one is warm-up


def price_run(run: Run) -> int:
    """Print minutes, memory and the pay-off ceiling; exit status 1 when no draft length can pay."""
    recipe, target = run.recipe, run.target
    run.fit_contexts()
    model, token_ids = _unfitted_draft(run)
    if recipe.draft is not None:
        draft = load_candidate("draft", recipe.draft, target, run.strategy).draft
    else:
        draft = Draft(compact_decoder(model, target.decoder.context_length, run.embedding))
    context = sum(map(len, run.evaluation.ids)) // len(run.evaluation.ids)
    costs = step_costs(target.decoder, draft, context, recipe.max_gamma, run.sampling)

    answers = len(run.training.ids) * recipe.answers_per_prompt
    tokens = answers * recipe.answer_max_new_tokens
    answering = tokens / recipe.answer_batch_size * _answer_step(run, recipe.answer_batch_size)
    steps, training_step = _training_step(run, model, token_ids)
    minutes = {
        f"answers ({tokens} tokens at most)": answering,
        f"training ({steps} steps)": steps * training_step,
        "evaluation": _evaluation(run, costs),
    }
    for what, seconds in minutes.items():
        print(f"{what}: {seconds / 60:.1f} min")
    print(
        f"in all about {sum(minutes.values()) / 60:.0f} min, where answers are as long as allowed"
    )
    kept = tokens * (recipe.cache_top_k * (4 if run.vocab_size <= 2**16 else 6) + 4)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(
        f"memory: {peak / 2**30:.1f} GiB at the peak of these steps; target "
        f"{model_bytes(target.model) / 2**20:.0f} MiB; answers {kept / 2**20:.0f} MiB on disk"
    )
    print(price(costs))
    if ceiling_speedup(costs) <= 1:
        print("error: no draft length can pay with this draft; use a smaller one.", file=sys.stderr)
        return 1
    return 0


def _unfitted_draft(run: Run) -> tuple[PreTrainedModel, Tensor | None]:
    """The draft in its shape, the head's rows any: which tokens it keeps, answers alone can say."""
    recipe = run.recipe
    if recipe.draft is not None:
        return run.sibling(recipe.draft), None
    head: Tensor = run.target.model.get_output_embeddings().weight.detach()
    rows = recipe.draft_vocab_size
    token_ids = None if rows is None else torch.arange(rows)
    return build_pruned(run.target.model, recipe.num_draft_layers, head[:rows].clone()), token_ids


def _answer_step(run: Run, batch: int) -> float:
    """Seconds of one batched step of the target, half of an answer in."""
    decoder = run.target.decoder
    ids = run.training.ids
    at = sum(map(len, ids)) // len(ids) + run.recipe.answer_max_new_tokens // 2
    cache = decoder.new_cache(batch, at + 1)
    token = torch.zeros((batch, 1), dtype=torch.long, device=decoder.device)
    start = torch.full((batch,), at, device=decoder.device)
    decoder.forward(token, start, cache)  # warm-up
    clock = time.perf_counter()
    decoder.forward(token, start, cache)[0, 0, 0].item()
    return time.perf_counter() - clock


class _StepClock(TrainerCallback):
    """Seconds of each optimiser step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self.started)


def _training_step(run: Run, model: PreTrainedModel, token_ids: Tensor | None) -> tuple[int, float]:
    """How many optimiser steps the run takes, and seconds of one, on made-up answers."""
    recipe, ids = run.recipe, run.training.ids
    args = training_config(recipe)
    batch = args.train_batch_size * args.gradient_accumulation_steps
    steps = args.max_steps
    if steps < 0:
        answers = len(ids) * recipe.answers_per_prompt
        steps = math.ceil(answers / (batch * args.world_size) * args.num_train_epochs)
    length = recipe.answer_max_new_tokens
    top_ids = torch.zeros((length, recipe.cache_top_k), dtype=torch.long)
    made_up = [
        CachedAnswer(
            i,
            torch.tensor(ids[i % len(ids)]),
            top_ids[:, 0],
            top_ids,
            -4.0 * torch.ones_like(top_ids),
        )
        for i in range(batch * TIMED_STEPS)
    ]
    few = recipe.training | {"max_steps": TIMED_STEPS, "save_strategy": "no"}
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(
            model,
            made_up,
            run.trained_rows(token_ids),
            run.draft_tokenizer,
            dataclasses.replace(recipe, output_dir=folder, training=few),
            run.reader,
            new_rows=run.strategy == "transplant",
        )
        clock = _StepClock()
        trainer.add_callback(clock)
        trainer.train()
    return steps, statistics.median(clock.seconds[1:])


def _evaluation(run: Run, costs: StepCosts) -> float:
    """Seconds of the evaluation if no answer ends early: alpha's texts, and the timed prompts."""
    recipe = run.recipe
    texts = len(run.evaluation.ids) * recipe.max_new_tokens / ALPHA_BATCH
    timed = min(recipe.speed_prompts, len(run.evaluation.ids)) * recipe.max_new_tokens
    contenders = 3  # the target alone, the untuned and the tuned draft, at worst no faster
    return texts * _answer_step(run, ALPHA_BATCH) + contenders * timed * costs.target_step
