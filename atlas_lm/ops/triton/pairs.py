"""The gradients of a block of pairs at the anchor, as factors u x^T: forward and backward."""

import triton
import triton.language as tl

from atlas_lm.ops.triton.branch import gelu, gelu_slope, normalise, through_norm
from atlas_lm.ops.triton.tiles import dot, features, put, tile


@triton.jit
def hidden_inputs(
    keys, weights, rows, hs, height, left, right, scale, S: tl.constexpr, DOT: tl.constexpr
):
    """phi(keys) W^T for a matrix W `[f pitch]`: a tile `[rows, hs]`."""
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    z = tl.zeros((rows.shape[0], hs.shape[0]), tl.float32)
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        f = features(keys, rows, ds, height, left, right, scale, S.d_k, S.features)
        z += dot(f, tl.trans(tile(weights, hs, ds, S.hidden, S.pitch)), DOT)
    return z


@triton.jit
def as_residual(raw, residual, rows, vs, height, S: tl.constexpr, DOT: tl.constexpr):
    """Raw keys or queries as the network's residual sees them, `[rows, vs]`."""
    if S.d_k == S.d_v:
        x = tile(raw, rows, vs, height, S.d_v).to(tl.float32)
    else:
        K: tl.constexpr = S.block_k
        ks = tl.arange(0, K)
        x = dot(tile(raw, rows, ks, height, S.d_k), tl.trans(tile(residual, vs, ks, S.d_v, S.d_k)), DOT)  # fmt: skip
    return x


@triton.jit
def error_at_branch(o, k, v, gain, residual, rows, vs, height, S: tl.constexpr, DOT: tl.constexpr):
    """u1, the gradient at the branch of x + gain * LN(o); the error; LN(o); 1 / its scale."""
    value = tile(v, rows, vs, height, S.d_v).to(tl.float32)
    unit, scale = normalise(o, vs, S.d_v)
    weight = tl.load(gain + vs, mask=vs < S.d_v, other=0.0)[None, :]
    if S.objective == 1:
        e = -value
    else:
        branch = weight * unit if S.norm else o
        e = as_residual(k, residual, rows, vs, height, S, DOT) + branch - value
    u1 = through_norm(weight * e, unit, scale, vs, S.d_v) if S.norm else e
    return tl.where((rows < height)[:, None], u1, 0.0), e, unit, scale


@triton.jit
def linear_factors(
    k, v, anchor, u1, rows, height, left, right, scale, S: tl.constexpr, DOT: tl.constexpr
):
    """u of a linear memory, `W phi(k) - v`, or `-v` on the dot product."""
    V: tl.constexpr = S.block_v
    STEP: tl.constexpr = S.block_d
    D: tl.constexpr = S.features
    vs = tl.arange(0, V)
    e = -tile(v, rows, vs, height, S.d_v).to(tl.float32)
    if S.objective == 0:
        for d in range(0, D, STEP):
            ds = d + tl.arange(0, STEP)
            f = features(k, rows, ds, height, left, right, scale, S.d_k, S.features)
            e += dot(f, tl.trans(tile(anchor, vs, ds, S.d_v, S.pitch)), DOT)
    put(u1, tl.where((rows < height)[:, None], e, 0.0), rows, vs, height, S.d_v)


@triton.jit
def deep_factors(
    k, v, anchor, gain, residual, u1, h, u2, u3, rows, height, left, right, scale,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """u1, h, u2 (and u3) of the pairs `rows`, written out."""
    V: tl.constexpr = S.block_v
    F: tl.constexpr = S.block_f
    HIDDEN: tl.constexpr = S.hidden
    vs = tl.arange(0, V)
    w2 = anchor + S.d_v * S.hidden
    w3 = w2 + S.hidden * S.pitch
    o = tl.zeros((rows.shape[0], V), tl.float32)
    for start in range(0, HIDDEN, F):
        hs = start + tl.arange(0, F)
        x = gelu(hidden_inputs(k, w2, rows, hs, height, left, right, scale, S, DOT))
        if S.network == 2:
            x *= hidden_inputs(k, w3, rows, hs, height, left, right, scale, S, DOT)
        put(h, x, rows, hs, height, S.hidden)
        o += dot(x, tl.trans(tile(anchor, vs, hs, S.d_v, S.hidden)), DOT)
    error, _, _, _ = error_at_branch(o, k, v, gain, residual, rows, vs, height, S, DOT)
    put(u1, error, rows, vs, height, S.d_v)
    for start in range(0, HIDDEN, F):
        hs = start + tl.arange(0, F)
        back = dot(error, tile(anchor, vs, hs, S.d_v, S.hidden), DOT)
        z = hidden_inputs(k, w2, rows, hs, height, left, right, scale, S, DOT)
        if S.network == 2:
            put(u3, back * gelu(z), rows, hs, height, S.hidden)
            back *= hidden_inputs(k, w3, rows, hs, height, left, right, scale, S, DOT)
        put(u2, back * gelu_slope(z), rows, hs, height, S.hidden)


@triton.jit
def factors(
    k, v, anchor, gain, residual, u1, h, u2, u3, rows, height, left, right, scale,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Pairs `rows` below `height`: the factors of their gradients, written out."""
    if S.network == 0:
        linear_factors(k, v, anchor, u1, rows, height, left, right, scale, S, DOT)
    else:
        deep_factors(
            k, v, anchor, gain, residual, u1, h, u2, u3, rows, height, left, right, scale, S, DOT
        )  # fmt: skip


@triton.jit
def all_factors(
    k, v, anchor, gain, residual, u1, h, u2, u3, left, right, scale,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The pairs of one piece: those before it that its windows reach, then its own."""
    TAIL: tl.constexpr = S.block_tail
    LENGTH: tl.constexpr = S.block_length
    if S.tail > 0:
        factors(
            k, v, anchor, gain, residual, u1, h, u2, u3, tl.arange(0, TAIL), S.tail,
            left, right, scale, S, DOT,
        )  # fmt: skip
    factors(
        k, v, anchor, gain, residual, u1, h, u2, u3, S.tail + tl.arange(0, LENGTH), S.pairs,
        left, right, scale, S, DOT,
    )  # fmt: skip
