"""What the target's call on a few tokens takes, over its call on one.

    python tests/benchmarks/widths.py outputs/code

The argument is the folder of a finished run, whose target is timed, on as many tokens as a draft
has and one more. Prints the ratio for each width, and of the same call the time with positions that
attend together over the time with each apart (eval/decoding/cpu_bits.py), all in turns, with 95%
intervals over rounds.
"""

import copy
import sys
import time
from pathlib import Path

import torch

from align.machine import use_machine
from distill.recipe import read_yaml
from eval.decoding.target import load_target
from eval.measuring.intervals import measure

WIDTHS = (1, 2, 3, 4, 5, 7)
ROUNDS, WARM_UP = 60, 5
CONTEXT = 250


def main(folder):
    use_machine()
    recipe = read_yaml(folder / "recipe.yaml")
    dtype = getattr(torch, recipe["dtype"])
    together = load_target(recipe["target"], dtype, "cpu", 512).decoder
    if not together.together:
        print("positions attend apart here: together they would not have the same bits")
    apart = copy.copy(together)
    apart.together = False
    cache = together.new_cache(1, 512)

    def seconds(decoder, width):
        tokens = torch.randint(len(decoder.embedding), (1, width))
        clock = time.perf_counter()
        decoder.forward(tokens, CONTEXT, cache)
        return time.perf_counter() - clock

    calls = [(decoder, width) for width in WIDTHS for decoder in (together, apart)]
    rounds = []
    for turn in range(WARM_UP + ROUNDS):
        # every second round the other way about: neither always comes first
        order = range(len(calls)) if turn % 2 else reversed(range(len(calls)))
        found = {i: seconds(*calls[i]) for i in order}
        rounds.append([found[i] for i in range(len(calls))])
    for i, width in enumerate(WIDTHS):
        for name, over, under in (
            (f"{width} tokens / 1", 2 * i, 0),
            (f"{width} tokens, together / apart", 2 * i, 2 * i + 1),
        ):
            rows = [(row[over], row[under]) for row in rounds[WARM_UP:]]
            print(f"{name}: {measure(name, rows):.3f}, n={ROUNDS} rounds")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
