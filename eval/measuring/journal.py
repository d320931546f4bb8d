"""What an evaluation has measured so far, kept so that an interrupted one goes on.

A journal is a file of lines, each a crc32 and JSON. The first is the hash of what is measured; each
later one holds a result of a stage: `[stage, number, value]`. What follows a damaged line is
measured again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tqdm import tqdm

from align.files import atomic_file, disk_full_explained

JOURNAL = "measured.jsonl"  # its name, beside the report to come
INTERRUPTED = 130  # exit status, as shells have it for Ctrl-C

Row = TypeVar("Row")
R = TypeVar("R")


class Journal:
    """The results so far, in the file `path`. The file is removed once the `with` block ends well.

    An error that ends the block early prints what is kept. resumed: whether another process
    measured some of the results.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, list[Any]] = {}  # by stage, as JSON
        self.resumed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.path.unlink(missing_ok=True)
        elif self.results:
            print(
                f"\nMeasured so far: {self.progress()}. It is kept in {self.path}; run the same "
                "command again to go on from there.",
                file=sys.stderr,
            )

    def begin(self, *settings: Any) -> None:
        """Take up the results that the file has for these settings; others are replaced.

        settings: all that a result depends on, as JSON can hold it.
        """
        about = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        kept = [_line(about)]
        kept_about, *lines = self._lines() or [about]
        if kept_about != about:
            lines = []
            print(
                f"{self.path} holds what was measured of other models, prompts or settings; it is "
                "measured anew.",
                file=sys.stderr,
            )
        for stage, number, value in lines:
            results = self.results.setdefault(stage, [])
            if number == len(results):  # of two processes at one file the first counts
                results.append(value)
                kept.append(_line([stage, number, value]))
        self.resumed = bool(self.results)
        if self.resumed:
            print(f"Measured before, and kept: {self.progress()}.", file=sys.stderr)
        with atomic_file(self.path) as file:
            file.writelines(kept)

    def _lines(self) -> list[Any]:
        """The values of the lines up to the first that a kill, a full disk or a bit has damaged."""
        values: list[Any] = []
        for line in self.path.read_bytes().splitlines(True) if self.path.exists() else []:
            checksum, _, text = line.partition(b" ")
            if checksum != b"%08x" % zlib.crc32(text):
                break
            values.append(json.loads(text))
        return values

    def progress(self) -> str:
        """The stages in their order, with their numbers of results."""
        return ", ".join(f"{stage} {len(results)}" for stage, results in self.results.items())

    def each(
        self,
        stage: str,
        rows: Sequence[Row],
        measure: Callable[[int, Row], Any],
        read: Callable[[Any], R],
        unit: str | None,
        enough: Callable[[int], bool] = lambda measured: False,
    ) -> list[R]:
        """What `measure` gives for each numbered row, as `read` makes it of its JSON again.

        Rows that were measured before are not measured again. unit: what the progress bar counts;
        None shows no bar. enough: whether the other rows are left out after so many. Raises
        DiskFullError.
        """
        results = self.results.get(stage, [])
        start = len(results)
        bar = tqdm(
            rows[start:],
            desc=stage,
            unit=unit or "",
            initial=start,
            total=len(rows),
            disable=unit is None,
        )
        for number, row in enumerate(bar, start):
            if enough(number):
                bar.close()
                break
            # through JSON at once, so that a result is the same whenever it was measured
            value = json.loads(json.dumps(measure(number, row), default=dataclasses.asdict))
            with disk_full_explained(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(_line([stage, number, value]))
            results.append(value)
            self.results[stage] = results
        return [read(value) for value in results]

    def once(
        self,
        stage: str,
        measure: Callable[[], Any],
        read: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        """`each` of a stage that has one result."""
        return self.each(stage, [None], lambda _number, _row: measure(), read, None)[0]


def _line(value: Any) -> str:
    text = json.dumps(value) + "\n"
    return f"{zlib.crc32(text.encode()):08x} {text}"
