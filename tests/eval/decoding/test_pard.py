"""Drafts in one pass from masks: lossless, trained on what they read when they draft."""

import copy

import pytest
import torch

from distill.drafters.pard import give_mask, with_mask_row
from eval.decoding.build import build_decoder
from eval.decoding.drafters.drafter import Texts
from eval.decoding.drafters.lookup import lookup_first
from eval.decoding.drafters.pard import PardDrafter
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.stock import StockDecoder
from eval.decoding.verification import Sampling
from eval.prompts import Prompt
from tests.eval.decoding.enumeration import assert_exact, played

VOCAB, MASK, LONGEST, GAMMA = 61, 60, 40, 4
NEVER = frozenset({VOCAB + 1})
GREEDY = Decoding(Sampling(), NEVER, LONGEST)
ROWS = [[3, 14, 15, 9, 2], [7], [1, 2, 1, 2, 1, 2, 1, 2, 5], [30, 31], [8, 50, 60, 0, 44, 12, 12]]
PROMPTS = [Prompt(str(i), prompt="unused") for i in range(len(ROWS))]


@pytest.fixture(scope="module")
def target(tiny):
    return build_decoder(tiny(0), 90)


def masked(tiny, seed=0, vocab=VOCAB):
    """A model whose mask is not the row of its embedding."""
    model = copy.deepcopy(tiny(seed, vocab))
    give_mask(model, vocab - 1, GAMMA)
    torch.manual_seed(seed + 1)
    with torch.no_grad():
        model.mask.weight.normal_()
    return model


def drafter_of(model, decoder=build_decoder, vocab=VOCAB, context=90, **fields):
    whole = with_mask_row(model)
    return PardDrafter(
        decoder=decoder(whole, context), vocab_size=vocab, vocabulary={}, mask=vocab - 1, **fields
    )


@pytest.fixture(scope="module")
def drafts(tiny):
    own, other = masked(tiny), masked(tiny, 5)
    return {
        "own": drafter_of(own, most=GAMMA),
        "other": drafter_of(other),
        "stock": drafter_of(own, StockDecoder, most=GAMMA),
        "lookup first": lookup_first(drafter_of(own, most=GAMMA), NEVER),
    }


@pytest.fixture(scope="module")
def serial(target):
    return [
        decode(target, None, [prompt], [ids], GREEDY, DraftLength(0))[0].tokens
        for prompt, ids in zip(PROMPTS, ROWS, strict=True)
    ]


@pytest.mark.parametrize("name", ["own", "other", "stock", "lookup first"])
@pytest.mark.parametrize("rows", [1, 5])
def test_greedy_tokens_are_the_targets_own(target, drafts, serial, name, rows):
    for length in (DraftLength(1), DraftLength(3), DraftLength(6), DraftLength(4, 0.2)):
        runs = decode(target, drafts[name], PROMPTS[:rows], ROWS[:rows], GREEDY, length)
        assert [run.tokens for run in runs] == serial[:rows]
        most = max(max(run.drafted) for run in runs)
        assert most <= length.gamma
        if name in ("own", "stock"):  # the first token is what the target itself says
            assert most == min(length.gamma, GAMMA) or length.stop_below
            assert sum(sum(run.accepted) for run in runs) > 0


def reference(model, text, count):
    """Its own logits for `count` tokens after a text: the masks behind it, in one plain pass."""
    whole = with_mask_row(model)
    with torch.no_grad():
        return whole(torch.tensor([[*text, *[MASK] * (count - 1)]])).logits[0, len(text) - 1 :]


@pytest.mark.parametrize("rows", [1, 3])
def test_it_proposes_what_a_plain_pass_over_text_and_masks_says(tiny, target, serial, rows):
    model = masked(tiny)
    texts = [[*ids, *text[:1]] for ids, text in zip(ROWS, serial, strict=True)][:rows]
    given = Texts([*map(list, texts)], 80, Sampling(), torch.Generator(), [{}] * rows)
    session = drafter_of(model, most=GAMMA).start(given)
    for at, step in ((1, 2), (3, 1), (4, 3), (7, 1)):
        proposed = session.propose(GAMMA, 0.0).tokens.tolist()
        for row, ids in enumerate(ROWS[:rows]):
            expected = reference(model, [*ids, *serial[row][:at]], GAMMA).argmax(-1).tolist()
            assert proposed[row] == expected
        emitted = [serial[row][at : at + step] for row in range(rows)]
        session.commit(emitted, [step - 1] * rows, {})


@pytest.mark.parametrize("rows", [1, 2])
def test_sampled_tokens_have_the_targets_distribution(tiny, monkeypatch, rows):
    target = build_decoder(tiny(0, 6), 40)
    draft = drafter_of(masked(tiny, 3, 6), vocab=6, context=40)
    how = Decoding(Sampling(1.5, top_k=2), NEVER, 4)
    assert_exact(
        played(monkeypatch), target, draft, [[4, 0, 5], [1, 2]][-rows:], how, DraftLength(3)
    )
