"""Prompts for code: the documented functions of Python's standard library.

They are kept as a file, so that every Python trains on the same prompts. They were taken from
CPython 3.11.7 (stdlib-functions.LICENSE).
"""

from __future__ import annotations

from pathlib import Path

from eval.prompts import Prompt, load_prompts


def stdlib_prompts() -> list[Prompt]:
    """A prompt for every function of the standard library with a docstring of suitable length.

    A prompt has imports, signature and docstring, as in HumanEval, because drafts are evaluated on
    HumanEval; methods are written as functions, and some have HumanEval's annotations. A recipe's
    `instruction` tells an Instruct model to write the function. One in 20 prompts begins with
    another function of the module (`category` is "in context").
    """
    return load_prompts(str(Path(__file__).with_name("stdlib-functions.jsonl.gz")))
