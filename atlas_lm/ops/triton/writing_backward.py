"""Gradients of writing pieces (`writing`), from the last piece to the first.

As in the forward a tile of the state is visited once a piece: the gradient of what entered is made
from that of what left, from what reading gave it, and from the pairs that saw it as their anchor.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.pairs_backward import (
    begin_keys,
    leave_keys,
    leave_pulls,
    through_branch,
    through_hidden,
    through_sums,
    to_keys,
)
from atlas_lm.ops.triton.tiles import dot, features, put, tile
from atlas_lm.ops.triton.writing import last_kept


@triton.jit
def leave_tile(
    grad, g_weights, g_momentum, g_initial, g_anchors, pushes, weights, momenta, d_state, d_entered,
    d_anchor, kept, carried, push_kept, fresh, keep, outs, ins,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, OWN: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """A tile of the state's gradient, from after a piece to before it; grad: of the anchor.

    `weights`, `momenta`: the state before it in float32, since its product with the gradient is
    the small rest of large terms: a normalised branch does not see how long its weights are.

    Returns the gradients of kept, carried and push_kept, a sum a row. Where the piece began a
    document the gradient goes to the initial weights, and ends there.
    """
    inside = (outs[:, None] < HEIGHT) & (ins[None, :] < WIDTH)
    at = outs[:, None] * WIDTH + ins[None, :]
    gw = tl.load(g_weights + at, mask=inside, other=0.0)
    d_kept = tl.sum(gw * tl.load(weights + at, mask=inside, other=0.0), 1)
    d_carried, d_push_kept = d_kept, d_kept
    if S.terms > 0:
        s = tl.load(momenta + at, mask=inside, other=0.0)
        gs = tl.load(g_momentum + at, mask=inside, other=0.0)
        d_carried, d_push_kept = tl.sum(gw * s, 1), tl.sum(gs * s, 1)
        gs = push_kept * gs + carried * gw
        gs += tl.load(d_entered + at, mask=inside, other=0.0).to(tl.float32)
        gs = tl.where(fresh != 0, 0.0, gs)
        tl.store(g_momentum + at, gs, mask=inside)
        tl.store(pushes + S.size + at, gs.to(pushes.dtype.element_ty), mask=inside)
    gw = kept * gw + tl.load(d_state + at, mask=inside, other=0.0).to(tl.float32)
    if OWN:
        put(d_anchor, grad, outs, ins, HEIGHT, WIDTH)
    else:
        gw += grad
    gw += tl.load(g_anchors + at, mask=inside & (keep != 0), other=0.0)
    begun = tl.load(g_initial + at, mask=inside & (fresh != 0), other=0.0)
    tl.store(g_initial + at, begun + gw, mask=inside & (fresh != 0))
    gw = tl.where(fresh != 0, 0.0, gw)
    tl.store(g_weights + at, gw, mask=inside)
    tl.store(pushes + at, gw.to(pushes.dtype.element_ty), mask=inside)
    return d_kept, d_carried, d_push_kept


@triton.jit
def through_first_matrix(
    dz, dz_past, k, anchor, g_weights, g_momentum, g_initial, g_anchors, pushes, weights, momenta,
    d_state, d_entered, d_anchor, kept, carried, push_kept, fresh, keep,
    grad_k, grad_past, degrees, c0, c1, c2, mine, past, outs, left, right, scale,
    HEIGHT: tl.constexpr, OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Rows `outs` of a matrix on phi, from gradients of what it gave: its tiles and the keys."""
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        w = tile(anchor, outs, ds, HEIGHT, S.pitch)
        f = features(k, mine, ds, S.pairs, left, right, scale, S.d_k, S.features)
        grad = dot(tl.trans(dz), f, DOT)
        grad_k, degrees = to_keys(
            dot(dz, w, DOT), f, grad_k, degrees, k, mine, ds, S.pairs, left, right, scale, S, DOT
        )
        if S.tail > 0:
            f = features(k, past, ds, S.tail, left, right, scale, S.d_k, S.features)
            grad += dot(tl.trans(dz_past), f, DOT)
            grad_past, degrees = to_keys(
                dot(dz_past, w, DOT), f, grad_past, degrees, k, past, ds, S.tail,
                left, right, scale, S, DOT,
            )  # fmt: skip
        a0, a1, a2 = leave_tile(
            grad, g_weights, g_momentum, g_initial, g_anchors, pushes, weights, momenta,
            d_state, d_entered, d_anchor, kept, carried, push_kept, fresh, keep, outs, ds,
            HEIGHT, S.pitch, OWN, S,
        )  # fmt: skip
        c0, c1, c2 = c0 + a0, c1 + a1, c2 + a2
    return grad_k, grad_past, degrees, c0, c1, c2


@triton.jit
def both_branches(
    k, v, anchor, gain, residual, u1, h, u2, u3, d_u1, d_h, d_u2, d_u3, pushes, pulls,
    dk, dv, d_pulls, d_gain, scratch, degrees, mine, past, vs, ks, left, right, scale,
    room, arrived, meeting, member, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back to the branches of the piece's own pairs and of those before it."""
    PULLS: tl.constexpr = S.block_pulls
    grad_k = begin_keys(dk, mine, ks, S.pairs, member, S)
    grad_past = begin_keys(dk, past, ks, S.tail, member, S)
    do, grad_k, grad_pulls, degrees = through_branch(
        k, v, anchor, gain, residual, u1, h, u2, u3, d_u1, d_h, d_u2, d_u3, pushes, pulls, scratch,
        grad_k, dv, d_gain, tl.zeros((mine.shape[0], PULLS), tl.float32), degrees, mine, vs, ks,
        S.pairs, left, right, scale, room, arrived, meeting, member, S, DOT,
    )  # fmt: skip
    leave_pulls(grad_pulls, d_pulls, mine, S.pairs, S)
    do_past = do
    if S.tail > 0:
        do_past, grad_past, grad_pulls, degrees = through_branch(
            k, v, anchor, gain, residual, u1, h, u2, u3, d_u1, d_h, d_u2, d_u3, pushes, pulls,
            scratch, grad_past, dv, d_gain, tl.zeros((past.shape[0], PULLS), tl.float32), degrees,
            past, vs, ks, S.tail, left, right, scale, room, arrived, meeting + 1, member, S, DOT,
        )  # fmt: skip
        leave_pulls(grad_pulls, d_pulls, past, S.tail, S)
    return do, do_past, grad_k, grad_past, degrees


@triton.jit
def deep_backward(
    k, v, anchor, d_anchor, gain, residual, u1, h, u2, u3, d_u1, d_h, d_u2, d_u3, pushes, pulls,
    dk, dv, d_pulls, d_gain, scratch, g_weights, g_momentum, g_initial, g_anchors,
    weights, momenta, d_state, d_entered, kept, carried, push_kept, fresh, keep, degrees,
    mine, past, left, right, scale, room, arrived, meeting, member,
    OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    V: tl.constexpr = S.block_v
    K: tl.constexpr = S.block_k
    F: tl.constexpr = S.block_share
    SHARE: tl.constexpr = S.share
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    vs, ks = tl.arange(0, V), tl.arange(0, K)
    do, do_past, grad_k, grad_past, degrees = both_branches(
        k, v, anchor, gain, residual, u1, h, u2, u3, d_u1, d_h, d_u2, d_u3, pushes, pulls,
        dk, dv, d_pulls, d_gain, scratch, degrees, mine, past, vs, ks, left, right, scale,
        room, arrived, meeting, member, S, DOT,
    )  # fmt: skip
    c0 = tl.zeros((F,), tl.float32)
    c1, c2, b0, b1, b2 = c0, c0, 0.0, 0.0, 0.0
    tl.debug_barrier()
    for start in range(0, SHARE, F):
        hs = member * SHARE + start + tl.arange(0, F)
        grad, dz, d_value = through_hidden(
            do, k, anchor, u1, h, scratch, mine, vs, hs, S.pairs, left, right, scale, S, DOT
        )
        dz_past, value_past = dz, d_value
        if S.tail > 0:
            more, dz_past, value_past = through_hidden(
                do_past, k, anchor, u1, h, scratch, past, vs, hs, S.tail, left, right, scale, S, DOT
            )
            grad += more
        a0, a1, a2 = leave_tile(
            grad, g_weights, g_momentum, g_initial, g_anchors, pushes, weights, momenta,
            d_state, d_entered, d_anchor, kept, carried, push_kept, fresh, keep, vs, hs,
            S.d_v, S.hidden, OWN, S,
        )  # fmt: skip
        b0, b1, b2 = b0 + tl.sum(a0), b1 + tl.sum(a1), b2 + tl.sum(a2)
        grad_k, grad_past, degrees, c0, c1, c2 = through_first_matrix(
            dz, dz_past, k, anchor + W2, g_weights + W2, g_momentum + W2, g_initial + W2,
            g_anchors + W2, pushes + W2, weights + W2, momenta + W2, d_state + W2, d_entered + W2,
            d_anchor + W2, kept, carried, push_kept, fresh, keep, grad_k, grad_past, degrees,
            c0, c1, c2, mine, past, hs, left, right, scale, S.hidden, OWN, S, DOT,
        )  # fmt: skip
        if S.network == 2:
            grad_k, grad_past, degrees, c0, c1, c2 = through_first_matrix(
                d_value, value_past, k, anchor + W3, g_weights + W3, g_momentum + W3,
                g_initial + W3, g_anchors + W3, pushes + W3, weights + W3, momenta + W3,
                d_state + W3, d_entered + W3, d_anchor + W3, kept, carried, push_kept, fresh, keep,
                grad_k, grad_past, degrees, c0, c1, c2, mine, past, hs, left, right, scale,
                S.hidden, OWN, S, DOT,
            )  # fmt: skip
    leave_keys(grad_k, grad_past, dk, mine, past, ks, S)
    return b0 + tl.sum(c0), b1 + tl.sum(c1), b2 + tl.sum(c2), degrees


@triton.jit
def linear_backward(
    k, anchor, d_anchor, u1, d_u1, pushes, pulls, dk, dv, d_pulls,
    g_weights, g_momentum, g_initial, g_anchors, weights, momenta, d_state, d_entered,
    kept, carried, push_kept, fresh, keep, degrees, mine, past, left, right, scale, member,
    OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    F: tl.constexpr = S.block_share
    K: tl.constexpr = S.block_k
    PULLS: tl.constexpr = S.block_pulls
    vs, ks = member * S.share + tl.arange(0, F), tl.arange(0, K)
    grad_k = begin_keys(dk, mine, ks, S.pairs, member, S)
    grad_past = begin_keys(dk, past, ks, S.tail, member, S)
    du, grad_k, grad_pulls, degrees = through_sums(
        k, u1, d_u1, pushes, pulls, grad_k, tl.zeros((mine.shape[0], PULLS), tl.float32), degrees,
        mine, vs, S.pairs, left, right, scale, S, DOT,
    )  # fmt: skip
    put(dv, -du, mine, vs, S.pairs, S.d_v)
    leave_pulls(grad_pulls, d_pulls, mine, S.pairs, S)
    du_past = du
    if S.tail > 0:
        du_past, grad_past, grad_pulls, degrees = through_sums(
            k, u1, d_u1, pushes, pulls, grad_past, tl.zeros((past.shape[0], PULLS), tl.float32),
            degrees, past, vs, S.tail, left, right, scale, S, DOT,
        )  # fmt: skip
        put(dv, -du_past, past, vs, S.tail, S.d_v)
        leave_pulls(grad_pulls, d_pulls, past, S.tail, S)
    if S.objective == 1:
        du, du_past = tl.zeros_like(du), tl.zeros_like(du_past)
    c0 = tl.zeros((F,), tl.float32)
    tl.debug_barrier()
    grad_k, grad_past, degrees, c0, c1, c2 = through_first_matrix(
        du, du_past, k, anchor, g_weights, g_momentum, g_initial, g_anchors, pushes, weights,
        momenta, d_state, d_entered, d_anchor, kept, carried, push_kept, fresh, keep,
        grad_k, grad_past, degrees, c0, c0, c0, mine, past, vs, left, right, scale, S.d_v, OWN, S,
        DOT,
    )  # fmt: skip
    leave_keys(grad_k, grad_past, dk, mine, past, ks, S)
    return tl.sum(c0), tl.sum(c1), tl.sum(c2), degrees


@triton.jit
def piece_backward(
    k, v, anchor, d_anchor, gain, residual, u1, h, u2, u3, d_u1, d_h, d_u2, d_u3, pushes, pulls,
    dk, dv, d_pulls, d_gain, scratch, g_weights, g_momentum, g_initial, g_anchors,
    weights, momenta, d_state, d_entered, kept, carried, push_kept, fresh, keep, degrees,
    mine, past, left, right, scale, room, arrived, meeting, member,
    OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of kept, carried and push_kept, and of phi by degree so far."""
    if S.network == 0:
        found = linear_backward(
            k, anchor, d_anchor, u1, d_u1, pushes, pulls, dk, dv, d_pulls, g_weights, g_momentum,
            g_initial, g_anchors, weights, momenta, d_state, d_entered, kept, carried, push_kept,
            fresh, keep, degrees, mine, past, left, right, scale, member, OWN, S, DOT,
        )  # fmt: skip
    else:
        found = deep_backward(
            k, v, anchor, d_anchor, gain, residual, u1, h, u2, u3, d_u1, d_h, d_u2, d_u3, pushes,
            pulls, dk, dv, d_pulls, d_gain, scratch, g_weights, g_momentum, g_initial, g_anchors,
            weights, momenta, d_state, d_entered, kept, carried, push_kept, fresh, keep, degrees,
            mine, past, left, right, scale, room, arrived, meeting, member, OWN, S, DOT,
        )  # fmt: skip
    return found


@triton.jit(do_not_specialize=["pieces", "rows_and_heads", "heads"])
def write_backward_kernel(
    k, v, kept, carried, push_kept, pulls, marks, state, weights, momenta, own_anchor, d_own_anchor,
    gain, residual, u1, h, u2, u3, left, right, scale,
    d_state, d_entered, d_u1, d_h, d_u2, d_u3,
    g_weights, g_momentum, g_initial, g_anchors, pushes,
    dk, dv, d_pulls, d_last, d_gain, d_degrees, scratch, room, arrived,
    pieces, rows_and_heads, heads, OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """All pieces of one row and head. `pushes`: g_weights and g_momentum, rounded.

    dk, d_pulls, d_last, d_degrees: a share of a sum for each member of the team.
    """
    z = (tl.program_id(0) // S.team).to(tl.int64)
    member = tl.program_id(0) % S.team
    room, arrived = room + z * 4 * S.team * S.pairs * S.d_v, arrived + z
    MEETINGS: tl.constexpr = 2 if S.tail > 0 else 1
    whole = (member * pieces).to(tl.int64) * rows_and_heads
    dk, d_pulls = dk + whole * S.pairs * S.d_k, d_pulls + whole * S.pairs * S.pulls
    d_last, d_degrees = d_last + whole * 3, d_degrees + tl.program_id(0) * 4
    head = z % heads
    g_weights, g_momentum = g_weights + z * S.size, g_momentum + z * S.size
    g_initial, g_anchors = g_initial + z * S.size, g_anchors + z * S.size
    pushes += z * S.pulls * S.size
    gain += head * S.d_v
    residual += head * S.d_v * S.d_k
    scale += head * S.features
    d_gain += z * S.d_v
    scratch += tl.program_id(0).to(tl.int64) * S.pairs * (4 * S.hidden + S.d_v)
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    mine, past = S.tail + tl.arange(0, LENGTH), tl.arange(0, TAIL)
    degrees = tl.zeros((4,), tl.float32)
    for back in range(pieces):
        at = (pieces - 1 - back) * rows_and_heads + z
        size, pairs = at * S.size, at * S.pairs
        anchor = own_anchor + z * S.size if OWN else state + size
        d_anchor = d_own_anchor + z * S.size if OWN else g_weights
        wide, pull = pairs * S.d_v, pairs * S.pulls
        mark = tl.load(marks + at)
        # 0, which the compiler cannot know: else it makes every address before the loop and spills
        still = (mark >> 2) * 16
        keep, carry, push_keep = last_kept(kept, carried, push_kept, at, S)
        deep = pairs * S.hidden
        d0, d1, d2, degrees = piece_backward(
            k + pairs * S.d_k, v + wide, anchor, d_anchor, gain, residual,
            u1 + wide, h + deep, u2 + deep, u3 + deep,
            d_u1 + wide, d_h + deep, d_u2 + deep, d_u3 + deep, pushes + still, pulls + pull,
            dk + pairs * S.d_k, dv + wide, d_pulls + pull, d_gain, scratch + still,
            g_weights + still, g_momentum + still, g_initial + still, g_anchors + still,
            weights + size, momenta + size, d_state + size, d_entered + size,
            keep, carry, push_keep, mark & 1, mark & 2, degrees, mine, past,
            left, right, scale, room, arrived, back * MEETINGS + 1, member, OWN, S, DOT,
        )  # fmt: skip
        tl.store(d_last + at * 3, d0)
        tl.store(d_last + at * 3 + 1, d1)
        tl.store(d_last + at * 3 + 2, d2)
        tl.debug_barrier()
    if S.features != S.d_k:
        at_degrees = d_degrees + tl.arange(0, 4)
        tl.store(at_degrees, tl.load(at_degrees) + degrees)
