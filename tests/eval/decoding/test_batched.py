"""Losslessness of batches in fp32: each row's tokens are those it has alone, without a draft."""

import copy
import itertools

import pytest
import torch

from eval.decoding import lean, loop
from eval.decoding.build import build_decoder
from eval.decoding.drafters.causal_lm import TokenSession
from eval.decoding.drafters.lookup import PromptLookup
from eval.decoding.forward import KVCache
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.stock import StockDecoder
from eval.decoding.verification import Sampling
from eval.prompts import Prompt

VOCAB = 61
NEVER = frozenset({VOCAB + 1})
LONGEST = 40
CONTEXT = 80


def baseline(target, prompt, ids, how):
    return decode(target, None, [prompt], [ids], how, DraftLength(0))[0]


def alone(target, drafter, prompt, ids, how, length):
    return decode(target, drafter, [prompt], [ids], how, length)[0]


@pytest.fixture(scope="module")
def target(tiny):
    return build_decoder(tiny(0), CONTEXT)


@pytest.fixture(scope="module")
def drafts(target, tiny, adversary, drafter):
    generator = torch.Generator().manual_seed(5)
    good = copy.deepcopy(tiny(0))
    with torch.no_grad():
        for weight in good.parameters():
            weight += 0.05 * weight.std() * torch.randn(weight.shape, generator=generator)
    trimmed = tiny(0)
    kept = torch.arange(0, VOCAB, 2)
    trimmed.lm_head.weight = torch.nn.Parameter(trimmed.lm_head.weight[kept].clone())
    return {
        "self": drafter(target),
        "good": drafter(build_decoder(good, CONTEXT)),
        "random": drafter(build_decoder(tiny(7), CONTEXT)),
        "adversarial": drafter(adversary(target)),
        "trimmed": drafter(build_decoder(trimmed, CONTEXT), token_ids=kept),
        "padded": drafter(build_decoder(tiny(9, VOCAB + 8), CONTEXT), rows=VOCAB),
        "stock": drafter(StockDecoder(good, CONTEXT)),
        "lookup": PromptLookup(vocab_size=VOCAB, vocabulary={}, device=target.device),
    }


NAMES = ["self", "good", "random", "adversarial", "trimmed", "padded", "stock", "lookup"]


def drawn(count):
    """Prompts of 1 to 17 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = itertools.cycle((5, 1, 9, 2, 17, 4, 12, 3))
    rows = [
        torch.randint(VOCAB, (n,), generator=generator).tolist()
        for n in itertools.islice(lengths, count)
    ]
    return [Prompt(str(i), prompt="unused") for i in range(count)], rows


@pytest.fixture(scope="module")
def serial(target):
    """The target's own answers to drawn(8), one by one, without a stop."""
    how = Decoding(Sampling(), NEVER, LONGEST)
    prompts, rows = drawn(8)
    return [baseline(target, *one, how).tokens for one in zip(prompts, rows, strict=True)]


def until(tokens, stops):
    """The tokens up to the first stop, included."""
    ends = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


def texts(target, draft, count, length, stops=NEVER, longest=LONGEST):
    how = Decoding(Sampling(), stops, longest)
    runs = decode(target, draft, *drawn(count), how, length)
    assert [run.prompt_id for run in runs] == [str(i) for i in range(count)]
    return [run.tokens for run in runs]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_those_of_single_rows(
    target, drafts, serial, accepts_as_named, name, count
):
    how = Decoding(Sampling(), NEVER, LONGEST)
    for gamma in range(1, 9):
        runs = decode(target, drafts[name], *drawn(count), how, DraftLength(gamma))
        assert [run.tokens for run in runs] == serial[:count]
        drafted, accepted = (
            sum(sum(counts) for counts in lists)
            for lists in ([r.drafted for r in runs], [r.accepted for r in runs])
        )
        accepts_as_named(name, drafted, accepted)
        for run in runs:
            assert 1 + sum(run.block_tokens) == len(run.tokens) == LONGEST
            whole = zip(run.accepted[:-1], run.block_tokens[:-1], strict=True)
            assert all(tokens == n + 1 for n, tokens in whole)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_the_baseline_of_a_batch_is_that_of_its_rows(target, serial, count):
    assert texts(target, None, count, DraftLength(4)) == serial[:count]


@pytest.mark.parametrize("name", NAMES)
def test_each_row_accepts_what_it_accepts_alone(target, drafts, name):
    """As long as it has room for a whole draft; so a draft's cache is right, row by row."""
    how, gamma = Decoding(Sampling(), NEVER, LONGEST), 3
    prompts, rows = drawn(8)
    runs = decode(target, drafts[name], prompts, rows, how, DraftLength(gamma))
    for prompt, ids, run in zip(prompts, rows, runs, strict=True):
        single = alone(target, drafts[name], prompt, ids, how, DraftLength(gamma))
        ends = [1 + sum(single.block_tokens[:i]) for i in range(len(single.block_tokens))]
        whole = sum(LONGEST - end - 1 >= gamma for end in ends)
        assert whole >= 9
        assert run.accepted[:whole] == single.accepted[:whole]


@pytest.mark.parametrize("stop_below", [1e-4, 1e-3, 0.01, 0.3])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_that_stop_in_doubt_change_no_token(target, drafts, serial, name, stop_below):
    for count in (1, 2, 5, 8):
        assert texts(target, drafts[name], count, DraftLength(6, stop_below)) == serial[:count]


def test_a_batch_drafts_on_while_its_rows_believe_in_it_on_average(target, drafts):
    how, below = Decoding(Sampling(), NEVER, LONGEST), 2e-3
    prompts, rows = drawn(2)
    runs = decode(target, drafts["good"], prompts, rows, how, DraftLength(6, below))
    decoder = drafts["good"].decoder
    contexts = [[*ids, run.tokens[0]] for ids, run in zip(rows, runs, strict=True)]
    lengths = []
    for block in range(7):
        drafted, confidence, ahead = 0, [1.0] * 2, copy.deepcopy(contexts)
        while drafted < 6 and sum(confidence) / 2 >= below:
            drafted += 1
            for row in range(2):
                cache = decoder.new_cache(1, CONTEXT)
                logits = decoder.forward(torch.tensor([ahead[row]]), 0, cache, last_only=True)
                q = logits[0, -1].softmax(-1)
                ahead[row].append(int(q.argmax()))
                confidence[row] *= float(q.max())
        assert [run.drafted[block] for run in runs] == [drafted] * 2
        lengths.append(drafted)
        for context, run in zip(contexts, runs, strict=True):
            at = 1 + sum(run.block_tokens[:block])
            context += run.tokens[at : at + run.block_tokens[block]]
    assert len(set(lengths)) > 1, lengths


@pytest.mark.parametrize("longest", [*range(1, 8), 12])
def test_cut_at_the_longest_answer(target, drafts, serial, longest):
    for draft, count in itertools.product(drafts.values(), (2, 5)):
        got = texts(target, draft, count, DraftLength(4), longest=longest)
        assert got == [tokens[:longest] for tokens in serial[:count]]


def test_rows_that_stop_inside_a_draft_end_alone(target, drafts, serial):
    """Rows leave one by one, from the first token on, down to an empty batch."""
    for places in ((0, 5, 11), (3, 3, 20), (12, 13, 2)):
        stops = frozenset(serial[row][at] for row, at in enumerate(places))
        want = [until(tokens, stops) for tokens in serial]
        assert len({len(tokens) for tokens in want}) > 3
        for draft, gamma in itertools.product([*drafts.values(), None], (1, 3, 8)):
            for count in (3, 8):
                assert texts(target, draft, count, DraftLength(gamma), stops) == want[:count]


def test_a_row_stays_in_a_batch_for_as_long_as_it_decodes(target, drafts, serial):
    stops = frozenset({serial[0][10]})
    how = Decoding(Sampling(), stops, LONGEST)
    runs = decode(target, drafts["good"], *drawn(5), how, DraftLength(3))
    assert len({len(run.tokens) for run in runs}) > 1
    last = max(runs, key=lambda run: run.seconds)
    for run in runs:
        assert run.prefill_seconds == last.prefill_seconds
        assert run.block_seconds == last.block_seconds[: len(run.block_seconds)]
        whole = max(
            len(run.drafted) - 1, 0
        )  # where a text ends in its draft, the draft ends as well
        assert run.drafted[:whole] == last.drafted[:whole]
        assert len(run.block_seconds) == len(run.block_tokens) == len(run.accepted)


def test_only_the_end_of_a_row_that_had_room_for_fewer_is_out_of_tau(target, adversary, drafter):
    """A row cut at the limit counts its last block, cut or not, only where it could not be cut."""
    how = Decoding(Sampling(), NEVER, 12)
    prompts, rows = drawn(2)
    runs = decode(target, drafter(adversary(target)), prompts, rows, how, DraftLength(4))
    # a token a block: from the eighth block on fewer than four drafted tokens have room
    assert [run.block_tokens for run in runs] == [[1] * 11] * 2
    assert [run.last_truncated for run in runs] == [True] * 2
    assert [run.drafted for run in runs] == [[4] * 7 + [3, 2, 1, 0]] * 2
    own = decode(target, drafter(target), prompts, rows, how, DraftLength(10))
    assert [run.last_truncated for run in own] == [False] * 2
    own = decode(target, drafter(target), prompts, rows, how, DraftLength(11))
    assert [run.last_truncated for run in own] == [True] * 2


# ---------------------------------------------------------------------------------------------
# Mutants: each breaks one thing that makes a batch exact


def one_position_for_all(monkeypatch):
    starts = loop.starts
    monkeypatch.setattr(loop, "starts", lambda at: starts([max(at)] * len(at)))


def one_acceptance_for_all(monkeypatch):
    verify = loop.verify

    def shared(*args):
        accepted, following = verify(*args)
        return accepted[:1].expand_as(accepted), following

    monkeypatch.setattr(loop, "verify", shared)


def stale_keys_seen(monkeypatch):
    causal_bias = lean.causal_bias

    def loose(start, width, length, dtype):
        return causal_bias(start.max().expand_as(start), width, length, dtype)

    monkeypatch.setattr(lean, "causal_bias", loose)


def caches_of_other_rows(monkeypatch):
    keep_rows = KVCache.keep_rows
    monkeypatch.setattr(KVCache, "keep_rows", lambda cache, rows: keep_rows(cache, rows.flip(0)))


def next_token_of_the_first_row(monkeypatch):
    verify = loop.verify

    def shared(*args):
        accepted, following = verify(*args)
        return accepted, following[:1].expand_as(following)

    monkeypatch.setattr(loop, "verify", shared)


MUTANTS = [
    one_position_for_all,
    one_acceptance_for_all,
    stale_keys_seen,
    caches_of_other_rows,
    next_token_of_the_first_row,
]


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_broken_batch_is_caught(target, drafts, serial, monkeypatch, mutant):
    stops = frozenset({serial[0][10]})
    want = [until(tokens, stops) for tokens in serial[:5]]
    assert texts(target, drafts["good"], 5, DraftLength(3), stops) == want
    mutant(monkeypatch)
    assert texts(target, drafts["good"], 5, DraftLength(3), stops) != want


def test_a_draft_that_forgets_what_it_drafted_alone_is_caught(target, drafts, monkeypatch):
    """A draft's stale cache changes no token, only how many are accepted."""
    how = Decoding(Sampling(), NEVER, LONGEST)

    def accepted():
        runs = decode(target, drafts["self"], *drawn(5), how, DraftLength(3))
        return sum(sum(run.accepted) for run in runs) / sum(sum(run.drafted) for run in runs)

    assert accepted() == 1
    commit = TokenSession.commit

    def unread(session, *said):
        commit(session, *said)
        session.seen = [len(text) - 1 for text in session.texts]

    monkeypatch.setattr(TokenSession, "commit", unread)
    assert accepted() < 1


# ---------------------------------------------------------------------------------------------
# Sampling

SMALL = 6
SAMPLING = Sampling(temperature=1.5)
RUNS = 4000


def chi_square(target, ids, counts):
    """p-value of counts [V, V] of an answer's second and third token."""
    from scipy.stats import chi2

    def p(context):
        cache = target.new_cache(1, CONTEXT)
        logits = target.forward(torch.tensor([context]), 0, cache, last_only=True)[0, -1]
        return (logits.double() / SAMPLING.temperature).softmax(-1)

    expected = torch.zeros(SMALL, SMALL, dtype=torch.double)
    for a, b in itertools.product(range(SMALL), repeat=2):
        expected[b] += p(ids)[a] * p([*ids, a])[b] * p([*ids, a, b])
    expected *= float(counts.sum())
    common = expected >= 5
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    return float(chi2.sf(statistic, int(common.sum()) - 1))


@pytest.fixture(scope="module")
def pair(tiny, drafter):
    draft = drafter(build_decoder(tiny(1, SMALL), CONTEXT), SMALL)
    return build_decoder(tiny(0, SMALL), CONTEXT), draft


def counted(target, draft, rows, length):
    """Counts [rows, V, V] of the second and third token; the first never sees a draft."""
    prompts = [Prompt(str(i), prompt="unused") for i in range(len(rows))]
    counts = torch.zeros(len(rows), SMALL, SMALL)
    drafted = accepted = 0
    for seed in range(RUNS // 2):
        how = Decoding(SAMPLING, NEVER, 3 + seed % 2, seed)
        for row, run in enumerate(decode(target, draft, prompts, rows, how, length)):
            counts[row, run.tokens[1], run.tokens[2]] += 1
            drafted, accepted = drafted + sum(run.drafted), accepted + sum(run.accepted)
    assert draft is None or 0 < accepted < drafted
    return counts


@pytest.mark.parametrize("length", [DraftLength(1), DraftLength(3), DraftLength(3, 0.25)], ids=str)
def test_each_row_of_a_sampled_batch_has_the_targets_distribution(pair, length):
    target, draft = pair
    rows = [[1, 2], [3], [1, 2], [4, 0, 5]]
    counts = counted(target, draft, rows, length)
    for ids, seen in zip(rows, counts, strict=True):
        assert chi_square(target, ids, seen) > 1e-4
    # rows of one prompt are drawn independently of each other: their counts add up
    assert chi_square(target, rows[0], counts[0] + counts[2]) > 1e-4


def test_a_sampled_batch_with_one_acceptance_for_all_is_caught(pair, monkeypatch):
    target, draft = pair
    rows = [[1, 2], [3], [4, 0, 5]]
    one_acceptance_for_all(monkeypatch)
    counts = counted(target, draft, rows, DraftLength(3))
    assert min(chi_square(target, *one) for one in zip(rows[1:], counts[1:], strict=True)) < 1e-4
