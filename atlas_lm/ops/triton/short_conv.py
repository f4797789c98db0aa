"""Causal convolution, SiLU and unit norm of a projection, in one pass forward and one backward.

A tile is one head of q, of k or of v over a block of tokens. Backward computes everything again
from the projection, and passes gradients from token to token through a room of its own.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# (of kernels, which are not Python)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST_TAPS = 8
"""The widest convolution; a block of tokens is longer."""
EPS = 1e-6
MOST_REGISTERS = 128
"""Of a thread backward: twice as many threads run at once, and nothing spills."""


@triton.jit
def _placed(tile, blocks, HEADS: tl.constexpr):
    """Which head of which part, which block, which row: neighbours are neighbours in memory."""
    head, above = tile % HEADS, tile // HEADS
    return head, above % 3, above // 3 % blocks, (above // 3 // blocks).to(tl.int64)


@triton.jit
def _tile(base, at, token, t, inside):
    """Float32, zeros where there is no such token or channel."""
    here = (token >= 0) & (token < t) & inside
    return tl.load(base + at, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _tail_tile(tail, at, token, inside, TAPS: tl.constexpr):
    """The same, of the tokens before the first."""
    here = (token < 0) & (token > -TAPS) & inside
    return tl.load(tail + at, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _convolved(
    mixed, tail, weight, at, token, start, t, inside, channel, C: tl.constexpr, TAPS: tl.constexpr
):
    y = tl.zeros(at.shape, tl.float32)
    for back in tl.static_range(TAPS):
        w = tl.load(weight + back * C + channel, mask=inside, other=0.0).to(tl.float32)
        y += w * _tile(mixed, at - back * C, token - back, t, inside)
    # after the loop, so that no branch stands between its loads
    if start < TAPS - 1:
        for back in tl.static_range(1, TAPS):
            w = tl.load(weight + back * C + channel, mask=inside, other=0.0).to(tl.float32)
            y += w * _tail_tile(tail, at - back * C, token - back, inside, TAPS)
    return y


@triton.jit
def _forward_part(
    out, mixed, tail, weight, first, start, t, eps, UNIT: tl.constexpr, WIDTH: tl.constexpr,
    D: tl.constexpr, PAD: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A head whose channels begin at `first`; `out` has WIDTH numbers a token."""
    place, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, PAD)[None, :]
    inside, token, channel = column < D, start + place, first + column
    at = place * C + channel
    y = _convolved(mixed, tail, weight, at, token, start, t, inside, channel, C, TAPS)
    y *= tl.sigmoid(y)
    if UNIT:
        y *= tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
    tl.store(out + place * WIDTH + column, y.to(out.dtype.element_ty), mask=(token < t) & inside)


@triton.jit(do_not_specialize=["t", "blocks"])
def forward_kernel(
    mixed, tail, weight, q, k, v, t, blocks, eps, HEADS: tl.constexpr, D_K: tl.constexpr,
    D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = HEADS * D_K
    V: tl.constexpr = HEADS * D_V
    C: tl.constexpr = 2 * K + V
    head, part, block, row = _placed(tl.program_id(0), blocks, HEADS)
    start = block * BLOCK
    first = row * t + start
    mixed += first * C
    # the tail's address if it went on to here: one offset serves both
    tail += (row * (TAPS - 1) + TAPS - 1 + start) * C
    if part == 0:
        q += first * K + head * D_K
        _forward_part(q, mixed, tail, weight, head * D_K, start, t, eps,
                      True, K, D_K, PAD_K, C, TAPS, BLOCK)  # fmt: skip
    elif part == 1:
        k += first * K + head * D_K
        _forward_part(k, mixed, tail, weight, K + head * D_K, start, t, eps,
                      True, K, D_K, PAD_K, C, TAPS, BLOCK)  # fmt: skip
    else:
        v += first * V + head * D_V
        _forward_part(v, mixed, tail, weight, 2 * K + head * D_V, start, t, eps,
                      False, V, D_V, PAD_V, C, TAPS, BLOCK)  # fmt: skip


@triton.jit
def _through_silu(y, d_out, eps, UNIT: tl.constexpr):
    """The gradient at the convolution's output y, from that at SiLU's or the unit norm's."""
    gate = tl.sigmoid(y)
    if UNIT:
        s = y * gate
        scale = tl.rsqrt(tl.sum(s * s, 1) + eps)[:, None]
        along = tl.sum(s * d_out, 1)[:, None]
        d_out = scale * (d_out - s * (scale * scale * along))
    return d_out * gate * (1 + y * (1 - gate))


@triton.jit
def _backward_part(
    d_out, mixed, tail, weight, d_mixed, d_tail, sums, room, first, start, t, eps,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr,
    C: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """As `_forward_part`; the last TAPS - 1 tokens are there for those before them only."""
    place, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, PAD)[None, :]
    inside, token, channel = column < D, start + place, first + column
    at, own = place * C + channel, place < BLOCK - TAPS + 1
    y = _convolved(mixed, tail, weight, at, token, start, t, inside, channel, C, TAPS)
    d_out = _tile(d_out, place * WIDTH + column, token, t, inside)
    d_y = _through_silu(y, d_out, eps, UNIT)
    # the last tile's reads of the room are over, and this one's writes before its reads
    tl.debug_barrier()
    tl.store(room + place * PAD + column, d_y)
    tl.debug_barrier()
    x = _tile(mixed, at, token, t, inside & own)
    if start < 0:
        x += _tail_tile(tail, at, token, inside & own, TAPS)
    d_x = tl.zeros((BLOCK, PAD), tl.float32)
    for back in tl.static_range(TAPS):
        later = d_y
        if back > 0:
            later = tl.load(room + (place + back) * PAD + column, mask=own, other=0.0)
        w = tl.load(weight + back * C + channel, mask=inside, other=0.0).to(tl.float32)
        d_x += w * later
        here = tl.arange(0, PAD)
        tl.store(sums + back * C + first + here, tl.sum(x * later, 0), mask=here < D)
    here = (token >= 0) & (token < t) & inside & own
    tl.store(d_mixed + at, d_x.to(d_mixed.dtype.element_ty), mask=here)
    if start < 0:
        before = (token < 0) & inside & own
        tl.store(d_tail + at, d_x.to(d_tail.dtype.element_ty), mask=before)


@triton.jit(do_not_specialize=["t", "blocks", "tiles"])
def backward_kernel(
    d_q, d_k, d_v, mixed, tail, weight, d_mixed, d_tail, sums, room, t, blocks, tiles, eps,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr,
    PAD_V: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = HEADS * D_K
    V: tl.constexpr = HEADS * D_V
    C: tl.constexpr = 2 * K + V
    ROOM: tl.constexpr = BLOCK * (PAD_K if PAD_K > PAD_V else PAD_V)
    room += tl.program_id(0).to(tl.int64) * ROOM
    # few programs with many tiles each, so that their rooms stay in the cache; one stage, because
    # loads of the next tile's room must not be moved before the barriers
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=1):
        head, part, block, row = _placed(tile, blocks, HEADS)
        # the first block begins with the tail, which has gradients too
        start = block * (BLOCK - TAPS + 1) - (TAPS - 1)
        begin = row * t + start
        in_tail = (row * (TAPS - 1) + TAPS - 1 + start) * C
        here = sums + (row * blocks + block) * TAPS * C
        if part == 0:
            _backward_part(
                d_q + begin * K + head * D_K, mixed + begin * C, tail + in_tail, weight,
                d_mixed + begin * C, d_tail + in_tail, here, room, head * D_K, start, t, eps,
                True, K, D_K, PAD_K, C, TAPS, BLOCK,
            )  # fmt: skip
        elif part == 1:
            _backward_part(
                d_k + begin * K + head * D_K, mixed + begin * C, tail + in_tail, weight,
                d_mixed + begin * C, d_tail + in_tail, here, room, K + head * D_K, start, t, eps,
                True, K, D_K, PAD_K, C, TAPS, BLOCK,
            )  # fmt: skip
        else:
            _backward_part(
                d_v + begin * V + head * D_V, mixed + begin * C, tail + in_tail, weight,
                d_mixed + begin * C, d_tail + in_tail, here, room, 2 * K + head * D_V, start, t,
                eps, False, V, D_V, PAD_V, C, TAPS, BLOCK,
            )  # fmt: skip


class _ConvSiluUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, tail, weight, heads, d_k, d_v):
        mixed, tail, weight = mixed.contiguous(), tail.contiguous(), weight.contiguous()
        ctx.save_for_backward(mixed, tail, weight)
        ctx.sizes = heads, d_k, d_v
        batch, t = mixed.shape[:2]
        q = torch.empty(batch, t, heads, d_k, dtype=mixed.dtype, device=mixed.device)
        k = torch.empty_like(q)
        v = torch.empty(batch, t, heads, d_v, dtype=mixed.dtype, device=mixed.device)
        fixed = _fixed(heads, d_k, d_v, weight.shape[0])
        blocks = triton.cdiv(t, fixed["BLOCK"])
        launch(
            forward_kernel, 3 * heads * blocks * batch, mixed, tail, weight, q, k, v, t, blocks,
            EPS, **fixed, num_warps=_warps(fixed, 1024),
        )  # fmt: skip
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        mixed, tail, weight = ctx.saved_tensors
        heads, d_k, d_v = ctx.sizes
        (batch, t, channels), taps = mixed.shape, weight.shape[0]
        fixed = _fixed(heads, d_k, d_v, taps)
        blocks = triton.cdiv(t + taps - 1, fixed["BLOCK"] - taps + 1)
        tiles = 3 * heads * blocks * batch
        programs = min(tiles, _programs(mixed.device))
        d_mixed, d_tail = torch.empty_like(mixed), torch.empty_like(tail)
        wide: Any = {"dtype": torch.float32, "device": mixed.device}
        sums = torch.empty(batch * blocks, taps, channels, **wide)
        room = torch.empty(programs, fixed["BLOCK"] * max(fixed["PAD_K"], fixed["PAD_V"]), **wide)
        launch(
            backward_kernel, programs, *(g.contiguous() for g in grads), mixed, tail, weight,
            d_mixed, d_tail, sums, room, t, blocks, tiles, EPS, **fixed,
            num_warps=_warps(fixed, 512), maxnreg=MOST_REGISTERS,
        )  # fmt: skip
        return d_mixed, d_tail, sums.sum(0).to(weight.dtype), None, None, None


def launch(kernel: Any, programs: int, first: Tensor, *others: Any, **options: Any) -> None:
    """On the device of the first tensor, whichever is the current one."""
    with torch.cuda.device_of(first):
        kernel[(programs,)](first, *others, **options)


def _fixed(heads: int, d_k: int, d_v: int, taps: int) -> dict[str, int]:
    """The compile-time sizes of both kernels."""
    pad_k, pad_v = triton.next_power_of_2(d_k), triton.next_power_of_2(d_v)
    block = min(64, max(16, 4096 // max(pad_k, pad_v)))
    return {
        "HEADS": heads,
        "D_K": d_k,
        "D_V": d_v,
        "PAD_K": pad_k,
        "PAD_V": pad_v,
        "TAPS": taps,
        "BLOCK": block,
    }


def _warps(fixed: dict[str, int], each: int) -> int:
    """For `each` numbers of the largest tile a warp."""
    return min(16, max(4, fixed["BLOCK"] * max(fixed["PAD_K"], fixed["PAD_V"]) // each))


def _programs(device: torch.device) -> int:
    """How many fill the device; a few in the interpreter, where each then has several tiles."""
    if device.type != "cuda":
        return 4
    return 4 * torch.cuda.get_device_properties(device).multi_processor_count


def conv_silu_unit(
    mixed: Tensor, tail: Tensor, weight: Tensor, heads: int, d_k: int, d_v: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k `[b t h k]` and v `[b t h v]` of a projection q | k | v, `[b t channels]`.

    y_t = SiLU(sum_j weight_j mixed_{t-j}), the tail `[b taps-1 channels]` before the first token;
    q and k divided by their length. In float32, rounded once.
    """
    taps, channels = weight.shape
    if taps > MOST_TAPS:
        raise ValueError(f"weight: {taps} taps, at most {MOST_TAPS} are supported")
    if channels != heads * (2 * d_k + d_v) or mixed.shape[-1] != channels:
        raise ValueError(
            f"mixed: {mixed.shape[-1]} channels and weight: {channels}; "
            f"{heads} heads of {d_k} + {d_k} + {d_v} need {heads * (2 * d_k + d_v)}"
        )
    if tail.shape != (mixed.shape[0], taps - 1, channels):
        expected = (mixed.shape[0], taps - 1, channels)
        raise ValueError(f"tail: has shape {tuple(tail.shape)}, expected {expected}")
    return _ConvSiluUnit.apply(mixed, tail.to(mixed.dtype), weight, heads, d_k, d_v)


def _kernels(d_k: int) -> list[dict[str, Any]]:
    """At 16 heads, values of 64 and 4 taps, in bfloat16 with float32 weights."""
    fixed = _fixed(16, d_k, 64, 4)
    tensors = {"mixed": "*bf16", "tail": "*bf16", "weight": "*fp32"}
    sizes = {"t": "i32", "blocks": "i32"}
    end = {"eps": "fp32"} | dict.fromkeys(fixed, "constexpr")
    out = dict.fromkeys(("q", "k", "v"), "*bf16")
    d_out = dict.fromkeys(("d_q", "d_k", "d_v"), "*bf16")
    made = {"d_mixed": "*bf16", "d_tail": "*bf16", "sums": "*fp32", "room": "*fp32"}
    return [
        {
            "name": f"short_conv.forward d_k={d_k}",
            "fn": forward_kernel,
            "signature": tensors | out | sizes | end,
            "constexprs": fixed,
            "num_warps": _warps(fixed, 1024),
        },
        {
            "name": f"short_conv.backward d_k={d_k}",
            "fn": backward_kernel,
            "signature": d_out | tensors | made | sizes | {"tiles": "i32"} | end,
            "constexprs": fixed,
            "num_warps": _warps(fixed, 512),
        },
    ]


KERNELS = [kernel for d_k in (64, 16) for kernel in _kernels(d_k)]
"""What to compile ahead of time to see that it compiles."""
