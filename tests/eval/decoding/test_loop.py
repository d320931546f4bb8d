"""Losslessness in fp32: with any draft, and beside any rows, a text is that of the target alone."""

import copy
import itertools
from dataclasses import replace

import pytest
import torch

from eval.decoding import forward, generation, loop
from eval.decoding.build import build_decoder
from eval.decoding.drafters import causal_lm
from eval.decoding.drafters.causal_lm import TokenSession
from eval.decoding.drafters.lookup import PromptLookup
from eval.decoding.generation import Kept, generate_batched, rows_at_once, tokens_bar
from eval.decoding.lean import LeanDecoder
from eval.decoding.loop import Decoding, DraftLength, decode
from eval.decoding.stock import StockDecoder
from eval.decoding.verification import Sampling
from eval.prompts import Prompt
from tests.eval.decoding.enumeration import (
    assert_exact,
    emitted,
    of_target,
    played,
    total_variation,
)

VOCAB = 61
NEVER = frozenset({VOCAB + 1})
LONGEST = 40
CONTEXT = 80
GREEDY = Decoding(Sampling(), NEVER, LONGEST)
NAMES = ["self", "good", "random", "adversarial", "trimmed", "padded", "stock", "lookup"]


@pytest.fixture(scope="module")
def target(tiny):
    decoder = build_decoder(tiny(0), CONTEXT)
    assert isinstance(decoder, LeanDecoder)
    return decoder


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
        "lookup": PromptLookup(vocab_size=VOCAB, vocabulary={}, device=target.device, stops=NEVER),
    }


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
    return [
        decode(target, None, [prompt], [ids], GREEDY, DraftLength(0))[0].tokens
        for prompt, ids in zip(*drawn(8), strict=True)
    ]


def until(tokens, stops):
    """The tokens up to the first stop, included."""
    ends = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


def texts(target, draft, count, length, stops=NEVER, longest=LONGEST):
    how = Decoding(Sampling(), stops, longest)
    runs = decode(target, draft, *drawn(count), how, length)
    assert [run.prompt_id for run in runs] == [str(i) for i in range(count)]
    return [run.tokens for run in runs]


@pytest.mark.parametrize(("count", "gammas"), [(1, (1, 2, 4, 8)), (3, (2,)), (8, (1, 4))])
@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_the_targets_own(
    target, drafts, serial, accepts_as_named, name, count, gammas
):
    for gamma in gammas:
        runs = decode(target, drafts[name], *drawn(count), GREEDY, DraftLength(gamma))
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


def test_the_baseline_of_a_batch_is_that_of_its_rows(target, serial):
    for count in (2, 8):
        assert texts(target, None, count, DraftLength(4)) == serial[:count]


@pytest.mark.parametrize("name", NAMES)
def test_each_row_accepts_what_it_accepts_alone(target, drafts, name):
    """As long as it has room for a whole draft; so a draft's cache is right, row by row."""
    length = DraftLength(3)
    prompts, rows = drawn(8)
    runs = decode(target, drafts[name], prompts, rows, GREEDY, length)
    for prompt, ids, run in zip(prompts, rows, runs, strict=True):
        single = decode(target, drafts[name], [prompt], [ids], GREEDY, length)[0]
        ends = [1 + sum(single.block_tokens[:i]) for i in range(len(single.block_tokens))]
        whole = sum(LONGEST - end - 1 >= length.gamma for end in ends)
        assert whole >= 9
        assert run.accepted[:whole] == single.accepted[:whole]


@pytest.mark.parametrize("name", NAMES)
def test_drafts_that_stop_in_doubt_change_no_token(target, drafts, serial, name):
    for stop_below, count in ((1e-3, 1), (0.01, 1), (0.3, 1), (0.01, 3), (1e-3, 8)):
        length = DraftLength(6, stop_below)
        runs = decode(target, drafts[name], *drawn(count), GREEDY, length)
        assert [run.tokens for run in runs] == serial[:count]
        if name != "lookup":  # the first token is always drafted
            assert all(min(run.drafted[:-1]) >= 1 for run in runs[:1])


@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_drafts_on_while_its_rows_believe_in_it_on_average(target, drafts, count):
    below = 2e-3  # these models are sure of 4% at most
    prompts, rows = drawn(count)
    runs = decode(target, drafts["good"], prompts, rows, GREEDY, DraftLength(6, below))
    decoder = drafts["good"].decoder
    contexts = [[*ids, run.tokens[0]] for ids, run in zip(rows, runs, strict=True)]
    lengths = []
    for block in range(7):
        drafted, confidence, ahead = 0, [1.0] * count, copy.deepcopy(contexts)
        while drafted < 6 and sum(confidence) / count >= below:
            drafted += 1
            for row in range(count):
                cache = decoder.new_cache(1, CONTEXT)
                logits = decoder.forward(torch.tensor([ahead[row]]), 0, cache, last_only=True)
                q = logits[0, -1].softmax(-1)
                ahead[row].append(int(q.argmax()))
                confidence[row] *= float(q.max())
        assert [run.drafted[block] for run in runs] == [drafted] * count
        lengths.append(drafted)
        for context, run in zip(contexts, runs, strict=True):
            at = 1 + sum(run.block_tokens[:block])
            context += run.tokens[at : at + run.block_tokens[block]]
    assert len(set(lengths)) > 1, lengths


@pytest.mark.parametrize("longest", [1, 2, 3, 5, 6, 12])
def test_cut_at_the_longest_answer(target, drafts, serial, longest):
    for draft, count in itertools.product(drafts.values(), (1, 5)):
        got = texts(target, draft, count, DraftLength(4), longest=longest)
        assert got == [tokens[:longest] for tokens in serial[:count]]


@pytest.mark.parametrize("places", [(0, 5, 11), (3, 3, 20), (12, 13, 2)])
def test_rows_that_stop_inside_a_draft_end_alone(target, drafts, serial, places):
    """Several tokens stop; rows leave one by one, from the first token on, to an empty batch."""
    stops = frozenset(serial[row][at] for row, at in enumerate(places))
    want = [until(tokens, stops) for tokens in serial]
    assert len({len(tokens) for tokens in want}) > 3
    for draft in [*drafts.values(), None]:
        for count, gamma in ((1, 8), (8, 2), (8, 8)):
            assert texts(target, draft, count, DraftLength(gamma), stops) == want[:count]


def test_a_row_stays_in_a_batch_for_as_long_as_it_decodes(target, drafts, serial):
    how = Decoding(Sampling(), frozenset({serial[0][10]}), LONGEST)
    runs = decode(target, drafts["good"], *drawn(5), how, DraftLength(3))
    assert len({len(run.tokens) for run in runs}) > 1
    last = max(runs, key=lambda run: run.seconds)
    for run in runs:
        assert run.prefill_seconds == last.prefill_seconds
        assert run.block_seconds == last.block_seconds[: len(run.block_seconds)]
        # where a text ends in its draft, the draft ends as well
        whole = max(len(run.drafted) - 1, 0)
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
    for gamma, cut in ((10, False), (11, True)):
        runs = decode(target, drafter(target), prompts, rows, how, DraftLength(gamma))
        assert [run.last_truncated for run in runs] == [cut] * 2


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_answers_in_batches_of_any_size_are_those_of_single_rows(target, serial, batch_size):
    stops = frozenset({serial[0][8], serial[2][15]})  # rows end at different times
    _, rows = drawn(8)
    answers = {
        answer.index: answer
        for answer in generate_batched(
            *(target, rows, Decoding(Sampling(), stops, LONGEST), batch_size, [0] * len(rows)),
            Kept(lambda logits: (logits.argmax(-1),)),
        )
    }
    assert sorted(answers) == list(range(len(rows)))
    for index, tokens in enumerate(serial):
        assert answers[index].tokens == until(tokens, stops)
        assert [int(best) for (best,) in answers[index].captured] == answers[index].tokens


def in_pieces_of(monkeypatch, positions):
    for module in (forward, generation, causal_lm):
        monkeypatch.setattr(module, "PIECE", positions)


def test_long_prompts_are_answered_fewer_at_once_and_read_in_pieces(target, monkeypatch):
    """As whole ones are, in a cache of no more slots than short ones may take."""
    _, rows = drawn(8)
    rows.append([7] * 40)

    def answered():
        made = generate_batched(
            *(target, rows, Decoding(Sampling(), NEVER, 6), 4, [0] * len(rows)),
            Kept(lambda logits: (logits.argmax(-1),), True, (0, 2)),
        )
        return sorted(made, key=lambda answer: answer.index)

    whole = answered()
    in_pieces_of(monkeypatch, 8)
    assert [rows_at_once(4, n, 6) for n in (1, 8, 9, 16, 17, 40, 100)] == [4, 4, 2, 2, 1, 1, 1]
    asked, widths, new_cache, run = [], [], target.new_cache, target.forward
    monkeypatch.setattr(target, "new_cache", lambda *a: asked.append(a) or new_cache(*a))
    monkeypatch.setattr(
        target, "forward", lambda ids, *a, **k: widths.append(ids.shape[1]) or run(ids, *a, **k)
    )
    for mine, other in zip(answered(), whole, strict=True):
        assert (mine.index, mine.tokens) == (other.index, other.tokens)
        assert mine.captured == other.captured
        assert len(mine.captured) == len(rows[mine.index]) - 1 + 6
        torch.testing.assert_close(torch.cat(mine.states), torch.cat(other.states))
    assert max(widths) == 8
    # of four buckets the rows that run, and those that are read together
    assert [count for count, _ in asked] == [1, 1, 1, 1, 2, 1, 4, 4]


def test_the_bar_of_answers_ends_at_its_total_however_long_they_are(target):
    _, rows = drawn(5)
    greedily = Decoding(Sampling(), NEVER, 6)
    made = list(generate_batched(target, rows, greedily, 2, [0] * 5))
    stops = frozenset({made[0].tokens[1]})  # so that one ends before the others
    bar = tokens_bar("answers", 5, Decoding(Sampling(), stops, 6))
    counts = []
    for _ in generate_batched(target, rows, replace(greedily, stops=stops), 2, [0] * 5, bar=bar):
        counts.append(bar.n)
    assert bar.n == bar.total == 30
    assert counts == sorted(counts)
    assert 0 < counts[0] < 30


@pytest.mark.parametrize("name", ["self", "good", "stock"])
@pytest.mark.parametrize("count", [1, 5])
def test_prompts_are_read_in_pieces_before_they_are_continued(
    target, drafts, serial, monkeypatch, name, count
):
    in_pieces_of(monkeypatch, 4)
    runs = decode(target, drafts[name], *drawn(count), GREEDY, DraftLength(3))
    assert [run.tokens for run in runs] == serial[:count]


def test_a_draft_that_forgets_what_it_drafted_alone_is_caught(target, drafts, monkeypatch):
    """A draft's stale cache changes no token, only how many are accepted."""

    def accepted():
        runs = decode(target, drafts["self"], *drawn(5), GREEDY, DraftLength(3))
        return sum(sum(run.accepted) for run in runs) / sum(sum(run.drafted) for run in runs)

    assert accepted() == 1
    commit = TokenSession.commit

    def unread(session, *said):
        commit(session, *said)
        session.in_cache = [len(text) - 1 for text in session.texts]

    monkeypatch.setattr(TokenSession, "commit", unread)
    assert accepted() < 1


# ---------------------------------------------------------------------------------------------
# Sampling

SMALL = 6
WARM = Decoding(Sampling(1.5, top_k=2), NEVER, 4)
ROWS = [[4, 0, 5], [1, 2]]


@pytest.fixture(scope="module")
def pair(tiny, drafter):
    draft = drafter(build_decoder(tiny(1, SMALL), CONTEXT), SMALL)
    return build_decoder(tiny(0, SMALL), CONTEXT), draft


@pytest.mark.parametrize("length", [DraftLength(1), DraftLength(3), DraftLength(3, 0.5)], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
def test_sampled_tokens_have_the_targets_distribution(pair, monkeypatch, rows, length):
    """Beside another row, whatever that one accepts."""
    assert_exact(played(monkeypatch), *pair, ROWS[-rows:], WARM, length)


def one_acceptance_for_all(monkeypatch):
    verify = loop.verify

    def shared(*args):
        accepted, following = verify(*args)
        return accepted[:1].expand_as(accepted), following

    monkeypatch.setattr(loop, "verify", shared)


def next_token_of_the_first_row(monkeypatch):
    verify = loop.verify

    def shared(*args):
        accepted, following = verify(*args)
        return accepted, following[:1].expand_as(following)

    monkeypatch.setattr(loop, "verify", shared)


@pytest.mark.parametrize("mutant", [one_acceptance_for_all, next_token_of_the_first_row])
def test_a_broken_batch_has_another_distribution(pair, monkeypatch, mutant):
    mutant(monkeypatch)
    answers, *_ = emitted(played(monkeypatch), *pair, ROWS, WARM, DraftLength(3))
    assert total_variation(answers, of_target(pair[0], ROWS[-1], WARM)) > 0.01


def test_rows_are_sampled_independently_and_as_often_as_they_should_be(pair):
    """The one test here that draws: the second token of two rows of one prompt, over many seeds."""
    target, draft = pair
    prompts = [Prompt(str(i), prompt="unused") for i in range(3)]
    pairs, seeds = torch.zeros(SMALL, SMALL), 400
    for seed in range(seeds):
        how = Decoding(Sampling(1.5), NEVER, 3, seed)
        runs = decode(target, draft, prompts, [[1, 2], [3], [1, 2]], how, DraftLength(2))
        pairs[runs[0].tokens[1], runs[2].tokens[1]] += 1
    first = of_target(target, [1, 2], Decoding(Sampling(1.5), NEVER, 2))
    p = torch.tensor([sum(w for (_, b), w in first.items() if b == i) for i in range(SMALL)])
    expected = seeds * p[:, None] * p[None]
    often = expected >= 5
    statistic = float(((pairs - expected)[often] ** 2 / expected[often]).sum())
    assert statistic < int(often.sum()) + 5 * (2 * int(often.sum())) ** 0.5  # five deviations
