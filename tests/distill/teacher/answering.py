"""What each process of a run does that answers prompts; started by test_answers.py."""

import os
import signal
import sys

import torch
from accelerate import PartialState

from align.machine import join_processes
from distill.recipe import build_recipe
from distill.teacher import answers
from distill.teacher.store import Store
from eval.decoding.target import load_target


def answer_share(values, prompts, dies=None):
    """values: a recipe's. dies: the rank of the process that kills itself after its first shard."""
    join_processes(True, 60)
    recipe, state = build_recipe(values), PartialState()
    target = load_target(recipe.target, torch.float32, state.device, 60)
    answers.ANSWERS_PER_SHARD = 2
    if state.process_index == dies:
        append = Store.append

        def last(*given):
            append(*given)
            os.kill(os.getpid(), signal.SIGKILL)

        Store.append = last
    store, settings = Store(recipe.folder / "store"), recipe.answer_settings([])
    local = answers.LocalTarget(store, settings, lambda: target)
    count = len(local.answers(prompts))
    told = f"process {state.process_index} of {state.num_processes}: {count} answers"
    print(told, file=sys.stderr)
