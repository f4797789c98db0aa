"""The polynomial map: real monomials, and the kernel they realise."""

from itertools import combinations_with_replacement
from math import comb, factorial, prod

import pytest
import torch

from atlas_lm import RULES, Rule
from atlas_lm.ops.features import (
    default_coefficients,
    feature_width,
    features_of,
    kernel_of,
    polynomial,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_coefficients(*shape):
    return normal(*shape, seed=5).exp()


@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("per_head", [False, True])
def test_kernel_identity(degree, per_head):
    """<phi(q), phi(k)> = sum_i a_i (q.k)^i, for all heads at once and for each its own a."""
    q, k = normal(2, 3, 7, 5), normal(2, 3, 6, 5, seed=1)
    a = random_coefficients(3, degree + 1) if per_head else random_coefficients(degree + 1)
    found = polynomial(q, a) @ polynomial(k, a).mT
    dots = q @ k.mT
    expected = sum(a[..., i, None, None] * dots**i for i in range(degree + 1))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_short_kernel_is_the_product_of_features(degree):
    rule = Rule(features="polynomial", degree=degree)
    q, k, a = normal(2, 3, 7, 5), normal(2, 3, 6, 5, seed=1), random_coefficients(3, degree + 1)
    fq, fk = polynomial(q, a), polynomial(k, a)
    short = kernel_of(rule, a, torch.matmul)(q, k, fq, fk)
    torch.testing.assert_close(short, fq @ fk.mT, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("degree", [1, 2, 3, 4])
def test_order_and_weights_are_those_of_the_contract(degree):
    x, a = normal(4), random_coefficients(degree + 1)
    expected = []
    for p in range(degree + 1):
        for combo in combinations_with_replacement(range(4), p):
            ways = factorial(p) / prod(factorial(combo.count(i)) for i in range(4))
            expected.append((a[p] * ways).sqrt() * prod(float(x[i]) for i in combo))
    found = polynomial(x[None, None], a)[0, 0]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("d", "p"), [(4, 1), (4, 2), (4, 3), (6, 2), (2, 5)])
def test_rank_on_gaussian_keys_is_the_width(d, p):
    rule = Rule(features="polynomial", degree=p)
    keys = normal(3 * comb(d + p, p), d)
    phi = features_of(rule, default_coefficients(rule, keys))(keys[None, None])[0, 0]
    assert feature_width(rule, d) == phi.shape[1] == comb(d + p, p)
    assert torch.linalg.matrix_rank(phi) == comb(d + p, p)


def test_default_coefficients_are_those_of_exp():
    a = default_coefficients(Rule(features="polynomial", degree=3), torch.zeros(()))
    torch.testing.assert_close(a, torch.tensor([1, 1, 1 / 2, 1 / 6]))


def test_sketches_and_powers_have_no_hidden_door():
    """Identity is the key itself, exponential shows its finite part, nothing else is polynomial."""
    x = normal(1, 1, 3, 4)
    assert features_of(RULES["titans"], None)(x) is x
    expected = torch.cat([torch.ones(1, 1, 3, 1, dtype=x.dtype), x], -1)
    torch.testing.assert_close(features_of(RULES["dot"], None)(x), expected)
