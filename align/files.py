"""Files and folders that appear whole or not at all, whenever the process dies.

New content is first written to `.NAME.xxxxxxxx.partial` in the same folder and then renamed. The
writer holds a lock on `.NAME.xxxxxxxx.partial.lock`. The kernel drops the lock when the process
dies. So a partial file with a free lock was left by a dead writer, and the next writer deletes it.
"""

from __future__ import annotations

import errno
import glob
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout


@contextmanager
def atomic_file(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a new file (mode "w", UTF-8, or "wb") that becomes `path` once the block ends well.

    Until then, and for good if the block raises, `path` is what it was before.
    Raises DiskFullError where there is no room.
    """
    assert mode in ("w", "wb"), mode
    with _partial_of(Path(path)) as partial:
        with open(partial, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)


def write_json(path: Path, content: Any) -> None:
    """`content` as JSON in a new file `path`. Raises DiskFullError where there is no room."""
    with atomic_file(path) as file:
        json.dump(content, file, indent=2)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Give a new empty folder to fill. It takes the name `path` when the block ends well.

    An earlier folder of that name is replaced as a whole; if the block raises, it stays. If the
    process dies between the two renames of a replacement, the next call restores the earlier one.
    Raises DiskFullError where there is no room.
    """
    path = Path(path)
    with _partial_of(path) as partial:
        partial.mkdir()
        yield partial
        readable = partial.stat().st_mode & 0o666  # as the umask has it
        for weights in partial.rglob("*.safetensors"):
            weights.chmod(readable)  # safetensors 0.8 lets their writer alone read them
        os.sync()  # one call: a folder may hold tens of thousands of files
        if path.is_dir() and not path.is_symlink():
            path.rename(_replaced(partial))
        else:
            path.unlink(missing_ok=True)
        partial.rename(path)


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold the lock on `path` among all processes (a file `.NAME.lock` in the same folder).

    Waits while another process holds the lock, and prints that it waits.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        held = lock.acquire(timeout=2)
    except Timeout:
        print(f"Waiting for another process that prepares {path} …", file=sys.stderr)
        held = lock.acquire()
    with held:
        yield


def remove(path: Path) -> None:
    """Delete a file or folder so that no half of it is ever seen under its name."""
    with _partial_of(path) as partial, suppress(FileNotFoundError):
        path.rename(partial)


@contextmanager
def _partial_of(path: Path) -> Iterator[Path]:
    """A temporary name in the folder of `path`; a file that still has it at the end is deleted."""
    with disk_full_explained(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for lock in path.parent.glob(f".{glob.escape(path.name)}.????????.partial.lock"):
            with suppress(Timeout), FileLock(lock, blocking=False):
                _clear(lock, path)
        lock = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial.lock")
        with FileLock(lock):
            try:
                yield lock.with_suffix("")
            finally:
                _clear(lock, path)
        _sync(path.parent)


def _replaced(partial: Path) -> Path:
    """The name of the earlier folder, whole, while the new one takes its own."""
    return partial.with_suffix(".replaced")


def _clear(lock: Path, path: Path) -> None:
    """Delete what a writer of `path` leaves, and put back a folder that it had moved aside."""
    partial = lock.with_suffix("")
    replaced = _replaced(partial)
    _delete(partial)
    if replaced.exists() and not path.exists():
        replaced.rename(path)
    elif replaced.exists():
        replaced.rename(partial)  # so that no half of it is ever put back
        _delete(partial)
    lock.unlink(missing_ok=True)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make a rename in `folder` outlive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class DiskFullError(OSError):
    """The disk is full: what could not be written, and what to do."""


@contextmanager
def disk_full_explained(path: Path) -> Iterator[None]:
    """Raise DiskFullError, naming `path`, for whatever a full disk makes a library raise."""
    try:
        yield
    except Exception as error:
        # safetensors and torch report a full disk in exceptions of their own, as text
        code = error.errno if isinstance(error, OSError) else None
        if code not in (errno.ENOSPC, errno.EDQUOT) and "No space left on device" not in str(error):
            raise
        raise DiskFullError(
            code or errno.ENOSPC,
            f"The disk is full: {path} could not be written, and what stood there before is "
            "untouched. Free some space or choose another folder, then run the same command again",
        ) from error


def refuse_unwritable(folder: Path) -> None:
    """Raise ValueError where this process cannot write into the folder, or make it."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        reason = "is read-only for you" if nearest.is_dir() else "is a file"
        raise ValueError(f"{folder} cannot be written, because {nearest} {reason}; name another.")
