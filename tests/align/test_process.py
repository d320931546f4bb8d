"""Memory that dies: tensors of an answering step stay with the process, whole heads go back.

And processes that meet: as many as were asked for, and as patient.
"""

import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from align import process
from align.process import ProcessError, join_processes, machine_lines

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


FILES = {
    "/proc/cpuinfo": "model name\t: Some CPU\nflags\t\t: fpu avx2 avx512_bf16\n",
    "/proc/meminfo": "MemTotal: 20971520 kB\nMemAvailable:   16777216 kB\n",
}


@pytest.fixture
def machine(monkeypatch):
    """Of 16 GiB free, and as much on disk: the files that it is read from, to be changed."""
    files = dict(FILES)
    monkeypatch.setattr(process, "_read", lambda path: files.get(path, ""))
    monkeypatch.setattr(process.shutil, "disk_usage", lambda _: SimpleNamespace(free=2**34))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return files


def test_what_a_run_needs_is_held_against_the_machine(machine, tmp_path):
    about, memory, disk = machine_lines(2**32, 2**35, tmp_path / "not" / "made", on_gpu=True)
    assert f"torch {torch.__version__}, " in about
    assert about.endswith("cores of Some CPU (avx512_bf16)")
    assert memory == "memory: 4.0 GiB needed, 16.0 free"
    assert disk.startswith(f"disk of {tmp_path}: 32.0 GiB needed, 16.0 free: TOO LITTLE")


def test_an_old_cpu_in_a_small_container(machine, tmp_path):
    machine["/proc/cpuinfo"] = ""
    machine["/sys/fs/cgroup/memory.max"] = f"{3 * 2**30}\n"
    machine["/sys/fs/cgroup/memory.current"] = f"{2**30}\n"
    about, memory, _ = machine_lines(2**32, 0, tmp_path, on_gpu=False)
    assert "no products in bf16" in about
    assert memory.startswith("memory: 4.0 GiB needed, 2.0 free: TOO LITTLE")
