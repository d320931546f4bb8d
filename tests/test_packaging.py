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
ROOMS = (*PACKAGES, "recipes")  # data, and the builders of prompts beside it
MODULES = sorted(
    path for package in ROOMS for path in (ROOT / package).rglob("*.py") if path.name[0] != "_"
)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def path_line(script):
    """What an entry script starts with, so that it can be run by path."""
    depth = len(script.relative_to(ROOT).parts) - 1
    return (
        f"if not __package__:\n    sys.path[0] = str(Path(__file__).resolve().parents[{depth}])\n"
    )


def entry_scripts():
    return [path for path in MODULES if '\nif __name__ == "__main__":\n' in path.read_text("utf-8")]


def text_files():
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: there is no list of the repository's files")
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path.is_file() and path.suffix not in (".gz", ".png", ".safetensors", ".gguf"):
            yield path


def dependency_modules():
    """Import names of what draftsmith needs, directly or not."""
    wanted, found = [*PROJECT["project"]["dependencies"]], set()
    while wanted:
        name = re.match(r"[\w.-]+", wanted.pop())[0].lower().replace("_", "-")
        if name in found:
            continue
        try:
            requires = metadata.requires(name) or []
        except metadata.PackageNotFoundError:  # needed on another platform only
            continue
        found.add(name)
        wanted += [line for line in requires if "extra ==" not in line]
    return {
        module.lower()
        for module, distributions in metadata.packages_distributions().items()
        if found & {name.lower().replace("_", "-") for name in distributions}
    }


def test_no_module_is_named_like_a_dependency_or_the_standard_library():
    """A script run by path has its own folder first on sys.path, where it would shadow them."""
    taken = set(sys.stdlib_module_names) | dependency_modules()
    # One level down is enough: only that folder gets onto sys.path.
    clashes = [
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).iterdir()
        if (path.suffix == ".py" or path.is_dir()) and path.stem.lower() in taken
    ]
    assert not clashes


def test_entry_scripts_can_be_run_by_path():
    scripts = entry_scripts()
    assert {path.relative_to(ROOT).as_posix() for path in scripts} >= {"distill/publish.py"}
    lacking = [path.name for path in scripts if path_line(path) not in path.read_text("utf-8")]
    assert not lacking
    for path in scripts:  # the line must stand before anything of ours is imported
        text = path.read_text("utf-8")
        ours = re.search(r"^from (align|distill|eval)\b", text, flags=re.MULTILINE)
        assert ours is None or text.index(path_line(path)) < ours.start(), path.name


def test_an_entry_script_starts_from_any_folder(tmp_path):
    command = [sys.executable, str(ROOT / "distill" / "publish.py"), "--help"]
    shown = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert "--push_to_hub" in shown.stdout


def test_the_flow_of_imports_has_one_direction():
    allowed = {
        "align": {"align"},
        "eval": {"align", "eval"},
        "distill": set(ROOMS),
        "recipes": set(ROOMS),
    }
    pattern = re.compile(r"^\s*(?:from|import) (align|distill|eval|recipes)\b", re.MULTILINE)
    for path in MODULES:
        package = path.relative_to(ROOT).parts[0]
        wrong = set(pattern.findall(path.read_text("utf-8"))) - allowed[package]
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}"


def test_no_file_names_a_folder_of_one_machine():
    # Written in parts, so that this file does not match itself.
    folders = "|".join(["work", "root", "opt", "mnt", "tmp/[a-z]+", "home/(?!me/)[a-z]+"])
    pattern = re.compile(rf"(?<![\w./<])/(?:{folders})/[\w.]")
    found = [
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in text_files()
        for match in pattern.finditer(path.read_text("utf-8"))
    ]
    assert not found


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
