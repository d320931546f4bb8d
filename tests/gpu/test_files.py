import hashlib
import json

import pytest

from align import sources
from align.sources import resolve_file
from tests.gpu.files import pack, unpack


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A file in the cache as if it had been fetched, and its spec."""
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(tmp_path / "cache"))
    spec = "pypi:dist==1.0/folder/model.gguf"
    entry = sources._cache_entry("files", sources._parse(spec)[0])
    (entry / "content").mkdir(parents=True)
    data = bytes(range(256)) * 40
    (entry / "content" / "model.gguf").write_bytes(data)
    about = {"model.gguf": [len(data), hashlib.sha256(data).hexdigest()]}
    (entry / "manifest.json").write_text(json.dumps({"made_from": spec, "files": about}))
    return spec, data


def test_what_is_packed_in_parts_is_a_cache_elsewhere(cached, tmp_path, monkeypatch):
    spec, data = cached
    folder = tmp_path / "carried"
    pack(folder, [spec], part=5000)
    parts = sorted(folder.glob("part-*"))
    assert len(parts) > 2
    assert all(path.stat().st_size <= 5000 for path in parts)
    monkeypatch.setenv("DRAFTSMITH_CACHE", str(folder / "cache"))
    unpack(folder)
    assert resolve_file(spec).read_bytes() == data


def test_a_part_left_behind_is_named(cached, tmp_path, capsys):
    pack(tmp_path / "carried", [cached[0]], part=5000)
    next((tmp_path / "carried").glob("part-01*")).unlink()
    with pytest.raises(SystemExit, match=r"of .* parts are in"):
        unpack(tmp_path / "carried")
    unpack(tmp_path / "nothing")
    assert "no parts of model files here" in capsys.readouterr().out
