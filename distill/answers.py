"""The target answers the training prompts; its distributions are kept while it does."""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm

from align.process import from_first
from align.sources import resolve_checkpoint
from distill.answer_cache import AnswerCache, CachedAnswer, CacheError
from distill.models import TargetOfRun
from distill.recipe import Recipe
from distill.state_cache import StateCache
from eval.decoding.generation import generate_batched, prefill_groups
from eval.decoding.loop import seed_of
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

PROBE = 256  # answers that a run with `minutes` times first
ANSWERS_PER_SHARD = 64  # at most so many answers of a process are lost to a kill


def answer_prompts(
    recipe: Recipe,
    prompts: list[list[int]],
    target: Target | TargetOfRun,
    folder: str = "answers",
    layers: Sequence[int] = (),
) -> AnswerCache:
    """The target's answers to `prompts` (token ids), kept in `folder`; those there are read.

    As many as the recipe's `max_answers`, in the prompts' order. layers: of these the target's
    hidden states are kept as well, in `states/`.

    Called by every process of a launch: each answers its share of what is left, and all return
    once all have answered. The tokens of an answer depend on the recipe's seed and its index alone.
    Raises CacheError for answers of another target, and ValueError when not one answer has a token
    before its stop.
    """
    clock = time.time()
    state = PartialState()
    prompts = prompts * recipe.answers_per_prompt
    # the first reads all the target's weights
    parts = from_first(what_decides_p(recipe, target) if state.is_main_process else {}) | {
        "answer_temperature": recipe.answer_temperature,
        "answer_max_new_tokens": recipe.answer_max_new_tokens,
        "cache_top_k": recipe.cache_top_k,
        "prompts": [len(prompts), hash_prompts(prompts)],
        "seed": recipe.seed,
    }
    if recipe.train_on_prompts:
        parts["train_on_prompts"] = True
    cache = AnswerCache(recipe.folder / folder, parts, target.vocab_size)
    states = StateCache(recipe.folder, layers) if layers else None
    wanted = min(recipe.max_answers or len(prompts), len(prompts))
    # with `minutes` the first ones are made before it is known how many there will be
    first = min(PROBE, wanted) if recipe.minutes is not None else wanted
    for part in (range(first), range(first, wanted)):
        done = set(cache.indices)
        # whole groups, since an answer has the same bits with the same prompts read beside it
        groups = [[part[i] for i in group] for group in prefill_groups([prompts[i] for i in part])]
        left = [group for group in groups if not done.issuperset(group)]
        state.wait_for_everyone()  # all see the same left before anyone adds to the cache
        share = [i for group in left[state.process_index :: state.num_processes] for i in group]
        if share:
            _answer(recipe, prompts, share, len(part), target, cache, states, done, wanted)
        state.wait_for_everyone()
        cache.refresh()
    if len(cache) < wanted:
        raise CacheError(
            f"{cache.folder} holds {len(cache)} of {wanted} answers after every process has "
            "answered its share: the processes do not see the same folder. Give --output_dir a "
            "folder on a disk that all of them share."
        )
    lengths = answer_lengths(recipe, prompts, cache)
    refuse_empty(lengths)
    if state.is_main_process:
        size = cache.bytes_on_disk() / sum(cache.response_lengths)
        seconds = time.time() - clock
        taught = sum(cache.response_lengths) - sum(lengths)
        print(
            f"answers: {sum(lengths)} tokens in {seconds:.0f} s, {size:.0f} B each"
            + (f"; and {taught} tokens of their prompts" if taught else "")
        )
    return cache


def answer_lengths(recipe: Recipe, prompts: list[list[int]], cache: AnswerCache) -> list[int]:
    """Tokens of each answer, what is taught of its prompt left out."""
    if not recipe.train_on_prompts:
        return cache.response_lengths
    taught = zip(cache.indices, cache.response_lengths, strict=True)
    return [length - len(prompts[i % len(prompts)]) + 1 for i, length in taught]


def _answer(
    recipe: Recipe,
    prompts: list[list[int]],
    share: list[int],
    part: int,
    target: Target | TargetOfRun,
    cache: AnswerCache,
    states: StateCache | None,
    done: set[int],
    wanted: int,
) -> None:
    """Append the answers to the prompts whose numbers are in `share`, those `done` left out.

    part: how many prompts all shares have; wanted: how many answers there are in the end.
    """
    decoder, stops = target.decoder, target.stops  # loaded before there is a bar to be torn
    bar = tqdm(
        total=wanted,
        initial=len(cache),
        desc="target answers",
        unit="answer",
        file=sys.stderr,
        disable=not PartialState().is_main_process,
    )
    pending: list[CachedAnswer] = []
    states_of: dict[int, Tensor] = {}  # those that are pending

    def keep() -> None:
        # the states before: of an answer that is there without them they take a pass of their own
        if states is not None:
            states.append(states_of)
        cache.append(pending)
        pending.clear()
        states_of.clear()

    for answer in generate_batched(
        decoder,
        [prompts[i] for i in share],
        recipe.answer_max_new_tokens,
        stops,
        Sampling(recipe.answer_temperature),
        # of all shares, not of this one: as many rows for any number of processes, for equal bits
        min(recipe.answer_batch_size, part),
        [seed_of(recipe.seed, str(i)) for i in share],
        capture=lambda logits: top_logprobs(logits, recipe.cache_top_k),
        capture_prompts=recipe.train_on_prompts,
        layers=() if states is None else states.layers,
    ):
        index = share[answer.index]
        if index in done:
            continue
        ids, logprobs = zip(*answer.captured, strict=True)
        text = torch.tensor(prompts[index] + answer.tokens)
        given = len(text) - len(ids)
        pending.append(
            CachedAnswer(
                index=index,
                prompt_ids=text[:given],
                response_ids=text[given:],
                top_ids=torch.stack(ids).cpu(),
                top_logprobs=torch.stack(logprobs).cpu(),
            )
        )
        if answer.states:
            states_of[index] = torch.cat(answer.states)
        if len(pending) == ANSWERS_PER_SHARD:
            keep()
        bar.update(len(cache) + len(pending) - bar.n)  # those of the other processes, too
    if pending:
        keep()
    bar.update(len(cache) - bar.n)
    bar.close()


def refuse_empty(lengths: list[int]) -> None:
    """Raise ValueError where no answer, of so many tokens each, has one before its stop."""
    if max(lengths) <= 1:
        raise ValueError(
            f"All {len(lengths)} answers of the target are empty: it stops at its first token, "
            "and there is nothing to distil. Check the chat template, and whether the prompts "
            "should be `messages`."
        )


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


def what_decides_p(recipe: Recipe, target: Target | TargetOfRun) -> dict[str, Any]:
    """Hashes of weights, tokenizer and chat template, and the dtype."""
    folder = resolve_checkpoint(recipe.target)
    template = str(target.tokenizer.chat_template or "")
    return {
        "target weights": weights_sha256(folder),
        "tokenizer": _file_sha256(folder / "tokenizer.json"),
        "chat template": hashlib.sha256(template.encode()).hexdigest(),
        "dtype": recipe.dtype,
    }


def weights_sha256(folder: Path) -> str:
    """One hash over the weights of a checkpoint."""
    weights = hashlib.sha256()
    for path in tqdm(sorted(folder.glob("*.safetensors")), desc="hash weights", leave=False):
        weights.update(_file_sha256(path).encode())
    return weights.hexdigest()


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
