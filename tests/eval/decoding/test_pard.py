"""Drafts in one pass from masks: lossless, trained on what they read when they draft."""

import copy

import pytest
import torch

from distill.drafters import pard
from distill.drafters.batch import TrainingBatch
from distill.drafters.pard import KIND, give_mask, read_with_masks, with_mask_row
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


def batch_of(lengths, answers, width=16):
    """Made up: texts of so many tokens, the last ones of each an answer."""
    torch.manual_seed(3)
    ids = torch.zeros((len(lengths), width), dtype=torch.long)
    positions = []
    for row, (length, answer) in enumerate(zip(lengths, answers, strict=True)):
        ids[row, :length] = torch.randint(VOCAB - 1, (length,))
        positions += [row * width + at for at in range(length - answer - 1, length - 1)]
    count = len(positions)
    return TrainingBatch(
        ids,
        torch.tensor(positions),
        torch.zeros((count, 3), dtype=torch.long),
        torch.full((count, 3), -1.5),
        seeds=torch.arange(len(lengths)) + 7,
    )


def check_masks(model):
    """Each mask's state is that of a plain pass over the text up to its anchor and its chain."""
    batch = batch_of([16, 9, 13], [11, 5, 1])
    drawn = pard.draw_masks(batch, GAMMA)
    states = read_with_masks(model, batch, drawn)
    assert states.shape[1] % pard.WIDTH == 0
    whole = with_mask_row(model)
    width = batch.width
    for row, slot, entry, depth in zip(*(part.tolist() for part in drawn), strict=True):
        anchor = int(batch.positions[entry])
        assert anchor // width == row
        assert int(batch.positions[entry + depth]) == anchor + depth
        text = batch.input_ids[row, : anchor % width + 1].tolist()
        plain = whole.model(torch.tensor([[*text, *[MASK] * depth]])).last_hidden_state[0, -1]
        torch.testing.assert_close(states[row, width + slot], plain, rtol=1e-4, atol=1e-4)
    for row in range(len(batch.input_ids)):
        plain = whole.model(batch.input_ids[row : row + 1]).last_hidden_state[0]
        torch.testing.assert_close(states[row, :width], plain, rtol=1e-4, atol=1e-4)
    return drawn


@torch.no_grad()
def test_training_reads_what_drafting_reads(tiny):
    drawn = check_masks(masked(tiny))
    assert set(drawn.depths.tolist()) == set(range(1, GAMMA))
    # no answer of one token has a second one to learn
    assert 2 not in drawn.rows.tolist()


def sees_its_successor(model, **read):
    seen = read["attention_mask"].clone()
    seen[..., 16:, :16] = torch.arange(16) <= read["position_ids"][:, None, 16:, None]
    return read | {"attention_mask": seen}


def a_position_late(model, **read):
    positions = read["position_ids"].clone()
    positions[:, 16:] += 1
    return read | {"position_ids": positions}


@pytest.mark.parametrize("mutant", [sees_its_successor, a_position_late])
@torch.no_grad()
def test_masks_that_see_or_stand_wrong_are_caught(tiny, monkeypatch, mutant):
    model = masked(tiny)
    forward = model.model.forward

    def mutated(*args, **read):
        return forward(*args, **(mutant(model, **read) if "position_ids" in read else read))

    monkeypatch.setattr(model.model, "forward", mutated)
    with pytest.raises(AssertionError):
        check_masks(model)


def test_a_loss_on_masks_alone_reaches_the_mask_and_no_token_behind_the_anchor(tiny):
    model = masked(tiny)
    batch = batch_of([16], [11])
    first, later = KIND.head_inputs(model, batch)
    assert first.states.shape[0] == len(batch.positions)
    assert later.states.shape[0] == len(later.entries) > 0
    (gradient,) = torch.autograd.grad(later.states.sum(), model.mask.weight, retain_graph=True)
    assert gradient.abs().sum() > 0
    (none,) = torch.autograd.grad(first.states.sum(), model.mask.weight)
    assert not none.any()


@pytest.mark.parametrize("tied", [False, True])
def test_engines_read_the_mask_as_a_row_of_the_embedding(tiny_llama, tmp_path, tied):
    model = tiny_llama(2, tie_word_embeddings=tied)
    give_mask(model, MASK, GAMMA)
    with torch.no_grad():
        model.mask.weight.normal_()
    before = model.get_input_embeddings().weight.clone()
    whole = with_mask_row(model)
    whole.save_pretrained(tmp_path)
    assert torch.equal(model.get_input_embeddings().weight, before)
    read = type(model).from_pretrained(tmp_path)
    assert (read.config.pard_token, read.config.pard_tokens) == (MASK, GAMMA)
    assert torch.equal(read.get_input_embeddings().weight[MASK], model.mask.weight[0])
    assert not hasattr(read, "mask")
    ids = torch.tensor([[3, 1, 4, MASK]])
    torch.testing.assert_close(read(ids).logits, whole(ids).logits)


@pytest.mark.parametrize("rows", [1, 2])
def test_sampled_tokens_have_the_targets_distribution(tiny, monkeypatch, rows):
    target = build_decoder(tiny(0, 6), 40)
    draft = drafter_of(masked(tiny, 3, 6), vocab=6, context=40)
    how = Decoding(Sampling(1.5, top_k=2), NEVER, 4)
    assert_exact(
        played(monkeypatch), target, draft, [[4, 0, 5], [1, 2]][-rows:], how, DraftLength(3)
    )
