"""The journal of an evaluation: its results so far, so that an interrupted evaluation continues.

A journal is a file of lines, each with a crc32 and JSON. The first line is a hash of the target,
prompts and settings; each later line is a result of a stage: `[stage, number, value]`. A draft's
stages have its own label, so other drafts cost it nothing. Results after a damaged line are
measured again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import zlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from align.files import atomic_file, write_errors_explained

JOURNAL = "measured.jsonl"  # the journal's name in the report's folder

# Called with the number of results of a stage; if true, the stage ends.
Enough = Callable[[int], bool]
Row = TypeVar("Row")
R = TypeVar("R")


def all_of_them(_measured: int) -> bool:
    """The `Enough` of a stage that measures all."""
    return False


class Journal(AbstractContextManager["Journal"]):
    """The results so far, in the file `path`, which is removed when the `with` block succeeds.

    If an error ends the block, the file stays, and a message says what it holds. resumed: whether
    another process measured some of the results.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.results: dict[str, list[Any]] = {}  # by stage, as JSON
        self.resumed = False

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None:
            self.path.unlink(missing_ok=True)
        elif self.results:
            print(
                f"\nMeasured so far: {self.progress()}. The results are in {self.path}; the same "
                "command continues.",
                file=sys.stderr,
            )

    def begin(self, *settings: Any) -> None:
        """Read the file's results if they are of these settings; otherwise replace the file.

        settings: everything on which a result depends, as JSON values.
        """
        about = hashlib.sha256(json.dumps(settings).encode()).hexdigest()
        kept = [_line(about)]
        kept_about, *lines = self._lines() or [about]
        if kept_about != about:
            lines = []
            print(
                f"{self.path} has results for another target, other prompts or settings; they are "
                "replaced.",
                file=sys.stderr,
            )
        for stage, number, value in lines:
            results = self.results.setdefault(stage, [])
            if number == len(results):  # if two processes wrote results, the first counts
                results.append(value)
                kept.append(_line([stage, number, value]))
        self.resumed = bool(self.results)
        if self.resumed:
            text = "Earlier results are used where nothing has changed"
            print(f"{text}: {self.progress()}.", file=sys.stderr)
        with atomic_file(self.path) as file:
            file.writelines(kept)

    def _lines(self) -> list[Any]:
        """The values of the lines before the first damaged line (a kill, a full disk, a bit)."""
        values: list[Any] = []
        for line in self.path.read_bytes().splitlines(True) if self.path.exists() else []:
            checksum, _, text = line.partition(b" ")
            if checksum != b"%08x" % zlib.crc32(text):
                break
            values.append(json.loads(text))
        return values

    def progress(self) -> str:
        """The stages in order, each with its number of results."""
        return ", ".join(f"{stage} {len(results)}" for stage, results in self.results.items())

    def each(
        self,
        stage: str,
        rows: Sequence[Row],
        measure: Callable[[int, Row], Any],
        read: Callable[[Any], R],
        unit: str | None,
        enough: Enough = all_of_them,
    ) -> list[R]:
        """The result of `measure(number, row)` for each row, through JSON and then `read`.

        Rows with a result in the journal are not measured again. unit: of the progress bar; None:
        no bar. enough: if true, the other rows are left out. Raises UserError.
        """
        return self.together(
            [stage], rows, lambda number, row, _: [measure(number, row)], read, unit, enough
        )[0]

    def together(
        self,
        stages: Sequence[str],
        rows: Sequence[Row],
        measure: Callable[[int, Row, list[int]], Sequence[Any]],
        read: Callable[[Any], R],
        unit: str | None,
        enough: Enough = all_of_them,
    ) -> list[list[R]]:
        """`each` for stages that are measured together: results [stages][rows].

        measure: gets the numbers of the stages without a result for a row, and returns theirs. A
        stage without results for rows that another stage has is measured there first.
        """
        counts = [len(self.results.get(stage, [])) for stage in stages]
        desc, done = stages[0].partition(" of ")[0], {"initial": min(counts), "total": len(rows)}
        with tqdm(desc=desc, unit=unit or "", disable=unit is None, **done) as bar:
            for number, row in enumerate(rows):
                without = [i for i, count in enumerate(counts) if count <= number]
                if not without:
                    continue
                if number >= max(counts) and enough(number):
                    break
                for i, value in zip(without, measure(number, row, without), strict=True):
                    self.add(stages[i], value)
                bar.update()
        return [[read(value) for value in self.results.get(stage, [])] for stage in stages]

    def has(self, stage: str) -> bool:
        """Whether this stage has results, also under a label."""
        return any(f"{name} ".startswith(f"{stage} ") for name in self.results)

    def add(self, stage: str, value: Any) -> list[Any]:
        """Append the next result of a stage; returns all its results as JSON. Raises UserError."""
        results = self.results.setdefault(stage, [])
        # through JSON, so that a result is the same in this process and after a restart
        value = json.loads(json.dumps(value, default=dataclasses.asdict))
        with write_errors_explained(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write(_line([stage, len(results), value]))
        results.append(value)
        return results

    def once(
        self,
        stage: str,
        measure: Callable[[], Any],
        read: Callable[[Any], Any] = lambda value: value,
    ) -> Any:
        """`each` for a stage with one result."""
        return self.each(stage, [None], lambda _number, _row: measure(), read, None)[0]


def _line(value: Any) -> str:
    text = json.dumps(value) + "\n"
    return f"{zlib.crc32(text.encode()):08x} {text}"
