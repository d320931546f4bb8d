import errno

import pytest

from align.atomic import atomic_file
from distill.pipeline import Run
from distill.train import main


def test_a_full_disk_ends_a_run_with_its_reason_alone(tmp_path, monkeypatch, capsys):
    def check(run):
        with atomic_file(run.folder / "vocab_check.json"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Run, "check_vocabularies", check)
    assert main(["--recipe", "code", "--output_dir", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "The disk is full" in said
    assert "Free some space" in said
    assert "Traceback" not in said


def test_what_is_not_foreseen_keeps_its_traceback(tmp_path, monkeypatch):
    def check(run):
        raise PermissionError("vocab_check.json")

    monkeypatch.setattr(Run, "check_vocabularies", check)
    with pytest.raises(PermissionError):
        main(["--recipe", "code", "--output_dir", str(tmp_path)])
