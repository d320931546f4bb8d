"""Prompts for code: the functions of the running interpreter's standard library."""

from __future__ import annotations

import ast
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eval.prompts import Prompt

_SELF = ("self", "cls", "klass")
# Lengths of docstrings in characters. A shorter one says too little for a HumanEval-like prompt.
_SHORTEST, _USUAL, _LONGEST = 50, 500, 700
_SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "turtledemo"}
# Annotations as in HumanEval, because the standard library has almost none.
_PARAMETER_TYPES = {
    "int": "n i k x y index count size maxsize length width height limit level num start stop",
    "str": "s string text name filename path key msg message url prefix suffix word line title",
    "List[int]": "data numbers values",
    "List[str]": "lines words names args iterable seq sequence items files",
}
_RETURN_TYPES = {
    "bool": r"(Return|Returns) (True|true|whether|if)\b|True if|Check|Test (if|whether)",
    "List[str]": r"Returns? (a|the) (sorted )?list",
    "int": r"Returns? (a|the) (number|length|size|count|index|integer)",
    "str": r"Returns? (a|the) (\w+ )?(string|name|text)",
}
_IN_CONTEXT = 0.05  # share of prompts that begin with another function of the module


@dataclass(frozen=True)
class _Function:
    """A documented function of the standard library; a method is written as a function."""

    identity: str
    name: str
    arguments: ast.arguments
    docstring: str
    before: str  # the source of the function before it in the module; "" if this is long


def stdlib_prompts() -> list[Prompt]:
    """A prompt for every function of the standard library with a docstring of suitable length.

    A prompt has imports, signature and docstring, as in HumanEval, because drafts are evaluated on
    HumanEval. A recipe's `instruction` tells an Instruct model to write the function. Some prompts
    begin with another function of the module (`category` is "in context").
    """
    prompts = []
    for function in _documented_functions():
        # seeded by the docstring alone, so other functions of this interpreter change nothing
        rng = random.Random(function.docstring)
        in_context = rng.random() < _IN_CONTEXT and function.before
        typed = rng.random() < 0.6
        signature, imports = _signature(function, typed)
        body = _docstring(function.docstring, rng)
        before, category = (function.before, "in context") if in_context else ("", "alone")
        text = f"{imports}{before}{signature}{body}"
        prompts.append(Prompt(function.identity, text, category=category))
    return prompts


def _documented_functions() -> Iterator[_Function]:
    root = Path(sysconfig.get_paths()["stdlib"])
    docstrings: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED.intersection(parts):
            continue
        try:
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
        except (SyntaxError, UnicodeDecodeError):  # templates, and examples of bad syntax
            continue
        module = ".".join(parts).removesuffix(".py")
        lines = source.split("\n")  # as the parser counts them
        owners: list[ast.Module | ast.ClassDef] = [tree]
        owners += [node for node in tree.body if isinstance(node, ast.ClassDef)]
        for owner in owners:
            before = ""
            for node in owner.body:
                if not isinstance(node, ast.FunctionDef) or node.name.startswith("__"):
                    continue
                docstring = _shortened(ast.get_docstring(node) or "")
                name = node.name.lstrip("_")
                whole = lines[node.lineno - 1 : node.end_lineno]
                source = textwrap.dedent("\n".join(whole)) + "\n"
                if docstring and docstring not in docstrings:
                    docstrings.add(docstring)
                    arguments = _standing_alone(node, owner)
                    identity = f"{module}.{node.name}:{node.lineno}"
                    yield _Function(identity, name, arguments, docstring, before)
                before = source + "\n\n" if len(whole) <= 12 else ""


def _standing_alone(node: ast.FunctionDef, owner: ast.Module | ast.ClassDef) -> ast.arguments:
    """A function's arguments. `self` is removed, or replaced by the class's name if it is alone."""
    arguments = node.args
    if isinstance(owner, ast.ClassDef) and arguments.args and arguments.args[0].arg in _SELF:
        others = arguments.args[1:]
        if not others and not arguments.kwonlyargs and not arguments.vararg:
            name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", owner.name.strip("_")).lower()
            others = [ast.arg(name if name.isidentifier() else "value")]
        arguments.args = others
    return arguments


def _signature(function: _Function, typed: bool) -> tuple[str, str]:
    """`def name(arguments):` and the lines before it, in HumanEval's layout."""
    returns = ""
    if typed:
        kinds = {name: kind for kind, names in _PARAMETER_TYPES.items() for name in names.split()}
        for argument in [*function.arguments.args, *function.arguments.kwonlyargs]:
            if kind := kinds.get(argument.arg):
                argument.annotation = ast.Name(kind)
        for kind, opening in _RETURN_TYPES.items():
            if re.match(opening, function.docstring):
                returns = f" -> {kind}"
                break
    signature = f"def {function.name}({ast.unparse(function.arguments)}){returns}:\n"
    imports = "from typing import List\n\n\n" if "List[" in signature else "\n\n"[: 1 + typed]
    return signature, imports


def _docstring(text: str, rng: random.Random) -> str:
    """The docstring, indented, in one of HumanEval's layouts."""
    opening = rng.choices(['"""', '""" ', '"""\n'], [0.6, 0.2, 0.2])[0]
    return textwrap.indent(f'{opening}{text}\n"""\n', "    ")


def _shortened(docstring: str) -> str:
    """The first paragraphs up to the first examples, as long as in HumanEval; "" if unsuitable."""
    if not docstring.isascii() or '"""' in docstring or "\\" in docstring:
        return ""
    paragraphs = docstring.strip().split("\n\n")
    kept = paragraphs[:1]
    for paragraph in paragraphs[1:]:
        example = paragraph.lstrip().startswith(">>>")
        if example or sum(map(len, kept)) + len(paragraph) <= _USUAL:
            kept.append(paragraph)
        if example:
            break
    text = "\n\n".join(kept)
    return text if _SHORTEST <= len(text) <= _LONGEST else ""
