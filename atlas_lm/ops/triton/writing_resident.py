"""Write pieces into memories whose state stays in registers from the first piece to the last.

A program has all of a memory, or a member's share of its hidden layer (`team`), or of a linear
memory's values. Its weights and its momentum are tuples of tiles (`state_tiles`). Rounded, the
weights are the anchor of the next piece; what goes to memory is for others to read.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.branch import gelu, gelu_slope
from atlas_lm.ops.triton.pairs import gradient_at_branch, prepared_rest, rest_of_error
from atlas_lm.ops.triton.state_tiles import (
    load_features,
    load_tiles,
    mixed,
    place,
    rounded,
    scaled,
    store_tile,
    store_tiles,
)
from atlas_lm.ops.triton.team import arrive, leave_part, sum_of_parts, wait
from atlas_lm.ops.triton.tiles import dot, keep_features, put, tile
from atlas_lm.ops.triton.writing import last_kept, last_shares


@triton.jit(do_not_specialize=["rows_and_heads", "heads"])
def prepare_kernel(
    k, v, residual, phi, rest, left, right, scale, rows_and_heads, heads,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """What does not wait for a memory, of all pieces at once: features of the keys, rounded, where
    they are not the keys; and errors without the branch, where the residual is a product."""
    z = tl.program_id(0).to(tl.int64)
    pairs = (tl.program_id(1) * rows_and_heads + z) * S.pairs
    head = z % heads
    k, phi, scale = k + pairs * S.d_k, phi + pairs * S.pitch, scale + head * S.features
    v, rest = v + pairs * S.d_v, rest + pairs * S.d_v
    residual += head * S.d_v * S.d_k
    PAIRS: tl.constexpr = S.pairs
    ROWS: tl.constexpr = S.block_length
    V: tl.constexpr = S.block_v
    vs = tl.arange(0, V)
    for start in range(0, PAIRS, ROWS):
        rows = start + tl.arange(0, ROWS)
        if S.features != S.d_k:
            keep_features(k, phi, rows, S.pairs, left, right, scale, S)
        if S.network != 0 and S.d_k != S.d_v:
            e = rest_of_error(k, v, residual, rows, vs, S.pairs, S, DOT)
            put(rest, e, rows, vs, S.pairs, S.d_v)


@triton.jit
def left_w1(states, member, S: tl.constexpr):
    """The first tile as it was left, rounded, for the product that takes it as it lies.

    Without wgmma that product has it in registers: of the tile that the loop carries, Triton would
    carry a second one for it, in float32 and the same in every warp.
    """
    tl.debug_barrier()
    at, inside = place(0, member, S)
    return tl.load(states + at, mask=inside, other=0.0)


@triton.jit
def hidden_inputs(f, f_past, anchor, FIRST: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr):
    """phi W^T of the piece's own pairs and of those before it, W being `anchor` from FIRST on.

    Block by block for both, while it is at hand.
    """
    BLOCKS: tl.constexpr = S.blocks
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    F: tl.constexpr = S.block_share
    z = tl.zeros((LENGTH, F), tl.float32)
    z_past = tl.zeros((TAIL, F), tl.float32)
    for b in tl.static_range(BLOCKS):
        w = tl.trans(anchor[FIRST + b])
        z += dot(f[b], w, DOT)
        if S.tail > 0:
            z_past += dot(f_past[b], w, DOT)
    return z, z_past


@triton.jit
def hidden_layer(z, value, S: tl.constexpr, DOT: tl.constexpr):
    """h, and what takes the gradient at h to that of W2 phi and of W3 phi."""
    gate = gelu(z)
    x, to_z = gate, gelu_slope(z)
    if S.network == 2:
        x, to_z = gate * value, to_z * value
    elif tl.float32 != DOT:
        # it lives through a meeting, and is at most 1.13: off by 2^-12, where u2 is by 2^-9
        to_z = to_z.to(tl.float16)
    return x.to(DOT), to_z, gate


@triton.jit
def both_layers(f, f_past, anchor, S: tl.constexpr, DOT: tl.constexpr):
    """`hidden_layer` and this share of the output, of own pairs and of those before."""
    z, z_past = hidden_inputs(f, f_past, anchor, 1, S, DOT)
    value, value_past = z, z_past
    if S.network == 2:
        value, value_past = hidden_inputs(f, f_past, anchor, 1 + S.blocks, S, DOT)
    own = hidden_layer(z, value, S, DOT)
    past, w = own, tl.trans(anchor[0])
    if S.tail > 0:
        past = hidden_layer(z_past, value_past, S, DOT)
    o = dot(own[0], w, DOT)
    o_past = o
    if S.tail > 0:
        o_past = dot(past[0], w, DOT)
    return own, past, o, o_past


@triton.jit
def moved(
    w, s, u, xs, share, push, FIRST: tl.constexpr, COUNT: tl.constexpr,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """COUNT tiles of weights and momentum from FIRST on, with sum_i share_i u_i x_i^T."""
    shared = tl.trans((share[:, None] * u).to(DOT))
    weights, momentum = (), ()
    for n in tl.static_range(COUNT):
        weights += (w[FIRST + n] + dot(shared, xs[n], DOT),)
    if S.terms > 0:
        pushed = tl.trans((push[:, None] * u).to(DOT))
        for n in tl.static_range(COUNT):
            momentum += (s[FIRST + n] + dot(pushed, xs[n], DOT),)
    return weights, momentum


@triton.jit
def learn(
    w, s, error, w1, layer, f, share, push, u1, h, u2, u3, rows, vs, hs, height, member,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Weights and momentum with the gradients of some pairs; their factors are written out."""
    BLOCKS: tl.constexpr = S.blocks
    x, to_z, gate = layer
    if member == 0:
        put(u1, error, rows, vs, height, S.d_v)
    new_w, new_s = moved(w, s, error, (x,), share, push, 0, 1, S, DOT)
    back = dot(error, w1, DOT)
    of_z = back * to_z
    put(u2, of_z, rows, hs, height, S.hidden)
    more_w, more_s = moved(w, s, of_z, f, share, push, 1, BLOCKS, S, DOT)
    new_w, new_s = new_w + more_w, new_s + more_s
    if S.network == 2:
        of_value = back * gate
        put(u3, of_value, rows, hs, height, S.hidden)
        more_w, more_s = moved(w, s, of_value, f, share, push, 1 + BLOCKS, BLOCKS, S, DOT)
        new_w, new_s = new_w + more_w, new_s + more_s
    return new_w, new_s


@triton.jit
def leave(part, part_past, room, arrived, meeting, member, mine, past, vs, S: tl.constexpr):
    """For the other members, if there are any."""
    if S.team > 1:
        leave_part(part, room, meeting, member, mine, vs, S.pairs, 0, S)
        if S.tail > 0:
            leave_part(part_past, room, meeting, member, past, vs, S.tail, 0, S)
        arrive(arrived)


@triton.jit
def write_piece(
    w, s, f, k, v, phi, phi_next, rest, anchor, w1, gain, u1, h, u2, u3,
    share, push, kept, carried, push_kept, at, room, arrived, meeting, member, still,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Weights and momentum after a piece, and the features of the next one's keys."""
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    V: tl.constexpr = S.block_v
    F: tl.constexpr = S.block_share
    mine, past = S.tail + still + tl.arange(0, LENGTH), still + tl.arange(0, TAIL)
    vs, hs = tl.arange(0, V), member * S.share + tl.arange(0, F)
    weight = tl.load(gain + vs, mask=vs < S.d_v, other=0.0)[None, :]
    now, push_now, now_past, push_past = last_shares(share, push, at, mine, past, S)
    keep, carry, push_keep = last_kept(kept, carried, push_kept, at, S)
    f_past = f
    if S.tail > 0:
        f_past = load_features(phi, past, S.tail, S)
    own, before, o, o_past = both_layers(f, f_past, anchor, S, DOT)
    leave(o, o_past, room, arrived, meeting, member, mine, past, vs, S)
    put(h, own[0], mine, hs, S.pairs, S.hidden)
    if S.tail > 0:
        put(h, before[0], past, hs, S.tail, S.hidden)
    rest_own = prepared_rest(k, v, rest, mine, vs, S.pairs, S, DOT)
    rest_past = rest_own
    if S.tail > 0:
        rest_past = prepared_rest(k, v, rest, past, vs, S.tail, S, DOT)
    if S.team > 1:
        wait(arrived, meeting, S)
        o = sum_of_parts(room, meeting, mine, vs, S.pairs, 0, S)
        if S.tail > 0:
            o_past = sum_of_parts(room, meeting, past, vs, S.tail, 0, S)
    e, _, _, _ = gradient_at_branch(o, rest_own, weight, mine, vs, S.pairs, S)
    following = load_features(phi_next, mine, S.pairs, S)
    if S.terms > 0:
        w, s = mixed(w, keep, s, carry, S), scaled(s, push_keep, S)
    else:
        w = scaled(w, keep, S)
    w, s = learn(
        w, s, e, w1, own, f, now, push_now, u1, h, u2, u3, mine, vs, hs, S.pairs, member, S, DOT
    )
    if S.tail > 0:
        e, _, _, _ = gradient_at_branch(o_past, rest_past, weight, past, vs, S.tail, S)
        w, s = learn(
            w, s, e, w1, before, f_past, now_past, push_past, u1, h, u2, u3,
            past, vs, hs, S.tail, member, S, DOT,
        )  # fmt: skip
    return w, s, following


@triton.jit
def linear_pairs(
    w, s, given, v, f, u1, share, push, rows, vs, height, S: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """A linear memory's weights and momentum with the gradients of some pairs. `given`: by the
    memory, for their keys, which l2 compares with the values."""
    BLOCKS: tl.constexpr = S.blocks
    e = -v.to(tl.float32)
    if S.objective == 0:
        e += given
    put(u1, e, rows, vs, height, S.d_v)
    return moved(w, s, e, f, share, push, 0, BLOCKS, S, DOT)


@triton.jit
def write_linear_piece(
    w, s, v, phi, anchor, u1, share, push, kept, carried, push_kept, at, member, still,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A linear memory's weights and momentum after a piece."""
    LENGTH: tl.constexpr = S.block_length
    TAIL: tl.constexpr = S.block_tail
    F: tl.constexpr = S.block_share
    mine, past = S.tail + still + tl.arange(0, LENGTH), still + tl.arange(0, TAIL)
    vs = member * S.share + tl.arange(0, F)
    v_own = tile(v, mine, vs, S.pairs, S.d_v)
    f = load_features(phi, mine, S.pairs, S)
    v_past, f_past = v_own, f
    if S.tail > 0:
        v_past = tile(v, past, vs, S.tail, S.d_v)
        f_past = load_features(phi, past, S.tail, S)
    now, push_now, now_past, push_past = last_shares(share, push, at, mine, past, S)
    keep, carry, push_keep = last_kept(kept, carried, push_kept, at, S)
    given, given_past = v_own, v_past
    if S.objective == 0:
        given, given_past = hidden_inputs(f, f_past, anchor, 0, S, DOT)
    if S.terms > 0:
        w, s = mixed(w, keep, s, carry, S), scaled(s, push_keep, S)
    else:
        w = scaled(w, keep, S)
    w, s = linear_pairs(w, s, given, v_own, f, u1, now, push_now, mine, vs, S.pairs, S, DOT)
    if S.tail > 0:
        w, s = linear_pairs(
            w, s, given_past, v_past, f_past, u1, now_past, push_past, past, vs, S.tail, S, DOT
        )
    return w, s


@triton.jit
def leave_state(
    weights, states, entered, anchors, w, s, size, keep, member,
    KEEP: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The state before the next piece, rounded; under KEEP the weights also as they are; if `keep`,
    as anchor."""
    TILES: tl.constexpr = S.tiles
    for n in tl.static_range(TILES):
        store_tile(states + size, w[n], n, member, S)
        if S.terms > 0:
            store_tile(entered + size, s[n], n, member, S)
        if KEEP:
            store_tile(weights + size, w[n], n, member, S)
    if keep:
        store_tiles(anchors, w, member, S)


@triton.jit
def begin_document(
    weights, states, entered, initial, anchors, s, size, keep, member,
    KEEP: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """A state to begin with, over the one that was left."""
    tl.debug_barrier()
    w = load_tiles(initial, member, S)
    if S.terms > 0:
        s = scaled(s, 0.0, S)
    leave_state(weights, states, entered, anchors, w, s, size, keep, member, KEEP, S)
    return w, s


@triton.jit
def leave_piece(
    weights, states, entered, initial, anchors, w, s, size, mark, member,
    KEEP: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The state before the next piece, and what it is if that begins a document."""
    leave_state(weights, states, entered, anchors, w, s, size, mark & 2, member, KEEP, S)
    # not a choice before the state is left: its tiles would be there in two layouts
    if mark & 1:
        w, s = begin_document(
            weights, states, entered, initial, anchors, s, size, mark & 2, member, KEEP, S
        )
    return w, s


@triton.jit(do_not_specialize=["pieces", "marked", "rows_and_heads", "heads"])
def resident_kernel(
    k, v, phi, rest, share, push, kept, carried, push_kept, marks,
    weights, momentum, states, entered, own_anchor, initial, anchors, gain,
    u1, h, u2, u3, room, arrived, pieces, marked, rows_and_heads, heads,
    OWN: tl.constexpr, KEEP: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """As `write_kernel`, which has the state in memory. `phi`, `rest`: see `prepare_kernel`.

    With an anchor of its own (OWN) there is one piece.
    """
    z = (tl.program_id(0) // S.team).to(tl.int64)
    member = tl.program_id(0) % S.team
    room, arrived = room + z * 4 * S.team * S.pairs * S.d_v, arrived + z
    head = z % heads
    initial, anchors = initial + head * S.size, anchors + z * S.size
    gain += head * S.d_v
    LENGTH: tl.constexpr = S.block_length
    mine = S.tail + tl.arange(0, LENGTH)
    w, s = load_tiles(weights + z * S.size, member, S), ()
    if S.terms > 0:
        s = load_tiles(momentum + z * S.size, member, S)
    f = ()
    if S.network != 0:
        f = load_features(phi + z * S.pairs * S.pitch, mine, S.pairs, S)
    for n in range(pieces):
        at = n * rows_and_heads + z
        mark = tl.load(marks + at + rows_and_heads, mask=n + 1 < marked, other=0)
        # 0, which the compiler cannot know: else it makes every offset before the loop and spills
        still = n >> 30
        me = member + still
        pairs = at * S.pairs
        anchor = rounded(w, S, DOT)
        if OWN:
            anchor = load_tiles(own_anchor + z * S.size, me, S)
        if S.network == 0:
            w, s = write_linear_piece(
                w, s, v + pairs * S.d_v, phi + pairs * S.pitch, anchor, u1 + pairs * S.d_v,
                share, push, kept, carried, push_kept, at, me, still, S, DOT,
            )  # fmt: skip
        else:
            w1 = anchor[0] if OWN else left_w1(states + at * S.size, me, S)
            deep = pairs * S.hidden
            after = (tl.minimum(n + 1, pieces - 1) * rows_and_heads + z) * S.pairs
            w, s, f = write_piece(
                w, s, f, k + pairs * S.d_k, v + pairs * S.d_v, phi + pairs * S.pitch,
                phi + after * S.pitch, rest + pairs * S.d_v, anchor, w1, gain,
                u1 + pairs * S.d_v, h + deep, u2 + deep, u3 + deep,
                share, push, kept, carried, push_kept, at,
                room, arrived, n + 1, me, still, S, DOT,
            )  # fmt: skip
        size = (at + rows_and_heads) * S.size
        w, s = leave_piece(
            weights, states, entered, initial, anchors, w, s, size, mark, me, KEEP, S
        )
    end = ((pieces * rows_and_heads if KEEP else 0) + z) * S.size
    store_tiles(weights + end, w, member, S)
    if S.terms > 0:
        store_tiles(momentum + z * S.size, s, member, S)
