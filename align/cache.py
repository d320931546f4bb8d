"""What is fetched, converted or computed once and kept on this machine."""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from align.errors import UserError
from align.files import atomic_file, atomic_folder, locked

_SHA256 = re.compile("[0-9a-f]{64}")
_SETTLED = 2 * 10**9  # ns; a file may change again within the resolution of its times


def cache_folder() -> Path:
    """Where fetched and converted files are kept: $DRAFTSMITH_CACHE, else ~/.cache/draftsmith."""
    return Path(os.environ.get("DRAFTSMITH_CACHE") or "~/.cache/draftsmith").expanduser()


def cached(key: str, fill: Callable[[Path], None]) -> Path:
    """The folder of a cache entry. `fill` makes a missing one; it appears whole or not at all."""
    entry = cache_folder() / key
    with locked(entry):
        if not entry.exists():
            with atomic_folder(entry) as folder:
                (folder / "content").mkdir()
                fill(folder / "content")
    return entry / "content"


def file_sha256(path: Path) -> str:
    """The file's sha256. The cache keeps it until the file is changed or replaced."""
    real = path.resolve()
    if real.parent.name == "blobs" and _SHA256.fullmatch(real.name):
        return real.name  # the Hub's cache gives large files this name
    about = real.stat()
    times = about.st_mtime_ns, about.st_ctime_ns
    state = f"{real} {about.st_dev} {about.st_ino} {about.st_size} {times}"
    entry = cache_folder() / "sha256" / hashlib.sha256(state.encode()).hexdigest()
    if entry.exists():
        return entry.read_text(encoding="utf-8")
    with open(real, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if time.time_ns() - max(times) > _SETTLED:
        with suppress(UserError), atomic_file(entry) as file:  # without it the next call takes time
            file.write(sha256)
    return sha256
