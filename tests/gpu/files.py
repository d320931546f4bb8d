"""The embedded model files in parts, for a machine without a network.

    python tests/gpu/files.py pack      where there is one: .gpu-files/part-00, part-01, …
    python tests/gpu/files.py unpack    on the other side: .gpu-files/cache

Each part is at most PART bytes, so that they can be carried one by one. What is packed are the
entries of the cache (align/sources.py) as they were fetched; they are converted on the other side,
where DRAFTSMITH_CACHE names the cache, and checked against their checksums as always.
"""

import io
import sys
import tarfile
from pathlib import Path

from align.sources import cache_folder, resolve_file
from distill.recipe import load_recipe

FOLDER = Path(__file__).resolve().parents[2] / ".gpu-files"
PART = 50 * 10**6


def pack(folder=FOLDER, specs=None, part=PART):
    """The parts, of the files that the code recipe names."""
    if specs is None:
        recipe = load_recipe(["--recipe", "code"])
        specs = [recipe.target, recipe.eval_prompts]
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for spec in specs:
            entry = resolve_file(spec).parents[1]  # beside its content lies the manifest
            tar.add(entry, entry.relative_to(cache_folder()))
    folder.mkdir(exist_ok=True)
    for old in folder.glob("part-*"):
        old.unlink()
    data = whole.getvalue()
    parts = [data[at : at + part] for at in range(0, len(data), part)]
    for number, piece in enumerate(parts):
        (folder / f"part-{number:02}-of-{len(parts):02}").write_bytes(piece)
    print(f"{len(parts)} parts, {len(data) / 1e6:.0f} MB, in {folder}")


def unpack(folder=FOLDER):
    """The cache from all parts. Raises SystemExit where one is missing."""
    parts = sorted(folder.glob("part-*"))
    if not parts:
        print("no parts of model files here (`make gpu-files`): tests of the embedded model skip")
        return
    wanted = int(parts[0].name.rpartition("-")[2])
    if len(parts) != wanted:
        sys.exit(f"{len(parts)} of {wanted} parts are in {folder}; carry the others, too.")
    whole = io.BytesIO(b"".join(path.read_bytes() for path in parts))
    with tarfile.open(fileobj=whole) as tar:
        tar.extractall(folder / "cache", filter="data")
    print(f"unpacked into {folder / 'cache'}")


if __name__ == "__main__":
    {"pack": pack, "unpack": unpack}[sys.argv[1]]()
