import sys
import zipfile

import pytest

from align import sources
from align.sources import resolve_file
from tests.gpu import files
from tests.gpu.files import THERE, check, missing_there, pack, unpack


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A file in the cache as if it had been fetched, and its spec."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    spec = "pypi:dist==1.0/folder/model.gguf"
    entry = sources.cache_folder() / sources._key("files", sources._parse(spec)[0])
    (entry / "content").mkdir(parents=True)
    data = bytes(range(256)) * 40
    (entry / "content" / "model.gguf").write_bytes(data)
    return spec, data


def wheel(folder):
    """A wheel of one module that needs a package nobody has."""
    with zipfile.ZipFile(f"{folder}/carried-1.0-py3-none-any.whl", "w") as made:
        about = "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\nRequires-Dist: absent>2\n"
        made.writestr("carried-1.0.dist-info/METADATA", about)
        kind = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        made.writestr("carried-1.0.dist-info/WHEEL", kind)
        made.writestr("carried-1.0.dist-info/RECORD", "")
        made.writestr("carried.py", "")


@pytest.fixture(autouse=True)
def nothing_needed(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # `unpack` adds to it
    monkeypatch.setattr(files, "roots", list)


def test_what_is_packed_in_parts_is_a_cache_elsewhere(cached, tmp_path, monkeypatch):
    spec, data = cached
    folder = tmp_path / "carried"
    pack(folder, [spec], wheel, part=5000)
    parts = sorted(folder.glob("part-*"))
    assert len(parts) > 2
    assert all(path.stat().st_size <= 5000 for path in parts)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(folder / "cache"))
    unpack(folder)
    assert resolve_file(spec).read_bytes() == data


def test_a_part_left_behind_is_named(cached, tmp_path, capsys):
    pack(tmp_path / "carried", [cached[0]], wheel, part=5000)
    next((tmp_path / "carried").glob("part-01*")).unlink()
    with pytest.raises(SystemExit, match=r"of .* parts are in"):
        unpack(tmp_path / "carried")
    unpack(tmp_path / "nothing")
    assert "no parts here" in capsys.readouterr().out


def test_packed_wheels_are_installed_beside_the_machines_own(cached, tmp_path, monkeypatch):
    folder = tmp_path / "carried"
    pack(folder, [cached[0]], wheel)
    monkeypatch.setattr(files, "roots", lambda: ["carried>=2"])
    with pytest.raises(SystemExit, match="Missing here: absent; carry all parts"):
        unpack(folder)
    assert (folder / "site-packages" / "carried.py").is_file()


def test_what_is_packed_is_what_such_a_machine_lacks(monkeypatch):
    monkeypatch.undo()
    missing = missing_there()
    assert {"trl", "datasets", "pyarrow", "pydantic-core", "ruamel-yaml", "pytest"} <= {*missing}
    assert not THERE & {*missing}


def test_other_versions_than_required_are_told(capsys):
    check(["pytest<1"])
    assert "is here, <1 is required: untried" in capsys.readouterr().out
