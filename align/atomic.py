"""Files and folders that appear whole or not at all, whenever the process dies.

What is written stands first beside its final name, as `.NAME.xxxxxxxx.partial`, and is then
renamed. The writer holds an advisory lock (flock) on it, which the kernel drops when the process
dies, however it dies; so what is found unlocked is litter of a dead run, and the next writer
removes it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from filelock import FileLock, Timeout

_PARTIAL = ".partial"  # being written, or being deleted
_REPLACED = ".replaced"  # the earlier folder, whole, while the new one takes its name


@contextmanager
def atomic_file(path: str | Path, mode: str = "w") -> Iterator[IO[Any]]:
    """Open a new file (mode "w", UTF-8, or "wb") that becomes `path` once the block ends well.

    Until then, and for good if the block raises, `path` is what it was before.
    Raises DiskFullError where there is no room.
    """
    assert mode in ("w", "wb"), mode
    path = Path(path)
    with ExitStack() as stack:
        with disk_full_explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _clear_litter(path)
            partial = _create_locked(stack, path, lambda name: name.touch(exist_ok=False))
            try:
                with open(partial, mode, encoding=None if "b" in mode else "utf-8") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(partial, path)
            except BaseException:
                partial.unlink(missing_ok=True)
                raise
        _sync(path.parent)


@contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Give a new empty folder to fill, which takes the name `path` when the block ends well.

    A folder that stood there is replaced as a whole; if the block raises, it stays. Should the
    process die between the two renames of a replacement, the next call puts the earlier one back.
    Raises DiskFullError where there is no room.
    """
    path = Path(path)
    with ExitStack() as stack:
        with disk_full_explained(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _clear_litter(path)
            partial = _create_locked(stack, path, Path.mkdir)
            try:
                yield partial
                os.sync()  # one call: a folder may hold tens of thousands of files
                _take_name(stack, partial, path)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        _sync(path.parent)


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Hold the lock that stands for `path` among all processes (a file `.NAME.lock` beside it).

    Waits for as long as another process holds it, and says so.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"))
    try:
        lock.acquire(timeout=2)
    except Timeout:
        print(f"Waiting for another process that prepares {path} …", file=sys.stderr)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def remove(path: Path) -> None:
    """Delete a file or folder so that no half of it is ever seen under its name."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    doomed = _new_name(path, _PARTIAL)
    path.rename(doomed)
    shutil.rmtree(doomed)


def _new_name(path: Path, kind: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{kind}")


def _create_locked(stack: ExitStack, path: Path, create: Callable[[Path], None]) -> Path:
    """Create a partial sibling of `path` and lock it until `stack` closes."""
    while True:
        partial = _new_name(path, _PARTIAL)
        create(partial)
        descriptor = _lock(partial)
        if descriptor is not None:
            stack.callback(os.close, descriptor)
            return partial
        # Another process took it for litter in the moment between creating and locking.


def _lock(path: Path) -> int | None:
    """A descriptor holding the lock of the file or folder `path`; None if it is held or gone."""
    try:
        # NFS locks a file only for who may write it
        descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if path.exists() and os.path.samestat(os.fstat(descriptor), path.stat()):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)
    return None


def _clear_litter(path: Path) -> None:
    """Remove what dead writers of `path` left, and put back a folder that one had moved aside."""
    prefix = f".{path.name}."
    for litter in sorted(path.parent.iterdir()):
        if not litter.name.startswith(prefix) or litter.suffix not in (_PARTIAL, _REPLACED):
            continue
        if litter.stem != prefix + litter.stem[-8:]:  # a sibling named like `path` with a suffix
            continue
        descriptor = _lock(litter)
        if descriptor is None:
            continue
        try:
            if litter.suffix == _REPLACED and not path.exists():
                litter.rename(path)
            elif litter.is_dir():
                _delete_folder(litter, path)
            else:
                litter.unlink()
        finally:
            os.close(descriptor)


def _delete_folder(folder: Path, path: Path) -> None:
    """Delete a moved-aside folder; it loses its `.replaced` first, so no half of it is put back."""
    if folder.suffix == _REPLACED:
        folder = folder.rename(_new_name(path, _PARTIAL))
    shutil.rmtree(folder)


def _take_name(stack: ExitStack, partial: Path, path: Path) -> None:
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        partial.rename(path)
        return
    descriptor = os.open(path, os.O_RDONLY)
    stack.callback(os.close, descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # so that nobody puts it back meanwhile
    replaced = path.rename(_new_name(path, _REPLACED))
    try:
        partial.rename(path)
    except BaseException:
        replaced.rename(path)
        raise
    _delete_folder(replaced, path)


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
