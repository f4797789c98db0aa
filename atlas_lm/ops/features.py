"""What a memory sees of a key: phi, and the kernel <phi(q), phi(k)> where it has a short form."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from itertools import combinations_with_replacement
from math import comb, factorial, prod

import torch
from torch import Tensor

from atlas_lm.rules import Rule
from atlas_lm.shapes import Product


def feature_width(rule: Rule, d_k: int, device=None, dtype=None) -> int:
    """D, the width of phi; for the exponential map its finite part, [1; x]."""
    if callable(rule.features):
        return rule.features(torch.zeros(1, 1, 1, d_k, device=device, dtype=dtype)).shape[-1]
    widths = {"identity": d_k, "polynomial": comb(d_k + rule.degree, rule.degree)}
    return widths.get(rule.features, 1 + d_k)


def default_coefficients(rule: Rule, like: Tensor) -> Tensor | None:
    """a_i = 1 / i!, the Taylor coefficients of exp."""
    if rule.features != "polynomial":
        return None
    return like.new_tensor([1 / factorial(i) for i in range(rule.degree + 1)])


def features_of(rule: Rule, coefficients: Tensor | None) -> Callable[[Tensor], Tensor]:
    """phi as a function of keys or queries `[b h t k]`."""
    if callable(rule.features):
        return rule.features
    if coefficients is not None:
        return partial(polynomial, coefficients=coefficients)
    if rule.features == "exponential":
        return with_one
    return lambda x: x


def kernel_of(rule: Rule, coefficients: Tensor | None, product: Product):
    """(q, k, phi(q), phi(k)) -> the matrix of <phi(q), phi(k)>, never wider than the raw keys."""
    if coefficients is not None:
        return lambda q, k, fq, fk: _horner(product(q, k.mT), coefficients)
    return lambda q, k, fq, fk: product(fq, fk.mT)


def polynomial(x: Tensor, coefficients: Tensor) -> Tensor:
    """All monomials of degree <= p, scaled so that <phi(q), phi(k)> = sum_i a_i (q.k)^i.

    Ordered by degree, then as `itertools.combinations_with_replacement` gives them.
    x `[... h t k]`, coefficients a `[p+1]` or `[h p+1]`; returns `[... h t D]`.
    """
    degree = coefficients.shape[-1] - 1
    table = _monomials(x.shape[-1], degree, x.device)
    # one row a monomial: selecting rows is a copy, selecting columns a gather
    rows = x.mT.contiguous()
    blocks = [torch.ones_like(rows[..., :1, :]), rows]
    for parent, last in table.recipes:
        blocks.append(blocks[-1].index_select(-2, parent) * rows.index_select(-2, last))
    scale = coefficients.sqrt().index_select(-1, table.degrees) * table.weights.to(x.dtype)
    return (torch.cat(blocks, -2) * scale.unsqueeze(-1)).mT


def with_one(x: Tensor) -> Tensor:
    """[1; x], the first two blocks of the exponential map."""
    return torch.cat([x.new_ones(*x.shape[:-1], 1), x], -1)


def _horner(s: Tensor, coefficients: Tensor) -> Tensor:
    a = coefficients[..., None, None, :]
    total = a[..., -1].expand_as(s)
    for i in reversed(range(a.shape[-1] - 1)):
        total = total * s + a[..., i]
    return total


class _monomials_table:
    """How each block of monomials is made from the block one degree lower."""

    def __init__(self, width: int, degree: int, device: torch.device):
        tensor = partial(torch.tensor, device=device)
        exponents, self.recipes, index = [(), *((i,) for i in range(width))], [], {}
        for p in range(2, degree + 1):
            index = {c: n for n, c in enumerate(combinations_with_replacement(range(width), p - 1))}
            block = list(combinations_with_replacement(range(width), p))
            self.recipes.append(
                (tensor([index[c[:-1]] for c in block]), tensor([c[-1] for c in block]))
            )
            exponents += block
        self.degrees = tensor([len(c) for c in exponents])
        self.weights = tensor([_multiplicity(c) ** 0.5 for c in exponents], dtype=torch.float64)


@lru_cache(maxsize=32)
def _monomials(width: int, degree: int, device: torch.device) -> _monomials_table:
    return _monomials_table(width, degree, device)


def _multiplicity(monomial: tuple[int, ...]) -> int:
    """How many ordered products give this monomial."""
    repeats = (monomial.count(i) for i in set(monomial))
    return factorial(len(monomial)) // prod(map(factorial, repeats))
