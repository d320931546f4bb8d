"""The target answers the training prompts; its distributions are kept while it does."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from align.sources import resolve_checkpoint
from distill.answer_cache import AnswerCache, CachedAnswer
from distill.models import TargetOfRun
from distill.recipe import Recipe
from eval.decoding.generation import generate_batched
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

ANSWERS_PER_SHARD = 64  # at most so many answers are lost to a kill


def answer_prompts(
    recipe: Recipe, prompts: list[list[int]], target: Target | TargetOfRun
) -> list[CachedAnswer]:
    """The target's answers to `prompts` (token ids), kept in `answers/`; those there are read.

    Raises CacheError for answers of another target, and ValueError when not one answer has a token
    before its stop.
    """
    clock = time.time()
    prompts = prompts * recipe.answers_per_prompt
    parts = _what_decides_p(recipe, target) | {
        "answer_temperature": recipe.answer_temperature,
        "answer_max_new_tokens": recipe.answer_max_new_tokens,
        "cache_top_k": recipe.cache_top_k,
        "prompts": [len(prompts), hash_prompts(prompts)],
        "seed": recipe.seed,
    }
    cache = AnswerCache(recipe.folder / "answers", parts, target.vocab_size)
    done = {answer.index for answer in cache}
    left = [i for i in range(len(prompts)) if i not in done]
    bar = tqdm(
        total=len(prompts), initial=len(done), desc="target answers", unit="answer", file=sys.stderr
    )
    pending: list[CachedAnswer] = []
    made = (
        iter(())
        if not left
        else generate_batched(
            target.decoder,
            [prompts[i] for i in left],
            recipe.answer_max_new_tokens,
            target.stops,
            Sampling(recipe.answer_temperature),
            recipe.answer_batch_size,
            # each attempt draws with its own seed, else a resumed run would repeat draws
            recipe.seed + 1_000_003 * len(done),
            capture=lambda logits: top_logprobs(logits, recipe.cache_top_k),
        )
    )
    for answer in made:
        ids, logprobs = zip(*answer.captured, strict=True)
        pending.append(
            CachedAnswer(
                index=left[answer.index],
                prompt_ids=torch.tensor(prompts[left[answer.index]]),
                response_ids=torch.tensor(answer.tokens),
                top_ids=torch.stack(ids).cpu(),
                top_logprobs=torch.stack(logprobs).cpu(),
            )
        )
        bar.update()
        if len(pending) == ANSWERS_PER_SHARD:
            cache.append(pending)
            pending = []
    if pending:
        cache.append(pending)
    bar.close()
    # by index: the order on disk is the order in which answers finished
    answers = sorted(cache, key=lambda answer: answer.index)
    if all(len(answer.response_ids) <= 1 for answer in answers):
        raise ValueError(
            f"All {len(prompts)} answers of the target are empty: it stops at its first token, "
            "and there is nothing to distil. Check the chat template, and whether the prompts "
            "should be `messages`."
        )
    tokens = sum(len(answer.response_ids) for answer in answers)
    size = cache.bytes_on_disk() / tokens
    print(f"answers: {tokens} tokens in {time.time() - clock:.0f} s, {size:.0f} B each")
    return answers


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and natural-log probabilities [B, C] of the C most likely tokens of logits [B, V]."""
    top, ids = logits.topk(count, dim=-1)
    # the normaliser in fp32 over all V: what the kept tokens lack of 1 is the mass of the rest
    return ids, top.float() - logits.float().logsumexp(-1, keepdim=True)


def hash_prompts(prompts: list[list[int]]) -> str:
    """sha256 over token ids, so that another tokenizer or template never meets the same cache."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(torch.tensor([len(prompt), *prompt], dtype=torch.int64).numpy().tobytes())
    return digest.hexdigest()


def _what_decides_p(recipe: Recipe, target: Target | TargetOfRun) -> dict[str, Any]:
    """Hashes of weights, tokenizer and chat template, and the dtype."""
    folder = resolve_checkpoint(recipe.target)
    weights = hashlib.sha256()
    for path in tqdm(sorted(folder.glob("*.safetensors")), desc="hash weights", leave=False):
        weights.update(_file_sha256(path).encode())
    template = str(target.tokenizer.chat_template or "")
    return {
        "target weights": weights.hexdigest(),
        "tokenizer": _file_sha256(folder / "tokenizer.json"),
        "chat template": hashlib.sha256(template.encode()).hexdigest(),
        "dtype": recipe.dtype,
    }


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
