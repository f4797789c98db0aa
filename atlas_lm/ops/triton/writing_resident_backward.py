"""Gradients of writing linear memories, whose values do not see each other, in two launches.

    resident_backward_kernel   the state, piece by piece from the last: some of a memory's values a
                               program, whose gradients stay in registers, tuples of tiles
                               (`state_tiles`); and the values
    linear_keys_kernel         keys and pulls, of all pieces at once

The first leaves for the second what the pairs of each piece are pulled by: the gradient of the
state after it, rounded. Deep memories take three launches a piece (`writing_backward`).
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.pairs_backward import leave_pulls, pull, push_to_x, to_keys
from atlas_lm.ops.triton.state_tiles import (
    added,
    load_features,
    load_tiles,
    place,
    rounded,
    scaled,
    store_tiles,
)
from atlas_lm.ops.triton.tiles import dot, put, tile
from atlas_lm.ops.triton.writing import last_kept


@triton.jit
def pulled(f, du, push, pulls, j, rows, height, S: tl.constexpr, DOT: tl.constexpr):
    """du, and what the matrix that u phi^T was pushed into as number j gives u."""
    BLOCKS: tl.constexpr = S.blocks
    back = tl.zeros((du.shape[0], du.shape[1]), tl.float32)
    for b in tl.static_range(BLOCKS):
        back += dot(f[b], tl.trans(push[b]), DOT)
    return du + pull(pulls, j, rows, height, S) * back


@triton.jit
def through_errors(
    gw, gs, phi, d_u1, dv, pulls, rows, vs, height, S: tl.constexpr, DOT: tl.constexpr
):
    """Gradients of the values of some pairs, and of a block of the anchor by each block of
    features. `gw`, `gs`: the pushes, rounded."""
    BLOCKS: tl.constexpr = S.blocks
    f, du = load_features(phi, rows, height, S), tile(d_u1, rows, vs, height, S.d_v)
    du = pulled(f, du.to(tl.float32), gw, pulls, 0, rows, height, S, DOT)
    if S.terms > 0:
        du = pulled(f, du, gs, pulls, 1, rows, height, S, DOT)
    put(dv, -du, rows, vs, height, S.d_v)
    made = ()
    if S.objective == 0:
        turned = tl.trans(du.to(DOT))
        for b in tl.static_range(BLOCKS):
            made += (dot(turned, f[b], DOT),)
    return made


@triton.jit
def over_step(
    gw, gs, weights, momenta, d_state, d_entered, kept, carried, push_kept, d_last, member,
    S: tl.constexpr,
):  # fmt: skip
    """The gradients of weights and momentum from after a piece's step to before it, but for what
    the anchor gets. What kept, carried and push_kept get of it goes to `d_last`."""
    BLOCKS: tl.constexpr = S.blocks
    of_kept, of_carried, of_push_kept = 0.0, 0.0, 0.0
    new_w, new_s = (), ()
    for b in tl.static_range(BLOCKS):
        at, inside = place(b, member, S)
        w = tl.load(weights + at, mask=inside, other=0.0)
        read = tl.load(d_state + at, mask=inside, other=0.0).to(tl.float32)
        of_kept += tl.sum(gw[b] * w)
        new_w += (kept * gw[b] + read,)
        if S.terms > 0:
            s = tl.load(momenta + at, mask=inside, other=0.0).to(tl.float32)
            entered = tl.load(d_entered + at, mask=inside, other=0.0).to(tl.float32)
            of_carried += tl.sum(gw[b] * s)
            of_push_kept += tl.sum(gs[b] * s)
            new_s += (push_kept * gs[b] + carried * gw[b] + entered,)
    tl.store(d_last, of_kept)
    tl.store(d_last + 1, of_carried)
    tl.store(d_last + 2, of_push_kept)
    return new_w, new_s


@triton.jit
def leave_pushes(d_state, d_entered, gw, gs, member, S: tl.constexpr):
    """In the place of what reading gave the state, which has been taken."""
    tl.debug_barrier()
    store_tiles(d_state, gw, member, S)
    if S.terms > 0:
        store_tiles(d_entered, gs, member, S)


@triton.jit
def where_marked(gw, gs, g_initial, g_anchors, fresh, keep, member, S: tl.constexpr):
    """With the gradient of an anchor that was kept; to the initial weights, where a document began,
    and there it ends."""
    BLOCKS: tl.constexpr = S.blocks
    new_w = ()
    for b in tl.static_range(BLOCKS):
        at, inside = place(b, member, S)
        g = gw[b] + tl.load(g_anchors + at, mask=inside & (keep != 0), other=0.0)
        begun = inside & (fresh != 0)
        tl.store(g_initial + at, tl.load(g_initial + at, mask=begun, other=0.0) + g, mask=begun)
        new_w += (tl.where(fresh != 0, 0.0, g),)
    if S.terms > 0:
        gs = scaled(gs, tl.where(fresh != 0, 0.0, 1.0), S)
    return new_w, gs


@triton.jit
def back_over_piece(
    gw, gs, phi, d_u1, dv, weights, momenta, d_state, d_entered, d_anchor, g_initial, g_anchors,
    pulls, d_last, kept, carried, push_kept, mark, member, still,
    OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """From after a piece to before it: the gradients of weights and momentum."""
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    F: tl.constexpr = S.block_share
    mine, past = S.tail + still + tl.arange(0, LENGTH), still + tl.arange(0, TAIL)
    vs = member * S.share + tl.arange(0, F)
    by_weights = rounded(gw, S, DOT)
    by_momentum = by_weights
    if S.terms > 0:
        by_momentum = rounded(gs, S, DOT)
    gw, gs = over_step(
        gw, gs, weights, momenta, d_state, d_entered, kept, carried, push_kept, d_last, member, S
    )
    leave_pushes(d_state, d_entered, by_weights, by_momentum, member, S)
    grad = through_errors(by_weights, by_momentum, phi, d_u1, dv, pulls, mine, vs, S.pairs, S, DOT)
    if S.tail > 0:
        more = through_errors(
            by_weights, by_momentum, phi, d_u1, dv, pulls, past, vs, S.tail, S, DOT
        )
        if S.objective == 0:
            grad = added(grad, more, S)
    if S.objective == 0:
        if OWN:
            store_tiles(d_anchor, grad, member, S)
        else:
            gw = added(gw, grad, S)
    if mark != 0:
        gw, gs = where_marked(gw, gs, g_initial, g_anchors, mark & 1, mark & 2, member, S)
    return gw, gs


@triton.jit(do_not_specialize=["pieces", "rows_and_heads"])
def resident_backward_kernel(
    phi, kept, carried, push_kept, pulls, marks, d_anchor, weights, momenta, d_u1,
    d_state, d_entered, g_weights, g_momentum, g_initial, g_anchors, dv, d_last,
    pieces, rows_and_heads, OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """All pieces of a segment. `d_state`, `d_entered`: what reading gave the state before a piece,
    and then the pushes of that piece. d_last: a share of a sum for each program of a memory.

    With an anchor of its own (OWN) there is one piece.
    """
    z = (tl.program_id(0) // S.team).to(tl.int64)
    member = tl.program_id(0) % S.team
    whole = z * S.size
    g_initial, g_anchors, d_anchor = g_initial + whole, g_anchors + whole, d_anchor + whole
    gw, gs = load_tiles(g_weights + whole, member, S), ()
    if S.terms > 0:
        gs = load_tiles(g_momentum + whole, member, S)
    for i in range(pieces):
        n = pieces - 1 - i
        at = n * rows_and_heads + z
        mark = tl.load(marks + at)
        # 0, which the compiler cannot know: else it makes every offset before the loop and spills
        still = n >> 30
        size, pairs = at * S.size, at * S.pairs
        last = d_last + ((member * pieces).to(tl.int64) * rows_and_heads + at) * 3
        keep, carry, push_keep = last_kept(kept, carried, push_kept, at, S)
        gw, gs = back_over_piece(
            gw, gs, phi + pairs * S.pitch, d_u1 + pairs * S.d_v, dv + pairs * S.d_v,
            weights + size, momenta + size, d_state + size, d_entered + size, d_anchor,
            g_initial, g_anchors, pulls + pairs * S.pulls, last, keep, carry, push_keep, mark,
            member + still, still, OWN, S, DOT,
        )  # fmt: skip
    store_tiles(g_weights + whole, gw, member, S)
    if S.terms > 0:
        store_tiles(g_momentum + whole, gs, member, S)


@triton.jit
def keys_of_block(
    f, u, du, anchor, by_weights, by_momentum, pulls, grad_pulls, rows, vs, ds, height,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The gradient of a block of features: as what the anchor saw, and as what was pushed."""
    push = tile(by_weights, vs, ds, S.d_v, S.pitch)
    df = tl.zeros((rows.shape[0], ds.shape[0]), tl.float32)
    if S.objective == 0:
        df += dot(du, tile(anchor, vs, ds, S.d_v, S.pitch), DOT)
    df, grad_pulls = push_to_x(u, f, df, grad_pulls, push, pulls, 0, rows, height, S, DOT)
    if S.terms > 0:
        push = tile(by_momentum, vs, ds, S.d_v, S.pitch)
        df, grad_pulls = push_to_x(u, f, df, grad_pulls, push, pulls, 1, rows, height, S, DOT)
    return df, grad_pulls


@triton.jit
def keys_of_pairs(
    k, phi, u1, dv, anchor, by_weights, by_momentum, pulls, dk, d_pulls, degrees, rows, height,
    left, right, scale, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Adds to the gradient of some keys; leaves that of their pulls. Returns sums by degree."""
    V: tl.constexpr = S.block_v
    K: tl.constexpr = S.block_k
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    PULLS: tl.constexpr = S.block_pulls
    vs, ks = tl.arange(0, V), tl.arange(0, K)
    u, du = tile(u1, rows, vs, height, S.d_v), -tile(dv, rows, vs, height, S.d_v)
    grad_pulls = tl.zeros((rows.shape[0], PULLS), tl.float32)
    grad_k = tile(dk, rows, ks, height, S.d_k)
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        f = tile(phi, rows, ds, height, S.pitch).to(tl.float32)
        df, grad_pulls = keys_of_block(
            f, u, du, anchor, by_weights, by_momentum, pulls, grad_pulls, rows, vs, ds, height,
            S, DOT,
        )  # fmt: skip
        if S.features == S.d_k:
            put(dk, df + tile(dk, rows, ds, height, S.d_k), rows, ds, height, S.d_k)
        else:
            grad_k, degrees = to_keys(
                df, f, grad_k, degrees, k, rows, ds, height, left, right, scale, S, DOT
            )
    if S.features != S.d_k:
        put(dk, grad_k, rows, ks, height, S.d_k)
    leave_pulls(grad_pulls, d_pulls, rows, height, S)
    return degrees


@triton.jit(do_not_specialize=["rows_and_heads", "heads"])
def linear_keys_kernel(
    k, phi, u1, anchor, d_state, d_entered, pulls, left, right, scale, dv, dk, d_pulls, d_degrees,
    rows_and_heads, heads, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One piece of one memory a program. dk and d_degrees `[8]`, last: adds to what reading gave.
    d_state, d_entered: the pushes."""
    z = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * rows_and_heads + z
    size, pairs = at * S.size, at * S.pairs
    k, phi, dk = k + pairs * S.d_k, phi + pairs * S.pitch, dk + pairs * S.d_k
    u1, dv, anchor = u1 + pairs * S.d_v, dv + pairs * S.d_v, anchor + size
    pulls, d_pulls = pulls + pairs * S.pulls, d_pulls + pairs * S.pulls
    d_state, d_entered, scale = d_state + size, d_entered + size, scale + (z % heads) * S.features
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    degrees = tl.zeros((4,), tl.float32)
    degrees = keys_of_pairs(
        k, phi, u1, dv, anchor, d_state, d_entered, pulls, dk, d_pulls, degrees,
        S.tail + tl.arange(0, LENGTH), S.pairs, left, right, scale, S, DOT,
    )  # fmt: skip
    if S.tail > 0:
        degrees = keys_of_pairs(
            k, phi, u1, dv, anchor, d_state, d_entered, pulls, dk, d_pulls, degrees,
            tl.arange(0, TAIL), S.tail, left, right, scale, S, DOT,
        )  # fmt: skip
    if S.features != S.d_k:
        of_degrees = d_degrees + at * 8 + 4 + tl.arange(0, 4)
        tl.store(of_degrees, tl.load(of_degrees) + degrees)
