"""Batched outputs of the target alone are those of single prompts, in fp32."""

from dataclasses import replace

import pytest
import torch

from eval.decoding import forward, generation
from eval.decoding.build import build_decoder
from eval.decoding.generation import Kept, generate_batched, rows_at_once, tokens_bar
from eval.decoding.loop import Decoding, decode
from eval.decoding.verification import Sampling
from eval.prompts import Prompt

VOCAB = 61
NEVER = frozenset({VOCAB + 1})
LONGEST = 40
GREEDY = Decoding(Sampling(), NEVER, LONGEST)


@pytest.fixture(scope="module")
def target(tiny, forwards):
    return build_decoder(tiny(0), 80)


@pytest.fixture
def rows():
    """Prompts of 1 to 17 tokens."""
    generator = torch.Generator().manual_seed(1)
    lengths = (5, 1, 9, 2, 17, 4, 12, 3)
    return [torch.randint(VOCAB, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture
def serial(target, rows):
    """The target's own outputs, one by one, without a stop."""
    prompt = Prompt("p", prompt="unused")
    return [decode(target, None, prompt, ids, GREEDY).tokens for ids in rows]


def until(tokens, stops):
    """The tokens up to the first stop, included."""
    ends = [i for i, token in enumerate(tokens) if token in stops]
    return tokens[: ends[0] + 1] if ends else tokens


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_answers_in_batches_of_any_size_are_those_of_single_rows(target, rows, serial, batch_size):
    stops = frozenset({serial[0][8], serial[2][15]})  # rows end at different times
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


def test_rows_are_dropped_when_half_are_free_and_no_prompt_is_left(
    target, rows, serial, monkeypatch
):
    """So more than half of the rows of each step have an output."""
    counts, run = [], target.forward

    def forward(tokens, start, *args, **more):
        if isinstance(start, torch.Tensor):  # not while prompts are read
            counts.append(len(tokens))
        return run(tokens, start, *args, **more)

    monkeypatch.setattr(target, "forward", forward)
    stops = frozenset({serial[0][8], serial[2][15]})
    made = generate_batched(target, rows, replace(GREEDY, stops=stops), 8, [0] * 8)
    lengths = [len(output.tokens) for output in made]
    assert len(set(lengths)) > 2
    assert len(counts) == max(lengths)
    for step, count in enumerate(counts):
        busy = sum(length > step for length in lengths)
        assert busy <= count < 2 * busy
    assert counts[-1] < counts[0] == 8


@pytest.mark.parametrize("batch_size", [1, 2, 3, 4])
def test_prompts_of_any_lengths_take_a_row_one_after_the_other(tiny, forwards, batch_size):
    """Lengths differ by more than the cache's free slots, so the cache shrinks meanwhile."""
    target, prompt = build_decoder(tiny(0), 256), Prompt("p", prompt="unused")
    few = replace(GREEDY, max_new_tokens=4)
    rows = [[3 * i % VOCAB for i in range(length)] for length in (200, 5, 150, 100, 1, 90)]
    made = generate_batched(target, rows, few, batch_size, [0] * len(rows))
    answers = {answer.index: answer.tokens for answer in made}
    for index, ids in enumerate(rows):
        assert answers[index] == decode(target, None, prompt, ids, few).tokens


def test_sampled_answers_do_not_depend_on_those_beside_them(target, rows):
    how = Decoding(Sampling(0.8), NEVER, 12)

    def answered(numbers):
        made = generate_batched(target, [rows[i] for i in numbers], how, 3, numbers)
        return {numbers[answer.index]: answer.tokens for answer in made}

    whole = answered([*range(8)])
    assert len({tuple(tokens) for tokens in whole.values()}) == 8
    assert answered([*range(7, -1, -1)]) == whole
    assert answered([0, 2, 4, 6]) | answered([1, 3, 5, 7]) == whole


def test_long_prompts_are_answered_fewer_at_once_and_read_in_pieces(target, rows, monkeypatch):
    """As whole ones are, in a cache of no more slots than short ones may take."""
    rows.append([7] * 40)

    def answered():
        made = generate_batched(
            *(target, rows, Decoding(Sampling(), NEVER, 6), 4, [0] * len(rows)),
            Kept(lambda logits: (logits.argmax(-1),), True, (0, 2)),
        )
        return sorted(made, key=lambda answer: answer.index)

    whole = answered()
    for module in (forward, generation):
        monkeypatch.setattr(module, "PIECE", 8)
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


@pytest.mark.parametrize("lengths", [(5, 1, 9, 2, 17), (3, 3, 3), (6,)])
@pytest.mark.parametrize("in_prompts", [True, False])
def test_the_tokens_that_all_prompts_share_are_read_once(target, lengths, in_prompts, monkeypatch):
    head = [7, 8, 9, 10, 11]
    rows = [head + [20 + (7 * k + i) % 40 for i in range(n)] for k, n in enumerate(lengths)]

    def answered():
        read, run = [], target.forward
        with monkeypatch.context() as patch:
            patch.setattr(
                target, "forward", lambda ids, *a, **k: read.append(ids.shape) or run(ids, *a, **k)
            )
            made = generate_batched(
                *(target, rows, Decoding(Sampling(), NEVER, 6), 2, [0] * len(rows)),
                Kept(lambda logits: (logits.argmax(-1),), in_prompts, (0, 2)),
            )
            made = sorted(made, key=lambda answer: answer.index)
        return made, [width for _, width in read if width > 1]

    made, widths = answered()
    assert widths[0] == len(head) + (lengths == (6,)) * 5
    monkeypatch.setattr(generation, "_shared", lambda _: 0)
    whole, widths_of_whole = answered()
    assert sum(widths) < sum(widths_of_whole) or len(lengths) <= generation.PREFILL_ROWS
    for mine, other in zip(made, whole, strict=True):
        assert mine.tokens == other.tokens
        assert mine.captured == other.captured
        torch.testing.assert_close(torch.cat(mine.states), torch.cat(other.states))


def test_the_bar_of_answers_ends_at_its_total_however_long_they_are(target, rows):
    rows = rows[:5]
    greedily = Decoding(Sampling(), NEVER, 6)
    made = list(generate_batched(target, rows, greedily, 2, [0] * 5))
    stops = frozenset({made[0].tokens[1]})  # so that one ends before the others
    bar = tokens_bar(5, Decoding(Sampling(), stops, 6))
    counts = []
    for _ in generate_batched(target, rows, replace(greedily, stops=stops), 2, [0] * 5, bar=bar):
        counts.append(bar.n)
    assert bar.n == bar.total == 30
    assert counts == sorted(counts)
    assert 0 < counts[0] < 30
