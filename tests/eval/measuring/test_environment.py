"""The machine in a report."""

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
