"""Where a draft is rejected, token by token."""

from eval.measuring.heat_map import heat_maps, telling_prompts
from eval.measuring.runs import Agreement, RunLog, TargetOutput

SPELT = [b"x", b" =", b" 1", b"\n", b"y"]


def shown(agreement, tokens, special=frozenset()):
    run = RunLog({}, None, [TargetOutput("a", [], tokens)], SPELT.__getitem__, special)
    (text,) = heat_maps([agreement], run, ["a"])
    return text


def test_a_position_without_a_proposal_is_an_empty_token():
    text = shown(Agreement("a", None, 8.0, 16, [0.0, 1.0] * 8, [-1, 4] * 8), [0, 3] * 8)
    assert (text.tokens, text.guesses) == (["x", "\n"] * 8, ["", "y"] * 8)
    assert (text.values, text.alpha) == ([0.0, 1.0] * 8, 0.5)


def test_special_tokens_have_no_text():
    text = shown(Agreement("a", None, 0.0, 2, [0.0] * 2, [1, 1]), [0, 1], frozenset({1}))
    assert text.tokens == ["x", ""]
    assert text.guesses == [" =", " ="]  # what the draft takes for it has its name


def test_the_heat_map_shows_the_lowest_the_middle_and_the_highest():
    alphas = {"a": 12, "b": 3, "c": 20, "d": 5, "short": 0}
    agreements = [Agreement(k, None, v, 4 if k == "short" else 20) for k, v in alphas.items()]
    assert telling_prompts(agreements) == ["b", "a", "c"]
    assert telling_prompts(agreements[:1]) == ["a"]
