"""What each process of a run does that test_processes.py starts.

A launcher starts it by path: training.py RANK-THAT-DIES RECIPE
"""

import os
import signal
import sys
import tempfile
from pathlib import Path

from trl import SFTTrainer

from distill import held_out, prompt_sets
from distill.train import main
from eval.engines.server import Server

# few prompts, some of them followed all the same
FOLLOWED = (
    (prompt_sets, "HELD_OUT_PART", 4),
    (prompt_sets, "HELD_OUT_FEWEST", 1),
    (held_out, "SHARE", 10.0),
)


def train(recipe, dies, environment):
    """The job of a recipe's path; the process of that rank dies in its second checkpoint."""
    os.environ |= environment
    for module, name, value in FOLLOWED:
        setattr(module, name, value)
    save, saved = SFTTrainer._save_checkpoint, []

    def last(trainer, *given):
        save(trainer, *given)
        saved.append(trainer.state.global_step)
        if os.environ["RANK"] == str(dies) and len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    SFTTrainer._save_checkpoint = last
    sys.exit(main(["--recipe", str(recipe)]))


def train_apart(recipe, dies, machines):
    """The same in processes of one machine each; the first alone has a network and prompts."""
    machine = Path(machines) / os.environ["RANK"]
    for name in ("HOME", "TMPDIR", "DRAFTSMITH_CACHE"):
        (machine / name).mkdir(parents=True, exist_ok=True)
        os.environ[name] = str(machine / name)
    tempfile.tempdir = None  # so that it is looked for again
    if os.environ["RANK"] != "0":
        del Server._request, prompt_sets._chosen
    train(recipe, dies, {})


if __name__ == "__main__":
    train(sys.argv[2], sys.argv[1], {})
