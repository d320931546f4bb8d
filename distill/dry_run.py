"""The dry run: what a run needs (`needs.py`), and the largest speed-up of a draft.

The speed-up is computed from timed steps of target and draft, if their weights are on this machine;
where the run ends in vLLM, also from its steps. Nothing is written to the run's folder.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
import textwrap
from pathlib import Path

import torch
from accelerate import PartialState
from transformers import PreTrainedTokenizerBase

from align.checkpoint import Checkpoint
from align.machine import free_memory
from distill.models import Pair, check_models, target_loader
from distill.needs import print_memory, stores_states
from distill.prepare import untrained_drafter, write_untrained
from distill.prompt_sets import collect_prompts
from distill.recipe import Recipe
from distill.run_report import in_engine
from distill.teacher.vllm_target import answering_target
from eval.decoding.loop import Decoding
from eval.decoding.target import Target
from eval.engines.forecast import forecast_gains, print_gains
from eval.engines.start_vllm import VllmLauncher
from eval.measuring import metrics
from eval.measuring.cost import break_even_acceptance_rate, ceiling_speedup
from eval.measuring.timing import step_costs
from eval.prompts import PromptSet
from eval.reporting.fields import Load

EXAMPLE = 1000  # characters of a prompt's beginning, and of its end, that are printed
DEPTHS = range(1, 5)  # layers of a pruned draft that are tried besides the recipe's
ROUNDS = 5  # in which each step is timed
LOADS = (1, 8, 32)  # requests at a time in vLLM on a GPU; on a CPU the first


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
    stored = stores_states(recipe, pair, prompts, answering)
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
        VllmLauncher,
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
