"""Memory that dies: tensors of an answering step stay with the process, whole heads go back.

And processes that meet: as many as were asked for, and as patient.
"""

import platform
from types import SimpleNamespace

import pytest
import torch
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_simple_launcher_cmd_env

from align import machine as this_machine
from align.errors import UserError
from align.machine import join_processes, machine_lines
from tests.align.meeting import let_tensors_die, wait_for_the_first
from tests.ranks import run_ranks


@pytest.mark.real
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told anything")
@pytest.mark.parametrize(("megabytes", "kept"), [(64, True), (300, False)])
def test_freed_tensors(tmp_path, megabytes, kept):
    ((status, printed),) = run_ranks(tmp_path, 1, let_tensors_die, megabytes, not kept)
    assert status == 0, printed
    faults, grown = map(int, printed.split())
    one = (megabytes << 20) // 4096  # pages
    if kept:
        assert faults < 8 * one  # of sixteen: glibc may take a few places before it comes back
    else:
        assert grown < one  # nothing of them is left


def test_attention_on_a_gpu_needs_no_plan_for_each_shape(monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(this_machine, "_GLIBC", False)
    torch.backends.cuda.enable_cudnn_sdp(True)
    this_machine.use_machine()
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.mark.parametrize(("limit", "threads"), [(None, 8), ("3", 3), ("16", 8)])
def test_it_computes_in_as_many_threads_as_openmp_grants(monkeypatch, limit, threads):
    counts = []
    monkeypatch.setattr(torch, "set_num_threads", counts.append)
    monkeypatch.setattr(this_machine, "_GLIBC", False)
    monkeypatch.setattr(this_machine, "cores", lambda: 8)
    monkeypatch.delenv("OMP_THREAD_LIMIT", raising=False)
    if limit:
        monkeypatch.setenv("OMP_THREAD_LIMIT", limit)
    this_machine.use_machine()
    assert counts == [threads]


def test_a_number_of_threads_that_openmp_may_lower_is_refused(monkeypatch):
    monkeypatch.setenv("OMP_DYNAMIC", "TRUE")
    with pytest.raises(UserError):
        this_machine.use_machine()


@pytest.mark.real
@pytest.mark.parametrize(("timeout", "long_enough"), [(600.0, True), (3.0, False)])
def test_a_process_waits_as_long_as_it_is_told_to(tmp_path, timeout, long_enough):
    ranks = run_ranks(tmp_path, 2, wait_for_the_first, timeout, tmp_path)
    (first, shown), (second, waited) = ranks
    assert ((first, second) == (0, 0)) == long_enough, shown + waited
    if long_enough:
        met = "from 0 (True, False)"
        assert shown.splitlines() == ["processes: 2, gloo, cpu", "here: 2", met]
        assert waited.splitlines() == [met]  # what is printed is said once
    else:
        assert "imed out" in waited  # gloo's own words, with a capital or without


def test_a_launcher_that_starts_fewer_processes_than_asked_for_is_found_out(monkeypatch):
    words = ["--cpu", "--num_processes", "2", "--main_process_port", "0", "train.py"]
    arguments, *_ = _validate_launch_command(launch_command_parser().parse_args(words))
    _, environment = prepare_simple_launcher_cmd_env(arguments)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="the launcher started one"):
        join_processes(True, 60)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("FSDP_CPU_RAM_EFFICIENT_LOADING", "fsdp_cpu_ram_efficient_loading is true"),
        ("ACCELERATE_USE_DEEPSPEED", "configured for DEEPSPEED"),
        ("ACCELERATE_USE_MEGATRON_LM", "configured for MEGATRON_LM"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "configured for PARALLELISM_CONFIG"),
        ("ACCELERATE_USE_FSDP", "configured for FSDP of version 1"),
    ],
)
def test_launches_that_cannot_train_are_refused(monkeypatch, flag, message):
    monkeypatch.setenv(flag, "true")
    with pytest.raises(UserError, match=message):
        join_processes(True, 60)


@pytest.fixture
def machine(monkeypatch):
    """A machine with 16 GiB free: the files that tell so, to be changed."""
    files = {}
    monkeypatch.setattr(this_machine, "_read", lambda path: files.get(path, ""))
    memory = SimpleNamespace(available=2**34)
    monkeypatch.setattr(this_machine.psutil, "virtual_memory", lambda: memory)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return files


def test_what_a_run_needs_is_held_against_the_machine(machine):
    about, memory = machine_lines(2**32, on_gpu=True)
    assert f"torch {torch.__version__}, " in about
    assert memory == "memory: 4.0 GiB needed, 16.0 free"
    # a container has less
    machine["/sys/fs/cgroup/memory.max"] = f"{3 * 2**30}\n"
    machine["/sys/fs/cgroup/memory.current"] = f"{2**30}\n"
    _, memory = machine_lines(2**32, on_gpu=False)
    assert memory.startswith("memory: 4.0 GiB needed, 2.0 free: TOO LITTLE")
