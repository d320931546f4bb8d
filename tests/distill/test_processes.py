"""Runs of two processes started by `accelerate launch`: the draft of one process, come what may."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from safetensors.torch import load_file

from distill import held_out, prompts, train
from distill.held_out import HELD_OUT, read_followed
from distill.recipe import dump
from distill.trainer import last_checkpoint

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "accelerate"
DDP, FSDP2 = "cpu_2.yaml", "fsdp2.yaml"
STEPS, DEATH = 16, 8  # of 4 rows, 3 an epoch
PRUNED = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 270}
# few prompts, and some of them are followed all the same
FOLLOWED = [
    (prompts, "HELD_OUT_PART", 4),
    (prompts, "HELD_OUT_FEWEST", 1),
    (held_out, "SHARE", 10.0),
]
# the job; the process of rank DIES dies, as by kill -9, before all have written a checkpoint
SCRIPT = f"""
import os, signal, sys
from trl import SFTTrainer
from distill import held_out, prompts
from distill.train import main

prompts.HELD_OUT_PART, prompts.HELD_OUT_FEWEST, held_out.SHARE = 4, 1, 10.0
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
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(config.deepspeed_config)
        _, environment = prepare_deepspeed_cmd_env(args)
        assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == "3"
        assert environment["ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL"] == "true"
        assert environment["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "false"
    elif path.stem != "cpu":
        environment = prepare_multi_gpu_env(args)
        assert args.nproc_per_node == str(config.num_processes)
        assert environment.get("FSDP_VERSION") == ("2" if args.use_fsdp else None)
        assert environment.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false") == "false"


def launched(config, recipe, flags=(), dies=None):
    """What a run of two processes prints, one of which dies where its rank is given."""
    file, script = (recipe.folder.with_suffix(suffix) for suffix in (".yaml", ".py"))
    file.write_text(dump(recipe))
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--config_file", CONFIGS / config, "--num_processes", "2", *flags]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    log = recipe.folder.with_suffix(".log")
    with log.open("w") as out:
        launcher = psutil.Popen(
            [*map(str, command), str(script), "--recipe", str(file)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path, "DIES": str(dies)},
        )
    started = []
    while launcher.poll() is None:
        started = launcher.children(recursive=True) or started
        psutil.wait_procs([launcher], timeout=0.5)
    assert (launcher.wait() == 0) == (dies is None), log.read_text()
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
        return job(folder, per_device_train_batch_size=rows, **PRUNED, **steps, **changes)

    return make


@pytest.fixture(scope="module")
def straight(recipe):
    """The folder of a kind's run in one process, this one: straight(kind)."""
    folders = {}

    def run(kind):
        if kind not in folders:
            alone = recipe(4, drafter=kind)
            with pytest.MonkeyPatch.context() as patch:
                for module, name, value in FOLLOWED:
                    patch.setattr(module, name, value)
                assert train.run(alone) == 0
            folders[kind] = alone.folder
        return folders[kind]

    return run


@pytest.mark.real
@pytest.mark.parametrize(
    ("config", "how", "kind", "flags", "dies"),
    [
        pytest.param(DDP, "MULTI_CPU", "pruned", (), 0, id="ddp"),
        pytest.param(
            *(FSDP2, "FSDP", "pruned", ("--fsdp_activation_checkpointing", "true"), 1), id="fsdp2"
        ),
        pytest.param(FSDP2, "FSDP", "eagle3", (), None, id="fsdp2, eagle3"),
    ],
)
def test_two_processes_make_the_draft_of_one_though_either_is_killed(
    recipe, straight, config, how, kind, flags, dies
):
    two = recipe(2, drafter=kind)
    if dies is not None:
        launched(config, two, flags, dies)
        assert (two.folder / f"checkpoint-{DEATH}" / "trainer_state.json").exists()
        assert last_checkpoint(two.folder).name == f"checkpoint-{DEATH - 4}"
    shown = launched(config, two, flags)
    assert "processes: 2, gloo, cpu" in shown
    assert f"training over 2 processes: {how}" in shown
    assert_same_draft(two.folder, straight(kind))
    theirs, ours = (
        read_followed(folder / HELD_OUT).seen for folder in (straight(kind), two.folder)
    )
    assert theirs
    assert [a.step for a in theirs] == [b.step for b in ours]
    for a, b in zip(theirs, ours, strict=True):
        assert b.alpha == pytest.approx(a.alpha, abs=0.02)
