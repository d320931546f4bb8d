"""What a run needs: memory, disk space, and whether the disk has space for the hidden states.

Memory is a coarse sum from the models' configs.
"""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env

from align.errors import UserError
from align.files import nearest_existing
from align.machine import machine_lines, memory_left
from distill.drafters.pruned import pruned_config
from distill.models import Pair, parameters, target_device
from distill.prompt_sets import Prompts
from distill.recipe import Recipe
from distill.teacher.answers import AnsweringTarget, to_answer
from distill.teacher.store import Answers, bytes_per_token
from eval.decoding.forward import PIECE

TRAINED_BYTES = 16  # a trained parameter in fp32: weight, gradient, two moments of AdamW
CHECKPOINT = 3 * 4  # bytes of a parameter there: weight and two moments of AdamW in fp32
FEW = 8  # outputs of a run with `minutes` that must fit on the disk
BESIDE = 1.3  # factor on the sum: activations, logits, what an allocator cannot use
RUNTIME = 2**30  # bytes that a process, or a GPU's context, takes without a model


def print_memory(
    recipe: Recipe, pair: Pair, longest: int, answers_here: bool, states_stored: bool = True
) -> None:
    """Print the needs of the stage with most memory, on each GPU, and what this machine has.

    longest: tokens of the longest prompt. answers_here: whether the outputs are generated in this
    process. states_stored: see `stores_states`.
    """
    target = pair.target.text_config
    size, draft = getattr(torch, recipe.dtype).itemsize, draft_parameters(recipe, pair)
    head_size = (
        getattr(target, "head_dim", None) or target.hidden_size // target.num_attention_heads
    )
    heads = getattr(target, "num_key_value_heads", None) or target.num_attention_heads
    kv = 2 * size * target.num_hidden_layers * heads * head_size
    new = recipe.answer_max_new_tokens
    tokens = max(recipe.answer_batch_size * (min(longest, PIECE) + new), longest + new)
    stages = {"training": training_bytes(recipe, pair, states_stored)}
    if pair.decoded_here:
        stages["evaluating"] = target_bytes(recipe, pair) + draft * size
        if answers_here:
            stages["answering"] = target_bytes(recipe, pair) + tokens * kv // spread_over(recipe)
    name = max(stages, key=lambda stage: stages[stage])
    print(f"{name} needs most memory (a coarse estimate)")
    on_gpu = not recipe.training.get("use_cpu", False)
    print("\n".join(machine_lines(with_rest(stages[name]), on_gpu)))


def spread_over(recipe: Recipe) -> int:
    """The number of GPUs that share the target's layers."""
    return torch.cuda.device_count() if recipe.device_map == "auto" else 1


def target_bytes(recipe: Recipe, pair: Pair) -> int:
    """Memory of the target's weights, on each GPU."""
    size = getattr(torch, recipe.dtype).itemsize
    return parameters(pair.target.text_config) * size // spread_over(recipe)


def training_bytes(recipe: Recipe, pair: Pair, states_stored: bool) -> int:
    """Memory of the weights in training, on each GPU. states_stored: see `stores_states`."""
    shards = PartialState().num_processes if parse_flag_from_env("ACCELERATE_USE_FSDP") else 1
    frozen = recipe.use_peft or recipe.kind.adapter
    each = 4 + getattr(torch, recipe.dtype).itemsize if frozen else TRAINED_BYTES
    trained = draft_parameters(recipe, pair) * each // shards
    return trained if states_stored else trained + target_bytes(recipe, pair)


def with_rest(weights: int) -> int:
    """The memory that a process takes, by that of its weights."""
    return round(BESIDE * weights) + RUNTIME


def draft_parameters(recipe: Recipe, pair: Pair) -> int:
    """The number of the draft's parameters, or a little more, from the models' configs."""
    if recipe.sibling is not None:
        return parameters(pair.draft.text_config)
    target = pair.target.text_config
    depth = target.num_hidden_layers
    kept = recipe.num_draft_layers if recipe.kind.language_model else depth * recipe.kind.adapter
    draft, whole, shorter = (parameters(pruned_config(target, n)) for n in (kept, depth, depth - 1))
    if kept:
        return draft
    about = None if pair.published is None else pair.published.config_json
    # layers like the target's last, because the first ones may have no experts
    return draft + recipe.kind.num_layers(recipe.num_draft_layers, about) * (whole - shorter)


def state_bytes(pair: Pair, tokens: int) -> int:
    """Bytes of the target's hidden states that the draft reads at each of the tokens, in bf16."""
    width: int = pair.target.text_config.hidden_size
    return 2 * len(pair.layers) * width * tokens


def cache_bytes(
    recipe: Recipe, pair: Pair, prompts: list[list[int]], new_tokens: int
) -> tuple[int, int]:
    """Bytes of outputs, and of the hidden states at each of their and their prompts' tokens.

    prompts: token ids. new_tokens: tokens of each output.
    """
    new = len(prompts) * new_tokens
    outputs = new * bytes_per_token(recipe.cache_top_k, pair.target.text_config.vocab_size)
    return outputs, state_bytes(pair, new + sum(map(len, prompts)))


def stores_states(recipe: Recipe, pair: Pair, prompts: Prompts, target: AnsweringTarget) -> bool:
    """Whether the run stores the hidden states of its outputs; else each training step computes
    them. Prints the need of the disk, as a warning if the longest outputs do not fit.

    They are computed if the disk lacks space for them, the target is decoded here, and it fits in
    the memory beside the draft. A GPU computes them in about the time in which a disk reads them,
    so there those of the longest outputs must fit; on a CPU those of outputs of one token. Raises
    UserError if a disk lacks space for the draft, or for what is stored even if each output has one
    token. With `minutes`, which limit the number of outputs, FEW must fit.
    """
    prompted = to_answer(prompts.training.ids, recipe.answers_per_prompt, recipe.max_answers)
    names = target.names(prompts.held_out.ids) + target.names(prompted, recipe.train_on_prompts)
    store = target.store
    named = zip(names, prompts.held_out.ids + prompted, strict=True)
    new, unread = [ids for name, ids in named if name not in store], 0
    if pair.layers:  # of cached outputs, another run may have read none
        cached = Answers(store, filter(store.__contains__, names))
        read = store.of_states(pair.layers)
        without = (i for i, name in enumerate(cached.text_names) if name not in read)
        unread = state_bytes(pair, sum(map(cached.tokens, without)))
    few = new if recipe.minutes is None else new[:FEW]
    least, least_states = cache_bytes(recipe, pair, few, 1)
    most, most_states = cache_bytes(recipe, pair, new, recipe.answer_max_new_tokens)
    least_states += unread if recipe.minutes is None else 0
    most_states += unread
    device = torch.device("cpu" if target_device(recipe) == "cpu" else "cuda")
    needed = least + least_states if device.type == "cpu" else most + most_states
    stored = (
        needed <= free_bytes(store.folder)
        or not (pair.layers and pair.decoded_here)
        or with_rest(training_bytes(recipe, pair, False)) > memory_left(device)
    )
    if not stored:
        # the initialisation reads those of the first outputs, and of more layers
        first = prompted[: math.ceil(recipe.fit_tokens / recipe.answer_max_new_tokens)]
        _, fit = cache_bytes(recipe, pair, first, recipe.answer_max_new_tokens)
        fit = fit * len({*pair.layers, *pair.fit_layers}) // len(pair.layers)
        least_states, all_states, most_states = min(least_states, fit), most_states, fit
        print(
            f"hidden states: up to {all_states / 2**30:.1f} GiB do not fit on the disk beside the "
            "outputs, so each training step computes them again with the target"
        )
    least, most = least + least_states, most + most_states
    draft = draft_parameters(recipe, pair)
    saved = draft * getattr(torch, recipe.dtype).itemsize * recipe.kind.language_model
    for folder, fewest, largest, remedy in (
        (store.folder, least, most, "set DRAFTSMITH_CACHE to a larger disk, or lower max_answers"),
        (recipe.folder, saved, CHECKPOINT * draft, "set output_dir to a folder of a larger disk"),
    ):
        free = free_bytes(folder)
        sizes = f"{fewest / 2**30:.1f} to {largest / 2**30:.1f} GiB"
        text = f"The run writes {sizes} to {folder}, and its disk has {free / 2**30:.1f} free"
        if fewest > free:
            raise UserError(f"{text}; {remedy}.")
        print(f"Warning: {text}; if it is filled, {remedy}." if largest > free else f"{text}.")
    return stored


def free_bytes(folder: Path) -> int:
    """What is free on the disk of a folder, which need not exist."""
    return shutil.disk_usage(nearest_existing(folder)).free
