"""Runs of two processes started by `accelerate launch`: the draft of one process, come what may."""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file

from distill.held_out import HELD_OUT, read_followed
from distill.recipe import dump
from distill.trainer import last_checkpoint

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "accelerate"
ONE, DDP, FSDP2 = "cpu.yaml", "cpu_2.yaml", "fsdp2.yaml"
# a run of few prompts that follows some of them all the same
HOLDS_OUT = """
import sys
from distill import held_out, prompts
from distill.train import main

prompts.HELD_OUT_PART, prompts.HELD_OUT_FEWEST, held_out.SHARE = 4, 1, 10.0
sys.exit(main(sys.argv[1:]))
"""

STEPS = 24  # of 4 rows, 3 an epoch
PRUNED = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 270}
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8}

# a second process that dies, as by kill -9, before all have written their part of a checkpoint
DIES = """
import os, signal, sys
from trl import SFTTrainer
from distill.train import main

save = SFTTrainer._save_checkpoint
def dies(trainer, model, trial):
    save(trainer, model, trial)
    if os.environ["RANK"] == "1" and trainer.state.global_step == 8:
        os.kill(os.getpid(), signal.SIGKILL)
SFTTrainer._save_checkpoint = dies
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_every_config(path):
    config = load_config_from_file(str(path))
    parser = launch_command_parser()
    args, _, _ = _validate_launch_command(
        parser.parse_args(["--config_file", str(path), "--main_process_port", "0", "train.py"])
    )
    assert args.num_processes == config.num_processes
    if path.stem != "cpu":
        environment = prepare_multi_gpu_env(args)
        assert args.nproc_per_node == str(config.num_processes)
        assert environment.get("FSDP_VERSION") == ("2" if args.use_fsdp else None)
        assert environment.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false") == "false"


class Run:
    """A command of the job that is running."""

    def __init__(self, config, recipe, script=ROOT / "distill" / "train.py", flags=()):
        file = recipe.folder.with_suffix(".yaml")
        file.write_text(dump(recipe))
        self.folder, self.log = recipe.folder, recipe.folder.with_suffix(".log")
        command = [sys.executable, "-m", "accelerate.commands.launch"]
        command += ["--config_file", CONFIGS / config, "--main_process_port", "0"]
        if config == FSDP2:
            command += ["--num_processes", "2"]
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        with self.log.open("w") as log:
            self.launcher = psutil.Popen(
                [*map(str, command), *flags, str(script), "--recipe", str(file)],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": path},
            )

    def ends(self, well=True):
        started = self.launcher.children(recursive=True)
        assert (self.launcher.wait(timeout=300) == 0) == well, self.log.read_text()
        _, alive = psutil.wait_procs(started, timeout=30)
        assert not alive  # the launcher ends the others, too
        return self.log.read_text()

    def kill(self, rank, after):
        """kill -9 of that process after so many seconds, where it still runs."""
        time.sleep(after)
        for process in self.launcher.children(recursive=True):
            if process.environ().get("RANK") == str(rank):
                process.kill()
                return self.ends(well=False)
        return self.ends()


def assert_same_draft(folder, straight):
    """Within 1e-5: sums over rows and shards in another order, which Adam's division magnifies."""
    compact = straight / "draft" / "compact"
    form = "draft/compact" if compact.exists() else "draft"  # the full form's rows are made of it
    expected = load_file(straight / form / "model.safetensors")
    got = load_file(folder / form / "model.safetensors")
    assert got.keys() == expected.keys()
    weights = [name for name, weight in expected.items() if weight.is_floating_point()]
    assert all(torch.equal(got[name], expected[name]) for name in expected.keys() - set(weights))
    difference = sum((got[name] - expected[name]).square().sum() for name in weights)
    size = sum(expected[name].square().sum() for name in weights)
    assert difference.sqrt() <= 1e-5 * size.sqrt()
    histories = [
        json.loads((last_checkpoint(run) / "trainer_state.json").read_text())["log_history"]
        for run in (folder, straight)
    ]
    assert [log["step"] for log in histories[0]] == [log["step"] for log in histories[1]]
    for log, expected in zip(*histories, strict=True):
        if "loss" in log:
            for key in ("loss", "forward_kl"):
                assert log[key] == pytest.approx(expected[key], rel=1e-5), log["step"]
    assert json.loads((folder / "report" / "report.json").read_text())["drafts"]["tuned"]


@pytest.fixture(scope="module")
def recipe(job, tmp_path_factory):
    """Makes the recipe of a run in a new folder: recipe(rows at a time, **keys to change)."""

    def make(rows, **changes):
        steps = {"max_steps": STEPS, "save_steps": 4, "logging_steps": 4}
        folder = tmp_path_factory.mktemp("processes") / "run"
        return job(folder, per_device_train_batch_size=rows, **steps, **changes)

    return make


@pytest.fixture(scope="module")
def straight(recipe):
    """What one process makes of the pruned target, and in how many seconds."""
    clock = time.time()
    run = Run(ONE, recipe(4, **PRUNED))
    assert "processes: " not in run.ends()
    return run.folder, time.time() - clock


@pytest.mark.real
@pytest.mark.parametrize(
    ("config", "how", "rank"),
    [
        pytest.param(DDP, "MULTI_CPU", 0, id="ddp"),
        pytest.param(FSDP2, "FSDP", 1, id="fsdp2"),
    ],
)
def test_two_processes_make_the_draft_of_one_though_either_is_killed(
    recipe, straight, config, how, rank
):
    expected, seconds = straight
    after = random.uniform(0.2, 1) * seconds
    two = recipe(2, **PRUNED)
    killed = Run(config, two).kill(rank, after)
    ended = Run(config, two).ends()
    print(f"rank {rank} killed after {after:.2f} s of about {seconds:.2f}")
    assert "processes: 2, gloo, cpu" in ended
    assert f"training over 2 processes ({how})" in killed + ended
    assert_same_draft(two.folder, expected)


@pytest.mark.real
def test_a_run_goes_on_with_the_processes_that_began_it_alone(recipe, tmp_path):
    straight = Run(ONE, recipe(4, **LORA))
    straight.ends()
    two = recipe(2, **LORA)
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    assert "training over 2 processes (FSDP)" in Run(FSDP2, two, script).ends(well=False)
    assert (two.folder / "checkpoint-8" / "trainer_state.json").exists()
    assert last_checkpoint(two.folder).name == "checkpoint-4"
    refused = Run(ONE, two).ends(well=False)
    assert "checkpoint-4 was left by 2 processes (FSDP), and 1 process (alone) would" in refused
    Run(FSDP2, two).ends()
    assert_same_draft(two.folder, straight.folder)


@pytest.mark.real
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("eagle3", ()),
        ("pruned", ("--fsdp_activation_checkpointing", "true")),
    ],
)
def test_shards_follow_held_out_prompts_as_one_process_does(recipe, tmp_path, kind, flags):
    script = tmp_path / "holds_out.py"
    script.write_text(HOLDS_OUT)
    one, two = (recipe(rows, **PRUNED, drafter=kind) for rows in (4, 2))
    Run(ONE, one, script).ends()
    assert "training over 2 processes (FSDP)" in Run(FSDP2, two, script, flags).ends()
    seen = [read_followed(made.folder / HELD_OUT).seen for made in (one, two)]
    assert seen[0]
    assert [a.step for a in seen[0]] == [b.step for b in seen[1]]
    for a, b in zip(*seen, strict=True):
        assert b.alpha == pytest.approx(a.alpha, abs=0.02)
    assert_same_draft(two.folder, one.folder)
