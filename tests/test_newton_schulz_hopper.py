"""Gradients by Hopper's own kernel, run on the CPU, against the plain form in float64."""

import pytest
import torch

pytest.importorskip("triton")

from gluon_on_cpu import OnCPU

from atlas_lm.ops.newton_schulz import newton_schulz as plain
from atlas_lm.ops.triton import newton_schulz as fused

POINTS, MEMORIES = 2, 2


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def error(found, expected):
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-30))


def rounded_product(a, b):
    """What a card makes of operands in float32."""
    return a.bfloat16().to(a.dtype) @ b.bfloat16().to(b.dtype)


class Case:
    """Matrices side by side in memories that are longer than they are."""

    def __init__(self, shapes, pairs, coefficients="muon", entering=1.0, share=1.0):
        self.shapes, self.coefficients = shapes, coefficients
        areas, z, half = [r * c for r, c in shapes], MEMORIES, torch.bfloat16
        self.places, self.size = (
            tuple(5 + sum(areas[:n]) for n in range(len(areas))),
            sum(areas) + 9,
        )
        self.factors = tuple(
            (normal(z, pairs, r, seed=20 + n, dtype=half), normal(z, pairs, c, seed=n, dtype=half))
            for n, (r, c) in enumerate(shapes)
        )
        self.entering = entering * normal(z, self.size, seed=9)
        self.share = share * normal(z, POINTS, pairs, seed=3)
        self.kept, self.last = normal(z, POINTS, seed=4).sigmoid(), normal(z, POINTS, seed=5)
        self.reads = normal(z, POINTS, self.size, seed=6, dtype=half)
        self.weights = normal(z, self.size, seed=7)

    def part(self, x, n):
        """Matrix n of memories."""
        rows, columns = self.shapes[n]
        x = x[..., self.places[n] : self.places[n] + rows * columns]
        return x.unflatten(-1, (rows, columns))

    def defined(self, n, dtype=torch.float64, product=torch.matmul):
        """Gradients of the momenta of matrix n, of last and of kept, by the definition."""
        u, x = self.factors[n][0].to(dtype), self.factors[n][1].to(dtype)
        entering, weights, reads = (
            self.part(each, n).to(dtype) for each in (self.entering, self.weights, self.reads)
        )
        share, kept, last = (each.to(dtype) for each in (self.share, self.kept, self.last))
        s = product(u.mT[:, None] * share[:, :, None], x[:, None])
        s = (s + kept[..., None, None] * entering[:, None]).requires_grad_()
        made = plain(s, 5, self.coefficients, product)
        (grad,) = torch.autograd.grad(made, s, reads + last[..., None, None] * weights[:, None])
        of_last = torch.einsum("zrc,zmrc->zm", weights, made.detach())
        return grad, of_last, torch.einsum("zrc,zmrc->zm", entering, grad)

    def launched(self, dtype):
        """The same of all matrices by the kernel, gradients of momenta in `dtype`."""
        at = self.places[0]
        sides = tuple((u[None], x[None]) for u, x in self.factors)
        inside = tuple(place - at for place in self.places)
        share, kept, reads = self.share[None], self.kept[None], self.reads[None, ..., at:]
        made = fused.Momenta(self.entering[None, :, at:], sides, inside, share, kept)
        grads = fused.StepGradients(reads, self.last[None], self.weights[:, at:])
        pulled = torch.empty(MEMORIES, POINTS + 1, self.size, dtype=dtype)
        sums = torch.empty(2, len(self.shapes), MEMORIES, POINTS)
        given = reads, grads, pulled[..., at:], *sums[:, None]
        (run,) = fused.momentum_steps_backward(made, self.size, 5, self.coefficients, *given)
        assert run.kernel is fused.hopper.momentum_backward
        run(0)
        left = pulled[:, -1], pulled[..., :at], pulled[..., self.size - 4 :]
        assert all(x.isnan().all() for x in left)
        return [(self.part(pulled[:, :-1], n), *sums[:, n]) for n in range(len(self.shapes))]


@pytest.fixture
def on_cpu(monkeypatch):
    """Launches as on Hopper; called with what stands for bfloat16."""
    own = fused.hopper.momentum_backward

    def use(dtype):
        monkeypatch.setattr(fused, "on_hopper", lambda device: True)
        monkeypatch.setattr(fused.hopper, "momentum_backward", OnCPU(own, dtype))

    return use


CASES = [
    Case(((64, 256), (256, 64)), 64),
    Case(((64, 256), (256, 64)), 79, "polar_express"),
    Case(((256, 64),), 37),
    Case(((61, 200),), 79, entering=8.0),
    Case(((193, 33), (193, 33), (33, 193)), 37, "polar_express"),
    Case(((64, 256), (256, 64)), 1, entering=0.0),
    Case(((61, 200),), 1, "polar_express", entering=0.0),
]


@pytest.mark.parametrize("case", CASES)
def test_without_rounding_gradients_are_those_of_the_definition(case, on_cpu):
    """Of rank 1, float32 rounds what is not there too, and steps multiply that by up to 1,000."""
    on_cpu(torch.float32)
    for n, found in enumerate(case.launched(torch.float32)):
        grad, last, kept = map(error, found, case.defined(n))
        assert grad < 1e-5
        assert last < (1e-3 if case.share.shape[-1] == 1 else 1e-4)
        assert kept < 1e-4


@pytest.mark.parametrize("case", CASES)
def test_in_bfloat16_gradients_are_off_by_what_rounded_products_are_off(case, on_cpu):
    """Sums of a few numbers by luck more, or less."""
    on_cpu(torch.bfloat16)
    for n, found in enumerate(case.launched(torch.bfloat16)):
        expected = case.defined(n)
        plainly = case.defined(n, torch.float32, rounded_product)
        assert error(found[0], expected[0]) < 1.5 * error(plainly[0].bfloat16(), expected[0])
        assert error(found[0], expected[0]) < 0.07
        assert error(found[1], expected[1]) < 0.1
        assert error(found[2], expected[2]) < 0.15


def test_a_momentum_of_zero_has_the_gradient_of_the_definition(on_cpu):
    on_cpu(torch.float32)
    case = Case(((64, 256),), 5, entering=0.0, share=0.0)
    (found,) = case.launched(torch.float32)
    grad, last, kept = case.defined(0)
    assert error(found[0], grad) < 1e-5
    assert not found[1].any()
    assert not last.any()
    assert not found[2].any()
    assert not kept.any()
