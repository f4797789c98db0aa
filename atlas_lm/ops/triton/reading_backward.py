"""Gradients of reading a piece (`reading`): of queries, weights, factors, keys and mixing.

Two kernels, one program a piece, row and head each: first back through the second layer of a deep
memory, to the gradient dz at the inputs of its hidden layer, then through the first one (or a
linear memory's only one, where dz is the gradient of what is read). One for both would have three
sums over the hidden layer to carry at once, more than there are registers for.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.branch import gelu, gelu_slope, normalise, through_norm
from atlas_lm.ops.triton.reading import (
    alike,
    first_layer,
    of_pairs,
    pairs_seen,
    second_tiles,
    share_tile,
    step_of,
)
from atlas_lm.ops.triton.tiles import by_degree, dot, features, features_backward, put, tile


@triton.jit
def only(value, column, COUNT: tl.constexpr):
    """A vector as one column of a matrix of zeros."""
    return tl.where((tl.arange(0, COUNT) == column)[None, :], value[:, None], 0.0)


@triton.jit
def through_output(do, branch, gain, d_gain, rows, vs, S: tl.constexpr):
    """From x + gain * LN(branch) back to the branch."""
    if S.norm:
        unit, size = normalise(tile(branch, rows, vs, S.length, S.d_v), vs, S.d_v)
        tl.store(d_gain + vs, tl.sum(do * unit, 0), mask=vs < S.d_v)
        weight = tl.load(gain + vs, mask=vs < S.d_v, other=0.0)
        do = through_norm(weight[None, :] * do, unit, size, vs, S.d_v)
    return do


@triton.jit
def back_to_seen(do, share, u1, rows, vs, S: tl.constexpr, DOT: tl.constexpr):
    """The gradient of <h_t, h_i>, for a piece's own pairs and those before, rounded for products."""
    TAIL: tl.constexpr = S.block_tail
    own = tl.zeros((rows.shape[0], rows.shape[0]), DOT)
    before = tl.zeros((rows.shape[0], TAIL), DOT)
    if S.written:
        mine, past = of_pairs(u1, vs, S.d_v, S)
        weight = share_tile(share, rows, S.tail + rows, S.pairs, S)
        own = (weight * dot(do, tl.trans(mine), DOT)).to(DOT)
        if S.tail > 0:
            weight = share_tile(share, rows, tl.arange(0, TAIL), S.tail, S)
            before = (weight * dot(do, tl.trans(past), DOT)).to(DOT)
    return own, before


@triton.jit
def through_matrix(do, x, w, d_w, weight, vs, hs, S: tl.constexpr, DOT: tl.constexpr):
    """Back through weight W x for a tile of W: writes dW; returns dx and the weight's gradient."""
    back = dot(do, w, DOT)
    put(d_w, dot(tl.trans(weight[:, None] * do), x, DOT), vs, hs, S.d_v, S.hidden)
    return weight[:, None] * back, tl.sum(x.to(tl.float32) * back, 1)


@triton.jit
def through_matrices(
    do, x, w, m, terms, d_state, d_terms, kept, steps, d_kept, d_steps, rows, vs, hs,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through kept W x + sum_s steps_s M_s x of the second layer."""
    TERMS: tl.constexpr = S.terms
    dx, grad = through_matrix(do, x, w, d_state, kept, vs, hs, S, DOT)
    d_kept += grad
    if TERMS > 0:
        step = step_of(steps, 0, rows, S)
        more, grad = through_matrix(do, x, m, d_terms, step, vs, hs, S, DOT)
        dx, d_steps = dx + more, d_steps + only(grad, 0, S.block_terms)
        for s in range(1, TERMS):
            step = step_of(steps, s, rows, S)
            other = tile(terms + s * S.size, vs, hs, S.d_v, S.hidden)
            more, grad = through_matrix(do, x, other, d_terms + s * S.size, step, vs, hs, S, DOT)
            dx, d_steps = dx + more, d_steps + only(grad, s, S.block_terms)
    return dx, d_kept, d_steps


@triton.jit
def through_seen(
    x, dx, seen, back, of_pairs, d_h, pairs, hs, height, S: tl.constexpr, DOT: tl.constexpr
):
    """Back through <h_t, h_i> for some pairs and a block of the hidden layer; and its values."""
    put(d_h, dot(tl.trans(back), x, DOT), pairs, hs, height, S.hidden)
    return dx + dot(back, of_pairs, DOT), seen + dot(x, tl.trans(of_pairs), DOT)


@triton.jit
def through_hidden(
    do, q, state, terms, d_state, d_terms, kept, steps, h, u2, u3, d_h, dz, dz3, own, before,
    back_own, back_before, rows, vs, left, right, scale, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back to the hidden layer's inputs, block by block; returns what is summed over blocks:
    <h_t, h_i>, and the gradients of kept and steps."""
    F: tl.constexpr = S.block_f
    HIDDEN: tl.constexpr = S.hidden
    TAIL: tl.constexpr = S.block_tail
    TERMS: tl.constexpr = S.block_terms
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    seen_own = tl.zeros((rows.shape[0], rows.shape[0]), tl.float32)
    seen_before = tl.zeros((rows.shape[0], TAIL), tl.float32)
    d_kept = tl.zeros((rows.shape[0],), tl.float32)
    d_steps = tl.zeros((rows.shape[0], TERMS), tl.float32)
    for start in range(0, HIDDEN, F):
        hs = start + tl.arange(0, F)
        if S.features == S.d_k:
            w, m, h_own, h_before = second_tiles(state, terms, h, vs, hs, S)
        z = first_layer(
            q, state + W2, terms + W2, kept, steps, u2, own, before, rows, hs, left, right, scale,
            S.hidden, S, DOT,
        )  # fmt: skip
        x, gate, through = gelu(z), gelu(z), gelu_slope(z)
        if S.network == 2:
            value = first_layer(
                q, state + W3, terms + W3, kept, steps, u3, own, before, rows, hs,
                left, right, scale, S.hidden, S, DOT,
            )  # fmt: skip
            x, through = x * value, through * value
        x = x.to(DOT)
        if S.features != S.d_k:
            w, m, h_own, h_before = second_tiles(state, terms, h, vs, hs, S)
        dx, d_kept, d_steps = through_matrices(
            do, x, w, m, terms, d_state, d_terms, kept, steps, d_kept, d_steps, rows, vs, hs,
            S, DOT,
        )  # fmt: skip
        if S.written:
            dx, seen_own = through_seen(
                x, dx, seen_own, back_own, h_own, d_h, S.tail + rows, hs, S.pairs, S, DOT
            )
            if S.tail > 0:
                dx, seen_before = through_seen(
                    x, dx, seen_before, back_before, h_before, d_h, tl.arange(0, TAIL), hs,
                    S.tail, S, DOT,
                )  # fmt: skip
        put(dz, dx * through, rows, hs, S.length, S.hidden)
        if S.network == 2:
            put(dz3, dx * gate, rows, hs, S.length, S.hidden)
    return seen_own, seen_before, d_kept, d_steps


@triton.jit
def through_second_pairs(
    do, seen, share, d_share, u1, d_u1, rows, pairs, height, vs,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through share_ti <h_t, h_i> u1_i, for some pairs."""
    inside = (rows[:, None] < S.length) & (pairs[None, :] < height)
    of_u1 = tile(u1, pairs, vs, height, S.d_v)
    weight = share_tile(share, rows, pairs, height, S)
    grad = seen * dot(do, tl.trans(of_u1), DOT)
    tl.store(d_share + rows[:, None] * S.pairs + pairs[None, :], grad, mask=inside)
    put(d_u1, dot(tl.trans(weight * seen), do, DOT), pairs, vs, height, S.d_v)


@triton.jit(do_not_specialize=["rows_and_heads", "heads"])
def read_second_backward_kernel(
    dy, q, k, share, kept, steps, state, terms, u1, h, u2, u3, gain, coefficients,
    left, right, scale, branch, dz, dz3, d_share, d_kept, d_steps, d_state, d_terms, d_u1, d_h,
    d_gain, rows_and_heads, heads, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """From dy to dz `[length f]` (dz3: of a gated mlp's other matrix), and what comes by the way;
    of share, kept and steps the part of the second layer."""
    z = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * rows_and_heads + z
    head = z % heads
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    V: tl.constexpr = S.block_v
    TERMS: tl.constexpr = S.block_terms
    rows, vs = tl.arange(0, LENGTH), tl.arange(0, V)
    slots, size, deep = at * S.length, at * S.size, at * S.pairs * S.hidden
    q, scale, steps = q + slots * S.d_k, scale + head * S.features, steps + slots * S.terms
    share, d_share = share + slots * S.pairs, d_share + slots * S.pairs
    u1, d_u1 = u1 + at * S.pairs * S.d_v, d_u1 + at * S.pairs * S.d_v
    keep = tl.load(kept + slots + rows, mask=rows < S.length, other=0.0)
    do = tile(dy + slots * S.d_v, rows, vs, S.length, S.d_v).to(tl.float32)
    do = through_output(
        do, branch + slots * S.d_v, gain + head * S.d_v, d_gain + at * S.d_v, rows, vs, S
    )
    back_own, back_before = back_to_seen(do, share, u1, rows, vs, S, DOT)
    own, before = pairs_seen(
        q, k + at * S.pairs * S.d_k, share, coefficients + head * 3, rows, S, DOT
    )
    seen_own, seen_before, grad_kept, grad_steps = through_hidden(
        do, q, state + size, terms + size * S.terms, d_state + size, d_terms + size * S.terms,
        keep, steps, h + deep, u2 + deep, u3 + deep, d_h + deep, dz + slots * S.hidden,
        dz3 + slots * S.hidden, own, before, back_own, back_before, rows, vs,
        left, right, scale, S, DOT,
    )  # fmt: skip
    if S.written:
        through_second_pairs(
            do, seen_own, share, d_share, u1, d_u1, rows, S.tail + rows, S.pairs, vs, S, DOT
        )
        if S.tail > 0:
            past = tl.arange(0, TAIL)
            through_second_pairs(
                do, seen_before, share, d_share, u1, d_u1, rows, past, S.tail, vs, S, DOT
            )
    tl.store(d_kept + slots + rows, grad_kept, mask=rows < S.length)
    if S.terms > 0:
        put(d_steps + slots * S.terms, grad_steps, rows, tl.arange(0, TERMS), S.length, S.terms)


@triton.jit
def through_factors(
    dz, u, d_u, own, before, d_own, d_before, rows, OUT: tl.constexpr, BLOCK: tl.constexpr,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through what the pairs add to a first layer: writes du; returns d_own, d_before."""
    TAIL: tl.constexpr = S.block_tail
    for start in range(0, OUT, BLOCK):
        outs = start + tl.arange(0, BLOCK)
        grad = tile(dz, rows, outs, S.length, OUT)
        mine, past = of_pairs(u, outs, OUT, S)
        d_own += dot(grad, tl.trans(mine), DOT)
        put(d_u, dot(tl.trans(own), grad, DOT), S.tail + rows, outs, S.pairs, OUT)
        if S.tail > 0:
            d_before += dot(grad, tl.trans(past), DOT)
            put(d_u, dot(tl.trans(before), grad, DOT), tl.arange(0, TAIL), outs, S.tail, OUT)
    return d_own, d_before


@triton.jit
def through_features(
    dz, f, matrix, d_matrix, weight, rows, ds, OUT: tl.constexpr, BLOCK: tl.constexpr,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through weight W f: writes dW; returns df and the weight's gradient."""
    back = tl.zeros((rows.shape[0], ds.shape[0]), tl.float32)
    weighed = (weight[:, None] * f).to(DOT)
    for start in range(0, OUT, BLOCK):
        outs = start + tl.arange(0, BLOCK)
        grad = tile(dz, rows, outs, S.length, OUT)
        w = tile(matrix, outs, ds, OUT, S.pitch)
        back += dot(grad, w, DOT)
        put(d_matrix, dot(tl.trans(grad), weighed, DOT), outs, ds, OUT, S.pitch)
    return weight[:, None] * back, tl.sum(f * back, 1)


@triton.jit
def through_first_layer(
    dz, f, state, terms, d_state, d_terms, kept, steps, d_kept, d_steps, rows, ds,
    OUT: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through kept W f + sum_s steps_s M_s f: returns df, d_kept and d_steps."""
    TERMS: tl.constexpr = S.terms
    df, grad = through_features(dz, f, state, d_state, kept, rows, ds, OUT, BLOCK, S, DOT)
    d_kept += grad
    for s in range(TERMS):
        skip = s * S.size
        more, grad = through_features(
            dz, f, terms + skip, d_terms + skip, step_of(steps, s, rows, S), rows, ds,
            OUT, BLOCK, S, DOT,
        )  # fmt: skip
        df, d_steps = df + more, d_steps + only(grad, s, S.block_terms)
    return df, d_kept, d_steps


@triton.jit
def powers(grad, s):
    """Sums of grad, grad * s and grad * s^2, `[4]`."""
    at = tl.arange(0, 4)
    zero, one, two = tl.sum(grad), tl.sum(grad * s), tl.sum(grad * s * s)
    return tl.where(at == 0, zero, tl.where(at == 1, one, tl.where(at == 2, two, 0.0)))


@triton.jit
def through_alike(
    d_kernel, share, d_share, q, k, dk, dq, rows, pairs, height, coefficients,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through share_ti <phi(q_t), phi(k_i)>, for some pairs; d_share: what is there already is
    the second layer's."""
    K: tl.constexpr = S.block_k
    ks = tl.arange(0, K)
    keys, queries = tile(k, pairs, ks, height, S.d_k), tile(q, rows, ks, S.length, S.d_k)
    s, kernel = alike(q, k, rows, pairs, height, coefficients, S, DOT)
    grad = d_kernel * kernel
    if S.network != 0:
        grad += share_tile(d_share, rows, pairs, height, S)
    inside = (rows[:, None] < S.length) & (pairs[None, :] < height)
    tl.store(d_share + rows[:, None] * S.pairs + pairs[None, :], grad, mask=inside)
    grad = d_kernel * share_tile(share, rows, pairs, height, S)
    d_coefficients = tl.zeros((4,), tl.float32)
    if S.features != S.d_k:
        d_coefficients = powers(grad, s)
        grad *= tl.load(coefficients + 1) + 2 * tl.load(coefficients + 2) * s
    put(dk, dot(tl.trans(grad), queries, DOT), pairs, ks, height, S.d_k)
    return dq + dot(grad, keys, DOT), d_coefficients


@triton.jit
def through_pairs(
    dz, dz3, q, k, share, d_share, u, u3, d_u, d_u3, dk, dq, rows, coefficients,
    OUT: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through what the pairs add to the first layer; dq goes on from dq."""
    TAIL: tl.constexpr = S.block_tail
    own, before = pairs_seen(q, k, share, coefficients, rows, S, DOT)
    d_own = tl.zeros((rows.shape[0], rows.shape[0]), tl.float32)
    d_before = tl.zeros((rows.shape[0], TAIL), tl.float32)
    d_own, d_before = through_factors(
        dz, u, d_u, own, before, d_own, d_before, rows, OUT, BLOCK, S, DOT
    )
    if S.network == 2:
        d_own, d_before = through_factors(
            dz3, u3, d_u3, own, before, d_own, d_before, rows, OUT, BLOCK, S, DOT
        )
    dq, d_coefficients = through_alike(
        d_own, share, d_share, q, k, dk, dq, rows, S.tail + rows, S.pairs, coefficients, S, DOT
    )
    if S.tail > 0:
        dq, more = through_alike(
            d_before, share, d_share, q, k, dk, dq, rows, tl.arange(0, TAIL), S.tail,
            coefficients, S, DOT,
        )  # fmt: skip
        d_coefficients += more
    return dq, d_coefficients


@triton.jit
def through_inputs(
    dz, dz3, q, state, terms, d_state, d_terms, kept, steps, d_kept, d_steps, dq, rows,
    left, right, scale, OUT: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through the matrices on phi(q); dq, d_kept and d_steps go on; <phi, dphi> by degree."""
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    degrees = tl.zeros((4,), tl.float32)
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        f = features(q, rows, ds, S.length, left, right, scale, S.d_k, S.features)
        df, d_kept, d_steps = through_first_layer(
            dz, f, state + W2, terms + W2, d_state + W2, d_terms + W2, kept, steps,
            d_kept, d_steps, rows, ds, OUT, BLOCK, S, DOT,
        )  # fmt: skip
        if S.network == 2:
            more, d_kept, d_steps = through_first_layer(
                dz3, f, state + W3, terms + W3, d_state + W3, d_terms + W3, kept, steps,
                d_kept, d_steps, rows, ds, OUT, BLOCK, S, DOT,
            )  # fmt: skip
            df += more
        dq += features_backward(
            df, q, rows, ds, S.length, left, right, scale, S.d_k, S.features, S.block_k, DOT
        )
        if S.features != S.d_k:
            degrees += by_degree(df * f, ds, S.d_k)
    return dq, d_kept, d_steps, degrees


@triton.jit
def from_second_layer(dy, residual, d_kept, d_steps, rows, S: tl.constexpr, DOT: tl.constexpr):
    """Gradients of queries, kept and steps as the first layer finds them: of a residual and of the
    second layer, if there is one."""
    K: tl.constexpr = S.block_k
    V: tl.constexpr = S.block_v
    TERMS: tl.constexpr = S.block_terms
    ks, vs, inside = tl.arange(0, K), tl.arange(0, V), rows < S.length
    dq = tl.zeros((rows.shape[0], K), tl.float32)
    kept = tl.zeros((rows.shape[0],), tl.float32)
    steps = tl.zeros((rows.shape[0], TERMS), tl.float32)
    if S.network != 0:
        do = tile(dy, rows, vs, S.length, S.d_v)
        if S.d_k == S.d_v:
            dq = do.to(tl.float32)
        else:
            dq = dot(do, tile(residual, vs, ks, S.d_v, S.d_k), DOT)
        kept = tl.load(d_kept + rows, mask=inside, other=0.0)
        if S.terms > 0:
            steps = tile(d_steps, rows, tl.arange(0, TERMS), S.length, S.terms)
    return dq, kept, steps


@triton.jit(do_not_specialize=["rows_and_heads", "heads"])
def read_first_backward_kernel(
    dy, q, k, share, kept, steps, state, terms, u, u3, residual, coefficients,
    left, right, scale, dz, dz3,
    dq, dk, d_share, d_kept, d_steps, d_state, d_terms, d_u, d_u3, d_degrees,
    rows_and_heads, heads, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """From dz to everything else. u: u2, or a linear memory's u1, whose dz is dy.

    d_degrees `[8]`: of the kernel's coefficients, then <phi, dphi>, each by degree.
    """
    z = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * rows_and_heads + z
    head = z % heads
    LENGTH: tl.constexpr = S.block_length
    K: tl.constexpr = S.block_k
    TERMS: tl.constexpr = S.block_terms
    OUT: tl.constexpr = S.hidden if S.network != 0 else S.d_v
    BLOCK: tl.constexpr = S.block_f if S.network != 0 else S.block_v
    rows, ks = tl.arange(0, LENGTH), tl.arange(0, K)
    slots, size, wide = at * S.length, at * S.size, at * S.pairs * OUT
    q, dz, dz3 = q + slots * S.d_k, dz + slots * OUT, dz3 + slots * OUT
    steps, d_kept, d_steps = steps + slots * S.terms, d_kept + slots, d_steps + slots * S.terms
    keep = tl.load(kept + slots + rows, mask=rows < S.length, other=0.0)
    grad_q, grad_kept, grad_steps = from_second_layer(
        dy + slots * S.d_v, residual + head * S.d_v * S.d_k, d_kept, d_steps, rows, S, DOT
    )
    d_coefficients = tl.zeros((4,), tl.float32)
    if S.written:
        keys = at * S.pairs * S.d_k
        grad_q, d_coefficients = through_pairs(
            dz, dz3, q, k + keys, share + slots * S.pairs, d_share + slots * S.pairs, u + wide,
            u3 + wide, d_u + wide, d_u3 + wide, dk + keys, grad_q, rows, coefficients + head * 3,
            OUT, BLOCK, S, DOT,
        )  # fmt: skip
    grad_q, grad_kept, grad_steps, degrees = through_inputs(
        dz, dz3, q, state + size, terms + size * S.terms, d_state + size, d_terms + size * S.terms,
        keep, steps, grad_kept, grad_steps, grad_q, rows, left, right, scale + head * S.features,
        OUT, BLOCK, S, DOT,
    )  # fmt: skip
    put(dq + slots * S.d_k, grad_q, rows, ks, S.length, S.d_k)
    tl.store(d_kept + rows, grad_kept, mask=rows < S.length)
    if S.terms > 0:
        put(d_steps, grad_steps, rows, tl.arange(0, TERMS), S.length, S.terms)
    if S.features != S.d_k:
        at_degrees = d_degrees + at * 8 + tl.arange(0, 4)
        tl.store(at_degrees, d_coefficients)
        tl.store(at_degrees + 4, degrees)
