"""Gradients of the factors of pairs (`pairs`): a second derivative of the memory's loss.

The factors are pushed into matrices with weights of their own; `pushes` holds the gradients of
those matrices, `pulls` the weights. What comes back goes through the first derivative to the keys,
the values and the anchor.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.branch import gelu, gelu_bend, gelu_slope, through_norm
from atlas_lm.ops.triton.pairs import prepared_error
from atlas_lm.ops.triton.tiles import by_degree, dot, features_backward, only, put, tile


@triton.jit
def pull(pulls, j, rows, height, S: tl.constexpr):
    """How much of each pair was pushed into matrix j."""
    return tl.load(pulls + j * S.pairs + rows, mask=rows < height, other=0.0)[:, None]


@triton.jit
def next_push(
    pushes, j, outs, ins, OUT: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """A tile of the push after j, loaded while that of j is multiplied; nothing after the last."""
    return tile(pushes + (j + 1) * S.size, outs, ins, tl.where(j + 1 < S.pulls, OUT, 0), WIDTH)


@triton.jit
def push_to_x(u, x, dx, d_pulls, push, pulls, j, rows, height, S: tl.constexpr, DOT: tl.constexpr):
    """Back through sum_i pull_i u_i x_i^T for push j: adds to dx and d_pulls."""
    back = dot(u, push, DOT)
    dx += pull(pulls, j, rows, height, S) * back
    return dx, d_pulls + only(tl.sum(x * back, 1), j, S.block_pulls)


@triton.jit
def to_x(
    u, x, dx, d_pulls, push, pushes, pulls, rows, outs, ins, height,
    OUT: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """The same for every push. `push`: a tile of the first."""
    PULLS: tl.constexpr = S.pulls
    for j in range(PULLS):
        after = next_push(pushes, j, outs, ins, OUT, WIDTH, S)
        dx, d_pulls = push_to_x(u, x, dx, d_pulls, push, pulls, j, rows, height, S, DOT)
        push = after
    return dx, d_pulls


@triton.jit
def to_u(
    x, du, push, pushes, pulls, rows, outs, ins, height,
    OUT: tl.constexpr, WIDTH: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Back through the same sums: adds to du."""
    PULLS: tl.constexpr = S.pulls
    for j in range(PULLS):
        after = next_push(pushes, j, outs, ins, OUT, WIDTH, S)
        du += pull(pulls, j, rows, height, S) * dot(x, tl.trans(push), DOT)
        push = after
    return du


@triton.jit
def first_layer_to_u(
    phi, weights, du, pushes, pulls, rows, outs, height,
    OUT: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """phi W^T for a matrix W `[OUT pitch]`, and back to u from the matrices like it that u phi^T
    was pushed into: tiles `[rows, outs]`."""
    PITCH: tl.constexpr = S.pitch
    STEP: tl.constexpr = S.block_d
    z = tl.zeros((rows.shape[0], outs.shape[0]), tl.float32)
    for d in range(0, PITCH, STEP):
        ds = d + tl.arange(0, STEP)
        push = tile(pushes, outs, ds, OUT, S.pitch)
        w = tile(weights, outs, ds, OUT, S.pitch)
        f = tile(phi, rows, ds, height, S.pitch)
        z += dot(f, tl.trans(w), DOT)
        du = to_u(f, du, push, pushes, pulls, rows, outs, ds, height, OUT, S.pitch, S, DOT)
    return z, du


@triton.jit
def to_keys(
    df, f, dk, degrees, k, rows, ds, height, left, right, scale,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """From the gradient of a tile of polynomial features to the keys, and its sums by degree."""
    dk += features_backward(
        df, k, rows, ds, height, left, right, scale, S.d_k, S.features, S.block_k, DOT
    )
    return dk, degrees + by_degree(df * f, ds, S.d_k)


@triton.jit
def through_first_layer(
    phi, anchor, u, w1, of_u2, of_u3, pushes, pulls, known, rows, hs, height,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """From the gradients of u2 and u3 of a block of the hidden layer to that of u1 W1.

    It stays in `known` too, with what is known so far of the gradients of z and of the value, and
    with what takes the gradient of h there.
    """
    W2: tl.constexpr = S.d_v * S.hidden
    W3: tl.constexpr = W2 + S.hidden * S.pitch
    ROOM: tl.constexpr = S.pairs * S.hidden
    z, of_u2 = first_layer_to_u(
        phi, anchor + W2, of_u2, pushes + W2, pulls, rows, hs, height, S.hidden, S, DOT
    )
    back = dot(u, w1, DOT)
    to_z = gelu_slope(z)
    d_back = of_u2 * to_z
    dz = of_u2 * back * gelu_bend(z)
    if S.network == 2:
        value, of_u3 = first_layer_to_u(
            phi, anchor + W3, of_u3, pushes + W3, pulls, rows, hs, height, S.hidden, S, DOT
        )
        put(known + 3 * ROOM, d_back * back, rows, hs, height, S.hidden)
        put(known + 5 * ROOM, gelu(z), rows, hs, height, S.hidden)
        d_back = d_back * value + of_u3 * gelu(z)
        dz = dz * value + of_u3 * back * to_z
        to_z *= value
    put(known + ROOM, dz, rows, hs, height, S.hidden)
    put(known + 2 * ROOM, d_back, rows, hs, height, S.hidden)
    put(known + 4 * ROOM, to_z, rows, hs, height, S.hidden)
    return d_back


@triton.jit
def through_second_layer(
    phi, anchor, u1, h, d_u1, d_h, d_u2, d_u3, pushes, pulls, known, rows, vs, hs, height, member,
    S: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """A block of the hidden layer: its parts of the branch o and of the gradient of u1, and that of
    the pulls. What is known of h, z, u1 W1 and the value so far stays in `known`.

    What is loaded is loaded first: a product waits until all before it is here.
    """
    PULLS: tl.constexpr = S.block_pulls
    u, w1 = tile(u1, rows, vs, height, S.d_v), tile(anchor, vs, hs, S.d_v, S.hidden)
    x, push = tile(h, rows, hs, height, S.hidden), tile(pushes, vs, hs, S.d_v, S.hidden)
    du = tl.zeros((rows.shape[0], vs.shape[0]), DOT)
    dx = tl.zeros((rows.shape[0], hs.shape[0]), DOT)
    of_u2, of_u3 = dx, dx
    if S.written:
        du = tile(d_u1, rows, vs, tl.where(member == 0, height, 0), S.d_v)
        dx, of_u2 = tile(d_h, rows, hs, height, S.hidden), tile(d_u2, rows, hs, height, S.hidden)
        if S.network == 2:
            of_u3 = tile(d_u3, rows, hs, height, S.hidden)
    d_back = through_first_layer(
        phi, anchor, u, w1, of_u2.to(tl.float32), of_u3.to(tl.float32), pushes, pulls, known,
        rows, hs, height, S, DOT,
    )  # fmt: skip
    du = du.to(tl.float32) + dot(d_back, tl.trans(w1), DOT)
    du = to_u(x, du, push, pushes, pulls, rows, vs, hs, height, S.d_v, S.hidden, S, DOT)
    dx, d_pulls = to_x(
        u, x.to(tl.float32), dx.to(tl.float32), tl.zeros((rows.shape[0], PULLS), tl.float32), push,
        pushes, pulls, rows, vs, hs, height, S.d_v, S.hidden, S, DOT,
    )  # fmt: skip
    put(known, dx, rows, hs, height, S.hidden)
    return dot(x, tl.trans(w1), DOT), du, d_pulls


@triton.jit
def through_error(up, o, k, v, rest, gain, rows, vs, height, S: tl.constexpr, DOT: tl.constexpr):
    """From the gradient of u1 to the branch o, the error, and the gain, summed over the rows."""
    u1, e, unit, size = prepared_error(o, k, v, rest, gain, rows, vs, height, S, DOT)
    inside = (rows < height)[:, None]
    up = tl.where(inside, up, 0.0)
    e = tl.where(inside, e, 0.0)
    de, do, d_gain = up, up, tl.sum(up, 0)
    if S.norm:
        weight = tl.load(gain + vs, mask=vs < S.d_v, other=0.0)[None, :]
        grad = weight * e
        along_up = tl.sum(up * unit, 1) / S.d_v
        along = tl.sum(grad * unit, 1) / S.d_v
        to_unit = -size[:, None] * (up * along[:, None] + grad * along_up[:, None])
        to_size = tl.sum(up * u1, 1) / S.d_v * size
        at_unit = through_norm(up, unit, size, vs, S.d_v)
        de = weight * at_unit
        d_gain = tl.sum(at_unit * e, 0)
        if S.objective == 0:
            d_gain += tl.sum(de * unit, 0)
            to_unit += weight * de
        do = through_norm(to_unit, unit, size, vs, S.d_v) - to_size[:, None] * unit
    elif S.objective == 1:
        do = tl.zeros_like(up)
    return do, de, d_gain


@triton.jit
def to_second_matrix(
    do, u1, h, known, rows, vs, hs, height, S: tl.constexpr, DOT: tl.constexpr
):  # fmt: skip
    """The gradient of W1, from the branch and from what the second layer left."""
    d_back = tile(known + 2 * S.pairs * S.hidden, rows, hs, height, S.hidden)
    u, x = tile(u1, rows, vs, height, S.d_v), tile(h, rows, hs, height, S.hidden)
    of_branch = tile(do, rows, vs, height, S.d_v)
    return dot(tl.trans(u), d_back, DOT) + dot(tl.trans(of_branch), x, DOT)


@triton.jit
def to_first_layer(
    do, anchor, known, rows, vs, hs, height, WHICH: tl.constexpr, S: tl.constexpr, DOT: tl.constexpr
):
    """The gradient of what W2 (WHICH = 1) or W3 (2) gave, from the branch and from what the second
    layer left."""
    ROOM: tl.constexpr = S.pairs * S.hidden
    dx, so_far = tile(known, rows, hs, height, S.hidden), known + (2 * WHICH - 1) * ROOM
    so_far = tile(so_far, rows, hs, height, S.hidden)
    through = tile(known + (3 + WHICH) * ROOM, rows, hs, height, S.hidden)
    w1, of_branch = tile(anchor, vs, hs, S.d_v, S.hidden), tile(do, rows, vs, height, S.d_v)
    return so_far + (dx + dot(of_branch, w1, DOT)) * through


@triton.jit
def leave_pulls(grad, d_pulls, rows, height, S: tl.constexpr):
    PULLS: tl.constexpr = S.block_pulls
    js = tl.arange(0, PULLS)
    inside = (rows[:, None] < height) & (js[None, :] < S.pulls)
    tl.store(d_pulls + js[None, :] * S.pairs + rows[:, None], grad, mask=inside)
