"""Losslessness in fp32: with any draft the tokens are those of the target alone."""

import copy

import pytest
import torch

from eval.decoding.build import build_decoder
from eval.decoding.generation import generate_batched
from eval.decoding.lean import LeanDecoder
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.stock import StockDecoder
from eval.decoding.verification import Sampling
from eval.prompts import Prompt

VOCAB = 61
PROMPT = Prompt("p", prompt="unused")
IDS = [3, 14, 15, 9, 2]
NEVER = frozenset({VOCAB + 1})


def baseline(target, prompt, ids, how):
    return decode(target, None, [prompt], [ids], how, DraftLength(0))[0]


def alone(target, drafter, prompt, ids, how, length):
    return decode(target, drafter, [prompt], [ids], how, length)[0]


@pytest.fixture(scope="module")
def target(tiny):
    return build_decoder(tiny(0), 200)


@pytest.fixture(scope="module")
def drafts(target, tiny, adversary, drafter):
    good = copy.deepcopy(tiny(0))
    with torch.no_grad():
        for parameter in good.parameters():
            parameter.add_(0.05 * parameter.std() * torch.randn_like(parameter))
    trimmed = tiny(0)
    kept = torch.arange(0, VOCAB, 2)
    trimmed.lm_head.weight = torch.nn.Parameter(trimmed.lm_head.weight[kept].clone())
    return {
        "self": drafter(target),
        "good": drafter(build_decoder(good, 200)),
        "random": drafter(build_decoder(tiny(7), 200)),
        "adversarial": drafter(adversary(target)),
        "trimmed": drafter(build_decoder(trimmed, 200), token_ids=kept),
        "padded": drafter(build_decoder(tiny(9, VOCAB + 8), 200), rows=VOCAB),
        "stock": drafter(StockDecoder(good, 200)),
    }


NAMES = ["self", "good", "random", "adversarial", "trimmed", "padded", "stock"]


@pytest.mark.parametrize("gamma", range(1, 9))
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_the_targets_own(target, drafts, accepts_as_named, name, gamma):
    how = Decoding(Sampling(), NEVER, 60)
    expected = baseline(target, PROMPT, IDS, how)
    run = alone(target, drafts[name], PROMPT, IDS, how, DraftLength(gamma))
    assert run.tokens == expected.tokens
    assert 1 + sum(run.block_tokens) == len(run.tokens) == 60
    whole = zip(run.accepted[:-1], run.block_tokens[:-1], strict=True)
    assert all(tokens == accepted + 1 for accepted, tokens in whole)
    accepts_as_named(name, sum(run.drafted), sum(run.accepted))


@pytest.mark.parametrize("stop_below", [1e-4, 1e-3, 0.01, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_a_draft_that_stops_in_doubt_changes_no_token(target, drafts, name, stop_below):
    how = Decoding(Sampling(), NEVER, 60)
    expected = baseline(target, PROMPT, IDS, how)
    run = alone(target, drafts[name], PROMPT, IDS, how, DraftLength(6, stop_below))
    assert run.tokens == expected.tokens
    assert min(run.drafted[:-1]) >= 1  # the first token is always drafted
    assert not run.last_truncated or len(run.tokens) == 60


def test_doubt_shortens_drafts_as_the_product_of_probabilities_says(target, drafts):
    how = Decoding(Sampling(), NEVER, 60)
    run = alone(target, drafts["good"], PROMPT, IDS, how, DraftLength(6, 1e-3))
    assert len(set(run.drafted[:-1])) > 1  # these models are sure of 4% at most
    decoder, at = drafts["good"].decoder, 1
    for drafted, emitted in zip(run.drafted[:-2], run.block_tokens[:-2], strict=True):
        context, confidence = IDS + run.tokens[:at], 1.0
        expected = 0
        while expected < 6 and confidence >= 1e-3:
            expected += 1
            cache = decoder.new_cache(1, 200)
            q = decoder.forward(torch.tensor([context]), 0, cache, last_only=True)[0, -1].softmax(
                -1
            )
            context, confidence = [*context, int(q.argmax())], confidence * float(q.max())
        assert drafted == expected
        at += emitted


@pytest.mark.parametrize("longest", range(1, 13))
def test_cut_at_the_longest_answer(target, drafts, longest):
    how = Decoding(Sampling(), NEVER, longest)
    expected = baseline(target, PROMPT, IDS, how).tokens
    for draft in drafts.values():
        assert alone(target, draft, PROMPT, IDS, how, DraftLength(4)).tokens == expected


def test_a_stop_inside_a_draft_ends_the_text(target, drafts):
    text = baseline(target, PROMPT, IDS, Decoding(Sampling(), NEVER, 60)).tokens
    for at in (0, 5, 11, 12, 13):
        how = Decoding(Sampling(), frozenset({text[at]}), 60)
        expected = text[: text.index(text[at]) + 1]
        assert baseline(target, PROMPT, IDS, how).tokens == expected
        for draft in drafts.values():
            for gamma in (1, 3, 8):
                run = alone(target, draft, PROMPT, IDS, how, DraftLength(gamma))
                assert run.tokens == expected


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_ragged_batches_give_the_tokens_of_single_rows(target, batch_size):
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(VOCAB, (length,), generator=generator).tolist()
        for length in (1, 4, 9, 2, 17, 5, 5, 3, 12)
    ]
    longest = baseline(target, PROMPT, prompts[2], Decoding(Sampling(), NEVER, 30)).tokens
    stops = frozenset({longest[8], longest[15]})  # rows end at different times
    how = Decoding(Sampling(), stops, 30)
    answers = {
        answer.index: answer
        for answer in generate_batched(
            target,
            prompts,
            30,
            stops,
            Sampling(),
            batch_size,
            seeds=[0] * len(prompts),
            capture=lambda logits: (logits.argmax(-1),),
        )
    }
    assert sorted(answers) == list(range(len(prompts)))
    for index, prompt in enumerate(prompts):
        assert answers[index].tokens == baseline(target, PROMPT, prompt, how).tokens
        assert [int(best) for (best,) in answers[index].captured] == answers[index].tokens


@pytest.mark.parametrize("length", [DraftLength(1), DraftLength(3), DraftLength(3, 0.25)], ids=str)
def test_sampled_tokens_have_the_targets_distribution(tiny, drafter, length):
    from scipy.stats import chi2

    vocab, runs = 6, 4000
    target, draft = (
        build_decoder(tiny(0, vocab), 40),
        drafter(build_decoder(tiny(1, vocab), 40), vocab),
    )
    sampling = Sampling(temperature=1.5)
    ids = [1, 2]
    counts = torch.zeros(vocab, vocab)
    for seed in range(runs):
        how = Decoding(sampling, NEVER, 3, seed)
        tokens = alone(target, draft, PROMPT, ids, how, length).tokens
        counts[tokens[1], tokens[2]] += 1  # the first token never sees a draft

    def p(context):
        cache = target.new_cache(1, 8)
        logits = target.forward(torch.tensor([context]), 0, cache, last_only=True)[0, -1]
        return (logits.double() / 1.5).softmax(-1)

    expected = torch.zeros(vocab, vocab, dtype=torch.double)
    for a in range(vocab):
        for b in range(vocab):
            expected[b] += p(ids)[a] * p([*ids, a])[b] * p([*ids, a, b])
    expected *= runs
    common = expected >= 5
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    assert chi2.sf(statistic, int(common.sum()) - 1) > 1e-4


def test_the_lean_decoder_was_what_ran(target):
    assert isinstance(target, LeanDecoder)
