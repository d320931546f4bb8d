"""The doctor on machines that lack something: what it says, and its exit status."""

import subprocess
from types import SimpleNamespace

import pytest
import torch

from align.sources import CONVERTED
from distill import doctor
from distill.doctor import available_memory, checks, main, where_to_start

FILES = {
    "/proc/cpuinfo": "model name\t: Some CPU\nflags\t\t: fpu avx2 avx512_bf16\n",
    "/proc/meminfo": "MemTotal: 20000000 kB\nMemAvailable:   16000000 kB\n",
}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A healthy one: the files that it is read from, to be changed at will."""
    files = dict(FILES)
    monkeypatch.setattr(doctor, "_read", lambda path: files.get(path, ""))
    monkeypatch.setattr(doctor, "_index_answers", lambda: True)
    monkeypatch.setattr(doctor, "NETWORK_SECONDS", 0.2)
    monkeypatch.setattr(doctor.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**11))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: ["torch", "scipy; extra == 'test'"])
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path))
    monkeypatch.delenv("DRAFTSMITH_VLLM_PYTHON", raising=False)
    return files


def state(name):
    return next(check for check in checks() if check.name == name)


def test_a_machine_that_lacks_nothing(machine, capsys):
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert "Some CPU, products in bf16 (avx512_bf16)" in shown
    assert "Start with: accelerate launch distill/train.py --recipe code\n" in shown
    assert "It takes 20 minutes" in shown
    assert "Nothing that is needed is missing" in shown
    assert state("hub").state == "note"  # the embedded recipes need none
    assert "`python -m eval.engines.environments vllm llama.cpp" in state("engines").remedy


def test_too_little_memory_is_said_with_a_remedy(machine, capsys):
    machine["/sys/fs/cgroup/memory.max"] = "6000000000\n"
    machine["/sys/fs/cgroup/memory.current"] = "1000000000\n"
    assert available_memory() == 5 * 10**9
    assert main([]) == 1
    shown = capsys.readouterr().out
    assert "MISSING  memory:            5.0 GB free\n" in shown
    assert "-> the embedded recipes take 5 to 7 GB" in shown
    assert "First put right: memory." in shown


def test_packages_that_are_off_or_not_there(machine, monkeypatch):
    wanted = ["torch==1.0", "nosuchpackage~=1.0", "numpy"]
    monkeypatch.setattr(doctor.metadata, "requires", lambda _: wanted)
    found = state("packages")
    assert found.state == "missing"
    assert f"torch is {torch.__version__}, not ==1.0" in found.found
    assert "nosuchpackage~=1.0 is not there" in found.found
    assert "numpy" not in found.found


def test_no_network_matters_until_the_target_is_here(machine, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "_index_answers", lambda: False)
    assert state("embedded target").state == "missing"
    (tmp_path / "checkpoints" / f"abc-{CONVERTED}").mkdir(parents=True)
    assert state("embedded target").state == "ok"


@pytest.mark.parametrize("outcome", [1, subprocess.TimeoutExpired("pip", 20)])
def test_an_index_that_does_not_answer(monkeypatch, outcome):
    def run(*_, **__):
        if isinstance(outcome, Exception):
            raise outcome
        return SimpleNamespace(returncode=outcome)

    monkeypatch.setattr(doctor.subprocess, "run", run)
    assert not doctor._index_answers()


def test_an_old_cpu_a_busy_machine_and_a_driver_without_its_torch(machine, monkeypatch):
    machine["/proc/cpuinfo"] = "model name\t: Old CPU\nflags\t\t: fpu avx2\n"
    monkeypatch.setattr(doctor.os, "getloadavg", lambda: (99.0, 0, 0))
    monkeypatch.setattr(doctor.shutil, "which", lambda _: "/usr/bin/nvidia-smi")
    assert {state(name).state for name in ("cpu", "load", "gpu")} == {"note"}
    assert main([]) == 0


def test_a_gpu_gets_the_recipes_that_fit_on_it(machine, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (40 * 10**9, 40 * 10**9))
    name, why = where_to_start()
    assert name == "code"
    assert "code/qwen2.5-coder-0.5b-to-7b" in why
    assert "70b" not in why
    assert "32b" not in why  # its target is on a server


def test_a_recipe_that_there_is_not(machine, capsys):
    assert main(["--recipe", "cod"]) == 2
    assert "Did you mean 'code'" in capsys.readouterr().err


def test_time_takes_the_dry_run(machine, monkeypatch):
    asked = []
    monkeypatch.setattr(doctor, "price_run", lambda recipe: asked.append(recipe) or 0)
    assert main(["--recipe", "legal", "--time"]) == 0
    assert asked[0].name == "legal"
    assert asked[0].dry_run
