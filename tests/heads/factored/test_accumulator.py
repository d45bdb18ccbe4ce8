"""Small changes are not lost, however many there are."""

import copy

import torch

from spherical_loss.heads.factored.accumulator import Accumulator


def changed(steps, scale=1.0):
    """An accumulator after many tiny changes, folded in now and then; where it started; and the same in float64."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(5, 5, generator=generator)
    start = start + start.T
    matrix, expected = Accumulator(5, torch.float32, torch.float64), start.double()
    matrix.set_(start)
    for step in range(steps):
        left, right = 1e-4 * torch.rand(5, 3, generator=generator), 1e-4 * torch.rand(3, 5, generator=generator)
        matrix.subtract_(left @ right, alpha=2.0, scale=scale)
        product = left.double() @ right.double()
        expected = scale * expected - 2.0 * (product + product.T)
        if step % 32 == 0:
            matrix.fold_in()
    return matrix, start, expected


def test_changes_far_below_the_rounding_error_add_up():
    matrix, start, expected = changed(5_000)
    total = (start - expected).abs()
    assert total.min() > 4e-5
    assert ((matrix.exact - expected).abs() < 1e-6 * total).all()
    torch.testing.assert_close(matrix.value.double(), expected, rtol=3e-7, atol=0)


def test_scaling_concerns_the_recent_changes_too():
    matrix, _, expected = changed(20, scale=0.9)
    torch.testing.assert_close(matrix.exact, expected, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(matrix.value.double(), expected, rtol=3e-7, atol=0)


def test_what_is_saved_gives_the_same_bits():
    matrix, _, _ = changed(40, scale=0.999)
    state = copy.deepcopy(matrix.state_dict())
    assert set(state) == {"base", "recent"}
    loaded = Accumulator(5, torch.float32, torch.float64)
    loaded.load_state_dict(state)
    assert torch.equal(loaded.value, matrix.value)
    change = torch.rand(5, 5)
    for each in (matrix, loaded):
        each.subtract_(change)
    assert torch.equal(loaded.value, matrix.value)
