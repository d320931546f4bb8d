"""Training, tuning and evaluation prompts of a run, which do not overlap.

A spec is what `eval.prompts.load_prompts` reads, or one of two builders that come with draftsmith:
`embedded:stdlib-functions` (the running interpreter's standard library) and
`embedded:licence-clauses` (the licence texts in the wheel `licensedcode-data`, CC-BY-4.0). Several
of these with ` + ` between them are prompts of several domains, as many of each.
"""

from __future__ import annotations

import itertools
import random
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from transformers import AutoConfig

from align.sources import load_tokenizer
from align.vocabulary import Vocabulary
from distill.near_duplicates import NearDuplicates, Overlap, drop_overlap
from distill.recipe import Recipe
from eval.decoding.build import longest_context
from eval.measuring.intervals import FEWEST_CLUSTERS
from eval.prompts import (
    Lengths,
    Prompt,
    PromptError,
    PromptSet,
    PromptSource,
    draw,
    in_chat_form,
    load_prompts,
    open_prompts,
    refuse_repeated_ids,
    render_set,
)
from recipes.code.stdlib_functions import stdlib_prompts
from recipes.legal.licence_clauses import licence_prompts

STDLIB = "embedded:stdlib-functions"
LICENCES = "embedded:licence-clauses"
AND = " + "  # between the specs of several domains
HELD_OUT_PART = 20  # of so many training prompts one is held out at most
HELD_OUT_FEWEST = 8  # of fewer alpha says little


@dataclass(frozen=True)
class Prompts:
    """training: to distil on; tuning: to choose gamma on; evaluation: to measure on.

    held_out: to follow alpha on; neither they nor their near-duplicates are trained on.
    """

    training: PromptSet
    tuning: PromptSet
    evaluation: PromptSet
    overlap: Overlap
    held_out: PromptSet


def collect_prompts(recipe: Recipe, target: Vocabulary) -> Prompts:
    """The prompts of a recipe, rendered to the target's ids. Raises PromptError, SourceError."""
    tokenizer = load_tokenizer(target.spec)
    config = AutoConfig.from_pretrained(target.folder).get_text_config()
    room = longest_context(config) - recipe.max_gamma - 1
    lengths = Lengths(recipe.max_prompt_length, recipe.long_prompts)

    def rendered(source: str, part: list[Prompt], new_tokens: int) -> PromptSet:
        asked = in_chat_form(
            part, recipe.instruction, tokenizer.chat_template, recipe.chat_template_kwargs
        )
        return render_set(source, asked, tokenizer, room, new_tokens, lengths)

    def without_long(source: str, part: list[Prompt], new_tokens: int) -> list[Prompt]:
        if recipe.long_prompts != "drop":
            return part
        ids = {prompt.id for prompt in rendered(source, part, new_tokens).prompts}
        return [prompt for prompt in part if prompt.id in ids]

    evaluation = evaluation_prompts(recipe.eval_prompts, recipe.max_eval_prompts, recipe.seed)
    evaluation = without_long(recipe.eval_prompts, evaluation, recipe.max_new_tokens)
    limit = recipe.max_train_prompts + recipe.tuning_prompts
    prompts, overlap = training_prompts(recipe.train_prompts, evaluation, limit, recipe.seed)
    longest = max(recipe.answer_max_new_tokens, recipe.max_new_tokens)
    prompts = without_long(recipe.train_prompts, prompts, longest)
    if len(prompts) <= recipe.tuning_prompts:
        raise PromptError(
            f"{len(prompts)} training prompts are not enough to set {recipe.tuning_prompts} aside "
            "for choosing gamma; give more prompts or lower tuning_prompts."
        )
    tuning, remaining = prompts[: recipe.tuning_prompts], prompts[recipe.tuning_prompts :]
    count, none_held_out = min(recipe.held_out_prompts, len(remaining) // HELD_OUT_PART), ""
    if count < HELD_OUT_FEWEST:
        if recipe.held_out_prompts:
            none_held_out = f"none held out ({HELD_OUT_PART * HELD_OUT_FEWEST} would be enough), "
        count = 0
    held_out, training = hold_out(remaining, count)
    like_them = len(remaining) - len(held_out) - len(training)
    if count and (len(held_out) < HELD_OUT_FEWEST or len(training) < len(remaining) / 2):
        print(
            f"no prompts are held out: of {len(remaining)}, {len(held_out)} could be, and "
            f"{like_them} nearly repeat those (is there a template that all share?)"
        )
        held_out, training, like_them = [], remaining, 0

    sets = Prompts(
        rendered(recipe.train_prompts, training, recipe.answer_max_new_tokens),
        rendered(recipe.train_prompts, tuning, recipe.max_new_tokens),
        replace(
            rendered(recipe.eval_prompts, evaluation, recipe.max_new_tokens),
            overlap=overlap.exact + overlap.near,
        ),
        overlap,
        rendered(recipe.train_prompts, held_out, recipe.answer_max_new_tokens),
    )
    print(
        f"prompts: {len(training)} to train on ({sum(map(len, sets.training.ids))} tokens), "
        + (f"{len(held_out)} held out, " if held_out else none_held_out)
        + (f"{like_them} like those dropped, " if like_them else "")
        + f"{len(tuning)} to choose gamma, {len(evaluation)} to evaluate\n"
        f"prompts: {overlap.dropped} dropped as near-duplicates"
    )
    timed = sets.evaluation.drawn(recipe.speed_prompts, recipe.seed).prompts
    groups = len({(prompt.group, prompt.group or prompt.id) for prompt in timed})
    if groups < FEWEST_CLUSTERS:
        print(
            f"Warning: {groups} groups of prompts are timed, and an interval needs "
            f"{FEWEST_CLUSTERS}: give more (max_eval_prompts, speed_prompts), of more groups."
        )
    return sets


def training_prompts(
    spec: str, eval_prompts: list[Prompt], limit: int | None, seed: int
) -> tuple[list[Prompt], Overlap]:
    """Up to `limit` different prompts in an order drawn with the seed; None: all.

    None of them equals or nearly duplicates an evaluation prompt. Of several specs by turns, each
    with its share of the limit. Raises PromptError when none is left, and what `load_prompts`
    raises.
    """
    if AND in spec:
        specs, share = _shares(spec, limit)
        parts, overlaps = zip(
            *(training_prompts(part, eval_prompts, share, seed) for part in specs), strict=True
        )
        return _by_turns(parts)[:limit], Overlap(
            exact=sum(overlap.exact for overlap in overlaps),
            near=sum(overlap.near for overlap in overlaps),
            dropped=sum(overlap.dropped for overlap in overlaps),
            max_jaccard=max(overlap.max_jaccard for overlap in overlaps),
        )
    with _open_training(spec) as source:
        order = array("q", range(source.count))
        random.Random(seed).shuffle(order)
        # read one by one until there are enough: of a large source only these are ever in memory
        kept, overlap = drop_overlap((source.read(i) for i in order), eval_prompts, limit)
    if not kept:
        raise PromptError(
            f"All {source.count} training prompts of {spec!r} repeat evaluation prompts; train on "
            "others, or put what all prompts share (a schema, rules) into a system message."
        )
    refuse_repeated_ids(kept, spec)
    return kept, overlap


@contextmanager
def _open_training(spec: str) -> Iterator[PromptSource]:
    if spec in (STDLIB, LICENCES):
        built = stdlib_prompts() if spec == STDLIB else licence_prompts(held_out=False)
        yield PromptSource(len(built), built.__getitem__)
    else:
        _refuse_unknown_builder(spec)
        with open_prompts(spec) as source:
            yield source


def evaluation_prompts(spec: str, limit: int | None, seed: int) -> list[Prompt]:
    """Evaluation prompts; of the licence builder, those of documents held out from training.

    Of several specs by turns, each with its share of the limit.
    """
    if AND in spec:
        specs, share = _shares(spec, limit)
        return _by_turns([evaluation_prompts(part, share, seed) for part in specs])[:limit]
    if spec == STDLIB:
        raise PromptError(
            f"eval_prompts is {spec!r}, which is to train on and has no held-out part; evaluate on "
            "HumanEval, another data set or a file."
        )
    if spec == LICENCES:
        return draw(licence_prompts(held_out=True), limit, seed)
    _refuse_unknown_builder(spec)
    return load_prompts(spec, limit, seed)


def _shares(spec: str, limit: int | None) -> tuple[list[str], int | None]:
    """The specs of several domains, and how many prompts of each."""
    specs = spec.split(AND)
    return specs, None if limit is None else -(-limit // len(specs))


def _by_turns(parts: Sequence[list[Prompt]]) -> list[Prompt]:
    """One of each part after the other; the part's number before an id keeps ids apart."""
    numbered = [
        [replace(prompt, id=f"{number}:{prompt.id}") for prompt in part]
        for number, part in enumerate(parts)
    ]
    turns = itertools.zip_longest(*numbered)
    return [prompt for turn in turns for prompt in turn if prompt is not None]


def hold_out(prompts: list[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """The first prompts, `count` or as many more as complete their groups, and all others but
    near-duplicates of them.

    A group that would make them more than twice as many is passed over.
    """
    sizes = Counter(prompt.group for prompt in prompts)
    held_out: list[Prompt] = []
    for first in prompts:
        if len(held_out) >= count:
            break
        if first.group is None:
            held_out.append(first)
        elif first not in held_out and len(held_out) + sizes[first.group] <= 2 * count:
            held_out += (prompt for prompt in prompts if prompt.group == first.group)
    near = NearDuplicates(p.text for p in held_out)
    ids = {p.id for p in held_out}
    return held_out, [p for p in prompts if p.id not in ids and not near.closest(p.text)[0]]


def _refuse_unknown_builder(spec: str) -> None:
    if spec.startswith("embedded:"):
        raise PromptError(f"There are no prompts {spec!r}; there are {STDLIB} and {LICENCES}.")
