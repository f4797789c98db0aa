"""Gradients of reading a piece (`reading`): of queries, weights, factors, keys and mixing."""

import triton
import triton.language as tl

from atlas_lm.ops.triton.branch import gelu, gelu_slope, normalise, through_norm
from atlas_lm.ops.triton.reading import alike, first_layer, share_tile
from atlas_lm.ops.triton.tiles import by_degree, dot, features, features_backward, put, tile


@triton.jit
def only(value, column, COUNT: tl.constexpr):
    """A vector as one column of a matrix of zeros."""
    return tl.where((tl.arange(0, COUNT) == column)[None, :], value[:, None], 0.0)


@triton.jit
def through_matrix(
    dz, x, state, terms, d_state, d_terms, kept, steps, d_kept, d_steps, rows, outs, ins,
    OUT: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through kept W x + sum_s steps_s M_s x: writes dW, dM; returns dx, d_kept, d_steps."""
    TERMS: tl.constexpr = S.terms
    back = dot(dz, tile(state, outs, ins, OUT, WIDTH), DOT)
    d_kept += tl.sum(x * back, 1)
    dx = kept[:, None] * back
    put(d_state, dot(tl.trans(kept[:, None] * dz), x, DOT), outs, ins, OUT, WIDTH)
    for s in range(TERMS):
        step = tl.load(steps + rows * S.terms + s, mask=rows < S.length, other=0.0)
        back = dot(dz, tile(terms + s * S.size, outs, ins, OUT, WIDTH), DOT)
        d_steps += only(tl.sum(x * back, 1), s, S.block_terms)
        dx += step[:, None] * back
        grad = dot(tl.trans(step[:, None] * dz), x, DOT)
        put(d_terms + s * S.size, grad, outs, ins, OUT, WIDTH)
    return dx, d_kept, d_steps


@triton.jit
def through_first_layer(
    dz, q, state, terms, d_state, d_terms, kept, steps, u, d_u, own, before,
    d_own, d_before, d_kept, d_steps, dq, d_degrees, rows, outs, left, right, scale,
    OUT: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through `first_layer`, from the gradient of a tile of it."""
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    if S.written:
        mine, past = S.tail + tl.arange(0, LENGTH), tl.arange(0, TAIL)
        d_own += dot(dz, tl.trans(tile(u, mine, outs, S.pairs, OUT)), DOT)
        put(d_u, dot(tl.trans(own), dz, DOT), mine, outs, S.pairs, OUT)
        if S.tail > 0:
            d_before += dot(dz, tl.trans(tile(u, past, outs, S.tail, OUT)), DOT)
            put(d_u, dot(tl.trans(before), dz, DOT), past, outs, S.tail, OUT)
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        f = features(q, rows, ds, S.length, left, right, scale, S.d_k, S.features)
        df, d_kept, d_steps = through_matrix(
            dz, f, state, terms, d_state, d_terms, kept, steps, d_kept, d_steps, rows, outs, ds,
            OUT, S.pitch, S, DOT,
        )  # fmt: skip
        dq += features_backward(
            df, q, rows, ds, S.length, left, right, scale, S.d_k, S.features, S.block_k, DOT
        )
        if S.features != S.d_k:
            d_degrees += by_degree(df * f, ds, S.d_k)
    return d_own, d_before, d_kept, d_steps, dq, d_degrees


@triton.jit
def through_seen(x, dx, seen, back, h, d_h, pairs, hs, height, S: tl.constexpr, DOT: tl.constexpr):
    """Back through <h_t, h_i> for some pairs and a block of the hidden layer; and its values."""
    of_pairs = tile(h, pairs, hs, height, S.hidden)
    put(d_h, dot(tl.trans(back), x, DOT), pairs, hs, height, S.hidden)
    return dx + dot(back, of_pairs, DOT), seen + dot(x, tl.trans(of_pairs), DOT)


@triton.jit
def through_deep(
    do, q, state, terms, d_state, d_terms, kept, steps, u1, h, u2, u3, d_h, d_u2, d_u3,
    share, own, before, d_kept, d_steps, dq, rows, vs, left, right, scale,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through both layers; also <h_t, h_i>, of which the caller needs the gradient."""
    F: tl.constexpr = S.block_f
    HIDDEN: tl.constexpr = S.hidden
    TAIL: tl.constexpr = S.block_tail
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    mine, past = S.tail + rows, tl.arange(0, TAIL)
    seen_own = tl.zeros((rows.shape[0], rows.shape[0]), tl.float32)
    seen_before = tl.zeros((rows.shape[0], TAIL), tl.float32)
    back_own, back_before, d_own, d_before = seen_own, seen_before, seen_own, seen_before
    d_degrees = tl.zeros((4,), tl.float32)
    if S.written:
        back = dot(do, tl.trans(tile(u1, mine, vs, S.pairs, S.d_v)), DOT)
        back_own = share_tile(share, rows, mine, S.pairs, S) * back
        if S.tail > 0:
            back = dot(do, tl.trans(tile(u1, past, vs, S.tail, S.d_v)), DOT)
            back_before = share_tile(share, rows, past, S.tail, S) * back
    back_own, back_before = back_own.to(DOT), back_before.to(DOT)
    for start in range(0, HIDDEN, F):
        hs = start + tl.arange(0, F)
        z = first_layer(
            q, state, terms, kept, steps, u2, own, before, rows, hs, W2, left, right, scale,
            S.hidden, S, DOT,
        )  # fmt: skip
        x, gate, through = gelu(z), gelu(z), gelu_slope(z)
        if S.network == 2:
            value = first_layer(
                q, state, terms, kept, steps, u3, own, before, rows, hs, W3, left, right, scale,
                S.hidden, S, DOT,
            )  # fmt: skip
            x, through = x * value, through * value
        dx, d_kept, d_steps = through_matrix(
            do, x, state, terms, d_state, d_terms, kept, steps, d_kept, d_steps, rows, vs, hs,
            S.d_v, S.hidden, S, DOT,
        )  # fmt: skip
        if S.written:
            dx, seen_own = through_seen(
                x, dx, seen_own, back_own, h, d_h, mine, hs, S.pairs, S, DOT
            )
            if S.tail > 0:
                dx, seen_before = through_seen(
                    x, dx, seen_before, back_before, h, d_h, past, hs, S.tail, S, DOT
                )
        d_own, d_before, d_kept, d_steps, dq, d_degrees = through_first_layer(
            dx * through, q, state + W2, terms + W2, d_state + W2, d_terms + W2, kept, steps,
            u2, d_u2, own, before, d_own, d_before, d_kept, d_steps, dq, d_degrees, rows, hs,
            left, right, scale, S.hidden, S, DOT,
        )  # fmt: skip
        if S.network == 2:
            d_own, d_before, d_kept, d_steps, dq, d_degrees = through_first_layer(
                dx * gate, q, state + W3, terms + W3, d_state + W3, d_terms + W3, kept, steps,
                u3, d_u3, own, before, d_own, d_before, d_kept, d_steps, dq, d_degrees, rows, hs,
                left, right, scale, S.hidden, S, DOT,
            )  # fmt: skip
    return seen_own, seen_before, d_own, d_before, d_kept, d_steps, dq, d_degrees


@triton.jit
def powers(grad, s):
    """Sums of grad, grad * s and grad * s^2, `[4]`."""
    at = tl.arange(0, 4)
    zero, one, two = tl.sum(grad), tl.sum(grad * s), tl.sum(grad * s * s)
    return tl.where(at == 0, zero, tl.where(at == 1, one, tl.where(at == 2, two, 0.0)))


@triton.jit
def through_pairs(
    do, d_kernel, seen, shares, d_share, q, k, dk, u1, d_u1, dq, rows, pairs, height, vs,
    coefficients, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through share, <q, k> and, in deep memories, the second layer's u1, for some pairs."""
    K: tl.constexpr = S.block_k
    ks = tl.arange(0, K)
    s, kernel = alike(q, k, rows, pairs, height, coefficients, S, DOT)
    share = share_tile(shares, rows, pairs, height, S)
    grad = d_kernel * kernel
    if S.network != 0:
        grad += seen * dot(do, tl.trans(tile(u1, pairs, vs, height, S.d_v)), DOT)
        put(d_u1, dot(tl.trans(share * seen), do, DOT), pairs, vs, height, S.d_v)
    inside = (rows[:, None] < S.length) & (pairs[None, :] < height)
    tl.store(d_share + rows[:, None] * S.pairs + pairs[None, :], grad, mask=inside)
    grad = d_kernel * share
    d_coefficients = tl.zeros((4,), tl.float32)
    if S.features != S.d_k:
        d_coefficients = powers(grad, s)
        grad *= tl.load(coefficients + 1) + 2 * tl.load(coefficients + 2) * s
    dq += dot(grad, tile(k, pairs, ks, height, S.d_k), DOT)
    put(dk, dot(tl.trans(grad), tile(q, rows, ks, S.length, S.d_k), DOT), pairs, ks, height, S.d_k)
    return dq, d_coefficients


@triton.jit
def through_output(
    do, q, branch, gain, residual, d_gain, rows, vs, ks, S: tl.constexpr, DOT: tl.constexpr
):
    """From y = x + gain * LN(branch) back to the branch, and to the query as the residual."""
    dq = do if S.d_k == S.d_v else dot(do, tile(residual, vs, ks, S.d_v, S.d_k), DOT)
    if S.norm:
        unit, size = normalise(tile(branch, rows, vs, S.length, S.d_v), vs, S.d_v)
        tl.store(d_gain + vs, tl.sum(do * unit, 0), mask=vs < S.d_v)
        weight = tl.load(gain + vs, mask=vs < S.d_v, other=0.0)
        do = through_norm(weight[None, :] * do, unit, size, vs, S.d_v)
    return do, dq


@triton.jit
def piece_backward(
    do, q, k, share, kept, steps, state, terms, u1, h, u2, u3, gain, residual, coefficients,
    left, right, scale, branch, dk, d_share, d_state, d_terms, d_u1, d_h, d_u2, d_u3, d_gain,
    rows, mine, past, vs, ks, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One piece; returns the gradients of q, kept, steps, the kernel's coefficients and phi's."""
    TERMS: tl.constexpr = S.block_terms
    own = tl.zeros((rows.shape[0], mine.shape[0]), tl.float32)
    before = tl.zeros((rows.shape[0], past.shape[0]), tl.float32)
    seen_own, seen_before = own, before
    dq = tl.zeros((rows.shape[0], ks.shape[0]), tl.float32)
    d_kept = tl.zeros((rows.shape[0],), tl.float32)
    d_steps = tl.zeros((rows.shape[0], TERMS), tl.float32)
    degrees = tl.zeros((4,), tl.float32)
    d_coefficients = degrees
    if S.written:
        own = share_tile(share, rows, mine, S.pairs, S)
        own *= alike(q, k, rows, mine, S.pairs, coefficients, S, DOT)[1]
        if S.tail > 0:
            before = share_tile(share, rows, past, S.tail, S)
            before *= alike(q, k, rows, past, S.tail, coefficients, S, DOT)[1]
    # operands only: half the registers
    own, before = own.to(DOT), before.to(DOT)
    if S.network == 0:
        d_own, d_before, d_kept, d_steps, dq, degrees = through_first_layer(
            do, q, state, terms, d_state, d_terms, kept, steps, u1, d_u1, own, before,
            seen_own, seen_before, d_kept, d_steps, dq, degrees, rows, vs,
            left, right, scale, S.d_v, S, DOT,
        )  # fmt: skip
    else:
        do, dq = through_output(do, q, branch, gain, residual, d_gain, rows, vs, ks, S, DOT)
        seen_own, seen_before, d_own, d_before, d_kept, d_steps, dq, degrees = through_deep(
            do, q, state, terms, d_state, d_terms, kept, steps, u1, h, u2, u3, d_h, d_u2, d_u3,
            share, own, before, d_kept, d_steps, dq, rows, vs, left, right, scale, S, DOT,
        )  # fmt: skip
    if S.written:
        dq, d_coefficients = through_pairs(
            do, d_own, seen_own, share, d_share, q, k, dk, u1, d_u1, dq, rows, mine, S.pairs,
            vs, coefficients, S, DOT,
        )  # fmt: skip
        if S.tail > 0:
            dq, more = through_pairs(
                do, d_before, seen_before, share, d_share, q, k, dk, u1, d_u1, dq, rows, past,
                S.tail, vs, coefficients, S, DOT,
            )  # fmt: skip
            d_coefficients += more
    return dq, d_kept, d_steps, d_coefficients, degrees


@triton.jit(do_not_specialize=["rows_and_heads", "heads"])
def read_backward_kernel(
    dy, q, k, share, kept, steps, state, terms, u1, h, u2, u3, gain, residual, coefficients,
    left, right, scale, branch,
    dq, dk, d_share, d_kept, d_steps, d_state, d_terms, d_u1, d_h, d_u2, d_u3, d_gain, d_degrees,
    rows_and_heads, heads, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """d_degrees `[8]`: of the kernel's coefficients, then <phi, dphi>, each by degree."""
    z = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * rows_and_heads + z
    head = z % heads
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    V: tl.constexpr = S.block_v
    K: tl.constexpr = S.block_k
    TERMS: tl.constexpr = S.block_terms
    rows, vs, ks, past = tl.arange(0, LENGTH), tl.arange(0, V), tl.arange(0, K), tl.arange(0, TAIL)
    slots, pairs, size = at * S.length, at * S.pairs, at * S.size
    keys, wide, deep = pairs * S.d_k, pairs * S.d_v, pairs * S.hidden
    keep = tl.load(kept + slots + rows, mask=rows < S.length, other=0.0)
    do = tile(dy + slots * S.d_v, rows, vs, S.length, S.d_v).to(tl.float32)
    grad_q, grad_kept, grad_steps, grad_coefficients, degrees = piece_backward(
        do, q + slots * S.d_k, k + keys, share + slots * S.pairs, keep, steps + slots * S.terms,
        state + size, terms + size * S.terms, u1 + wide, h + deep, u2 + deep, u3 + deep,
        gain + head * S.d_v, residual + head * S.d_v * S.d_k, coefficients + head * 3,
        left, right, scale + head * S.features, branch + slots * S.d_v,
        dk + keys, d_share + slots * S.pairs, d_state + size, d_terms + size * S.terms,
        d_u1 + wide, d_h + deep, d_u2 + deep, d_u3 + deep, d_gain + at * S.d_v,
        rows, S.tail + rows, past, vs, ks, S, DOT,
    )  # fmt: skip
    put(dq + slots * S.d_k, grad_q, rows, ks, S.length, S.d_k)
    tl.store(d_kept + slots + rows, grad_kept, mask=rows < S.length)
    if S.terms > 0:
        put(d_steps + slots * S.terms, grad_steps, rows, tl.arange(0, TERMS), S.length, S.terms)
    if S.features != S.d_k:
        at_degrees = d_degrees + at * 8 + tl.arange(0, 4)
        tl.store(at_degrees, grad_coefficients)
        tl.store(at_degrees + 4, degrees)
