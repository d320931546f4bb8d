"""Generate the target's outputs and cache its distributions."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from torch import Tensor

from align.files import write_json
from align.machine import free_memory, from_first
from align.vocabulary import Vocabulary
from distill.models import target_device
from distill.recipe import Recipe
from distill.teacher.store import (
    TAUGHT,
    Answers,
    CachedAnswer,
    CacheError,
    Entry,
    Store,
    name_of,
    names_of,
)
from eval.decoding.generation import Kept, generate_batched, prefill_groups, tokens_bar
from eval.decoding.loop import Decoding, seed_of
from eval.decoding.target import Target, weights_sha256
from eval.decoding.verification import Sampling
from eval.engines.environment import EngineMissing, vllm_python

ANSWERS_PER_SHARD = 64  # at most so many answers of a process are lost to a kill
USED = "answers.json"  # in a run's folder: which store it reads, and what of it


def who_answers(recipe: Recipe) -> tuple[Literal["local", "vllm", "server"], str]:
    """What generates the target's responses, and why."""
    if recipe.answers != "auto":
        return recipe.answers, "the recipe names it"
    if target_device(recipe) == "cpu":
        return "local", "the target is on the CPU"
    if recipe.train_on_prompts:
        return "local", "train_on_prompts asks for distributions that vLLM is not asked for"
    try:
        vllm_python()
    except EngineMissing as error:
        return "local", f"{error}; on a GPU it should be faster, which is not measured yet"
    return "vllm", "on a GPU it should be faster than our own loop, which is not measured yet"


def open_store(recipe: Recipe, target: Vocabulary) -> Store:
    """The store of this target's answers under this recipe. A call of all processes."""
    key = {}
    if PartialState().is_main_process:  # it reads all the target's weights
        key = {"target weights": weights_sha256(str(target.folder)), "dtype": recipe.dtype}
    return Store.of(from_first(key) | what_decides_answers(recipe, target))


def what_decides_answers(recipe: Recipe, target: Vocabulary) -> dict[str, Any]:
    """The settings that two runs on one model must share to share their responses."""
    key = {
        "answer_temperature": recipe.answer_temperature,
        "answer_max_new_tokens": recipe.answer_max_new_tokens,
        "cache_top_k": recipe.cache_top_k,
        "stop tokens": sorted(target.all_stops),
    }
    return key | ({"seed": recipe.seed} if recipe.answer_temperature else {})


def to_answer(recipe: Recipe, prompts: list[list[int]]) -> list[list[int]]:
    """The training prompts (token ids) of a run, one for each response."""
    return (prompts * recipe.answers_per_prompt)[: recipe.max_answers]


def answer_prompts(
    recipe: Recipe,
    prompts: list[list[int]],
    load: Callable[[], Target],
    store: Store,
    layers: Sequence[int] = (),
    teach_prompts: bool = False,
) -> Answers:
    """The target's responses to these prompts (token ids), in their order.

    Those in the store are not made again. load: gives the target where one is missing. layers:
    their hidden states are stored with new responses. teach_prompts: the distributions within the
    prompts are stored, too. Every process of a launch calls it: each answers its share, and all
    return once all have answered. A response's random numbers depend on the recipe's seed and its
    name in the store alone. Raises ValueError when no response has a token before its stop token.
    """
    clock, state = time.monotonic(), PartialState()
    names = names_of(prompts, teach_prompts)
    # one process decides: another run may append meanwhile, and all must share out the same prompts
    missing = from_first([i for i, name in enumerate(names) if name not in store])
    groups = prefill_groups([prompts[i] for i in missing])
    share = {
        names[missing[i]]: prompts[missing[i]]
        for group in groups[state.process_index :: state.num_processes]
        for i in group
    }
    if share:
        # counted over all shares: as many rows for any number of processes, for equal bits
        rows = min(recipe.answer_batch_size, len(missing))
        _answer(recipe, share, rows, load, store, layers, teach_prompts)
    state.wait_for_everyone()
    store.refresh()
    if lacking := sum(name not in store for name in names):
        raise CacheError(
            f"{store.folder} lacks {lacking} of {len(names)} answers after every process has "
            "answered its share: the processes do not see the same folder. Set DRAFTSMITH_CACHE "
            "to a folder on a disk that all of them share."
        )
    answers = Answers(store, names)
    lengths = answers.response_lengths
    if teach_prompts:  # their prompts are no part of the responses
        lengths = [n - len(ids) + 1 for n, ids in zip(lengths, prompts, strict=True)]
    describe(answers, lengths)
    if state.is_main_process:
        print(f"{len(missing)} of {len(names)} answers made in {time.monotonic() - clock:.0f} s")
    return answers


def _answer(
    recipe: Recipe,
    share: dict[str, list[int]],
    rows: int,
    load: Callable[[], Target],
    store: Store,
    layers: Sequence[int],
    teach_prompts: bool,
) -> None:
    """Generate the responses to these prompts, `rows` at once, and store them by name."""
    target = load()  # before the progress bar begins
    names, prompts = list(share), list(share.values())
    pending: dict[str, Entry] = {}
    states: dict[str, Entry] = {}
    decoding = Decoding(
        Sampling(recipe.answer_temperature), target.stops, recipe.answer_max_new_tokens
    )
    bar = tokens_bar("target answers", len(names), decoding, not PartialState().is_main_process)
    generated = generate_batched(
        target.decoder,
        prompts,
        decoding,
        rows,
        # with its prompt taught an answer is the same
        [seed_of(recipe.seed, name.removesuffix(TAUGHT)) for name in names],
        Kept(lambda logits: top_logprobs(logits, recipe.cache_top_k), teach_prompts, layers),
        bar,
    )
    for count, answer in enumerate(generated, start=1):
        ids, logprobs = zip(*answer.captured, strict=True)
        text = torch.tensor(prompts[answer.index] + answer.tokens)
        start = len(text) - len(ids)
        pending[names[answer.index]] = CachedAnswer(
            index=answer.index,
            prompt_ids=text[:start],
            response_ids=text[start:],
            top_ids=torch.stack(ids).cpu(),
            top_logprobs=torch.stack(logprobs).cpu(),
        ).packed(target.vocab_size)
        if layers:
            states[name_of(text)] = {"states": torch.cat(answer.states)}
        if count % ANSWERS_PER_SHARD == 0 or count == len(names):
            # states first: those of an answer that is kept without them take another pass
            if layers:
                states_store(store, layers).append(states, "local")
            store.append(pending, "local")
            free_memory()  # caches of other sizes leave holes: half a gigabyte with 135M parameters
            pending, states = {}, {}
    bar.close()


def states_store(store: Store, layers: Sequence[int]) -> Store:
    """The store of these layers' hidden states, by the name of the text they were read on."""
    folder = store.folder / f"states-{'-'.join(map(str, layers))}"
    return Store(folder, store.key | {"layers": list(layers)})


def describe(answers: Answers, lengths: list[int]) -> None:
    """Print the size of the responses, of so many tokens each.

    Raises ValueError when none has a token before its stop token.
    """
    if max(lengths) <= 1:
        raise ValueError(
            f"All {len(lengths)} answers of the target are empty: it stops at its first token, "
            "and there is nothing to distil. Check the chat template, and whether the prompts "
            "should be `messages`."
        )
    if PartialState().is_main_process:
        print(f"answers: {sum(lengths)} tokens, in {answers.store.folder}")


def top_logprobs(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and natural-log probabilities [B, C] of the C most likely tokens of logits [B, V]."""
    top, ids = logits.topk(count, dim=-1)
    # the normaliser in fp32 over all V: what the kept tokens lack of 1 is the mass of all others
    return ids, top.float() - logits.float().logsumexp(-1, keepdim=True)


def note_used(
    folder: Path, target: Vocabulary, answers: Answers, held_out: Sequence[str] = ()
) -> None:
    """Write into a run's folder which responses it uses. held_out: names of the held-out ones."""
    store, template = answers.store, str(target.chat_template or "")
    used = {
        "store": str(store.folder),
        "key": store.key,
        "tokenizer": target.sha256,
        "chat template": hashlib.sha256(template.encode()).hexdigest(),
        "count": len(answers),
        "by": store.made_by(answers.names),
        "answers": store.sha256_of(answers.names),
        "held_out": held_out,
    }
    write_json(folder / USED, used)
