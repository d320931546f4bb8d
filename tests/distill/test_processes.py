"""Runs of two processes: the draft of one process, come what may."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from accelerate.commands.config import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_multi_gpu_env
from safetensors.torch import load_file

from align.checkpoint import Checkpoint
from distill import train
from distill.checkpoint import START, last_checkpoint
from distill.held_out import read_measurements
from distill.recipe import dump
from distill.recipe_files import RecipeError
from distill.teacher.store import Answers, Store, names_of
from eval.decoding.target import load_target
from tests.distill import training
from tests.distill.teacher.test_answers import same_answers
from tests.distill.teacher.test_server_target import StandIn
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "recipes" / "accelerate"
DDP, FSDP2 = "cpu_2.yaml", "fsdp2.yaml"
LORA = {"use_peft": True, "lora_r": 4, "lora_alpha": 8}
PRUNED = {"draft": None, "num_draft_layers": 1, "draft_vocab_size": 270}
EAGLE3 = PRUNED | {"drafter": "eagle3"}


def asked(config, *flags):
    """What `accelerate launch` makes of a config and flags."""
    words = ["--config_file", str(CONFIGS / config), "--main_process_port", "0", *flags]
    return _validate_launch_command(launch_command_parser().parse_args([*words, "train.py"]))[0]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_accelerate_reads_every_config(path):
    config, args = load_config_from_file(str(path)), asked(path.name)
    if path.stem != "cpu":
        environment = prepare_multi_gpu_env(args)
        assert args.nproc_per_node == str(config.num_processes)
        assert environment.get("FSDP_VERSION") == ("2" if args.use_fsdp else None)
        assert environment.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "false") == "false"


def launched(file, dies):
    """Exit status and output of `accelerate launch` on two processes; it leaves none behind."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += ["--config_file", str(CONFIGS / DDP), training.__file__, str(dies), str(file)]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, timeout=600
    )
    commands = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    assert not any(str(file) in words for words in commands)
    return done.returncode, done.stdout + done.stderr


def forked(file, dies, flags, refuses=False):
    """The same of two processes with what the launcher would tell them of FSDP."""
    environment = prepare_multi_gpu_env(asked(FSDP2, "--num_processes", "2", *flags))
    told = {k: v for k, v in environment.items() if k.startswith(("FSDP_", "ACCELERATE_"))}
    told["DRAFTSMITH_CACHE"] = os.environ["DRAFTSMITH_CACHE"]  # ranks have that of the first test
    ranks = run_ranks(file.parent, 2, training.train, file, dies, told, refuses)
    return max(abs(status) for status, _ in ranks), "".join(printed for _, printed in ranks)


def assert_same_draft(folder, straight, resumed=0):
    """Within 1e-5: sums over rows and shards in another order, which Adam's division magnifies.

    resumed: from which step; the mean that is logged next leaves the steps before it out.
    """
    expected = load_file(straight / "draft" / "model.safetensors")
    got = load_file(folder / "draft" / "model.safetensors")
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
        if "loss" in log and not log["step"] - 4 < resumed < log["step"]:
            assert log["loss"] == pytest.approx(expected["loss"], rel=1e-5), log["step"]
    assert json.loads((folder / "report" / "report.json").read_text())["drafts"]["tuned"]


@pytest.fixture(scope="module")
def recipe(job, tmp_path_factory):
    """Makes the recipe of a run in a new folder: recipe(**keys to change)."""

    def make(**changes):
        steps = {"max_steps": 16, "save_steps": 4, "logging_steps": 4}
        folder = tmp_path_factory.mktemp("processes") / "run"
        return job(folder, **steps | changes)

    return make


@pytest.fixture(scope="module")
def straight(recipe):
    """The folder of a run in one process, this one: straight(**keys to change)."""
    folders = {}

    def run(**changes):
        kind = str(changes)
        if kind not in folders:
            alone = recipe(**changes)
            with pytest.MonkeyPatch.context() as patch:
                for module, name, value in training.FOLLOWED:
                    patch.setattr(module, name, value)
                assert train.run(alone) == 0
            folders[kind] = alone.folder
        return folders[kind]

    return run


@pytest.mark.real
@pytest.mark.parametrize(
    ("how", "changes", "flags", "dies"),
    [
        pytest.param("MULTI_CPU", PRUNED, (), 0, id="ddp"),
        pytest.param("FSDP", LORA, (), 1, id="fsdp2, lora"),
        pytest.param(
            *("FSDP", PRUNED, ("--fsdp_activation_checkpointing", "true"), None), id="fsdp2"
        ),
        pytest.param("FSDP", EAGLE3, (), None, id="fsdp2, eagle3"),
    ],
)
def test_two_processes_make_the_draft_of_one_though_either_is_killed(
    recipe, straight, how, changes, flags, dies
):
    two = recipe(**changes)
    file = two.folder.with_suffix(".yaml")
    file.write_text(dump(two))

    def run(dies):
        return launched(file, dies) if how == "MULTI_CPU" else forked(file, dies, flags)

    resumed = 0
    if dies is not None:
        status, shown = run(dies)
        assert status != 0, shown
        whole = last_checkpoint(two.folder)
        assert whole is not None, shown
        newest = max(two.folder.glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
        assert newest != whole  # cut short, and never gone on from
        resumed = int(whole.name.rpartition("-")[2])
        with pytest.raises(RecipeError, match="tokens_per_step"):
            train.run(replace(two, tokens_per_step=40))
    if dies is not None:  # one process goes on where two were
        with pytest.MonkeyPatch.context() as patch:
            for module, name, value in training.FOLLOWED:
                patch.setattr(module, name, value)
            assert train.run(two) == 0
    else:
        status, shown = run(None)
        assert status == 0, shown
    assert "processes: 2, gloo, cpu" in shown
    assert f"training in 2 processes ({how})" in shown
    expected = straight(**changes)
    assert_same_draft(two.folder, expected, resumed)
    theirs, ours = (read_measurements(folder) for folder in (expected, two.folder))
    assert theirs
    assert [a.step for a in theirs] == [b.step for b in ours]
    for a, b in zip(theirs, ours, strict=True):
        assert b.acceptance_rate == pytest.approx(a.acceptance_rate, abs=0.02)


@pytest.mark.real
def test_two_processes_take_the_part_of_a_refused_change_that_one_takes(recipe):
    alone, two = (recipe(max_steps=8, temperature=1.0) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in training.REFUSED:
            patch.setattr(module, name, value)
        assert train.run(alone) == 0
    file = two.folder.with_suffix(".yaml")
    file.write_text(dump(two))
    status, shown = forked(file, None, (), refuses=True)
    assert status == 0, shown
    assert_same_draft(two.folder, alone.folder)
    theirs, ours = (read_measurements(folder)[-1] for folder in (alone.folder, two.folder))
    assert theirs.change == ours.change == 1 / 2
    assert ours.emitted == pytest.approx(theirs.emitted, rel=1e-4)
    assert not (two.folder / START).exists()


@pytest.mark.real
def test_unlike_machines_compute_in_the_dtype_of_the_first(folder, tmp_path):
    keys = {"target": str(folder / "target"), "train_prompts": "unused", "eval_prompts": "unused"}
    keys |= {"output_dir": str(tmp_path / "run"), "use_cpu": True}
    (tmp_path / "recipe.yaml").write_text(json.dumps(keys))
    ranks = run_ranks(tmp_path, 2, training.meet, tmp_path / "recipe.yaml")
    for status, shown in ranks:
        assert status == 0, shown
        assert "bfloat16 True" in shown.splitlines()


@pytest.mark.real
@pytest.mark.parametrize(
    ("answers", "deaths"), [("local", {"answers": 1, "training": 1}), ("server", {"answers": 0})]
)
def test_machines_share_the_folder_of_the_run_alone(
    recipe, straight, folder, tmp_path, answers, deaths
):
    keys, servers = EAGLE3, []
    if answers == "server":
        model = load_target(Checkpoint.open(folder / "target"), torch.float32, "cpu", 128)
        servers = [StandIn(model)]
        keys = {"draft": str(folder / "moved"), "answers": answers, "cache_top_k": 6}
        keys |= {"answer_url": servers[0].url, "max_steps": 4}
    two = recipe(**keys)
    file, printed = tmp_path / "recipe.yaml", []
    file.write_text(dump(two))
    for stage, dies in {**deaths, "": None}.items():
        death = stage, dies, tmp_path / "machines"
        ranks = run_ranks(tmp_path, 2, training.train_apart, file, *death)
        printed.append("".join(shown for _, shown in ranks))
        assert [status == 0 for status, _ in ranks] == [dies is None] * 2, printed[-1]
    for server in servers:
        server.stop()
    made = [re.findall(r"(\d+) of (?:2|9) generated", shown) for shown in printed]
    assert 0 < int(made[1][-1]) < 9  # no output is made twice
    assert "--num_processes 2 " in (two.folder / "repeat.yaml").read_text()
    assert json.loads((two.folder / "answers.json").read_text())["by"] == {answers: 9}
    if answers == "local":
        report = json.loads((two.folder / "report" / "report.json").read_text())
        assert report["drafts"]["tuned"]["lossless"]["unexplained"] == 0
        assert made[2] == ["0", "0"]
        assert "resuming from" in printed[2]
        both = [answers_of(run) for run in (straight(**keys), two.folder)]
        same_answers(*both, 2e-3)  # prompts are read together with others: other sums, then fp16


def answers_of(run):
    """The outputs that a run was trained on."""
    prompts = json.loads((run / "prompts" / "ids.json").read_text())["train"]
    store = json.loads((run / "answers.json").read_text())["store"]
    return Answers(Store(Path(store)), names_of(prompts))
