"""One process of a launch that answers prompts; started by test_answers.py.

    torchrun --nproc_per_node N tests/distill/answering.py RECIPE PROMPTS RANK

RECIPE: JSON of a recipe's keys; PROMPTS: JSON of token ids. RANK: the process that kills itself
once it has written a shard, -1 for none.
"""

import dataclasses
import json
import os
import signal
import sys

import torch
from accelerate import PartialState

from distill import answers
from distill.answer_cache import AnswerCache
from distill.recipe import build_recipe
from eval.decoding.target import load_target


def main(recipe, prompts, dies):
    recipe = build_recipe(json.loads(recipe))
    state = PartialState(cpu=True)
    target = load_target(recipe.target, torch.float32, state.device, 60)
    answers.ANSWERS_PER_SHARD = 2
    if state.process_index == int(dies):
        append = AnswerCache.append

        def last(cache, pending):
            append(cache, pending)
            os.kill(os.getpid(), signal.SIGKILL)

        AnswerCache.append = last
    target = dataclasses.replace(target, stops=frozenset())
    found = answers.answer_prompts(recipe, json.loads(prompts), target)
    print(f"process {state.process_index} of {state.num_processes}: {len(found)} answers")


if __name__ == "__main__":
    main(*sys.argv[1:])
