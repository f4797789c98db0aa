"""Write pieces into memories, forward: gradients at the anchor, then new weights and momentum.

gd and momentum: one program walks through all pieces of a row and head; the state stays in the
cache. Muon: one launch for each of its phases, since its steps are made by other programs.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.pairs import all_factors
from atlas_lm.ops.triton.tiles import dot, features, put, tile


@triton.jit
def settle(
    weights, momentum, states, entered, initial, anchors, new, pushed, rows, columns, height,
    width, fresh, keep, more, HAS_MOMENTUM: tl.constexpr,
):  # fmt: skip
    """Write a tile of the state after a piece; before the next one, if it begins a document, anew.

    `states`, `entered`: what the next piece starts from, rounded; `anchors`: where to keep the
    weights that a chunk left open was begun with.
    """
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    at = rows[:, None] * width + columns[None, :]
    begun = tl.load(initial + at, mask=inside & (fresh != 0), other=0.0)
    new = tl.where(fresh != 0, begun, new)
    tl.store(weights + at, new, mask=inside)
    tl.store(states + at, new.to(states.dtype.element_ty), mask=inside & (more != 0))
    tl.store(anchors + at, new, mask=inside & (keep != 0))
    if HAS_MOMENTUM:
        pushed = tl.where(fresh != 0, 0.0, pushed)
        tl.store(momentum + at, pushed, mask=inside)
        tl.store(entered + at, pushed.to(entered.dtype.element_ty), mask=inside & (more != 0))


@triton.jit
def outer_sum(u, x, weight, DOT: tl.constexpr):
    """sum_i weight_i u_i x_i^T"""
    return dot(tl.trans(u), weight[:, None] * x.to(tl.float32), DOT)


@triton.jit
def add_pairs(
    new, pushed, u, x, share, push, rows, height, outs, ins, left, right, scale,
    OUT: tl.constexpr, IN: tl.constexpr, PHI: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The sums over the pairs `rows`, added to a tile of the weights and of the momentum."""
    v = tile(u, rows, outs, height, OUT)
    if PHI:
        g = features(x, rows, ins, height, left, right, scale, S.d_k, S.features)
    else:
        g = tile(x, rows, ins, height, IN).to(tl.float32)
    new += outer_sum(v, g, tl.load(share + rows, mask=rows < height, other=0.0), DOT)
    if S.terms > 0:
        pushed += outer_sum(v, g, tl.load(push + rows, mask=rows < height, other=0.0), DOT)
    return new, pushed


@triton.jit
def write_tile(
    weights, momentum, states, entered, initial, anchors, u, x, share, push,
    kept, carried, push_kept, fresh, keep, more, outs, ins, left, right, scale,
    OUT: tl.constexpr, IN: tl.constexpr, WIDTH: tl.constexpr, PHI: tl.constexpr,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One tile `[outs, ins]` of a matrix: what is kept, and the sum over the pairs.

    x: the factors h, or the keys if PHI.
    """
    TAIL: tl.constexpr = S.block_tail
    LENGTH: tl.constexpr = S.block_length
    new = kept * tile(weights, outs, ins, OUT, WIDTH)
    pushed = new
    if S.terms > 0:
        s = tile(momentum, outs, ins, OUT, WIDTH)
        new += carried * s
        pushed = push_kept * s
    if S.tail > 0:
        new, pushed = add_pairs(
            new, pushed, u, x, share, push, tl.arange(0, TAIL), S.tail, outs, ins,
            left, right, scale, OUT, IN, PHI, S, DOT,
        )  # fmt: skip
    new, pushed = add_pairs(
        new, pushed, u, x, share, push, S.tail + tl.arange(0, LENGTH), S.pairs, outs, ins,
        left, right, scale, OUT, IN, PHI, S, DOT,
    )  # fmt: skip
    settle(
        weights, momentum, states, entered, initial, anchors, new, pushed, outs, ins, OUT, WIDTH,
        fresh, keep, more, S.terms > 0,
    )  # fmt: skip


@triton.jit
def write_all(
    weights, momentum, states, entered, initial, anchors, k, u1, h, u2, u3, share, push,
    kept, carried, push_kept, fresh, keep, more, left, right, scale,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Every tile of the weights after a piece."""
    V: tl.constexpr = S.block_v
    F: tl.constexpr = S.block_f
    D: tl.constexpr = S.features
    STEP: tl.constexpr = S.block_d
    ROWS: tl.constexpr = S.d_v if S.network == 0 else S.hidden
    BLOCK: tl.constexpr = V if S.network == 0 else F
    vs = tl.arange(0, V)
    for start in range(0, ROWS, BLOCK):
        hs = start + tl.arange(0, BLOCK)
        if S.network != 0:
            write_tile(
                weights, momentum, states, entered, initial, anchors, u1, h, share, push,
                kept, carried, push_kept, fresh, keep, more, vs, hs, left, right, scale,
                S.d_v, S.hidden, S.hidden, False, S, DOT,
            )  # fmt: skip
        for d in range(0, D, STEP):
            ds = d + tl.arange(0, STEP)
            for number in tl.static_range(2):
                if number < S.network or (number == 0 and S.network == 0):
                    skip = S.d_v * S.hidden + number * S.hidden * S.pitch if S.network != 0 else 0
                    u = u1 if S.network == 0 else (u2 if number == 0 else u3)
                    write_tile(
                        weights + skip, momentum + skip, states + skip, entered + skip,
                        initial + skip, anchors + skip, u, k, share, push,
                        kept, carried, push_kept, fresh, keep, more, hs, ds, left, right, scale,
                        ROWS, S.features, S.pitch, True, S, DOT,
                    )  # fmt: skip


@triton.jit
def write_kernel(
    k, v, share, push, kept, carried, push_kept, marks,
    weights, momentum, states, entered, own_anchor, initial, anchors, gain, residual,
    u1, h, u2, u3, left, right, scale, pieces, marked, rows_and_heads,
    OWN: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """All pieces of one row and head. `own_anchor`: used for the first piece if OWN.

    `marked`: pieces of which the marks are known, those of later calls too.
    """
    z = tl.program_id(0).to(tl.int64)
    head = z % S.heads
    weights += z * S.size
    momentum += z * S.size
    anchors += z * S.size
    initial += head * S.size
    gain += head * S.d_v
    residual += head * S.d_v * S.d_k
    scale += head * S.features
    LAST: tl.constexpr = S.length - 1
    for n in range(pieces):
        at = n * rows_and_heads + z
        after = at + rows_and_heads
        if OWN:
            anchor = own_anchor + z * S.size
        else:
            anchor = states + at * S.size
        factors_at = at * S.pairs
        us, hs = u1 + factors_at * S.d_v, h + factors_at * S.hidden
        u2s, u3s = u2 + factors_at * S.hidden, u3 + factors_at * S.hidden
        keys = k + factors_at * S.d_k
        all_factors(
            keys, v + factors_at * S.d_v, anchor, gain, residual, us, hs, u2s, u3s,
            left, right, scale, S, DOT,
        )  # fmt: skip
        tl.debug_barrier()
        more = (n + 1 < pieces).to(tl.int32)
        mark = tl.load(marks + after, mask=n + 1 < marked, other=0)
        write_all(
            weights, momentum, states + after * S.size, entered + after * S.size,
            initial, anchors, keys, us, hs, u2s, u3s,
            share + (at * S.length + LAST) * S.pairs, push + at * S.pairs,
            tl.load(kept + at * S.length + LAST), tl.load(carried + at * S.length + LAST),
            tl.load(push_kept + at), mark & 1, mark & 2, more, left, right, scale, S, DOT,
        )  # fmt: skip
        tl.debug_barrier()
