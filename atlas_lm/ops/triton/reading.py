"""Read a piece: every token at its own memory, without forming it.

    z_t = kept_t W f_t + sum_s steps_ts M_s f_t + sum_i share_ti u_i <x_i, f_t>

W: the weights entering the piece; M: the momentum, or muon's steps; u_i x_i^T: the pairs' gradients
(not under muon). One program a piece, row and head.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.branch import gelu, normalise
from atlas_lm.ops.triton.pairs import as_residual
from atlas_lm.ops.triton.tiles import dot, features, put, tile


@triton.jit
def alike(q, k, rows, pairs, height, coefficients, S: tl.constexpr, DOT: tl.constexpr):
    """<q, k>, and <phi(q), phi(k)> by its short form `sum_i a_i <q, k>^i`."""
    K: tl.constexpr = S.block_k
    ks = tl.arange(0, K)
    s = dot(tile(q, rows, ks, S.length, S.d_k), tl.trans(tile(k, pairs, ks, height, S.d_k)), DOT)
    if S.features == S.d_k:
        kernel = s
    else:
        a0, a1, a2 = tl.load(coefficients), tl.load(coefficients + 1), tl.load(coefficients + 2)
        kernel = a0 + s * (a1 + s * a2)
    return s, kernel


@triton.jit
def share_tile(share, rows, pairs, height, S: tl.constexpr):
    """How much of each pair's gradient is in each token's memory."""
    inside = (rows[:, None] < S.length) & (pairs[None, :] < height)
    return tl.load(share + rows[:, None] * S.pairs + pairs[None, :], mask=inside, other=0.0)


@triton.jit
def entered_inputs(
    q, state, terms, kept, steps, rows, outs, skip, left, right, scale,
    OUT: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """kept W phi(q) + sum_s steps_s M_s phi(q) of matrices `[OUT pitch]`: `[rows, outs]`."""
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    TERMS: tl.constexpr = S.terms
    z = tl.zeros((rows.shape[0], outs.shape[0]), tl.float32)
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        f = features(q, rows, ds, S.length, left, right, scale, S.d_k, S.features)
        z += dot(kept[:, None] * f, tl.trans(tile(state + skip, outs, ds, OUT, S.pitch)), DOT)
        for s in range(TERMS):
            step = tl.load(steps + rows * S.terms + s, mask=rows < S.length, other=0.0)
            m = tile(terms + s * S.size + skip, outs, ds, OUT, S.pitch)
            z += dot(step[:, None] * f, tl.trans(m), DOT)
    return z


@triton.jit
def first_layer(
    q, state, terms, kept, steps, u, own, before, rows, outs, skip, left, right, scale,
    OUT: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The first layer at every token's memory. own, before: share * <phi(q), phi(k)>."""
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    z = entered_inputs(
        q, state, terms, kept, steps, rows, outs, skip, left, right, scale, OUT, S, DOT
    )
    if S.written:
        z += dot(own, tile(u, S.tail + tl.arange(0, LENGTH), outs, S.pairs, OUT), DOT)
        if S.tail > 0:
            z += dot(before, tile(u, tl.arange(0, TAIL), outs, S.tail, OUT), DOT)
    return z


@triton.jit
def second_layer(x, state, terms, kept, steps, rows, vs, hs, S: tl.constexpr, DOT: tl.constexpr):
    """kept W1 x + sum_s steps_s M1_s x over the hidden block `hs`: `[rows, vs]`."""
    TERMS: tl.constexpr = S.terms
    o = dot(kept[:, None] * x, tl.trans(tile(state, vs, hs, S.d_v, S.hidden)), DOT)
    for s in range(TERMS):
        step = tl.load(steps + rows * S.terms + s, mask=rows < S.length, other=0.0)
        m = tile(terms + s * S.size, vs, hs, S.d_v, S.hidden)
        o += dot(step[:, None] * x, tl.trans(m), DOT)
    return o


@triton.jit
def deep_branch(
    q, state, terms, kept, steps, u1, h, u2, u3, share_own, share_before, own, before, rows, vs,
    left, right, scale, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What the second layer gives, `[rows, vs]`."""
    V: tl.constexpr = S.block_v
    F: tl.constexpr = S.block_f
    HIDDEN: tl.constexpr = S.hidden
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    mine = S.tail + tl.arange(0, LENGTH)
    past = tl.arange(0, TAIL)
    o = tl.zeros((LENGTH, V), tl.float32)
    seen_own = tl.zeros((LENGTH, LENGTH), tl.float32)
    seen_before = tl.zeros((LENGTH, TAIL), tl.float32)
    for start in range(0, HIDDEN, F):
        hs = start + tl.arange(0, F)
        z = first_layer(
            q, state, terms, kept, steps, u2, own, before, rows, hs, W2, left, right, scale,
            S.hidden, S, DOT,
        )  # fmt: skip
        x = gelu(z)
        if S.network == 2:
            x *= first_layer(
                q, state, terms, kept, steps, u3, own, before, rows, hs, W3, left, right, scale,
                S.hidden, S, DOT,
            )  # fmt: skip
        o += second_layer(x, state, terms, kept, steps, rows, vs, hs, S, DOT)
        if S.written:
            seen_own += dot(x, tl.trans(tile(h, mine, hs, S.pairs, S.hidden)), DOT)
            if S.tail > 0:
                seen_before += dot(x, tl.trans(tile(h, past, hs, S.tail, S.hidden)), DOT)
    if S.written:
        o += dot(share_own * seen_own, tile(u1, mine, vs, S.pairs, S.d_v), DOT)
        if S.tail > 0:
            o += dot(share_before * seen_before, tile(u1, past, vs, S.tail, S.d_v), DOT)
    return o


@triton.jit(do_not_specialize=["rows_and_heads", "heads"])
def read_kernel(
    q, k, share, kept, steps, state, terms, u1, h, u2, u3, gain, residual, coefficients,
    left, right, scale, y, branch, rows_and_heads, heads, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """y `[length, v]`, and under a norm what goes into it."""
    z = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * rows_and_heads + z
    head = z % heads
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    V: tl.constexpr = S.block_v
    rows, vs = tl.arange(0, LENGTH), tl.arange(0, V)
    q += at * S.length * S.d_k
    k += at * S.pairs * S.d_k
    scale += head * S.features
    state += at * S.size
    terms += at * S.terms * S.size
    steps += at * S.length * S.terms
    u1 += at * S.pairs * S.d_v
    share += at * S.length * S.pairs
    hidden = at * S.pairs * S.hidden
    keep = tl.load(kept + at * S.length + rows, mask=rows < S.length, other=0.0)
    share_own = tl.zeros((LENGTH, LENGTH), tl.float32)
    share_before = tl.zeros((LENGTH, TAIL), tl.float32)
    own, before = share_own, share_before
    if S.written:
        mine, past = S.tail + rows, tl.arange(0, TAIL)
        weigh = coefficients + head * 3
        share_own = share_tile(share, rows, mine, S.pairs, S)
        own = share_own * alike(q, k, rows, mine, S.pairs, weigh, S, DOT)[1]
        if S.tail > 0:
            share_before = share_tile(share, rows, past, S.tail, S)
            before = share_before * alike(q, k, rows, past, S.tail, weigh, S, DOT)[1]
    if S.network == 0:
        out = first_layer(
            q, state, terms, keep, steps, u1, own, before, rows, vs, 0, left, right, scale,
            S.d_v, S, DOT,
        )  # fmt: skip
    else:
        out = deep_branch(
            q, state, terms, keep, steps, u1, h + hidden, u2 + hidden, u3 + hidden,
            share_own, share_before, own, before, rows, vs, left, right, scale, S, DOT,
        )  # fmt: skip
        if S.norm:
            put(branch + at * S.length * S.d_v, out, rows, vs, S.length, S.d_v)
            unit, _ = normalise(out, vs, S.d_v)
            out = tl.load(gain + head * S.d_v + vs, mask=vs < S.d_v, other=0.0)[None, :] * unit
        residual += head * S.d_v * S.d_k
        out += as_residual(q, residual, rows, vs, S.length, S, DOT)
    put(y + at * S.length * S.d_v, out, rows, vs, S.length, S.d_v)
