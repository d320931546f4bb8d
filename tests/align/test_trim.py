import pytest
import torch

from align.trim import byte_units, coverage_curve


def test_the_curve_loses_ever_less_and_ends_at_nothing():
    mass = torch.tensor([0.5, 0.2, 0.1, 0.08, 0.06, 0.03, 0.02, 0.01, 0.0, 0.0], dtype=torch.double)
    curve = coverage_curve(mass, [7, 9])
    assert [size for size, _ in curve] == [2, 4, 8, 10]
    lost = [share for _, share in curve]
    assert lost == pytest.approx([0.99, 0.29, 0.02, 0.0])


def test_tokens_of_one_byte_are_the_byte_units():
    tokens = [("normal", b"\xff"), ("normal", b"ab"), None, ("normal", b""), ("normal", b"a")]
    assert byte_units(tokens) == [0, 4]
