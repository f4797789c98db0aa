"""Muon, piece by piece: factors, then steps (`newton_schulz`), then the new state.

Every phase is a launch of its own, since one memory is written by many programs: they have a block
of its hidden layer, some pairs or a matrix each.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.branch import gelu, gelu_slope
from atlas_lm.ops.triton.pairs import added_parts, prepared_error
from atlas_lm.ops.triton.tiles import dot, put, tile
from atlas_lm.ops.triton.writing import outer_sum


@triton.jit
def from_features(
    phi, weights, rows, outs, height, OUT: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr
):
    """phi W^T for a matrix W `[OUT pitch]`: a tile `[rows, outs]`."""
    PITCH: tl.constexpr = S.pitch
    STEP: tl.constexpr = S.block_d
    z = tl.zeros((rows.shape[0], outs.shape[0]), tl.float32)
    for d in range(0, PITCH, STEP):
        ds = d + tl.arange(0, STEP)
        f = tile(phi, rows, ds, height, S.pitch)
        z += dot(f, tl.trans(tile(weights, outs, ds, OUT, S.pitch)), DOT)
    return z


@triton.jit
def hidden_layer(phi, anchor, rows, hs, height, S: tl.constexpr, DOT: tl.constexpr):
    """h at the keys, and what takes the gradient at h to that of W2 phi and of W3 phi."""
    w2 = anchor + S.d_v * S.hidden
    z = from_features(phi, w2, rows, hs, height, S.hidden, S, DOT)
    gate = gelu(z)
    x, to_z = gate, gelu_slope(z)
    if S.network == 2:
        w3 = w2 + S.hidden * S.pitch
        value = from_features(phi, w3, rows, hs, height, S.hidden, S, DOT)
        x, to_z = gate * value, to_z * value
    return x, to_z, gate


@triton.jit
def hidden_pairs(phi, anchor, h, part, rows, hs, height, S: tl.constexpr, DOT: tl.constexpr):
    """A block of the hidden layer at the pairs `rows`, and its part of what the second gives."""
    V: tl.constexpr = S.block_v
    vs = tl.arange(0, V)
    x, _, _ = hidden_layer(phi, anchor, rows, hs, height, S, DOT)
    put(h, x, rows, hs, height, S.hidden)
    o = dot(x, tl.trans(tile(anchor, vs, hs, S.d_v, S.hidden)), DOT)
    put(part, o, rows, vs, height, S.d_v)


@triton.jit(do_not_specialize=["piece", "rows_and_heads"])
def hidden_kernel(phi, anchor, h, parts, piece, rows_and_heads, S: tl.constexpr, DOT: tl.constexpr):
    """One block of the hidden layer, and the piece's own pairs or those before it, a program."""
    z = (tl.program_id(0) // S.team).to(tl.int64)
    at = piece * rows_and_heads + z
    pairs = at * S.pairs
    phi, anchor, h = phi + pairs * S.pitch, anchor + at * S.size, h + pairs * S.hidden
    parts += tl.program_id(0).to(tl.int64) * S.pairs * S.d_v
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    F: tl.constexpr = S.block_share
    hs = (tl.program_id(0) % S.team) * F + tl.arange(0, F)
    if tl.program_id(1) == 0:
        rows = S.tail + tl.arange(0, LENGTH)
        hidden_pairs(phi, anchor, h, parts, rows, hs, S.pairs, S, DOT)
    if S.tail > 0:  # noqa: SIM102 - without a tail there is nothing to compile
        if tl.program_id(1) == 1:
            rows = tl.arange(0, TAIL)
            hidden_pairs(phi, anchor, h, parts, rows, hs, S.tail, S, DOT)


@triton.jit(do_not_specialize=["piece", "rows_and_heads", "heads"])
def branch_kernel(
    k, v, rest, gain, parts, u1, piece, rows_and_heads, heads,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """u1 of few pairs a program, from the parts of the branch."""
    ROWS: tl.constexpr = S.few
    V: tl.constexpr = S.block_v
    z = tl.program_id(0).to(tl.int64)
    head, pairs = z % heads, (piece * rows_and_heads + z) * S.pairs
    rows, vs = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.arange(0, V)
    wide = pairs * S.d_v
    o = added_parts(parts + z * S.team * S.pairs * S.d_v, rows, vs, 0, 1, S)
    error, _, _, _ = prepared_error(
        o, k + pairs * S.d_k, v + wide, rest + wide, gain + head * S.d_v, rows, vs, S.pairs, S, DOT
    )
    put(u1 + wide, error, rows, vs, S.pairs, S.d_v)


@triton.jit
def linear_u1(phi, v, anchor, u1, rows, vs, height, S: tl.constexpr, DOT: tl.constexpr):
    """u1 of a linear memory, `W phi - v`, or `-v` on the dot product."""
    e = -tile(v, rows, vs, height, S.d_v).to(tl.float32)
    if S.objective == 0:
        e += from_features(phi, anchor, rows, vs, height, S.d_v, S, DOT)
    put(u1, e, rows, vs, height, S.d_v)


@triton.jit
def back_to_hidden(phi, anchor, u1, u2, u3, rows, hs, height, S: tl.constexpr, DOT: tl.constexpr):
    """u2 (and u3) of a block of the hidden layer, from u1."""
    V: tl.constexpr = S.block_v
    vs = tl.arange(0, V)
    error, w1 = tile(u1, rows, vs, height, S.d_v), tile(anchor, vs, hs, S.d_v, S.hidden)
    _, to_z, gate = hidden_layer(phi, anchor, rows, hs, height, S, DOT)
    back = dot(error, w1, DOT)
    put(u2, back * to_z, rows, hs, height, S.hidden)
    if S.network == 2:
        put(u3, back * gate, rows, hs, height, S.hidden)


@triton.jit
def some_factors(
    phi, v, anchor, u1, u2, u3, rows, height, member, S: tl.constexpr, DOT: tl.constexpr
):
    """Pairs `rows` below `height`: the last factors of their gradients, written out."""
    F: tl.constexpr = S.block_share
    outs = member * F + tl.arange(0, F)
    if S.network == 0:
        linear_u1(phi, v, anchor, u1, rows, outs, height, S, DOT)
    else:
        back_to_hidden(phi, anchor, u1, u2, u3, rows, outs, height, S, DOT)


@triton.jit(do_not_specialize=["piece", "rows_and_heads"])
def factors_kernel(
    phi, v, anchor, u1, u2, u3, piece, rows_and_heads, S: tl.constexpr, DOT: tl.constexpr
):
    """One block of a memory, and the piece's own pairs or those before it, a program."""
    z = (tl.program_id(0) // S.team).to(tl.int64)
    member = tl.program_id(0) % S.team
    at = piece * rows_and_heads + z
    pairs, deep = at * S.pairs, at * S.pairs * S.hidden
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    phi, v, anchor = phi + pairs * S.pitch, v + pairs * S.d_v, anchor + at * S.size
    u1, u2, u3 = u1 + pairs * S.d_v, u2 + deep, u3 + deep
    if tl.program_id(1) == 0:
        rows = S.tail + tl.arange(0, LENGTH)
        some_factors(phi, v, anchor, u1, u2, u3, rows, S.pairs, member, S, DOT)
    if S.tail > 0:  # noqa: SIM102 - without a tail there is nothing to compile
        if tl.program_id(1) == 1:
            rows = tl.arange(0, TAIL)
            some_factors(phi, v, anchor, u1, u2, u3, rows, S.tail, member, S, DOT)


@triton.jit
def advance_tile(
    weights, momentum, terms, new_weights, new_momentum, states, u, x, steps, push,
    kept, push_kept, outs, ins, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, XWIDTH: tl.constexpr,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A tile of the state after a piece: weights from the steps, momentum from the pairs."""
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    TERMS: tl.constexpr = S.terms
    w = kept * tile(weights, outs, ins, HEIGHT, WIDTH)
    for s in range(TERMS):
        step = tile(terms + s * S.size, outs, ins, HEIGHT, WIDTH).to(tl.float32)
        w += tl.load(steps + s) * step
    put(new_weights, w, outs, ins, HEIGHT, WIDTH)
    put(states, w, outs, ins, HEIGHT, WIDTH)
    mine, past = S.tail + tl.arange(0, LENGTH), tl.arange(0, TAIL)
    m = push_kept * tile(momentum, outs, ins, HEIGHT, WIDTH)
    weight = tl.load(push + mine, mask=mine < S.pairs, other=0.0)
    g = tile(x, mine, ins, S.pairs, XWIDTH).to(tl.float32)
    m += outer_sum(tile(u, mine, outs, S.pairs, HEIGHT), g, weight, DOT)
    if S.tail > 0:
        weight = tl.load(push + past, mask=past < S.tail, other=0.0)
        g = tile(x, past, ins, S.tail, XWIDTH).to(tl.float32)
        m += outer_sum(tile(u, past, outs, S.tail, HEIGHT), g, weight, DOT)
    put(new_momentum, m, outs, ins, HEIGHT, WIDTH)


@triton.jit
def advance_kernel(
    weights, momentum, terms, new_weights, new_momentum, states, u1, h, u2, u3, phi,
    kept, steps, push_kept, push, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """One row and head, and one block of the hidden layer (of the values, if linear) a program."""
    z = tl.program_id(0).to(tl.int64)
    V: tl.constexpr = S.block_v
    F: tl.constexpr = S.block_f if S.network != 0 else S.block_v
    PITCH: tl.constexpr = S.pitch
    STEP: tl.constexpr = S.block_d
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    ROWS: tl.constexpr = S.d_v if S.network == 0 else S.hidden
    at, pairs = z * S.size, z * S.pairs
    weights, momentum, states = weights + at, momentum + at, states + at
    new_weights, new_momentum = new_weights + at, new_momentum + at
    terms += at * S.terms
    steps += (z * S.length + S.length - 1) * S.terms
    push += (z * S.pulls + S.terms) * S.pairs
    keep = tl.load(kept + z * S.length + S.length - 1)
    push_keep = tl.load(push_kept + z * S.pulls + S.terms)
    u1, h, phi = u1 + pairs * S.d_v, h + pairs * S.hidden, phi + pairs * S.pitch
    u2, u3 = u2 + pairs * S.hidden, u3 + pairs * S.hidden
    vs = tl.arange(0, V)
    hs = tl.program_id(1) * F + tl.arange(0, F)
    if S.network != 0:
        advance_tile(
            weights, momentum, terms, new_weights, new_momentum, states, u1, h, steps, push,
            keep, push_keep, vs, hs, S.d_v, S.hidden, S.hidden, S, DOT,
        )  # fmt: skip
    for d in range(0, PITCH, STEP):
        ds = d + tl.arange(0, STEP)
        if S.network == 0:
            advance_tile(
                weights, momentum, terms, new_weights, new_momentum, states, u1, phi, steps, push,
                keep, push_keep, hs, ds, ROWS, S.pitch, S.pitch, S, DOT,
            )  # fmt: skip
        else:
            advance_tile(
                weights + W2, momentum + W2, terms + W2, new_weights + W2, new_momentum + W2,
                states + W2, u2, phi, steps, push, keep, push_keep, hs, ds, ROWS, S.pitch, S.pitch,
                S, DOT,
            )  # fmt: skip
        if S.network == 2:
            advance_tile(
                weights + W3, momentum + W3, terms + W3, new_weights + W3, new_momentum + W3,
                states + W3, u3, phi, steps, push, keep, push_keep, hs, ds, ROWS, S.pitch, S.pitch,
                S, DOT,
            )  # fmt: skip
