"""What layers do around their operations, in one kernel each where kernels can run.

The plain versions define the numbers; the kernels keep float32 where these round in between.
"""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import silu

from atlas_lm.nn.conv import ShortConv
from atlas_lm.nn.norm import RMSNorm, unit
from atlas_lm.nn.packing import Packing, last_tokens
from atlas_lm.ops.kernels import why_not_here

DTYPES = torch.bfloat16, torch.float16, torch.float32


def fusable(x: Tensor, packing: Packing | None) -> bool:
    """Whether kernels take x. A compiler fuses on its own, and packed tokens are moved by torch."""
    if packing is not None or torch.compiler.is_compiling():
        return False
    return x.is_cuda and x.dtype in DTYPES and why_not_here(x) is None


def project_qkv(
    mixed: Tensor,
    tail: Tensor,
    conv: ShortConv,
    widths: tuple[int, int, int],
    packing: Packing | None,
    centre: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k `[b t h k]`, v `[b t h v]` and the next tail, of q | k | v `[b t channels]`.

    Convolution and SiLU; q and k less their centre `[2 h k]`, if they have one, and of unit norm.
    Widths: heads, d_k, d_v.
    """
    heads, d_k, d_v = widths
    if fusable(mixed, packing):
        from atlas_lm.ops.triton.short_conv import MOST_TAPS, conv_silu_unit

        n = tail.shape[1]
        if n < MOST_TAPS:
            tail = tail.to(mixed.dtype)
            last = mixed[:, max(mixed.shape[1] - n, 0) :]
            after = last_tokens(torch.cat([tail, last], 1), n, None)
            return *conv_silu_unit(mixed, tail, conv.weight, heads, d_k, d_v, centre), after
    mixed, tail = conv(mixed, tail, packing)
    sizes = [heads * d_k, heads * d_k, heads * d_v]
    q, k, v = (part.unflatten(-1, (heads, -1)) for part in silu(mixed).split(sizes, -1))
    if centre is not None:
        q, k = q - centre[0].to(q.dtype), k - centre[1].to(k.dtype)
    return unit(q), unit(k), v, tail


def norm_and_open(y: Tensor, x_open: Tensor, norm: RMSNorm) -> Tensor:
    """norm(y) * SiLU(x_open), `[b t h*v]`; y `[b t h v]`, x_open `[b t h*v]`."""
    if fusable(x_open, None):
        from atlas_lm.ops.triton.gated_norm import norm_gate

        return norm_gate(y, x_open, norm.weight, norm.eps)
    opened = silu(x_open).unflatten(-1, y.shape[2:])
    return rearrange(norm(y) * opened, "b t h v -> b t (h v)")


def silu_of_half(halves: Tensor) -> Tensor:
    """SiLU(first half) * second half of the last axis."""
    if fusable(halves, None):
        from atlas_lm.ops.triton.silu_product import silu_product

        return silu_product(halves)
    first, second = halves.chunk(2, -1)
    return silu(first) * second
