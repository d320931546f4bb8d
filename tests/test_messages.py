"""All error messages stand in one file, for a reader; other tests assert their values and codes.

UPDATE_GOLDEN=1 in the environment writes tests/messages.txt anew.
"""

import ast
from pathlib import Path

from tests.conftest import assert_golden

ROOT = Path(__file__).resolve().parents[1]


def wording(string):
    """The text of a string in the source, with its expressions in braces."""
    parts = string.values if isinstance(string, ast.JoinedStr) else [string]
    return "".join(
        f"{{{ast.unparse(part.value)}}}" if isinstance(part, ast.FormattedValue) else part.value
        for part in parts
    ).replace("\n", "\\n")


def messages(path):
    """Error class and wording of each raise statement with a text."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        match node:
            case ast.Raise(ast.Call(error, [ast.JoinedStr() | ast.Constant(str()) as text, *_])):
                yield f"  {ast.unparse(error)}: {wording(text)}"


def test_all_messages():
    found = {
        path.relative_to(ROOT).as_posix(): sorted(set(messages(path)))
        for room in ("align", "distill", "eval", "recipes")
        for path in sorted((ROOT / room).rglob("*.py"))
    }
    lines = [line for path, texts in found.items() if texts for line in (path, *texts)]
    assert_golden(ROOT / "tests" / "messages.txt", "\n".join(lines) + "\n")
