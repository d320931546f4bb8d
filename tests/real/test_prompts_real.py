"""The prompts of the recipes, and their splits compared pair by pair."""

import pytest

from distill.prompt_sets import evaluation_prompts, training_prompts
from distill.recipe import load_recipe
from tests.distill.test_prompt_sets import leaks

pytestmark = pytest.mark.real


def prompts_of(name):
    recipe = load_recipe(["--recipe", name])
    evaluation = evaluation_prompts(recipe.eval_prompts, recipe.max_eval_prompts, recipe.seed)
    limit = recipe.max_train_prompts + recipe.tuning_prompts
    training, _ = training_prompts(recipe.train_prompts, evaluation, limit, recipe.seed)
    assert len(training) == limit
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
