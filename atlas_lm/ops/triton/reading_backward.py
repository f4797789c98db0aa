"""Gradients of reading a piece (`reading`): of what it sees of the pairs, and of the first layer.

A program a piece, row and head each. In deep memories `reading_hidden` comes before, with x and dz,
the hidden layer and the gradient of its inputs; a linear memory's dz is the gradient of what is
read. The pairs' kernel comes before the inputs', and not at all under muon.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.reading import alike, of_pairs, pairs_seen, share_tile, step_of
from atlas_lm.ops.triton.reading_hidden import keep_pairs, kept_pairs
from atlas_lm.ops.triton.tiles import by_degree, dot, features, features_backward, only, put, tile


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
def powers(grad, s):
    """Sums of grad, grad * s and grad * s^2, `[4]`."""
    at = tl.arange(0, 4)
    zero, one, two = tl.sum(grad), tl.sum(grad * s), tl.sum(grad * s * s)
    return tl.where(at == 0, zero, tl.where(at == 1, one, tl.where(at == 2, two, 0.0)))


@triton.jit
def through_alike(
    d_kernel, share, d_share, q, k, dk, rows, pairs, height, coefficients,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through share_ti <phi(q_t), phi(k_i)>, for some pairs, to <q, k>; what is in d_share
    already is the second layer's."""
    K: tl.constexpr = S.block_k
    ks = tl.arange(0, K)
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
    put(dk, dot(tl.trans(grad), tile(q, rows, ks, S.length, S.d_k), DOT), pairs, ks, height, S.d_k)
    return grad, d_coefficients


@triton.jit
def through_first_pairs(
    dz, dz3, room, q, k, share, d_share, u, u3, d_u, d_u3, dk, rows, coefficients,
    OUT: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through what the pairs add to the first layer; returns d_coefficients. In `room`, where
    own and before were, it leaves the gradient of <q, k>."""
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
    d_own, d_coefficients = through_alike(
        d_own, share, d_share, q, k, dk, rows, S.tail + rows, S.pairs, coefficients, S, DOT
    )
    if S.tail > 0:
        d_before, more = through_alike(
            d_before, share, d_share, q, k, dk, rows, tl.arange(0, TAIL), S.tail,
            coefficients, S, DOT,
        )  # fmt: skip
        d_coefficients += more
    tl.debug_barrier()
    keep_pairs(room, d_own, d_before, rows, S)
    return d_coefficients


@triton.jit(do_not_specialize=["rows_and_heads", "heads"])
def read_pairs_backward_kernel(
    q, k, share, u1, h, u, u3, coefficients, of_branch, own, back, hidden, dz, dz3,
    dk, d_share, d_u1, d_h, d_u, d_u3, d_degrees,
    rows_and_heads, heads, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of what a read sees of the pairs: factors, share, keys. It leaves that of <q, k> in
    `own`. u: u2, or a linear memory's u1. d_degrees `[8]`: first, of the kernel's coefficients.
    """
    z = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * rows_and_heads + z
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    V: tl.constexpr = S.block_v
    OUT: tl.constexpr = S.hidden if S.network != 0 else S.d_v
    BLOCK: tl.constexpr = S.block_f if S.network != 0 else S.block_v
    rows = tl.arange(0, LENGTH)
    slots, pairs, room = at * S.length, at * S.pairs, at * LENGTH * (LENGTH + TAIL)
    share, d_share = share + slots * S.pairs, d_share + slots * S.pairs
    if S.network != 0:
        through_second_pairs(
            of_branch + at * LENGTH * V, back + room, hidden + slots * OUT, share, d_share,
            u1 + pairs * S.d_v, h + pairs * OUT, d_u1 + pairs * S.d_v, d_h + pairs * OUT, rows,
            S, DOT,
        )  # fmt: skip
    d_coefficients = through_first_pairs(
        dz + slots * OUT, dz3 + slots * OUT, own + room, q + slots * S.d_k, k + pairs * S.d_k,
        share, d_share, u + pairs * OUT, u3 + pairs * OUT, d_u + pairs * OUT, d_u3 + pairs * OUT,
        dk + pairs * S.d_k, rows, coefficients + z % heads * 3, OUT, BLOCK, S, DOT,
    )  # fmt: skip
    if S.features != S.d_k:
        tl.store(d_degrees + at * 8 + tl.arange(0, 4), d_coefficients)


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
        put(d_state, dot(tl.trans(grad), kept_f, DOT), outs, ds, OUT, S.pitch)
        back_term += dot(grad, m, DOT)
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
def from_pairs(room, k, rows, S: tl.constexpr, DOT: tl.constexpr):
    """The gradient of the queries by what `through_first_pairs` has left."""
    K: tl.constexpr = S.block_k
    TAIL: tl.constexpr = S.block_tail
    ks = tl.arange(0, K)
    own, before = kept_pairs(room, rows, S)
    dq = dot(own, tile(k, S.tail + rows, ks, S.pairs, S.d_k), DOT)
    if S.tail > 0:
        dq += dot(before, tile(k, tl.arange(0, TAIL), ks, S.tail, S.d_k), DOT)
    return dq


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
def read_inputs_backward_kernel(
    dy, q, k, kept, steps, state, terms, residual, left, right, scale, own, dz, dz3,
    dq, d_kept, d_steps, d_state, d_terms, d_degrees,
    rows_and_heads, heads, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of the first layer's matrices, of kept, steps and queries, all of them.

    d_degrees `[8]`: last, <phi, dphi> by degree.
    """
    z = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * rows_and_heads + z
    head = z % heads
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    K: tl.constexpr = S.block_k
    TERMS: tl.constexpr = S.block_terms
    OUT: tl.constexpr = S.hidden if S.network != 0 else S.d_v
    BLOCK: tl.constexpr = S.block_f if S.network != 0 else S.block_v
    rows, ks = tl.arange(0, LENGTH), tl.arange(0, K)
    slots, size = at * S.length, at * S.size
    steps, d_kept, d_steps = steps + slots * S.terms, d_kept + slots, d_steps + slots * S.terms
    keep = tl.load(kept + slots + rows, mask=rows < S.length, other=0.0)
    grad_q, grad_kept, grad_steps, degrees = through_inputs(
        dz + slots * OUT, dz3 + slots * OUT, q + slots * S.d_k, state + size,
        terms + size * S.terms, d_state + size, d_terms + size * S.terms, keep, steps, rows,
        left, right, scale + head * S.features, OUT, BLOCK, S, DOT,
    )  # fmt: skip
    if S.written:
        room = own + at * LENGTH * (LENGTH + TAIL)
        grad_q += from_pairs(room, k + at * S.pairs * S.d_k, rows, S, DOT)
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
        tl.store(d_degrees + at * 8 + 4 + tl.arange(0, 4), degrees)
