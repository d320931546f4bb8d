"""Drafts from the target's states: lossless, and each token is drafted from what it should."""

import pytest
import torch
import torch.nn.functional as F

from eval.decoding.build import build_decoder
from eval.decoding.drafters.drafter import Texts
from eval.decoding.drafters.lookup import lookup_first
from eval.decoding.drafters.medusa import (
    MedusaDrafter,
    MedusaSession,
)
from eval.decoding.forward import KVCache
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.verification import Sampling
from eval.decoding.weights import Product
from eval.prompts import Prompt
from tests.eval.decoding.enumeration import assert_exact, played

VOCAB, DEPTH, LAYERS, SIZE, LONGEST = 61, 4, 2, 32, 40
NEVER = frozenset({VOCAB + 1})
GREEDY = Decoding(Sampling(), NEVER, LONGEST)
PROMPTS = [Prompt(str(i), prompt="unused") for i in range(5)]
IDS = [[3, 14, 15, 9, 2], [7], [1, 2, 1, 2, 1, 2, 1, 2, 5], [30, 31], [8, 50, 60, 0, 44, 12, 12]]


def product(weight, bias=None):
    return Product(weight, bias)


def medusa(vocab=VOCAB, head=None, kept=None, seed=0, layer=LAYERS, size=SIZE):
    """Random blocks; head [K, size]: what they share."""
    torch.manual_seed(seed)
    rows = vocab if kept is None else len(kept)
    return MedusaDrafter(
        vocab_size=vocab,
        vocabulary={},
        layers=(layer,),
        blocks=[product(0.3 * torch.randn(size, size), torch.randn(size)) for _ in range(DEPTH)],
        head=product(torch.randn(rows, size) if head is None else head),
        token_ids=kept,
        embedding=torch.zeros(vocab, size),
    )


@pytest.fixture(scope="module")
def target(tiny):
    return build_decoder(tiny(0), 90)


@pytest.fixture(scope="module")
def drafts(tiny):
    head = tiny(0).lm_head.weight.detach()
    kept = torch.arange(0, VOCAB, 2)
    return {
        "random": medusa(),
        "plain": medusa(head=head),
        "trimmed": medusa(head=head[kept], kept=kept, seed=3),
    }


@pytest.fixture(scope="module")
def alone(target):
    return [
        decode(target, None, PROMPTS[:1], [ids], GREEDY, DraftLength(0))[0].tokens for ids in IDS
    ]


@pytest.mark.parametrize("stop_below", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", ["random", "plain", "trimmed"])
def test_greedy_texts_are_the_targets_own(target, drafts, alone, name, rows, stop_below):
    for gamma in (1, 3, DEPTH + 2):
        length = DraftLength(gamma, stop_below)
        runs = decode(target, drafts[name], PROMPTS[:rows], IDS[:rows], GREEDY, length)
        assert [run.tokens for run in runs] == alone[:rows]
        assert max(max(run.drafted) for run in runs) <= min(gamma, DEPTH)


def test_behind_prompt_lookup_the_texts_stay_the_same(target, drafts, alone):
    both = lookup_first(drafts["plain"], GREEDY.stops)
    for rows in (1, 5):
        runs = decode(target, both, PROMPTS[:rows], IDS[:rows], GREEDY, DraftLength(DEPTH))
        assert [run.tokens for run in runs] == alone[:rows]
        free = sum(sum(run.free) for run in runs)
        assert 0 < free < sum(sum(run.drafted) for run in runs)  # some looked up, some drafted


class Counter:
    """A target whose text counts on, and whose state says which token it has just read."""

    device, dtype = torch.device("cpu"), torch.float32
    embedding = torch.zeros(VOCAB, VOCAB)

    def new_cache(self, rows, slots):
        return KVCache([torch.zeros(rows, 1, slots, 1)], [torch.zeros(rows, 1, slots, 1)])

    def forward(self, tokens, start, cache, last_only=False, states=None):
        for layer in states or ():
            states[layer] = F.one_hot(tokens, VOCAB).float()
        logits = 9.0 * F.one_hot((tokens + 1) % VOCAB, VOCAB).float()
        return logits[:, -1:] if last_only else logits


def perfect_medusa():
    """Head d turns the state's token into the one d places on, the output head adds one."""
    draft = medusa(head=torch.eye(VOCAB).roll(1, 0), size=VOCAB)
    draft.blocks = [
        product(9.0 * torch.eye(VOCAB).roll(depth, 0), None) for depth in range(1, DEPTH + 1)
    ]
    return draft


def test_drafts_that_know_what_follows_are_accepted_whole():
    for rows in (1, 5):
        for gamma in (2, DEPTH):
            length = DraftLength(gamma)
            for run in decode(
                Counter(), perfect_medusa(), PROMPTS[:rows], IDS[:rows], GREEDY, length
            ):
                assert run.accepted == run.drafted
                assert set(run.drafted[:-1]) == {gamma}


def test_a_head_of_another_depth_is_caught(monkeypatch):
    right = MedusaDrafter.logits
    monkeypatch.setattr(
        MedusaDrafter, "logits", lambda self, states, depth: right(self, states, max(0, depth - 1))
    )
    with pytest.raises(AssertionError):
        test_drafts_that_know_what_follows_are_accepted_whole()


def test_states_off_by_one_position_are_caught(monkeypatch):
    commit = MedusaSession.commit

    def shifted(session, emitted, accepted, states):
        commit(session, emitted, accepted, {k: v.roll(1, 1) for k, v in states.items()})

    monkeypatch.setattr(MedusaSession, "commit", shifted)
    with pytest.raises(AssertionError):
        test_drafts_that_know_what_follows_are_accepted_whole()


@pytest.mark.parametrize("ids", [IDS[0], IDS[1]], ids=["a prompt", "a prompt of one token"])
@pytest.mark.parametrize("name", ["plain", "trimmed"])
def test_what_it_proposes_is_what_alpha_was_taken_on(target, drafts, name, ids):
    draft, how = drafts[name], Sampling(0.8)
    text = decode(target, None, PROMPTS[:1], [ids], GREEDY, DraftLength(0))[0].tokens
    states = dict.fromkeys(draft.layers)
    whole = torch.tensor([[*ids, *text[:-1]]])
    target.forward(whole, 0, target.new_cache(1, 90), states=states)
    (q,) = draft.teacher_forced(ids, text, [how], states)
    assert q.shape == (1, len(text), VOCAB)
    if len(ids) == 1:
        assert q[0, 0].sum() == 0  # nothing was read before the newest token
    upto = {k: v[:, : len(ids)] for k, v in states.items()}
    session = draft.start(Texts([[*ids, text[0]]], 90, how, torch.Generator(), [upto]))
    for at in range(1, len(text)):
        torch.testing.assert_close(session.propose(1, 0.0).q[0, 0], q[0, at])
        place = len(ids) + at - 1
        session.commit([[text[at]]], [0], {k: v[:, place : place + 2] for k, v in states.items()})


@pytest.mark.parametrize("length", [DraftLength(2), DraftLength(3, 0.25)], ids=str)
def test_sampled_tokens_have_the_targets_distribution(tiny, monkeypatch, length):
    vocab = 6
    model = tiny(0, vocab)
    target, draft = build_decoder(model, 40), medusa(vocab, model.lm_head.weight.detach())
    how = Decoding(Sampling(1.5, top_k=2), NEVER, 4)
    assert_exact(played(monkeypatch), target, draft, [[1, 2], [3, 3, 3]], how, length)
