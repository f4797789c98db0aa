"""What is rounded and what is not."""

from dataclasses import replace

import pytest
import torch

from atlas_lm import RULES
from atlas_lm.ops.precision import product_for, state_dtype
from atlas_lm.testing import example


def rounded(x):
    return x.bfloat16().float()


def in_bfloat16(made):
    """q, k, v in bf16; gates and weights stay float32, as a layer keeps them."""
    return replace(made, q=made.q.bfloat16(), k=made.k.bfloat16(), v=made.v.bfloat16())


def relative(found, expected):
    return float((found.double() - expected).norm() / expected.norm())


def test_only_operands_are_rounded_in_every_derivative():
    generator = torch.Generator().manual_seed(0)
    a, b, g = (torch.randn(3, 6, 6, generator=generator) for _ in range(3))
    a.requires_grad_()
    product = product_for(torch.bfloat16)
    y = product(a, b)
    assert torch.equal(y, rounded(a) @ rounded(b))
    (grad,) = torch.autograd.grad(y, a, g, create_graph=True)
    assert torch.equal(grad, rounded(g) @ rounded(b).mT)
    for dtype in (torch.float32, torch.float64):
        assert torch.equal(product_for(dtype)(a, b), torch.bmm(a, b))


def test_second_derivatives_of_the_rounded_product():
    a, b = (torch.randn(2, 4, 4, requires_grad=True) for _ in range(2))
    y = product_for(torch.bfloat16)(a, b).square().sum()
    (first,) = torch.autograd.grad(y, a, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), b)
    assert second.abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("impl", ["reference", "chunked"])
def test_state_is_float32_or_better_and_output_like_the_input(dtype, impl):
    made = example(replace(RULES["atlas"], chunk=8), 20, dtype=dtype)
    y, state = made.run(impl)
    assert y.dtype == dtype
    kinds = {t.dtype for t in state.tensors().values() if t.is_floating_point()}
    assert kinds == {state_dtype(dtype)}
    again, _ = made.run(impl, state)
    assert again.isfinite().all()


@pytest.mark.parametrize("name", RULES)
def test_bfloat16_stays_near_float64(name):
    """And differs from float32 on the same inputs: the operands really are rounded."""
    rule = RULES[name] if RULES[name].chunk == 1 else replace(RULES[name], chunk=16)
    made = in_bfloat16(example(rule, 40, d_k=8, d_v=8, dtype=torch.float32))
    exact = made.with_inputs({n: x.double() for n, x in made.inputs().items()})
    plain = made.with_inputs({n: x.float() for n, x in made.inputs().items()})
    expected, state = exact.run("reference")
    y, end = made.run("chunked")
    assert relative(y, expected) < 0.03
    for n, w in state.weights.items():
        error, error_plain = (relative(s.weights[n], w) for s in (end, plain.run()[1]))
        assert error_plain < 1e-4
        faded = rule.features == "exponential" and n in ("w2", "w3")
        assert error < 0.06
        assert faded or error > 10 * error_plain


def test_bfloat16_gradients_stay_near_float64():
    made = in_bfloat16(
        example(replace(RULES["titans"], chunk=16), 40, d_k=8, d_v=8, dtype=torch.float32)
    )
    exact = made.with_inputs({n: x.double() for n, x in made.inputs().items()})
    weight, grads = torch.linspace(-1, 1, 8, dtype=torch.float64), []
    for each in (made, exact):
        inputs = {n: x.clone().requires_grad_() for n, x in each.inputs().items()}
        y, _ = each.with_inputs(inputs).run()
        grads.append(torch.autograd.grad((y * weight).sum(), list(inputs.values())))
    for found, expected in zip(*grads, strict=True):
        assert relative(found, expected.double()) < 0.05
