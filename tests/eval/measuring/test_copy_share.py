"""How much of a response is copied, against a plain search."""

import random

import numpy as np
import pytest

from eval.measuring.copy_share import COPY_TOKENS, copied, described
from eval.measuring.runs import TargetOutput


def plainly(prompt, answer):
    """`copied` by comparing every two places."""
    flags = np.zeros((2, len(answer)), dtype=bool)
    text = [*prompt, *answer]
    for at in range(len(answer) - COPY_TOKENS + 1):
        stretch = answer[at : at + COPY_TOKENS]
        for earlier in range(len(prompt) + at):
            if text[earlier : earlier + COPY_TOKENS] != stretch:
                continue
            if earlier + COPY_TOKENS <= len(prompt):
                flags[0, at : at + COPY_TOKENS] = True
            elif earlier >= len(prompt):
                flags[1, at : at + COPY_TOKENS] = True
    return flags


def test_copies_are_found_where_a_plain_search_finds_them():
    rng = random.Random(1)
    found = 0
    for _ in range(200):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(30))]
        answer = [rng.randrange(2) for _ in range(rng.randrange(40))]
        assert (copied(prompt, answer) == plainly(prompt, answer)).all()
        found += copied(prompt, answer).sum()
    assert found > 100


def test_a_copy_is_eight_tokens_long():
    prompt, new = list(range(100, 120)), list(range(9))
    assert not copied(prompt, [*prompt[:7], *new]).any()
    assert copied(prompt, [*new, *prompt[3:11], 7, 8]).sum(axis=1).tolist() == [8, 0]
    assert copied([], [*new, *new]).sum(axis=1).tolist() == [0, 9]
    assert copied([], [1, 2] * 8).sum(axis=1).tolist() == [0, 14]  # a loop copies itself


def test_shares_are_of_all_tokens():
    text, new = list(range(20)), list(range(100, 110))
    copy = TargetOutput("copy", text, text[:10])
    fresh = TargetOutput("fresh", text, new * 1)
    some = TargetOutput("some", text, [*text[:8], *range(200, 232)])
    report = described([copy, fresh, some])
    assert report.copy_share.either.mean == pytest.approx(18 / 60)
    assert report.copy_share.of_prompt.mean == pytest.approx(18 / 60)
    assert report.copy_share.of_answer.mean == 0
