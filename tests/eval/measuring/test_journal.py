"""What was measured outlives the process, and is not taken for a measurement of anything else."""

import dataclasses
import errno
from pathlib import Path

import pytest

from align.errors import UserError
from eval.decoding.prompt_run import PromptRun
from eval.measuring.cost import StepCosts
from eval.measuring.journal import Journal

RUN = PromptRun("p1", None, 7, [3, 4, 5], 0.1 + 0.2, [1 / 3], [2], [3], [1], True)
COSTS = StepCosts(1e-3, 2e-3, {1: 2e-3, 2: 0.1 + 0.2}, 60)


def squares(journal, rows, unit=None):
    """Squares of the rows; which of them were computed just now."""
    computed = []

    def measure(number, row):
        computed.append(number)
        return row * row

    return journal.each("squares", rows, measure, int, unit), computed


def begun(path, *about):
    journal = Journal(path)
    journal.begin(*(about or ("this",)))
    return journal


def test_a_second_process_measures_only_what_is_missing(tmp_path, capsys):
    path = tmp_path / "deep" / "measured.jsonl"
    with pytest.raises(ZeroDivisionError), begun(path) as journal:
        journal.each("squares", [1, 2, 0, 4], lambda _, row: 4 // row, int, "row")
    said = capsys.readouterr().err
    assert "squares 2" in said
    assert str(path) in said
    with begun(path) as journal:
        assert journal.resumed
        found, computed = squares(journal, [1, 2, 3, 4])
        assert (found, computed) == ([4, 2, 9, 16], [2, 3])
        assert path.exists()
    assert "squares 2" in capsys.readouterr().err
    assert not path.exists()  # the next evaluation measures everything


def test_rows_are_left_out_once_it_is_enough(tmp_path):
    path = tmp_path / "measured.jsonl"

    def all_but(count, rows):
        """The squares of rows until there are so many; which of them were computed."""
        computed = []
        found = begun(path).each(
            "squares",
            rows,
            lambda number, row: computed.append(number) or row * row,
            int,
            None,
            lambda measured: measured >= count,
        )
        return found, computed

    assert all_but(2, [1, 2, 3, 4]) == ([1, 4], [0, 1])
    assert all_but(2, [1, 2, 3, 4]) == ([1, 4], [])  # another process takes it up, and stops there
    assert all_but(3, [1, 2, 3, 4]) == ([1, 4, 9], [2])
    assert all_but(9, [1, 2, 3, 4]) == ([1, 4, 9, 16], [3])


@pytest.mark.parametrize("value", [RUN, COSTS])
def test_what_is_read_back_is_what_was_written(tmp_path, value):
    path = tmp_path / "measured.jsonl"
    first = begun(path).once("one", lambda: value, lambda fields: type(value)(**fields))
    again = begun(path).once("one", None, lambda fields: type(value)(**fields))
    assert first == again == value
    assert dataclasses.asdict(again) == dataclasses.asdict(value)


def test_measurements_of_anything_else_are_not_taken(tmp_path, capsys):
    path = tmp_path / "measured.jsonl"
    squares(begun(path, "this", {"gamma": 3}), [1, 2])
    assert begun(path, "this", {"gamma": 3}).resumed
    capsys.readouterr()
    other = begun(path, "this", {"gamma": 4})
    assert not other.resumed
    assert str(path) in capsys.readouterr().err
    assert squares(other, [1, 2])[1] == [0, 1]


@pytest.mark.parametrize("damage", [b"", b'00000000 ["squares", 2', b"\xff\xfe", b"3\n", b"{}{}\n"])
def test_a_line_that_is_not_whole_is_measured_again(tmp_path, damage):
    path = tmp_path / "measured.jsonl"
    squares(begun(path), [1, 2, 3])
    whole = path.read_bytes()
    path.write_bytes(whole[: whole.rindex(b"\n", 0, -1) + 1] + damage)
    journal = begun(path)
    assert squares(journal, [1, 2, 3]) == ([1, 4, 9], [2])
    assert path.read_bytes() == whole


def test_a_flipped_bit_is_never_read(tmp_path):
    path = tmp_path / "measured.jsonl"
    squares(begun(path), [1, 2, 3])
    whole = path.read_bytes()
    for i in range(len(whole) - 1):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        found, computed = squares(begun(path), [1, 2, 3])
        assert found == [1, 4, 9]
        assert computed  # at the least the row that was hit


def test_of_two_processes_at_one_file_the_first_counts(tmp_path):
    path = tmp_path / "measured.jsonl"
    one = begun(path)
    two = begun(path)
    assert one.each("squares", [1, 2], lambda _, row: row, int, None) == [1, 2]
    assert squares(two, [1, 2]) == ([1, 4], [0, 1])
    assert squares(begun(path), [1, 2]) == ([1, 2], [])


def test_a_full_disk_is_named_and_loses_no_row(tmp_path, monkeypatch):
    path = tmp_path / "measured.jsonl"
    journal = begun(path)
    squares(journal, [1, 2, 3][:2])
    path_open = Path.open

    def full(self, mode="r", *args, **kwargs):
        if self == path and mode == "a":
            raise OSError(errno.ENOSPC, "No space left on device")
        return path_open(self, mode, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        with pytest.raises(UserError, match=r"measured\.jsonl"):
            journal.once("cubes", lambda: 8)
    again = begun(path)
    assert again.results == {"squares": [1, 4]}


def test_a_stage_that_is_added_catches_up_with_the_others(tmp_path):
    """It is measured alone for rows that others have, also where enough rows are measured."""
    path, asked = tmp_path / "measured.jsonl", []

    def together(stages, most):
        def measure(number, row, without):
            asked.append((number, *(stages[i] for i in without)))
            return [f"{stages[i]}{row}" for i in without]

        enough = lambda measured: measured >= most  # noqa: E731
        return begun(path).together(stages, "vwxyz", measure, str, None, enough)

    assert together(["a", "b"], 2) == [["av", "aw"], ["bv", "bw"]]
    assert together(["a", "c"], 1) == [["av", "aw"], ["cv", "cw"]]
    assert together(["b", "a", "d"], 3)[0] == ["bv", "bw", "bx"]
    assert asked[2:] == [(0, "c"), (1, "c"), (0, "d"), (1, "d"), (2, "b", "a", "d")]
    assert [stage for stage in ("a", "d", "", "e") if begun(path).has(stage)] == ["a", "d"]
