"""Attention of a block: right, and taken together only where that keeps the bits."""

import pytest
import torch
import torch.nn.functional as F

from eval.decoding import cpu_bits
from eval.decoding.cpu_bits import BlockAttention, sums_alike
from eval.decoding.forward import causal_bias

SIZE, SLOTS = 16, 192


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("group", [1, 3, 7, 16])
@pytest.mark.parametrize(("first", "width"), [(0, 1), (5, 4), (62, 5), (120, 16), (180, 12)])
def test_it_is_attention_over_what_each_position_may_see(first, width, group, together):
    torch.manual_seed(first + width)
    heads = 2 * group
    q = torch.randn(1, heads, width, SIZE)
    keys, values = torch.randn(2, 1, 2, SLOTS, SIZE)
    end = first + width
    bias = causal_bias(torch.tensor([first]), width, cpu_bits.whole_blocks(end), torch.float32)
    found = BlockAttention(bias, first, SLOTS, group, together)(q, keys, values)
    assert found.shape == (width, heads, SIZE)
    for i in range(width):
        seen = slice(0, first + i + 1)
        k, v = (held[:, :, seen].repeat_interleave(group, 1) for held in (keys, values))
        wanted = F.scaled_dot_product_attention(q[:, :, i : i + 1], k, v)[0, :, 0]
        torch.testing.assert_close(found[i], wanted)


@pytest.mark.parametrize("group", [2, 7])
def test_a_kernel_that_sums_some_rows_otherwise_is_noticed(monkeypatch, group):
    right = F.scaled_dot_product_attention
    fewest = {"rows": 4}

    def kernel(q, keys, values, mask):
        """The last bit differs if there are fewer rows than so many, in all or beyond 32."""
        out = torch.zeros((*q.shape[:3], values.shape[3]), dtype=q.dtype)
        for at in range(0, q.shape[2], 32):
            part = slice(at, min(at + 32, q.shape[2]))
            seen = right(q[:, :, part], keys, values, mask[:, :, part]).float()
            if part.stop - at < fewest["rows"]:
                seen = seen * (1 + 2**-7)
            out[:, :, part] = seen.to(q.dtype)
        return out

    monkeypatch.setattr(cpu_bits.F, "scaled_dot_product_attention", kernel)
    monkeypatch.setattr(cpu_bits, "TRIALS", 1)
    # equal sums of any number of rows, whatever the machine at hand does
    monkeypatch.setattr(cpu_bits, "TRIED_HEADS", 1)
    monkeypatch.setattr(
        torch, "equal", lambda a, b: bool((a - b).abs().max() < 2**-9 * b.abs().max())
    )
    sums_alike.cache_clear()
    assert sums_alike(group, SIZE, torch.float32)
    for rows in (group + 1, 2 * group + 1):
        fewest["rows"] = rows
        sums_alike.cache_clear()
        assert sums_alike(group, SIZE, torch.float32) == (rows <= 4)
    sums_alike.cache_clear()


def test_a_group_that_fills_the_kernel_is_taken_apart():
    assert not sums_alike(17, SIZE, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_last_positions_of_texts_are_multiplied_without_copies_of_the_weight(dtype):
    x, weight = torch.randn(4, 5, 8, dtype=dtype), torch.randn(300, 8, dtype=dtype)
    with torch.profiler.profile(record_shapes=True) as profile:
        y = cpu_bits.linear(x[:, -1:], weight, None)
    copied = [e for e in profile.events() if [4, *reversed(weight.shape)] in (e.input_shapes or [])]
    assert not copied
    torch.testing.assert_close(y, F.linear(x, weight)[:, -1:])
