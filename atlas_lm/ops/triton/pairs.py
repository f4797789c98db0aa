"""The gradients of a block of pairs at the anchor, as factors u x^T: forward and backward."""

import triton
import triton.language as tl

from atlas_lm.ops.triton.branch import gelu, gelu_slope, normalise, through_norm
from atlas_lm.ops.triton.team import leave_part, meet, sum_of_parts
from atlas_lm.ops.triton.tiles import dot, features, put, tile, times


@triton.jit
def of_features(
    keys, weights, rows, outs, height, left, right, scale,
    OUT: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """phi(keys) W^T for a matrix W `[OUT pitch]`: a tile `[rows, outs]`."""
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    z = tl.zeros((rows.shape[0], outs.shape[0]), tl.float32)
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        f = features(keys, rows, ds, height, left, right, scale, S.d_k, S.features)
        z += times(f, tile(weights, outs, ds, OUT, S.pitch), DOT)
    return z


@triton.jit
def as_residual(raw, residual, rows, vs, height, S: tl.constexpr, DOT: tl.constexpr):
    """Raw keys or queries as the network's residual sees them, `[rows, vs]`."""
    if S.d_k == S.d_v:
        x = tile(raw, rows, vs, height, S.d_v).to(tl.float32)
    else:
        K: tl.constexpr = S.block_k
        ks = tl.arange(0, K)
        r = tile(residual, vs, ks, S.d_v, S.d_k)
        x = times(tile(raw, rows, ks, height, S.d_k), r, DOT)
    return x


@triton.jit
def added_parts(
    parts, rows, vs, WHICH: tl.constexpr, COUNT: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """What the blocks of the hidden layer left, `[team COUNT pairs v]`, added up in their order."""
    TEAM: tl.constexpr = S.team
    total = tl.zeros((rows.shape[0], vs.shape[0]), tl.float32)
    for member in range(TEAM):
        at = parts + (member * COUNT + WHICH) * S.pairs * S.d_v
        total += tile(at, rows, vs, S.pairs, S.d_v)
    return total


@triton.jit
def gradient_at_branch(o, rest, weight, rows, vs, height, S: tl.constexpr):
    """u1, the gradient at the branch of x + gain * LN(o); the error; LN(o); 1 / its scale.

    `rest`: what the error is besides the branch, x - v; on the dot product -v is all of it.
    """
    unit, scale = normalise(o, vs, S.d_v)
    e = rest
    if S.objective == 0:
        e += weight * unit if S.norm else o
    u1 = through_norm(weight * e, unit, scale, vs, S.d_v) if S.norm else e
    return tl.where((rows < height)[:, None], u1, 0.0), e, unit, scale


@triton.jit
def rest_of_error(k, v, residual, rows, vs, height, S: tl.constexpr, DOT: tl.constexpr):
    """The error without the branch: the residual less the value, or less the value alone."""
    rest = -tile(v, rows, vs, height, S.d_v).to(tl.float32)
    if S.objective == 0:
        rest += as_residual(k, residual, rows, vs, height, S, DOT)
    return rest


@triton.jit
def error_at_branch(o, k, v, gain, residual, rows, vs, height, S: tl.constexpr, DOT: tl.constexpr):
    """`gradient_at_branch` of keys and values."""
    weight = tl.load(gain + vs, mask=vs < S.d_v, other=0.0)[None, :]
    rest = rest_of_error(k, v, residual, rows, vs, height, S, DOT)
    return gradient_at_branch(o, rest, weight, rows, vs, height, S)


@triton.jit
def prepared_rest(k, v, rest, rows, vs, height, S: tl.constexpr, DOT: tl.constexpr):
    """`rest_of_error`, which is prepared (`prepare_kernel`) where the residual is a product."""
    if S.d_k != S.d_v:
        e = tile(rest, rows, vs, height, S.d_v)
    else:
        e = rest_of_error(k, v, k, rows, vs, height, S, DOT)
    return e


@triton.jit
def prepared_error(o, k, v, rest, gain, rows, vs, height, S: tl.constexpr, DOT: tl.constexpr):
    """`error_at_branch` without a product."""
    weight = tl.load(gain + vs, mask=vs < S.d_v, other=0.0)[None, :]
    e = prepared_rest(k, v, rest, rows, vs, height, S, DOT)
    return gradient_at_branch(o, e, weight, rows, vs, height, S)


@triton.jit
def linear_factors(
    k, v, anchor, u1, rows, vs, height, left, right, scale, S: tl.constexpr, DOT: tl.constexpr
):
    """u of a linear memory, `W phi(k) - v`, or `-v` on the dot product: `[rows, vs]`."""
    STEP: tl.constexpr = S.block_d
    D: tl.constexpr = S.features
    e = -tile(v, rows, vs, height, S.d_v).to(tl.float32)
    if S.objective == 0:
        for d in range(0, D, STEP):
            ds = d + tl.arange(0, STEP)
            f = features(k, rows, ds, height, left, right, scale, S.d_k, S.features)
            e += dot(f, tl.trans(tile(anchor, vs, ds, S.d_v, S.pitch)), DOT)
    e = tl.where((rows < height)[:, None], e, 0.0)
    put(u1, e, rows, vs, height, S.d_v)
    return e


@triton.jit
def hidden_layer(
    k, anchor, rows, hs, height, left, right, scale, S: tl.constexpr, DOT: tl.constexpr
):
    """h at the keys, and what takes the gradient at h to that of W2 phi and of W3 phi."""
    w2 = anchor + S.d_v * S.hidden
    z = of_features(k, w2, rows, hs, height, left, right, scale, S.hidden, S, DOT)
    gate = gelu(z)
    x, to_z = gate, gelu_slope(z)
    if S.network == 2:
        w3 = w2 + S.hidden * S.pitch
        value = of_features(k, w3, rows, hs, height, left, right, scale, S.hidden, S, DOT)
        x, to_z = gate * value, to_z * value
    return x, to_z, gate


@triton.jit
def branch_errors(
    k, v, anchor, gain, residual, u1, rows, vs, height, left, right, scale,
    room, arrived, meeting, member, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """u1, the gradient at the branch, `[rows, vs]`; written out too.

    Also this member's share of the hidden layer, for `hidden_factors`, where it is one block.
    """
    F: tl.constexpr = S.block_share
    SHARE: tl.constexpr = S.share
    o = tl.zeros((rows.shape[0], vs.shape[0]), tl.float32)
    x = tl.zeros((rows.shape[0], F), tl.float32)
    to_z, gate = x, x
    for start in range(0, SHARE, F):
        hs = member * SHARE + start + tl.arange(0, F)
        x, to_z, gate = hidden_layer(k, anchor, rows, hs, height, left, right, scale, S, DOT)
        o += dot(x, tl.trans(tile(anchor, vs, hs, S.d_v, S.hidden)), DOT)
    if S.team > 1:
        leave_part(o, room, meeting, member, rows, vs, height, 0, S)
        meet(arrived, meeting, S)
        o = sum_of_parts(room, meeting, rows, vs, height, 0, S)
    error, _, _, _ = error_at_branch(o, k, v, gain, residual, rows, vs, height, S, DOT)
    if member == 0:
        put(u1, error, rows, vs, height, S.d_v)
    return error, x, to_z, gate


@triton.jit
def hidden_factors(
    error, x, to_z, gate, k, anchor, h, u2, u3, rows, vs, hs, height, left, right, scale,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """h, u2 and u3 of a block of the hidden layer, written out too."""
    if S.share > S.block_share:
        x, to_z, gate = hidden_layer(k, anchor, rows, hs, height, left, right, scale, S, DOT)
    back = dot(error, tile(anchor, vs, hs, S.d_v, S.hidden), DOT)
    of_z, of_value = back * to_z, back * gate
    put(h, x, rows, hs, height, S.hidden)
    put(u2, of_z, rows, hs, height, S.hidden)
    if S.network == 2:
        put(u3, of_value, rows, hs, height, S.hidden)
    return x, of_z, of_value
