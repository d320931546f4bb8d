"""Estimate a run's memory and disk space, and the largest speed-up of a draft.

Memory is a coarse sum from the models' configs. The speed-up is computed from timed steps of target
and draft, if their weights are on this machine; where the run ends in vLLM, also from its steps.
Nothing is written to the run's folder.
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import PreTrainedTokenizerBase

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import nearest_existing
from align.machine import free_memory, machine_lines, memory_left
from distill.drafters.pruned import pruned_config
from distill.models import Pair, check_models, parameters, target_device, target_loader
from distill.prepare import untrained_drafter, write_untrained
from distill.prompt_sets import Prompts, collect_prompts
from distill.recipe import Recipe
from distill.run_report import in_engine
from distill.teacher.answers import AnsweringTarget, to_answer
from distill.teacher.store import Answers, bytes_per_token
from distill.teacher.vllm_target import answering_target
from eval.decoding.forward import PIECE
from eval.decoding.loop import Decoding
from eval.decoding.target import Target
from eval.engines.forecast import forecast_gains, print_gains
from eval.engines.start_vllm import VllmServers
from eval.measuring import metrics
from eval.measuring.cost import break_even_acceptance_rate, ceiling_speedup
from eval.measuring.timing import step_costs
from eval.prompts import PromptSet
from eval.reporting.fields import Load

EXAMPLE = 1000  # characters of a prompt's beginning, and of its end, that are printed
DEPTHS = range(1, 5)  # layers of a pruned draft that are tried besides the recipe's
ROUNDS = 5  # in which each step is timed
LOADS = (1, 8, 32)  # requests at a time in vLLM on a GPU; on a CPU the first
TRAINED_BYTES = 16  # a trained parameter in fp32: weight, gradient, two moments of AdamW
CHECKPOINT = 3 * 4  # bytes of a parameter there: weight and two moments of AdamW in fp32
FEW = 8  # outputs of a run with `minutes` that must fit on the disk
BESIDE = 1.3  # factor on the sum: activations, logits, what an allocator cannot use
RUNTIME = 2**30  # bytes that a process, or a GPU's context, takes without a model


def dry_run(recipe: Recipe, target: Checkpoint, draft: Checkpoint | None) -> int:
    """Print needs and gain of the run. Returns exit status 1 if no draft can be faster.

    target, draft: of `open_models`. Raises the errors of a run's checks.
    """
    pair = check_models(recipe, target, draft)
    prompts = collect_prompts(recipe, pair.target)
    load_target = target_loader(recipe, pair, prompts)
    print_example(prompts.training.ids[0], pair.target.tokenizer)
    answering = answering_target(recipe, pair, prompts, load_target)
    if not PartialState().is_main_process:
        return 0
    longest = max(map(len, prompts.training.ids + prompts.evaluation.ids))
    stored = check_disk(recipe, pair, prompts, answering)
    print_memory(recipe, pair, longest, answering.by == "local", stored)
    answering.check()
    if recipe.remote_target:
        print(f"server: {recipe.answer_url} serves the target of this recipe")
        return 0
    if not pair.decoded_here:
        print("what a draft can gain: not measured, because only an engine computes the target")
        return 0
    for model in filter(None, (target, draft)):
        if not model.has_weights:
            print(
                f"what a draft can gain: not measured, because the weights of {model.spec} are not "
                f"on this machine (`hf download {model.spec}`)"
            )
            return 0
    status = print_gain(recipe, pair, prompts.evaluation.ids, load_target())
    if status or not in_engine(recipe):
        return status
    with tempfile.TemporaryDirectory() as folder:
        write_untrained(recipe, pair, load_target(), Path(folder))
        load_target.cache_clear()  # its memory is the servers'
        free_memory()
        return print_gain_in_vllm(recipe, pair, prompts.evaluation, folder)


def print_gain(recipe: Recipe, pair: Pair, prompts: list[list[int]], target: Target) -> int:
    """Print cost, break-even and largest speed-up of each draft; returns an exit status."""
    context = sum(map(len, prompts)) // len(prompts) + recipe.max_new_tokens // 2
    variants = {recipe.kind_name: recipe}
    if recipe.kind.language_model and recipe.sibling is None:
        variants = {
            f"{depth} layer{'s' * (depth > 1)}": dataclasses.replace(recipe, num_draft_layers=depth)
            for depth in sorted({*DEPTHS, recipe.num_draft_layers})
            if depth < pair.target.text_config.num_hidden_layers
        }
    decoding = Decoding(recipe.sampling, target.stops, recipe.max_new_tokens)
    print(f"{'draft':>10}  {'c':>6}  {'break-even acceptance rate':>26}  {'perfect draft':>13}")
    ceilings = []
    for name, variant in variants.items():
        drafter = untrained_drafter(variant, pair, target)
        timed = target.decoder, [drafter], context, recipe.max_gamma, decoding
        (costs,) = step_costs(*timed, ROUNDS)
        needed, ceiling = break_even_acceptance_rate(costs), ceiling_speedup(costs)
        c = metrics.cost_ratio(costs)
        shown = "none" if needed is None else f"{needed:.2f}"
        print(f"{name:>10}  {c:>6.3f}  {shown:>26}  {ceiling:>12.2f}x")
        ceilings.append(ceiling)
    return refused(ceilings)


def print_gain_in_vllm(recipe: Recipe, pair: Pair, prompts: PromptSet, draft: str) -> int:
    """Print what drafts of 1 and of the most tokens can gain in vLLM; returns an exit status.

    draft: the folder of a draft of the same shape as the run's.
    """
    forecast = forecast_gains(
        VllmServers,
        pair.target,
        {recipe.kind_name: draft},
        sorted({1, recipe.gamma or recipe.max_gamma}),
        prompts,
        lambda ids: str(pair.target.tokenizer.decode(ids)),
        Decoding(recipe.sampling, frozenset(), recipe.max_new_tokens, recipe.seed),
        [Load(concurrency=n) for n in (LOADS if torch.cuda.device_count() else LOADS[:1])],
    )
    print(f"in vLLM {forecast.environment.engine_version}:")
    print_gains(forecast.gains)
    return refused([gain.perfect_speedup for gain in forecast.gains])


def refused(ceilings: list[float]) -> int:
    """The exit status for these speed-ups of perfect drafts; prints why it is not 0."""
    if max(ceilings) <= 1:
        print("error: even a perfect draft would gain nothing; use a smaller one.", file=sys.stderr)
        return 1
    return 0


def print_memory(
    recipe: Recipe, pair: Pair, longest: int, answers_here: bool, states_stored: bool = True
) -> None:
    """Print the needs of the stage with most memory, on each GPU, and what this machine has.

    longest: tokens of the longest prompt. answers_here: whether the outputs are generated in this
    process. states_stored: see `check_disk`.
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
    """Memory of the weights in training, on each GPU. states_stored: see `check_disk`."""
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


def check_disk(recipe: Recipe, pair: Pair, prompts: Prompts, target: AnsweringTarget) -> bool:
    """Whether the disk has space for the hidden states of all outputs. Print the need, as a warning
    if the longest outputs do not fit.

    Without this space each training step computes the states again, if the target is decoded here
    and fits in the memory beside the draft. A GPU does so in about the time in which a disk reads
    them, so there they are stored only if those of the longest outputs fit. Raises UserError if a
    disk lacks space for the draft, or for what is stored even if each output has one token. With
    `minutes`, which limit the number of outputs, FEW must fit.
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


def print_example(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
    """Print a prompt as the target reads it, and where the output begins.

    The acceptance rate is low if served prompts have another form than the training prompts, and
    only this output shows the form.
    """
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if (more := len(text) - 2 * EXAMPLE) > 0:
        text = f"{text[:EXAMPLE]} [… {more} characters …] {text[-EXAMPLE:]}"
    print(f"the first training prompt as the target reads it, {len(ids)} tokens:")
    print(textwrap.indent(f"{text}[the output begins here]", "    ", lambda line: True))
