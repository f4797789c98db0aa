"""Gradients of writing pieces (`writing`), from the last piece to the first."""

import triton
import triton.language as tl

from atlas_lm.ops.triton.pairs_backward import through_all_factors


@triton.jit
def carry_back(
    g_weights, g_momentum, state, entered, d_state, d_entered, kept, carried, push_kept,
    BLOCK: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The gradients of what entered the piece, but for what its anchor gets.

    Also the gradients of kept, carried and push_kept, each a sum over all weights.
    """
    SIZE: tl.constexpr = S.size
    d_kept = tl.zeros((BLOCK,), tl.float32)
    d_carried, d_push_kept = d_kept, d_kept
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < SIZE
        gw = tl.load(g_weights + at, mask=here, other=0.0)
        d_kept += gw * tl.load(state + at, mask=here, other=0.0).to(tl.float32)
        new = kept * gw + tl.load(d_state + at, mask=here, other=0.0).to(tl.float32)
        tl.store(g_weights + at, new, mask=here)
        if S.terms > 0:
            s = tl.load(entered + at, mask=here, other=0.0).to(tl.float32)
            gs = tl.load(g_momentum + at, mask=here, other=0.0)
            d_carried += gw * s
            d_push_kept += gs * s
            new = push_kept * gs + carried * gw
            new += tl.load(d_entered + at, mask=here, other=0.0).to(tl.float32)
            tl.store(g_momentum + at, new, mask=here)
    return tl.sum(d_kept), tl.sum(d_carried), tl.sum(d_push_kept)


@triton.jit
def begin_back(
    g_weights, g_momentum, pushes, g_initial, g_anchors, fresh, keep,
    BLOCK: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """Where the piece began a document its gradients go to the initial weights, and end there."""
    SIZE: tl.constexpr = S.size
    for start in range(0, SIZE, BLOCK):
        at = start + tl.arange(0, BLOCK)
        here = at < SIZE
        gw = tl.load(g_weights + at, mask=here, other=0.0)
        gw += tl.load(g_anchors + at, mask=here & (keep != 0), other=0.0)
        begun = tl.load(g_initial + at, mask=here & (fresh != 0), other=0.0)
        tl.store(g_initial + at, begun + gw, mask=here & (fresh != 0))
        gw = tl.where(fresh != 0, 0.0, gw)
        tl.store(g_weights + at, gw, mask=here)
        tl.store(pushes + at, gw.to(pushes.dtype.element_ty), mask=here)
        if S.terms > 0:
            gs = tl.load(g_momentum + at, mask=here, other=0.0)
            gs = tl.where(fresh != 0, 0.0, gs)
            tl.store(g_momentum + at, gs, mask=here)
            tl.store(pushes + SIZE + at, gs.to(pushes.dtype.element_ty), mask=here)


@triton.jit
def write_backward_kernel(
    k, v, kept, carried, push_kept, pulls, marks, state, entered, own_anchor, d_own_anchor,
    gain, residual, u1, h, u2, u3, left, right, scale,
    d_state, d_entered, d_u1, d_h, d_u2, d_u3,
    g_weights, g_momentum, g_initial, g_anchors, pushes,
    dk, dv, d_pulls, d_last, d_gain, d_degrees, scratch, pieces, rows_and_heads,
    OWN: tl.constexpr, BLOCK: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """All pieces of one row and head. `pushes`: g_weights and g_momentum, rounded."""
    z = tl.program_id(0).to(tl.int64)
    head = z % S.heads
    g_weights, g_momentum = g_weights + z * S.size, g_momentum + z * S.size
    g_initial, g_anchors = g_initial + z * S.size, g_anchors + z * S.size
    pushes += z * S.pulls * S.size
    gain += head * S.d_v
    residual += head * S.d_v * S.d_k
    scale += head * S.features
    d_gain += z * S.d_v
    d_degrees += z * 4
    scratch += z * 4 * S.pairs * S.hidden
    LAST: tl.constexpr = S.length - 1
    for back in range(pieces):
        n = pieces - 1 - back
        at = n * rows_and_heads + z
        size, pairs = at * S.size, at * S.pairs
        d0, d1, d2 = carry_back(
            g_weights, g_momentum, state + size, entered + size, d_state + size, d_entered + size,
            tl.load(kept + at * S.length + LAST), tl.load(carried + at * S.length + LAST),
            tl.load(push_kept + at), BLOCK, S,
        )  # fmt: skip
        tl.store(d_last + at * 3, d0)
        tl.store(d_last + at * 3 + 1, d1)
        tl.store(d_last + at * 3 + 2, d2)
        tl.debug_barrier()
        if OWN:
            anchor, d_anchor = own_anchor + z * S.size, d_own_anchor + z * S.size
        else:
            anchor, d_anchor = state + size, g_weights
        wide, deep = pairs * S.d_v, pairs * S.hidden
        through_all_factors(
            k + pairs * S.d_k, v + wide, anchor, d_anchor, gain, residual,
            u1 + wide, h + deep, u2 + deep, u3 + deep,
            d_u1 + wide, d_h + deep, d_u2 + deep, d_u3 + deep, pushes, pulls + pairs * S.pulls,
            dk + pairs * S.d_k, dv + wide, d_pulls + pairs * S.pulls, d_gain, d_degrees, scratch,
            left, right, scale, S, DOT,
        )  # fmt: skip
        tl.debug_barrier()
        mark = tl.load(marks + at)
        begin_back(
            g_weights, g_momentum, pushes, g_initial, g_anchors, mark & 1, mark & 2, BLOCK, S
        )
        tl.debug_barrier()
