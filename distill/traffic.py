"""Choose the logged rows that a draft is trained and tested on.

The split is by time, never at random: the newest day is the test. Rows are compared newest first.
A row that nearly repeats a newer one, or an evaluation prompt of the run, is dropped. A row is in
the documented form of distill/teacher/logged_rows.py, and `time` is in seconds since 1970.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from align.errors import UserError
from align.files import atomic_file
from align.sources import load_tokenizer, read_json
from distill.prompt_sets import IDS, PROMPTS
from distill.recipe import read_yaml
from distill.teacher.answers import USED, to_answer
from distill.teacher.logged_rows import Row, read_rows
from distill.teacher.store import Answers, Store, names_of
from eval.measuring.intervals import FEWEST_CLUSTERS
from eval.near_duplicates import NearDuplicates
from eval.prompts import Prompt, PromptError, load_prompts, parse_row

DAY = 86_400.0  # seconds


def read_traffic(path: Path) -> list[Row]:
    """The rows of a file, or of all .jsonl and .jsonl.gz files of a folder.

    Raises UserError if there is no row, and for a row without a time.
    """
    files = sorted(path.glob("*.jsonl*")) if path.is_dir() else [path]
    rows = []
    for file in files:
        for number, row in read_rows(str(file)):
            if "time" not in row:
                raise UserError(
                    f"{file}, line {number} has no `time`, so the newest day is not known; log the "
                    "time of each request."
                )
            rows.append(row)
    if not rows:
        raise UserError(f"{path} has no rows; give a .jsonl file of logged rows or their folder.")
    return rows


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    """Write the rows to a file, without their ids, which are unique in one file only."""
    without_id = ({key: row[key] for key in row if key != "id"} for row in rows)
    with atomic_file(path) as file:
        file.writelines(json.dumps(row) + "\n" for row in without_id)


def stored_rows(path: Path) -> list[Row]:
    """The rows that `write_rows` has written; none if there is no such file."""
    return [json.loads(line) for line in path.open(encoding="utf-8")] if path.exists() else []


def usable(
    rows: Iterable[Row],
    evaluated: Iterable[Prompt],
    now: float,
    days: float,
    redact: Sequence[re.Pattern[str]],
    limit: int,
) -> list[Row]:
    """The rows that may be kept, newest first. Prints how many are dropped, and why.

    evaluated: prompts that no row may nearly repeat. now: a row of a later time is dropped, because
    its clock is wrong. days: a row is dropped when it is that old. limit: most rows of the newest
    day, and most rows before it.
    """
    near = NearDuplicates(prompt.text for prompt in evaluated)
    dropped: Counter[str] = Counter()
    kept: list[Row] = []
    counts: Counter[bool] = Counter()
    for row in sorted(rows, key=lambda row: row["time"], reverse=True):
        of_newest_day = not kept or row["time"] > kept[0]["time"] - DAY
        if row["time"] > now:
            dropped["in the future"] += 1
        elif row["time"] <= now - days * DAY:
            dropped[f"older than {days:g} days"] += 1
        elif row.get("consent", True) is not True:
            dropped["without consent"] += 1
        elif any(pattern.search(text) for pattern in redact for text in texts_of(row)):
            dropped["redacted"] += 1
        elif counts[of_newest_day] == limit:
            dropped[f"beyond {limit} rows"] += 1
        elif (text := prompt_text(row)) is None:
            dropped["not readable"] += 1
        elif near.closest(text)[0]:
            dropped["near-duplicates"] += 1
        else:
            near.add(text)
            counts[of_newest_day] += 1
            kept.append(row)
    reasons = ", ".join(f"{count} {reason}" for reason, count in dropped.items())
    print(f"traffic: {len(kept)} rows are kept; dropped: {reasons or 'none'}")
    return kept


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a row, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts_of(part)


def prompt_text(row: Row) -> str | None:
    """The text by which near-duplicates are found; None for a row that is no prompt."""
    try:
        return parse_row(row, "traffic", 0).text
    except PromptError:
        return None


@dataclass(frozen=True)
class Split:
    """Rows to train and to test on. Times are Unix times.

    newest: of the newest row. trained: of the newest row to train on. lacking: why there are too
    few rows; "" if there are enough.
    """

    train: list[Row]
    test: list[Row]
    newest: float
    trained: float
    lacking: str = ""


def split(
    kept: Sequence[Row], run_rows: Sequence[Row], since: float, trained: float, old_share: float
) -> Split:
    """The rows to train and to test on. kept: newest first.

    since: rows up to this time were tested on. trained: rows up to this time trained the served
    draft, as `run_rows` did; `old_share` of the rows to train on are drawn from them.
    """
    newest = kept[0]["time"] if kept else since
    border = max(newest - DAY, since)
    test = [row for row in kept if row["time"] > border]
    new = [row for row in kept if trained < row["time"] <= border]
    if min(len(test), len(new)) < FEWEST_CLUSTERS:
        lacking = (
            f"{len(test)} new rows of the newest day to test on and {len(new)} before it to train "
            f"on; {FEWEST_CLUSTERS} of each are needed."
        )
        return Split([], [], newest, trained, lacking)
    old = [row for row in kept if row["time"] <= trained] + [*run_rows]
    count = min(len(old), round(len(new) * old_share / (1 - old_share)))
    train = new + random.Random(0).sample(old, count)
    print(f"traffic: {len(new)} new rows and {count} old ones to train on, {len(test)} to test on")
    return Split(train, test, newest, new[0]["time"])


def rows_of(run: Path) -> list[Row]:
    """The training prompts of a run with their outputs, as logged rows.

    Raw prompts have no such form, and outputs that are no longer cached are left out.
    """
    recipe, used = read_yaml(run / "recipe.yaml"), read_json(run / USED)
    tokenizer, store = load_tokenizer(recipe["target"]), Store(Path(used["store"]))
    prompts = load_prompts(str(run / PROMPTS / "train.jsonl"))
    ids, times = read_json(run / PROMPTS / IDS)["train"], recipe["answers_per_prompt"]
    names = names_of(to_answer(ids, times, used["count"]), recipe["train_on_prompts"])
    rows = []
    for prompt, prompt_ids, name in zip(prompts * times, ids * times, names, strict=False):
        logged = prompt.logged_output
        if prompt.messages is None or (logged is None and name not in store):
            continue
        if logged is None:
            output = Answers(store, [name])[0].text[len(prompt_ids) :].tolist()
            logged = {"temperature": recipe["answer_temperature"], "token_ids": output}
        text = tokenizer.decode(logged["token_ids"], skip_special_tokens=True)
        turns = [*prompt.messages, {"role": "assistant", "content": text}]
        asked = {"tools": prompt.tools, "chat_template_kwargs": prompt.chat_template_kwargs}
        asked = {key: value for key, value in asked.items() if value is not None}
        rows.append(asked | logged | {"messages": turns})
    return rows
