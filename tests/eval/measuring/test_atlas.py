"""Where a draft is rejected, and which tokens it takes for which."""

import dataclasses

import pytest

from eval.measuring.atlas import build_atlas, telling_prompts
from eval.measuring.runs import Agreement, RunLog, TargetOutput


def run_of(*answers):
    """A run whose tokens are spelt by SPELT, the others as `<id>`."""

    def spell(token):
        return SPELT[token] if token < len(SPELT) else f" <{token}>".encode()

    return RunLog({}, answers=list(answers), spell=spell)


SPELT = [b"x", b" =", b" 1", b"\n", b"y"]


@pytest.fixture
def atlas():
    answers = [
        TargetOutput("b", [], [4, 1, 2, 3] * 5, [1.5] * 20),
        TargetOutput("a", [], [0, 1, 2, 3], [0.0, 0.2, 5.0, 0.2]),
    ]
    agreements = [
        Agreement("a", None, 3.0, 4, [1.0, 1.0, 0.0, 1.0], [0, 1, 9, 3]),
        Agreement("b", None, 15.0, 20, [1.0, 1.0, 0.0, 1.0] * 5, [4, 1, 9, 3] * 5),
    ]
    return build_atlas(agreements, run_of(*answers), telling_prompts(agreements))


def test_confusions_are_counted(atlas):
    (confusion,) = atlas.confusions
    assert confusion.model_dump() == {"target": " 1", "draft": " <9>", "count": 6}


def test_a_position_without_a_proposal_is_an_empty_token():
    answer = TargetOutput("a", [], [0, 3] * 8, [0.0] * 16)
    agreement = Agreement("a", None, 8.0, 16, [0.0, 1.0] * 8, [-1, 4] * 8)
    atlas = build_atlas([agreement], run_of(answer), ["a"])
    (wrong,) = atlas.confusions
    assert (wrong.target, wrong.draft, wrong.count) == ("x", "", 8)
    assert atlas.heat_map[0].guesses == ["", "y"] * 8


def test_special_tokens_have_no_text():
    answer = TargetOutput("a", [], [0, 1], [0.0] * 2)
    run = dataclasses.replace(run_of(answer), special=frozenset({1}))
    atlas = build_atlas([Agreement("a", None, 0.0, 2, [0.0] * 2, [1, 1])], run, ["a"])
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
