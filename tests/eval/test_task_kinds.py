"""The kind of task of a prompt of code, by examples in the ways that people write them."""

import json

import pytest

from eval.prompts import load_prompts
from eval.task_kinds import task_kind


def prompt(signature, docstring, before=""):
    return f'{before}def {signature}:\n    """ {docstring}\n    """\n'


@pytest.mark.parametrize(
    ("kind", "signature", "docstring"),
    [
        ("lists", "f(xs: List[float], t: float) -> float", "How far apart."),
        ("lists", "f(xs: list)", "The largest of them."),
        ("lists", "f(lst)", "f([4, 1]) == 2"),
        ("lists", "f(lst, x)", "f([\n      [1, 2],\n    ], 1) == [(0, 0)]"),
        ("lists", "f(grid)", "Example:\n    Input: grid = [[1]]\n    Output: 6"),
        ("strings", "f(text: str) -> List[str]", "All beginnings of it."),
        ("strings", "f(s)", "f('Hi') returns 'Hi'"),
        ("strings", "f(s)", 'if s is a word\n    for s = "ab" it is 3'),
        ("numbers", "f(n: int) -> str", "The digits of n."),
        ("numbers", "f(n)", "f(-12) ==> (1, 1)"),
        ("numbers", "f(x, y)", "f(y, x) is the same\n    >>> f(.5, 2)\n    1.0"),
        ("predicate", "f(xs: List[int]) -> bool", "Is one of them negative?"),
        ("predicate", "f(n)", ">>> f(6)\n    False"),
        ("predicate", "f(a, b)", "f(1, (2)) => true"),
        ("predicate", "f(s)", "f('[]') ➞ True"),
        ("lists", "f(xs) -> List[bool]", "f([1]) == [True]"),
        ("numbers", "f(n)", "f(1) == 3; nothing here is True"),
        ("other", "f(pairs: Dict[str, int])", "The largest value."),
        ("other", "f(d)", "f({'a': 1}) == 1"),
        ("other", "f(n)", "How many primes there are below n."),
        ("other", "f()", "The present time."),
    ],
)
def test_kinds(kind, signature, docstring):
    assert task_kind(prompt(signature, docstring)) == kind


def test_the_last_function_is_the_task():
    helper = "import math\n\n\ndef helper(text: str) -> str:\n    return text\n\n\n"
    assert task_kind(prompt("f(n: int)", "n as text.", helper)) == "numbers"
    assert task_kind("def f(grid):\n    import math\n    ''' What fits. '''\n") == "other"


TOO_DEEP = ["-" * 100_000 + "1", "1" + "+1" * 100_000]


@pytest.mark.parametrize(
    "text",
    [
        "SELECT name FROM t",
        "Once upon a time",
        "def f(x):\n",
        "x = 3\n",
        "# none\n",
        "\0",
        *TOO_DEEP,
    ],
)
def test_what_does_not_end_in_a_function_has_no_kind(text):
    assert task_kind(text) is None


def test_a_category_of_ones_own_is_kept_and_conversations_have_none(tmp_path):
    code = prompt("f(n: int)", "n as text.")
    rows = [
        {"prompt": code},
        {"prompt": code, "category": "mine"},
        {"messages": [{"role": "user", "content": code}]},
        {"prompt": "SELECT name"},
    ]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = load_prompts(str(path))
    assert [p.category for p in found] == ["numbers", "mine", None, None]
    assert found[0].prompt == code
