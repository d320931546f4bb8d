"""The draft tokens that a step of training learns."""

import pytest
import torch

from distill.drafters.batch import drawn_depths, slots, unrolled_input, unrolled_plan
from tests.distill.drafters.batches import batch_of

# of the first text three tokens are predicted, then one alone, then two
TEXTS, PROMPTS = ([5] * 6, [6] * 3, [7] * 7), (3, 2, 5)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("by_draft", [True, False])
def test_each_step_of_a_draft_learns_the_token_of_its_own_place(packed, by_draft):
    batch = batch_of(TEXTS, PROMPTS, packed=packed)
    size = batch.input_ids.numel()
    plan = unrolled_plan(batch, batch.positions, size, 3, by_draft)
    outputs = torch.randn(3, *batch.input_ids.shape, 8)
    read = unrolled_input(list(outputs), plan, 0.5)
    # step k + 1 learns a position with k response positions directly before it
    expected = [(0, n) for n in range(6)] + [(1, 1), (1, 2), (1, 5), (2, 2)]
    assert read.learned.tolist() == [n for _, n in expected]
    # the output is at the token where it predicts, or where its draft began k positions before
    places = [n - k * by_draft for k, n in expected]
    rows = [
        outputs[k].flatten(0, 1)[batch.positions[n]]
        for (k, _), n in zip(expected, places, strict=True)
    ]
    torch.testing.assert_close(read.states, torch.stack(rows))
    shares = torch.tensor([0.5**step for step, _ in expected])
    torch.testing.assert_close(read.weight, shares / 1.75)
    assert plan.counts == (6, 3, 1)


def test_slots_lie_in_the_row_of_their_anchor():
    batch = batch_of(TEXTS, PROMPTS, packed=False)
    anchors, depths = torch.tensor([4, 0, 5, 2]), torch.tensor([1, 0, 2, 3])
    of_anchors, of_depths, places = slots(batch, anchors, depths)
    assert of_anchors.flatten()[places].tolist() == anchors.tolist()
    assert of_depths.flatten()[places].tolist() == depths.tolist()
    assert [row[row >= 0].tolist() for row in of_anchors] == [[0, 2], [], [4, 5]]
    assert int((of_anchors >= 0).sum()) == 4


def test_what_is_drawn_depends_on_the_seed_of_the_text_alone():
    texts, prompts, seeds = [[5] * 40, [6] * 90, [7] * 60], [3, 2, 9], [4, 5, 6]
    together = drawn_depths(batch_of(texts, prompts, seeds=seeds), 6, 0.6)
    each = [
        drawn_depths(batch_of([text], [prompt], seeds=[seed], packed=False), 6, 0.6)
        for text, prompt, seed in zip(texts, prompts, seeds, strict=True)
    ]
    assert torch.equal(together, torch.cat(each))
    again = drawn_depths(batch_of(texts, prompts, seeds=seeds), 6, 0.6, again=True)
    agreed = (again == together).float().mean()
    assert agreed < 0.6  # two independent draws agree at 0.41 of the positions in the mean
