"""A command line from the fields of a dataclass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from align.command_line import Count, NotNegative, Options, option, parse

ABOUT = "Bake.\n\n    bake RYE --loaves 2\n"


@dataclass(frozen=True)
class Bake(Options):
    flour: str = option("name", positional=True, metavar="FLOUR")
    oven: Path | None = option("its folder", None, one_of="heat")
    stone: bool = option("without an oven", False)
    loaves: Count = option("number", 1, group="dough")
    seed: Sequence[str] = option("repeatable", ())
    salt: NotNegative | None = option("grams", None)
    crust: Literal["thin", "thick"] | None = option("kind", None)

    def refusals(self) -> Iterator[str]:
        if self.stone and self.loaves > 1:
            yield "--stone takes one loaf"


def baked(line, **defaults):
    return parse(Bake, "bake", ABOUT, line.split(), lambda given: defaults)


def test_values_have_the_types_of_their_fields():
    line = "rye --oven o --loaves 2 --seed a --seed b --salt 3 --crust thin"
    assert baked(line) == Bake("rye", Path("o"), False, 2, ["a", "b"], 3.0, "thin")
    assert baked("rye --stone") == Bake("rye", None, True)


def test_what_is_given_has_priority_over_defaults_that_depend_on_it():
    assert baked("rye --oven o", loaves=3).loaves == 3
    assert baked("rye --oven o --loaves 1", loaves=3).loaves == 1


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("rye", "--oven"),
        ("--stone", "FLOUR"),
        ("rye --stone --oven o", "--oven"),
        ("rye --stone --loaves 0", "--loaves"),
        ("rye --stone --loaves 1.5", "1.5"),
        ("rye --stone --salt nan", "--salt"),
        ("rye --stone --crust thinn", "thick"),
        ("rye --stone --loafs 1", "--loafs"),
        ("rye --stone --loaves 2", "--stone"),
    ],
)
def test_a_bad_call_gets_one_sentence_and_status_2(capsys, line, named):
    with pytest.raises(SystemExit, match="2"):
        baked(line)
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert named in error


def test_help_has_groups_defaults_and_examples(capsys):
    with pytest.raises(SystemExit, match="0"):
        baked("--help")
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("heat:", "dough:", "(1) number", "{thin,thick}"))
    assert "    bake RYE --loaves 2" in shown
    assert "(null)" not in shown
