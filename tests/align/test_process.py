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
from tests.align.meeting import let_tensors_die, wait_for_the_first
from tests.ranks import run_ranks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told anything")
@pytest.mark.parametrize(("megabytes", "kept"), [(64, True), (400, False)])
def test_freed_tensors(tmp_path, megabytes, kept):
    ((status, printed),) = run_ranks(tmp_path, 1, let_tensors_die, megabytes, not kept)
    assert status == 0, printed
    faults, grown = map(int, printed.split())
    one = (megabytes << 20) // 4096  # pages
    if kept:
        assert faults < 16 * one  # of forty: glibc may take a few places before it comes back
    else:
        assert grown < one  # nothing of them is left


@pytest.mark.parametrize(("timeout", "long_enough"), [(60.0, True), (0.5, False)])
def test_a_process_waits_as_long_as_it_is_told_to(tmp_path, timeout, long_enough):
    (first, shown), (second, waited) = run_ranks(tmp_path, 2, wait_for_the_first, timeout)
    assert ((first, second) == (0, 0)) == long_enough, shown + waited
    if long_enough:
        assert shown.splitlines() == ["processes: 2, gloo, cpu", "here: 2", "together"]
        assert waited == ""  # what is printed is said once
    else:
        assert "imed out" in waited  # gloo's own words, with a capital or without


def test_a_launcher_that_starts_fewer_processes_than_asked_for_is_found_out(tmp_path):
    script = tmp_path / "joins.py"
    script.write_text("from align.process import join_processes\njoin_processes(True, 60)\n")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    done = subprocess.run(
        [*command, "--main_process_port", "0", str(script)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode != 0
    assert "Several processes were asked for, but the launcher started one" in done.stderr


def test_models_would_be_loaded_empty(monkeypatch):
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    with pytest.raises(ProcessError, match="fsdp_cpu_ram_efficient_loading is true"):
        join_processes(True, 60)
