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
def step_of(steps, s, rows, S: tl.constexpr):
    """How much of term `s` is in each token's memory."""
    return tl.load(steps + rows * S.terms + s, mask=rows < S.length, other=0.0)


@triton.jit
def first_term(terms, w, outs, ins, OUT: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr):
    """A tile of the first term (w if there is none), loaded with the weights': one wait."""
    m = w
    if S.terms > 0:
        m = tile(terms, outs, ins, OUT, WIDTH)
    return m


@triton.jit
def mixed(
    z, x, w, m, terms, kept, steps, rows, outs, ins,
    OUT: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """z + kept W x + sum_s steps_s M_s x, `[rows, outs]`, from tiles of W and the first M."""
    TERMS: tl.constexpr = S.terms
    x = x.to(DOT)
    if TERMS == 0:
        z += kept[:, None] * dot(x, tl.trans(w), DOT)
    else:
        step = step_of(steps, 0, rows, S)
        z += kept[:, None] * dot(x, tl.trans(w), DOT)
        z += step[:, None] * dot(x, tl.trans(m), DOT)
        for s in range(1, TERMS):
            step = step_of(steps, s, rows, S)
            other = tile(terms + s * S.size, outs, ins, OUT, WIDTH)
            z += step[:, None] * dot(x, tl.trans(other), DOT)
    return z


@triton.jit
def of_pairs(u, columns, WIDTH: tl.constexpr, S: tl.constexpr):
    """A factor `[pairs WIDTH]` of the piece's own pairs and of those before; zeros under muon."""
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    mine = tl.zeros((LENGTH, columns.shape[0]), u.dtype.element_ty)
    past = tl.zeros((TAIL, columns.shape[0]), u.dtype.element_ty)
    if S.written:
        mine = tile(u, S.tail + tl.arange(0, LENGTH), columns, S.pairs, WIDTH)
        if S.tail > 0:
            past = tile(u, tl.arange(0, TAIL), columns, S.tail, WIDTH)
    return mine, past


@triton.jit
def second_tiles(state, terms, h, vs, hs, S: tl.constexpr):
    """What the second layer needs of a block of the hidden one.

    On identity features it is loaded before the first layer: one wait for everything. Others make
    the first layer wait several times anyway, and it would only take registers.
    """
    w = tile(state, vs, hs, S.d_v, S.hidden)
    m = first_term(terms, w, vs, hs, S.d_v, S.hidden, S)
    h_own, h_before = of_pairs(h, hs, S.hidden, S)
    return w, m, h_own, h_before


@triton.jit
def first_layer(
    q, state, terms, kept, steps, u, own, before, rows, outs, left, right, scale,
    OUT: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The first layer at every token's memory. own, before: share * <phi(q), phi(k)>."""
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    LENGTH: tl.constexpr = S.block_length
    z = tl.zeros((LENGTH, outs.shape[0]), tl.float32)
    if S.features == S.d_k:
        mine, past = of_pairs(u, outs, OUT, S)
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        w = tile(state, outs, ds, OUT, S.pitch)
        m = first_term(terms, w, outs, ds, OUT, S.pitch, S)
        f = features(q, rows, ds, S.length, left, right, scale, S.d_k, S.features)
        z = mixed(z, f, w, m, terms, kept, steps, rows, outs, ds, OUT, S.pitch, S, DOT)
    if S.features != S.d_k:
        mine, past = of_pairs(u, outs, OUT, S)
    if S.written:
        z += dot(own, mine, DOT)
        if S.tail > 0:
            z += dot(before, past, DOT)
    return z


@triton.jit
def deep_branch(
    q, state, terms, kept, steps, share, u1, h, u2, u3, own, before, rows, vs,
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
    mine, past = S.tail + rows, tl.arange(0, TAIL)
    o = tl.zeros((LENGTH, V), tl.float32)
    seen_own = tl.zeros((LENGTH, LENGTH), tl.float32)
    seen_before = tl.zeros((LENGTH, TAIL), tl.float32)
    for start in range(0, HIDDEN, F):
        hs = start + tl.arange(0, F)
        if S.features == S.d_k:
            w, m, h_own, h_before = second_tiles(state, terms, h, vs, hs, S)
        x = gelu(first_layer(
            q, state + W2, terms + W2, kept, steps, u2, own, before, rows, hs, left, right, scale,
            S.hidden, S, DOT,
        ))  # fmt: skip
        if S.network == 2:
            x *= first_layer(
                q, state + W3, terms + W3, kept, steps, u3, own, before, rows, hs,
                left, right, scale, S.hidden, S, DOT,
            )  # fmt: skip
        if S.features != S.d_k:
            w, m, h_own, h_before = second_tiles(state, terms, h, vs, hs, S)
        x = x.to(DOT)
        o = mixed(o, x, w, m, terms, kept, steps, rows, vs, hs, S.d_v, S.hidden, S, DOT)
        if S.written:
            seen_own += dot(x, tl.trans(h_own), DOT)
            if S.tail > 0:
                seen_before += dot(x, tl.trans(h_before), DOT)
    if S.written:
        seen_own *= share_tile(share, rows, mine, S.pairs, S)
        o += dot(seen_own, tile(u1, mine, vs, S.pairs, S.d_v), DOT)
        if S.tail > 0:
            seen_before *= share_tile(share, rows, past, S.tail, S)
            o += dot(seen_before, tile(u1, past, vs, S.tail, S.d_v), DOT)
    return o


@triton.jit
def pairs_seen(q, k, share, coefficients, rows, S: tl.constexpr, DOT: tl.constexpr):
    """share * <phi(q), phi(k)> of the piece's own pairs and of those before, rounded."""
    TAIL: tl.constexpr = S.block_tail
    mine, past = S.tail + rows, tl.arange(0, TAIL)
    own = tl.zeros((rows.shape[0], rows.shape[0]), DOT)
    before = tl.zeros((rows.shape[0], TAIL), DOT)
    if S.written:
        weight = share_tile(share, rows, mine, S.pairs, S)
        own = (weight * alike(q, k, rows, mine, S.pairs, coefficients, S, DOT)[1]).to(DOT)
        if S.tail > 0:
            weight = share_tile(share, rows, past, S.tail, S)
            before = (weight * alike(q, k, rows, past, S.tail, coefficients, S, DOT)[1]).to(DOT)
    return own, before


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
    own, before = pairs_seen(q, k, share, coefficients + head * 3, rows, S, DOT)
    if S.network == 0:
        out = first_layer(
            q, state, terms, keep, steps, u1, own, before, rows, vs, left, right, scale,
            S.d_v, S, DOT,
        )  # fmt: skip
    else:
        out = deep_branch(
            q, state, terms, keep, steps, share, u1, h + hidden, u2 + hidden, u3 + hidden,
            own, before, rows, vs, left, right, scale, S, DOT,
        )  # fmt: skip
        if S.norm:
            put(branch + at * S.length * S.d_v, out, rows, vs, S.length, S.d_v)
            unit, _ = normalise(out, vs, S.d_v)
            out = tl.load(gain + head * S.d_v + vs, mask=vs < S.d_v, other=0.0)[None, :] * unit
        residual += head * S.d_v * S.d_k
        out += as_residual(q, residual, rows, vs, S.length, S, DOT)
    put(y + at * S.length * S.d_v, out, rows, vs, S.length, S.d_v)
