"""The mixing matrices in one kernel each way: `Mixing.of` of the chunked form, and muon's.

Everything is float32 and contiguous, pieces, rows and heads in one axis z: gates `[z l]`, gamma
`[z l c]`, pairs P = c-1+l, those before the piece first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import next_power_of_2

from atlas_lm.ops.triton import mixing_kernels

kernels: Any = mixing_kernels
TURNS = 2048
"""Programs of a backward that needs scratch: enough to be busy, few enough for a cache."""


class AdditiveMixing(NamedTuple):
    """As `Mixing`, the momentum at the last slot only."""

    kept: Tensor
    """`[z l]`: prod alpha."""
    carried: Tensor | None
    """`[z l]`: of the entering momentum in W_t."""
    share: Tensor
    """`[z l P]`: of each pair in W_t."""
    momentum_kept: Tensor | None
    """`[z]`: prod theta over the piece."""
    momentum_share: Tensor | None
    """`[z P]`: of each pair in the last S."""


class SteppingMixing(NamedTuple):
    """Of m stride points, and of the momentum at each and, in the last row, at the last slot."""

    kept: Tensor
    """`[z l]`: prod alpha."""
    steps: Tensor
    """`[z l m]`: of each point's orthogonalised momentum in W_t."""
    momentum_kept: Tensor
    """`[z m+1]`: of the entering momentum in S."""
    momentum_share: Tensor
    """`[z m+1 P]`: of each pair in S."""


def additive(
    alpha: Tensor, eta: Tensor, theta: Tensor | None, gamma: Tensor, filled: Tensor | None = None
) -> AdditiveMixing:
    """gd (theta None) and momentum. `filled` `[z l]`: 0 in slots without a token, where the gates
    are neutral and gamma is 0."""
    if theta is None:
        kept, share = _GradientDescent.apply(alpha, eta, gamma)
        return AdditiveMixing(kept, None, share, None, None)
    return AdditiveMixing(*_Momentum.apply(alpha, eta, theta, gamma, filled))


def stepping(
    alpha: Tensor,
    eta: Tensor,
    theta: Tensor,
    gamma: Tensor,
    filled: Tensor | None,
    points: Tensor,
    live: Tensor,
    eta_inside: bool = False,
) -> SteppingMixing:
    """muon. `points` `[z or 1, m]`: the slot of each step, ascending; `live`: 0 where a row has
    fewer, after those it has: their steps and momenta are zeros.

    `filled` changes nothing: neutral gates keep the momentum, and no step is in an empty slot.
    """
    del filled
    points, live = points.to(torch.int32).contiguous(), live.to(torch.float32).contiguous()
    return SteppingMixing(*_Stepping.apply(alpha, eta, theta, gamma, points, live, eta_inside))


class _GradientDescent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, alpha, eta, gamma):
        z, length, window = gamma.shape
        outputs = _empty(alpha, (z, length), (z, length, length + window - 1))
        kept, share = outputs
        kernels.additive_forward[(z,)](
            alpha, eta, None, gamma, None, kept, None, share, None, None, length, window,
            **_blocks(length, window),
        )  # fmt: skip
        ctx.save_for_backward(alpha, eta, gamma, kept, share)
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        alpha, eta, gamma, kept, share = ctx.saved_tensors
        found = _like(alpha, eta, gamma)
        z, length, window = gamma.shape
        kernels.gd_backward[(z,)](
            alpha, eta, gamma, kept, share, *found, *(g.contiguous() for g in grads),
            length, window, **_blocks(length, window),
        )  # fmt: skip
        return found


class _Momentum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, alpha, eta, theta, gamma, filled):
        z, length, window = gamma.shape
        pairs = length + window - 1
        outputs = _empty(alpha, (z, length), (z, length), (z, length, pairs), (z,), (z, pairs))
        kernels.additive_forward[(z,)](
            alpha, eta, theta, gamma, filled, *outputs, length, window, **_blocks(length, window)
        )
        ctx.save_for_backward(alpha, eta, theta, gamma, filled, *outputs[:3])
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        found = _like(*saved[:4])
        z, length, window = saved[3].shape
        programs, scratch = _scratch(saved[3])
        kernels.momentum_backward[(programs,)](
            *saved, scratch, *found, *(g.contiguous() for g in grads), length, window,
            z, programs, **_blocks(length, window),
        )  # fmt: skip
        return *found, None


class _Stepping(torch.autograd.Function):
    @staticmethod
    def forward(ctx, alpha, eta, theta, gamma, points, live, eta_inside):
        z, length, window = gamma.shape
        count, pairs = points.shape[1], length + window - 1
        shapes = (z, length), (z, length, count), (z, count + 1), (z, count + 1, pairs)
        outputs = _empty(alpha, *shapes)
        kernels.stepping_forward[(z,)](
            alpha, eta, theta, gamma, points, live, *outputs, length, window, count,
            _stride(points), **_stepping_blocks(length, window, count, eta_inside),
        )  # fmt: skip
        ctx.save_for_backward(alpha, eta, theta, gamma, points, live, *outputs[:2])
        ctx.eta_inside = eta_inside
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = ctx.saved_tensors
        found = _like(*saved[:4])
        z, length, window = saved[3].shape
        count = saved[4].shape[1]
        programs, scratch = _scratch(saved[3])
        kernels.stepping_backward[(programs,)](
            *saved, scratch, *found, *(g.contiguous() for g in grads), length, window, count,
            _stride(saved[4]), z, programs,
            **_stepping_blocks(length, window, count, ctx.eta_inside),
        )  # fmt: skip
        return *found, None, None, None


def _empty(like: Tensor, *shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.empty(s, device=like.device, dtype=torch.float32) for s in shapes)


def _like(*inputs: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.empty_like(x) for x in inputs)


def _scratch(gamma: Tensor) -> tuple[int, Tensor]:
    """How many programs take turns, and room for each one's momenta."""
    z, length, window = gamma.shape
    programs = min(z, TURNS)
    return programs, _empty(gamma, (programs, length, length + window))[0]


def _stride(points: Tensor) -> int:
    return 0 if points.shape[0] == 1 else points.shape[1]


def _blocks(length: int, window: int) -> dict[str, Any]:
    """One warp: every token sums over a row, and sums across warps have to wait for each other."""
    pairs = next_power_of_2(length + window - 1)
    return {"P": pairs, "num_warps": 1 if pairs <= 128 else 2}


def _stepping_blocks(length: int, window: int, count: int, eta_inside: bool) -> dict[str, Any]:
    points = next_power_of_2(max(1, count))
    return {"INSIDE": eta_inside, "M": points, **_blocks(length, window)}


def _ahead(kernel: Any, blocks: dict[str, Any], absent: tuple[str, ...] = ()) -> dict[str, Any]:
    """What Triton needs to compile a kernel where there is no GPU."""
    blocks = dict(blocks)
    num_warps = blocks.pop("num_warps")
    sizes = ("length", "window", "count", "stride", "total", "programs")
    kinds = {"points": "*i32", **dict.fromkeys(sizes, "i32")}
    constexprs = blocks | dict.fromkeys(absent)
    signature = {
        name: "constexpr" if name in constexprs else kinds.get(name, "*fp32")
        for name in kernel.arg_names
    }
    return {
        "name": f"{kernel.__name__} {blocks}",
        "fn": kernel,
        "signature": signature,
        "constexprs": constexprs,
        "num_warps": num_warps,
    }


def _kernels(length: int, window: int) -> list[dict[str, Any]]:
    """Every kernel as it is launched for these sizes."""
    blocks, k = _blocks(length, window), kernels
    absent = ("theta", "filled", "carried", "momentum_kept", "momentum_share")
    found = [
        _ahead(k.additive_forward, blocks, absent),
        _ahead(k.gd_backward, blocks),
    ]
    for kernel in (k.additive_forward, k.momentum_backward):
        found += [_ahead(kernel, blocks, absent) for absent in ((), ("filled",))]
    for kernel in (k.stepping_forward, k.stepping_backward):
        for count, inside in ((1, False), (4, False), (64, False), (64, True)):
            found.append(_ahead(kernel, _stepping_blocks(length, window, count, inside)))
    return found


KERNELS = _kernels(64, 1) + _kernels(64, 16)
"""For ahead-of-time compilation: name, fn, signature, constexprs, num_warps."""
