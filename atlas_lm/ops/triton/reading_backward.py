"""Gradients of reading a piece (`reading`): of queries, weights, factors, keys and mixing.

Two kernels, one program a piece, row and head each: in deep memories first through the second
layer's matrices to what goes into and comes out of the hidden layer, dz and x; then everything that
is a product with those. A linear memory takes only the second one, its dz being the gradient of
what is read. One kernel for both has to carry three sums over the hidden layer at once, more than
there are registers for.
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
from atlas_lm.ops.triton.tiles import (
    by_degree,
    dot,
    features,
    features_backward,
    put,
    tile,
)


@triton.jit
def only(value, column, COUNT: tl.constexpr):
    """A vector as one column of a matrix of zeros."""
    return tl.where((tl.arange(0, COUNT) == column)[None, :], value[:, None], 0.0)


@triton.jit
def through_output(do, branch, gain, d_gain, vs, S: tl.constexpr):
    """From x + gain * LN(branch) back to the branch."""
    if S.norm:
        unit, size = normalise(branch, vs, S.d_v)
        tl.store(d_gain + vs, tl.sum(do * unit, 0), mask=vs < S.d_v)
        weight = tl.load(gain + vs, mask=vs < S.d_v, other=0.0)
        do = through_norm(weight[None, :] * do, unit, size, vs, S.d_v)
    return do


@triton.jit
def back_to_seen(do, share, u1, rows, vs, S: tl.constexpr, DOT: tl.constexpr):
    """The gradient of <h_t, h_i>, for a piece's own pairs and those before, rounded."""
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
def keep_pairs(room, own, before, rows, S: tl.constexpr):
    """Tiles `[length, pairs]` of the piece's own pairs and those before, side by side in `room`."""
    L: tl.constexpr = S.block_length
    T: tl.constexpr = S.block_tail
    if S.written:
        put(room, own, rows, tl.arange(0, L), L, L + T)
        if S.tail > 0:
            put(room, before, rows, L + tl.arange(0, T), L, L + T)


@triton.jit
def kept_pairs(room, rows, S: tl.constexpr):
    """What `keep_pairs` has left."""
    L: tl.constexpr = S.block_length
    T: tl.constexpr = S.block_tail
    own = tile(room, rows, tl.arange(0, L), L, L + T)
    before = own
    if S.tail > 0:
        before = tile(room, rows, L + tl.arange(0, T), L, L + T)
    return own, before


@triton.jit
def kept_tiles(
    do, own, before, back_own, back_before, of_branch, own_room, back_room, rows, vs,
    S: tl.constexpr,
):  # fmt: skip
    """What all blocks of the hidden layer multiply with, kept for the other kernel.

    On identity features it is read again: a product takes from shared memory what was loaded, and
    from registers what was computed, which then are taken for the whole loop.
    """
    L: tl.constexpr = S.block_length
    V: tl.constexpr = S.block_v
    put(of_branch, do, rows, vs, L, V)
    keep_pairs(own_room, own, before, rows, S)
    keep_pairs(back_room, back_own, back_before, rows, S)
    if S.features == S.d_k:
        tl.debug_barrier()
        do = tile(of_branch, rows, vs, L, V)
        if S.written:
            own, before = kept_pairs(own_room, rows, S)
            back_own, back_before = kept_pairs(back_room, rows, S)
    return do, own, before, back_own, back_before


@triton.jit
def through_matrix(do, x, w, d_w, weight, vs, hs, S: tl.constexpr, DOT: tl.constexpr):
    """Back through weight W x for a tile of W: writes dW; returns dx and the weight's gradient."""
    back = dot(do, w, DOT)
    put(d_w, dot(tl.trans(do), weight[:, None] * x, DOT), vs, hs, S.d_v, S.hidden)
    return weight[:, None] * back, tl.sum(x * back, 1)


@triton.jit
def through_matrices(
    do, x, w, m, terms, d_state, d_terms, kept, steps, d_kept, d_steps, rows, vs, hs,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through kept W x + sum_s steps_s M_s x of the second layer."""
    TERMS: tl.constexpr = S.terms
    x = x.to(tl.float32)
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
def through_hidden(
    do, q, state, terms, d_state, d_terms, kept, steps, h, u2, u3, hidden, dz, dz3, own, before,
    back_own, back_before, rows, vs, left, right, scale, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The hidden layer and back to its inputs, block by block; returns d_kept and d_steps."""
    F: tl.constexpr = S.block_f
    HIDDEN: tl.constexpr = S.hidden
    TERMS: tl.constexpr = S.block_terms
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
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
        if S.features != S.d_k:
            w, m, h_own, h_before = second_tiles(state, terms, h, vs, hs, S)
        if S.written:
            put(hidden, x, rows, hs, S.length, S.hidden)
        dx, d_kept, d_steps = through_matrices(
            do, x.to(DOT), w, m, terms, d_state, d_terms, kept, steps, d_kept, d_steps,
            rows, vs, hs, S, DOT,
        )  # fmt: skip
        if S.written:
            dx += dot(back_own, h_own, DOT)
            if S.tail > 0:
                dx += dot(back_before, h_before, DOT)
        put(dz, dx * through, rows, hs, S.length, S.hidden)
        if S.network == 2:
            put(dz3, dx * gate, rows, hs, S.length, S.hidden)
    return d_kept, d_steps


@triton.jit(do_not_specialize=["rows_and_heads", "heads"])
def read_second_backward_kernel(
    dy, q, k, share, kept, steps, state, terms, u1, h, u2, u3, gain, coefficients,
    left, right, scale, branch, of_branch, own, back, hidden, dz, dz3, d_kept, d_steps,
    d_state, d_terms, d_gain, rows_and_heads, heads, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of the second layer's matrices, of kept and steps as far as these go, and for the
    other kernel: of the branch; share * <phi(q), phi(k)> and the gradient of <h_t, h_i> (own,
    back); the hidden layer `[length f]`; the gradient of W2 phi and, in a gated mlp, W3 phi.
    """
    z = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * rows_and_heads + z
    head = z % heads
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    V: tl.constexpr = S.block_v
    TERMS: tl.constexpr = S.block_terms
    rows, vs = tl.arange(0, LENGTH), tl.arange(0, V)
    slots, size, deep = at * S.length, at * S.size, at * S.pairs * S.hidden
    share, room, inner = share + slots * S.pairs, at * LENGTH * (LENGTH + TAIL), slots * S.hidden
    q, scale, steps = q + slots * S.d_k, scale + head * S.features, steps + slots * S.terms
    weight = tl.load(kept + slots + rows, mask=rows < S.length, other=0.0)
    do = tile(dy + slots * S.d_v, rows, vs, S.length, S.d_v).to(tl.float32)
    out = do
    if S.norm:
        out = tile(branch + slots * S.d_v, rows, vs, S.length, S.d_v)
    keys, weigh = k + at * S.pairs * S.d_k, coefficients + head * 3
    own_tile, before_tile = pairs_seen(q, keys, share, weigh, rows, S, DOT)
    do = through_output(do, out, gain + head * S.d_v, d_gain + at * S.d_v, vs, S)
    back_own, back_before = back_to_seen(do, share, u1 + at * S.pairs * S.d_v, rows, vs, S, DOT)
    do, own_tile, before_tile, back_own, back_before = kept_tiles(
        do, own_tile, before_tile, back_own, back_before, of_branch + at * LENGTH * V, own + room,
        back + room, rows, vs, S,
    )  # fmt: skip
    grad_kept, grad_steps = through_hidden(
        do, q, state + size, terms + size * S.terms, d_state + size, d_terms + size * S.terms,
        weight, steps, h + deep, u2 + deep, u3 + deep, hidden + inner, dz + inner, dz3 + inner,
        own_tile, before_tile, back_own, back_before, rows, vs, left, right, scale, S, DOT,
    )  # fmt: skip
    tl.store(d_kept + slots + rows, grad_kept, mask=rows < S.length)
    if S.terms > 0:
        put(d_steps + slots * S.terms, grad_steps, rows, tl.arange(0, TERMS), S.length, S.terms)


@triton.jit
def through_factors(
    inner, u, d_u, own, before, d_own, d_before, rows, OUT: tl.constexpr, BLOCK: tl.constexpr,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Sums over a layer with a factor u of the pairs: <inner_t, u_i>, which goes on from d_own and
    d_before; and du_i = sum_t own_ti inner_t, written out."""
    TAIL: tl.constexpr = S.block_tail
    for start in range(0, OUT, BLOCK):
        outs = start + tl.arange(0, BLOCK)
        x = tile(inner, rows, outs, S.length, OUT)
        mine, past = of_pairs(u, outs, OUT, S)
        d_own += dot(x, tl.trans(mine), DOT)
        put(d_u, dot(tl.trans(own), x, DOT), S.tail + rows, outs, S.pairs, OUT)
        if S.tail > 0:
            d_before += dot(x, tl.trans(past), DOT)
            put(d_u, dot(tl.trans(before), x, DOT), tl.arange(0, TAIL), outs, S.tail, OUT)
    return d_own, d_before


@triton.jit
def through_share(
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


@triton.jit
def through_second_pairs(
    of_branch, back, hidden, share, d_share, u1, h, d_u1, d_h, rows,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through what the pairs add to the second layer: u1, h, and share as far as that goes."""
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    V: tl.constexpr = S.block_v
    vs, past = tl.arange(0, V), tl.arange(0, TAIL)
    own, before = kept_pairs(back, rows, S)
    seen_own = tl.zeros((LENGTH, LENGTH), tl.float32)
    seen_before = tl.zeros((LENGTH, TAIL), tl.float32)
    seen_own, seen_before = through_factors(
        hidden, h, d_h, own, before, seen_own, seen_before, rows, S.hidden, S.block_f, S, DOT
    )
    do = tile(of_branch, rows, vs, LENGTH, V)
    through_share(do, seen_own, share, d_share, u1, d_u1, rows, S.tail + rows, S.pairs, vs, S, DOT)
    if S.tail > 0:
        through_share(do, seen_before, share, d_share, u1, d_u1, rows, past, S.tail, vs, S, DOT)
    tl.debug_barrier()


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
def through_state_and_term(
    dz, f, state, term, d_state, d_term, kept, step, rows, ds,
    OUT: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The same for kept W f + step M f: one wait for both matrices."""
    back = tl.zeros((rows.shape[0], ds.shape[0]), tl.float32)
    back_term = back
    kept_f, step_f = (kept[:, None] * f).to(DOT), (step[:, None] * f).to(DOT)
    for start in range(0, OUT, BLOCK):
        outs = start + tl.arange(0, BLOCK)
        grad = tile(dz, rows, outs, S.length, OUT)
        w = tile(state, outs, ds, OUT, S.pitch)
        m = tile(term, outs, ds, OUT, S.pitch)
        back += dot(grad, w, DOT)
        back_term += dot(grad, m, DOT)
        put(d_state, dot(tl.trans(grad), kept_f, DOT), outs, ds, OUT, S.pitch)
        put(d_term, dot(tl.trans(grad), step_f, DOT), outs, ds, OUT, S.pitch)
    df = kept[:, None] * back + step[:, None] * back_term
    return df, tl.sum(f * back, 1), tl.sum(f * back_term, 1)


@triton.jit
def through_first_layer(
    dz, f, state, terms, d_state, d_terms, kept, steps, d_kept, d_steps, rows, ds,
    OUT: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through kept W f + sum_s steps_s M_s f: returns df, d_kept and d_steps."""
    TERMS: tl.constexpr = S.terms
    if TERMS == 0:
        df, grad = through_features(dz, f, state, d_state, kept, rows, ds, OUT, BLOCK, S, DOT)
        d_kept += grad
    else:
        df, grad, grad_step = through_state_and_term(
            dz, f, state, terms, d_state, d_terms, kept, step_of(steps, 0, rows, S), rows, ds,
            OUT, BLOCK, S, DOT,
        )  # fmt: skip
        d_kept, d_steps = d_kept + grad, d_steps + only(grad_step, 0, S.block_terms)
        for s in range(1, TERMS):
            step, skip = step_of(steps, s, rows, S), s * S.size
            more, grad = through_features(
                dz, f, terms + skip, d_terms + skip, step, rows, ds, OUT, BLOCK, S, DOT
            )
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
def through_first_pairs(
    dz, dz3, room, q, k, share, d_share, u, u3, d_u, d_u3, dk, dq, rows, coefficients,
    OUT: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through what the pairs add to the first layer; dq goes on."""
    TAIL: tl.constexpr = S.block_tail
    if S.network == 0:
        own, before = pairs_seen(q, k, share, coefficients, rows, S, DOT)
    else:
        own, before = kept_pairs(room, rows, S)
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
    dz, dz3, q, state, terms, d_state, d_terms, kept, steps, rows, left, right, scale,
    OUT: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through the matrices on phi(q): dq, d_kept, d_steps, and <phi, dphi> by degree."""
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    K: tl.constexpr = S.block_k
    TERMS: tl.constexpr = S.block_terms
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    dq = tl.zeros((rows.shape[0], K), tl.float32)
    d_kept = tl.zeros((rows.shape[0],), tl.float32)
    d_steps = tl.zeros((rows.shape[0], TERMS), tl.float32)
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
    """Gradients of queries (by the residual), kept and steps that do not come by the first one."""
    K: tl.constexpr = S.block_k
    V: tl.constexpr = S.block_v
    TERMS: tl.constexpr = S.block_terms
    ks, vs = tl.arange(0, K), tl.arange(0, V)
    kept = tl.load(d_kept + rows, mask=rows < S.length, other=0.0)
    steps = tl.zeros((rows.shape[0], TERMS), tl.float32)
    if S.terms > 0:
        steps = tile(d_steps, rows, tl.arange(0, TERMS), S.length, S.terms)
    dq = tile(dy, rows, vs, S.length, S.d_v).to(tl.float32)
    if S.d_k != S.d_v:
        dq = dot(dq, tile(residual, vs, ks, S.d_v, S.d_k), DOT)
    return dq, kept, steps


@triton.jit(do_not_specialize=["rows_and_heads", "heads"])
def read_first_backward_kernel(
    dy, q, k, share, kept, steps, state, terms, u1, h, u, u3, residual, coefficients,
    left, right, scale, of_branch, own, back, hidden, dz, dz3,
    dq, dk, d_share, d_kept, d_steps, d_state, d_terms, d_u1, d_h, d_u, d_u3, d_degrees,
    rows_and_heads, heads, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What is left after `read_second_backward_kernel`; of a linear memory, everything.

    u: u2, or a linear memory's u1, whose dz is dy. d_degrees `[8]`: of the kernel's coefficients,
    then <phi, dphi>, each by degree.
    """
    z = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * rows_and_heads + z
    head = z % heads
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    K: tl.constexpr = S.block_k
    V: tl.constexpr = S.block_v
    TERMS: tl.constexpr = S.block_terms
    OUT: tl.constexpr = S.hidden if S.network != 0 else S.d_v
    BLOCK: tl.constexpr = S.block_f if S.network != 0 else S.block_v
    rows, ks = tl.arange(0, LENGTH), tl.arange(0, K)
    slots, size, wide = at * S.length, at * S.size, at * S.pairs * OUT
    q, dz, dz3 = q + slots * S.d_k, dz + slots * OUT, dz3 + slots * OUT
    steps, d_kept, d_steps = steps + slots * S.terms, d_kept + slots, d_steps + slots * S.terms
    keep = tl.load(kept + slots + rows, mask=rows < S.length, other=0.0)
    share, d_share, room = (
        share + slots * S.pairs, d_share + slots * S.pairs, at * LENGTH * (LENGTH + TAIL)
    )  # fmt: skip
    if S.written and S.network != 0:
        through_second_pairs(
            of_branch + at * LENGTH * V, back + room, hidden + slots * OUT, share, d_share,
            u1 + at * S.pairs * S.d_v, h + wide, d_u1 + at * S.pairs * S.d_v, d_h + wide, rows,
            S, DOT,
        )  # fmt: skip
    grad_q, grad_kept, grad_steps, degrees = through_inputs(
        dz, dz3, q, state + size, terms + size * S.terms, d_state + size, d_terms + size * S.terms,
        keep, steps, rows, left, right, scale + head * S.features, OUT, BLOCK, S, DOT,
    )  # fmt: skip
    d_coefficients = tl.zeros((4,), tl.float32)
    if S.written:
        keys = at * S.pairs * S.d_k
        grad_q, d_coefficients = through_first_pairs(
            dz, dz3, own + room, q, k + keys, share, d_share, u + wide, u3 + wide, d_u + wide,
            d_u3 + wide, dk + keys, grad_q, rows, coefficients + head * 3, OUT, BLOCK, S, DOT,
        )  # fmt: skip
    if S.network != 0:
        of_q, of_kept, of_steps = from_second_layer(
            dy + slots * S.d_v, residual + head * S.d_v * S.d_k, d_kept, d_steps, rows, S, DOT
        )
        grad_q, grad_kept, grad_steps = grad_q + of_q, grad_kept + of_kept, grad_steps + of_steps
    put(dq + slots * S.d_k, grad_q, rows, ks, S.length, S.d_k)
    tl.store(d_kept + rows, grad_kept, mask=rows < S.length)
    if S.terms > 0:
        put(d_steps, grad_steps, rows, tl.arange(0, TERMS), S.length, S.terms)
    if S.features != S.d_k:
        at_degrees = d_degrees + at * 8 + tl.arange(0, 4)
        tl.store(at_degrees, d_coefficients)
        tl.store(at_degrees + 4, degrees)
