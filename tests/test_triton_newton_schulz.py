"""Newton-Schulz kernels in Triton's interpreter against the plain form in float64."""

import pytest
import torch

pytest.importorskip("triton")

from atlas_lm.ops.kernels import on_chip
from atlas_lm.ops.newton_schulz import newton_schulz as plain
from atlas_lm.ops.triton import newton_schulz as fused
from atlas_lm.ops.triton.launch import Repeated

if not fused.INTERPRETED:
    pytest.skip("needs TRITON_INTERPRET=1", allow_module_level=True)

SHAPES = [(16, 16), (16, 24), (20, 16), (5, 40), (70, 17)]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(found, expected, error=1e-4):
    assert found.shape == expected.shape
    assert (found.double() - expected).norm() <= error * expected.norm()


def assert_same_as_plain(matrix, steps=5, coefficients="muon"):
    weight = normal(*matrix.shape, seed=9)
    inputs = matrix.clone().requires_grad_(), matrix.double().requires_grad_()
    found = fused.newton_schulz(inputs[0], steps, coefficients)
    expected = plain(inputs[1], steps, coefficients)
    assert found.dtype == matrix.dtype
    assert_close(found, expected)
    (grad,) = torch.autograd.grad((found * weight).sum(), inputs[0])
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), inputs[1])
    assert_close(grad, expected_grad)


@pytest.mark.parametrize(("m", "n"), SHAPES)
def test_values_and_gradients_are_those_of_the_plain_form(m, n):
    assert_same_as_plain(normal(1, 3, m, n))


@pytest.mark.parametrize(
    ("steps", "coefficients"),
    [
        (5, "polar_express"),
        (7, "polar_express"),
        (1, "muon"),
        (3, "cubic"),
        (16, "polar_express"),
        (17, "cubic"),
    ],
)
def test_every_schedule(steps, coefficients):
    assert_same_as_plain(normal(2, 7, 16), steps, coefficients)


def test_a_matrix_without_batch_and_a_transposed_view():
    assert_same_as_plain(normal(16, 20))
    view = normal(2, 20, 16).mT
    assert_close(fused.newton_schulz(view), plain(view.double()))


def test_rank_deficient():
    assert_same_as_plain(normal(2, 16, 3) @ normal(2, 3, 24, seed=1))


def test_zero_stays_zero_and_its_gradient_is_that_of_the_plain_form():
    assert_same_as_plain(torch.cat([torch.zeros(1, 16, 24), normal(1, 16, 24)])[:1])
    assert not fused.newton_schulz(torch.zeros(2, 16, 24)).any()


def test_no_matrices():
    empty = torch.zeros(0, 16, 16, requires_grad=True)
    fused.newton_schulz(empty).sum().backward()
    assert empty.grad is not None
    assert empty.grad.shape == empty.shape


def test_what_is_too_large_or_in_float64_takes_batched_products():
    assert not on_chip(16, 257)
    assert not on_chip(129, 129)
    assert on_chip(256, 64)
    assert on_chip(128, 128)
    assert_same_as_plain(normal(2, 4, 257))
    double = normal(3, 5, dtype=torch.float64)
    # batched products of some machines round otherwise than single ones
    torch.testing.assert_close(fused.newton_schulz(double), plain(double), rtol=0, atol=1e-14)
    half = normal(2, 4, 257).bfloat16()
    found = fused.newton_schulz(half)
    assert found.dtype == torch.bfloat16
    assert_close(found, plain(half.double()), 0.1)


def momenta(arrays, steps, coefficients):
    """The definition; `[z m r c]`."""
    entering, u, x, share, kept = arrays
    written = torch.einsum("zmi,zir,zic->zmrc", share, u, x)
    s = kept[..., None, None] * entering.unsqueeze(1) + written
    s.retain_grad()
    return s, plain(s, steps, coefficients)


def launch_first(launches: list[Repeated]) -> None:
    """Of piece 0."""
    for each in launches:
        each(0)


@pytest.mark.parametrize(
    ("rows", "columns", "pairs", "coefficients"),
    [
        (16, 16, 16, "muon"),
        (16, 24, 5, "polar_express"),
        (20, 16, 64, "muon"),
        (7, 33, 79, "muon"),
        (3, 250, 130, "muon"),
    ],
)
def test_momentum_steps_and_their_gradients(rows, columns, pairs, coefficients):
    z, points = 2, 3
    arrays = (
        normal(z, rows, columns),
        normal(z, pairs, rows, seed=1),
        normal(z, pairs, columns, seed=2),
        normal(z, points, pairs, seed=3),
        torch.rand(z, points, generator=torch.Generator().manual_seed(4)),
    )
    grad_out, last = normal(z, points, rows, columns, seed=5), normal(z, points, seed=6)
    grad_weights = normal(z, rows, columns, seed=7)
    s, expected = momenta([a.double().requires_grad_() for a in arrays], 5, coefficients)
    weights = last.double()[..., None, None] * grad_weights.double().unsqueeze(1)
    expected.backward(grad_out.double() + weights)

    out = torch.empty_like(grad_out)
    grad_last, grad_kept = torch.empty(2, *last.shape).unbind(0)
    grad_momentum = torch.empty(z, points + 1, rows, columns)
    entering, u, x, share, kept = arrays
    pieces = fused.Momenta(entering[None], ((u[None], x[None]),), (0,), share[None], kept[None])
    size = rows * columns
    launch_first(fused.momentum_steps(pieces, size, 5, coefficients, out[None]))
    grads = fused.StepGradients(grad_out[None], last[None], grad_weights)
    outs = grad_momentum, grad_last[None], grad_kept[None]
    given = pieces, size, 5, coefficients, out[None], grads, *outs
    launch_first(fused.momentum_steps_backward(*given))
    assert_close(out, expected)
    assert_close(grad_momentum[:, :-1], s.grad)
    assert grad_momentum[:, -1].isnan().all()
    assert_close(grad_kept, torch.einsum("zrc,zmrc->zm", arrays[0].double(), s.grad))
    assert_close(grad_last, torch.einsum("zrc,zmrc->zm", grad_weights.double(), expected))


def test_matrices_of_one_size_in_one_launch():
    """Wide, tall and tall again, side by side in a memory with others: each as if it were alone."""
    z, points, pairs, size = 2, 3, 5, 3 * 16 * 24 + 7
    factors = tuple(
        (normal(z, pairs, r, seed=n), normal(z, pairs, c, seed=9 + n))
        for n, (r, c) in enumerate(((16, 24), (24, 16), (24, 16)))
    )
    places, entering = tuple(16 * 24 * n for n in range(3)), normal(z, size)
    share, kept = normal(z, points, pairs, seed=3), torch.rand(z, points)
    reads, last = normal(z, points, size, seed=5), normal(z, points, seed=6)
    weights = normal(z, size, seed=7)

    def evaluate(which: slice) -> list[torch.Tensor]:
        at = places[which][0]
        inside = tuple(place - at for place in places[which])
        sides = tuple((u[None], x[None]) for u, x in factors[which])
        made = fused.Momenta(entering[None, :, at:], sides, inside, share[None], kept[None])
        out, pulled = torch.zeros(z, points, size), torch.zeros(z, points + 1, size)
        sums = torch.empty(2, len(inside), z, points)
        done = out[None, ..., at:]
        launch_first(fused.momentum_steps(made, size, 5, "muon", done))
        grads = fused.StepGradients(reads[None, ..., at:], last[None], weights[:, at:])
        outs = pulled[..., at:], *sums[:, None]
        given = made, size, 5, "muon", done, grads, *outs
        launch_first(fused.momentum_steps_backward(*given))
        return [out, pulled, sums]

    together, alone = evaluate(slice(0, 3)), [evaluate(slice(n, n + 1)) for n in range(3)]
    for n in range(2):
        assert torch.equal(together[n], torch.stack([x[n] for x in alone]).sum(0))
    assert torch.equal(together[2], torch.cat([x[2] for x in alone], 1))


def test_hopper_has_a_kernel_of_its_own_for_large_matrices(monkeypatch):
    """It is given all that it asks for, in its order; smaller ones are given to the other."""
    monkeypatch.setattr(fused, "on_hopper", lambda device: True)

    def launched(
        rows: int, columns: int, dtype=torch.bfloat16, steps: int = 5, coefficients: str = "muon"
    ) -> Repeated:
        entering = normal(1, 2, rows * columns)
        u, x = normal(1, 2, 5, rows), normal(1, 2, 5, columns)
        share, kept = normal(1, 2, 3, 5), normal(1, 2, 3)
        made = fused.Momenta(entering, ((u.to(dtype), x.to(dtype)),), (0,), share, kept)
        out = torch.empty(1, 2, 3, rows * columns)
        grads = fused.StepGradients(out, kept, entering[0])
        given = out, grads, torch.empty(2, 4, rows * columns), kept[None], kept[None]
        (found,) = fused.momentum_steps_backward(made, rows * columns, steps, coefficients, *given)
        return found

    own = fused.hopper.momentum_backward
    for shape in ((64, 256), (256, 64), (61, 200)):
        repeated = launched(*shape)
        assert repeated.kernel is own
        names = own.arg_names[len(repeated.args) :]
        assert set(repeated.options) == {*names, "warps"}
        assert own.arg_names[: len(repeated.args)][-2:] == ["points", "count"]
    for other in (
        launched(64, 153),
        launched(64, 64),
        launched(20, 256),
        launched(64, 256, torch.float32),
        launched(64, 256, steps=6),
        launched(64, 256, coefficients="cubic"),
    ):
        assert other.kernel is fused.kernels.momentum_backward
    assert launched(64, 256, coefficients="polar_express").kernel is own


def test_no_stride_points():
    u, x = normal(1, 2, 4, 16), normal(1, 2, 4, 24)
    out = torch.empty(1, 2, 0, 16, 24)
    share, kept = torch.empty(1, 2, 0, 4), torch.empty(1, 2, 0)
    made = fused.Momenta(normal(1, 2, 16, 24), ((u, x),), (0,), share, kept)
    assert fused.momentum_steps(made, 16 * 24, 5, "muon", out) == []


def test_every_compilation_names_its_arguments():
    names = [kernel["name"] for kernel in fused.KERNELS]
    assert len(set(names)) == len(names)
    for kernel in fused.KERNELS:
        compiled = {a for a, kind in kernel["signature"].items() if kind == "constexpr"}
        assert compiled == set(kernel["constexprs"])
