"""What the target's answers are: copies, functions, functions that pass their tests."""

import dataclasses
import random

import numpy as np
import pytest

from eval.measuring.answer_quality import (
    COPY_TOKENS,
    copied,
    copy_categories,
    described,
    is_function,
    passes,
    written_code,
)
from eval.measuring.runs import Answer, RunLog
from eval.prompts import Prompt

ADD = 'def add(a, b):\n    """Their sum."""\n'
TEST = "def check(candidate):\n    assert candidate(1, 2) == 3\n"
ASKED = Prompt("q", None, [{"role": "user", "content": ADD}], None, None, ADD, "add", TEST)
COMPLETED = Prompt("q", ADD, None, None, None, ADD, "add", TEST)


def plainly(prompt, answer):
    """`copied` by comparing every two places."""
    flags = np.zeros((2, len(answer)), dtype=bool)
    text = [*prompt, *answer]
    for at in range(len(answer) - COPY_TOKENS + 1):
        stretch = answer[at : at + COPY_TOKENS]
        for earlier in range(len(prompt) + at):
            if text[earlier : earlier + COPY_TOKENS] != stretch:
                continue
            if earlier + COPY_TOKENS <= len(prompt):
                flags[0, at : at + COPY_TOKENS] = True
            elif earlier >= len(prompt):
                flags[1, at : at + COPY_TOKENS] = True
    return flags


def test_copies_are_found_where_a_plain_search_finds_them():
    rng = random.Random(1)
    found = 0
    for _ in range(200):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(30))]
        answer = [rng.randrange(2) for _ in range(rng.randrange(40))]
        assert (copied(prompt, answer) == plainly(prompt, answer)).all()
        found += copied(prompt, answer).sum()
    assert found > 100


def test_a_copy_is_eight_tokens_long():
    prompt, new = list(range(100, 120)), list(range(9))
    assert not copied(prompt, [*prompt[:7], *new]).any()
    assert copied(prompt, [*new, *prompt[3:11], 7, 8]).sum(axis=1).tolist() == [8, 0]
    assert copied([], [*new, *new]).sum(axis=1).tolist() == [0, 9]
    assert copied([], [1, 2] * 8).sum(axis=1).tolist() == [0, 14]  # a loop copies itself


def run_log(answers):
    return RunLog("t", "torch", "cpu", "float32", {}, {}, {}, answers=answers)


def test_shares_are_of_all_tokens_and_categories_of_each_answer():
    text, new = list(range(20)), list(range(100, 110))
    copy = Answer("copy", text, text[:10], [])
    fresh = Answer("fresh", text, new * 1, [])
    some = Answer("some", text, [*text[:8], *range(200, 232)], [])
    report = described(run_log([copy, fresh, some]))
    assert report.copy_share.either.mean == pytest.approx(18 / 60)
    assert report.copy_share.of_prompt.mean == pytest.approx(18 / 60)
    assert report.copy_share.of_answer.mean == 0
    assert report.functions is None
    assert report.pass_at_1 is None
    assert copy_categories([copy, fresh, some]) == {
        "copy": "above 30% copied",
        "fresh": "below 10% copied",
        "some": "10% to 30% copied",
    }
    assert described(run_log([])) is None


def test_functions_are_counted_among_the_prompts_that_ask_for_one():
    answers = [
        Answer("a", [1], [2], [], is_function=True, passes=False),
        Answer("b", [1], [2], [], is_function=False, passes=False),
        Answer("c", [1], [2], []),
    ]
    report = described(run_log(answers))
    assert report.functions.mean == 0.5
    assert report.functions.n == 2
    assert report.pass_at_1.mean == 0


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (f"Here it is:\n```python\n{ADD}    return a + b\n```\nIt adds.", True),
        (f"```python\n{ADD}    return a + b", True),  # cut before the fence
        (f"{ADD}    return a + b\n", True),  # no fence
        (f"```python\n{ADD}    total = a + b\n    return (tot", True),  # cut in a line
        (f"{ADD}    return a + b\n```\n\nIt adds two numbers.", True),  # only the fence's end
        ("```python\ndef add(a, b):\n    return {\n        'a': a,\n        'b'", True),
        ("```python\ndef add(a, b):\n    return a = b\n```", False),  # no Python
        (f"```python\n{ADD[:-5]}", False),  # cut in its docstring
        (f"```\nadd(1, 2)\n```\nand\n```python\n{ADD}    return a + b\n```", True),
        (f"```python\n{ADD}```", False),  # no body
        (f"```python\n{ADD}    pass\n```", False),
        ("```python\ndef plus(a, b):\n    return a + b\n```", False),
        ("The function `add` takes two numbers and returns their sum.", False),
        (f"`def add(a, b)` is:\n```python\n{ADD}    return a + b\n```", True),
        ("```python\ndef add(\n    a: int,", False),  # cut in its signature
        ('```python\ndef add(a, b):\n    r"""Their sum, in words', False),
        ("", False),
    ],
)
def test_what_is_a_function(text, verdict):
    assert is_function(ASKED, text) is verdict


def test_a_prompt_that_is_completed_is_the_beginning_of_the_function():
    assert is_function(COMPLETED, "    return a + b\n\nadd(1, 2) is")
    assert not is_function(COMPLETED, "This function adds.")
    assert written_code(COMPLETED, "    return a").startswith(ADD)


def test_functions_are_run_on_their_tests():
    assert passes(ASKED, f"```python\n{ADD}    return a + b\n```")
    assert passes(COMPLETED, "    return a + b\n")
    assert not passes(ASKED, f"```python\n{ADD}    return a - b\n```")
    assert not passes(ASKED, "It adds.")
    assert passes(COMPLETED, "    return a + b\n\nIt adds two numbers.")  # talk follows
    assert passes(
        ASKED, f"```python\n{ADD}    return a + b\nif __name__ == '__main__':\n    1 / 0\n```"
    )
    future = dataclasses.replace(ASKED, code=f"from __future__ import annotations\n{ADD}")
    assert passes(future, f"```python\n{future.code}    return a + b\n```")


@pytest.mark.parametrize(
    "end", ["import sys\nsys.exit()", "import os\nos._exit(0)", "raise SystemExit"]
)
def test_an_answer_that_ends_the_process_has_not_passed(end):
    assert not passes(ASKED, f"```python\n{ADD}    return a - b\n{end}\n```")


def test_what_runs_has_no_more_time_memory_and_files_than_it_is_given(tmp_path, monkeypatch):
    monkeypatch.setattr("eval.measuring.answer_quality.SECONDS", 1)
    monkeypatch.chdir(tmp_path)
    body = "    open('made', 'w').write('x')\n    return a + b\n"
    assert passes(COMPLETED, body)
    assert not list(tmp_path.iterdir())
    assert not passes(COMPLETED, "    while True:\n        pass\n")
    assert not passes(COMPLETED, "    return len(bytearray(2**31)) and a + b\n")
    assert not passes(COMPLETED, "    while True:\n        print('x' * 10**6)\n")
