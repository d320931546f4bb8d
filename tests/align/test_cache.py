"""What is kept on this machine, and for how long."""

import hashlib
from pathlib import Path

from align.cache import cache_folder, file_sha256


def test_a_files_hash_is_kept_until_the_file_is_another_one(tmp_path, monkeypatch):
    def hashed(content):
        reads.clear()
        path.write_bytes(content)
        digests = {file_sha256(path) for _ in range(3)}
        assert digests == {hashlib.sha256(content).hexdigest()}
        return len(reads)

    def counted(file, name, digest=hashlib.file_digest):
        reads.append(file)
        return digest(file, name)

    path, reads = tmp_path / "weights", []
    monkeypatch.setattr("align.cache.hashlib.file_digest", counted)
    assert hashed(b"one") == 3  # it has just been written, and may change again within its times
    monkeypatch.setattr("align.cache._SETTLED", -(10**12))
    assert hashed(b"two") == hashed(b"three") == 1
    blob = tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    blob.touch()
    path.unlink()
    path.symlink_to(blob)
    reads.clear()
    assert (file_sha256(path), reads) == (blob.name, [])


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    assert cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("DRAFTSMITH_CACHE")
    assert cache_folder() == Path.home() / ".cache" / "draftsmith"
