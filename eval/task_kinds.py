"""What kind of task a prompt of code sets, so that a report tells lists from strings from numbers.

The rule looks at nothing but the prompt, which ends in a Python function for the target to write,
as in HumanEval (arXiv 2107.03374). The first that holds:

- `predicate`: it returns a bool, by its annotation or by an example of a call
- `lists`, `strings`, `numbers`: what its first parameter is, by the annotation, or else by the
  first literal that an example gives to it (`f([1, 2])`, `f('a')`, `n = 3`)
- `other`: it does not tell, or is about something else, such as mappings
"""

from __future__ import annotations

import ast
import inspect
import re

_ANNOTATIONS = {
    "lists": r"(list|tuple|set|sequence|iterable)\b",
    "strings": r"str\b",
    "numbers": r"(int|float|complex)\b",
}
_LITERALS = {"lists": r"[\[(]", "strings": r"['\"]", "numbers": r"[-.]?\d"}


def split_task(prompt: str) -> tuple[str, str] | None:
    """The code of a prompt without its last function's docstring, and that docstring.

    None where the prompt does not end in a function that has nothing but a docstring; there may be
    imports before it.
    """
    last = _last_function(prompt)
    if last is None:
        return None
    *imports, end = last.body
    if not (isinstance(end, ast.Expr) and isinstance(end.value, ast.Constant)):
        return None
    docstring = end.value.value
    if not isinstance(docstring, str):
        return None
    if not all(isinstance(node, ast.Import | ast.ImportFrom) for node in imports):
        return None
    lines = prompt.splitlines()[: end.lineno - 1]
    return "\n".join(lines).strip("\n"), inspect.cleandoc(docstring)


def task_kind(prompt: str) -> str | None:
    """The kind of task that a prompt sets; None for one that does not end in a function."""
    last = _last_function(prompt)
    if last is None:
        return None
    described = ast.get_docstring(last) or ""
    if _returns_bool(last, described):
        return "predicate"
    parameters = [*last.args.posonlyargs, *last.args.args]
    return _kind_of(parameters[0], last.name, described) if parameters else "other"


def _last_function(prompt: str) -> ast.FunctionDef | None:
    try:
        last = ast.parse(prompt).body[-1]
    # no Python, a null byte, nothing but comments, nested too deeply for the parser
    except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError):
        return None
    return last if isinstance(last, ast.FunctionDef) else None


def _returns_bool(function: ast.FunctionDef, described: str) -> bool:
    if function.returns is not None:
        return ast.unparse(function.returns) == "bool"
    # what stands after a call: `== True`, ` => true`, ` ➞ False`, or True on the next line
    example = rf"\b{function.name}\(.*\)\W*(true|false)\b"
    return re.search(example, described, flags=re.IGNORECASE) is not None


def _kind_of(parameter: ast.arg, function: str, described: str) -> str:
    if parameter.annotation is not None:
        kinds, texts = _ANNOTATIONS, [ast.unparse(parameter.annotation)]
    else:
        before = rf"\b(?:{function}\(|{parameter.arg}\s*[=:])\s*"
        examples = re.finditer(before, described)
        kinds, texts = _LITERALS, [described[example.end() :] for example in examples]
    for text in texts:
        for kind, beginning in kinds.items():
            if re.match(beginning, text, flags=re.IGNORECASE):
                return kind
    return "other"
