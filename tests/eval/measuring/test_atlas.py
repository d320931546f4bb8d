"""Token classes by spelling, and what the atlas counts in them."""

import dataclasses

import pytest

from eval.measuring.atlas import build_atlas, classify, scheme_of, telling_prompts
from eval.measuring.runs import Agreement, Answer, RunLog, StepCosts

COSTS = StepCosts(0.001, 0.010, {1: 0.010, 2: 0.0105, 3: 0.011, 4: 0.011, 5: 0.012}, 60)


def classes_of(scheme, *pieces, before=""):
    spelt = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
    return classify(before.encode(), spelt, scheme)


def classes(scheme, *pieces, before=""):
    return dict(zip(pieces, classes_of(scheme, *pieces, before=before), strict=True))


def test_classes_of_code():
    found = classes(
        "code", "    ", "return", " total", " //", " 2.5", "\n\n", "# so", " it is", "\nx", "=None"
    )
    assert found == {
        "    ": "indentation",
        "return": "keyword",
        " total": "identifier",
        " //": "operator",
        " 2.5": "literal",
        "\n\n": "indentation",
        "# so": "comment",
        " it is": "comment",
        "\nx": "identifier",
        "=None": "operator",
    }


def test_a_string_stays_a_literal_up_to_its_end_and_may_begin_in_the_prompt():
    assert (
        classes("code", " if", ' """', " then", before='def f():\n    """ Say')[" if"] == "literal"
    )
    found = classes("code", "'a", " for", "'", " for", "\n")
    assert found["'a"] == found["'"] == "literal"
    assert classes_of("code", "'a", " for", "'", " for") == ["literal"] * 3 + ["keyword"]
    # a broken string ends with its line
    assert classes_of("code", "'a", "\n", "for") == ["literal", "indentation", "keyword"]


CODE, PROSE = ["keyword", "identifier"], ["other", "other"]
PROMPT = "def f(x):\n"


@pytest.mark.parametrize(
    ("before", "pieces", "expected"),
    [
        # the answer's own blocks, the last one not ended
        (
            "",
            ["For", " you", "```python\n", "for", " x", "\n```", " for", " x"],
            [PROSE, CODE, PROSE],
        ),
        ("Say:\n", ["For", " you", "```\n", "for", " x"], [PROSE, CODE]),
        # the prompt leaves a fence open, or is code without one: the first ends it
        ("So:\n```python\n", ["for", " x", "\n```\n", "for", " you"], [CODE, PROSE]),
        (PROMPT, ["for", " x", "\n```\n", "for", " you"], [CODE, PROSE]),
        (
            f"```\n{PROMPT}```\nGo on:\n",
            ["For", " you", "```\n", "for", " x", "\n```"],
            [PROSE, CODE],
        ),
        # a language begins a block all the same
        (PROMPT, ["For", " you", "\n```python\n", "for", " x"], [PROSE, CODE]),
    ],
)
def test_only_fenced_blocks_are_code_where_there_are_any(before, pieces, expected):
    found = zip(pieces, classes_of("code", *pieces, before=before), strict=True)
    classes = [name for piece, name in found if "```" not in piece]
    assert classes == [name for part in expected for name in part]


def test_classes_of_prose():
    text = [
        "The", ' "Licensed', ' Work"', " is", " 15", " U.S.C.", " §", " 107", ",", " Section", " 4",
        " (a)", " provided", " that", " the", " Licensor", " hereby", " pays", " 30", "%", ".",
    ]  # fmt: skip
    assert classes_of("prose", *text) == [
        "other", "defined term", "defined term", "other", "citation", "citation", "citation",
        "citation", "punctuation", "number or section mark", "number or section mark",
        "number or section mark", "boilerplate", "boilerplate", "other", "defined term",
        "boilerplate", "other", "number or section mark", "number or section mark", "punctuation",
    ]  # fmt: skip


def test_half_a_character_and_tokens_without_text_have_a_class():
    found = classes_of("code", "é".encode()[:1], "é".encode()[1:], b"", "x")
    assert found == ["identifier", "identifier", "other", "identifier"]


def test_code_is_told_from_prose():
    code = b"    total = 0\n    for x in xs:\n        total += x\n    return total\n"
    prose = b"The Licensor grants to You a licence.\nIt may be ended at any time (see 4).\n"
    assert scheme_of([code]) == "code"
    assert scheme_of([prose]) == "prose"
    # an answer that is all docstring goes on from code
    docstring = b'def total(items):\n    """Returns the sum of all.'
    assert scheme_of([docstring, docstring, prose]) == "code"
    assert scheme_of([docstring, prose]) == "prose"


def run_of(*answers):
    """A run whose tokens are spelt by SPELT, the others as `<id>`."""

    def spell(token):
        return SPELT[token] if token < len(SPELT) else f" <{token}>".encode()

    return RunLog("", "", "", "", {}, {}, {}, answers=list(answers), spell=spell)


SPELT = [b"x", b" =", b" 1", b"\n", b"y"]


@pytest.fixture
def atlas():
    answers = [
        Answer("b", [], [4, 1, 2, 3] * 5, [1.5] * 20),
        Answer("a", [], [0, 1, 2, 3], [0.0, 0.2, 5.0, 0.2]),
    ]
    agreements = [
        Agreement("a", None, 3.0, 4, [1.0, 1.0, 0.0, 1.0], [0, 1, 9, 3]),
        Agreement("b", None, 15.0, 20, [1.0, 1.0, 0.0, 1.0] * 5, [4, 1, 9, 3] * 5),
    ]
    return build_atlas(agreements, run_of(*answers), COSTS, telling_prompts(agreements))


def test_counts_alpha_and_lost_speedup_of_classes(atlas):
    found = {entry.name: entry for entry in atlas.classes}
    assert atlas.scheme == "code"
    assert {name: entry.positions for name, entry in found.items()} == {
        "identifier": 6,
        "operator": 6,
        "literal": 6,
        "indentation": 6,
    }
    assert atlas.classes[0].name == "literal"
    assert found["literal"].alpha.mean == 0
    assert found["literal"].rejected == 6
    assert found["identifier"].lost_speedup == 0
    # without its only wrong class, the draft would be perfect: 5 tokens in 4 drafts and one call
    assert found["literal"].lost_speedup > 1
    (example,) = found["literal"].examples
    assert example.model_dump() == {"target": " 1", "draft": " <9>", "count": 6, "before": "x ="}


def test_a_position_without_a_proposal_is_an_empty_token():
    answer = Answer("a", [], [0, 3] * 8, [0.0] * 16)
    agreement = Agreement("a", None, 8.0, 16, [0.0, 1.0] * 8, [-1, 4] * 8)
    atlas = build_atlas([agreement], run_of(answer), COSTS, ["a"])
    (wrong,) = atlas.classes[0].examples
    assert (wrong.target, wrong.draft, wrong.count) == ("x", "", 8)
    assert atlas.heat_map[0].guesses == ["", "y"] * 8


def test_what_is_no_text_has_no_class_of_its_own():
    answer = Answer("a", [], [0, 1], [0.0] * 2)
    run = dataclasses.replace(run_of(answer), special=frozenset({1}))
    atlas = build_atlas([Agreement("a", None, 0.0, 2, [0.0] * 2, [1, 1])], run, COSTS, ["a"])
    assert atlas.heat_map[0].tokens == ["x", ""]
    assert atlas.heat_map[0].guesses == [" =", " ="]  # what the draft takes for it has its name


def test_acceptance_by_place_and_entropy(atlas):
    places = [(b.low, b.high, b.positions) for b in atlas.by_output_position]
    assert places == [(1, 8, 12), (9, 16, 8), (17, 32, 4)]
    entropy = {(b.low, b.high): (b.positions, b.alpha.mean) for b in atlas.by_entropy}
    assert entropy == {
        (0.0, 0.1): (1, 1.0),
        (0.1, 0.5): (2, 1.0),
        (1.0, 2.0): (20, 0.75),
        (4.0, None): (1, 0.0),
    }


def test_the_heat_map_leaves_out_answers_that_show_too_little(atlas):
    (text,) = atlas.heat_map
    assert text.prompt == "b"
    assert len(text.tokens) == len(text.values) == len(text.guesses) == 20


def test_the_heat_map_shows_the_lowest_the_middle_and_the_highest():
    alphas = {"a": 12, "b": 3, "c": 20, "d": 5, "short": 0}
    agreements = [Agreement(k, None, v, 4 if k == "short" else 20) for k, v in alphas.items()]
    assert telling_prompts(agreements) == ["b", "a", "c"]
    assert telling_prompts(agreements[:1]) == ["a"]
