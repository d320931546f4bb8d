"""Drafts that read the target's hidden states: lossless, and the states are those of the text."""

import itertools

import pytest
import torch

from distill.drafters import eagle3 as training
from eval.decoding.build import build_decoder
from eval.decoding.drafters import eagle3
from eval.decoding.drafters.drafter import Texts
from eval.decoding.drafters.eagle3 import FORMAT, build_eagle3
from eval.decoding.drafters.lookup import lookup_first
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.prompts import Prompt
from tests.eval.decoding.enumeration import assert_exact, played

VOCAB, SIZE, LONGEST = 13, 24, 40
NEVER = frozenset({VOCAB + 1})
LAYERS = (1, 2)
GREEDY = Decoding(Sampling(), NEVER, LONGEST)
ROWS = [[3, 1, 4, 1, 5, 9], [2, 6], [5, 3, 5, 8, 9, 7, 9, 3, 2], [11], [8, 4, 6]]
PROMPTS = [Prompt(str(i), prompt="unused") for i in range(len(ROWS))]


@pytest.fixture(scope="module")
def target(tiny_llama):
    # of a size that no kernel for eight bits takes: all is exact in fp32
    shape = {"hidden_size": SIZE, "intermediate_size": 40, "num_hidden_layers": 3}
    model = tiny_llama(0, 4, vocab_size=VOCAB, num_key_value_heads=2, **shape)
    return Target("tiny", model, None, build_decoder(model, 120), NEVER)


def made_eagle3(target, norm_before_residual=False):
    torch.manual_seed(2)
    config = training.layer_config(target.model.config)
    config.norm_before_residual = norm_before_residual
    model = build_eagle3(config, LAYERS, VOCAB).to_empty(device="cpu")
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(1) if weight.ndim == 1 else weight.normal_(std=0.3)
    model.set_input_embeddings(target.model.get_input_embeddings())
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model


@pytest.fixture(scope="module")
def draft(target):
    """Makes a drafter over every token or only some."""

    def make(ids=None, **norm):
        ids = torch.arange(VOCAB) if ids is None else ids
        model = made_eagle3(target, **norm)
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight[ids].clone())
        return FORMAT.drafter(model, ids, target)

    return make


@pytest.fixture(scope="module")
def serial(target):
    return [
        decode(target.decoder, None, [prompt], [ids], GREEDY, DraftLength(0))[0].tokens
        for prompt, ids in zip(PROMPTS, ROWS, strict=True)
    ]


def known(target, whole, layers):
    states = dict.fromkeys(layers)
    cache = target.decoder.new_cache(1, len(whole))
    target.decoder.forward(torch.tensor([whole]), 0, cache, states=states)
    return states


@pytest.mark.parametrize("count", [1, 2, 5])
def test_greedy_tokens_are_the_targets_own(target, draft, serial, count):
    for drafter in (draft(), draft(torch.arange(0, VOCAB, 2)), lookup_first(draft(), GREEDY.stops)):
        accepted = 0
        for gamma in (1, 4, 7):
            runs = decode(
                target.decoder, drafter, PROMPTS[:count], ROWS[:count], GREEDY, DraftLength(gamma)
            )
            assert [run.tokens for run in runs] == serial[:count]
            accepted += sum(sum(run.accepted) for run in runs)
        assert accepted > 0


def test_rows_that_end_leave_the_others_as_they_are(target, draft, serial):
    stops = frozenset({serial[0][9], serial[2][17]})
    how = Decoding(Sampling(), stops, LONGEST)
    runs = decode(target.decoder, draft(), PROMPTS, ROWS, how, DraftLength(3, 0.2))
    assert len({len(run.tokens) for run in runs}) > 1
    for run, tokens in zip(runs, serial, strict=True):
        assert run.tokens == tokens[: len(run.tokens)]
        assert run.tokens[-1] in stops or len(run.tokens) == LONGEST


def test_each_row_accepts_what_it_accepts_alone(target, draft):
    drafter, length = draft(), DraftLength(3)
    runs = decode(target.decoder, drafter, PROMPTS, ROWS, GREEDY, length)
    for prompt, ids, run in zip(PROMPTS, ROWS, runs, strict=True):
        single = decode(target.decoder, drafter, [prompt], [ids], GREEDY, length)[0]
        assert run.accepted[:7] == single.accepted[:7]


def proposed_along(target, drafter, ids, text):
    """What a session proposes first at each token of `text` but the first, as the text goes on."""
    states = known(target, [*ids, *text[:-1]], drafter.layers)
    upto = {k: v[:, : len(ids)] for k, v in states.items()}
    texts = Texts([[*ids, text[0]]], 100, Sampling(), torch.Generator(), [upto])
    session, found, at = drafter.start(texts), [], 1
    for emitted in itertools.cycle((1, 2, 3)):
        if at + emitted >= len(text):
            return found
        proposal = session.propose(emitted, 0.0).tokens[0].tolist()
        found.append((at, proposal[0]))
        place = len(ids) + at - 1
        given = {k: v[:, place : place + emitted + 1] for k, v in states.items()}
        # as if all but the last were accepted as they stand in the text
        agreed = sum(
            itertools.takewhile(bool, (a == b for a, b in zip(proposal, text[at:], strict=False)))
        )
        session.commit([text[at : at + emitted]], [min(agreed, emitted - 1)], given)
        at += emitted
    return found


def check_proposals(target, draft, serial, **norm):
    drafter = draft(**norm)
    for ids, text in zip(ROWS, serial, strict=True):
        states = known(target, [*ids, *text[:-1]], drafter.layers)
        (q,) = drafter.teacher_forced(ids, text, [Sampling()], states)
        assert q.shape == (1, len(text), VOCAB)
        found = proposed_along(target, drafter, ids, text)
        assert len(found) > 10
        for at, token in found:
            assert token == int(q[0, at].argmax())


def test_what_it_proposes_is_what_alpha_was_taken_on(target, draft, serial):
    check_proposals(target, draft, serial)
    check_proposals(target, draft, serial, norm_before_residual=True)


def off_by_one(session, emitted, accepted, states):
    return {k: v.roll(1, 1) for k, v in states.items()}


def of_other_layers(session, emitted, accepted, states):
    order = [*states.values()]
    return dict(zip(states, [*order[1:], order[0]], strict=True))


@pytest.mark.parametrize("mutant", [off_by_one, of_other_layers])
def test_states_of_another_place_or_layer_are_caught(target, draft, serial, mutant, monkeypatch):
    session = type(
        draft().start(
            Texts([[1, 2]], 9, Sampling(), torch.Generator(), [known(target, [1], LAYERS)])
        )
    )
    commit = session.commit

    def mutated(self, emitted, accepted, states):
        commit(self, emitted, accepted, mutant(self, emitted, accepted, states))

    monkeypatch.setattr(session, "commit", mutated)
    with pytest.raises(AssertionError):
        check_proposals(target, draft, serial)


def test_teacher_forced_reads_only_what_the_target_has_read(target, draft, serial):
    """q before token i changes with the states two tokens earlier, and not with those after."""
    drafter, ids, text = draft(), ROWS[0], serial[0][:9]
    states = known(target, [*ids, *text[:-1]], drafter.layers)
    hot = [Sampling(1.0)]
    (before,) = drafter.teacher_forced(ids, text, hot, states)
    for place in range(len(ids) - 2, len(ids) + len(text) - 1):
        changed = {k: v.clone() for k, v in states.items()}
        for state in changed.values():
            state[:, place] += torch.linspace(-1, 1, SIZE)
        (after,) = drafter.teacher_forced(ids, text, hot, changed)
        same = (after - before).abs().amax(-1)[0] < 1e-6
        first = place + 2 - len(ids)
        assert same[: max(0, first)].all()
        assert first >= len(text) or not same[first]


def test_sampled_batches_keep_the_targets_distribution(tiny_llama, monkeypatch):
    vocab = 5
    shape = {"hidden_size": SIZE, "intermediate_size": 40, "num_hidden_layers": 3}
    model = tiny_llama(0, 4, vocab_size=vocab, num_key_value_heads=2, **shape)
    target = Target("tiny", model, None, build_decoder(model, 40), NEVER)
    kept, own = torch.tensor([0, 1, 3, 4]), made_eagle3(target)
    own.lm_head.weight = torch.nn.Parameter(own.lm_head.weight[kept].clone())
    drafter = FORMAT.drafter(own, kept, target)
    how = Decoding(Sampling(1.5, top_k=2), NEVER, 4)
    assert_exact(
        *(played(monkeypatch), target.decoder, drafter),
        *([[1, 2, 1], [3, 3]], how, DraftLength(2)),
    )


def test_a_long_prompt_is_read_in_pieces(target, draft, serial, monkeypatch):
    whole = known(target, [*ROWS[0], *serial[0]], LAYERS)
    hidden = draft().fused(whole)
    tokens = torch.tensor([[*ROWS[0], *serial[0]]])
    once = draft().decoder.from_start(tokens, hidden)
    monkeypatch.setattr(eagle3, "PIECE", 7)
    torch.testing.assert_close(draft().decoder.from_start(tokens, hidden), once)


def test_a_step_can_be_timed_and_probed(draft):
    drafter = draft()
    for sampling in (Sampling(), Sampling(0.7)):
        drafter.step(20, sampling)()
    assert drafter.probe([1, 2, 3]).isfinite().all()
    assert drafter.bytes > 0
    assert drafter.kv_bytes_per_token > 0
