"""The machine in a report."""

import subprocess
from functools import partial

import pytest

from eval.measuring import environment

ZEN = """processor\t: 0
cpu family\t: 25
model\t\t: {model}
model name\t: AMD EPYC
flags\t\t: fpu {flags}

processor\t: 1
cpu family\t: 99
"""


@pytest.mark.parametrize(
    ("info", "name"),
    [
        (ZEN.format(model=1, flags="avx avx2"), "AMD EPYC (family 25, model 1, avx2)"),
        (
            ZEN.format(model=17, flags="avx512f avx2 avx512_bf16"),
            "AMD EPYC (family 25, model 17, avx2, avx512_bf16, avx512f)",
        ),
        ("processor\t: 0\nCPU part\t: 0xd40\n", None),  # on ARM
    ],
)
def test_generations_of_a_cpu_have_different_names(tmp_path, monkeypatch, info, name):
    """A virtual machine may call Zen 3 and Zen 4 by one name."""
    monkeypatch.setattr(environment, "CPU_INFO", tmp_path / "cpuinfo")
    (tmp_path / "cpuinfo").write_text(info)
    monkeypatch.setattr(environment.platform, "processor", lambda: "arm")
    assert environment.cpu_model() == (name or "arm")


def test_the_commit_is_that_of_our_own_repository(tmp_path, monkeypatch):
    """A wheel may be installed within the repository of its user; and git may be missing."""
    run = partial(subprocess.run, check=True, capture_output=True)
    run(["git", "init", tmp_path])
    own = "user.name=a user.email=a commit.gpgsign=false".split()
    settings = [word for setting in own for word in ("-c", setting)]
    run(["git", "-C", tmp_path, *settings, "commit", "--allow-empty", "-m", "first"])
    assert len(environment.git_commit(tmp_path)) == 40
    (tmp_path / "within").mkdir()
    assert environment.git_commit(tmp_path / "within") is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment.git_commit(tmp_path) is None
