"""Prompt lookup: what it drafts, and that the output stays the target's."""

import dataclasses
import random

import pytest
import torch

from eval.decoding.build import build_decoder
from eval.decoding.drafters.drafter import Texts
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.lookup import AFTER_ONE, LONGEST, TextIndex, looked_up
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring.agreement import measure_agreement, target_texts
from eval.measuring.evaluation import Plan, evaluate
from eval.measuring.replay import best_length, places
from eval.measuring.runs import StepCosts
from eval.prompts import Prompt, PromptSet

VOCAB = 40
GREEDY = Decoding(Sampling(), frozenset({VOCAB + 1}), 40)
PROMPTS = [Prompt(f"p{i}", prompt="unused") for i in range(3)]
IDS = [[3, 14, 15, 9, 3, 14], [9, 2], [6, 5, 35, 8, 6, 5]]


@pytest.fixture(scope="module")
def target(tiny_llama):
    model = tiny_llama(0, spread=4, vocab_size=VOCAB, eos_token_id=None, bos_token_id=None)
    return Target("tiny", model, None, build_decoder(model, 100), GREEDY.stops)


@pytest.fixture
def lookup(target):
    return load_drafter("prompt-lookup", target)


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
        (q,) = drafter.teacher_forced(CHAT, answer, [Sampling()], {})
        texts = Texts([[*CHAT, FENCE]], 99, Sampling(), torch.Generator(), [{}])
        drafted[stop] = q[0, :, END].sum(), drafter.start(texts).propose(2, 0.0).tokens.tolist()
    assert drafted == {END: (0, [[3, 4]]), VOCAB + 1: (2, [[END, 1]])}


@pytest.mark.parametrize("name", ["prompt-lookup", "lookup-first:prompt-lookup"])
def test_sessions_look_up_each_row_of_its_own_as_others_leave(target, name):
    draw = random.Random(1)
    texts = [draw.choices(range(3), k=draw.randrange(1, 9)) for _ in range(6)]
    drafter = load_drafter(name, target)
    session = drafter.start(Texts([*map(list, texts)], 99, Sampling(), torch.Generator(), [{}] * 6))
    while texts:
        for _ in range(3):
            proposal = session.propose(5, 0.0)
            counts = proposal.counts.tolist() if proposal.counts is not None else None
            for row, text in enumerate(texts):
                end = counts[row] if counts else None
                assert proposal.tokens[row].tolist()[:end] == scanned(text, 5)
            emitted = [draw.choices(range(3), k=draw.randrange(1, 4)) for _ in texts]
            session.commit(emitted, [0] * len(texts), {})
            texts = [text + new for text, new in zip(texts, emitted, strict=True)]
        # one leaves, the others change places
        rows = draw.sample(range(len(texts)), len(texts) - 1)
        session.keep(rows)
        texts = [texts[row] for row in rows]


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


def test_without_a_match_nothing_is_drafted(target, lookup):
    ids = [[1, 2, 3], [7, 8, 7]]
    session = lookup.start(Texts(ids, 50, Sampling(), torch.Generator(), [{}, {}]))
    proposal = session.propose(4, 0.0)
    assert proposal.counts.tolist() == [0, 2]
    assert proposal.tokens[1].tolist() == [8, 7]
    session.commit([[1], [9]], [0, 0], {})
    proposal = session.propose(4, 0.0)
    assert proposal.counts.tolist() == [2, 0]
    assert proposal.tokens[0].tolist() == [2, 3]
    session.keep([1])
    assert session.propose(4, 0.0).tokens.shape == (1, 0)


@pytest.mark.parametrize("length", [DraftLength(1), DraftLength(4), DraftLength(4, 0.4)], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_output_is_the_targets_own(target, lookup, length, temperature):
    how = Decoding(Sampling(temperature), GREEDY.stops, 40)
    base = [
        decode(target.decoder, None, [prompt], [ids], how, length)[0]
        for prompt, ids in zip(PROMPTS, IDS, strict=True)
    ]
    for runs in (
        [
            decode(target.decoder, lookup, [prompt], [ids], how, length)[0]
            for prompt, ids in zip(PROMPTS, IDS, strict=True)
        ],
        decode(target.decoder, lookup, PROMPTS, IDS, how, length),
    ):
        assert all(len(run.tokens) == 40 for run in runs)
        # where nothing matches a block is one token of the target's alone
        assert any(0 in run.drafted for run in runs)
        if temperature == 0:
            assert [run.tokens for run in runs] == [run.tokens for run in base]
            assert sum(sum(run.accepted) for run in runs) > 0


def test_alpha_counts_the_tokens_it_would_have_got(target, lookup, journal):
    texts = target_texts(target, IDS, GREEDY)
    prompts = PromptSet("made up", PROMPTS, IDS)
    found, _ = measure_agreement(target, {"rival": lookup}, prompts, texts, GREEDY, journal)
    for row, ids, text in zip(found["rival"], IDS, texts, strict=True):
        drafted = [scanned(ids + text[:at], 1) for at in range(len(text))]
        assert row.alpha_sum == sum(d == [t] for d, t in zip(drafted, text, strict=True))
        assert row.guesses == [d[0] if d else -1 for d in drafted]


def test_its_best_length_is_its_own_and_knows_no_doubt(target, lookup):
    texts = places(target, lookup, PromptSet("made up", PROMPTS, IDS), GREEDY, 6)
    for price, gammas in ((0.001, range(2, 7)), (1.0, [1])):  # of a token more to verify
        costs = StepCosts(0.0, 1.0, {width: 1 + price * (width - 1) for width in range(1, 8)}, 20)
        length = best_length(texts, costs, 6)
        assert length.gamma in gammas
        assert length.stop_below == 0


def test_it_stands_in_a_report_like_any_draft(target, lookup, letters, journal):
    target.tokenizer = letters(VOCAB)
    prompts = PromptSet("made up", PROMPTS, IDS)
    report = evaluate(
        target,
        {"rival": lookup, "again": lookup},
        prompts,
        prompts,
        GREEDY,
        Plan(None, 3, 3),
        journal,
        {"command": "test"},
    )
    rival = report.drafts["rival"]
    assert rival.memory.overhead == 0
    assert rival.vocabulary.strategy == "prompt lookup"
    assert rival.lossless.identical == 3
    assert report.prompts.random_bits == round(5.321928, 2)
    assert "".join(rival.atlas.heat_map[0].tokens).isascii()
    assert report.decoding.ended_by_stop == 0
    assert report.decoding.gamma == report.drafts["again"].gamma
