"""Norm per head times an open gate, norm(y) * SiLU(x), in one pass forward and one backward.

A program has one head of a block of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.triton.short_conv import launch


@triton.jit
def _placed(n, HEADS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, BLOCK: tl.constexpr):
    """Head, block of tokens, where it begins, and the offsets of its tile with their mask."""
    head, block = tl.program_id(0) % HEADS, tl.program_id(0) // HEADS
    place, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, PAD)[None, :]
    begin = (block.to(tl.int64) * BLOCK * HEADS + head) * D
    here = (place < n - block * BLOCK) & (column < D)
    return head, block, begin, place * (HEADS * D) + column, here


@triton.jit(do_not_specialize=["n"])
def forward_kernel(
    y, x_open, weight, out, n, eps, HEADS: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    head, _, begin, at, here = _placed(n, HEADS, D, PAD, BLOCK)
    column = tl.arange(0, PAD)[None, :]
    w = tl.load(weight + head * D + column, mask=column < D, other=0.0).to(tl.float32)
    value = tl.load(y + begin + at, mask=here, other=0.0).to(tl.float32)
    x = tl.load(x_open + begin + at, mask=here, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    value = value * scale * w * (x * tl.sigmoid(x))
    tl.store(out + begin + at, value.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["n"])
def backward_kernel(
    d_out, y, x_open, weight, d_y, d_x_open, sums, n, eps, HEADS: tl.constexpr, D: tl.constexpr,
    PAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    head, block, begin, at, here = _placed(n, HEADS, D, PAD, BLOCK)
    column = tl.arange(0, PAD)
    w = tl.load(weight + head * D + column, mask=column < D, other=0.0).to(tl.float32)[None, :]
    d = tl.load(d_out + begin + at, mask=here, other=0.0).to(tl.float32)
    value = tl.load(y + begin + at, mask=here, other=0.0).to(tl.float32)
    x = tl.load(x_open + begin + at, mask=here, other=0.0).to(tl.float32)
    gate = tl.sigmoid(x)
    scale = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
    normed = value * scale
    d_x = d * normed * w * (gate * (1 + x * (1 - gate)))
    tl.store(d_x_open + begin + at, d_x.to(d_x_open.dtype.element_ty), mask=here)
    d *= x * gate
    here_sums = sums + (block.to(tl.int64) * HEADS + head) * D + column
    tl.store(here_sums, tl.sum(d * normed, 0), mask=column < D)
    d *= w
    d_value = scale * (d - normed * (tl.sum(d * normed, 1) / D)[:, None])
    tl.store(d_y + begin + at, d_value.to(d_y.dtype.element_ty), mask=here)


class _NormGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, x_open, weight, eps):
        y, x_open, weight = y.contiguous(), x_open.contiguous(), weight.contiguous()
        ctx.save_for_backward(y, x_open, weight)
        ctx.eps = eps
        kind = torch.promote_types(y.dtype, x_open.dtype)
        out = torch.empty(x_open.shape, dtype=kind, device=y.device)
        n, fixed = y.shape[0] * y.shape[1], _fixed(*y.shape[2:])
        blocks = triton.cdiv(n, fixed["BLOCK"])
        launch(
            forward_kernel, blocks * fixed["HEADS"], y, x_open, weight, out, n, eps, **fixed,
            num_warps=_warps(fixed),
        )  # fmt: skip
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (d_out,), (y, x_open, weight) = grads, ctx.saved_tensors
        n, fixed = y.shape[0] * y.shape[1], _fixed(*y.shape[2:])
        d_y, d_x_open = torch.empty_like(y), torch.empty_like(x_open)
        blocks = triton.cdiv(n, fixed["BLOCK"])
        sums = torch.empty(blocks, *weight.shape, dtype=torch.float32, device=y.device)
        launch(
            backward_kernel, blocks * fixed["HEADS"], d_out.contiguous(), y, x_open, weight, d_y,
            d_x_open, sums, n, ctx.eps, **fixed, num_warps=_warps(fixed),
        )  # fmt: skip
        return d_y, d_x_open, sums.sum(0).to(weight.dtype), None


def _fixed(heads: int, width: int) -> dict[str, int]:
    """The compile-time sizes of both kernels."""
    pad = triton.next_power_of_2(width)
    return {"HEADS": heads, "D": width, "PAD": pad, "BLOCK": min(64, max(1, 4096 // pad))}


def _warps(fixed: dict[str, int]) -> int:
    return min(16, max(1, fixed["BLOCK"] * fixed["PAD"] // 512))


def norm_gate(y: Tensor, x_open: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """weight * y / rms(y) * SiLU(x_open), `[b t h*v]`: y `[b t h v]`, x_open `[b t h*v]`.

    The root mean square is of each head; weight `[h v]`. In float32, rounded once.
    """
    if x_open.shape != (*y.shape[:2], y.shape[2] * y.shape[3]) or weight.shape != y.shape[2:]:
        raise ValueError(
            f"y: {tuple(y.shape)}, x_open: {tuple(x_open.shape)} and weight: {tuple(weight.shape)} "
            "are not [b t h v], [b t h*v] and [h v]"
        )
    return _NormGate.apply(y, x_open, weight, eps)


def _kernels() -> list[dict[str, Any]]:
    """At 16 heads of 64, in bfloat16 with float32 weights."""
    fixed = _fixed(16, 64)
    tensors = {"y": "*bf16", "x_open": "*bf16", "weight": "*fp32"}
    made = {"d_y": "*bf16", "d_x_open": "*bf16", "sums": "*fp32"}
    end = {"n": "i32", "eps": "fp32"} | dict.fromkeys(fixed, "constexpr")
    return [
        {
            "name": "gated_norm.forward",
            "fn": forward_kernel,
            "signature": tensors | {"out": "*bf16"} | end,
            "constexprs": fixed,
            "num_warps": _warps(fixed),
        },
        {
            "name": "gated_norm.backward",
            "fn": backward_kernel,
            "signature": {"d_out": "*bf16"} | tensors | made | end,
            "constexprs": fixed,
            "num_warps": _warps(fixed),
        },
    ]


KERNELS = _kernels()
"""What to compile ahead of time to see that it compiles."""
