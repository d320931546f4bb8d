"""Memory that dies: tensors of an answering step stay with the process, whole heads go back.

And processes that meet: as many as were asked for, and as patient.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from align.process import ProcessError, join_processes

ROOT = Path(__file__).resolve().parents[2]

# what tensors cost that die one after the other, in page faults and in pages still held;
# growing: each is a little larger than the one before, and something small outlives it
STEPS = """
import resource, sys
import torch
from align.process import use_machine

def faults_and_pages():
    resident = int(open("/proc/self/statm").read().split()[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt, resident

use_machine()
megabytes, growing = map(int, sys.argv[1:])
torch.ones(megabytes << 18)
before = faults_and_pages()
alive = []
for more in range(8 if growing else 40):
    torch.ones((megabytes << 18) + growing * more * (megabytes << 14))
    if growing:
        alive.append(torch.ones(1 << 16))
after = faults_and_pages()
print(*(b - a for a, b in zip(before, after)))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told anything")
@pytest.mark.parametrize(("megabytes", "kept"), [(64, True), (400, False)])
def test_freed_tensors(megabytes, kept):
    command = [sys.executable, "-c", STEPS, str(megabytes), str(int(not kept))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    faults, grown = map(int, done.stdout.split())
    one = (megabytes << 20) // 4096  # pages
    if kept:
        assert faults < 16 * one  # of forty: glibc may take a few places before it comes back
    else:
        assert grown < one  # nothing of them is left


# one process works for two seconds while the other waits for it, as for the trainer's arguments
WAITS = """
import sys, time
from accelerate import PartialState
from align.process import join_processes
print("here:", join_processes(True, float(sys.argv[1])), flush=True)
from transformers import TrainingArguments
TrainingArguments(use_cpu=True)
with PartialState().main_process_first():
    if PartialState().is_main_process:
        time.sleep(2)
print("together", flush=True)
"""


def launched(tmp_path, *options, timeout=60.0):
    script = tmp_path / "waits.py"
    script.write_text(WAITS)
    command = [sys.executable, "-m", "accelerate.commands.launch", *options]
    return subprocess.run(
        [*command, "--main_process_port", "0", str(script), str(timeout)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


@pytest.mark.parametrize(("timeout", "long_enough"), [(60.0, True), (0.5, False)])
def test_a_process_waits_as_long_as_it_is_told_to(tmp_path, timeout, long_enough):
    config = ROOT / "recipes" / "accelerate" / "cpu_2.yaml"
    done = launched(tmp_path, "--config_file", str(config), timeout=timeout)
    assert (done.returncode == 0) == long_enough, done.stderr
    if long_enough:
        shown = done.stdout.splitlines()  # of the first process
        assert shown == ["processes: 2, gloo, cpu", "here: 2", "together"]
    else:
        assert "imed out" in done.stderr  # gloo's own words, with a capital or without


def test_a_launcher_that_starts_fewer_processes_than_asked_for_is_found_out(tmp_path):
    done = launched(tmp_path, "--cpu", "--num_processes", "2")
    assert done.returncode != 0
    assert "Several processes were asked for, but the launcher started one" in done.stderr


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "fsdp_cpu_ram_efficient_loading is true"),
        ("ACCELERATE_USE_DEEPSPEED", "DeepSpeed was launched, .*fsdp2.yaml"),
    ],
)
def test_launches_that_cannot_train_are_refused(monkeypatch, flag, message):
    monkeypatch.setenv(flag, "true")
    with pytest.raises(ProcessError, match=message):
        join_processes(True, 60)
