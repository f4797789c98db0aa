"""Gradients of writing a piece: the last kernel, which settles the gradient of the state.

A program has one block of one matrix: it takes the gradient of the branch to the anchor and the
keys, and goes back over the step that the state took.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.pairs_backward import (
    first_layer_to_u,
    leave_pulls,
    push_to_x,
    to_first_layer,
    to_keys,
    to_second_matrix,
    to_x,
)
from atlas_lm.ops.triton.tiles import dot, put, tile


@triton.jit
def state_tile(
    g_weights, g_momentum, weights, momenta, d_state, d_entered, outs, ins,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """What `settle_tile` needs of the state: called early, so that it is here by then.

    What is read and written for every piece is to stay in the L2.
    """
    inside = (outs[:, None] < HEIGHT) & (ins[None, :] < WIDTH)
    at = outs[:, None] * WIDTH + ins[None, :]
    gw = tl.load(g_weights + at, mask=inside, other=0.0, eviction_policy="evict_last")
    w = tl.load(weights + at, mask=inside, other=0.0, eviction_policy="evict_first")
    read = tl.load(d_state + at, mask=inside, other=0.0, eviction_policy="evict_first")
    gs, s, entered = gw, w, read
    if S.terms > 0 or not S.written:
        gs = tl.load(g_momentum + at, mask=inside, other=0.0, eviction_policy="evict_last")
        s = tl.load(momenta + at, mask=inside, other=0.0, eviction_policy="evict_first")
        if S.written:
            entered = tl.load(d_entered + at, mask=inside, other=0.0, eviction_policy="evict_first")
    return gw, w, read, gs, s, entered


@triton.jit
def momentum_before(
    gw, gs, entered, g_momentum, pushes, carried, push_kept, fresh, at, inside, S: tl.constexpr
):
    """A tile of the momentum's gradient, from after a piece to before it, for the next one too."""
    TERMS: tl.constexpr = S.terms
    LAST: tl.constexpr = S.pulls - 1
    gs *= tl.load(push_kept + (0 if S.written else LAST))
    if S.written:
        gs += carried * gw + entered.to(tl.float32)
    else:
        for j in range(TERMS):
            step = tl.load(pushes + j * S.size + at, mask=inside, other=0.0).to(tl.float32)
            gs += tl.load(push_kept + j) * step
    gs = tl.where(fresh != 0, 0.0, gs)
    tl.store(g_momentum + at, gs, mask=inside, eviction_policy="evict_last")
    tl.store(pushes + LAST * S.size + at, gs.to(pushes.dtype.element_ty), mask=inside)


@triton.jit
def leave_last(d0, d1, d2, d_last):
    tl.store(d_last, tl.sum(d0))
    tl.store(d_last + 1, tl.sum(d1))
    tl.store(d_last + 2, tl.sum(d2))


@triton.jit
def settle_tile(
    grad, state, g_weights, g_momentum, g_initial, g_anchors, pushes, d_anchor,
    kept, carried, push_kept, fresh, keep, outs, ins,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """A tile of the state's gradient, from after a piece to before it; grad: of the anchor.

    The weights before it are in float32, since their product with the gradient is the small rest of
    large terms: a normalised branch does not see how long its weights are.

    Returns the gradients of kept, carried and push_kept, a sum a row. Where the piece began a
    document the gradient goes to the initial weights, and ends there.
    """
    gw, w, read, gs, s, entered = state
    inside = (outs[:, None] < HEIGHT) & (ins[None, :] < WIDTH)
    at = outs[:, None] * WIDTH + ins[None, :]
    d_kept = tl.sum(gw * w, 1)
    d_carried, d_push_kept = d_kept, d_kept
    if S.terms > 0 or not S.written:
        d_carried = tl.sum(gw * s.to(tl.float32), 1)
        d_push_kept = tl.sum(gs * s.to(tl.float32), 1)
        momentum_before(
            gw, gs, entered, g_momentum, pushes, carried, push_kept, fresh, at, inside, S
        )
    gw = kept * gw + read.to(tl.float32)
    if OWN:
        put(d_anchor, grad, outs, ins, HEIGHT, WIDTH)
    else:
        gw += grad
    if (fresh | keep) != 0:
        gw += tl.load(g_anchors + at, mask=inside & (keep != 0), other=0.0)
        begun = tl.load(g_initial + at, mask=inside & (fresh != 0), other=0.0)
        tl.store(g_initial + at, begun + gw, mask=inside & (fresh != 0))
        gw = tl.where(fresh != 0, 0.0, gw)
    tl.store(g_weights + at, gw, mask=inside, eviction_policy="evict_last")
    if S.written:
        tl.store(pushes + at, gw.to(pushes.dtype.element_ty), mask=inside)
    return d_kept, d_carried, d_push_kept


@triton.jit
def keys_of_matrix(
    dz, u, f, w, gw, gs, pushes, pulls, dk, grad_k, grad_pulls, degrees, k, rows, outs, ds, height,
    left, right, scale, HEIGHT: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What a tile of a matrix on phi gives the keys of some pairs, as anchor and as push: added to
    grad_k, or written out where phi is the key itself.

    Where steps add up, the pushes are gw and gs, which are here already.
    """
    df = dot(dz, w, DOT)
    if S.written:
        df, grad_pulls = push_to_x(u, f, df, grad_pulls, gw, pulls, 0, rows, height, S, DOT)
        if S.terms > 0:
            df, grad_pulls = push_to_x(u, f, df, grad_pulls, gs, pulls, 1, rows, height, S, DOT)
    else:
        df, grad_pulls = to_x(
            u, f, df, grad_pulls, tile(pushes, outs, ds, HEIGHT, S.pitch), pushes, pulls, rows,
            outs, ds, height, HEIGHT, S.pitch, S, DOT,
        )  # fmt: skip
    if S.features == S.d_k:
        put(dk, df, rows, ds, height, S.d_k)
    else:
        grad_k, degrees = to_keys(
            df, f, grad_k, degrees, k, rows, ds, height, left, right, scale, S, DOT
        )
    return grad_k, grad_pulls, degrees


@triton.jit
def settle_first_matrix(
    dz, dz_past, u, u_past, k, phi, dk, anchor, g_weights, g_momentum, g_initial, g_anchors,
    pushes, pulls, weights, momenta, d_state, d_entered, d_anchor, kept, carried, push_kept,
    fresh, keep, mine, past, outs, left, right, scale,
    HEIGHT: tl.constexpr, OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows `outs` of a matrix on phi, from gradients of what it gave: its tiles and the keys."""
    PITCH: tl.constexpr = S.pitch
    STEP: tl.constexpr = S.block_d
    K: tl.constexpr = S.block_k
    PULLS: tl.constexpr = S.block_pulls
    grad_k = tl.zeros((mine.shape[0], K), tl.float32)
    grad_past = tl.zeros((past.shape[0], K), tl.float32)
    grad_pulls = tl.zeros((mine.shape[0], PULLS), tl.float32)
    past_pulls = tl.zeros((past.shape[0], PULLS), tl.float32)
    degrees, c0 = tl.zeros((4,), tl.float32), tl.zeros((outs.shape[0],), tl.float32)
    c1, c2 = c0, c0
    for d in range(0, PITCH, STEP):
        ds = d + tl.arange(0, STEP)
        state = state_tile(
            g_weights, g_momentum, weights, momenta, d_state, d_entered, outs, ds,
            HEIGHT, S.pitch, S,
        )  # fmt: skip
        gw, _, _, gs, _, _ = state
        w = tile(anchor, outs, ds, HEIGHT, S.pitch)
        f = tile(phi, mine, ds, S.pairs, S.pitch)
        grad = dot(tl.trans(dz), f, DOT)
        grad_k, grad_pulls, degrees = keys_of_matrix(
            dz, u, f, w, gw, gs, pushes, pulls, dk, grad_k, grad_pulls, degrees, k, mine, outs, ds,
            S.pairs, left, right, scale, HEIGHT, S, DOT,
        )  # fmt: skip
        if S.tail > 0:
            f = tile(phi, past, ds, S.tail, S.pitch)
            grad += dot(tl.trans(dz_past), f, DOT)
            grad_past, past_pulls, degrees = keys_of_matrix(
                dz_past, u_past, f, w, gw, gs, pushes, pulls, dk, grad_past, past_pulls, degrees, k,
                past, outs, ds, S.tail, left, right, scale, HEIGHT, S, DOT,
            )  # fmt: skip
        # pushes are read by all before any is written
        tl.debug_barrier()
        a0, a1, a2 = settle_tile(
            grad, state, g_weights, g_momentum, g_initial, g_anchors, pushes, d_anchor,
            kept, carried, push_kept, fresh, keep, outs, ds, HEIGHT, S.pitch, OWN, S,
        )  # fmt: skip
        c0, c1, c2 = c0 + a0, c1 + a1, c2 + a2
    return grad_k, grad_past, grad_pulls, past_pulls, degrees, c0, c1, c2


@triton.jit
def settle_second_matrix(
    u1, h, do, known, g_weights, g_momentum, g_initial, g_anchors, pushes,
    weights, momenta, d_state, d_entered, d_anchor, kept, carried, push_kept, fresh, keep, d_last,
    mine, past, member, OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Columns of W1, few at a time: what is read of the state takes many registers."""
    V: tl.constexpr = S.block_v
    F: tl.constexpr = S.block_share
    STEP: tl.constexpr = 32 if S.block_share > 32 else S.block_share
    vs = tl.arange(0, V)
    c0 = tl.zeros((V,), tl.float32)
    c1, c2 = c0, c0
    for start in range(0, F, STEP):
        hs = member * F + start + tl.arange(0, STEP)
        state = state_tile(
            g_weights, g_momentum, weights, momenta, d_state, d_entered, vs, hs,
            S.d_v, S.hidden, S,
        )  # fmt: skip
        grad = to_second_matrix(do, u1, h, known, mine, vs, hs, S.pairs, S, DOT)
        if S.tail > 0:
            grad += to_second_matrix(do, u1, h, known, past, vs, hs, S.tail, S, DOT)
        a0, a1, a2 = settle_tile(
            grad, state, g_weights, g_momentum, g_initial, g_anchors, pushes, d_anchor,
            kept, carried, push_kept, fresh, keep, vs, hs, S.d_v, S.hidden, OWN, S,
        )  # fmt: skip
        c0, c1, c2 = c0 + a0, c1 + a1, c2 + a2
    leave_last(c0, c1, c2, d_last)


@triton.jit
def linear_errors(
    phi, anchor, d_u1, pushes, pulls, dv, rows, vs, height, S: tl.constexpr, DOT: tl.constexpr
):
    """Linear memories: the gradient of the error, which is u1, and of the values."""
    du = tl.zeros((rows.shape[0], vs.shape[0]), tl.float32)
    if S.written:
        du += tile(d_u1, rows, vs, height, S.d_v).to(tl.float32)
    _, du = first_layer_to_u(phi, anchor, du, pushes, pulls, rows, vs, height, S.d_v, S, DOT)
    put(dv, -du, rows, vs, height, S.d_v)
    return tl.zeros_like(du) if S.objective == 1 else du


@triton.jit
def leave_pairs(
    grad_k, grad_past, grad_pulls, past_pulls, dk, d_pulls, mine, past, ks, S: tl.constexpr
):
    leave_pulls(grad_pulls, d_pulls, mine, S.pairs, S)
    if S.tail > 0:
        leave_pulls(past_pulls, d_pulls, past, S.tail, S)
    if S.features != S.d_k:
        put(dk, grad_k, mine, ks, S.pairs, S.d_k)
        if S.tail > 0:
            put(dk, grad_past, past, ks, S.tail, S.d_k)


@triton.jit
def settle_on_features(
    dz, dz_past, u, k, phi, anchor, pushes, pulls, dk, d_pulls, d_degrees, d_last,
    g_weights, g_momentum, g_initial, g_anchors, weights, momenta, d_state, d_entered, d_anchor,
    kept, carried, push_kept, fresh, keep, mine, past, outs, left, right, scale,
    HEIGHT: tl.constexpr, OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows `outs` of a matrix `[HEIGHT pitch]` on phi, and what it gives keys and pulls.

    `u`: the factor that went with phi; dz: the gradient of what the matrix gave.
    """
    K: tl.constexpr = S.block_k
    grad_k, grad_past, grad_pulls, past_pulls, degrees, c0, c1, c2 = settle_first_matrix(
        dz, dz_past, tile(u, mine, outs, S.pairs, HEIGHT), tile(u, past, outs, S.tail, HEIGHT),
        k, phi, dk, anchor, g_weights, g_momentum, g_initial, g_anchors, pushes, pulls, weights,
        momenta, d_state, d_entered, d_anchor, kept, carried, push_kept, fresh, keep,
        mine, past, outs, left, right, scale, HEIGHT, OWN, S, DOT,
    )  # fmt: skip
    ks = tl.arange(0, K)
    leave_pairs(grad_k, grad_past, grad_pulls, past_pulls, dk, d_pulls, mine, past, ks, S)
    if S.features != S.d_k:
        at_degrees = d_degrees + tl.arange(0, 4)
        tl.store(at_degrees, tl.load(at_degrees) + degrees)
    leave_last(c0, c1, c2, d_last)


@triton.jit
def settle_first_layer(
    k, phi, anchor, u, do, known, pushes, pulls, dk, d_pulls, d_degrees, d_last,
    g_weights, g_momentum, g_initial, g_anchors, weights, momenta, d_state, d_entered, d_anchor,
    kept, carried, push_kept, fresh, keep, mine, past, hs, left, right, scale,
    WHICH: tl.constexpr, OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows `hs` of W2 (WHICH = 1) or W3 (2)."""
    V: tl.constexpr = S.block_v
    AT: tl.constexpr = S.d_v * S.hidden + (WHICH - 1) * S.hidden * S.pitch
    vs = tl.arange(0, V)
    dz = to_first_layer(do, anchor, known, mine, vs, hs, S.pairs, WHICH, S, DOT)
    dz_past = dz
    if S.tail > 0:
        dz_past = to_first_layer(do, anchor, known, past, vs, hs, S.tail, WHICH, S, DOT)
    settle_on_features(
        dz, dz_past, u, k, phi, anchor + AT, pushes + AT, pulls, dk, d_pulls, d_degrees, d_last,
        g_weights + AT, g_momentum + AT, g_initial + AT, g_anchors + AT, weights + AT, momenta + AT,
        d_state + AT, d_entered + AT, d_anchor + AT, kept, carried, push_kept, fresh, keep,
        mine, past, hs, left, right, scale, S.hidden, OWN, S, DOT,
    )  # fmt: skip


@triton.jit
def settle_linear(
    k, phi, anchor, u1, d_u1, pushes, pulls, dk, dv, d_pulls, d_degrees, d_last,
    g_weights, g_momentum, g_initial, g_anchors, weights, momenta, d_state, d_entered, d_anchor,
    kept, carried, push_kept, fresh, keep, mine, past, vs, left, right, scale,
    OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Some values of a linear memory."""
    du = linear_errors(phi, anchor, d_u1, pushes, pulls, dv, mine, vs, S.pairs, S, DOT)
    du_past = du
    if S.tail > 0:
        du_past = linear_errors(phi, anchor, d_u1, pushes, pulls, dv, past, vs, S.tail, S, DOT)
    settle_on_features(
        du, du_past, u1, k, phi, anchor, pushes, pulls, dk, d_pulls, d_degrees, d_last,
        g_weights, g_momentum, g_initial, g_anchors, weights, momenta, d_state, d_entered,
        d_anchor, kept, carried, push_kept, fresh, keep, mine, past, vs, left, right, scale,
        S.d_v, OWN, S, DOT,
    )  # fmt: skip


@triton.jit
def settle_block(
    k, phi, anchor, u1, h, u2, u3, d_u1, do, known, pushes, pulls, dk, dv, d_pulls, d_degrees,
    d_last, g_weights, g_momentum, g_initial, g_anchors, weights, momenta, d_state, d_entered,
    d_anchor, kept, carried, push_kept, fresh, keep, mine, past, left, right, scale, member, matrix,
    OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A member's block of one matrix."""
    F: tl.constexpr = S.block_share
    outs = member * F + tl.arange(0, F)
    if S.network == 0:
        settle_linear(
            k, phi, anchor, u1, d_u1, pushes, pulls, dk, dv, d_pulls, d_degrees, d_last,
            g_weights, g_momentum, g_initial, g_anchors, weights, momenta, d_state, d_entered,
            d_anchor, kept, carried, push_kept, fresh, keep, mine, past, outs,
            left, right, scale, OWN, S, DOT,
        )  # fmt: skip
    elif matrix == 0:
        settle_second_matrix(
            u1, h, do, known, g_weights, g_momentum, g_initial, g_anchors, pushes,
            weights, momenta, d_state, d_entered, d_anchor, kept, carried, push_kept,
            fresh, keep, d_last, mine, past, member, OWN, S, DOT,
        )  # fmt: skip
    elif matrix == 1:
        settle_first_layer(
            k, phi, anchor, u2, do, known, pushes, pulls, dk, d_pulls, d_degrees, d_last,
            g_weights, g_momentum, g_initial, g_anchors, weights, momenta, d_state, d_entered,
            d_anchor, kept, carried, push_kept, fresh, keep, mine, past, outs,
            left, right, scale, 1, OWN, S, DOT,
        )  # fmt: skip
    elif S.network == 2:
        settle_first_layer(
            k, phi, anchor, u3, do, known, pushes, pulls, dk, d_pulls, d_degrees, d_last,
            g_weights, g_momentum, g_initial, g_anchors, weights, momenta, d_state, d_entered,
            d_anchor, kept, carried, push_kept, fresh, keep, mine, past, outs,
            left, right, scale, 2, OWN, S, DOT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["piece", "pieces", "rows_and_heads", "heads"])
def settle_kernel(
    k, phi, kept, carried, push_kept, pulls, marks, anchor, d_anchor, weights, momenta,
    u1, h, u2, u3, left, right, scale, d_u1, d_state, d_entered,
    g_weights, g_momentum, g_initial, g_anchors, pushes, do, known, dk, dv, d_pulls, d_last,
    d_degrees, piece, pieces, rows_and_heads, heads,
    OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One block of one matrix a program. `pushes`: gradients that pairs are pulled by, rounded.

    dk, d_pulls, d_last, d_degrees: a share of a sum for each program of a memory; dk none for W1.
    """
    z = (tl.program_id(0) // S.team).to(tl.int64)
    member, matrix = tl.program_id(0) % S.team, tl.program_id(1)
    at = piece * rows_and_heads + z
    slot = member * (S.network + 1) + matrix
    share = (slot * pieces).to(tl.int64) * rows_and_heads + at
    of_keys = slot if S.network == 0 else member * S.network + matrix - 1
    dk += ((of_keys * pieces).to(tl.int64) * rows_and_heads + at) * S.pairs * S.d_k
    d_pulls, d_last = d_pulls + share * S.pulls * S.pairs, d_last + share * 3
    d_degrees += (tl.program_id(0) * (S.network + 1) + matrix) * 4
    size, pairs = at * S.size, at * S.pairs
    wide, deep, whole = pairs * S.d_v, pairs * S.hidden, z * S.size
    pulls, pushes = pulls + pairs * S.pulls, pushes + whole * S.pulls
    k, phi = k + pairs * S.d_k, phi + pairs * S.pitch
    u1, d_u1, dv = u1 + wide, d_u1 + wide, dv + wide
    anchor, d_anchor = anchor + size, d_anchor + whole
    g_weights, g_momentum = g_weights + whole, g_momentum + whole
    g_initial, g_anchors = g_initial + whole, g_anchors + whole
    weights, momenta, d_state, d_entered = (
        weights + size, momenta + size, d_state + size, d_entered + size
    )  # fmt: skip
    do, known = do + z * S.pairs * S.d_v, known + z * 6 * S.pairs * S.hidden
    scale += (z % heads) * S.features
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    LAST: tl.constexpr = S.length - 1
    keep, carry = tl.load(kept + at * S.length + LAST), 1.0
    if S.written and S.terms > 0:
        carry = tl.load(carried + at * S.length + LAST)
    push_kept += at * (1 if S.written else S.pulls)
    mark = tl.load(marks + at)
    mine, past = S.tail + tl.arange(0, LENGTH), tl.arange(0, TAIL)
    settle_block(
        k, phi, anchor, u1, h + deep, u2 + deep, u3 + deep, d_u1, do, known, pushes, pulls, dk, dv,
        d_pulls, d_degrees, d_last, g_weights, g_momentum, g_initial, g_anchors, weights, momenta,
        d_state, d_entered, d_anchor, keep, carry, push_kept, mark & 1, mark & 2, mine, past,
        left, right, scale, member, matrix, OWN, S, DOT,
    )  # fmt: skip
