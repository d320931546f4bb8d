"""PARD: drafts in one pass from masks, trained on what they read when they draft."""

import copy

import torch

from distill.drafters.pard import give_mask, with_mask_row
from eval.decoding import forward
from eval.decoding.build import build_decoder
from eval.decoding.drafters import causal_lm
from eval.decoding.drafters.drafter import Text
from eval.decoding.drafters.pard import PardDrafter
from eval.decoding.verification import Sampling

VOCAB, MASK, GAMMA = 61, 60, 4


def masked(tiny):
    """A model whose mask is not the row of its embedding."""
    model = copy.deepcopy(tiny(0))
    give_mask(model, MASK, GAMMA)
    torch.manual_seed(1)
    with torch.no_grad():
        model.mask.weight.normal_()
    return model


def drafter_of(model):
    decoder = build_decoder(with_mask_row(model), 90)
    return PardDrafter(decoder=decoder, vocab_size=VOCAB, vocabulary={}, mask=MASK, most=GAMMA)


def reference(model, text, count):
    """Its own logits for `count` tokens after a text: the masks behind it, in one plain pass."""
    whole = with_mask_row(model)
    with torch.no_grad():
        return whole(torch.tensor([[*text, *[MASK] * (count - 1)]])).logits[0, len(text) - 1 :]


def test_a_long_prompt_is_read_once(tiny, forwards, monkeypatch):
    for module in (causal_lm, forward):
        monkeypatch.setattr(module, "PIECE", 4)
    drafter, read = drafter_of(masked(tiny)), []
    original = drafter.decoder.forward
    monkeypatch.setattr(
        drafter.decoder,
        "forward",
        lambda tokens, start, *rest, **how: (
            read.extend(range(start, start + tokens.shape[1]))
            or original(tokens, start, *rest, **how)
        ),
    )
    for length in (3, 11):
        read.clear()
        session = drafter.start(
            Text([*range(length)], 80, Sampling(), torch.Generator(), {}, GAMMA)
        )
        session.propose(3)
        assert read == [*range(length + 2)]  # two masks behind the text


def test_it_proposes_what_a_plain_pass_over_text_and_masks_says(tiny, forwards):
    model, text = masked(tiny), [3, 14, 15, 9, 2, 7, 30, 31, 8, 50, 44, 12, 12, 1, 2]
    given = Text(text[:6], 80, Sampling(), torch.Generator(), {}, 3)
    session = drafter_of(model).start(given)
    for end, step in ((6, 2), (8, 1), (9, 3), (12, 1)):
        expected = reference(model, text[:end], GAMMA).argmax(-1).tolist()
        assert session.propose(GAMMA).tokens.tolist() == expected
        session.commit(text[end : end + step], step - 1, {})
