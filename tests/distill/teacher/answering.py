"""One process of a launch that answers prompts; started by test_answers.py.

    torchrun --nproc_per_node N tests/distill/teacher/answering.py RECIPE PROMPTS RANK

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

from distill.recipe import build_recipe
from distill.teacher import answers
from distill.teacher.store import Store
from eval.decoding.target import load_target


def main(recipe, prompts, dies):
    recipe = build_recipe(json.loads(recipe))
    state = PartialState(cpu=True)
    target = load_target(recipe.target, torch.float32, state.device, 60)
    answers.ANSWERS_PER_SHARD = 2
    if state.process_index == int(dies):
        append = Store.append

        def last(*given):
            append(*given)
            os.kill(os.getpid(), signal.SIGKILL)

        Store.append = last
    target = dataclasses.replace(target, stops=frozenset())
    store = Store(recipe.folder / "store")
    count = len(answers.answer_prompts(recipe, json.loads(prompts), target, store))
    print(f"process {state.process_index} of {state.num_processes}: {count} answers")


if __name__ == "__main__":
    main(*sys.argv[1:])
