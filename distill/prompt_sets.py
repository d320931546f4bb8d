"""Training, tuning and evaluation prompts of a run, which do not overlap.

A spec is what `eval.prompts.load_prompts` reads, or one of two sets that come with draftsmith:
`embedded:stdlib-functions` (documented functions of Python's standard library, in the form of
HumanEval) and `embedded:licence-clauses` (clauses of licence texts). A run reads its sources once
and keeps the prompts in its folder, where every later start finds them.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from accelerate import PartialState

from align.checkpoint import Checkpoint
from align.files import atomic_folder, read_json, write_json
from align.machine import from_first
from distill.recipe import Recipe
from distill.recipe_files import RECIPES
from distill.teacher.logged_rows import logged_prompts, with_output_ids
from eval.chat_template import in_chat_form, render_set
from eval.decoding.build import longest_context
from eval.engines.conversation import refuse_server_only
from eval.measuring.intervals import FEWEST_CLUSTERS
from eval.near_duplicates import NearDuplicates, Overlap, drop_overlap
from eval.prompts import (
    Prompt,
    PromptError,
    PromptSet,
    load_prompts,
    open_prompts,
    refuse_repeated_ids,
    write_prompts,
)

# The embedded prompts, and those that are held out from them for the evaluation.
EMBEDDED = {
    "embedded:stdlib-functions": "code/stdlib-functions.jsonl.gz",
    "embedded:licence-clauses": "legal/licence-clauses.jsonl.gz",
}
HELD_OUT = {"embedded:licence-clauses": "legal/licence-clauses-held-out.jsonl.gz"}
PROMPTS = "prompts"  # in a run's folder: the prompts as they were asked
OVERLAP, IDS = "overlap.json", "ids.json"
HELD_OUT_PART = 20  # at most one in 20 training prompts is held out
TRAINED_PART = 5  # the same for a base draft that was trained before: its training must be followed
OLD_SHARE, OLD = 0.3, "old"  # share of a recipe's old_prompts in training, and their category
HELD_OUT_FEWEST = FEWEST_CLUSTERS  # fewer prompts give no interval


@dataclass(frozen=True)
class Prompts:
    """training: to distil on; tuning: to choose the draft length on; evaluation: to measure on.

    held_out: to measure on while training; neither they nor their near-duplicates are trained on.
    """

    training: PromptSet
    tuning: PromptSet
    evaluation: PromptSet
    overlap: Overlap
    held_out: PromptSet


def collect_prompts(recipe: Recipe, target: Checkpoint) -> Prompts:
    """The prompts of a recipe, rendered to the target's ids. All processes must call it.

    If `keep_prompts` has written them, they are read from the run's folder, because a draft must be
    evaluated on the prompts with which its training prompts were compared. Otherwise they are read
    from their sources. The first process reads them for all, because a chat template may render the
    time. Raises PromptError, SourceError.
    """
    sets: Any = None
    if PartialState().is_main_process:
        kept = not recipe.dry_run and (recipe.folder / PROMPTS).is_dir()
        sets = _kept(recipe, target) if kept else _chosen(recipe, target)
    sets = from_first(sets)
    # training prompts that overlap are dropped
    sets = replace(sets, evaluation=replace(sets.evaluation, overlap=0))
    print(
        f"prompts: {len(sets.training.ids)} to train on "
        f"({sum(map(len, sets.training.ids))} tokens), {len(sets.held_out.ids)} held out, "
        f"{len(sets.tuning.ids)} to choose the draft length, {len(sets.evaluation.ids)} to "
        f"evaluate\nprompts: {sets.overlap.dropped} dropped as near-duplicates of these, "
        f"{sets.overlap.repeated} as repetitions"
    )
    if target.tokenizer.chat_template and sets.training.in_chat_form < 1:
        print(
            f"Warning: {1 - sets.training.in_chat_form:.0%} of the training prompts are raw, "
            "though the target has a chat template: set instruction, or give `messages`."
        )
    timed = sets.evaluation.drawn(recipe.speed_prompts, recipe.seed).prompts
    groups = len({(prompt.group, prompt.group or prompt.id) for prompt in timed})
    if groups < FEWEST_CLUSTERS:
        print(
            f"Warning: prompts of {groups} groups are timed, but an interval needs "
            f"{FEWEST_CLUSTERS}; raise max_eval_prompts and speed_prompts, or give more groups."
        )
    return sets


def _kept(recipe: Recipe, target: Checkpoint) -> Prompts:
    """The prompts that `keep_prompts` has written to a run's folder.

    Their ids are stored as well, because a chat template may render the date.
    """
    folder = recipe.folder / PROMPTS
    print(f"prompts: read from {folder}, because a run keeps its prompts")
    ids, has_template = read_json(folder / IDS), bool(target.vocabulary.chat_template)

    def part(name: str, source: str) -> PromptSet:
        path = folder / f"{name}.jsonl"
        prompts: list[Prompt] = []
        with suppress(PromptError):  # a damaged file has none
            prompts = load_prompts(str(path)) if ids[name] else []
        if len(prompts) != len(ids[name]):
            raise PromptError(
                f"{path} has {len(prompts)} prompts, but the run began with {len(ids[name])}; "
                "restore the file, or start the run under another --name."
            )
        return PromptSet(source, prompts, ids[name], chat_template=has_template)

    overlap = read_json(folder / OVERLAP)
    return Prompts(
        part("train", recipe.train_prompts),
        part("tuning", recipe.train_prompts),
        part("eval", recipe.eval_prompts),
        Overlap(overlap["dropped"], overlap["repeated"]),
        part("held_out", recipe.train_prompts),
    )


def _chosen(recipe: Recipe, target: Checkpoint) -> Prompts:
    """The prompts that a recipe draws from its sources."""
    room = longest_context(target.text_config) - recipe.max_gamma - 1
    lengths = recipe.max_prompt_length, recipe.long_prompts

    def rendered(source: str, new_tokens: int, part: list[Prompt]) -> PromptSet:
        in_form = in_chat_form(
            part, recipe.instruction, target.tokenizer.chat_template, recipe.chat_template_kwargs
        )
        rows = target.vocabulary.vocab_size
        return render_set(source, in_form, target.tokenizer, room, new_tokens, *lengths, rows)

    chosen = evaluation_prompts(recipe.eval_prompts, recipe.max_eval_prompts, recipe.seed)
    measured = rendered(recipe.eval_prompts, recipe.max_new_tokens, chosen)
    fitting = {prompt.id for prompt in measured.prompts}
    # compared raw: in chat form all prompts share the instruction
    compared = [prompt for prompt in chosen if prompt.id in fitting]
    limit = recipe.max_train_prompts + recipe.tuning_prompts
    spec, logged = recipe.train_prompts, recipe.answers == "logged"
    source = logged_prompts(spec, recipe.answer_model) if logged else None
    prompts, overlap = training_prompts(spec, compared, limit, recipe.seed, source)
    if recipe.old_prompts is not None:
        prompts = with_old(prompts, recipe.old_prompts, compared, recipe.seed)
    longest = max(recipe.answer_max_new_tokens, recipe.max_new_tokens)
    pool = rendered(spec, longest, prompts)
    if logged:
        pool = with_output_ids(pool, target.vocabulary, recipe.answer_max_new_tokens)
    measured_ids = set(map(tuple, measured.ids))  # a cut may have made prompts equal
    rendered_pool = zip(pool.prompts, pool.ids, strict=True)
    pool = pool.of_ids({p.id for p, ids in rendered_pool if tuple(ids) not in measured_ids})
    tuning, others = pool.first(recipe.tuning_prompts), pool.after(recipe.tuning_prompts)
    if not others.prompts:
        raise PromptError(
            f"{len(pool.prompts)} different training prompts are not enough to set "
            f"{recipe.tuning_prompts} aside for choosing the draft length; give more prompts or "
            "lower tuning_prompts."
        )
    held_out, trained = _held_out(recipe, prompts, others)
    return Prompts(trained, tuning, measured, overlap, held_out)


def keep_prompts(folder: Path, prompts: Prompts) -> None:
    """Write a run's prompts into its folder, all or none, if they are not there yet."""
    kept = folder / PROMPTS
    if kept.is_dir():
        return
    parts = {
        "train": prompts.training,
        "tuning": prompts.tuning,
        "eval": prompts.evaluation,
        "held_out": prompts.held_out,
    }
    with atomic_folder(kept) as partial:
        for name, part in parts.items():
            if part.prompts:
                write_prompts(partial / f"{name}.jsonl", part.prompts)
        write_json(partial / OVERLAP, asdict(prompts.overlap))
        ids = {name: part.ids for name, part in parts.items()}
        (partial / IDS).write_text(json.dumps(ids), encoding="utf-8")


def training_prompts(
    spec: str,
    eval_prompts: list[Prompt],
    limit: int | None,
    seed: int,
    source: Sequence[Prompt] | None = None,
) -> tuple[list[Prompt], Overlap]:
    """Up to `limit` different prompts (None: all) in an order drawn with the seed.

    source: the prompts of the spec, if they have been read. No prompt is equal to, or a
    near-duplicate of, an evaluation prompt. Raises PromptError if none is left, and the errors of
    `load_prompts`.
    """
    if source is None:
        source = open_prompts(str(RECIPES / EMBEDDED[spec]) if spec in EMBEDDED else spec)
    order = list(range(len(source)))
    random.Random(seed).shuffle(order)
    # read one by one, so that only these prompts of a large data set are in memory
    kept, overlap = drop_overlap((source[i] for i in order), eval_prompts, limit)
    if not kept:
        raise PromptError(
            f"The first {overlap.dropped} training prompts of {spec!r} repeat evaluation prompts; "
            "train on others, or put text that all share (a schema, rules) into a system message."
        )
    refuse_repeated_ids(kept, spec)
    refuse_server_only(kept)
    return kept, overlap


def with_old(
    prompts: list[Prompt], spec: str, eval_prompts: list[Prompt], seed: int
) -> list[Prompt]:
    """The prompts, and OLD_SHARE of old ones of the spec among them, in an order by the seed."""
    count = round(len(prompts) * OLD_SHARE / (1 - OLD_SHARE))
    old, _ = training_prompts(spec, eval_prompts, count, seed)
    print(f"prompts: {len(old)} old ones are added to {len(prompts)}")
    mixed = prompts + [replace(p, id=f"{OLD} {p.id}", category=OLD) for p in old]
    return random.Random(seed).sample(mixed, len(mixed))


def evaluation_prompts(spec: str, limit: int | None, seed: int) -> list[Prompt]:
    """Evaluation prompts; of embedded ones those of documents held out from training."""
    if spec in EMBEDDED and spec not in HELD_OUT:
        raise PromptError(
            f"eval_prompts is {spec!r}, but these prompts are for training and have no held-out "
            "part; evaluate on HumanEval, another data set or a file."
        )
    prompts = load_prompts(str(RECIPES / HELD_OUT[spec]) if spec in HELD_OUT else spec, limit, seed)
    refuse_server_only(prompts)
    return prompts


def _held_out(
    recipe: Recipe, prompts: list[Prompt], others: PromptSet
) -> tuple[PromptSet, PromptSet]:
    """The held-out and the training prompts of `others`; prints the reason if none is held out.

    prompts: the same prompts before chat form, because in chat form all prompts are alike.
    """
    kept = {prompt.id for prompt in others.prompts}
    remaining = [prompt for prompt in prompts if prompt.id in kept]
    part = TRAINED_PART if recipe.starts_trained else HELD_OUT_PART
    count = min(recipe.held_out_prompts, len(remaining) // part)
    if count < HELD_OUT_FEWEST:
        if recipe.held_out_prompts:
            enough = part * HELD_OUT_FEWEST
            print(f"prompts: none held out, because this needs {enough} training prompts")
        return others.first(0), others
    held_out, trained = hold_out(remaining, count)
    alike = len(remaining) - len(held_out) - len(trained)
    if len(held_out) < HELD_OUT_FEWEST or len(trained) < len(remaining) / 2:
        print(
            f"prompts: none held out, because {alike} of {len(remaining)} are near-duplicates of "
            f"{len(held_out)} others; put text that all share into a system message"
        )
        return others.first(0), others
    if alike:
        print(f"prompts: {alike} dropped as near-duplicates of held-out prompts")
    return others.of_ids({p.id for p in held_out}), others.of_ids({p.id for p in trained})


def hold_out(prompts: list[Prompt], count: int) -> tuple[list[Prompt], list[Prompt]]:
    """Held-out prompts: the first `count` or more, with all prompts of their groups. And training
    prompts: all others, without near-duplicates of held-out prompts.

    A group that would make more than 2 * `count` held-out prompts is skipped.
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
    return held_out, [p for p in prompts if p.id not in ids and not near.repeats(p.text)]
