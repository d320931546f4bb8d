"""Token classes by spelling, and what the atlas counts in them."""

import pytest

from eval.measuring.atlas import Answer, build_atlas, classify, scheme_of, telling_prompts
from eval.measuring.log import Agreement, StepCosts

COSTS = StepCosts(0.001, 0.010, {1: 0.010, 2: 0.0105, 3: 0.011, 4: 0.011, 5: 0.012}, 60)


def answer(*pieces, before="", entropy=1.0):
    spelt = [piece if isinstance(piece, bytes) else piece.encode() for piece in pieces]
    return Answer("p", spelt, [entropy] * len(spelt), before.encode())


def classes(scheme, *pieces, before=""):
    return dict(zip(pieces, classify(answer(*pieces, before=before), scheme), strict=True))


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
    assert classify(answer("'a", " for", "'", " for"), "code") == ["literal"] * 3 + ["keyword"]
    # a broken string ends with its line
    assert classify(answer("'a", "\n", "for"), "code") == ["literal", "indentation", "keyword"]


def test_only_fenced_blocks_are_code_where_there_are_any():
    found = classify(
        answer("For", " you", ":\n", "```python\n", "for", " x", "\n```", " for"), "code"
    )
    assert found == ["other"] * 4 + ["keyword", "identifier", "other", "other"]


def test_classes_of_prose():
    text = answer(
        "The", ' "Licensed', ' Work"', " is", " 15", " U.S.C.", " §", " 107", ",", " Section", " 4",
        " (a)", " provided", " that", " the", " Licensor", " hereby", " pays", " 30", "%", ".",
    )  # fmt: skip
    assert classify(text, "prose") == [
        "other", "defined term", "defined term", "other", "citation", "citation", "citation",
        "citation", "punctuation", "number or section mark", "number or section mark",
        "number or section mark", "boilerplate", "boilerplate", "other", "defined term",
        "boilerplate", "other", "number or section mark", "number or section mark", "punctuation",
    ]  # fmt: skip


def test_half_a_character_and_tokens_without_text_have_a_class():
    found = classify(answer("é".encode()[:1], "é".encode()[1:], b"", "x"), "code")
    assert found == ["identifier", "identifier", "other", "identifier"]


def test_code_is_told_from_prose():
    code = answer("    total = 0\n    for x in xs:\n        total += x\n    return total\n")
    prose = answer("The Licensor grants to You a licence.\nIt may be ended at any time (see 4).\n")
    assert scheme_of([code]) == "code"
    assert scheme_of([prose]) == "prose"
    # an answer that is all docstring goes on from code
    docstring = answer("the sum", " of all.", before='def total(items):\n    """Returns ')
    assert scheme_of([docstring, docstring, prose]) == "code"
    assert scheme_of([docstring, prose]) == "prose"


@pytest.fixture
def atlas():
    answers = [
        Answer("a", [b"x", b" =", b" 1", b"\n"], [0.0, 0.2, 5.0, 0.2]),
        Answer("b", [b"y", b" =", b" 1", b"\n"] * 5, [1.5] * 20),
    ]
    agreements = [
        Agreement("a", None, 3.0, 4, [1.0, 1.0, 0.0, 1.0], [1, 2, 9, 4]),
        Agreement(
            "b",
            None,
            15.0,
            20,
            [1.0, 1.0, 0.0, 1.0] * 5,
            [1, 2, 9, 4] * 5,
            {0.6: {"exact": 16.0, "greedy_match": 12.0, "target_probability": 8.0}},
        ),
    ]
    shown = telling_prompts(agreements)
    return build_atlas(agreements, answers[::-1], lambda t: f" <{t}>".encode(), COSTS, shown)


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
    def spell(token):
        assert token >= 0
        return b"y"

    answer = Answer("a", [b"x", b"\n"] * 8, [0.0] * 16)
    agreement = Agreement("a", None, 8.0, 16, [0.0, 1.0] * 8, [-1, 2] * 8)
    atlas = build_atlas([agreement], [answer], spell, COSTS, ["a"])
    (wrong,) = atlas.classes[0].examples
    assert (wrong.target, wrong.draft, wrong.count) == ("x", "", 8)
    assert atlas.heat_map[0].guesses == ["", "y"] * 8


def test_acceptance_by_place_entropy_and_rule(atlas):
    places = [(b.low, b.high, b.positions) for b in atlas.by_output_position]
    assert places == [(1, 8, 12), (9, 16, 8), (17, 32, 4)]
    entropy = {(b.low, b.high): (b.positions, b.alpha.mean) for b in atlas.by_entropy}
    assert entropy == {
        (0.0, 0.1): (1, 1.0),
        (0.1, 0.5): (2, 1.0),
        (1.0, 2.0): (20, 0.75),
        (4.0, None): (1, 0.0),
    }
    (rule,) = atlas.verification_rules
    assert rule.temperature == 0.6
    assert rule.exact.model_dump() == {"mean": 0.8, "ci95": (0.8, 0.8), "n": 1}
    assert rule.target_probability.mean == 0.4


def test_the_heat_map_leaves_out_answers_that_show_too_little(atlas):
    (text,) = atlas.heat_map
    assert text.prompt == "b"
    assert len(text.tokens) == len(text.values) == len(text.guesses) == 20


def test_the_heat_map_shows_the_lowest_the_middle_and_the_highest():
    alphas = {"a": 12, "b": 3, "c": 20, "d": 5, "short": 0}
    agreements = [Agreement(k, None, v, 4 if k == "short" else 20) for k, v in alphas.items()]
    assert telling_prompts(agreements) == ["b", "a", "c"]
    assert telling_prompts(agreements[:1]) == ["a"]
