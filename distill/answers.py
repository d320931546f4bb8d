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
from distill.logit_cache import CachedAnswer, LogitCache
from distill.prompts import Prompts
from distill.recipe import Recipe
from eval.decoding.drafts import Target
from eval.decoding.forward import Decoder
from eval.decoding.generation import generate_batched
from eval.decoding.verification import Sampling

ANSWERS_PER_SHARD = 64  # at most so many answers are lost to a kill


def answer(recipe: Recipe, prompts: Prompts, target: Target) -> list[CachedAnswer]:
    """The target's answers to the training prompts and its distributions, kept in `answers/`."""
    clock = time.time()
    cache = answer_prompts(
        target.decoder,
        prompts.training.ids * recipe.answers_per_prompt,
        recipe.folder / "answers",
        _what_decides_p(recipe, target),
        target.decoder.embedding.shape[0],
        target.stops,
        Sampling(recipe.answer_temperature),
        recipe.answer_max_new_tokens,
        recipe.answer_batch_size,
        recipe.cache_top_k,
        recipe.seed,
    )
    # by index: the order on disk is the order in which answers finished
    answers = sorted(cache, key=lambda answer: answer.index)
    tokens = sum(len(answer.response_ids) for answer in answers)
    size = cache.bytes_on_disk() / max(tokens, 1)
    print(f"answers: {tokens} tokens in {time.time() - clock:.0f} s, {size:.0f} B each")
    return answers


def _what_decides_p(recipe: Recipe, target: Target) -> dict[str, str]:
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


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and natural-log probabilities [B, C] of the C most likely tokens of logits [B, V]."""
    top, ids = logits.topk(count, dim=-1)
    # the normaliser in fp32 over all V: what the kept tokens lack of 1 is the mass of the rest
    return ids, top.float() - logits.float().logsumexp(-1, keepdim=True)


def answer_prompts(
    target: Decoder,
    prompts: list[list[int]],
    folder: Path,
    depends_on: dict[str, Any],
    vocab_size: int,
    stops: frozenset[int],
    sampling: Sampling,
    max_new_tokens: int,
    batch_size: int,
    top_k: int,
    seed: int,
) -> LogitCache:
    """Answers to all `prompts` (token ids) in the cache at `folder`; those already there are kept.

    depends_on: hashes of whatever decides p besides the arguments (target, tokenizer, template).
    Raises ValueError when not one answer has a token before its stop.
    """
    parts = depends_on | {
        "answer_temperature": sampling.temperature,
        "answer_max_new_tokens": max_new_tokens,
        "cache_top_k": top_k,
        "prompts": [len(prompts), hash_prompts(prompts)],
        "seed": seed,
    }
    cache = LogitCache(folder, parts, vocab_size)
    done = {answer.index for answer in cache}
    left = [i for i in range(len(prompts)) if i not in done]
    # each attempt draws with its own seed, else a resumed run would repeat the first one's draws
    attempt_seed = seed + 1_000_003 * len(done)
    bar = tqdm(
        total=len(prompts), initial=len(done), desc="target answers", unit="answer", file=sys.stderr
    )
    pending: list[CachedAnswer] = []
    for answer in generate_batched(
        target,
        [prompts[i] for i in left],
        max_new_tokens,
        stops,
        sampling,
        batch_size,
        attempt_seed,
        capture=lambda logits: top_logprobs(logits, top_k),
    ):
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
    if all(len(answer.response_ids) <= 1 for answer in cache):
        raise ValueError(
            f"All {len(prompts)} answers of the target are empty: it stops at its first token, "
            "and there is nothing to distil. Check the chat template, and whether the prompts "
            "should be `messages`."
        )
    return cache


def hash_prompts(prompts: list[list[int]]) -> str:
    """sha256 over token ids, so that another tokenizer or template never meets the same cache."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(torch.tensor([len(prompt), *prompt], dtype=torch.int64).numpy().tobytes())
    return digest.hexdigest()
