"""Prompt lookup: what it drafts, and that the output stays the target's."""

import pytest
import torch

from eval.decoding.build import build_decoder
from eval.decoding.drafters.drafter import Texts
from eval.decoding.drafters.loading import load_drafter
from eval.decoding.drafters.lookup import following
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.target import Target
from eval.decoding.verification import Sampling
from eval.measuring.agreement import measure_agreement, target_texts
from eval.measuring.evaluation import Plan, evaluate
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


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ([1, 2, 3, 9, 1, 2, 3], [9, 1, 2]),
        ([1, 2, 3, 8, 2, 3, 7, 1, 2, 3], [8, 2, 3]),  # three tokens go before two
        ([5, 1, 7, 1], [7, 1]),
        ([5, 1, 6, 5, 1, 7, 5, 1], [7, 5, 1]),  # the latest place
        ([4, 4, 4], [4]),
        ([1, 2, 3], []),
        ([1], []),
    ],
)
def test_what_followed_the_last_tokens_before(text, found):
    assert following(text, 3) == found
    assert following(text, 1) == found[:1]


def test_without_a_match_nothing_is_drafted(target, lookup):
    ids = [[1, 2, 3], [7, 8, 7]]
    session = lookup.start(Texts(ids, 50, Sampling(), torch.Generator(), [{}, {}]))
    proposal = session.propose(4, 0.0)
    assert proposal.counts.tolist() == [0, 2]
    assert proposal.tokens[1].tolist() == [8, 7]
    session.commit([[1], [9]], [0, 0], {})
    proposal = session.propose(4, 0.0)
    assert proposal.counts.tolist() == [3, 0]
    assert proposal.tokens[0].tolist() == [2, 3, 1]
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
        drafted = [following(ids + text[:at], 1) for at in range(len(text))]
        assert row.alpha_sum == sum(d == [t] for d, t in zip(drafted, text, strict=True))
        assert row.guesses == [d[0] if d else -1 for d in drafted]


def test_it_stands_in_a_report_like_any_draft(target, lookup, letters, journal):
    target.tokenizer = letters(VOCAB)
    prompts = PromptSet("made up", PROMPTS, IDS)
    report = evaluate(
        target,
        {"rival": lookup, "again": lookup},
        prompts,
        prompts,
        GREEDY,
        Plan(None, 3, 3, sweep_prompts=2, batch_sizes=(2,)),
        journal,
        None,
        {"command": "test"},
    )
    rival = report.drafts["rival"]
    assert rival.memory.overhead == 0
    assert rival.vocabulary.strategy == "prompt lookup"
    assert [point.gamma for point in rival.gamma_sweep] == [1, 2, 3]
    assert rival.lossless.identical == 3
    assert rival.by_batch_size[0].lossless.identical == 2
    assert report.prompts.random_bits == round(5.321928, 2)
    assert "".join(rival.atlas.heat_map[0].tokens).isascii()
    assert report.decoding.ended_by_stop == 0
    assert report.decoding.gamma == report.drafts["again"].gamma
