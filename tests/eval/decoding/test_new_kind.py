"""A new kind of drafter is one file: nearest_state.py goes through all that is measured."""

import importlib.util
from pathlib import Path

import pytest
import torch

from eval.decoding.build import build_decoder
from eval.decoding.drafters.drafter import Texts
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.stock import StockDecoder
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring.evaluation import Plan, evaluate
from eval.prompts import Prompt, PromptSet
from tests.eval.decoding.enumeration import assert_exact, played

spec = importlib.util.spec_from_file_location(
    "nearest_state", Path(__file__).with_name("nearest_state.py")
)
nearest_state = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nearest_state)

VOCAB = 61
STOPS = frozenset({VOCAB + 1})
GREEDY = Decoding(Sampling(), STOPS, 48)
PROMPTS = PromptSet(
    "made up",
    [Prompt(f"p{i}", prompt="unused") for i in range(4)],
    [[3, 14, 15, 9, 3, 14, 15], [9, 2, 9, 2, 9], [6, 5, 35, 8, 6, 5, 35], [1, 2]],
)


@pytest.fixture(scope="module", params=["lean", "stock"])
def target(request, tiny, letters):
    model = tiny(0)
    decoder = build_decoder(model, 120) if request.param == "lean" else StockDecoder(model, 120)
    return Target("tiny", model, letters(VOCAB), decoder, STOPS)


@pytest.fixture
def drafter():
    return nearest_state.NearestState(
        vocab_size=VOCAB,
        vocabulary={"relation": "identical", "strategy": "nearest state", "coverage": 1.0},
        form="no model",
        layers=(1, 2),
    )


@pytest.mark.parametrize("gamma", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 4])
def test_texts_are_the_targets_own(target, drafter, gamma, rows):
    for prompts, ids in PROMPTS.batches(rows):
        runs = decode(target.decoder, drafter, prompts, ids, GREEDY, DraftLength(gamma))
        base = decode(target.decoder, None, prompts, ids, GREEDY, DraftLength(0))
        assert [run.tokens for run in runs] == [run.tokens for run in base]


def test_it_reads_the_states_of_just_the_text(target, drafter):
    """What a session knows after a while is what one pass over the whole text gives."""
    sessions = []
    start = nearest_state.StateSession.__init__

    def watched(session, *given):
        start(session, *given)
        sessions.append(session)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nearest_state.StateSession, "__init__", watched)
        runs = decode(target.decoder, drafter, PROMPTS.prompts, PROMPTS.ids, GREEDY, DraftLength(3))
    assert sum(sum(run.accepted) for run in runs) > 0
    for session, run, ids in zip(sessions, runs, PROMPTS.ids, strict=True):
        whole = [*ids, *run.tokens]
        assert session.text == whole[: len(session.text)]
        states = dict.fromkeys(drafter.layers)
        cache = target.decoder.new_cache(1, len(whole))
        target.decoder.forward(torch.tensor([whole]), 0, cache, states=states)
        expected = nearest_state.features(states)[: len(session.known)]
        torch.testing.assert_close(session.known, expected, atol=1e-4, rtol=1e-4)


def test_states_off_by_one_position_are_caught(target, drafter, monkeypatch):
    commit = nearest_state.StateSession.commit

    def shifted(session, emitted, accepted, states):
        commit(session, emitted, accepted, {k: v.roll(1, 1) for k, v in states.items()})

    monkeypatch.setattr(nearest_state.StateSession, "commit", shifted)
    with pytest.raises(AssertionError):
        test_it_reads_the_states_of_just_the_text(target, drafter)


def test_what_it_proposes_is_what_alpha_was_taken_on(target, drafter):
    text = decode(
        target.decoder, None, PROMPTS.prompts[:1], PROMPTS.ids[:1], GREEDY, DraftLength(0)
    )[0].tokens
    ids = PROMPTS.ids[0]
    states = dict.fromkeys(drafter.layers)
    whole = torch.tensor([[*ids, *text[:-1]]])
    target.decoder.forward(whole, 0, target.decoder.new_cache(1, 100), states=states)
    (q,) = drafter.teacher_forced(ids, text, [Sampling()], states)
    upto = {k: v[:, : len(ids)] for k, v in states.items()}
    texts = Texts([[*ids, text[0]]], 100, Sampling(), torch.Generator(), [upto])
    session = drafter.start(texts)
    for at in range(1, len(text)):
        proposal = session.propose(1, 0.0).tokens[0].tolist()
        assert proposal == q[0, at].nonzero()[:, 0].tolist()
        place = len(ids) + at - 1
        session.commit([[text[at]]], [0], {k: v[:, place : place + 2] for k, v in states.items()})


@pytest.mark.parametrize("target", ["lean"], indirect=True)
def test_it_stands_in_a_report_with_batches_and_temperatures(target, drafter, journal):
    report = evaluate(
        target,
        {"states": drafter},
        PROMPTS,
        PROMPTS,
        GREEDY,
        Plan(None, 3, 4),
        journal,
        {"command": "test"},
    )
    draft = report.drafts["states"]
    assert (draft.lossless.identical, draft.lossless.unexplained) == (4, 0)
    assert 0 < draft.alpha.mean < 1
    assert draft.c > 0
    assert draft.memory.overhead == 0
    assert draft.payoff.verdict


def test_sampled_batches_keep_the_targets_distribution(tiny, monkeypatch):
    """Rows draft unequal numbers: the first has nothing to look up yet."""
    target = build_decoder(tiny(0, 6), 40)
    states = nearest_state.NearestState(vocab_size=6, vocabulary={}, layers=(2,))
    how = Decoding(Sampling(1.5, top_k=2), STOPS, 4)
    texts = [[3], [1, 2, 1, 2, 1]]
    assert_exact(played(monkeypatch), target, states, texts, how, DraftLength(2))
