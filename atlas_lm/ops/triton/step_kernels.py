"""One token into a memory and out of it again, in one launch: `ops/step.py` says what is computed.

A program has one row and head, or of a linear memory some of its values. It goes over the matrices
twice: the anchor for the gradients of the pairs, then every tile of weights and momentum is read,
moved and written, and what it says of the query is added up on the way. In float32 throughout.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.branch import gelu, gelu_slope, normalise
from atlas_lm.ops.triton.pairs import as_residual, error_at_branch, of_features
from atlas_lm.ops.triton.tiles import dot, features, put, tile, times
from atlas_lm.ops.triton.writing import outer_sum

GD, MOMENTUM, STILL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""What moves the weights; still: muon's momentum alone moves, at tokens between its steps."""
STAYS, MOVES, SOME_MOVE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""The anchors: none, all, or those of rows that end a chunk become the new weights."""


@triton.jit
def back_times(u, w):
    """u w of `[rows k]` and `[k outs]`; of one row without a product, which takes 16."""
    return tl.sum(tl.trans(u) * w, 0)[None, :] if u.shape[0] == 1 else dot(u, w, tl.float32)


@triton.jit
def hidden_layer(k, a2, a3, decay, rows, hs, height, left, right, scale, S: tl.constexpr):
    """h at the keys, and what takes the gradient at h to that of W2 phi and of W3 phi."""
    z = decay * of_features(k, a2, rows, hs, height, left, right, scale, S.hidden, S, tl.float32)
    gate = gelu(z)
    x, to_z = gate, gelu_slope(z)
    if S.network == 2:
        value = decay * of_features(
            k, a3, rows, hs, height, left, right, scale, S.hidden, S, tl.float32
        )
        x, to_z = gate * value, to_z * value
    return x, to_z, gate


@triton.jit
def moved(
    w, s, a, new_w, new_s, new_a, pushed, alpha, theta, ends, outs, ins,
    OUT: tl.constexpr, WIDTH: tl.constexpr, BY: tl.constexpr, ANCHOR: tl.constexpr,
):  # fmt: skip
    """A tile of a matrix `[OUT WIDTH]` after the token; written out too, as are those beside it."""
    new = alpha * tile(w, outs, ins, OUT, WIDTH)
    if BY != GD:
        pushed += theta * tile(s, outs, ins, OUT, WIDTH)
        put(new_s, pushed, outs, ins, OUT, WIDTH)
    if BY != STILL:
        new += pushed
    put(new_w, new, outs, ins, OUT, WIDTH)
    if ANCHOR == MOVES:
        put(new_a, new, outs, ins, OUT, WIDTH)
    elif ANCHOR == SOME_MOVE:
        put(new_a, tl.where(ends, new, tile(a, outs, ins, OUT, WIDTH)), outs, ins, OUT, WIDTH)
    return new


@triton.jit
def move_first_layer(
    w, s, a, new_w, new_s, new_a, u, k, q, push, alpha, theta, ends, rows, outs, left, right, scale,
    C: tl.constexpr, OUT: tl.constexpr, BY: tl.constexpr, ANCHOR: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Rows `outs` of a matrix on phi, moved; and what they say of the query, `[1, outs]`."""
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    z, one = tl.zeros((1, outs.shape[0]), tl.float32), tl.arange(0, 1)
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        f = features(k, rows, ds, C, left, right, scale, S.d_k, S.features)
        new = moved(
            w, s, a, new_w, new_s, new_a, outer_sum(u, f, push, tl.float32), alpha, theta, ends,
            outs, ds, OUT, S.features, BY, ANCHOR,
        )  # fmt: skip
        z += times(features(q, one, ds, 1, left, right, scale, S.d_k, S.features), new, tl.float32)
    return z


@triton.jit
def error_at_anchor(
    k, v, a1, a2, a3, gain, residual, decay, rows, vs, left, right, scale,
    C: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """u1 of the pairs."""
    H: tl.constexpr = S.hidden
    F: tl.constexpr = S.block_f
    o = tl.zeros((rows.shape[0], vs.shape[0]), tl.float32)
    for start in range(0, H, F):
        hs = start + tl.arange(0, F)
        x, _, _ = hidden_layer(k, a2, a3, decay, rows, hs, C, left, right, scale, S)
        o += decay * times(x, tile(a1, vs, hs, S.d_v, S.hidden), tl.float32)
    u, _, _, _ = error_at_branch(o, k, v, gain, residual, rows, vs, C, S, tl.float32)
    return u


@triton.jit
def step_deep(
    q, k, v, w1, w2, w3, a1, a2, a3, s1, s2, s3, to_w1, to_w2, to_w3, to_a1, to_a2, to_a3,
    to_s1, to_s2, to_s3, gain, residual, y, push, alpha, theta, decay, ends, rows,
    left, right, scale,
    C: tl.constexpr, BY: tl.constexpr, ANCHOR: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    V: tl.constexpr = S.block_v
    H: tl.constexpr = S.hidden
    F: tl.constexpr = S.block_f
    vs, one = tl.arange(0, V), tl.arange(0, 1)
    u = error_at_anchor(k, v, a1, a2, a3, gain, residual, decay, rows, vs, left, right, scale, C, S)
    out = tl.zeros((1, V), tl.float32)
    for start in range(0, H, F):
        hs = start + tl.arange(0, F)
        x, to_z, gate = hidden_layer(k, a2, a3, decay, rows, hs, C, left, right, scale, S)
        back = decay * back_times(u, tile(a1, vs, hs, S.d_v, S.hidden))
        # the anchor may lie where it is written
        tl.debug_barrier()
        new = moved(
            w1, s1, a1, to_w1, to_s1, to_a1, outer_sum(u, x, push, tl.float32), alpha, theta, ends,
            vs, hs, S.d_v, S.hidden, BY, ANCHOR,
        )  # fmt: skip
        h = gelu(move_first_layer(
            w2, s2, a2, to_w2, to_s2, to_a2, back * to_z, k, q, push, alpha, theta, ends, rows, hs,
            left, right, scale, C, S.hidden, BY, ANCHOR, S,
        ))  # fmt: skip
        if S.network == 2:
            h *= move_first_layer(
                w3, s3, a3, to_w3, to_s3, to_a3, back * gate, k, q, push, alpha, theta, ends, rows,
                hs, left, right, scale, C, S.hidden, BY, ANCHOR, S,
            )  # fmt: skip
        out += times(h, new, tl.float32)
    if S.norm:
        weight = tl.load(gain + vs, mask=vs < S.d_v, other=0.0)[None, :]
        out = weight * normalise(out, vs, S.d_v)[0]
    put(y, out + as_residual(q, residual, one, vs, 1, S, tl.float32), one, vs, 1, S.d_v)


@triton.jit
def step_linear(
    q, k, v, w, a, s, to_w, to_a, to_s, y, push, alpha, theta, decay, ends, rows, vs,
    left, right, scale,
    C: tl.constexpr, BY: tl.constexpr, ANCHOR: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    e = -tile(v, rows, vs, C, S.d_v)
    if S.objective == 0:
        e += decay * of_features(k, a, rows, vs, C, left, right, scale, S.d_v, S, tl.float32)
    tl.debug_barrier()
    out = move_first_layer(
        w, s, a, to_w, to_s, to_a, e, k, q, push, alpha, theta, ends, rows, vs,
        left, right, scale, C, S.d_v, BY, ANCHOR, S,
    )  # fmt: skip
    put(y, out, tl.arange(0, 1), vs, 1, S.d_v)


@triton.jit(do_not_specialize=["heads", "chunk"])
def step_kernel(
    q, k, v, alpha, eta, theta, importance, position,
    w1, w2, w3, a1, a2, a3, s1, s2, s3, to_w1, to_w2, to_w3, to_a1, to_a2, to_a3,
    to_s1, to_s2, to_s3, gain, residual, left, right, scale, y, heads, chunk,
    C: tl.constexpr, ROWS: tl.constexpr, BY: tl.constexpr, RATED: tl.constexpr,
    ANCHOR: tl.constexpr, DECAY_FIRST: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """k, v `[z c .]`, the newest last; matrices `[z out in]`; a linear memory's is the first.

    `to_...`: where what comes after goes, which may be where it was. RATED: pushes are by eta. ROWS
    hold the C pairs.
    """
    z = tl.program_id(0).to(tl.int64)
    head, count = z % heads, tl.load(position + z // heads)
    rows = tl.arange(0, ROWS)
    past = C - 1 - rows
    push = -tl.load(importance + z * C + past, mask=(past >= 0) & (past <= count), other=0.0)
    if RATED:
        push *= tl.load(eta + z)
    keep, carry = tl.load(alpha + z), 0.0
    if BY != GD:
        carry = tl.load(theta + z)
    decay = keep if DECAY_FIRST else 1.0
    ends = (count + 1) % chunk == 0
    q, k, v, y = q + z * S.d_k, k + z * C * S.d_k, v + z * C * S.d_v, y + z * S.d_v
    scale += head * S.features
    if S.network == 0:
        at = z * S.d_v * S.features
        B: tl.constexpr = S.block_share
        step_linear(
            q, k, v, w1 + at, a1 + at, s1 + at, to_w1 + at, to_a1 + at, to_s1 + at, y, push, keep,
            carry, decay, ends, rows, tl.program_id(1) * B + tl.arange(0, B), left, right, scale,
            C, BY, ANCHOR, S,
        )  # fmt: skip
    else:
        second, first = z * S.d_v * S.hidden, z * S.hidden * S.features
        step_deep(
            q, k, v, w1 + second, w2 + first, w3 + first, a1 + second, a2 + first, a3 + first,
            s1 + second, s2 + first, s3 + first, to_w1 + second, to_w2 + first, to_w3 + first,
            to_a1 + second, to_a2 + first, to_a3 + first, to_s1 + second, to_s2 + first,
            to_s3 + first, gain + head * S.d_v, residual + head * S.d_v * S.d_k, y, push, keep,
            carry, decay, ends, rows, left, right, scale, C, BY, ANCHOR, S,
        )  # fmt: skip
