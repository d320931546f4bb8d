"""What each process of a run does that answers prompts; started by test_answers.py."""

import dataclasses
import os
import signal

import torch
from accelerate import PartialState

from distill import answers
from distill.answer_cache import AnswerCache
from distill.recipe import build_recipe
from eval.decoding.target import load_target


def answer_share(values, prompts, dies=None):
    """values: a recipe's. dies: the rank of the process that kills itself after its first shard."""
    recipe, state = build_recipe(values), PartialState(cpu=True)
    target = load_target(recipe.target, torch.float32, state.device, 60)
    answers.ANSWERS_PER_SHARD = 2
    if state.process_index == dies:
        append = AnswerCache.append

        def last(cache, pending):
            append(cache, pending)
            os.kill(os.getpid(), signal.SIGKILL)

        AnswerCache.append = last
    target = dataclasses.replace(target, stops=frozenset())
    made = answers.answer_prompts(recipe, prompts, target)
    print(f"process {state.process_index} of {state.num_processes}: {len(made)} answers")
