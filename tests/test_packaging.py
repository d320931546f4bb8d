"""What a checkout must be for `pip install -e .` and `accelerate launch distill/train.py`."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("align", "distill", "eval")
MODULES = sorted(
    path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.name[0] != "_"
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_no_module_is_named_like_a_dependency_or_the_standard_library():
    """A script run by path has its own folder first on sys.path, where it would shadow them."""
    installed = {name.lower() for name in metadata.packages_distributions()} - set(PACKAGES)
    taken = set(sys.stdlib_module_names) | installed
    # One level down is enough: only that folder gets onto sys.path.
    clashes = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).iterdir()
        if (path.suffix == ".py" or path.is_dir()) and path.stem.lower() in taken
    ]
    assert not clashes


def test_entry_scripts_can_be_run_by_path():
    scripts = [path for path in MODULES if "\nif __name__ ==" in path.read_text("utf-8")]
    assert ROOT / "distill" / "publish.py" in scripts
    for path in scripts:  # the line must stand before anything of ours is imported
        text, depth = path.read_text("utf-8"), len(path.relative_to(ROOT).parts) - 1
        line = f"    sys.path[0] = str(Path(__file__).resolve().parents[{depth}])\n"
        assert f"if not __package__:\n{line}" in text, path.name
        ours = re.search(r"^from (align|distill|eval)\b", text, flags=re.MULTILINE)
        assert ours is None or text.index(line) < ours.start(), path.name


def test_the_flow_of_imports_has_one_direction():
    allowed = {
        "align": {"align"},
        "eval": {"align", "eval"},
        "distill": set(PACKAGES),
    }
    pattern = re.compile(r"^\s*(?:from|import) (align|distill|eval)\b", re.MULTILINE)
    for path in MODULES:
        package = path.relative_to(ROOT).parts[0]
        wrong = set(pattern.findall(path.read_text("utf-8"))) - allowed[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_no_file_names_a_folder_of_one_machine():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: there is no list of the repository's files")
    # Written in parts, so that this file does not match itself.
    folders = "|".join(["work", "root", "opt", "mnt", "tmp/[a-z]+", "home/(?!me/)[a-z]+"])
    pattern = re.compile(rf"(?<![\w./<])/(?:{folders})/[\w.]")
    for path in map(ROOT.joinpath, listed.stdout.splitlines()):
        if path.is_file() and path.suffix not in (".gz", ".png", ".safetensors", ".gguf"):
            assert not pattern.search(path.read_text("utf-8")), path


def test_every_dependency_has_bounds_with_the_known_good_set_within():
    bounded = re.compile(r"^[\w.-]+(~=[\d.]+|>=[\d.]+,<=?[\d.]+)$")
    needed = PROJECT["project"]["dependencies"]
    extras = PROJECT["project"]["optional-dependencies"]["test"]
    assert all(bounded.match(line) for line in [*needed, *extras])
    allowed = {one.name: one.specifier for one in map(Requirement, needed)}
    pins = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line[0] != "#"]
    assert pins
    for name, version in (line.split("==") for line in pins):
        assert allowed[name].contains(version)
