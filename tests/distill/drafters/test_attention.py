"""Attention over packed texts: text by text, with one dense mask, and by the definition."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from distill.drafters.attention import BESIDE, NO_TEXT, Attention, Marks, rotated, sees
from distill.drafters.batch import MULTIPLE
from distill.drafters.layers import rotary_of

HEADS, KEYS, SIZE = 6, 2, 8
# texts of 5, 1 and 7 tokens and padding; groups behind positions of the first and the last text
LENGTHS = (5, 1, 7)


def marks():
    texts = [number for number, length in enumerate(LENGTHS) for _ in range(length)]
    numbers = [number for length in LENGTHS for number in range(length)]
    text = Marks.of_texts(torch.tensor([[*texts, -1, -1]]), torch.tensor([[*numbers, 0, 1]]))
    slots = torch.tensor([[0, 0, 0, 2, 2, 2, -1]])
    positions, groups = (
        torch.tensor([[1, 1, 3, 4, 4, 4, 0]]),
        torch.tensor([[4, 4, 6, 9, 9, 9, -1]]),
    )
    return text, Marks(slots, positions, groups, torch.tensor([[0, 1, 0, 0, 1, 2, 0]]))


def seen_by_definition(query, key, window, both_ways):
    """Each argument a text, a position, a group, a depth."""
    if query[0] != key[0]:
        return False
    if key[1] != BESIDE and query[1] - key[1] >= 0:
        return window is None or query[1] + query[3] - key[1] < window
    in_group = key[1] == BESIDE and query[2] == key[2]
    return in_group and (both_ways or key[3] <= query[3])


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("beside", [False, True])
def test_it_sees_what_the_definition_says_however_it_is_computed(beside, window, both_ways):
    text, slots = marks()
    queries, keys = (text.then(slots), text.then(slots.as_keys())) if beside else (text, text)
    torch.manual_seed(0)
    shapes = [(HEADS, queries), (KEYS, keys), (KEYS, keys)]
    inputs = [
        torch.randn(1, heads, of.texts.shape[1], SIZE, requires_grad=True) for heads, of in shapes
    ]
    real = queries.texts[0] != NO_TEXT
    columns = [list(zip(*(f[0].tolist() for f in each), strict=True)) for each in (queries, keys)]
    seen = torch.tensor(
        [[seen_by_definition(q, k, window, both_ways) for k in columns[1]] for q in columns[0]]
    )
    assert torch.equal(sees(queries, keys, window, both_ways)[0, real], seen[real])
    q, k, v = inputs
    k, v = (x.repeat_interleave(HEADS // KEYS, 1) for x in (k, v))
    scores = (q @ k.transpose(2, 3)) * SIZE**-0.5
    weights = scores.masked_fill(~seen, -1e9).softmax(-1)
    expected = (weights @ v).transpose(1, 2)[:, real]
    pull = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, inputs, pull)
    for by_text in (True, False):
        attention = Attention(queries, keys, by_text)
        out = attention(*inputs, window=window, both_ways=both_ways)[:, real]
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        for x, y in zip(torch.autograd.grad(out, inputs, pull), gradients, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


def test_texts_that_are_not_in_order_and_rows_are_computed_the_same():
    torch.manual_seed(1)
    texts = torch.tensor([[0, 0, 0, 2, 2, -1], [1, 1, 3, 3, 3, 3]])
    numbers = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]])
    of = Marks.of_texts(texts, numbers)
    q, k, v = (torch.randn(2, heads, 6, SIZE) for heads in (HEADS, KEYS, KEYS))
    real = texts != NO_TEXT
    out, dense = (Attention(of, of, by_text=by_text)(q, k, v)[real] for by_text in (True, False))
    torch.testing.assert_close(out, dense, rtol=1e-4, atol=1e-5)


def test_nothing_of_the_size_of_the_scores_is_kept():
    length = 40 * MULTIPLE
    texts = torch.arange(40).repeat_interleave(MULTIPLE)[None]
    of = Marks.of_texts(texts, torch.arange(MULTIPLE).repeat(40)[None])
    q, k, v = (torch.randn(1, heads, length, SIZE, requires_grad=True) for heads in (4, 2, 2))
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, id):
        Attention(of, of)(q, k, v)
    assert max(sizes) <= 4 * length * SIZE


def test_a_rotation_and_its_gradient_are_those_of_transformers(tiny_llama):
    body, positions = tiny_llama(0, 1).model, torch.tensor([[0, 1, 5, 3]])
    size = body.config.head_dim
    x, pull = (torch.randn(1, 3, 4, size) for _ in range(2))
    x.requires_grad_()
    expected, _ = apply_rotary_pos_emb(x, x, *body.rotary_emb(x, positions))
    out = rotated(x, rotary_of(body, positions))
    torch.testing.assert_close(out, expected)
    gradients = (torch.autograd.grad(turned, x, pull) for turned in (out, expected))
    torch.testing.assert_close(*gradients)
