import pytest
import torch

from align.trim import choose_tokens, coverage_curve, lost_mass


def test_the_curve_loses_ever_less_and_ends_at_nothing():
    mass = torch.tensor([0.5, 0.2, 0.1, 0.08, 0.06, 0.03, 0.02, 0.01, 0.0, 0.0], dtype=torch.double)
    curve = coverage_curve(mass, [7, 9])
    assert [size for size, _ in curve] == [2, 4, 8, 10]
    lost = [share for _, share in curve]
    assert lost == pytest.approx([0.99, 0.29, 0.02, 0.0])


@pytest.mark.parametrize("forced", [[], [3], list(range(10))])
def test_every_point_is_what_a_head_of_that_size_loses(forced):
    mass = torch.rand(10, generator=torch.Generator().manual_seed(0))
    for size, lost in coverage_curve(mass, forced):
        assert lost == lost_mass(mass, choose_tokens(mass, size, forced))
