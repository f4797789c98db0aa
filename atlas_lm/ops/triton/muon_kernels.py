"""Muon, piece by piece: factors, then steps (`newton_schulz`), then the new state; and back.

Every phase is a launch of its own, since the steps of one memory are made by many programs.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.pairs import deep_factors, linear_factors
from atlas_lm.ops.triton.pairs_backward import (
    leave_pulls,
    through_branch,
    through_hidden,
    through_sums,
    to_keys,
)
from atlas_lm.ops.triton.tiles import dot, features, put, tile
from atlas_lm.ops.triton.writing import outer_sum


@triton.jit
def keep_features(k, phi, rows, height, left, right, scale, S: tl.constexpr):
    """phi of the keys `rows`, written out for the programs that make the steps."""
    PITCH: tl.constexpr = S.pitch
    STEP: tl.constexpr = S.block_d
    for d in range(0, PITCH, STEP):
        ds = d + tl.arange(0, STEP)
        f = features(k, rows, ds, height, left, right, scale, S.d_k, S.features)
        put(phi, f, rows, ds, height, S.pitch)


@triton.jit
def some_factors(
    k, v, anchor, gain, residual, u1, h, u2, u3, phi, rows, height, left, right, scale,
    room, arrived, meeting, member, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Pairs `rows` below `height`: the factors of their gradients, written out."""
    if S.network == 0:
        F: tl.constexpr = S.block_share
        vs = member * S.share + tl.arange(0, F)
        linear_factors(k, v, anchor, u1, rows, vs, height, left, right, scale, S, DOT)
    else:
        deep_factors(
            k, v, anchor, gain, residual, u1, h, u2, u3, rows, height, left, right, scale,
            room, arrived, meeting, member, S, DOT,
        )  # fmt: skip
    if S.features != S.d_k:  # noqa: SIM102 (a constant and a running value)
        if member == 0:
            keep_features(k, phi, rows, height, left, right, scale, S)


@triton.jit(do_not_specialize=["heads", "meeting"])
def factors_kernel(
    k, v, anchor, gain, residual, u1, h, u2, u3, phi, left, right, scale, room, arrived, meeting,
    heads, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The pairs of one piece, one row and head a team. `meeting`: its first in this launch.

    Those before the piece have a program of their own where a memory has no more than one.
    """
    z = (tl.program_id(0) // S.team).to(tl.int64)
    member = tl.program_id(0) % S.team
    room, arrived = room + z * 4 * S.team * S.pairs * S.d_v, arrived + z
    head = z % heads
    pairs = z * S.pairs
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    k, v, anchor = k + pairs * S.d_k, v + pairs * S.d_v, anchor + z * S.size
    gain, residual = gain + head * S.d_v, residual + head * S.d_v * S.d_k
    scale += head * S.features
    deep = pairs * S.hidden
    u1, h, u2, u3 = u1 + pairs * S.d_v, h + deep, u2 + deep, u3 + deep
    phi += pairs * S.pitch
    both: tl.constexpr = S.team > 1
    if both or tl.program_id(1) == 0:
        some_factors(
            k, v, anchor, gain, residual, u1, h, u2, u3, phi, S.tail + tl.arange(0, LENGTH),
            S.pairs, left, right, scale, room, arrived, meeting, member, S, DOT,
        )  # fmt: skip
    if S.tail > 0:  # noqa: SIM102 - without a tail there is nothing to compile
        if both or tl.program_id(1) == 1:
            some_factors(
                k, v, anchor, gain, residual, u1, h, u2, u3, phi, tl.arange(0, TAIL), S.tail,
                left, right, scale, room, arrived, meeting + 1, member, S, DOT,
            )  # fmt: skip


@triton.jit
def advance_tile(
    weights, momentum, terms, new_weights, new_momentum, states, u, x, steps, push,
    kept, push_kept, outs, ins, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, XWIDTH: tl.constexpr,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile of the state after a piece: weights from the steps, momentum from the pairs."""
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    TERMS: tl.constexpr = S.terms
    w = kept * tile(weights, outs, ins, HEIGHT, WIDTH)
    for s in range(TERMS):
        step = tile(terms + s * S.size, outs, ins, HEIGHT, WIDTH).to(tl.float32)
        w += tl.load(steps + s) * step
    put(new_weights, w, outs, ins, HEIGHT, WIDTH)
    put(states, w, outs, ins, HEIGHT, WIDTH)
    mine, past = S.tail + tl.arange(0, LENGTH), tl.arange(0, TAIL)
    m = push_kept * tile(momentum, outs, ins, HEIGHT, WIDTH)
    weight = tl.load(push + mine, mask=mine < S.pairs, other=0.0)
    g = tile(x, mine, ins, S.pairs, XWIDTH).to(tl.float32)
    m += outer_sum(tile(u, mine, outs, S.pairs, HEIGHT), g, weight, DOT)
    if S.tail > 0:
        weight = tl.load(push + past, mask=past < S.tail, other=0.0)
        g = tile(x, past, ins, S.tail, XWIDTH).to(tl.float32)
        m += outer_sum(tile(u, past, outs, S.tail, HEIGHT), g, weight, DOT)
    put(new_momentum, m, outs, ins, HEIGHT, WIDTH)


@triton.jit
def advance_kernel(
    weights, momentum, terms, new_weights, new_momentum, states, u1, h, u2, u3, phi,
    kept, steps, push_kept, push, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One row and head, and one block of the hidden layer (of the values, if linear) a program."""
    z = tl.program_id(0).to(tl.int64)
    V: tl.constexpr = S.block_v
    F: tl.constexpr = S.block_f if S.network != 0 else S.block_v
    PITCH: tl.constexpr = S.pitch
    STEP: tl.constexpr = S.block_d
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    ROWS: tl.constexpr = S.d_v if S.network == 0 else S.hidden
    at, pairs = z * S.size, z * S.pairs
    weights, momentum, states = weights + at, momentum + at, states + at
    new_weights, new_momentum = new_weights + at, new_momentum + at
    terms += at * S.terms
    steps += (z * S.length + S.length - 1) * S.terms
    push += (z * S.pulls + S.terms) * S.pairs
    keep = tl.load(kept + z * S.length + S.length - 1)
    push_keep = tl.load(push_kept + z * S.pulls + S.terms)
    u1, h, phi = u1 + pairs * S.d_v, h + pairs * S.hidden, phi + pairs * S.pitch
    u2, u3 = u2 + pairs * S.hidden, u3 + pairs * S.hidden
    vs = tl.arange(0, V)
    hs = tl.program_id(1) * F + tl.arange(0, F)
    if S.network != 0:
        advance_tile(
            weights, momentum, terms, new_weights, new_momentum, states, u1, h, steps, push,
            keep, push_keep, vs, hs, S.d_v, S.hidden, S.hidden, S, DOT,
        )  # fmt: skip
    for d in range(0, PITCH, STEP):
        ds = d + tl.arange(0, STEP)
        if S.network == 0:
            advance_tile(
                weights, momentum, terms, new_weights, new_momentum, states, u1, phi, steps, push,
                keep, push_keep, hs, ds, ROWS, S.pitch, S.pitch, S, DOT,
            )  # fmt: skip
        else:
            advance_tile(
                weights + W2, momentum + W2, terms + W2, new_weights + W2, new_momentum + W2,
                states + W2, u2, phi, steps, push, keep, push_keep, hs, ds, ROWS, S.pitch, S.pitch,
                S, DOT,
            )  # fmt: skip
        if S.network == 2:
            advance_tile(
                weights + W3, momentum + W3, terms + W3, new_weights + W3, new_momentum + W3,
                states + W3, u3, phi, steps, push, keep, push_keep, hs, ds, ROWS, S.pitch, S.pitch,
                S, DOT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["blocks"])
def carry_kernel(
    g_weights, g_momentum, weights, momentum, d_state, pushes, kept, push_kept, sums,
    blocks, BLOCK: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The gradients of what entered the piece, but for what its anchor gets, BLOCK weights each.

    `pushes`: the gradients of the momenta at the stride points; that of the last momentum is put
    behind them. `sums` `[z blocks 2]`: shares of the gradients of the last push_kept and of kept.
    """
    z = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = S.size
    TERMS: tl.constexpr = S.terms
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = at < SIZE
    g_weights, g_momentum = g_weights + z * SIZE + at, g_momentum + z * SIZE + at
    pushes += z * (TERMS + 1) * SIZE + at
    push_kept += z * (TERMS + 1)
    sums += (z * blocks + tl.program_id(1)) * 2
    gw = tl.load(g_weights, mask=here, other=0.0)
    w = tl.load(weights + z * SIZE + at, mask=here, other=0.0)
    tl.store(sums + 1, tl.sum(gw * w))
    keep = tl.load(kept + z * S.length + S.length - 1)
    gw = keep * gw + tl.load(d_state + z * SIZE + at, mask=here, other=0.0).to(tl.float32)
    tl.store(g_weights, gw, mask=here)
    m = tl.load(momentum + z * SIZE + at, mask=here, other=0.0)
    gm = tl.load(g_momentum, mask=here, other=0.0)
    tl.store(pushes + TERMS * SIZE, gm.to(pushes.dtype.element_ty), mask=here)
    tl.store(sums, tl.sum(gm * m))
    gm *= tl.load(push_kept + TERMS)
    for s in range(TERMS):
        ds = tl.load(pushes + s * SIZE, mask=here, other=0.0).to(tl.float32)
        gm += tl.load(push_kept + s) * ds
    tl.store(g_momentum, gm, mask=here)


@triton.jit
def add_to(base, value, rows, columns, height, width):
    """Add to a tile of a contiguous matrix `[height, width]`."""
    put(base, tile(base, rows, columns, height, width) + value, rows, columns, height, width)


@triton.jit
def to_first_matrix(
    dz, k, anchor, d_anchor, grad_k, degrees, rows, outs, height, left, right, scale,
    HEIGHT: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows `outs` of a matrix on phi, and the keys, from the gradient of what it gave."""
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        f = features(k, rows, ds, height, left, right, scale, S.d_k, S.features)
        add_to(d_anchor, dot(tl.trans(dz), f, DOT), outs, ds, HEIGHT, S.pitch)
        df = dot(dz, tile(anchor, outs, ds, HEIGHT, S.pitch), DOT)
        grad_k, degrees = to_keys(
            df, f, grad_k, degrees, k, rows, ds, height, left, right, scale, S, DOT
        )
    return grad_k, degrees


@triton.jit
def some_factors_backward(
    k, v, anchor, d_anchor, gain, residual, u1, h, u2, u3, pushes, pulls, dk, dv, d_pulls,
    d_gain, degrees, scratch, rows, height, left, right, scale, room, arrived, meeting, member,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Pairs `rows` below `height`: from the matrices they were pushed into, to what they saw."""
    V: tl.constexpr = S.block_v
    K: tl.constexpr = S.block_k
    F: tl.constexpr = S.block_share
    SHARE: tl.constexpr = S.share
    PULLS: tl.constexpr = S.block_pulls
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    ks = tl.arange(0, K)
    grad_k = tl.zeros((rows.shape[0], K), tl.float32)
    grad_pulls = tl.zeros((rows.shape[0], PULLS), tl.float32)
    if S.network == 0:
        vs = member * SHARE + tl.arange(0, F)
        du, grad_k, grad_pulls, degrees = through_sums(
            k, u1, u1, pushes, pulls, grad_k, grad_pulls, degrees, rows, vs, height,
            left, right, scale, S, DOT,
        )  # fmt: skip
        put(dv, -du, rows, vs, height, S.d_v)
        if S.objective == 0:
            grad_k, degrees = to_first_matrix(
                du, k, anchor, d_anchor, grad_k, degrees, rows, vs, height, left, right, scale,
                S.d_v, S, DOT,
            )  # fmt: skip
    else:
        vs = tl.arange(0, V)
        do, grad_k, grad_pulls, degrees = through_branch(
            k, v, anchor, gain, residual, u1, h, u2, u3, u1, h, u2, u3, pushes, pulls, scratch,
            grad_k, dv, d_gain, grad_pulls, degrees, rows, vs, ks, height, left, right, scale,
            room, arrived, meeting, member, S, DOT,
        )  # fmt: skip
        tl.debug_barrier()
        for start in range(0, SHARE, F):
            hs = member * SHARE + start + tl.arange(0, F)
            grad, dz, d_value = through_hidden(
                do, k, anchor, u1, h, scratch, rows, vs, hs, height, left, right, scale, S, DOT
            )
            add_to(d_anchor, grad, vs, hs, S.d_v, S.hidden)
            grad_k, degrees = to_first_matrix(
                dz, k, anchor + W2, d_anchor + W2, grad_k, degrees, rows, hs, height,
                left, right, scale, S.hidden, S, DOT,
            )  # fmt: skip
            if S.network == 2:
                grad_k, degrees = to_first_matrix(
                    d_value, k, anchor + W3, d_anchor + W3, grad_k, degrees, rows, hs, height,
                    left, right, scale, S.hidden, S, DOT,
                )  # fmt: skip
    put(dk, grad_k, rows, ks, height, S.d_k)
    leave_pulls(grad_pulls, d_pulls, rows, height, S)
    return degrees


@triton.jit(do_not_specialize=["heads", "meeting", "rows_and_heads"])
def factors_backward_kernel(
    k, v, anchor, d_anchor, gain, residual, u1, h, u2, u3, pushes, pulls, dk, dv, d_pulls,
    d_gain, d_degrees, scratch, left, right, scale, room, arrived, meeting, rows_and_heads, heads,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The pairs of one piece, one row and head a team; adds to the gradient of the anchor.

    dk, d_pulls, d_degrees: a share of a sum for each member of the team.
    """
    z = (tl.program_id(0) // S.team).to(tl.int64)
    member = tl.program_id(0) % S.team
    room, arrived = room + z * 4 * S.team * S.pairs * S.d_v, arrived + z
    whole = member.to(tl.int64) * rows_and_heads * S.pairs
    dk, d_pulls = dk + whole * S.d_k, d_pulls + whole * S.pulls
    head = z % heads
    pairs, wide, deep = z * S.pairs, z * S.pairs * S.d_v, z * S.pairs * S.hidden
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    k, dk, v, dv = k + pairs * S.d_k, dk + pairs * S.d_k, v + wide, dv + wide
    anchor, d_anchor = anchor + z * S.size, d_anchor + z * S.size
    gain, residual = gain + head * S.d_v, residual + head * S.d_v * S.d_k
    scale += head * S.features
    u1, h, u2, u3 = u1 + wide, h + deep, u2 + deep, u3 + deep
    pushes, pulls = pushes + z * S.pulls * S.size, pulls + pairs * S.pulls
    d_pulls, d_gain = d_pulls + pairs * S.pulls, d_gain + z * S.d_v
    scratch += tl.program_id(0).to(tl.int64) * S.pairs * (4 * S.hidden + S.d_v)
    degrees = tl.zeros((4,), tl.float32)
    degrees = some_factors_backward(
        k, v, anchor, d_anchor, gain, residual, u1, h, u2, u3, pushes, pulls, dk, dv, d_pulls,
        d_gain, degrees, scratch, S.tail + tl.arange(0, LENGTH), S.pairs, left, right, scale,
        room, arrived, meeting, member, S, DOT,
    )  # fmt: skip
    if S.tail > 0:
        tl.debug_barrier()
        degrees = some_factors_backward(
            k, v, anchor, d_anchor, gain, residual, u1, h, u2, u3, pushes, pulls, dk, dv, d_pulls,
            d_gain, degrees, scratch, tl.arange(0, TAIL), S.tail, left, right, scale,
            room, arrived, meeting + 1, member, S, DOT,
        )  # fmt: skip
    if S.features != S.d_k:
        at = d_degrees + tl.program_id(0) * 4 + tl.arange(0, 4)
        tl.store(at, tl.load(at) + degrees)
