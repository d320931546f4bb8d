"""Runs of two processes started by `accelerate launch`: the draft of one process, come what may."""

import json
import os
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

from distill import held_out, prompt_sets, train
from distill.held_out import HELD_OUT, read_followed
from distill.recipe import RecipeError, dump
from distill.trainer import last_checkpoint

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "accelerate"
DDP, FSDP2 = "cpu_2.yaml", "fsdp2.yaml"
STEPS, DEATH = 16, 8  # of 4 rows, 3 an epoch
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8}
PRUNED = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 270}
EAGLE3 = PRUNED | {"drafter": "eagle3"}
# the job on few prompts, some of them followed all the same; the process of rank DIES dies, as by
# kill -9, before all have written their part of a checkpoint
SCRIPT = f"""
import os, signal, sys
from trl import SFTTrainer
from distill import held_out, prompt_sets
from distill.train import main

prompt_sets.HELD_OUT_PART, prompt_sets.HELD_OUT_FEWEST, held_out.SHARE = 4, 1, 10.0
save = SFTTrainer._save_checkpoint
def dies(trainer, model, trial):
    save(trainer, model, trial)
    if os.environ["RANK"] == os.environ["DIES"] and trainer.state.global_step == {DEATH}:
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


def launched(config, recipe, flags=(), dies=None):
    """What a run of two processes prints, one of which dies where its rank is given."""
    file, script, log = (recipe.folder.with_suffix(suffix) for suffix in (".yaml", ".py", ".log"))
    file.write_text(dump(recipe))
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--config_file", CONFIGS / config, "--num_processes", "2", *flags]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as out:
        launcher = psutil.Popen(
            [*map(str, command), str(script), "--recipe", str(file)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path, "DIES": str(dies)},
        )
    started, deadline = set(), time.monotonic() + 300
    while launcher.poll() is None:
        assert time.monotonic() < deadline, log.read_text()
        started.update(launcher.children(recursive=True))
        time.sleep(0.1)
    assert (launcher.poll() == 0) == (dies is None), log.read_text()
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive  # the launcher ends the others, too
    return log.read_text()


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
    """The folder of a run in one process, this one: straight(**keys to change)."""
    folders = {}

    def run(**changes):
        kind = str(changes)
        if kind not in folders:
            alone = recipe(4, **changes)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(prompt_sets, "HELD_OUT_PART", 4)
                patch.setattr(prompt_sets, "HELD_OUT_FEWEST", 1)
                patch.setattr(held_out, "SHARE", 10.0)
                assert train.run(alone) == 0
            folders[kind] = alone.folder
        return folders[kind]

    return run


@pytest.mark.real
@pytest.mark.parametrize(
    ("config", "how", "changes", "flags", "dies"),
    [
        pytest.param(DDP, "MULTI_CPU", PRUNED, (), 0, id="ddp"),
        pytest.param(FSDP2, "FSDP", LORA, (), 1, id="fsdp2, lora"),
        pytest.param(
            *(FSDP2, "FSDP", PRUNED, ("--fsdp_activation_checkpointing", "true"), None), id="fsdp2"
        ),
        pytest.param(FSDP2, "FSDP", EAGLE3, (), None, id="fsdp2, eagle3"),
    ],
)
def test_two_processes_make_the_draft_of_one_though_either_is_killed(
    recipe, straight, config, how, changes, flags, dies
):
    two = recipe(2, **changes)
    if dies is not None:
        launched(config, two, flags, dies)
        assert (two.folder / f"checkpoint-{DEATH}" / "trainer_state.json").exists()
        assert last_checkpoint(two.folder).name == f"checkpoint-{DEATH - 4}"
        with pytest.raises(RecipeError, match=rf"left by 2 processes \({how}\), and 1 process"):
            train.run(two)
    shown = launched(config, two, flags)
    assert "processes: 2, gloo, cpu" in shown
    assert f"training over 2 processes ({how})" in shown
    alone = straight(**changes)
    assert_same_draft(two.folder, alone)
    theirs, ours = (read_followed(folder / HELD_OUT).seen for folder in (alone, two.folder))
    assert theirs
    assert [a.step for a in theirs] == [b.step for b in ours]
    for a, b in zip(theirs, ours, strict=True):
        assert b.alpha == pytest.approx(a.alpha, abs=0.02)
