"""What the target's answers are: how much of them is copied, how many are the functions asked for.

Copies are what prompt lookup drafts for nothing, so a speed-up is read beside their share. A prompt
that names a function's `entry_point` asks for Python: its answer is a function, or talk about one.
"""

from __future__ import annotations

import ast
import codeop
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from eval.measuring.intervals import Part, Share, share
from eval.measuring.runs import Answer, RunLog
from eval.prompts import Prompt

COPY_TOKENS = 8  # in a row that stand earlier as well: shorter ones are the language's own
COPIED_LITTLE, COPIED_MUCH = 0.1, 0.3  # of an answer, for categories
COPY_CATEGORIES = (  # the least copied first
    f"below {COPIED_LITTLE:.0%} copied",
    f"{COPIED_LITTLE:.0%} to {COPIED_MUCH:.0%} copied",
    f"above {COPIED_MUCH:.0%} copied",
)
FENCE = re.compile(r"^```.*$", flags=re.MULTILINE)
DOCUMENTED = re.compile(r"""\A\s*[rRuU]?(\"{3}|'{3}).*?(\1|\Z)""", flags=re.DOTALL)
SECONDS, BYTES = 5, 2**30  # for one answer that is run


class CopyShare(Part):
    """Share of the answers' tokens in copies of COPY_TOKENS tokens or more."""

    either: Share
    of_prompt: Share
    of_answer: Share = Field(description="of what stands earlier in the answer")


class Answers(Part):
    """The target's own answers to the evaluation prompts."""

    copy_share: CopyShare = Field(
        description="share of the answers' tokens in stretches of at least 8 that stand earlier, "
        "in the prompt or in the answer"
    )
    functions: Share | None = Field(
        description="share that define the function asked for, with a body; null: none is asked for"
    )
    pass_at_1: Share | None = Field(
        description="share whose function passes the prompt's tests; null: not executed"
    )


def copied(prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.bool_]:
    """(2, T) for the answer's tokens: in a copy of the prompt, in a copy of the answer before.

    A copy is a stretch of COPY_TOKENS tokens of the answer that stands in the prompt, or that
    begins earlier in the answer; a loop copies itself.
    """
    flags = np.zeros((2, len(answer)), dtype=bool)
    of_prompt, of_answer = _stretches(prompt), set[tuple[int, ...]]()
    for at in range(len(answer) - COPY_TOKENS + 1):
        stretch = tuple(answer[at : at + COPY_TOKENS])
        flags[0, at : at + COPY_TOKENS] |= stretch in of_prompt
        flags[1, at : at + COPY_TOKENS] |= stretch in of_answer
        of_answer.add(stretch)
    return flags


def _stretches(tokens: Sequence[int]) -> set[tuple[int, ...]]:
    starts = range(len(tokens) - COPY_TOKENS + 1)
    return {tuple(tokens[at : at + COPY_TOKENS]) for at in starts}


def copy_categories(answers: Sequence[Answer]) -> dict[str, str]:
    """Prompt id -> how much of its answer is copied, in words."""
    categories = {}
    for answer in answers:
        part = copied(answer.prompt, answer.tokens).any(axis=0).mean()
        place = int(part >= COPIED_LITTLE) + int(part > COPIED_MUCH)
        categories[answer.prompt_id] = COPY_CATEGORIES[place]
    return categories


def described(run: RunLog) -> Answers | None:
    """`Answers` of a run's log; None where the log holds no answers."""
    if not run.answers:
        return None
    flags = [copied(answer.prompt, answer.tokens) for answer in run.answers]

    def share_of(name: str, parts: list[int]) -> Share:
        rows = [
            (answer.group, float(flag[parts].any(axis=0).sum()), float(flag.shape[1]))
            for answer, flag in zip(run.answers, flags, strict=True)
        ]
        return share(name, rows)

    return Answers(
        copy_share=CopyShare(
            either=share_of("copy_share", [0, 1]),
            of_prompt=share_of("copy_share of the prompt", [0]),
            of_answer=share_of("copy_share of the answer", [1]),
        ),
        functions=_judged("functions", run.answers, [a.is_function for a in run.answers]),
        pass_at_1=_judged("pass_at_1", run.answers, [a.passes for a in run.answers]),
    )


def _judged(name: str, answers: Sequence[Answer], verdicts: Sequence[bool | None]) -> Share | None:
    rows = [
        (answer.group, float(verdict), 1.0)
        for answer, verdict in zip(answers, verdicts, strict=True)
        if verdict is not None
    ]
    return share(name, rows) if rows else None


# --- Functions


def written_code(prompt: Prompt, text: str) -> str:
    """The Python that an answer holds: the fenced block with the function, or all of the text.

    A prompt that is completed as it stands is the beginning of it. Where no block has the function,
    a fence may be missing.
    """
    if prompt.prompt is not None:
        return prompt.prompt + text
    parts = FENCE.split(text)
    inside, outside = parts[1::2], parts[::2]
    return next((part for part in inside + outside if f"def {prompt.entry_point}(" in part), text)


def parsed(code: str) -> tuple[str, ast.Module]:
    """The code up to the last line that parses, since talk may follow it, and its tree."""
    lines = code.splitlines()
    for end in range(len(lines), 0, -1):
        part = "\n".join(lines[:end])
        try:
            return part, ast.parse(part)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
    return "", ast.Module([], [])


def is_function(prompt: Prompt, text: str) -> bool:
    """Whether an answer defines the function that the prompt asks for, and gives it a body.

    An answer that its length has cut within the first statement of the body counts as well.
    """
    code = written_code(prompt, text)
    if any(_cut_in_body(part, prompt) for part in (code, code.rpartition("\n")[0])):
        return True
    return any(
        isinstance(node, ast.FunctionDef) and node.name == prompt.entry_point and _does(node)
        for node in parsed(code)[1].body
    )


def _cut_in_body(code: str, prompt: Prompt) -> bool:
    """Whether this is the beginning of Python, and ends in a statement of the function's body."""
    try:
        whole = codeop.compile_command(code, symbol="exec")
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return False
    header = re.search(
        rf"^def {prompt.entry_point}\(.*?\)[^\n]*:[ ]*(#.*)?$", code, flags=re.MULTILINE | re.DOTALL
    )
    if whole is not None or header is None:
        return False
    body = DOCUMENTED.sub("", code[header.end() :])
    return bool(re.search(r"^[ \t]+[^\s\"'#]", body, flags=re.MULTILINE))


def _does(function: ast.FunctionDef) -> bool:
    """Whether its body is more than words: a docstring, `pass`, `...`."""
    return any(
        not isinstance(node, ast.Pass)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in function.body
    )


# Each piece is compiled alone, so that `from __future__` may begin it, and is no main program.
# An answer that ends the process by itself has not passed.
DRIVER = """
import json, sys
pieces, name = json.load(sys.stdin)
names = {"__name__": "answer"}
for piece in pieces:
    exec(compile(piece, "answer", "exec"), names)
names["check"](names[name])
sys.exit(%d)
"""
PASSED = 77


def passes(prompt: Prompt, text: str) -> bool:
    """Whether the function that an answer defines passes the prompt's tests, by running them.

    In a process of its own with limits on time, memory and files, in an empty folder. That is no
    sandbox: generated code may do what the user who runs this may do.
    """
    pieces = [prompt.code or "", parsed(written_code(prompt, text))[0], prompt.test]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", DRIVER % PASSED],
            text=True,
            cwd=folder,
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=_limit,
        )
        try:
            process.communicate(json.dumps([pieces, prompt.entry_point]), timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return False
        finally:
            with contextlib.suppress(ProcessLookupError):  # what it has started, too
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode == PASSED


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, 2**20))
