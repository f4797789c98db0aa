"""Which numbers are kept in which precision.

float32 and float64 inputs: everything in that dtype. Lower ones: state, gates and sums in float32,
and only the operands of matrix products are rounded, in every derivative too.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial

import torch
from torch import Tensor

from atlas_lm.shapes import Product


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    # asked for many times a call, and the general answer takes its time
    if dtype in (torch.bfloat16, torch.float16, torch.float32):
        return torch.float32
    return torch.promote_types(dtype, torch.float32)


def without_autocast(device: torch.device):
    """What is rounded is decided here, not by autocast."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def product_for(dtype: torch.dtype) -> Product:
    """The matrix product for inputs of this dtype."""
    if state_dtype(dtype) == dtype:
        return batched_product
    return partial(_RoundedProduct.apply, dtype)


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for equal leading axes, without the copies of views that `matmul` puts on the graph."""
    return torch.bmm(a.flatten(0, -3), b.flatten(0, -3)).view(*a.shape[:-1], b.shape[-1])


def add_product(product: Product, out: Tensor, a: Tensor, b: Tensor) -> None:
    """out += a @ b in place, outside of any graph."""
    if product is batched_product:
        flat = out.flatten(0, -3)
        torch.baddbmm(flat, a.flatten(0, -3), b.flatten(0, -3), out=flat)  # counted as a product
    else:
        out += product(a, b)


class _RoundedProduct(torch.autograd.Function):
    """round(a) @ round(b), summed in float32; its gradients are rounded products again."""

    @staticmethod
    def forward(ctx, dtype, a, b):
        ctx.save_for_backward(a, b)
        ctx.dtype = dtype
        return a.to(dtype).to(a.dtype) @ b.to(dtype).to(b.dtype)

    @staticmethod
    def backward(ctx, *grads: Tensor):
        (grad,) = grads
        a, b = ctx.saved_tensors
        product = product_for(ctx.dtype)
        return None, product(grad, b.mT), product(a.mT, grad)
