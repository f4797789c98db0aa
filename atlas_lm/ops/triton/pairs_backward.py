"""Gradients of the factors of pairs (`pairs`): a second derivative of the memory's loss.

The factors are pushed into matrices with weights of their own; `pushes` holds the gradients of
those matrices, `pulls` the weights. What comes back goes through the first derivative to the keys,
the values and the anchor.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.branch import gelu, gelu_bend, gelu_slope, through_norm
from atlas_lm.ops.triton.pairs import error_at_branch, hidden_inputs
from atlas_lm.ops.triton.reading_backward import only
from atlas_lm.ops.triton.team import leave_part, meet, sum_of_parts
from atlas_lm.ops.triton.tiles import (
    by_degree,
    dot,
    features,
    features_backward,
    put,
    through_memory,
    tile,
)


@triton.jit
def pulled(
    u, x, du, dx, d_pulls, pushes, pulls, rows, outs, ins, height,
    OUT: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through sum_i pull_i u_i x_i^T for every push: adds to du, dx and d_pulls."""
    PULLS: tl.constexpr = S.pulls
    for j in range(PULLS):
        weight = tl.load(pulls + j * S.pairs + rows, mask=rows < height, other=0.0)
        push = tile(pushes + j * S.size, outs, ins, OUT, WIDTH)
        back = dot(u, push, DOT)
        dx += weight[:, None] * back
        d_pulls += only(tl.sum(x * back, 1), j, S.block_pulls)
        du += dot(weight[:, None] * x, tl.trans(push), DOT)
    return du, dx, d_pulls


@triton.jit
def to_keys(
    df, f, dk, degrees, k, rows, ds, height, left, right, scale,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """From the gradient of a tile of phi to the keys, and its sums by degree."""
    dk += features_backward(
        df, k, rows, ds, height, left, right, scale, S.d_k, S.features, S.block_k, DOT
    )
    if S.features != S.d_k:
        degrees += by_degree(df * f, ds, S.d_k)
    return dk, degrees


@triton.jit
def through_sums(
    k, u1, d_u1, pushes, pulls, dk, d_pulls, degrees, rows, vs, height, left, right, scale,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Linear memories: back to u and the keys from the matrices that u phi^T was pushed into."""
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    u = tile(u1, rows, vs, height, S.d_v)
    du = tl.zeros((rows.shape[0], vs.shape[0]), tl.float32)
    if S.written:
        du += tile(d_u1, rows, vs, height, S.d_v).to(tl.float32)
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        f = features(k, rows, ds, height, left, right, scale, S.d_k, S.features)
        du, df, d_pulls = pulled(
            u, f, du, tl.zeros_like(f), d_pulls, pushes, pulls, rows, vs, ds, height,
            S.d_v, S.pitch, S, DOT,
        )  # fmt: skip
        dk, degrees = to_keys(df, f, dk, degrees, k, rows, ds, height, left, right, scale, S, DOT)
    return du, dk, d_pulls, degrees


@triton.jit
def through_error(
    up, o, k, v, dv, d_gain, gain, residual, rows, vs, height, member,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """From the gradient of u1 to the branch o, the raw key's residual, the value and the gain."""
    u1, e, unit, size = error_at_branch(o, k, v, gain, residual, rows, vs, height, S, DOT)
    inside = (rows < height)[:, None]
    up = tl.where(inside, up, 0.0)
    e = tl.where(inside, e, 0.0)
    de, do = up, up
    if S.norm:
        weight = tl.load(gain + vs, mask=vs < S.d_v, other=0.0)[None, :]
        grad = weight * e
        along_up = tl.sum(up * unit, 1) / S.d_v
        along = tl.sum(grad * unit, 1) / S.d_v
        to_unit = -size[:, None] * (up * along[:, None] + grad * along_up[:, None])
        to_size = tl.sum(up * u1, 1) / S.d_v * size
        at_unit = through_norm(up, unit, size, vs, S.d_v)
        de = weight * at_unit
        d_weight = tl.sum(at_unit * e, 0)
        if S.objective == 0:
            d_weight += tl.sum(de * unit, 0)
            to_unit += weight * de
        do = through_norm(to_unit, unit, size, vs, S.d_v) - to_size[:, None] * unit
        at, mine = d_gain + vs, (vs < S.d_v) & (member == 0)
        tl.store(at, tl.load(at, mask=mine, other=0.0) + d_weight, mask=mine)
    elif S.objective == 1:
        do = tl.zeros_like(up)
    if member == 0:
        put(dv, -de, rows, vs, height, S.d_v)
    return do, de


@triton.jit
def through_first_sums(
    k, u2, u3, of_u2, of_u3, pushes, pulls, dk, d_pulls, degrees, rows, hs, height,
    left, right, scale, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back to u2, u3 and the keys from the matrices that u2 phi^T and u3 phi^T were pushed into."""
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        f = features(k, rows, ds, height, left, right, scale, S.d_k, S.features)
        of_u2, df, d_pulls = pulled(
            tile(u2, rows, hs, height, S.hidden), f, of_u2, tl.zeros_like(f), d_pulls,
            pushes + W2, pulls, rows, hs, ds, height, S.hidden, S.pitch, S, DOT,
        )  # fmt: skip
        if S.network == 2:
            of_u3, df, d_pulls = pulled(
                tile(u3, rows, hs, height, S.hidden), f, of_u3, df, d_pulls,
                pushes + W3, pulls, rows, hs, ds, height, S.hidden, S.pitch, S, DOT,
            )  # fmt: skip
        dk, degrees = to_keys(df, f, dk, degrees, k, rows, ds, height, left, right, scale, S, DOT)
    return of_u2, of_u3, dk, d_pulls, degrees


@triton.jit
def through_second_layer(
    k, anchor, u1, h, u2, u3, d_u1, d_h, d_u2, d_u3, pushes, pulls, scratch, dk, d_pulls,
    degrees, rows, vs, height, left, right, scale, member, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back to u1 from everything made of it; writes what is known of h, z and the value.

    Of one member's share of the hidden layer, as is what comes back.
    """
    F: tl.constexpr = S.block_share
    SHARE: tl.constexpr = S.share
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    ROOM: tl.constexpr = S.pairs * S.hidden
    u = tile(u1, rows, vs, height, S.d_v)
    du = tl.zeros((rows.shape[0], vs.shape[0]), tl.float32)
    o = tl.zeros_like(du)
    if S.written:
        du += tile(d_u1, rows, vs, tl.where(member == 0, height, 0), S.d_v).to(tl.float32)
    for start in range(0, SHARE, F):
        hs = member * SHARE + start + tl.arange(0, F)
        w1 = tile(anchor, vs, hs, S.d_v, S.hidden)
        x = tile(h, rows, hs, height, S.hidden).to(tl.float32)
        o += dot(x, tl.trans(w1), DOT)
        dx, of_u2, of_u3 = tl.zeros_like(x), tl.zeros_like(x), tl.zeros_like(x)
        if S.written:
            dx += tile(d_h, rows, hs, height, S.hidden).to(tl.float32)
            of_u2 += tile(d_u2, rows, hs, height, S.hidden).to(tl.float32)
            if S.network == 2:
                of_u3 += tile(d_u3, rows, hs, height, S.hidden).to(tl.float32)
        du, dx, d_pulls = pulled(
            u, x, du, dx, d_pulls, pushes, pulls, rows, vs, hs, height, S.d_v, S.hidden, S, DOT
        )
        of_u2, of_u3, dk, d_pulls, degrees = through_first_sums(
            k, u2, u3, of_u2, of_u3, pushes, pulls, dk, d_pulls, degrees, rows, hs, height,
            left, right, scale, S, DOT,
        )  # fmt: skip
        z = hidden_inputs(k, anchor + W2, rows, hs, height, left, right, scale, S, DOT)
        back = dot(u, w1, DOT)
        d_back = of_u2 * gelu_slope(z)
        dz = of_u2 * back * gelu_bend(z)
        if S.network == 2:
            value = hidden_inputs(k, anchor + W3, rows, hs, height, left, right, scale, S, DOT)
            put(scratch + 3 * ROOM, d_back * back, rows, hs, height, S.hidden)
            d_back = d_back * value + of_u3 * gelu(z)
            dz = dz * value + of_u3 * back * gelu_slope(z)
        put(scratch, dx, rows, hs, height, S.hidden)
        put(scratch + ROOM, dz, rows, hs, height, S.hidden)
        d_back = through_memory(scratch + 2 * ROOM, d_back, rows, hs, height, S.hidden)
        du += dot(d_back, tl.trans(w1), DOT)
    return du, o, dk, d_pulls, degrees


@triton.jit
def through_hidden(
    do, k, anchor, u1, h, scratch, rows, vs, hs, height, left, right, scale,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """From the branch and what the second layer left: gradients of W1, z and the value."""
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    ROOM: tl.constexpr = S.pairs * S.hidden
    dx = tile(scratch, rows, hs, height, S.hidden)
    dx += dot(do, tile(anchor, vs, hs, S.d_v, S.hidden), DOT)
    d_back = tile(scratch + 2 * ROOM, rows, hs, height, S.hidden)
    grad = dot(tl.trans(tile(u1, rows, vs, height, S.d_v)), d_back, DOT)
    grad += dot(tl.trans(do), tile(h, rows, hs, height, S.hidden), DOT)
    z = hidden_inputs(k, anchor + W2, rows, hs, height, left, right, scale, S, DOT)
    dz = tile(scratch + ROOM, rows, hs, height, S.hidden)
    d_value = dz
    if S.network == 2:
        value = hidden_inputs(k, anchor + W3, rows, hs, height, left, right, scale, S, DOT)
        d_value = tile(scratch + 3 * ROOM, rows, hs, height, S.hidden) + dx * gelu(z)
        dx *= value
    dz += dx * gelu_slope(z)
    dz = through_memory(scratch + ROOM, dz, rows, hs, height, S.hidden)
    if S.network == 2:
        d_value = through_memory(scratch + 3 * ROOM, d_value, rows, hs, height, S.hidden)
    return grad, dz, d_value


@triton.jit
def through_branch(
    k, v, anchor, gain, residual, u1, h, u2, u3, d_u1, d_h, d_u2, d_u3, pushes, pulls, scratch,
    dk, dv, d_gain, d_pulls, degrees, rows, vs, ks, height, left, right, scale,
    room, arrived, meeting, member, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Deep memories: back to the branch; the rest of the hidden layer waits in `scratch`."""
    du, o, dk, d_pulls, degrees = through_second_layer(
        k, anchor, u1, h, u2, u3, d_u1, d_h, d_u2, d_u3, pushes, pulls, scratch, dk, d_pulls,
        degrees, rows, vs, height, left, right, scale, member, S, DOT,
    )  # fmt: skip
    if S.team > 1:
        leave_part(o, room, meeting, member, rows, vs, height, 0, S)
        leave_part(du, room, meeting, member, rows, vs, height, 1, S)
        meet(arrived, meeting, S)
        o = sum_of_parts(room, meeting, rows, vs, height, 0, S)
        du = sum_of_parts(room, meeting, rows, vs, height, 1, S)
    do, de = through_error(
        du, o, k, v, dv, d_gain, gain, residual, rows, vs, height, member, S, DOT
    )
    if S.objective == 0:
        de = tl.where(member == 0, de, 0.0)
        if S.d_k == S.d_v:
            dk += de
        else:
            dk += dot(de, tile(residual, vs, ks, S.d_v, S.d_k), DOT)
    do = through_memory(scratch + 4 * S.pairs * S.hidden, do, rows, vs, height, S.d_v)
    return do, dk, d_pulls, degrees


@triton.jit
def begin_keys(dk, rows, ks, height, member, S: tl.constexpr):
    """What reading left of the keys' gradient, for the first of a team."""
    grad = tl.zeros((rows.shape[0], ks.shape[0]), tl.float32)
    if S.written:
        grad += tile(dk, rows, ks, tl.where(member == 0, height, 0), S.d_k)
    return grad


@triton.jit
def leave_pulls(grad, d_pulls, rows, height, S: tl.constexpr):
    PULLS: tl.constexpr = S.block_pulls
    js = tl.arange(0, PULLS)
    inside = (rows[:, None] < height) & (js[None, :] < S.pulls)
    tl.store(d_pulls + js[None, :] * S.pairs + rows[:, None], grad, mask=inside)


@triton.jit
def leave_keys(grad, grad_past, dk, mine, past, ks, S: tl.constexpr):
    put(dk, grad, mine, ks, S.pairs, S.d_k)
    if S.tail > 0:
        put(dk, grad_past, past, ks, S.tail, S.d_k)
