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
import signal
import subprocess
import sys
import tempfile
import threading
from _thread import interrupt_main
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

from align.errors import SourceError, UserError, one_line

# Texts by which safetensors and torch say that the disk is full; their exceptions have no errno.
_DISK_FULL = ("No space left on device", "unexpected pos")
WATCHED_EVERY = 5.0  # seconds between two measurements of the disk space


@contextmanager
def atomic_file(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a new file (mode "w", UTF-8, or "wb") that replaces `path` when the block has ended.

    If the block raises, `path` keeps its earlier content.
    Raises UserError if the disk is full.
    """
    assert mode in ("w", "wb"), mode
    with _partial_of(Path(path)) as partial:
        with open(partial, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)


def write_json(path: Path, content: Any) -> None:
    """Write `content` as JSON to a new file `path`. Raises UserError if the disk is full."""
    with atomic_file(path) as file:
        json.dump(content, file, indent=2)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a checkpoint. Raises SourceError if the file is not one."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(
            f"{path} cannot be read ({one_line(error)}); restore it. If a run has made it, "
            "delete it, or its folder draft/ or prepared/."
        ) from error
    if not isinstance(content, dict):
        raise SourceError(f"{path} holds no JSON object; restore the file.")
    return content


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a new empty folder, which is renamed to `path` when the block has ended.

    An earlier folder `path` is replaced as a whole; if the block raises, it stays. If the process
    dies between the two renames of a replacement, the next call restores the earlier folder.
    Raises UserError if the disk is full.
    """
    path = Path(path)
    with _partial_of(path) as partial:
        partial.mkdir()
        yield partial
        readable = partial.stat().st_mode & 0o666  # depends on the umask
        for weights in partial.rglob("*.safetensors"):
            weights.chmod(readable)  # safetensors 0.8 makes them readable by the owner only
        os.sync()  # one call: a folder may hold tens of thousands of files
        if path.is_dir() and not path.is_symlink():
            path.rename(partial.with_suffix(".replaced"))
        else:
            path.unlink(missing_ok=True)
        partial.rename(path)


def atomic_link(path: Path, target: str | Path) -> None:
    """Make `path` a symbolic link to `target`. An earlier link is replaced in one step.

    Raises UserError if the disk is full.
    """
    with _partial_of(path) as partial:
        partial.symlink_to(target)
        os.replace(partial, path)


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold the lock on `path` among all processes (a file `.NAME.lock` in the same folder).

    Waits while another process holds the lock, and prints that it waits.
    """
    path = Path(path)
    with write_errors_explained(path):
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
    """Delete a file or folder. Under its name it is never visible in part."""
    with _partial_of(path) as partial, suppress(FileNotFoundError):
        path.rename(partial)


@contextmanager
def _partial_of(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`; a file that has it at the end is deleted."""
    with write_errors_explained(path):
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


def _clear(lock: Path, path: Path) -> None:
    """Delete the temporary files of a writer of `path`; restore a folder that it moved aside."""
    partial = lock.with_suffix("")
    replaced = partial.with_suffix(".replaced")
    _delete(partial)
    if replaced.exists() and not path.exists():
        replaced.rename(path)
    elif replaced.exists():
        replaced.rename(partial)  # a folder that is deleted in part must not be restored
        _delete(partial)
    lock.unlink(missing_ok=True)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync(folder: Path) -> None:
    """Make renames in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_errors_explained(path: Path) -> Iterator[None]:
    """Replace the exceptions of a full disk or a missing permission by a UserError with `path`."""
    try:
        yield
    except Exception as error:
        # a UserError is that of a file within a folder; the folder is named instead
        reason = error.__cause__ if isinstance(error, UserError) else error
        code = reason.errno if isinstance(reason, OSError) else None
        if code in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise UserError(
                f"{path} cannot be written ({os.strerror(code)}); its earlier content is unchanged."
                " Make its folder writable, then run the same command again."
            ) from reason
        full = code in (errno.ENOSPC, errno.EDQUOT)
        if not full and not any(text in str(reason) for text in _DISK_FULL):
            raise
        raise UserError(
            f"The disk is full: {path} could not be written; its earlier content is unchanged. "
            "Free some space or choose another folder, then run the same command again."
        ) from reason


def nearest_existing(folder: Path) -> Path:
    """The folder, or the nearest folder above it that exists."""
    return next(path for path in (folder, *folder.absolute().parents) if path.exists())


def refuse_unwritable(folder: Path) -> None:
    """Raise UserError if this process cannot create the folder or write into it."""
    try:
        with tempfile.TemporaryFile(
            dir=nearest_existing(folder)
        ) as file:  # a permission alone does not tell
            file.write(b"0")
    except OSError as error:
        raise UserError(
            f"{folder} cannot be written ({error}); make it writable, or name another."
        ) from error


@contextmanager
def disk_cap(folder: Path, gib: float) -> Iterator[None]:
    """Interrupt the block if `folder` becomes larger than `gib` GiB, and then raise UserError."""
    ended, over = threading.Event(), threading.Event()

    def watch() -> None:
        while not over.is_set() and not ended.wait(WATCHED_EVERY):
            used = subprocess.run(["du", "-sk", folder], capture_output=True, text=True)
            if int(used.stdout.split()[0]) > gib * 2**20:  # KiB
                over.set()
                interrupt_main()

    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job may ignore it
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()
        if over.is_set():
            raise UserError(
                f"{folder} has become larger than {gib:g} GiB, so the call was ended. Raise "
                "--disk_gib, or lower --days, max_train_prompts or save_total_limit."
            )
