"""N-gram speculation: what it drafts, alone and before a draft."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from align.checkpoint import Checkpoint
from eval.decoding.build import build_decoder
from eval.decoding.drafters.causal_lm import CausalLMDrafter
from eval.decoding.drafters.drafter import Text
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.lookup import (
    AFTER_ONE,
    LONGEST,
    LookupFirst,
    PromptLookup,
    TextIndex,
    looked_up,
    lookup_first,
)
from eval.decoding.drafters.pard import PardDrafter
from eval.decoding.loop import Decoding
from eval.decoding.target import Target
from eval.decoding.verification import Sampling

VOCAB = 40
GREEDY = Decoding(Sampling(), frozenset({VOCAB + 1}), 40)


@pytest.fixture(scope="module")
def target(tiny_llama, forwards):
    model = tiny_llama(0, spread=4, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None)
    return Target(Checkpoint("tiny", Path()), model, build_decoder(model, 100), GREEDY.stops)


def scanned(text, count, shortest=1, stops=GREEDY.stops):
    """What a lookup drafts, by reading the whole text."""
    for length in range(min(LONGEST, len(text) - 1), shortest - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            followed = text[start + length] not in stops
            if followed and text[start : start + length] == text[-length:]:
                copy = list(text)
                for i in range(count if length > 1 else min(count, AFTER_ONE)):
                    if copy[start + length + i] in stops:
                        break
                    copy.append(copy[start + length + i])
                return copy[len(text) :]
    return []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),
        ([1, 2, 3, 8, 2, 3, 7, 1, 2, 3], [8, 2, 3]),  # three tokens go before two
        ([5, 1, 7, 1], [7, 1]),  # of a match of one token
        ([5, 1, 6, 5, 1, 7, 5, 1], [7, 5, 1]),  # the latest place
        ([4, 4, 4], [4, 4, 4]),  # over the end of the text: loops of one, two tokens
        ([4, 4], [4, 4]),
        ([9, 6, 5, 6, 5], [6, 5, 6]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_what_followed_the_last_tokens_before(text, found):
    for count in (3, 1, 0):
        assert scanned(text, count) == found[:count]
        assert TextIndex(text, GREEDY.stops).following(count) == found[:count]


@pytest.mark.parametrize("letters", [1, 2, 3, 8])
def test_an_index_that_grows_drafts_what_a_scan_does(letters):
    draw = random.Random(letters)
    drafted, lengths = 0, set()
    for _ in range(40):
        text = draw.choices(range(letters), k=draw.randrange(12))
        stops = draw.choice((GREEDY.stops, frozenset({0})))
        index = TextIndex(text, stops)
        for _ in range(30):
            count, shortest = draw.randrange(9), draw.choice((1, 2, 3))
            tokens = index.following(count, shortest)
            assert tokens == scanned(text, count, shortest, stops)
            drafted += len(tokens)
            lengths.add(len(tokens))
            # what a block emits: a part of the draft, and the target's own token
            emitted = tokens[: draw.randrange(len(tokens) + 1)] + draw.choices(range(letters))
            index.extend(emitted)
            text += emitted
    assert drafted > 500
    assert lengths == set(range(9))


FENCE, END = 7, 0
CHAT = [1, 2, 9, FENCE, 3, 4, 5, 6, 2, FENCE, END, 1, 8, 2]  # ends in a block of code, and the turn


def test_what_followed_the_last_fence_of_a_prompt_is_not_drafted():
    index = TextIndex([*CHAT, FENCE], frozenset({END}))  # the answer opens one
    assert index.following(4) == [3, 4]  # as the prompt's opening fence was followed
    assert index.following(4, 2) == []
    index.extend([3, 4, 5, 6])
    assert index.following(4) == [2, FENCE]  # and not the end of the turn


@pytest.mark.parametrize("name", ["prompt-lookup", "lookup-first:prompt-lookup"])
def test_the_end_of_a_turn_is_never_drafted(target, name):
    answer = [FENCE, 3, 4, 5, 6, 2, FENCE, END]
    drafted = {}
    for stop in (END, VOCAB + 1):
        drafter = load_drafter(name, dataclasses.replace(target, stops=frozenset({stop})))
        q = drafter.teacher_forced(CHAT, answer, Sampling(), {})
        drafted[stop] = q[:, END].sum(), start(drafter, [*CHAT, FENCE]).propose(2).tokens.tolist()
    assert drafted == {END: (0, [3, 4]), VOCAB + 1: (2, [END, 1])}


def test_a_lookup_reads_no_more_of_a_longer_text():
    class Counted(list):
        reads = 0

        def __getitem__(self, at):
            Counted.reads += len(range(*at.indices(len(self)))) if isinstance(at, slice) else 1
            return super().__getitem__(at)

        def __iter__(self):
            raise AssertionError("the whole text is read")

    reads = set()
    for length in (100, 10_000):
        index = TextIndex([], GREEDY.stops)
        index.tokens = Counted()
        index.extend(range(length))
        Counted.reads = 0
        index.extend([1, 2, 3])
        assert index.following(8) == [4, 5, 6, 7, 8, 9, 10, 11]
        assert index.following(8, 2) == [4, 5, 6, 7, 8, 9, 10, 11]
        reads.add(Counted.reads)
    assert len(reads) == 1


def test_the_log_of_alpha_looks_up_before_every_token():
    draw = random.Random(2)
    ids, text = draw.choices(range(4), k=9), draw.choices(range(4), k=60)
    for shortest in (1, 2):
        scans = [scanned([*ids, *text[:place]], 1, shortest) for place in range(len(text))]
        places, tokens = looked_up(ids, text, GREEDY.stops, shortest)
        assert places == [place for place, tokens in enumerate(scans) if tokens]
        assert tokens == [token for tokens in scans for token in tokens]


def start(drafter, ids):
    return drafter.start(Text([*ids], 60, Sampling(), torch.Generator().manual_seed(1), {}, 3))


@pytest.fixture
def behind(target):
    """A draft behind n-gram speculation: the target itself, always right unless it read wrongly."""
    draft = CausalLMDrafter(vocab_size=VOCAB, path="itself", vocabulary={}, decoder=target.decoder)
    return lookup_first(draft, GREEDY.stops)


def test_a_match_of_two_tokens_takes_no_draft_step(behind, monkeypatch):
    session = start(behind, [1, 2, 3, 9, 1, 2])
    monkeypatch.setattr(session.session, "propose", None)
    tokens, q, free = session.propose(6)
    assert (tokens.tolist(), q, free) == ([3, 9, 1, 2, 3, 9], None, True)


def test_one_pass_of_the_draft_behind_it_is_timed_as_one(target):
    masked = PardDrafter(vocab_size=VOCAB, vocabulary={}, decoder=target.decoder, mask=0)
    assert lookup_first(masked, GREEDY.stops).draft_at_once(20, Sampling(), 3) is not None


def test_it_is_named_before_a_colon(target):
    loaded = load_drafter("lookup-first:prompt-lookup", target)
    assert isinstance(loaded, LookupFirst)
    assert isinstance(loaded.draft, PromptLookup)
    assert loaded.path == "lookup-first:prompt-lookup"
