"""What was measured outlives the process, and is not taken for a measurement of anything else."""

import dataclasses
import errno
import json
import subprocess
import sys
from pathlib import Path

import pytest

from align.files import DiskFullError
from eval.decoding.build import build_decoder
from eval.decoding.loop import Decoding
from eval.decoding.prompt_run import PromptRun
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring.evaluation import Plan, evaluate
from eval.measuring.journal import Journal
from eval.measuring.runs import StepCosts
from eval.prompts import Prompt, PromptSet

RUN = PromptRun("p1", None, 7, [3, 4, 5], 0.1 + 0.2, [1 / 3], [2], [3], [1], True)
COSTS = StepCosts(1e-3, 2e-3, {1: 2e-3, 2: 0.1 + 0.2}, 60)
COSTS.rounds = [StepCosts(1 / 3, 2e-3, {1: 2e-3, 2: 0.1}, 60)]


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
    assert "Measured so far: squares 2/4. It is kept in" in said
    assert str(path) in said
    with begun(path) as journal:
        assert journal.resumed
        found, computed = squares(journal, [1, 2, 3, 4])
        assert (found, computed) == ([4, 2, 9, 16], [2, 3])
        assert path.exists()
        assert journal.progress() == "squares"
    assert "Measured before, and kept: squares 2/4." in capsys.readouterr().err
    assert not path.exists()  # the next evaluation measures everything


def test_rows_are_left_out_once_it_is_enough(tmp_path):
    path = tmp_path / "measured.jsonl"

    def all_but(count, rows):
        """The squares of rows until there are so many; which of them were computed."""
        computed = []
        journal = begun(path)
        found = journal.each(
            "squares",
            rows,
            lambda number, row: computed.append(number) or row * row,
            int,
            None,
            lambda results: len(results) >= count,
        )
        return found, computed

    assert all_but(2, [1, 2, 3, 4]) == ([1, 4], [0, 1])
    assert all_but(2, [1, 2, 3, 4]) == ([1, 4], [])  # another process takes it up, and stops there
    assert all_but(3, [1, 2, 3, 4]) == ([1, 4, 9], [2])
    assert all_but(9, [1, 2, 3, 4]) == ([1, 4, 9, 16], [3])


@pytest.mark.parametrize("value", [RUN, COSTS])
def test_what_is_read_back_is_what_was_written(tmp_path, value):
    path = tmp_path / "measured.jsonl"
    first = begun(path).once("one", lambda: value, type(value).from_json)
    again = begun(path).once("one", None, type(value).from_json)
    assert first == again == value
    assert dataclasses.asdict(again) == dataclasses.asdict(value)


def test_measurements_of_anything_else_are_not_taken(tmp_path, capsys):
    path = tmp_path / "measured.jsonl"
    squares(begun(path, "this", {"gamma": 3}), [1, 2])
    assert begun(path, "this", {"gamma": 3}).resumed
    assert "measured anew" not in capsys.readouterr().err
    other = begun(path, "this", {"gamma": 4})
    assert not other.resumed
    assert "it is measured anew" in capsys.readouterr().err
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
    for at in range(len(whole) - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        found, computed = squares(begun(path), [1, 2, 3])
        assert found == [1, 4, 9]
        assert computed  # at the least the row that was hit


def test_a_file_of_rubbish_is_replaced(tmp_path):
    path = tmp_path / "measured.jsonl"
    path.write_bytes(b"\x00\x01rubbish")
    assert squares(begun(path), [1, 2]) == ([1, 4], [0, 1])
    assert begun(path).resumed


def test_of_two_processes_at_one_file_the_first_counts(tmp_path):
    path = tmp_path / "measured.jsonl"
    one = begun(path)
    two = begun(path)
    assert one.each("squares", [1, 2], lambda _, row: row, int, None) == [1, 2]
    assert squares(two, [1, 2]) == ([1, 4], [0, 1])
    assert squares(begun(path), [1, 2]) == ([1, 2], [])


def test_rows_outlive_a_kill(tmp_path):
    path = tmp_path / "measured.jsonl"
    script = f"""
import os, signal
from pathlib import Path
from eval.measuring.journal import Journal

def measure(number, row):
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return row * row

with Journal(Path({str(path)!r})) as journal:
    journal.begin("this")
    journal.each("squares", [1, 2, 3], measure, int, None)
"""
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, check=False)
    assert done.returncode == -9
    assert squares(begun(path), [1, 2, 3]) == ([1, 4, 9], [2])


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
        with pytest.raises(DiskFullError, match=r"measured\.jsonl"):
            journal.once("cubes", lambda: 8)
    again = begun(path)
    assert again.taken == {"squares": [1, 4]}


def test_each_line_says_what_it_is(tmp_path):
    path = tmp_path / "measured.jsonl"
    squares(begun(path), [5, 6])
    _, *lines = path.read_text().splitlines()
    assert [json.loads(line.partition(" ")[2]) for line in lines] == [
        ["squares", 0, 2, 25],
        ["squares", 1, 2, 36],
    ]


class BegunError(Exception):
    pass


def test_an_evaluation_depends_on_models_prompts_and_settings(tiny_llama, drafter):
    """Each of them alone makes what was measured a measurement of something else."""
    model = tiny_llama()
    decoder = build_decoder(model, 60)

    def prompts(*ids, **fields):
        return PromptSet("made up", [Prompt("p", prompt="unused", **fields)], [[1, *ids]])

    def asked(seed=None, other=None, path="draft", tuning=None, shown=None, plan=None, **how):
        class Told(Journal):
            def begin(self, *what):
                raise BegunError(json.dumps(what))

        weights = decoder if seed is None else build_decoder(tiny_llama(seed), 60)
        target = Target("tiny", model, None, weights, frozenset({60}))
        other = decoder if other is None else build_decoder(tiny_llama(other), 60)
        draft = drafter(other, path=path)
        settings = {"sampling": Sampling(), "stops": target.stops, "max_new_tokens": 8} | how
        with pytest.raises(BegunError) as begun:
            evaluate(
                *(target, {"draft": draft}, shown or prompts(2), tuning or prompts(3)),
                *(Decoding(**settings), plan or Plan(2, 2, 1), Told(Path("nowhere")), {}),
            )
        return str(begun.value)

    changes = [
        *({"seed": 1}, {"other": 1}, {"path": "lookup-first:draft"}),
        *({"shown": prompts(4)}, {"shown": prompts(2, category="odd")}, {"tuning": prompts(4)}),
        *({"sampling": Sampling(0.7)}, {"sampling": Sampling(0.7, 9)}),
        *({"sampling": Sampling(0.7, None, 0.9)}, {"stops": frozenset({59})}),
        *({"max_new_tokens": 9}, {"rule": "token"}, {"plan": Plan(3, 3, 1)}),
    ]
    begun = [asked(), *(asked(**change) for change in changes)]
    assert len(set(begun)) == len(begun)
    assert asked() == begun[0]
