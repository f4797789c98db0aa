"""Gradients of a memory's loss at the anchor, each pair's as one rank-one term u x^T a weight.

For the named networks by hand; whatever is given as a function goes through autograd.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from atlas_lm.ops.networks import Frozen, Lin, add_residual, network_of
from atlas_lm.ops.objectives import error_of, objective_of
from atlas_lm.rules import Rule
from atlas_lm.shapes import Weights

Factors = tuple[Weights, Weights]
"""Of every weight: what went into it, x `[b h n in]`, and the gradient at what came out, u."""


def pair_gradients(rule: Rule, lin: Frozen, x: Tensor, f: Tensor, v: Tensor, threshold) -> Factors:
    """x: raw keys as the residual sees them, f: phi of them, both `[b h n .]`."""
    if callable(rule.network) or callable(rule.objective):
        return by_autograd(rule, lin, x, f, v, threshold)
    if rule.network == "linear" and rule.objective == "dot":
        # the one gradient that does not depend on the memory
        return {"w": f}, {"w": -v}
    error = error_of(rule)
    return _BY_HAND[str(rule.network)](
        lin, x, f, lambda prediction: error(prediction, v, threshold)
    )


def by_autograd(rule: Rule, lin: Lin, x: Tensor, f: Tensor, v: Tensor, threshold) -> Factors:
    keep_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        seen = Recorded(lin)
        loss = objective_of(rule)(network_of(rule)(seen, x, f), v, threshold).sum()
        grads = torch.autograd.grad(
            loss, list(seen.outputs.values()), create_graph=keep_graph, materialize_grads=True
        )
    inputs = seen.inputs if keep_graph else {n: x.detach() for n, x in seen.inputs.items()}
    return inputs, dict(zip(seen.outputs, grads, strict=True))


class Recorded(Lin):
    """Another `lin`, and what went into and came out of it, ready for gradients by its outputs."""

    def __init__(self, lin: Lin):
        super().__init__(lin.slow)
        self.lin = lin
        self.inputs: Weights = {}
        self.outputs: Weights = {}

    def __call__(self, name: str, x: Tensor) -> Tensor:
        out = self.lin(name, x)
        self.inputs[name] = x
        self.outputs[name] = out if out.requires_grad else out.requires_grad_()
        return out


def _linear(lin: Frozen, x: Tensor, f: Tensor, error: Callable[[Tensor], Tensor]) -> Factors:
    return {"w": f}, {"w": error(lin("w", f))}


def _mlp(lin: Frozen, x: Tensor, f: Tensor, error: Callable[[Tensor], Tensor]) -> Factors:
    h, slope = _GeluAndSlope.apply(lin("w2", f))
    u1 = _branch_gradient(lin, x, lin("w1", h), error)
    return {"w2": f, "w1": h}, {"w2": lin.back("w1", u1) * slope, "w1": u1}


def _gated_mlp(lin: Frozen, x: Tensor, f: Tensor, error: Callable[[Tensor], Tensor]) -> Factors:
    gate, slope = _GeluAndSlope.apply(lin("w2", f))
    value = lin("w3", f)
    h = gate * value
    u1 = _branch_gradient(lin, x, lin("w1", h), error)
    back = lin.back("w1", u1)
    return {"w2": f, "w3": f, "w1": h}, {"w2": back * value * slope, "w3": back * gate, "w1": u1}


_BY_HAND = {"linear": _linear, "mlp": _mlp, "gated_mlp": _gated_mlp}


def _branch_gradient(
    lin: Lin, x: Tensor, branch: Tensor, error: Callable[[Tensor], Tensor]
) -> Tensor:
    """The gradient at the branch of x + branch, or of x + gain * LN(branch)."""
    gain = lin.slow.get("gain")
    if gain is None:
        return error(x + branch)
    gain = gain.unsqueeze(-2)
    unit, mean, scale = torch.native_layer_norm(branch, branch.shape[-1:], None, None, 1e-6)
    at_unit = gain * error(torch.addcmul(x, gain, unit))
    return _LayerNormGradient.apply(branch, at_unit, unit.detach(), mean, scale)


class _LayerNormGradient(torch.autograd.Function):
    """The gradient at the input of a layer norm from that at its output, and its own gradient."""

    @staticmethod
    def forward(ctx, branch, grad, unit, mean, scale):
        u = through_norm(grad, branch, mean, scale)
        ctx.save_for_backward(branch, grad, unit, mean, scale, u)
        return u

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (up,) = grads
        branch, grad, unit, mean, scale, u = ctx.saved_tensors
        along_up, along = ((x * unit).mean(-1, keepdim=True) for x in (up, grad))
        to_unit = torch.addcmul(up * (along * -scale), grad, along_up * -scale)
        to_scale = (up * u).mean(-1, keepdim=True) * scale
        to_branch = through_norm(to_unit, branch, mean, scale)
        to_branch = torch.addcmul(to_branch, to_scale, unit, value=-1)
        return to_branch, through_norm(up, branch, mean, scale), None, None, None


def through_norm(grad: Tensor, branch: Tensor, mean: Tensor, scale: Tensor) -> Tensor:
    """The gradient at the input of a layer norm, from the gradient at its output."""
    backward, width = torch.ops.aten.native_layer_norm_backward, branch.shape[-1:]
    return backward(grad, branch, width, mean, scale, None, None, [True, False, False])[0]


class _GeluAndSlope(torch.autograd.Function):
    """gelu and its derivative, with the second derivative in the backward."""

    @staticmethod
    def forward(ctx, z):
        slope = torch.ops.aten.gelu_backward(torch.ones_like(z), z)
        ctx.save_for_backward(z, slope)
        return functional.gelu(z), slope

    @staticmethod
    def backward(ctx, *grads: Tensor):
        grad, grad_slope = grads
        z, slope = ctx.saved_tensors
        return torch.addcmul(grad * slope, curvature(z), grad_slope)


def curvature(z: Tensor) -> Tensor:
    """The second derivative of gelu."""
    density = torch.addcmul(z.new_full((), -0.9189385332046727), z, z, value=-0.5).exp_()
    return density.mul_(torch.addcmul(z.new_full((), 2.0), z, z, value=-1))


def hides_parameters(
    rule: Rule, weights: Weights, slow: Weights, phi, k: Tensor, v: Tensor
) -> bool:
    """Whether a function of the rule sees learned tensors of its own, tried on the first token."""
    if not rule.custom:
        return False
    with torch.enable_grad():
        x, v = k[:1, :1].detach().transpose(1, 2), v[:1, :1].detach().transpose(1, 2)
        f = phi(x)
        lin = Frozen(
            {n: w.detach() for n, w in weights.items()}, {n: w.detach() for n, w in slow.items()}
        )
        y = network_of(rule)(lin, add_residual(x, lin.slow, torch.matmul), f.detach())
        loss = objective_of(rule)(y.detach(), v, None)
    return any(t.requires_grad for t in (f, y, loss))
