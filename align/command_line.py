"""Command lines from dataclasses: a field made by `option` is an option, declared once.

pydantic checks a value against the field's annotation. A `bool` is a switch, a `Sequence`
is repeatable. `refusals` says why options cannot be used together.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from align.errors import UserError

Text = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
AtLeastNone = Annotated[int, Field(ge=0)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
UpToOne = Annotated[float, Field(gt=0, le=1)]
BelowOne = Annotated[float, Field(ge=0, lt=1)]
SWITCH: Any = {"nargs": "?", "const": "true"}  # in a recipe's command line: may have a value
INTERRUPTED = 130  # exit status after Ctrl-C, as in shells


def option(text: str, default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """A field that is an option. text: its help.

    more: `group`: heading of this option and those after it; `one_of`: the same, one of them is
    required; `positional`; `metavar`; `choices`, if the annotation has none.
    """
    return dataclasses.field(default=default, metadata={"help": text} | more)


class Options:
    """Base of the dataclasses of options."""

    def refusals(self) -> Iterator[str]:
        """The reasons why the options cannot be used together."""
        yield from ()


T = TypeVar("T", bound=Options)


class Parser(argparse.ArgumentParser):
    """After a bad call it prints one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parser_of(command: type, program: str, about: str, as_text: bool = False) -> Parser:
    """A parser that returns only the options that are given.

    about: a sentence and examples. as_text: values are not read, and a switch may have one.
    """
    if Path(sys.argv[0]).stem == "draftsmith":  # the command of all, see distill/cli.py
        called = f"draftsmith {sys.argv[1]}"
        program, about = called, about.replace(program, called)
    summary, examples, *_ = about.split("\n\n")
    parser = Parser(program, description=summary, epilog=examples, allow_abbrev=not as_text)
    parser.formatter_class = partial(argparse.RawDescriptionHelpFormatter, max_help_position=30)
    parser.argument_default = argparse.SUPPRESS
    group: Any = parser
    hints, usage = typing.get_type_hints(command, include_extras=True), [program]
    for field in dataclasses.fields(command):
        if not (more := field.metadata):
            continue
        if heading := more.get("group") or more.get("one_of"):
            group = parser.add_argument_group(heading)
        if "one_of" in more:
            group = group.add_mutually_exclusive_group(required=True)
        kind, required = hints[field.name], field.default is dataclasses.MISSING
        default = "required" if required else json.dumps(field.default, default=str).strip('"')
        shown = as_text or not (field.default in (None, (), "") or field.default is False)
        text = f"({default}) {more['help']}" if shown else more["help"]
        settings = {"help": text.replace("%", "%%")}
        if as_text:
            settings |= {"metavar": "VALUE"} | (SWITCH if kind is bool else {})
        elif kind is bool:
            settings["action"] = "store_true"
        else:
            settings |= _value(kind, more)
        if more.get("positional"):
            usage.append(more["metavar"])
            group.add_argument(field.name, **settings)
        else:
            group.add_argument(f"--{field.name}", required=required and not as_text, **settings)
    parser.usage = " ".join([*usage, "[--option VALUE ...]"])
    return parser


def parse(
    command: type[T],
    program: str,
    about: str,
    argv: Sequence[str],
    defaults: Callable[[dict[str, Any]], dict[str, Any]] = lambda given: {},
) -> T:
    """The options of a call; a bad call ends with status 2.

    program, about: as for `parser_of`. defaults: their values from the given options.
    """
    parser = parser_of(command, program, about)
    given = vars(parser.parse_args(argv))
    options = command(**(defaults(given) | given))
    for refusal in options.refusals():
        parser.error(refusal)
    return options


def _value(kind: Any, more: Mapping[str, Any]) -> dict[str, Any]:
    """argparse's settings of an option with a value."""
    repeatable = typing.get_origin(kind) is Sequence
    if repeatable:
        (kind,) = typing.get_args(kind)
    adapter = TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False))

    def read(text: str) -> Any:
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            raise argparse.ArgumentTypeError(f"{text!r} {fault(error)}") from None

    choices = more.get("choices") or _choices(kind)
    metavar = more.get("metavar", f"{{{','.join(choices)}}}" if choices else "VALUE")
    settings = {"type": read, "choices": choices or None, "metavar": metavar}
    return settings | ({"action": "append"} if repeatable else {})


def _choices(kind: Any) -> tuple[str, ...]:
    """The values of the Literals in an annotation."""
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is Literal:
        return parts
    return tuple(itertools.chain.from_iterable(map(_choices, parts)))


def fault(error: ValidationError) -> str:
    """What is wrong with a value, as `must be a valid integer`."""
    texts = [part["msg"] for part in error.errors() if part["type"] != "none_required"]
    text = re.sub("(Input|String) should", "must", " or ".join(dict.fromkeys(texts)))
    return text.removeprefix("Value error, ")


def exit_status(
    work: Callable[[], int | None], *bad_input: type[Exception], interrupted: str = "interrupted"
) -> int:
    """The exit status of a command: that of its work, 130 if it is interrupted.

    2 for a UserError, for a missing permission, and for `bad_input`. interrupted: is then printed.
    """
    refused: tuple[type[Exception], ...] = (UserError, PermissionError, *bad_input)
    try:
        return work() or 0
    except refused as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED
