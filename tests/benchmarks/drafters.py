"""Kinds of draft at equal minutes: each trained on one run's answers, all measured in turns.

    python tests/benchmarks/drafters.py outputs/code --minutes 6
    python tests/benchmarks/drafters.py outputs/code --minutes 6 --kinds pruned-3 features-2 eagle3

The folder holds a finished run of a pruned draft; every kind is made by the functions of a run,
with its recipe, on its answers. `minutes` are of the preparation and the training, whose steps are
timed first. The target's states are not among them: a run keeps them as it answers, here they take
a pass of their own (column `states`). A number behind a kind is its layers. Then one
`python -m eval.run` measures all drafts in turns on the run's evaluation prompts; the table has 95%
intervals over prompts. What is done is not done again.
"""

import argparse
import dataclasses
import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

from align.files import atomic_file
from align.machine import free_memory, use_machine
from distill.export import export_draft
from distill.models import TargetOfRun, check_models
from distill.plan import training_step
from distill.prepare import prepare_draft, stand_in
from distill.prompt_sets import collect_prompts
from distill.recipe import build_recipe, read_yaml
from distill.teacher.answers import USED, answer_prompts, open_store, to_answer
from distill.teacher.states import cache_states
from distill.trainer import distil_draft
from eval.decoding.drafters.kind import kinds
from eval.reporting.report import read_report

KINDS = ("pruned-3", "features-3", "recurrent", "eagle3", "medusa", "parallel-3")


def train_kind(run: Path, folder: Path, name: str, minutes: float) -> dict:
    """Make one draft; called in a process of its own."""
    kind, _, layers = name.partition("-")
    keys = read_yaml(run / "recipe.yaml") | {"output_dir": str(folder), "drafter": kind}
    keys |= {"minutes": None, "max_answers": None, "save_strategy": "no"}
    if layers and kinds()[kind].keeps_layers:
        keys["num_draft_layers"] = int(layers)
    keys.pop("max_steps", None)
    recipe = build_recipe(keys)
    folder.mkdir(parents=True)
    shutil.copyfile(run / USED, folder / USED)
    pair = check_models(recipe)
    prompts = collect_prompts(recipe, pair.target)
    target = TargetOfRun(recipe, pair, prompts)
    asked = dataclasses.replace(recipe, max_answers=read_yaml(run / "recipe.yaml")["max_answers"])
    asked, store = to_answer(asked, prompts.training.ids), open_store(recipe, pair.target)
    answers = answer_prompts(recipe, asked, target, store, (), recipe.train_on_prompts)
    untrained = stand_in(recipe, pair, target.loaded)
    per_step = training_step(recipe, pair, untrained, prompts.training.ids)
    del untrained
    free_memory()
    clock = time.monotonic()
    cache_states(recipe, pair, target, answers)
    states = time.monotonic() - clock
    clock = time.monotonic()
    prepared = prepare_draft(recipe, pair, target, answers)
    target.release()
    before = time.monotonic() - clock
    steps = max(1, round((60 * minutes - before) / per_step))
    clock = time.monotonic()
    tuned = distil_draft(recipe, pair, prepared, answers, steps)
    training = time.monotonic() - clock
    export_draft(recipe, pair, prepared, tuned, answers)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = {"states": states, "before": before, "training": training}
    return seconds | {"steps": steps, "peak_gib": peak / 2**30}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--kinds", nargs="+", default=KINDS)
    parser.add_argument("--speed_prompts", type=int, default=32)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmark-drafters"))
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in its process
    args = parser.parse_args()
    if args.one:
        use_machine()
        (name,) = args.kinds
        made = train_kind(args.run, args.output / name, name, args.minutes)
        with atomic_file(args.output / name / "made.json") as file:
            json.dump(made, file)
        return
    for name in args.kinds:
        if not (args.output / name / "made.json").exists():
            shutil.rmtree(args.output / name, ignore_errors=True)
            here = [__file__, args.run, "--kinds", name, "--one", "--output", args.output]
            subprocess.run(
                [sys.executable, *map(str, here), "--minutes", str(args.minutes)], check=True
            )
    command = [sys.executable, "-m", "eval.run", "--run", args.run, "--output_dir", args.output]
    for name in args.kinds:
        command += ["--draft", f"{name}={args.output / name / 'draft'}"]
    subprocess.run([*map(str, command), "--speed_prompts", str(args.speed_prompts)], check=True)
    drafts = read_report(args.output / "report" / "report.json").drafts
    print("| draft | minutes | states | steps | peak GiB | alpha | tau | speed-up | memory |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, draft in drafts.items():
        made = json.loads((args.output / name / "made.json").read_text())
        minutes = (made["before"] + made["training"]) / 60
        print(
            f"| {name} | {minutes:.1f} | {made['states'] / 60:.1f} | {made['steps']} "
            f"| {made['peak_gib']:.1f} "
            f"| {draft.alpha:.2f} | {draft.tau:.2f} | {draft.speedup:.2f} "
            f"| {draft.memory.overhead:.1%} |"
        )


if __name__ == "__main__":
    main()
