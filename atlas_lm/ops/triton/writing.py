"""Write pieces into memories, forward: gradients at the anchor, then new weights and momentum.

A program walks through all pieces of a row and head, for gd and momentum, with its share of the
memory (`team`). A tile of the state is visited once a piece: read, moved by the pairs, and written
for the next piece.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.pairs import branch_errors, hidden_factors, linear_factors
from atlas_lm.ops.triton.tiles import dot, features


@triton.jit
def outer_sum(u, x, weight, DOT: tl.constexpr):
    """sum_i weight_i u_i x_i^T; of one pair without a product, which takes 16."""
    x = weight[:, None] * x
    return tl.trans(u) * x if u.shape[0] == 1 else dot(tl.trans(u), x, DOT)


@triton.jit
def write_tile(
    weights, momentum, states, entered, initial, anchors, u, x, u_past, x_past,
    share, push, share_past, push_past, kept, carried, push_kept, fresh, keep, ahead, on,
    outs, ins, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile `[outs, ins]` of a matrix after a piece: what is kept, and the sums over the pairs.

    Written for the next piece, weights `on` places on; if that begins a document (fresh) it starts
    anew.
    `states`, `entered`: weights and momentum rounded, `ahead` places on; `anchors`: where to keep
    the weights a chunk left open began with.
    """
    inside = (outs[:, None] < HEIGHT) & (ins[None, :] < WIDTH)
    at = outs[:, None] * WIDTH + ins[None, :]
    then = at + on
    new = kept * tl.load(weights + at, mask=inside, other=0.0)
    if S.terms > 0:
        s = tl.load(momentum + at, mask=inside, other=0.0)
        new += carried * s
        pushed = push_kept * s + outer_sum(u, x, push, DOT)
        if S.tail > 0:
            pushed += outer_sum(u_past, x_past, push_past, DOT)
        pushed = tl.where(fresh != 0, 0.0, pushed)
        tl.store(momentum + at, pushed, mask=inside)
        tl.store(entered + at + ahead, pushed.to(entered.dtype.element_ty), mask=inside)
    new += outer_sum(u, x, share, DOT)
    if S.tail > 0:
        new += outer_sum(u_past, x_past, share_past, DOT)
    begun = tl.load(initial + at, mask=inside & (fresh != 0), other=0.0)
    new = tl.where(fresh != 0, begun, new)
    tl.store(weights + then, new, mask=inside)
    tl.store(states + at + ahead, new.to(states.dtype.element_ty), mask=inside)
    tl.store(anchors + at, new, mask=inside & (keep != 0))


@triton.jit
def write_first_layer(
    weights, momentum, states, entered, initial, anchors, k, u, u_past,
    share, push, share_past, push_past, kept, carried, push_kept, fresh, keep, ahead, on,
    mine, past, outs, left, right, scale,
    HEIGHT: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The rows `outs` of a matrix on the features of the keys."""
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    for d in range(0, D, STEP):
        ds = d + tl.arange(0, STEP)
        f = features(k, mine, ds, S.pairs, left, right, scale, S.d_k, S.features)
        f_past = f
        if S.tail > 0:
            f_past = features(k, past, ds, S.tail, left, right, scale, S.d_k, S.features)
        write_tile(
            weights, momentum, states, entered, initial, anchors, u, f, u_past, f_past,
            share, push, share_past, push_past, kept, carried, push_kept, fresh, keep, ahead, on,
            outs, ds, HEIGHT, S.pitch, S, DOT,
        )  # fmt: skip


@triton.jit
def write_deep(
    weights, momentum, states, entered, initial, anchors, k, v, anchor, gain, residual,
    u1, h, u2, u3, share, push, share_past, push_past, kept, carried, push_kept,
    fresh, keep, ahead, on, mine, past, left, right, scale, room, arrived, meeting, member,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A piece into an mlp or gated mlp, block by block of its hidden layer."""
    V: tl.constexpr = S.block_v
    F: tl.constexpr = S.block_share
    SHARE: tl.constexpr = S.share
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    vs = tl.arange(0, V)
    e, h0, h1, h2 = branch_errors(
        k, v, anchor, gain, residual, u1, mine, vs, S.pairs, left, right, scale,
        room, arrived, meeting, member, S, DOT,
    )  # fmt: skip
    e_past, p0, p1, p2 = e, h0, h1, h2
    if S.tail > 0:
        e_past, p0, p1, p2 = branch_errors(
            k, v, anchor, gain, residual, u1, past, vs, S.tail, left, right, scale,
            room, arrived, meeting + 1, member, S, DOT,
        )  # fmt: skip
    for start in range(0, SHARE, F):
        hs = member * SHARE + start + tl.arange(0, F)
        x, of_z, of_value = hidden_factors(
            e, h0, h1, h2, k, anchor, h, u2, u3, mine, vs, hs, S.pairs, left, right, scale, S, DOT
        )
        x_past, past_z, past_value = x, of_z, of_value
        if S.tail > 0:
            x_past, past_z, past_value = hidden_factors(
                e_past, p0, p1, p2, k, anchor, h, u2, u3, past, vs, hs, S.tail,
                left, right, scale, S, DOT,
            )  # fmt: skip
        write_tile(
            weights, momentum, states, entered, initial, anchors, e, x, e_past, x_past,
            share, push, share_past, push_past, kept, carried, push_kept, fresh, keep, ahead, on,
            vs, hs, S.d_v, S.hidden, S, DOT,
        )  # fmt: skip
        write_first_layer(
            weights + W2, momentum + W2, states + W2, entered + W2, initial + W2, anchors + W2,
            k, of_z, past_z, share, push, share_past, push_past, kept, carried, push_kept,
            fresh, keep, ahead, on, mine, past, hs, left, right, scale, S.hidden, S, DOT,
        )  # fmt: skip
        if S.network == 2:
            write_first_layer(
                weights + W3, momentum + W3, states + W3, entered + W3, initial + W3, anchors + W3,
                k, of_value, past_value, share, push, share_past, push_past, kept, carried,
                push_kept, fresh, keep, ahead, on, mine, past, hs, left, right, scale, S.hidden,
                S, DOT,
            )  # fmt: skip


@triton.jit
def write_linear(
    weights, momentum, states, entered, initial, anchors, k, v, anchor,
    u1, share, push, share_past, push_past, kept, carried, push_kept,
    fresh, keep, ahead, on, mine, past, left, right, scale, member,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A piece into a linear memory: some of its values."""
    F: tl.constexpr = S.block_share
    vs = member * S.share + tl.arange(0, F)
    u = linear_factors(k, v, anchor, u1, mine, vs, S.pairs, left, right, scale, S, DOT)
    u_past = u
    if S.tail > 0:
        u_past = linear_factors(k, v, anchor, u1, past, vs, S.tail, left, right, scale, S, DOT)
    write_first_layer(
        weights, momentum, states, entered, initial, anchors, k, u, u_past,
        share, push, share_past, push_past, kept, carried, push_kept, fresh, keep, ahead, on,
        mine, past, vs, left, right, scale, S.d_v, S, DOT,
    )  # fmt: skip


@triton.jit
def last_kept(kept, carried, push_kept, at, S: tl.constexpr):
    """Of the state before a piece, in that after it: weights, momentum in weights, momentum."""
    LAST: tl.constexpr = S.length - 1
    keep, carry, push_keep = tl.load(kept + at * S.length + LAST), 1.0, 1.0
    if S.terms > 0:
        carry, push_keep = tl.load(carried + at * S.length + LAST), tl.load(push_kept + at)
    return keep, carry, push_keep


@triton.jit
def last_shares(share, push, at, mine, past, S: tl.constexpr):
    """Of the pairs of a piece, in the weights and the momentum after it: its own, those before."""
    LAST: tl.constexpr = S.length - 1
    last, pairs = share + (at * S.length + LAST) * S.pairs, at * S.pairs
    now = tl.load(last + mine, mask=mine < S.pairs, other=0.0)
    now_past = tl.load(last + past, mask=past < S.tail, other=0.0)
    push_now, push_past = now, now_past
    if S.terms > 0:
        push_now = tl.load(push + pairs + mine, mask=mine < S.pairs, other=0.0)
        push_past = tl.load(push + pairs + past, mask=past < S.tail, other=0.0)
    return now, push_now, now_past, push_past


@triton.jit(do_not_specialize=["pieces", "marked", "rows_and_heads", "heads"])
def write_kernel(
    k, v, left, right, scale, share, push, kept, carried, push_kept, marks,
    weights, momentum, states, entered, own_anchor, initial, anchors, gain, residual,
    u1, h, u2, u3, room, arrived, pieces, marked, rows_and_heads, heads,
    OWN: tl.constexpr, KEEP: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """All pieces of one row and head, from state n to state n + 1 of weights and momentum.

    `room`, `arrived`: where a team meets.

    KEEP: all weights, else only the last, in one place, as the momentum always; the rounded ones
    are kept.
    `own_anchor`: used for the first piece if OWN. `marked`: pieces of which the marks are known,
    those of later calls too.
    """
    z = (tl.program_id(0) // S.team).to(tl.int64)
    member = tl.program_id(0) % S.team
    room, arrived = room + z * 4 * S.team * S.pairs * S.d_v, arrived + z
    MEETINGS: tl.constexpr = 2 if S.tail > 0 else 1
    head = z % heads
    anchors += z * S.size
    initial += head * S.size
    gain += head * S.d_v
    residual += head * S.d_v * S.d_k
    scale += head * S.features
    ahead = rows_and_heads.to(tl.int64) * S.size
    on = ahead if KEEP else ahead * 0
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    mine, past = S.tail + tl.arange(0, LENGTH), tl.arange(0, TAIL)
    for n in range(pieces):
        at = n * rows_and_heads + z
        size = at * S.size
        mark = tl.load(marks + at + rows_and_heads, mask=n + 1 < marked, other=0)
        # 0, which the compiler cannot know: else it makes every address before the loop and spills
        still = (mark >> 2) * 16
        here = z * S.size + still
        wide = size if KEEP else here
        anchor = own_anchor + z * S.size if OWN else states + size
        pairs = at * S.pairs
        keys, values, us = k + pairs * S.d_k, v + pairs * S.d_v, u1 + pairs * S.d_v
        now, push_now, now_past, push_past = last_shares(share, push, at, mine, past, S)
        keep, carry, push_keep = last_kept(kept, carried, push_kept, at, S)
        if S.network == 0:
            write_linear(
                weights + wide, momentum + here, states + size, entered + size, initial + still,
                anchors + still, keys, values, anchor, us, now, push_now, now_past, push_past,
                keep, carry, push_keep, mark & 1, mark & 2, ahead, on, mine, past,
                left, right, scale, member, S, DOT,
            )  # fmt: skip
        else:
            hidden = pairs * S.hidden
            write_deep(
                weights + wide, momentum + here, states + size, entered + size, initial + still,
                anchors + still, keys, values, anchor, gain, residual, us, h + hidden, u2 + hidden,
                u3 + hidden, now, push_now, now_past, push_past, keep, carry, push_keep,
                mark & 1, mark & 2, ahead, on, mine, past, left, right, scale,
                room, arrived, n * MEETINGS + 1, member, S, DOT,
            )  # fmt: skip
        tl.debug_barrier()
