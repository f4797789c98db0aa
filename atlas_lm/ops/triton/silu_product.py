"""SiLU of one half times the other, in one pass forward and one backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.triton.short_conv import launch

BLOCK, WARPS = 2048, 4


@triton.jit
def _placed(n, H: tl.constexpr, BLOCK: tl.constexpr):
    """Places of the products of a block, and of their first halves; whether they are any."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return at, at + at // H * H, at < n


@triton.jit(do_not_specialize=["n"])
def forward_kernel(halves, out, n, H: tl.constexpr, BLOCK: tl.constexpr):
    at, first, here = _placed(n, H, BLOCK)
    gate = tl.load(halves + first, mask=here, other=0.0).to(tl.float32)
    value = tl.load(halves + first + H, mask=here, other=0.0).to(tl.float32)
    product = gate * tl.sigmoid(gate) * value
    tl.store(out + at, product.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["n"])
def backward_kernel(d_out, halves, d_halves, n, H: tl.constexpr, BLOCK: tl.constexpr):
    at, first, here = _placed(n, H, BLOCK)
    d = tl.load(d_out + at, mask=here, other=0.0).to(tl.float32)
    gate = tl.load(halves + first, mask=here, other=0.0).to(tl.float32)
    value = tl.load(halves + first + H, mask=here, other=0.0).to(tl.float32)
    open_part = tl.sigmoid(gate)
    d_gate = d * value * (open_part * (1 + gate * (1 - open_part)))
    tl.store(d_halves + first, d_gate.to(d_halves.dtype.element_ty), mask=here)
    d_value = d * gate * open_part
    tl.store(d_halves + first + H, d_value.to(d_halves.dtype.element_ty), mask=here)


class _SiluProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx, halves):
        halves = halves.contiguous()
        ctx.save_for_backward(halves)
        width = halves.shape[-1] // 2
        out = halves.new_empty(*halves.shape[:-1], width)
        _over(forward_kernel, out.numel(), width, halves, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (halves,) = ctx.saved_tensors
        d_halves, d_out = torch.empty_like(halves), grads[0].contiguous()
        _over(backward_kernel, d_out.numel(), d_out.shape[-1], d_out, halves, d_halves)
        return d_halves


def _over(kernel: Any, n: int, width: int, *tensors: Tensor) -> None:
    launch(kernel, triton.cdiv(n, BLOCK), *tensors, n, H=width, BLOCK=BLOCK, num_warps=WARPS)


def silu_product(halves: Tensor) -> Tensor:
    """SiLU(first half) * second half of the last axis, in float32, rounded once."""
    if halves.shape[-1] % 2:
        raise ValueError(f"halves: {halves.shape[-1]} numbers wide; expected two halves")
    return _SiluProduct.apply(halves)


def _compilation(kernel: Any, tensors: tuple[str, ...]) -> dict[str, Any]:
    """At a width of 2,048, in bfloat16."""
    fixed = {"H": 2048, "BLOCK": BLOCK}
    kinds = dict.fromkeys(tensors, "*bf16") | {"n": "i32"} | dict.fromkeys(fixed, "constexpr")
    return {
        "name": f"silu_product.{kernel.__name__.removesuffix('_kernel')}",
        "fn": kernel,
        "signature": kinds,
        "constexprs": fixed,
        "num_warps": WARPS,
    }


KERNELS = [
    _compilation(forward_kernel, ("halves", "out")),
    _compilation(backward_kernel, ("d_out", "halves", "d_halves")),
]
"""What to compile ahead of time to see that it compiles."""
