"""Gradients of writing a piece: three kernels, launched for every piece from the last to the first.

    pull_kernel     from the matrices that pairs were pushed into, back to each block of the hidden
                    layer, and its part of what the error gets
    error_kernel    the parts added up, through error and norm: gradients of the branch and values
    settle_kernel   from the branch to the anchor and the keys, and the gradient of the state from
                    after the piece to before it

A program has one block of a memory's hidden layer, or of a linear memory's values, and in the last
of the three one matrix of it: what it works on has room in registers, or nearly. What programs
leave for each other is in memory when the next kernel begins. Linear memories need the last of the
three only.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.pairs import added_parts
from atlas_lm.ops.triton.pairs_backward import (
    leave_pulls,
    through_error,
    through_second_layer,
)
from atlas_lm.ops.triton.tiles import put, tile


@triton.jit
def pull_pairs(
    phi, anchor, u1, h, d_u1, d_h, d_u2, d_u3, pushes, pulls, known, d_pulls, parts,
    rows, hs, height, member, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Pairs `rows` below `height`. `parts` `[2 pairs v]`: of the branch, of the gradient of u1."""
    V: tl.constexpr = S.block_v
    vs = tl.arange(0, V)
    o, du, grad_pulls = through_second_layer(
        phi, anchor, u1, h, d_u1, d_h, d_u2, d_u3, pushes, pulls, known, rows, vs, hs, height,
        member, S, DOT,
    )  # fmt: skip
    leave_pulls(grad_pulls, d_pulls, rows, height, S)
    put(parts, o, rows, vs, height, S.d_v)
    put(parts + S.pairs * S.d_v, du, rows, vs, height, S.d_v)


@triton.jit(do_not_specialize=["piece", "pieces", "rows_and_heads"])
def pull_kernel(
    phi, anchor, u1, h, d_u1, d_h, d_u2, d_u3, pushes, pulls,
    d_pulls, known, parts, piece, pieces, rows_and_heads, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One block of the hidden layer, and the piece's own pairs or those before it, a program."""
    z = (tl.program_id(0) // S.team).to(tl.int64)
    member = tl.program_id(0) % S.team
    at = piece * rows_and_heads + z
    pairs, deep = at * S.pairs, at * S.pairs * S.hidden
    wide = pairs * S.d_v
    phi, u1, h, anchor = phi + pairs * S.pitch, u1 + wide, h + deep, anchor + at * S.size
    d_u1, d_h, d_u2, d_u3 = d_u1 + wide, d_h + deep, d_u2 + deep, d_u3 + deep
    pushes, pulls = pushes + z * S.pulls * S.size, pulls + pairs * S.pulls
    slot = (member * (S.network + 1) * pieces).to(tl.int64) * rows_and_heads + at
    d_pulls += slot * S.pulls * S.pairs
    known += z * 6 * S.pairs * S.hidden
    parts += tl.program_id(0).to(tl.int64) * 2 * S.pairs * S.d_v
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    F: tl.constexpr = S.block_share
    hs = member * F + tl.arange(0, F)
    if tl.program_id(1) == 0:
        pull_pairs(
            phi, anchor, u1, h, d_u1, d_h, d_u2, d_u3, pushes, pulls, known, d_pulls, parts,
            S.tail + tl.arange(0, LENGTH), hs, S.pairs, member, S, DOT,
        )  # fmt: skip
    if S.tail > 0:  # noqa: SIM102 - without a tail there is nothing to compile
        if tl.program_id(1) == 1:
            pull_pairs(
                phi, anchor, u1, h, d_u1, d_h, d_u2, d_u3, pushes, pulls, known, d_pulls, parts,
                tl.arange(0, TAIL), hs, S.tail, member, S, DOT,
            )  # fmt: skip


@triton.jit(do_not_specialize=["piece", "rows_and_heads", "heads"])
def error_kernel(
    k, v, rest, gain, parts, do, dv, dk, d_gain, piece, rows_and_heads, heads,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Few pairs a program. `do`: the gradient of the branch; dk: adds to what reading gave, unless
    the residual is a product, which is then made for all pieces at once (`through_residual`).

    d_gain `[z blocks v]`: adds to what later pieces gave.
    """
    ROWS: tl.constexpr = S.few
    V: tl.constexpr = S.block_v
    z = tl.program_id(0).to(tl.int64)
    head, pairs = z % heads, (piece * rows_and_heads + z) * S.pairs
    wide = pairs * S.d_v
    rows, vs = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, V)
    parts += z * S.team * 2 * S.pairs * S.d_v
    o, up = added_parts(parts, rows, vs, 0, 2, S), added_parts(parts, rows, vs, 1, 2, S)
    of_branch, de, of_gain = through_error(
        up, o, k + pairs * S.d_k, v + wide, rest + wide, gain + head * S.d_v, rows, vs,
        S.pairs, S, DOT,
    )  # fmt: skip
    put(do + z * S.pairs * S.d_v, of_branch, rows, vs, S.pairs, S.d_v)
    put(dv + wide, -de, rows, vs, S.pairs, S.d_v)
    if S.objective == 0 and S.d_k == S.d_v:
        put(dk + wide, tile(dk + wide, rows, vs, S.pairs, S.d_v) + de, rows, vs, S.pairs, S.d_v)
    if S.norm:
        at, here = d_gain + (z * tl.num_programs(1) + tl.program_id(1)) * S.d_v + vs, vs < S.d_v
        tl.store(at, tl.load(at, mask=here, other=0.0) + of_gain, mask=here)
