"""Newton-Schulz against a plain loop, its exact gradient, and what it is for."""

import pytest
import torch

from atlas_lm.ops.newton_schulz import COEFFICIENTS, newton_schulz

SHAPES = [(4, 4), (3, 7), (9, 4), (1, 5)]


def matrices(m, n, seed=0):
    return torch.randn(
        2, 3, m, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def plain(matrix, steps, coefficients):
    """The definition, with no thought for the short side."""
    x = matrix / (matrix.square().sum((-2, -1), keepdim=True) + 1e-12).sqrt()
    table = COEFFICIENTS[coefficients]
    for i in range(steps):
        a, b, c = table[min(i, len(table) - 1)]
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("coefficients", COEFFICIENTS)
@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_values_and_gradients_are_those_of_the_loop(m, n, coefficients):
    s = matrices(m, n).requires_grad_()
    weight = matrices(m, n, seed=1)
    found, expected = newton_schulz(s, 5, coefficients), plain(s, 5, coefficients)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    grads = [torch.autograd.grad((y * weight).sum(), s)[0] for y in (found, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-9, atol=1e-9)


def test_gradient_against_finite_differences():
    s = matrices(3, 5)[0, :1].requires_grad_()
    assert torch.autograd.gradcheck(lambda x: newton_schulz(x, 3), s)


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_singular_values_come_close_to_one(m, n):
    values = torch.linalg.svdvals(newton_schulz(matrices(m, n)))
    assert values.min() > 0.5
    assert values.max() < 1.3


def test_converges_to_the_polar_factor():
    s = matrices(4, 6)
    u, _, vh = torch.linalg.svd(s, full_matrices=False)
    found = newton_schulz(s, steps=30, coefficients="cubic")
    torch.testing.assert_close(found, u @ vh, rtol=1e-8, atol=1e-8)


def test_scale_does_not_matter_and_zero_stays_zero():
    s = matrices(3, 5)
    torch.testing.assert_close(newton_schulz(7.3 * s), newton_schulz(s), rtol=1e-9, atol=1e-9)
    zero = torch.zeros(2, 3, 5, dtype=torch.float64, requires_grad=True)
    y = newton_schulz(zero)
    (grad,) = torch.autograd.grad(y.sum(), zero)
    assert not y.any()
    assert grad.isfinite().all()
