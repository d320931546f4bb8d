"""The embedded prompts as they come out of their wheels, and their splits compared pair by pair."""

import pytest

from align.sources import resolve_folder_in_wheel
from distill.prompt_sets import evaluation_prompts, training_prompts
from distill.recipe import load_recipe
from eval.near_duplicates import NEAR_DUPLICATE, shingles
from recipes.legal import licence_clauses as legal
from tests.distill.test_prompt_sets import leaks

pytestmark = pytest.mark.real


def prompts_of(name):
    recipe = load_recipe(["--recipe", name])
    evaluation = evaluation_prompts(recipe.eval_prompts, recipe.max_eval_prompts, recipe.seed)
    limit = recipe.max_train_prompts + recipe.tuning_prompts
    training, overlap = training_prompts(recipe.train_prompts, evaluation, limit, recipe.seed)
    assert len(training) == limit
    assert overlap.max_jaccard < NEAR_DUPLICATE
    return training, evaluation


def test_code_is_evaluated_on_human_eval():
    training, evaluation = prompts_of("code")
    assert len(evaluation) == 96
    assert all(p.id.startswith("HumanEval/") for p in evaluation)
    assert all(p.prompt and "def " in p.prompt for p in evaluation)
    assert not [*leaks(training, evaluation)]


def test_legal_is_evaluated_on_held_out_licences():
    training, evaluation = prompts_of("legal")
    assert len(evaluation) == 96
    assert not [*leaks(training, evaluation)]
    categories = {"definitions", "warranty", "liability", "termination", "grant", "other"}
    assert {p.category for p in training} == categories
    assert {p.category for p in evaluation} >= categories - {"liability"}  # the rarest


def test_no_held_out_licence_has_a_near_duplicate_in_training():
    folder = resolve_folder_in_wheel(legal.LICENCE_FOLDER)
    texts = {name: shingles(text) for name, text in legal._licence_texts(folder)}

    def documents(held_out):
        names = {p.id.partition(":")[0] for p in legal.licence_prompts(held_out)}
        return [texts[name] for name in sorted(names)]

    held_out = documents(True)
    assert len(held_out) > 150
    pairs = ((a, b) for a in documents(False) for b in held_out)
    for a, b in pairs:
        if min(len(a), len(b)) >= NEAR_DUPLICATE * max(len(a), len(b)):  # else it cannot be
            assert len(a & b) / len(a | b) < NEAR_DUPLICATE
