"""Choose the logged rows that a draft is trained and tested on.

The split is by time, never at random: the newest day is the test. Rows are known by their content,
because files of other replicas come late. Rows are compared newest first. A row that nearly repeats
a newer one, or an evaluation prompt of the run, is dropped. A row is in the documented form of
distill/teacher/logged_rows.py, and `time` is in seconds since 1970.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from align.checkpoint import Checkpoint
from align.errors import UserError
from align.files import atomic_file, read_json
from distill.prompt_sets import IDS, PROMPTS
from distill.recipe_files import read_yaml
from distill.teacher.answers import USED, to_answer
from distill.teacher.logged_rows import WITHOUT_HALF, LeftOut, Row, read_rows, texts_of
from distill.teacher.store import Answers, Store, names_of
from eval.measuring.intervals import FEWEST_CLUSTERS
from eval.near_duplicates import NearDuplicates
from eval.prompts import Prompt, PromptError, load_prompts, parse_row

DAY = 86_400.0  # seconds
# also as logrotate names earlier files: a.jsonl.1, a.jsonl-20261127.gz
LOG = re.compile(r"[^.].*\.jsonl([.-]\d[\d.-]*)?(\.gz)?")


def read_traffic(path: Path) -> tuple[list[Row], LeftOut]:
    """The rows of a file, or of all logs of a folder, and what is left out. Prints counts by file.

    Raises UserError if there is no row, or if as many cannot be read.
    """
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    logs = [file for file in files if LOG.fullmatch(file.name) or file == path]
    rows: list[Row] = []
    halves: dict[str, Row] = {}
    total = LeftOut()
    for file in logs:
        left_out, before = LeftOut(), len(rows)
        try:
            for number, row in read_rows(str(file), left_out, halves):
                row.pop("id", None)  # unique in one file only
                if "time" in row:
                    rows.append(row)
                else:
                    left_out.add_unreadable(f"{str(file)!r}, line {number}: it has no `time`")
        except UserError as error:  # a gzip file that is being written, or one that is gone
            left_out.add_unreadable(error)
        print(f"{file}: {len(rows) - before} rows; left out: {left_out}")
        total.counts += left_out.counts
        total.first = total.first or left_out.first
    total.counts[WITHOUT_HALF] += len(halves)
    total.counts["files that are no log"] += len(files) - len(logs)
    if len(rows) <= total.counts["not readable"]:
        raise UserError(
            f"{path} has {len(rows)} rows with a `time`; left out: {total}. Give a .jsonl file of "
            "logged rows, or their folder (docs/recipes.md)."
        )
    return rows, total


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    with atomic_file(path) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def stored_rows(path: Path) -> list[Row]:
    """The rows that `write_rows` has written; none if there is no such file."""
    return [json.loads(line) for line in path.open(encoding="utf-8")] if path.exists() else []


def forget_rows(path: Path, oldest: float) -> None:
    """Delete the rows that `write_rows` has written and that are as old."""
    if path.exists():
        write_rows(path, [row for row in stored_rows(path) if row["time"] > oldest])


def digest(row: Row) -> str:
    """A hash by which the row is known again."""
    return hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def usable(
    rows: Iterable[Row],
    evaluated: Iterable[Prompt],
    now: float,
    days: float,
    redact: Sequence[re.Pattern[str]],
    limit: int,
    left_out: LeftOut,
) -> list[Row]:
    """The rows that may be kept, newest first. Prints how many are dropped, and why.

    evaluated: prompts that no row may nearly repeat. now: a row of a later time is dropped, because
    its clock is wrong. days: a row is dropped when it is that old. limit: most rows of the newest
    day, and most rows before it. left_out: what is dropped, to which these rows are added.
    """
    near = NearDuplicates(prompt.text for prompt in evaluated)
    kept: list[Row] = []
    dropped, counts = left_out.counts, Counter[bool]()
    different = {digest(row): row for row in rows}.values()
    for row in sorted(different, key=lambda row: row["time"], reverse=True):
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
        elif (prompt := as_prompt(row)) is None:
            dropped["not readable"] += 1
        elif prompt.response_format:
            dropped["with a response_format"] += 1
        elif near.repeats(prompt.text):
            dropped["near-duplicates"] += 1
        else:
            near.add(prompt.text)
            counts[of_newest_day] += 1
            kept.append(row)
    age = f", the newest {(now - kept[0]['time']) / 3600:.1f} hours old" if kept else ""
    print(f"traffic: {len(kept)} rows are kept{age}; left out: {left_out}")
    return kept


def as_prompt(row: Row) -> Prompt | None:
    """The row's prompt; None for a row that is none."""
    try:
        return parse_row(row, "traffic", 0)
    except PromptError:
        return None


@dataclass(frozen=True)
class Split:
    """Rows to train and to test on.

    newest: Unix time of the newest row. trained: digests of the stored rows that a draft of this
    split has been trained on. lacking: why there are too few rows; "" if there are enough.
    """

    train: list[Row]
    test: list[Row]
    newest: float
    trained: list[str]
    lacking: str = ""


def split(
    kept: Sequence[Row],
    run_rows: Sequence[Row],
    since: float,
    trained: Iterable[str],
    old_share: float,
) -> Split:
    """The rows to train and to test on. kept: newest first.

    since: rows up to this time were tested on, or were late. trained: digests of rows that trained
    the served draft, as `run_rows` did; `old_share` of the rows to train on are drawn from them.
    The test is the newest day, or more days until there are FEWEST_CLUSTERS rows.
    """
    newest = kept[0]["time"] if kept else since
    fresh = [row for row in kept if row["time"] > since]
    test = fresh[: max(sum(row["time"] > newest - DAY for row in fresh), FEWEST_CLUSTERS)]
    earlier, trained_on = {digest(row): row for row in kept[len(test) :]}, {*trained}
    new = [row for name, row in earlier.items() if name not in trained_on]
    if min(len(test), len(new)) < FEWEST_CLUSTERS:
        lacking = (
            f"{len(test)} new rows of the newest day to test on and {len(new)} before it to train "
            f"on; {FEWEST_CLUSTERS} of each are needed."
        )
        return Split([], [], newest, [], lacking)
    old = [row for name, row in earlier.items() if name in trained_on] + [*run_rows]
    count = min(len(old), round(len(new) * old_share / (1 - old_share)))
    train = new + random.Random(0).sample(old, count)
    print(f"traffic: {len(new)} new rows and {count} old ones to train on, {len(test)} to test on")
    return Split(train, test, newest, [*earlier])


def rows_of(run: Path) -> list[Row]:
    """The training prompts of a run with their outputs, as logged rows.

    Raw prompts have no such form, and outputs that are no longer cached are left out.
    """
    recipe, used = read_yaml(run / "recipe.yaml"), read_json(run / USED)
    tokenizer, store = Checkpoint.open(recipe["target"]).tokenizer, Store(Path(used["store"]))
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
        request = {"tools": prompt.tools, "chat_template_kwargs": prompt.chat_template_kwargs}
        request = {key: value for key, value in request.items() if value is not None}
        rows.append(request | logged | {"messages": turns})
    return rows
