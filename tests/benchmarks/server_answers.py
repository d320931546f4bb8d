"""Answers by a server against answers by this process: tokens/s of each, on the same prompts.

    python tests/benchmarks/server_answers.py --answer_url http://127.0.0.1:8102

The embedded code recipe's target, prompts and temperature, in turns; the server must serve that
target (docs/engines.md). It runs beside this process: on one machine give both the same cores, and
let neither work while the other is timed. Prints tokens/s and their ratio with a 95%
interval over rounds.
"""

import sys
import tempfile
import time
from dataclasses import replace

import torch

from align.machine import use_machine
from align.vocabulary import read_vocabulary
from distill.prompt_sets import collect_prompts
from distill.recipe import load_recipe
from distill.teacher.answers import answer_prompts
from distill.teacher.served import ServedTarget
from distill.teacher.store import Store
from eval.decoding.target import load_target
from eval.measuring.intervals import measure

ROUNDS, PROMPTS = 4, 96


def timed(answer, *arguments):
    """Tokens and seconds."""
    clock = time.perf_counter()
    tokens = sum(len(answer.response_ids) for answer in answer(*arguments))
    return tokens, time.perf_counter() - clock


def main():
    use_machine()
    keys = ["--max_train_prompts", str(ROUNDS * PROMPTS), "--max_eval_prompts", "8"]
    keys += ["--answer_batch_size", "48", "--minutes", "null", "--train_on_prompts", "false"]
    keys += ["--held_out_prompts", "0"]
    local = load_recipe(["--recipe", "code", *keys])
    vocabulary = read_vocabulary(local.target)
    prompts = collect_prompts(local, vocabulary)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = load_target(local.target, getattr(torch, local.dtype), device, 1024)
    # never trained: any draft but the target's own layers will do
    other = ["--answers", "server", "--draft", local.target, *sys.argv[1:]]
    remote = load_recipe(["--recipe", "code", *keys, *other])
    rows = []
    for at in range(0, ROUNDS * PROMPTS, PROMPTS):
        ids = prompts.training.ids[at : at + PROMPTS]
        part = replace(prompts.training, prompts=prompts.training.prompts[:1], ids=ids)
        with tempfile.TemporaryDirectory() as folder:
            there, here = (replace(r, output_dir=f"{folder}/{r.answers}") for r in (remote, local))
            served = ServedTarget(there, vocabulary, replace(prompts, training=part))
            served.store, store = Store(there.folder), Store(here.folder)  # nothing is at hand
            served.check()
            row = [*timed(served.answers), *timed(answer_prompts, here, ids, target, store)]
        rows.append(row)
        print(f"server {row[0] / row[1]:.0f}, local {row[2] / row[3]:.0f} tokens/s")
    ratio = measure("answers", rows, lambda t: (t[..., 0] / t[..., 1]) / (t[..., 2] / t[..., 3]))
    print(f"server / local: {ratio:.2f} times, n={ratio.n} rounds")


if __name__ == "__main__":
    main()
