"""What an evaluation has measured by now, kept row by row, so that an interrupted one goes on.

A journal is a file of lines, each a crc32 and JSON. The first tells what is being measured; each
later one holds a row of a stage: `[stage, number, of how many, value]`. What follows a line that is
not as it was written is measured again.
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
    """The rows measured so far, in `path`. The file goes once the `with` block ends well.

    Whatever ends the block early, it says what is kept. resumed: whether another process measured
    some of the rows. Raises DiskFullError where there is no room.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken: dict[str, list[Any]] = {}  # stage -> the values of its rows, as JSON
        self.totals: dict[str, int] = {}
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
        elif self.taken:
            print(
                f"\nMeasured so far: {self.progress()}. It is kept in {self.path}; run the same "
                "command again to go on from there.",
                file=sys.stderr,
            )

    def begin(self, *settings: Any) -> None:
        """Take up the rows that a file about just this holds; one about anything else is replaced.

        settings: all that a row depends on, as JSON can hold it.
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
        for stage, number, total, value in lines:
            rows = self.taken.setdefault(stage, [])
            if number == len(rows):  # of two processes at one file the first counts
                rows.append(value)
                self.totals[stage] = total
                kept.append(_line([stage, number, total, value]))
        self.resumed = bool(self.taken)
        if self.resumed:
            print(f"Measured before, and kept: {self.progress()}.", file=sys.stderr)
        with atomic_file(self.path) as file:
            file.writelines(kept)

    def _lines(self) -> list[Any]:
        """What the lines hold, up to the first that a kill, a full disk or a bit has damaged."""
        values: list[Any] = []
        for line in self.path.read_bytes().splitlines(True) if self.path.exists() else []:
            checksum, _, text = line.partition(b" ")
            if checksum != b"%08x" % zlib.crc32(text):
                break
            values.append(json.loads(text))
        return values

    def progress(self) -> str:
        """The stages in their order, with how far those are that are not at their end."""
        return ", ".join(
            stage
            if len(rows) == self.totals[stage]
            else f"{stage} {len(rows)}/{self.totals[stage]}"
            for stage, rows in self.taken.items()
        )

    def each(
        self,
        stage: str,
        rows: Sequence[Row],
        measure: Callable[[int, Row], Any],
        read: Callable[[Any], R],
        unit: str | None,
        enough: Callable[[list[R]], bool] | None = None,
    ) -> list[R]:
        """What `measure` gives for each numbered row, as `read` makes it of its JSON again.

        Rows that were measured before are not measured again. unit: what a progress bar counts;
        None shows none. enough: of the results so far, whether the rest can be left out.
        """
        taken = self.taken.get(stage, [])
        results = [read(value) for value in taken]
        bar = tqdm(
            list(enumerate(rows))[len(taken) :],
            desc=stage,
            unit=unit or "row",
            initial=len(taken),
            total=len(rows) if enough is None else None,  # which end nobody knows
            disable=unit is None,
        )
        for number, row in bar:
            if enough is not None and enough(results):
                bar.close()
                break
            # through JSON at once, so that a row is the same whenever it was measured
            value = json.loads(json.dumps(measure(number, row), default=dataclasses.asdict))
            with disk_full_explained(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(_line([stage, number, len(rows), value]))
            self.taken.setdefault(stage, []).append(value)
            self.totals[stage] = len(rows)
            results.append(read(value))
        return results

    def once(
        self,
        stage: str,
        measure: Callable[[], Any],
        read: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        """`each` of a stage that is one row."""
        return self.each(stage, [None], lambda _number, _row: measure(), read, None)[0]


def _line(value: Any) -> str:
    text = json.dumps(value) + "\n"
    return f"{zlib.crc32(text.encode()):08x} {text}"
