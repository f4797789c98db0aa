"""Newton-Schulz: the nearest half-orthogonal matrix, by matrix products alone."""

from __future__ import annotations

import torch
from torch import Tensor

from atlas_lm.shapes import Product

COEFFICIENTS: dict[str, tuple[tuple[float, float, float], ...]] = {
    "muon": ((3.4445, -4.7750, 2.0315),),
    "polar_express": (
        (8.1566, -22.4833, 15.8788),
        (4.0429, -2.8089, 0.5000),
        (3.8917, -2.7725, 0.5061),
        (3.2858, -2.3681, 0.4645),
        (2.3465, -1.7098, 0.4232),
    ),
    "cubic": ((1.5, -0.5, 0.0),),
}
"""(a, b, c) of each step; the last one repeats."""


def newton_schulz(
    matrix: Tensor, steps: int = 5, coefficients: str = "muon", product: Product = torch.matmul
) -> Tensor:
    """X <- a X + (b A + c A A) X with A = X X^T, from X = S / sqrt(|S|^2 + 1e-12); `[... m n]`."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    wide = matrix.mT if tall else matrix
    square = wide.square().sum((-2, -1), keepdim=True)
    table = COEFFICIENTS[coefficients]
    schedule = tuple(table[min(i, len(table) - 1)] for i in range(steps))
    x = _Iterate.apply(wide * (square + 1e-12).rsqrt(), schedule, product)
    return x.mT if tall else x


def _step(x: Tensor, abc: tuple[float, float, float], product: Product) -> Tensor:
    a, b, c = abc
    gram = product(x, x.mT)
    return a * x + product(b * gram + c * product(gram, gram), x)


def _step_backward(x: Tensor, grad: Tensor, abc: tuple[float, float, float], product: Product):
    a, b, c = abc
    gram = product(x, x.mT)
    inner = b * gram + c * product(gram, gram)
    outer = product(grad, x.mT)
    outer = outer + outer.mT
    mixed = product(outer, gram)
    through_gram = b * outer + c * (mixed + mixed.mT)
    return a * grad + product(inner, grad) + product(through_gram, x)


class _Iterate(torch.autograd.Function):
    """The steps, keeping one matrix a step where autograd would keep five."""

    @staticmethod
    def forward(ctx, x, schedule, product):
        ctx.schedule, ctx.product = schedule, product
        iterates = []
        for abc in schedule:
            if ctx.needs_input_grad[0]:
                iterates.append(x)
            x = _step(x, abc, product)
        ctx.save_for_backward(*iterates)
        return x

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        for x, abc in zip(reversed(ctx.saved_tensors), reversed(ctx.schedule), strict=True):
            grad = _step_backward(x, grad, abc, ctx.product)
        return grad, None, None
