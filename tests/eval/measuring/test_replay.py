"""Replayed draft lengths against the decoder itself, on tiny models."""

import dataclasses

import pytest
import torch

from eval.decoding.build import build_decoder
from eval.decoding.drafters.lookup import PromptLookup, lookup_first
from eval.decoding.forward import KVCache
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
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
    device = target.decoder.device
    return PromptLookup(vocab_size=VOCAB, vocabulary={}, device=device, stops=GREEDY.stops)


@pytest.mark.parametrize("kind", ["draft", "lookup", "both"])
def test_every_length_does_in_the_replay_what_it_does_in_the_decoder(target, draft, lookup, kind):
    drafter = {"draft": draft, "lookup": lookup, "both": lookup_first(draft, GREEDY.stops)}[kind]
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


class Constant:
    """A decoder whose logits are the same after any text."""

    device, dtype, context_length = torch.device("cpu"), torch.float32, 100

    def __init__(self, p):
        self.logits = torch.tensor(p).log()

    def new_cache(self, rows, slots):
        return KVCache([torch.zeros(rows, 1, slots, 1)], [torch.zeros(rows, 1, slots, 1)])

    def forward(self, tokens, start, cache, last_only=False, states=None):
        width = 1 if last_only else tokens.shape[1]
        return self.logits.expand(len(tokens), width, -1)


def test_sampled_drafts_are_accepted_as_often_as_p_and_q_overlap(drafter):
    p, q = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    warm = dataclasses.replace(GREEDY, sampling=Sampling(1.0), max_new_tokens=60)
    target = Target("constant", None, None, Constant(p), NEVER)
    texts = places(target, drafter(Constant(q), 3), SET, warm, 2)
    accepted = torch.tensor([place.accepted for text in texts for place in text])
    alpha = sum(map(min, p, q))  # 0.7; were q taken for unknown, sum p q = 0.29
    for length, wanted in ((1, alpha), (2, alpha**2)):
        share = float((accepted >= length).float().mean())
        assert share == pytest.approx(wanted, abs=4 * (0.25 / len(accepted)) ** 0.5)


SURE, WRONG, ONE = (
    Place([1.0, sure, sure, sure], accepted, False)
    for sure, accepted in ((0.9, 4), (0.15, 0), (0.15, 1))
)


@pytest.mark.parametrize(
    ("text", "length"),
    [
        ([SURE] * 20, DraftLength(GAMMA)),
        ([WRONG] * 20, DraftLength(1)),
        # sure of four that stand, else of one at most: worth a stop, the first that is high enough
        ([SURE, WRONG, WRONG, WRONG, WRONG, ONE, WRONG] * 5, DraftLength(GAMMA, 0.2)),
    ],
)
def test_the_length_with_the_fewest_seconds_a_token_is_best(text, length):
    assert best_length([text, text], COSTS, GAMMA) == length


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
