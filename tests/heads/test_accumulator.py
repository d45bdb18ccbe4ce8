"""Small changes are not lost, however many there are."""

import torch

from spherical_loss.heads.accumulator import Accumulator


def test_changes_far_below_the_rounding_error_add_up():
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 5, generator=generator)
    matrix, expected = Accumulator(5, torch.float32, torch.float64), start.double()
    matrix.set_(start)
    for step in range(5_000):
        change = 1e-8 * torch.rand(5, 5, generator=generator)
        matrix.subtract_(change, alpha=2.0)
        expected -= 2.0 * change.double()
        if step % 32 == 0:
            matrix.settle()
    total = (start - expected).abs()
    assert total.min() > 4e-5
    assert ((matrix.exact - expected).abs() < 1e-6 * total).all()
    matrix.settle()
    torch.testing.assert_close(matrix.value.double(), expected, rtol=1e-7, atol=0)


def test_scaling_concerns_the_recent_changes_too():
    matrix = Accumulator(2, torch.float32, torch.float64)
    matrix.set_(torch.eye(2))
    matrix.subtract_(torch.full((2, 2), 0.5))
    matrix.scale_(0.5)
    expected = torch.tensor([[0.25, -0.25], [-0.25, 0.25]])
    assert torch.equal(matrix.exact, expected.double())
    assert torch.equal(matrix.value, expected)
