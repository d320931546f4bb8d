"""Replayed draft lengths against the decoder itself, on tiny models."""

import dataclasses

import pytest
import torch

from eval.decoding.build import build_decoder
from eval.decoding.drafters.lookup_first import lookup_first
from eval.decoding.drafters.prompt_lookup import PromptLookup
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring.agreement import measure_agreement, target_texts
from eval.measuring.metrics import alpha
from eval.measuring.replay import Place, best_length, blocks, places, spent
from eval.measuring.runs import StepCosts
from eval.prompts import Prompt, PromptSet

VOCAB = 12
NEVER = frozenset({VOCAB + 1})
IDS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 8], [7], [2, 7, 1], [8, 2], [8, 1, 8], [2], [8, 4, 5]]
SET = PromptSet("made up", [Prompt(f"p{i}", prompt="unused") for i in range(len(IDS))], IDS)
GREEDY = Decoding(Sampling(), NEVER, 30)
GAMMA = 4
COSTS = StepCosts(1.0, 10.0, {1: 10.0, 2: 11.0, 3: 12.0, 4: 13.0, 5: 14.0}, 20)
# every length, and stops that this draft's certainty passes now and then
LENGTHS = [DraftLength(gamma, stop) for gamma in (1, 2, 4) for stop in (0.0, 0.3, 0.7)]


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    return lambda seed: tiny_llama(
        seed, spread=4, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None
    )


@pytest.fixture(scope="module")
def target(tiny):
    model = tiny(0)
    return Target("tiny", model, None, build_decoder(model, 100), NEVER)


@pytest.fixture(scope="module")
def draft(tiny, target, drafter):
    """The target with some noise: right now and then, never sure."""
    model = tiny(0)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.3 * weight.std() * torch.randn(weight.shape, generator=noise)
    return drafter(build_decoder(model, 100), VOCAB)


@pytest.fixture(scope="module")
def lookup(target):
    return PromptLookup(vocab_size=VOCAB, vocabulary={}, device=target.decoder.device)


@pytest.mark.parametrize("kind", ["draft", "lookup", "both"])
def test_every_length_does_in_the_replay_what_it_does_in_the_decoder(target, draft, lookup, kind):
    drafter = {"draft": draft, "lookup": lookup, "both": lookup_first(draft)}[kind]
    texts = places(target, drafter, SET, GREEDY, GAMMA)
    seen = set()
    for length in LENGTHS:
        for batch, text in zip(SET.batches(1), texts, strict=True):
            (run,) = decode(target.decoder, drafter, *batch, GREEDY, length)
            made = list(blocks(text, length))
            # where the decoder has room for a whole draft; the replay drafts on to the end
            whole = sum(1 for left in _left(run) if left > GAMMA)
            assert whole > 2
            assert [drafted for _, drafted, _ in made[:whole]] == run.drafted[:whole]
            assert [emitted for _, _, emitted in made[:whole]] == run.block_tokens[:whole]
            free = [drafted if place.free else 0 for place, drafted, _ in made[:whole]]
            assert free == run.free[:whole]
            seen |= {(drafted, emitted) for _, drafted, emitted in made}
    assert len(seen) > 5  # drafts of several lengths, accepted in part


def _left(run):
    """Tokens that were wanted still as each block began."""
    left = GREEDY.max_new_tokens - 1
    for emitted in run.block_tokens:
        yield left
        left -= emitted


def test_a_text_that_stops_has_no_place_after_its_stop(target, draft):
    (free_run,) = decode(target.decoder, None, *SET.batches(1)[0], GREEDY, DraftLength(0))
    stop = free_run.tokens[6]
    first = free_run.tokens.index(stop)
    stopping = dataclasses.replace(GREEDY, stops=frozenset({stop}))
    one = PromptSet("one", SET.prompts[:1], SET.ids[:1])
    assert len(places(target, draft, one, stopping, GAMMA)[0]) == first


def test_sampled_drafts_are_accepted_as_often_as_p_and_q_overlap(target, draft, journal):
    warm = dataclasses.replace(GREEDY, sampling=Sampling(1.0), max_new_tokens=60)
    accepted = [place.accepted for text in places(target, draft, SET, warm, 1) for place in text]
    texts = target_texts(target, IDS, warm)
    agreements, _ = measure_agreement(target, {"draft": draft}, SET, texts, warm, journal)
    assert set(accepted) == {0, 1}
    # other texts of the same kind
    assert sum(accepted) / len(accepted) == pytest.approx(alpha(agreements["draft"]).mean, abs=0.06)


@pytest.mark.parametrize(
    ("certainty", "accepted", "best"),
    [
        ([1.0] * GAMMA, GAMMA, DraftLength(GAMMA)),  # always right: as long as can be
        ([1.0] * GAMMA, 0, DraftLength(1)),  # always wrong
    ],
)
def test_the_best_length_is_the_fastest(certainty, accepted, best):
    assert best_length([[Place(certainty, accepted, False)] * 12], COSTS, GAMMA) == best


def test_a_draft_that_knows_when_it_is_wrong_stops_then():
    right = ([True] * 5 + [False] * 3) * 4
    text = []
    for at in range(len(right) - GAMMA):
        so_far = [all(right[at : at + i]) for i in range(GAMMA + 1)]
        text.append(Place([1.0 if good else 0.15 for good in so_far[:-1]], sum(so_far) - 1, False))
    best = best_length([text], COSTS, GAMMA)
    assert best.gamma > 1
    assert best.stop_below == 0.2  # the least that stops at 0.15


def test_seconds_are_those_of_the_steps():
    text = [
        Place([1.0, 0.5, 0.1], 2, False),  # drafts 2 above 0.3, both right
        Place([], 0, False),
        Place([], 0, False),
        Place([1.0, 0.2], 0, False),  # 1, wrong
        Place([1.0, 1.0, 1.0], 1, True),  # looked up: 3, one right
    ]
    length = DraftLength(3, 0.3)
    made = [(drafted, emitted) for _, drafted, emitted in blocks(text, length)]
    assert made == [(2, 3), (1, 1), (3, 2)]
    seconds = (2 * 1 + 12) + (1 * 1 + 11) + 13
    assert spent(text, length, COSTS) == (pytest.approx(seconds), 6)
