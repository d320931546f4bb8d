"""Lookup first: what it drafts, and that its draft never reads what was not emitted."""

import pytest
import torch

from eval.decoding.build import build_decoder
from eval.decoding.drafters.causal_lm import CausalLMDrafter
from eval.decoding.drafters.drafter import Texts
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.lookup import LookupFirst, PromptLookup, TextIndex, lookup_first
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring.agreement import measure_agreement, target_texts
from eval.measuring.evaluation import Plan, evaluate
from eval.prompts import Prompt, PromptSet

VOCAB = 40
GREEDY = Decoding(Sampling(), frozenset({VOCAB + 1}), 40)
PROMPTS = [Prompt(f"p{i}", prompt="unused") for i in range(4)]
IDS = [[3, 14, 15, 9, 3, 14], [9, 2], [6, 5, 35, 8, 6, 5], [1, 2, 3, 4, 5, 6, 7]]


@pytest.fixture(scope="module")
def target(tiny_llama, letters):
    model = tiny_llama(0, spread=4, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None)
    return Target("tiny", model, letters(VOCAB), build_decoder(model, 100), GREEDY.stops)


@pytest.fixture
def drafter(target):
    """Its draft is the target itself: always right, unless it has read wrongly."""
    draft = CausalLMDrafter(
        vocab_size=VOCAB,
        path="itself",
        vocabulary={"relation": "identical", "strategy": "direct", "coverage": 1.0},
        bytes=7,
        decoder=target.decoder,
    )
    return lookup_first(draft, GREEDY.stops)


def session_on(drafter, ids, sampling=GREEDY.sampling):
    states = [{} for _ in ids]
    return drafter.start(Texts(ids, 60, sampling, torch.Generator().manual_seed(1), states))


def test_looks_up_where_two_tokens_match_and_drafts_elsewhere(drafter):
    ids = [[1, 2, 3, 9, 1, 2], [7, 8, 7]]
    proposal = session_on(drafter, ids).propose(3, 0.0)
    assert proposal.counts.tolist() == [3, 3]
    assert proposal.tokens[0].tolist() == [3, 9, 1]
    alone = drafter.draft.start(Texts(ids[1:], 60, Sampling(), torch.Generator(), [{}]))
    assert proposal.tokens[1:].tolist() == alone.propose(3, 0.0).tokens.tolist()


def test_a_row_that_is_looked_up_alone_costs_no_draft_step(drafter, monkeypatch):
    session = session_on(drafter, [[1, 2, 3, 9, 1, 2]])
    monkeypatch.setattr(session.session, "propose", None)
    assert session.propose(6, 0.0).tokens.tolist() == [[3, 9, 1, 2, 3, 9]]


def test_after_a_row_was_looked_up_the_draft_reads_what_was_emitted(drafter, tiny_llama):
    other = tiny_llama(5, spread=4, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None)
    drafter.draft.decoder = build_decoder(other, 100)  # would draft other tokens than looked up
    ids = [[1, 2, 3, 9, 1, 2], [7, 8, 7]]
    session = session_on(drafter, ids)
    found = session.propose(3, 0.0).tokens.tolist()
    emitted = [[*found[0], 30], [found[1][0], 31]]
    session.commit(emitted, [3, 1], {})
    now = [text + new for text, new in zip(ids, emitted, strict=True)]
    fresh = drafter.draft.start(Texts(now, 60, Sampling(), torch.Generator(), [{}, {}]))
    assert session.propose(4, 0.0).tokens.tolist() == fresh.propose(4, 0.0).tokens.tolist()


def test_a_short_row_beside_one_that_was_looked_up_far(drafter, tiny_llama):
    """The long row has more to read than the short one has tokens."""
    other = tiny_llama(5, spread=4, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None)
    drafter.draft.decoder = build_decoder(other, 100)
    ids = [[1, 2, 3, 4, 5, 6, 1, 2], [9, 8]]
    session = session_on(drafter, ids)
    found = session.propose(4, 0.0).tokens.tolist()
    assert found[0] == [3, 4, 5, 6]
    emitted = [[*found[0], 30], [31]]
    session.commit(emitted, [4, 0], {})
    now = [text + new for text, new in zip(ids, emitted, strict=True)]
    fresh = drafter.draft.start(Texts(now, 60, Sampling(), torch.Generator(), [{}, {}]))
    assert session.propose(4, 0.0).tokens.tolist() == fresh.propose(4, 0.0).tokens.tolist()


@pytest.mark.parametrize("length", [DraftLength(1), DraftLength(4), DraftLength(6, 0.3)], ids=str)
@pytest.mark.parametrize("batched", [False, True])
def test_texts_are_the_targets_and_drafts_that_are_the_target_are_accepted(
    target, drafter, length, batched
):
    groups = [list(range(4))] if batched else [[i] for i in range(4)]
    drafted = looked_up = 0
    for group in groups:
        prompts, ids = [PROMPTS[i] for i in group], [IDS[i] for i in group]
        base = decode(target.decoder, None, prompts, ids, GREEDY, length)
        runs = decode(target.decoder, drafter, prompts, ids, GREEDY, length)
        for one, other, prompt in zip(base, runs, ids, strict=True):
            assert other.tokens == one.tokens
            at = 1
            blocks = zip(other.block_tokens, other.drafted, other.accepted, strict=True)
            for emitted, count, accepted in blocks:
                if TextIndex(prompt + other.tokens[:at], GREEDY.stops).following(1, 2):
                    looked_up += 1
                else:
                    assert accepted == count
                    drafted += count
                at += emitted
    assert looked_up > 4
    assert drafted > 4


@pytest.mark.parametrize("rows", [[0, 1], [1], [0]])
def test_sampled_q_is_what_each_token_was_drawn_from(drafter, rows):
    ids = [[[1, 2, 3, 9, 1, 2], [7, 8, 7]][row] for row in rows]
    proposal = session_on(drafter, ids, Sampling(0.8)).propose(3, 0.0)
    drawn = drafter.draft.start(
        Texts(ids, 60, Sampling(0.8), torch.Generator().manual_seed(1), [{} for _ in ids])
    ).propose(3, 0.0)
    if rows == [0]:
        assert proposal.q is None  # as for prompt lookup alone: one-hot at what is proposed
        return
    for at, row in enumerate(rows):
        if row == 0:
            assert proposal.q[at].argmax(-1).tolist() == proposal.tokens[at].tolist() == [3, 9, 1]
            assert proposal.q[at].max(-1).values.tolist() == [1, 1, 1]
            assert proposal.q[at].sum(-1).tolist() == [1, 1, 1]
        else:
            assert torch.equal(proposal.q[at], drawn.q[at])
            assert torch.equal(proposal.tokens[at], drawn.tokens[at])


def test_alpha_is_that_of_what_would_be_proposed(target, drafter, journal):
    texts = target_texts(target, IDS, GREEDY)
    prompts = PromptSet("made up", PROMPTS, IDS)
    found, _ = measure_agreement(target, {"both": drafter}, prompts, texts, GREEDY, journal)
    wrong = 0
    for row, ids, text in zip(found["both"], IDS, texts, strict=True):
        for at, guess in enumerate(row.guesses):
            looked_up = TextIndex(ids + text[:at], GREEDY.stops).following(1, 2)
            assert guess == (looked_up[0] if looked_up else text[at])
            wrong += guess != text[at]
    assert wrong > 0


def test_it_stands_in_a_report_like_any_draft(target, drafter, journal):
    prompts = PromptSet("made up", PROMPTS, IDS)
    report = evaluate(
        target,
        {"both": drafter},
        prompts,
        prompts,
        GREEDY,
        Plan(None, 3, 4),
        journal,
        {"command": "test"},
    )
    both = report.drafts["both"]
    assert both.lossless.identical == 4
    assert both.memory.draft_bytes == 7
    assert both.path == "lookup-first:itself"


def test_it_is_named_before_a_colon(target):
    loaded = load_drafter("lookup-first:prompt-lookup", target)
    assert isinstance(loaded, LookupFirst)
    assert isinstance(loaded.draft, PromptLookup)
