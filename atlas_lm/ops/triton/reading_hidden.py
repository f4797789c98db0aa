"""Gradients of reading a piece of a deep memory: through the second layer's matrices.

It ends at what goes into and what comes out of the hidden layer, dz and x; the sums over the hidden
layer that are left are products with those, and made by other kernels (`reading_backward`): one for
everything has to carry three of them at once, more than there are registers for.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.branch import gelu, gelu_slope, normalise, through_norm
from atlas_lm.ops.triton.reading import (
    first_layer,
    of_pairs,
    pairs_seen,
    second_tiles,
    share_tile,
    step_of,
)
from atlas_lm.ops.triton.tiles import dot, only, put, tile


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
    """What all blocks of the hidden layer multiply with, kept for the other kernels.

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
def read_hidden_backward_kernel(
    dy, q, k, share, kept, steps, state, terms, u1, h, u2, u3, gain, coefficients,
    left, right, scale, branch, of_branch, own, back, hidden, dz, dz3, d_kept, d_steps,
    d_state, d_terms, d_gain, rows_and_heads, heads, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of the second layer's matrices, of kept and steps as far as these go, and for the
    other kernels: of the branch; share * <phi(q), phi(k)> and the gradient of <h_t, h_i> (own,
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
