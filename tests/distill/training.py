"""What each process of a run does that test_processes.py starts.

A launcher starts it by path: training.py RANK-THAT-DIES RECIPE
"""

import os
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from torch.nn import Parameter

from distill import checkpoint, held_out, prompt_sets, training_setup
from distill import recipe as recipes
from distill import train as job
from distill.teacher import store
from distill.teacher.store import Store
from distill.train import main
from eval.engines.server import Server

# few prompts, some of them followed all the same
FOLLOWED = (
    (prompt_sets, "HELD_OUT_PART", 4),
    (prompt_sets, "HELD_OUT_FEWEST", 1),
    (held_out, "SHARE", 10.0),
)


record = held_out.HeldOut.record


def refused(self, latest, progress):
    """`HeldOut.record` of a draft that is worse with the whole change of its weights."""
    if latest.step > 0 and latest.change == 1:
        latest = replace(latest, emitted=[0.0] * len(latest.emitted))
    return record(self, latest, progress)


REFUSED = (*FOLLOWED, (held_out.HeldOut, "record", refused))


def dying(work, times):
    """`work`, after which the process kills itself when it is done so many times."""
    done = []

    def work_and_die(*given):
        work(*given)
        done.append(given)
        if len(done) == times:
            os.kill(os.getpid(), signal.SIGKILL)

    return work_and_die


def dies_in_the_second(save):
    """`save`, in which the process kills itself the second time."""
    calls, whole = [], checkpoint._whole

    def die(*_):
        os.kill(os.getpid(), signal.SIGKILL)

    def save_or_die(*given):
        calls.append(given)
        if len(calls) == 2:
            # the first process writes; the others take part, here until the weights are written
            checkpoint.mark_complete = die
            if os.environ["RANK"] != "0":
                checkpoint._whole = lambda x: whole(x) if isinstance(x, Parameter) else die()
        save(*given)

    return save_or_die


def train(recipe, dies, environment, refuses=False):
    """The job of a recipe's path; the process of that rank dies in its second checkpoint.

    refuses: whether all weights are `refused` whose change is whole.
    """
    os.environ |= environment
    for module, name, value in REFUSED if refuses else FOLLOWED:
        setattr(module, name, value)
    if os.environ["RANK"] == str(dies):
        checkpoint.save_checkpoint = dies_in_the_second(checkpoint.save_checkpoint)
    sys.exit(main(["--recipe", str(recipe)]))


def train_apart(recipe, stage, dies, machines):
    """The same in processes of one machine each; the first alone has a network and prompts.

    stage: in which the process of that rank dies: "answers", after two shards, or "training".
    """
    machine = Path(machines) / os.environ["RANK"]
    for name in ("HOME", "TMPDIR", "DRAFTSMITH_CACHE"):
        (machine / name).mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(machine / name)
    tempfile.tempdir = None  # so that it is looked for again
    store.ANSWERS_PER_SHARD = 2
    if os.environ["RANK"] != "0":
        del Server._request, prompt_sets._chosen
    if stage == "answers" and os.environ["RANK"] == str(dies):
        Store.append = dying(Store.append, 2)
    train(recipe, dies if stage == "training" else None, {})


def meet(recipe):
    """The job up to its stages; only the first process's CPU has bf16 instructions."""
    usual = "float32" if os.environ["RANK"] != "0" else "bfloat16"
    recipes.usual_dtype = training_setup.usual_dtype = lambda on_cpu: usual

    def stages(recipe, *more):
        print(recipe.dtype, training_setup.training_config(recipe).bf16, file=sys.stderr)
        return 0

    job.run_stages = stages
    sys.exit(main(["--recipe", str(recipe)]))


if __name__ == "__main__":
    train(sys.argv[2], sys.argv[1], {})
