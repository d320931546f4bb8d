"""Compares the training of two checkouts on the same outputs: tokens a second and memory, in turns.

    python tests/benchmarks/training_speed.py OLD NEW [--kinds KIND …] [--rounds 3]

OLD and NEW are checkouts. Each has its own outputs in OLD/.cache and NEW/.cache, made by the same
target, seed and temperature. A round trains each kind for one epoch in each checkout, without
held-out measuring, and is timed from the line of the stage to the line of the next. It prints the
ratio of times of the rounds, and their range; and the most memory of each process, in GB (Linux).
"""

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path

FIRST, NEXT = "Distil the draft", "Save the draft"
COMMON = {"recipe": "code", "minutes": "null", "held_out_prompts": 0, "num_train_epochs": 1}
COMMON |= {"save_strategy": "no", "train_on_prompts": "false", "speed_prompts": 2}
KINDS = {
    "eagle3": {},
    "dflash": {"num_draft_layers": 3, "max_gamma": 7},
    "pard": {"num_draft_layers": 3},
    "pruned": {"num_draft_layers": 3},
}


def cost_of(checkout: Path, kind: str, outputs: int) -> tuple[float, float]:
    """Seconds of a training, and the most GB of its process, which is ended afterwards."""
    folder = checkout / "outputs" / f"speed-{kind}"
    shutil.rmtree(folder, ignore_errors=True)
    keys = COMMON | KINDS[kind] | {"drafter": kind, "max_answers": outputs, "output_dir": folder}
    options = [text for key, value in keys.items() for text in (f"--{key}", str(value))]
    command = [sys.executable, "-u", "distill/train.py", *options]
    environment = os.environ | {"DRAFTSMITH_CACHE": str(checkout / ".cache")}
    environment |= {"PYTHONPATH": str(checkout), "ACCELERATE_USE_CPU": "true"}
    log = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    began = None
    with subprocess.Popen(command, cwd=checkout, env=environment, **log) as process:
        for line in process.stdout:
            if FIRST in line:
                began = time.perf_counter()
            if NEXT in line:
                seconds = time.perf_counter() - began
                status = Path(f"/proc/{process.pid}/status").read_text()
                process.kill()
                return seconds, int(status.partition("VmHWM:")[2].split()[0]) / 1e6
    raise SystemExit(f"{checkout}: {' '.join(command)} ended without {NEXT!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--outputs", type=int, default=160)
    args = parser.parse_args()
    checkouts = args.old.resolve(), args.new.resolve()
    for kind in args.kinds:
        ratios = []
        for number in range(args.rounds):
            order = checkouts if number % 2 == 0 else checkouts[::-1]
            costs = {checkout: cost_of(checkout, kind, args.outputs) for checkout in order}
            (old, old_memory), (new, new_memory) = (costs[checkout] for checkout in checkouts)
            ratios.append(old / new)
            memory = f"{old_memory:.2f} GB, {new_memory:.2f} GB"
            print(f"{kind}: {old:.2f} s, {new:.2f} s; {memory}", flush=True)
        middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{kind}: {middle:.2f} times as fast [{least:.2f}, {most:.2f}]", flush=True)


if __name__ == "__main__":
    main()
