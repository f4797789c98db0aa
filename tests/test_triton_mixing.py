"""The mixing matrices of the kernels against the chunked form's, values and every gradient."""

from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from atlas_lm.ops.chunked import Mixing
from atlas_lm.ops.decay import decay, spread
from atlas_lm.ops.segments import Inputs
from atlas_lm.ops.triton import mixing
from atlas_lm.ops.triton.mixing import additive, stepping

SIZES = [(5, 1), (5, 3), (5, 8), (16, 1), (16, 7), (20, 3), (20, 23)]
ROWS = 3


@pytest.fixture(autouse=True)
def _programs_take_turns(monkeypatch):
    monkeypatch.setattr(mixing, "TURNS", 2)


def gates(length, c, filled, seed=0):
    """alpha, eta, theta, gamma: far from 1 in the first row, tiny in the second, 1 in the third."""
    torch.manual_seed(seed)
    alpha, theta = (0.5 + 0.5 * torch.rand(ROWS, length) for _ in range(2))
    for gate in (alpha, theta):
        gate[1, torch.rand(length) < 0.3] = 1e-6
        gate[2, torch.rand(length) < 0.6] = 1.0
    eta, gamma = torch.rand(ROWS, length), torch.randn(ROWS, length, c)
    gamma[0] *= torch.arange(c) <= torch.arange(length)[:, None]
    if filled is not None:
        empty = filled == 0
        alpha[empty], theta[empty], eta[empty], gamma[empty] = 1.0, 1.0, 0.0, 0.0
    return alpha, eta, theta, gamma


def holes(length):
    """A row that ends early, one with gaps, a full one."""
    filled = torch.ones(ROWS, length)
    filled[0, length // 2 :] = 0
    filled[1, ::3] = 0
    return filled


def with_gradients(function, inputs, dtype):
    """Values, and the gradients of their sum with fixed weights, of every input."""
    leaves: list[Any] = [
        None if x is None else x.detach().to(dtype).requires_grad_() for x in inputs
    ]
    values = [v for v in function(*leaves) if v is not None]
    torch.manual_seed(1)
    total = torch.stack([(v * torch.randn(v.shape)).sum() for v in values]).sum()
    grads = torch.autograd.grad(total, [x for x in leaves if x is not None])
    return *values, *grads


def agree(found, expected):
    assert len(found) == len(expected)
    for mine, exact in zip(found, expected, strict=True):
        assert mine.dtype == torch.float32
        tolerance = 2e-6 * (1 + exact.abs().max().item()) if exact.numel() else 0.0
        torch.testing.assert_close(mine.double(), exact, rtol=2e-5, atol=tolerance)


def plain_additive(alpha, eta, theta, gamma, filled):
    none = torch.empty(0)
    flags = None if filled is None else filled.to(alpha.dtype)
    *parts, kept, share = Mixing.of(Inputs(none, none, none, None, alpha, eta, theta, gamma, flags))
    return parts if kept is None or share is None else (*parts, kept[:, -1], share[:, -1])


@pytest.mark.parametrize("optimizer", ["gd", "momentum", "momentum with holes"])
@pytest.mark.parametrize(("length", "c"), SIZES)
def test_additive(length, c, optimizer):
    filled = holes(length) if "holes" in optimizer else None
    alpha, eta, theta, gamma = gates(length, c, filled)
    inputs = alpha, eta, None if optimizer == "gd" else theta, gamma
    found = with_gradients(partial(additive, filled=filled), inputs, torch.float32)
    agree(found, with_gradients(partial(plain_additive, filled=filled), inputs, torch.float64))


def plain_stepping(alpha, eta, theta, gamma, points, live, eta_inside):
    """As `Muon` does it: everything at every token, then the stride points of each row."""
    z, length = alpha.shape
    points, live = points.long().expand(z, -1), live.to(alpha.dtype).expand(z, -1)
    (kept, left), (momentum_kept, persisted) = decay(alpha), decay(theta)
    rate = live if eta_inside else live * eta.gather(1, points)
    steps = left.gather(2, points[:, None].expand(-1, length, -1)) * rate[:, None]
    share = -spread(persisted, gamma * eta[..., None] if eta_inside else gamma)
    rows = torch.cat([points, torch.full((z, 1), length - 1)], 1)
    exists = torch.cat([live, torch.ones(z, 1)], 1)
    at_rows = share.gather(1, rows[..., None].expand(-1, -1, share.shape[-1]))
    return kept, steps, momentum_kept.gather(1, rows) * exists, at_rows * exists[..., None]


def strides(length, kind):
    """Points and which are live: every slot with a token, some for each row, or none."""
    if kind == "none":
        return torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0, dtype=torch.bool)
    if kind == "all alike":
        return torch.arange(1, length, 2)[None], torch.ones(1, length // 2, dtype=torch.bool)
    if kind == "filled":
        live, points = (holes(length) > 0).sort(dim=1, descending=True, stable=True)
        return points * live, live
    points = torch.tensor([[1, 3], [0, length - 1], [2, 0]])
    return points, torch.tensor([[True, True], [True, True], [True, False]])


CASES = [("filled", False), ("filled", True), ("by row", True), ("all alike", False)]


@pytest.mark.parametrize(("kind", "eta_inside"), [*CASES, ("none", False)])
@pytest.mark.parametrize(("length", "c"), SIZES)
def test_stepping(length, c, kind, eta_inside):
    points, live = strides(length, kind)
    filled = holes(length) if kind == "filled" else None
    inputs = gates(length, c, filled, seed=2)

    plan = {"points": points, "live": live, "eta_inside": eta_inside}
    found = with_gradients(partial(stepping, filled=filled, **plan), inputs, torch.float32)
    agree(found, with_gradients(partial(plain_stepping, **plan), inputs, torch.float64))


def test_a_point_that_does_not_live_moves_nothing():
    """Whatever reaches its step: the slot it names in vain belongs to another."""
    points, live = strides(5, "by row")
    alpha, eta, theta, gamma = (x.requires_grad_() for x in gates(5, 3, None))
    steps = stepping(alpha, eta, theta, gamma, None, points, live).steps
    assert (steps[2, :, 1] == 0).all()
    grads = torch.autograd.grad(1e6 * steps[2, :, 1].sum(), (alpha, eta, theta, gamma))
    assert all((g == 0).all() for g in grads)


def test_tiny_gates_keep_every_digit_of_their_gradient():
    """Neither quotients nor differences: of 1e-6 beside 1, and of what is left after it."""
    alpha = torch.tensor([[0.9, 1e-6, 1.0, 0.5, 1e-6, 0.99]])
    eta, gamma = torch.ones(1, 6), torch.ones(1, 6, 1)
    inputs = alpha, eta, None, gamma
    found = with_gradients(additive, inputs, torch.float32)
    expected = with_gradients(partial(plain_additive, filled=None), inputs, torch.float64)
    for mine, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-5, atol=0)
