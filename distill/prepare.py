"""The base draft: a sibling, or a draft that is made from the target.

Legend: V the target's vocabulary.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from align.checkpoint import Checkpoint
from align.files import atomic_folder
from align.trim import choose_tokens, coverage_curve, lost_mass
from distill.drafters.kind import Draft, Origin, TargetEnds
from distill.export import write_draft
from distill.models import Pair, forced_tokens, load_sibling
from distill.recipe import Recipe
from distill.teacher.states import states_of
from distill.teacher.store import Answers, CachedAnswer
from eval.decoding.drafters.drafter import Drafter
from eval.decoding.drafters.loading import model_drafter
from eval.decoding.target import Target


def prepare_draft(
    recipe: Recipe, pair: Pair, load: Callable[[], Target | TargetEnds], answers: Answers
) -> Draft:
    """The base draft. A draft made from the target is written to `prepared/` and read from there.

    load: returns the target; called only if `prepared/` is not complete.
    """
    if recipe.sibling is not None:
        return read_prepared(recipe, pair)
    folder = recipe.folder / "prepared"
    if not folder.exists():
        _write_base(recipe, pair, load(), answers, folder)
    return read_prepared(recipe, pair)


def _write_base(
    recipe: Recipe, pair: Pair, target: Target | TargetEnds, answers: Answers, folder: Path
) -> None:
    """Write a base draft made from the target into the folder; print what it is."""
    # reads all outputs, so only for a trimmed head
    mass = functools.cache(lambda: domain_mass(answers, pair.target.vocabulary.vocab_size))
    ids = None
    if recipe.draft_vocab_size is not None and recipe.draft is None:
        ids = choose_tokens(mass(), recipe.draft_vocab_size, forced_tokens(pair.target.vocabulary))
    base = _initialised(recipe, pair, target, ids, answers)
    with atomic_folder(folder) as partial:
        embedding = pair.target_embedding(getattr(torch, recipe.dtype))
        recipe.kind.save(partial, base, embedding, pair.target)
        pair.target.tokenizer.save_pretrained(partial)
    shape = f"{recipe.num_draft_layers} layers" if recipe.kind.language_model else recipe.kind_name
    if base.token_ids is not None:
        lost = lost_mass(mass(), base.token_ids.cpu())
        shape += f", trimmed tokens have {lost:.2%} of the target's probability"
    print(f"base draft: {shape}")


def _initialised(
    recipe: Recipe,
    pair: Pair,
    target: Target | TargetEnds,
    token_ids: Tensor | None,
    answers: Answers | None,
) -> Draft:
    """The kind's base draft, fitted to the first outputs; without outputs it is not fitted."""
    return recipe.kind.initialise(
        Origin(
            target,
            token_ids,
            [] if answers is None else list(fit_outputs(recipe, answers)),
            recipe.num_draft_layers,
            recipe.max_gamma,
            pair.layers,
            pair.mask,
            None if pair.published is None else pair.published.folder,
            None if answers is None else states_of(answers.store, pair.layers),
            recipe.ttt_steps,
            None if answers is None else states_of(answers.store, pair.fit_layers),
            recipe.lora_r,
            recipe.lora_alpha,
        )
    )


def read_prepared(recipe: Recipe, pair: Pair) -> Draft:
    """The base draft: the sibling, or the draft that `prepare_draft` has written."""
    if recipe.sibling is not None:
        return _sibling(recipe, pair)
    dtype = getattr(torch, recipe.dtype)
    embedding, head = pair.target_embedding(dtype), functools.partial(pair.target_head, dtype)
    return recipe.kind.load(recipe.folder / "prepared", embedding, head)


def _sibling(recipe: Recipe, pair: Pair) -> Draft:
    model = load_sibling(pair)
    recipe.kind.from_sibling(model, pair.mask, recipe.max_gamma)
    return Draft(model)


def untrained_drafter(recipe: Recipe, pair: Pair, target: Target) -> Drafter:
    """A drafter of the recipe's kind and shape, to time a step before there are outputs."""
    with tempfile.TemporaryDirectory() as folder:
        write_untrained(recipe, pair, target, Path(folder))
        return model_drafter(Checkpoint.open(folder), target, pair.strategy)


def write_untrained(recipe: Recipe, pair: Pair, target: Target, folder: Path) -> None:
    """Write a draft of the recipe's kind and shape to an existing folder, as engines load it.

    A trimmed head keeps the first vocabulary entries, because choosing entries needs outputs.
    """
    if recipe.sibling is not None:
        base = _sibling(recipe, pair)
    else:
        size = None if recipe.kind.language_model else recipe.draft_vocab_size
        ids = None if size is None else torch.arange(size, device=target.decoder.device)
        base = _initialised(recipe, pair, target, ids, None)
    write_draft(recipe, pair, base, folder)


def print_coverage(pair: Pair, answers: Iterable[CachedAnswer]) -> None:
    """Print the share of the target's probability that each trimmed vocabulary would lose."""
    mass = domain_mass(answers, pair.target.vocabulary.vocab_size)
    print("draft_vocab_size  lost probability")
    for size, lost in coverage_curve(mass, forced_tokens(pair.target.vocabulary)):
        print(f"{size:>16}  {lost:>16.3%}")


def domain_mass(answers: Iterable[CachedAnswer], vocab_size: int) -> Tensor:
    """The target's probability of each token, summed over the cached positions [V]."""
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for answer in answers:
        p = answer.top_logprobs.double().exp()
        mass.index_add_(0, answer.top_ids.flatten(), p.flatten())
    return mass


def fit_outputs(recipe: Recipe, answers: Answers) -> Answers:
    """The outputs of the least-squares initialisation: the first ones."""
    return answers.until(recipe.fit_tokens)
