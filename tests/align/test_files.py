"""Nothing half-written is ever seen, and nothing is lost, whenever the writer dies."""

import errno
import os
import signal
import stat
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from align.errors import UserError
from align.files import atomic_file, atomic_folder, locked, remove
from tests.align.conftest import start

OLD, NEW = {"a": "old", "b": "old"}, {"a": "new", "b": "new"}


def killed(script, *arguments):
    """Run a script that kills itself with SIGKILL."""
    process = start(script, *arguments)
    _, error = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGKILL, error


def fill(folder, files):
    for name, text in files.items():
        (folder / name).write_text(text)


def contents(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_file_appears_whole_and_alone(tmp_path):
    path = tmp_path / "deep" / "report.json"
    with atomic_file(path) as file:
        file.write("é")
        assert not path.exists()
    assert path.read_bytes() == "é".encode()
    with atomic_file(path, "wb") as file:
        file.write(b"\x00")
        assert path.read_bytes() == "é".encode()
    assert path.read_bytes() == b"\x00"
    assert names(path.parent) == ["report.json"]


@pytest.fixture
def calls(monkeypatch):
    """What is made durable and what is renamed, in this order; a file is told by its size."""
    made = []

    def fsync(descriptor):
        about = os.fstat(descriptor)
        made.append("parent" if stat.S_ISDIR(about.st_mode) else about.st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "sync", lambda: made.append("everything"))
    for name in ("replace", "rename"):
        renames = getattr(os, name)
        monkeypatch.setattr(
            os, name, lambda *paths, renames=renames: made.append("rename") or renames(*paths)
        )
    return made


def test_what_is_written_is_on_the_disk_before_it_takes_its_name(tmp_path, calls):
    """Else a power cut could leave an empty file under the final name."""
    with atomic_file(tmp_path / "report.json") as file:
        file.write("whole")
    assert calls == [5, "rename", "parent"]
    calls.clear()
    with atomic_folder(tmp_path / "draft") as folder:
        fill(folder, NEW)
    assert calls == ["everything", "rename", "parent"]


def test_an_error_leaves_the_earlier_file_or_folder(tmp_path):
    (tmp_path / "draft").mkdir()
    fill(tmp_path / "draft", OLD)
    (tmp_path / "report").write_text("old")
    with pytest.raises(KeyboardInterrupt), atomic_file(tmp_path / "report") as file:  # noqa: PT012
        file.write("half")
        file.flush()
        raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt), atomic_folder(tmp_path / "draft") as folder:  # noqa: PT012
        fill(folder, NEW)
        raise KeyboardInterrupt
    assert contents(tmp_path / "draft") == OLD
    assert (tmp_path / "report").read_text() == "old"
    assert names(tmp_path) == ["draft", "report"]


def test_a_folder_appears_whole_and_replaces_the_earlier_one(tmp_path):
    path = tmp_path / "draft"
    for files in (OLD, NEW):
        with atomic_folder(path) as folder:
            fill(folder, files)
        assert contents(path) == files
    assert names(tmp_path) == ["draft"]


def test_weights_in_a_folder_are_for_all_to_read_who_may_read_the_folder(tmp_path):
    with atomic_folder(tmp_path / "draft") as folder:
        save_file({"weight": torch.ones(1)}, folder / "model.safetensors")
    mode = (tmp_path / "draft" / "model.safetensors").stat().st_mode
    assert mode & 0o777 == (tmp_path / "draft").stat().st_mode & 0o666


def test_a_folder_takes_the_place_of_a_file_or_a_link(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (tmp_path / "link").symlink_to(elsewhere)
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with atomic_folder(tmp_path / name) as folder:
            fill(folder, NEW)
        assert contents(tmp_path / name) == NEW
    assert contents(elsewhere) == {}


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_kill_9_while_writing(tmp_path, kind):
    path = tmp_path / "draft"
    script = """
        import os, signal, sys
        from align.files import atomic_file, atomic_folder
        if sys.argv[2] == "file":
            with atomic_file(sys.argv[1]) as file:
                file.write("half")
                file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        with atomic_folder(sys.argv[1]) as folder:
            (folder / "a").write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed(script, path, kind)
    assert not path.exists()
    litter = names(tmp_path)
    assert litter
    assert all(name.startswith(".draft.") for name in litter)
    with atomic_file(path) if kind == "file" else atomic_folder(path):
        pass  # the next writer clears it
    assert names(tmp_path) == ["draft"]


@pytest.mark.parametrize("step", range(6))
def test_kill_9_at_every_step_of_a_replacement(tmp_path, step):
    """Steps: before and after each rename, the last to delete the earlier folder."""
    path = tmp_path / "draft"
    with atomic_folder(path) as folder:
        fill(folder, OLD)
    script = """
        import os, shutil, signal, sys
        from pathlib import Path
        from align.files import atomic_folder
        left = int(sys.argv[2])
        def step():
            global left
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        rename = Path.rename
        def counted(path, target):
            step()
            renamed = rename(path, target)
            step()
            return renamed
        Path.rename = counted
        with atomic_folder(sys.argv[1]) as folder:
            for name in "ab":
                (folder / name).write_text("new")
    """
    killed(script, path, step)
    if path.exists():
        assert contents(path) == (OLD if step < 2 else NEW)
    with pytest.raises(RuntimeError, match="stop"), atomic_folder(path):
        raise RuntimeError("stop")  # the recovery alone must not depend on what is written next
    assert contents(path) == (OLD if step < 3 else NEW)
    assert names(tmp_path) == ["draft"]


def test_a_live_writer_is_left_alone(tmp_path):
    path = tmp_path / "draft"
    with atomic_folder(path) as outer, atomic_file(tmp_path / "report") as file:
        fill(outer, NEW)
        file.write("new")
        with atomic_folder(path) as inner:
            fill(inner, OLD)
        with atomic_file(tmp_path / "report") as other:
            other.write("old")
        assert contents(path) == OLD
    assert contents(path) == NEW
    assert (tmp_path / "report").read_text() == "new"


def test_other_files_beside_are_left_alone(tmp_path):
    kept = [".draft.partial", ".draft.tuned.0123abcd.partial", "draft.partial", ".draft.lock"]
    for name in kept:
        (tmp_path / name).touch()
    with atomic_folder(tmp_path / "draft") as folder:
        fill(folder, NEW)
    assert names(tmp_path) == sorted([*kept, "draft"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_explained_and_loses_nothing(tmp_path):
    path = tmp_path / "cache.bin"
    path.write_text("old")
    with (
        pytest.raises(UserError, match=r"disk is full: .*cache\.bin"),
        atomic_file(path),
        open("/dev/full", "w", buffering=1) as full,
    ):
        full.write("x\n")
    assert contents(tmp_path) == {"cache.bin": "old"}


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("I/O error: No space left on device (os error 28)"),  # of safetensors
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 8 vs 4"),  # torch
        OSError(errno.EROFS, "Read-only file system"),  # while the run goes on
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_disk_that_takes_no_more_is_explained(tmp_path, error, nested):
    with (
        pytest.raises(UserError, match=rf"{tmp_path}/draft (could not|cannot) be written"),
        atomic_folder(tmp_path / "draft") as folder,
        atomic_file(folder / "file") if nested else nullcontext(),
    ):
        raise error
    assert names(tmp_path) == []


def test_remove(tmp_path):
    (tmp_path / "folder").mkdir()
    fill(tmp_path / "folder", OLD)
    (tmp_path / "file").touch()
    for name in ("folder", "file", "missing"):
        remove(tmp_path / name)
    assert names(tmp_path) == []


def test_a_lock_is_held_by_one_at_a_time(tmp_path):
    inside, most, barrier = 0, [], threading.Barrier(4)

    def work():
        nonlocal inside
        barrier.wait()
        with locked(tmp_path / "entry"):
            inside += 1
            time.sleep(0.05)  # long enough for all of them to be in, were there no lock
            most.append(inside)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1, 1]


def test_a_killed_holder_frees_its_lock(tmp_path):
    script = """
        import os, signal, sys
        from align.files import locked
        with locked(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
    """
    killed(script, tmp_path / "entry")
    entered = []
    with locked(tmp_path / "entry"):
        entered.append("after the kill")
    assert entered
