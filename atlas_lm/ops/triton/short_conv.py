"""Causal convolution, SiLU, centre and unit norm of a projection, in one pass forward and one
backward.

Forward, a tile is one head of q, of k or of v over a block of tokens. Backward computes everything
again from the projection, token by token over a span: what a token has of those before it and gives
them lies in registers.
"""

# pyright: reportArgumentType=false, reportGeneralTypeIssues=false
# ruff: noqa: RUF005
# (of kernels, which are not Python: there is no (*a, b) in Triton)

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

MOST_TAPS = 8
"""The widest convolution, whose tokens backward have room in the registers."""
EPS = 1e-6
SPAN = 64
"""Tokens of a program backward, at most."""


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
    out, mixed, tail, weight, centre, first, start, t, eps, UNIT: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A head whose channels begin at `first`; `out` has WIDTH numbers a token."""
    place, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, PAD)[None, :]
    inside, token, channel = column < D, start + place, first + column
    at = place * C + channel
    y = _convolved(mixed, tail, weight, at, token, start, t, inside, channel, C, TAPS)
    y *= tl.sigmoid(y)
    if CENTRED:
        y -= tl.load(centre + channel, mask=inside, other=0.0).to(tl.float32)
    if UNIT:
        y *= tl.rsqrt(tl.sum(y * y, 1) + eps)[:, None]
    tl.store(out + place * WIDTH + column, y.to(out.dtype.element_ty), mask=(token < t) & inside)


@triton.jit(do_not_specialize=["t", "blocks"])
def forward_kernel(
    mixed, tail, weight, centre, q, k, v, t, blocks, eps, HEADS: tl.constexpr, D_K: tl.constexpr,
    D_V: tl.constexpr, PAD_K: tl.constexpr, PAD_V: tl.constexpr, TAPS: tl.constexpr,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr,
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
        _forward_part(q, mixed, tail, weight, centre, head * D_K, start, t, eps,
                      True, K, D_K, PAD_K, C, TAPS, CENTRED, BLOCK)  # fmt: skip
    elif part == 1:
        k += first * K + head * D_K
        _forward_part(k, mixed, tail, weight, centre, K + head * D_K, start, t, eps,
                      True, K, D_K, PAD_K, C, TAPS, CENTRED, BLOCK)  # fmt: skip
    else:
        v += first * V + head * D_V
        _forward_part(v, mixed, tail, weight, centre, 2 * K + head * D_V, start, t, eps,
                      False, V, D_V, PAD_V, C, TAPS, False, BLOCK)  # fmt: skip


@triton.jit
def _through_silu(y, centre, d_out, eps, UNIT: tl.constexpr):
    """The gradients at the convolution's output y and at SiLU's, from that at the unit norm's."""
    gate = tl.sigmoid(y)
    if UNIT:
        s = y * gate - centre
        scale = tl.rsqrt(tl.sum(s * s, 0) + eps)
        d_out = scale * (d_out - s * (scale * scale * tl.sum(s * d_out, 0)))
    return d_out * gate * (1 + y * (1 - gate)), d_out


@triton.jit
def _token(mixed, tail, i, start, t, inside, C: tl.constexpr, TAPS: tl.constexpr):
    """The channels of the token i after the start, which may be one of the tail."""
    token = start + i
    x = tl.load(mixed + i * C, mask=(token >= 0) & (token < t) & inside, other=0.0)
    before = (token < 0) & (token > -TAPS) & inside
    return (x + tl.load(tail + i * C, mask=before, other=0.0)).to(tl.float32)


@triton.jit
def _gradient(d_out, i, start, t, inside, WIDTH: tl.constexpr):
    here = (start + i >= 0) & (start + i < t) & inside
    return tl.load(d_out + i * WIDTH, mask=here, other=0.0).to(tl.float32)


@triton.jit
def _backward_part(
    d_out, mixed, tail, weight, centre, d_mixed, d_tail, sums, start, t, eps, UNIT: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, PAD: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr,
    CENTRED: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """A head, token by token; the TAPS - 1 tokens after its span are there for those in it."""
    column = tl.arange(0, PAD)
    inside = column < D
    d_out, mixed, tail, weight = d_out + column, mixed + column, tail + column, weight + column
    d_mixed, d_tail, sums = d_mixed + column, d_tail + column, sums + column
    none = tl.zeros((PAD,), tl.float32)
    middle, d_middle = none, none
    if CENTRED:
        middle = tl.load(centre + column, mask=inside, other=0.0).to(tl.float32)
    # of the last TAPS tokens, the newest first: what they are, and their gradients so far
    xs, d_xs, ws, d_ws = (), (), (), ()
    for back in tl.static_range(TAPS):
        xs += (_token(mixed, tail, -1 - back, start, t, inside, C, TAPS),)
        ws += (tl.load(weight + back * C, mask=inside, other=0.0).to(tl.float32),)
        d_xs, d_ws = d_xs + (none,), d_ws + (none,)
    # one token ahead, so that its loads are not waited for
    x = _token(mixed, tail, 0, start, t, inside, C, TAPS)
    d_ahead = _gradient(d_out, 0, start, t, inside, WIDTH)
    for i in range(SPAN + TAPS - 1):
        xs, d = (x,) + xs[:-1], d_ahead
        x = _token(mixed, tail, i + 1, start, t, inside, C, TAPS)
        d_ahead = _gradient(d_out, i + 1, start, t, inside, WIDTH)
        y = none
        for back in tl.static_range(TAPS):
            y += ws[back] * xs[back]
        d_y, d_s = _through_silu(y, middle, d, eps, UNIT)
        own = tl.where(i < SPAN, d_y, 0.0)
        if CENTRED:
            d_middle -= tl.where(i < SPAN, d_s, 0.0)
        later, d_xs, sofar, d_ws = (none,) + d_xs[:-1], (), d_ws, ()
        for back in tl.static_range(TAPS):
            d_xs += (later[back] + ws[back] * d_y,)
            d_ws += (sofar[back] + xs[back] * own,)
        done = i - TAPS + 1
        here = (done >= 0) & (start + done < t) & inside
        whole = d_xs[TAPS - 1].to(d_mixed.dtype.element_ty)
        tl.store(d_mixed + done * C, whole, mask=here & (start + done >= 0))
        tl.store(d_tail + done * C, whole, mask=here & (start + done < 0))
    for back in tl.static_range(TAPS):
        tl.store(sums + back * C, d_ws[back], mask=inside)
    if CENTRED:
        tl.store(sums + TAPS * C, d_middle, mask=inside)


@triton.jit(do_not_specialize=["t", "spans"])
def backward_kernel(
    d_q, d_k, d_v, mixed, tail, weight, centre, d_mixed, d_tail, sums, t, spans, eps,
    HEADS: tl.constexpr, D_K: tl.constexpr, D_V: tl.constexpr, PAD_K: tl.constexpr,
    PAD_V: tl.constexpr, TAPS: tl.constexpr, CENTRED: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    K: tl.constexpr = HEADS * D_K
    V: tl.constexpr = HEADS * D_V
    C: tl.constexpr = 2 * K + V
    head, part, span, row = _placed(tl.program_id(0), spans, HEADS)
    # the first span begins with the tail, which has gradients too
    start = span * SPAN - (TAPS - 1)
    first = part * K + head * tl.where(part == 2, D_V, D_K)
    begin = row * t + start
    mixed, d_mixed = mixed + begin * C + first, d_mixed + begin * C + first
    # the tail's address if it went on to here
    in_tail = (row * (TAPS - 1) + span * SPAN) * C + first
    tail, d_tail = tail + in_tail, d_tail + in_tail
    sums += (row * spans + span) * (TAPS + CENTRED) * C + first
    weight, centre = weight + first, centre + first
    if part == 0:
        _backward_part(d_q + begin * K + head * D_K, mixed, tail, weight, centre, d_mixed,
                       d_tail, sums, start, t, eps, True, K, D_K, PAD_K, C, TAPS, CENTRED,
                       SPAN)  # fmt: skip
    elif part == 1:
        _backward_part(d_k + begin * K + head * D_K, mixed, tail, weight, centre, d_mixed,
                       d_tail, sums, start, t, eps, True, K, D_K, PAD_K, C, TAPS, CENTRED,
                       SPAN)  # fmt: skip
    else:
        _backward_part(d_v + begin * V + head * D_V, mixed, tail, weight, centre, d_mixed,
                       d_tail, sums, start, t, eps, False, V, D_V, PAD_V, C, TAPS, False,
                       SPAN)  # fmt: skip


class _ConvSiluUnit(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mixed, tail, weight, centre, heads, d_k, d_v):
        mixed, tail, weight = mixed.contiguous(), tail.contiguous(), weight.contiguous()
        centre = None if centre is None else centre.contiguous()
        ctx.save_for_backward(mixed, tail, weight, centre)
        ctx.sizes = heads, d_k, d_v
        batch, t = mixed.shape[:2]
        q = torch.empty(batch, t, heads, d_k, dtype=mixed.dtype, device=mixed.device)
        k = torch.empty_like(q)
        v = torch.empty(batch, t, heads, d_v, dtype=mixed.dtype, device=mixed.device)
        block = _block(d_k, d_v)
        fixed = _fixed(heads, d_k, d_v, weight.shape[0], centre is not None) | {"BLOCK": block}
        blocks = triton.cdiv(t, block)
        launch(
            forward_kernel, 3 * heads * blocks * batch, mixed, tail, weight,
            weight if centre is None else centre, q, k, v, t, blocks, EPS, **fixed,
            num_warps=_forward_warps(fixed),
        )  # fmt: skip
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        mixed, tail, weight, centre = ctx.saved_tensors
        heads, d_k, d_v = ctx.sizes
        (batch, t, channels), taps = mixed.shape, weight.shape[0]
        span = min(SPAN, triton.next_power_of_2(t + taps - 1))
        fixed = _fixed(heads, d_k, d_v, taps, centre is not None) | {"SPAN": span}
        spans = triton.cdiv(t + taps - 1, span)
        d_mixed, d_tail = torch.empty_like(mixed), torch.empty_like(tail)
        wide: Any = {"dtype": torch.float32, "device": mixed.device}
        sums = torch.empty(batch * spans, taps + fixed["CENTRED"], channels, **wide)
        launch(
            backward_kernel, 3 * heads * spans * batch, *(g.contiguous() for g in grads), mixed,
            tail, weight, weight if centre is None else centre, d_mixed, d_tail, sums, t, spans,
            EPS, **fixed, num_warps=_backward_warps(fixed),
        )  # fmt: skip
        summed = sums.sum(0)
        d_centre = None
        if centre is not None:
            d_centre = summed[taps, : 2 * heads * d_k].view(centre.shape).to(centre.dtype)
        return d_mixed, d_tail, summed[:taps].to(weight.dtype), d_centre, None, None, None


def launch(kernel: Any, programs: int, first: Tensor, *others: Any, **options: Any) -> None:
    """On the device of the first tensor, whichever is the current one."""
    with torch.cuda.device_of(first):
        kernel[(programs,)](first, *others, **options)


def _fixed(heads: int, d_k: int, d_v: int, taps: int, centred: bool) -> dict[str, int]:
    """What both kernels know when they are compiled."""
    pads = {"PAD_K": triton.next_power_of_2(d_k), "PAD_V": triton.next_power_of_2(d_v)}
    return {"HEADS": heads, "D_K": d_k, "D_V": d_v, **pads, "TAPS": taps, "CENTRED": int(centred)}


def _block(d_k: int, d_v: int) -> int:
    """Tokens of a tile forward."""
    return min(64, max(16, 4096 // triton.next_power_of_2(max(d_k, d_v))))


def _forward_warps(fixed: dict[str, int]) -> int:
    """One for 1,024 numbers of the largest tile."""
    return min(16, max(4, fixed["BLOCK"] * max(fixed["PAD_K"], fixed["PAD_V"]) // 1024))


def _backward_warps(fixed: dict[str, int]) -> int:
    """Four channels a thread: what a thread keeps of the last tokens has room in its registers."""
    return max(1, max(fixed["PAD_K"], fixed["PAD_V"]) // 128)


def conv_silu_unit(
    mixed: Tensor,
    tail: Tensor,
    weight: Tensor,
    heads: int,
    d_k: int,
    d_v: int,
    centre: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k `[b t h k]` and v `[b t h v]` of a projection q | k | v, `[b t channels]`.

    y_t = SiLU(sum_j weight_j mixed_{t-j}), the tail `[b taps-1 channels]` before the first token;
    q and k less their centre `[2 h k]`, if they have one, and divided by their length. In float32,
    rounded once.
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
    if centre is not None and centre.shape != (2, heads, d_k):
        expected = (2, heads, d_k)
        raise ValueError(f"centre: has shape {tuple(centre.shape)}, expected {expected}")
    return _ConvSiluUnit.apply(mixed, tail.to(mixed.dtype), weight, centre, heads, d_k, d_v)


def _kernels(d_k: int, centred: bool) -> list[dict[str, Any]]:
    """At 16 heads, values of 64 and 4 taps, in bfloat16 with float32 weights."""
    fixed = _fixed(16, d_k, 64, 4, centred)
    forward, backward = fixed | {"BLOCK": _block(d_k, 64)}, fixed | {"SPAN": SPAN}
    tensors = {"mixed": "*bf16", "tail": "*bf16", "weight": "*fp32", "centre": "*fp32"}
    out = dict.fromkeys(("q", "k", "v"), "*bf16")
    d_out = dict.fromkeys(("d_q", "d_k", "d_v"), "*bf16")
    made = {"d_mixed": "*bf16", "d_tail": "*bf16", "sums": "*fp32"}
    sizes = {"t": "i32", "blocks": "i32", "eps": "fp32"} | dict.fromkeys(forward, "constexpr")
    spans = {"t": "i32", "spans": "i32", "eps": "fp32"} | dict.fromkeys(backward, "constexpr")
    return [
        {
            "name": f"short_conv.forward d_k={d_k} centred={centred}",
            "fn": forward_kernel,
            "signature": tensors | out | sizes,
            "constexprs": forward,
            "num_warps": _forward_warps(forward),
        },
        {
            "name": f"short_conv.backward d_k={d_k} centred={centred}",
            "fn": backward_kernel,
            "signature": d_out | tensors | made | spans,
            "constexprs": backward,
            "num_warps": _backward_warps(backward),
        },
    ]


KERNELS = [
    k for d_k, centred in ((64, False), (16, False), (64, True)) for k in _kernels(d_k, centred)
]
"""What to compile ahead of time to see that it compiles."""
