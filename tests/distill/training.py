"""What each process of a run does that test_processes.py starts.

A launcher starts it by path: training.py RANK-THAT-DIES RECIPE
"""

import os
import signal
import sys

from trl import SFTTrainer

from distill import held_out, prompt_sets
from distill.train import main

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


if __name__ == "__main__":
    train(sys.argv[2], sys.argv[1], {})
