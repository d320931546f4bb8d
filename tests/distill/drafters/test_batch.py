"""The draft tokens that a step of training learns."""

import torch

from distill.drafters.batch import TrainingBatch, unrolled_input


def test_each_step_of_a_draft_learns_the_token_of_its_own_place():
    positions = torch.tensor([2, 3, 4, 6, 9 + 3, 9 + 4])
    steps = torch.randn(3, 2, 9, 8)
    batch = TrainingBatch(torch.zeros((2, 9), dtype=int), positions, None, None)
    found = unrolled_input(batch, steps, 0.5)
    # step k + 1 learns a position with k response positions directly before it
    wanted = [(0, n) for n in range(6)] + [(1, 1), (1, 2), (1, 5), (2, 2)]
    assert found.learned.tolist() == [n for _, n in wanted]
    rows = [steps[step].flatten(0, 1)[positions[n]] for step, n in wanted]
    torch.testing.assert_close(found.states, torch.stack(rows))
    shares = torch.tensor([0.5**step for step, _ in wanted])
    torch.testing.assert_close(found.weight, shares / 1.75)
