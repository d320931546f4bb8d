"""Texts that others wrote, judged by the target in one teacher-forced pass: as answers are cached.

Fixed text is there already; on-policy text is written here by the draft (arXiv 2306.13649). Either
costs a pass of the target over whole texts, where an answer costs one pass a token.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor
from tqdm import tqdm

from align.process import from_first
from align.sources import resolve_checkpoint
from distill.answer_cache import FIXED_TEXT, ON_POLICY, AnswerCache, CachedAnswer, Rows
from distill.answers import (
    ANSWERS_PER_SHARD,
    hash_prompts,
    top_logprobs,
    weights_sha256,
    what_decides_p,
)
from distill.models import Pair, TargetOfRun
from distill.recipe import Recipe, RecipeError
from eval.decoding.drafters.checkpoint import CheckpointDrafter
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.parallel import ParallelDrafter
from eval.decoding.forward import Decoder, HiddenStates, KVCache
from eval.decoding.generation import generate_batched
from eval.decoding.loop import seed_of
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

WRITERS = (CheckpointDrafter, ParallelDrafter)
POSITIONS = 1024  # of a pass, padding included: so many rows of logits over V exist at once
WRITTEN = 4  # on-policy texts, in batches, before they are judged and kept

Text = tuple[int, list[int], list[int]]  # its index, the ids before what is taught, and the rest


def with_fixed_text(
    recipe: Recipe, texts: Sequence[list[int]], target: TargetOfRun, answers: AnswerCache | None
) -> Rows:
    """The answers, where there are any, and behind them the recipe's share of fixed text.

    Of each row of `texts` all but the first token is taught; the target's distributions over them
    are kept in `fixed_text/`. A call of all processes. Raises CacheError for those of other rows.
    """
    parts = [] if answers is None else [answers]
    count = recipe.rows(len(target.prompts.training.ids))["fixed"]
    if count:
        rows = [(i, row[:1], row[1:]) for i, row in enumerate(texts[:count], FIXED_TEXT)]
        key = {"texts": [count, hash_prompts(list(texts[:count]))]}
        cache = _cache(recipe, "fixed_text", key, target)

        def read(group: list[Text]) -> Iterable[CachedAnswer]:
            return judge(target.decoder, group, recipe.cache_top_k)

        parts.append(_filled(cache, similar(rows), read, "fixed text"))
    return Rows(parts)


def with_on_policy_text(
    recipe: Recipe, pair: Pair, target: TargetOfRun, rows: Sequence[CachedAnswer]
) -> Rows:
    """The rows, and behind them the recipe's share of on-policy text, judged, in `on_policy/`.

    It is written by the draft before training, or by `on_policy_draft`, on prompts that are not
    answered as far as there are any. A call of all processes. Raises RecipeError for a draft that
    cannot write target ids.
    """
    prompts = target.prompts.training.ids
    counts = recipe.rows(len(prompts))
    count, answered = counts["on_policy"], counts["answers"]
    asked: list[Text] = [
        (ON_POLICY + i, prompts[(answered + i) % len(prompts)], []) for i in range(count)
    ]
    spec = recipe.on_policy_draft or recipe.draft or str(recipe.folder / "prepared")
    writer = Writer(draft_that_writes(spec, target.loaded, pair.strategy))
    compact = next((f for f in (Path(spec) / "compact", Path(spec)) if f.is_dir()), None)
    parts = {
        "texts": [count, hash_prompts([prompt for _, prompt, _ in asked])],
        "draft": [weights_sha256(compact or resolve_checkpoint(spec)), pair.strategy],
        "answer_temperature": recipe.answer_temperature,
        "answer_max_new_tokens": recipe.answer_max_new_tokens,
        "seed": recipe.seed,
    }
    cache = _cache(recipe, "on_policy", parts, target)
    size = WRITTEN * recipe.answer_batch_size
    groups = [asked[at : at + size] for at in range(0, count, size)]

    def write(group: list[Text]) -> Iterable[CachedAnswer]:
        written = generate_batched(
            writer,
            [prompt for _, prompt, _ in group],
            recipe.answer_max_new_tokens,
            target.stops,
            Sampling(recipe.answer_temperature),
            min(recipe.answer_batch_size, len(group)),
            [seed_of(recipe.seed, f"on-policy {i}") for i, *_ in group],
        )
        texts = [(*group[text.index][:2], text.tokens) for text in written]
        for part in similar(sorted(texts)):
            yield from judge(target.decoder, part, recipe.cache_top_k)

    return Rows([rows, _filled(cache, groups, write, "on-policy text")])


def draft_that_writes(spec: str, target: Target, strategy: str) -> CheckpointDrafter:
    """The drafter of that spec. Raises RecipeError for one that does not speak the target's ids."""
    drafter = load_drafter(spec, target, strategy)
    # of these the decoder gives logits over the target's ids from the text alone
    if not isinstance(drafter, CheckpointDrafter) or type(drafter) not in WRITERS:
        raise RecipeError(
            f"data has on_policy, but {spec!r} has ids of its own or no model of its own, so it "
            "cannot write a text in the target's; leave on_policy out, or name another draft."
        )
    return drafter


class Writer:
    """A draft as a decoder over the target's ids: minus infinity where it has no row."""

    def __init__(self, drafter: CheckpointDrafter) -> None:
        self.drafter = drafter
        decoder = drafter.decoder
        self.embedding, self.dtype, self.device = decoder.embedding, decoder.dtype, decoder.device
        self.context_length = decoder.context_length
        self.own_bytes, self.new_cache = decoder.own_bytes, decoder.new_cache

    def forward(
        self,
        tokens: Tensor,
        start: int | Tensor,
        cache: KVCache,
        last_only: bool = False,
        states: HiddenStates | None = None,
    ) -> Tensor:
        drafter = self.drafter
        logits = drafter.cut(drafter.decoder.forward(tokens, start, cache, last_only, states))
        full = logits.new_full((*logits.shape[:-1], drafter.vocab_size), float("-inf"))
        if drafter.token_ids is None:
            full[..., : logits.shape[-1]] = logits
        else:
            full[..., drafter.token_ids] = logits
        return full


def similar(texts: Sequence[Text]) -> list[list[Text]]:
    """Texts that are read together, the longest first: of like length, POSITIONS at most."""
    left = sorted(texts, key=lambda text: -len(text[1]) - len(text[2]))
    groups = []
    while left:
        rows = max(1, POSITIONS // (len(left[0][1]) + len(left[0][2])))
        groups.append(left[:rows])
        left = left[rows:]
    return groups


@torch.inference_mode()
def judge(decoder: Decoder, texts: Sequence[Text], top_k: int) -> list[CachedAnswer]:
    """The target's distributions before each taught token of the texts, in one pass."""
    read = [before + taught[:-1] for _, before, taught in texts]
    width = max(map(len, read))
    # what pads a row stands after all that the row reads
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in read], device=decoder.device)
    logits = decoder.forward(tokens, 0, decoder.new_cache(len(read), width))
    judged = []
    for (index, before, taught), row in zip(texts, logits, strict=True):
        ids, logprobs = top_logprobs(row[len(before) - 1 :][: len(taught)], top_k)
        judged.append(
            CachedAnswer(
                index, torch.tensor(before), torch.tensor(taught), ids.cpu(), logprobs.cpu()
            )
        )
    return judged


def _cache(recipe: Recipe, name: str, parts: dict[str, Any], target: TargetOfRun) -> AnswerCache:
    found = from_first(what_decides_p(recipe, target) if PartialState().is_main_process else {})
    parts = found | parts | {"cache_top_k": recipe.cache_top_k}
    return AnswerCache(recipe.folder / name, parts, target.vocab_size)


def _filled(
    cache: AnswerCache,
    groups: list[list[Text]],
    make: Callable[[list[Text]], Iterable[CachedAnswer]],
    what: str,
) -> AnswerCache:
    """The cache with all groups made that are not there yet, shared out over the processes."""
    state, done = PartialState(), set(cache.indices)
    left = [group for group in groups if not done.issuperset(index for index, *_ in group)]
    state.wait_for_everyone()  # all see the same left before anyone adds to the cache
    pending: list[CachedAnswer] = []
    share = left[state.process_index :: state.num_processes]
    for group in tqdm(share, desc=what, unit="batch", file=sys.stderr):
        pending += [row for row in make(group) if row.index not in done]
        if len(pending) >= ANSWERS_PER_SHARD:
            cache.append(pending)
            pending = []
    if pending:
        cache.append(pending)
    state.wait_for_everyone()
    cache.refresh()
    if state.is_main_process:
        print(f"{what}: {sum(cache.response_lengths)} tokens, {cache.bytes_on_disk()} B")
    return cache
