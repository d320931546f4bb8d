"""What a GPU machine without a network lacks, in parts: Python packages and embedded model files.

    python tests/gpu/files.py pack      where there is one: .gpu-files/part-00-of-04, …
    python tests/gpu/files.py unpack    on the other side: site-packages and cache in .gpu-files

Each part is at most PART bytes, so that they can be carried one by one. The packages are those that
pyproject.toml and pytest need beyond THERE, as wheels for PYTHON on Linux x86_64, in the versions
installed here. They go into a folder of their own, which `make gpu` puts first on the path: so
nothing of the other machine's Python need be writable, or is changed. It is called site-packages
since dill, with which datasets makes its fingerprints, takes modules from elsewhere for a user's
and pickles them whole. The model files are the entries of the cache (align/sources.py) as they were
fetched; they are converted on the other side, where DRAFTSMITH_CACHE names the cache, and checked
against their checksums as always.
"""

import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".gpu-files"
PART = 50 * 10**6
PYTHON = "3.12"
THERE = set(
    "torch transformers accelerate peft safetensors huggingface-hub tokenizers numpy filelock "
    "jinja2 packaging psutil pyyaml regex tqdm typing-extensions".split()
)
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def roots():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [*project["dependencies"], "pytest"]


def requirements(wanted, without=(), **environment):
    """Each requirement among `wanted` and what they need in turn, and the version installed here.

    The version is None where there is none. without: names that are left out, with what they need;
    environment: of markers, where not this Python's.
    """
    left, found = [Requirement(line) for line in wanted], {}
    while left:
        one = left.pop()
        if str(one) in found or canonicalize_name(one.name) in without:
            continue
        try:
            installed = metadata.distribution(one.name)
        except metadata.PackageNotFoundError:
            found[str(one)] = one, None
            continue
        found[str(one)] = one, installed.version
        for needed in map(Requirement, installed.requires or ()):
            extras = [environment | {"extra": extra} for extra in ("", *one.extras)]
            if needed.marker is None or any(map(needed.marker.evaluate, extras)):
                left.append(needed)
    return [*found.values()]


def missing_there():
    """The packages that a machine with THERE alone lacks, as pip's requirements by name."""
    python = {"python_version": PYTHON, "python_full_version": f"{PYTHON}.0"}
    return {
        canonicalize_name(one.name): f"{one.name}=={version}" if version else str(one)
        for one, version in requirements(roots(), THERE, **python)
    }


def fetch(wheels):
    """Download the wheels of `missing_there` into a folder."""
    check(roots())  # what is not installed here does not say what it needs
    glibc = [f"--platform=manylinux_2_{minor}_x86_64" for minor in range(5, 36)]
    glibc += [f"--platform=manylinux{year}_x86_64" for year in (1, 2010, 2014)]
    which = [
        "--no-deps",
        "--only-binary=:all:",
        "--implementation=cp",
        f"--python-version={PYTHON}",
    ]
    command = [*PIP, "download", *which, *glibc, f"--dest={wheels}", *missing_there().values()]
    subprocess.run(command, check=True)


def pack(folder=FOLDER, specs=None, fetch=fetch, part=PART):
    """The parts, of the wheels and of the files that the code recipe names."""
    from align.sources import cache_folder, resolve_file
    from distill.recipe import load_recipe

    if specs is None:
        recipe = load_recipe(["--recipe", "code"])
        specs = [recipe.target, recipe.eval_prompts]
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar, tempfile.TemporaryDirectory() as wheels:
        fetch(wheels)
        tar.add(wheels, "wheels")
        for spec in specs:
            entry = resolve_file(spec).parents[1]
            tar.add(entry, "cache" / entry.relative_to(cache_folder()))
    folder.mkdir(exist_ok=True)
    for old in folder.glob("part-*"):
        old.unlink()
    data = whole.getvalue()
    parts = [data[at : at + part] for at in range(0, len(data), part)]
    for number, piece in enumerate(parts):
        (folder / f"part-{number:02}-of-{len(parts):02}").write_bytes(piece)
    print(f"{len(parts)} parts, {len(data) / 1e6:.0f} MB, in {folder}")


def unpack(folder=FOLDER):
    """Packages and cache from all parts. Raises SystemExit where a part or a package is missing."""
    parts = sorted(folder.glob("part-*"))
    if parts:
        wanted = int(parts[0].name.rpartition("-")[2])
        if len(parts) != wanted:
            sys.exit(f"{len(parts)} of {wanted} parts are in {folder}; carry the others, too.")
        whole = io.BytesIO(b"".join(path.read_bytes() for path in parts))
        with tarfile.open(fileobj=whole) as tar:
            tar.extractall(folder, filter="data")
        install(folder / "wheels", folder / "site-packages")
        print(f"unpacked into {folder}")
    else:
        print("no parts here (`make gpu-files`): tests of the embedded model skip")
    sys.path.insert(0, str(folder / "site-packages"))
    check(roots())


def install(wheels, site):
    """Install all wheels of a folder into another, and delete them."""
    command = [*PIP, "install", "--no-index", "--no-deps", "--upgrade", f"--target={site}"]
    done = subprocess.run([*command, *wheels.glob("*.whl")], capture_output=True, text=True)
    if done.returncode:
        sys.exit(
            f"The packages for Python {PYTHON} on Linux x86_64 cannot be installed into {site} "
            f"({done.stderr.strip()}); run `make gpu` with that Python and its pip."
        )
    shutil.rmtree(wheels)


def check(wanted):
    """Raises SystemExit where a package is missing; tells of other versions than required."""
    found = requirements(wanted)
    absent = sorted({one.name for one, version in found if version is None})
    if absent:
        sys.exit(
            f"Missing here: {', '.join(absent)}; carry all parts that `make gpu-files` made in an "
            "environment with draftsmith's test packages, or install these."
        )
    for one, version in found:
        if not one.specifier.contains(version, prereleases=True):
            print(f"{one.name} {version} is here, {one.specifier} is required: untried")


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]]()
