"""Drafts from the target's states: lossless, and each token is drafted from what it should."""

import types

import pytest
import torch
import torch.nn.functional as F

from eval.decoding.build import build_decoder
from eval.decoding.drafters.base import Texts
from eval.decoding.drafters.from_states import StateSession
from eval.decoding.drafters.in_turn import SequentialHead
from eval.decoding.drafters.lookup_first import lookup_first
from eval.decoding.drafters.medusa import (
    MedusaConfig,
    MedusaDrafter,
    MedusaModel,
    load_medusa,
    save_medusa,
)
from eval.decoding.drafters.pruned import save_compact
from eval.decoding.drafters.recurrent import (
    RecurrentConfig,
    RecurrentDrafter,
    RecurrentModel,
    load_recurrent,
    recurrent_drafter,
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


def medusa(vocab=VOCAB, head=None, kept=None, rank=4, seed=0, layer=LAYERS, size=SIZE):
    """Random blocks; head [K, size]: what they share."""
    torch.manual_seed(seed)
    rows = vocab if kept is None else len(kept)
    sequential = None
    if rank:
        read = torch.randn(rows + 1, rank)
        read[-1] = 0
        sequential = SequentialHead(read, torch.randn(rows, rank))
    return MedusaDrafter(
        vocab_size=vocab,
        vocabulary={},
        layers=(layer,),
        blocks=[product(0.3 * torch.randn(size, size), torch.randn(size)) for _ in range(DEPTH)],
        head=product(torch.randn(rows, size) if head is None else head),
        token_ids=kept,
        sequential=sequential,
        longest=DEPTH,
        embedding=torch.zeros(vocab, size),
    )


def recurrent(vocab=VOCAB, kept=None, seed=0, layers=(0, LAYERS), size=SIZE, **parts):
    """Random maps, or those given in `parts`."""
    torch.manual_seed(seed)
    rows = vocab if kept is None else len(kept)
    made = {
        "embedding": torch.randn(vocab, size),
        "first": product(0.1 * torch.randn(size, (1 + len(layers)) * size)),
        "further": product(0.1 * torch.randn(size, 2 * size)),
        "head": product(torch.randn(rows, size)),
    }
    return RecurrentDrafter(
        vocab_size=vocab,
        vocabulary={},
        layers=layers,
        token_ids=kept,
        longest=LONGEST,
        **(made | parts),
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
        "plain": medusa(head=head, rank=0),
        "trimmed": medusa(head=head[kept], kept=kept, seed=3),
        "recurrent": recurrent(),
        "recurrent, trimmed": recurrent(kept=kept, seed=3),
    }


@pytest.fixture(scope="module")
def alone(target):
    return [
        decode(target, None, PROMPTS[:1], [ids], GREEDY, DraftLength(0))[0].tokens for ids in IDS
    ]


@pytest.mark.parametrize("stop_below", [0.0, 0.1])
@pytest.mark.parametrize("rows", [1, 2, 5])
@pytest.mark.parametrize("name", ["random", "plain", "trimmed", "recurrent", "recurrent, trimmed"])
def test_greedy_texts_are_the_targets_own(target, drafts, alone, name, rows, stop_below):
    for gamma in (1, 3, DEPTH + 2):
        length = DraftLength(gamma, stop_below)
        runs = decode(target, drafts[name], PROMPTS[:rows], IDS[:rows], GREEDY, length)
        assert [run.tokens for run in runs] == alone[:rows]
        assert max(max(run.drafted) for run in runs) <= min(gamma, drafts[name].longest)


@pytest.mark.parametrize("name", ["plain", "recurrent"])
def test_behind_prompt_lookup_the_texts_stay_the_same(target, drafts, alone, name):
    both = lookup_first(drafts[name])
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
    draft = medusa(head=torch.eye(VOCAB).roll(1, 0), rank=0, size=VOCAB)
    draft.blocks = [
        product(9.0 * torch.eye(VOCAB).roll(depth, 0), None) for depth in range(1, DEPTH + 1)
    ]
    return draft


def perfect_recurrent():
    """From the state's token it is two to the first drafted, and one from each to the next."""
    nothing, one = torch.zeros(VOCAB, VOCAB), torch.eye(VOCAB).roll(1, 0)
    return recurrent(
        layers=(LAYERS,),
        size=VOCAB,
        first=product(torch.cat([nothing, one @ one], 1)),
        further=product(torch.cat([nothing, one], 1)),
        head=product(torch.eye(VOCAB)),
    )


PERFECT = pytest.mark.parametrize("perfect", [perfect_medusa, perfect_recurrent])


@PERFECT
def test_drafts_that_know_what_follows_are_accepted_whole(perfect):
    for rows in (1, 5):
        for gamma in (2, DEPTH):
            length = DraftLength(gamma)
            for run in decode(Counter(), perfect(), PROMPTS[:rows], IDS[:rows], GREEDY, length):
                assert run.accepted == run.drafted
                assert set(run.drafted[:-1]) == {gamma}


def test_a_head_of_another_depth_is_caught(monkeypatch):
    right = MedusaDrafter.logits
    monkeypatch.setattr(
        MedusaDrafter, "logits", lambda self, states, depth: right(self, states, max(0, depth - 1))
    )
    with pytest.raises(AssertionError):
        test_drafts_that_know_what_follows_are_accepted_whole(perfect_medusa)


def test_a_state_of_another_row_is_caught(monkeypatch):
    right = RecurrentDrafter.beside
    monkeypatch.setattr(
        RecurrentDrafter, "beside", lambda self, ids, read: right(self, ids, read.roll(1, 0))
    )
    with pytest.raises(AssertionError):
        test_drafts_that_know_what_follows_are_accepted_whole(perfect_recurrent)


@PERFECT
def test_states_off_by_one_position_are_caught(perfect, monkeypatch):
    commit = StateSession.commit

    def shifted(session, emitted, accepted, states):
        commit(session, emitted, accepted, {k: v.roll(1, 1) for k, v in states.items()})

    monkeypatch.setattr(StateSession, "commit", shifted)
    with pytest.raises(AssertionError):
        test_drafts_that_know_what_follows_are_accepted_whole(perfect)


@pytest.mark.parametrize("ids", [IDS[0], IDS[1]], ids=["a prompt", "a prompt of one token"])
@pytest.mark.parametrize("name", ["plain", "trimmed", "recurrent", "recurrent, trimmed"])
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


@pytest.mark.parametrize("kind", [medusa, recurrent])
@pytest.mark.parametrize("length", [DraftLength(2), DraftLength(3, 0.25)], ids=str)
def test_sampled_tokens_have_the_targets_distribution(tiny, monkeypatch, length, kind):
    vocab = 6
    target, draft = build_decoder(tiny(0, vocab), 40), kind(vocab, seed=5)
    how = Decoding(Sampling(1.5, top_k=2), NEVER, 4)
    assert_exact(played(monkeypatch), target, draft, [[1, 2], [3, 3, 3]], how, length)


@pytest.mark.parametrize("rank", [0, 4])
def test_heads_are_read_as_they_were_saved_and_by_no_other_target(tmp_path, rank):
    kept = torch.arange(0, VOCAB, 2)
    model = MedusaModel(
        MedusaConfig(
            hidden_size=SIZE,
            vocab_size=VOCAB,
            num_heads=3,
            truncated_vocab_size=len(kept),
            sequential_rank=rank,
        )
    )
    embedding = torch.randn(VOCAB, SIZE)
    save_medusa(tmp_path / "heads", model, kept, embedding)
    found, ids = load_medusa(tmp_path / "heads", embedding)
    assert torch.equal(ids, kept)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    with pytest.raises(ValueError, match="was made for another target"):
        load_medusa(tmp_path / "heads", embedding + 1)


def small_recurrent(layers=2):
    torch.manual_seed(0)
    config = RecurrentConfig(
        hidden_size=SIZE, vocab_size=VOCAB, states_read=layers, head_rows=VOCAB // 2
    )
    model = RecurrentModel(config)
    model.sizes.copy_(torch.arange(1, layers + 1) / 4)
    return model.eval()


def test_a_recurrent_draft_is_read_as_it_was_saved_and_by_no_other_target(tmp_path):
    kept, model = torch.arange(1, VOCAB, 2), small_recurrent()
    embedding = model.get_input_embeddings().weight.detach()
    save_compact(tmp_path / "draft", model, kept, embedding, "recurrent", (1, 2))
    found, ids = load_recurrent(tmp_path / "draft", embedding)
    assert torch.equal(ids, kept)
    for name, tensor in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor)
    with pytest.raises(ValueError, match="was made for another target"):
        load_recurrent(tmp_path / "draft", embedding + 1)


def test_a_recurrent_draft_drafts_what_its_model_says(tiny):
    model, target = small_recurrent(), build_decoder(tiny(0), 90)
    target = types.SimpleNamespace(decoder=target)
    target.decoder.embedding = model.get_input_embeddings().weight.detach()
    draft = recurrent_drafter(model, torch.arange(1, VOCAB, 2), target, (1, 2))
    newest, states = torch.tensor([3, 60]), torch.randn(2, 2, SIZE)
    logits = draft.block_logits(states.flatten(1)[:, None], newest)
    with torch.no_grad():
        y = model.after_target(newest, states)
        torch.testing.assert_close(
            logits(0, None), model.lm_head(y), rtol=0.02, atol=0.02 * float(y.abs().max())
        )
        y = model.after_draft(torch.tensor([1, 59]), y)  # the ids of rows 0 and 29
        torch.testing.assert_close(
            logits(1, torch.tensor([0, 29])), model.lm_head(y), rtol=0.02, atol=0.02
        )
