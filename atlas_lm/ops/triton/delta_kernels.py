"""Kernels of the delta rule: solve every piece, carry the memory through them, read; and back.

In one piece of one row and head, with a the products of the gates, L their spans, W the memory
that enters (kept transposed, `[d_k, d_v]`) and p, M one token earlier unless the decay comes first:

    (I + A) U = V - p K W^T,  A = tril(M rate * K K^T, -1)        U = T V - (T p K) W^T
    W <- a_end W + U^T (end K)                                    Y = a Q W^T + (L rate * Q K^T) U

Backward, with D the gradient of the memory that leaves and dU of the errors: g = T^T dU is the
gradient of V, -g U^T that of A, -g W that of p K. Slots beyond the piece have gates that change
nothing. D_V is taken in blocks; everything else is whole.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.tiles import dot, put, tile

NOW = tl.constexpr(0)
"""DELAY of the read: what a token wrote counts at once."""


@triton.jit
def dot_split(a, b, DOT: tl.constexpr):
    """a @ b with a in two parts of DOT: float32 grade where b is exact in DOT."""
    high = a.to(DOT)
    product = dot(high, b, DOT)
    if tl.float32 != DOT:
        product += dot(a - high.to(tl.float32), b, DOT)
    return product


@triton.jit
def dot_full(a, b, DOT: tl.constexpr):
    """a @ b with both in two parts of DOT."""
    product = dot_split(a, b.to(DOT), DOT)
    if tl.float32 != DOT:
        product += dot(a, b - b.to(DOT).to(tl.float32), DOT)
    return product


@triton.jit
def vector(base, at, length, other):
    """`[length]` at these places, `other` outside."""
    return tl.load(base + at, mask=(at >= 0) & (at < length), other=other)


@triton.jit
def spans_of(alpha, length, DELAY: tl.constexpr, BL: tl.constexpr):
    """prod alpha_{i+1..t-DELAY} at [t, i]; zeros where the step i is still to come.

    Sums over each span alone: differences of running sums lose every digit of a small gate.
    """
    t = tl.arange(0, BL)
    now, step = (t - DELAY)[:, None], t[None, :]
    logs = tl.log(vector(alpha, t - DELAY, length, 1.0))
    total = tl.cumsum(tl.where(now > step, logs[:, None], 0.0), 0)
    return tl.where(now >= step, tl.exp(total), 0.0)


@triton.jit
def gates_of_spans(steps, DELAY: tl.constexpr, BL: tl.constexpr):
    """Gradients of log alpha_{m+1}, at m, from gradients times values of the spans [t, i]."""
    t = tl.arange(0, BL)
    # alpha_s counts at every [t, i] with i < s <= t
    up_to = tl.cumsum(steps, 1)
    return tl.sum(tl.where((t - DELAY)[:, None] > t[None, :], up_to, 0.0), 0)


@triton.jit
def gates_of_products(whole, DELAY: tl.constexpr, BL: tl.constexpr):
    """The same from the products alpha_{0..t}, and the gradient of log alpha_0."""
    t = tl.arange(0, BL)
    later = tl.sum(tl.where((t - DELAY)[:, None] > t[None, :], whole[:, None], 0.0), 0)
    return later, tl.sum(tl.where(t >= DELAY, whole, 0.0), 0)


@triton.jit
def alike_of(
    a, b, length,
    D_K: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """All products of rows of a with rows of b, a block of columns at a time."""
    t = tl.arange(0, BL)
    total = tl.zeros((BL, BL), tl.float32)
    for first in range(0, D_K, BC):
        c = first + tl.arange(0, BC)
        other = tl.trans(tile(b, t, c, length, D_K))
        total += dot(tile(a, t, c, length, D_K), other, DOT)
    return total


@triton.jit
def invert_blocks(system, BL: tl.constexpr):
    """(I + A)^-1 of the 16 x 16 blocks on the diagonal, by substitution, in place in [BL, BL]."""
    N: tl.constexpr = BL // 16
    block, r = tl.arange(0, N), tl.arange(0, 16)
    diagonal = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.sum(tl.where(diagonal, tl.reshape(system, (N, 16, N, 16)), 0.0), 2)
    # columns of the transpose are rows that already stand where the sum needs them
    blocks = tl.permute(blocks, (0, 2, 1))
    inverse = tl.where(r[None, :, None] == r[None, None, :], 1.0, 0.0 * blocks)
    for i in range(1, 16):
        row = tl.sum(tl.where(r[None, None, :] == i, blocks, 0.0), 2, keep_dims=True)
        change = tl.sum(row * inverse, 1, keep_dims=True)
        inverse = tl.where(r[None, :, None] == i, inverse - change, inverse)
    return tl.reshape(tl.where(diagonal, inverse[:, :, None, :], 0.0), (BL, BL))


@triton.jit
def invert(system, BL: tl.constexpr, DOT: tl.constexpr):
    """(I + A)^-1, A strictly lower, BL = 16, 32 or 64.

    Powers of the whole A would grow like binomials where keys repeat. Between blocks of 16 there
    are at most three of them: with B the inverted diagonal and N = B A below it,
    (I + N)^-1 B = (I + N^2)(I - N) B.
    """
    inverse = invert_blocks(system, BL)
    if BL > 16:
        block = tl.arange(0, BL) // 16
        below = tl.where(block[:, None] > block[None, :], system, 0.0)
        below = dot_full(inverse, below, DOT)
        inverse -= dot_full(below, inverse, DOT)
        if BL > 32:
            twice = dot_full(below, below, DOT)
            inverse += dot_full(twice, inverse, DOT)
    return inverse


@triton.jit
def solve(
    keys, values, alpha, rate, inverse, errors, seen, kept, ends, length,
    D_K: tl.constexpr, D_V: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DELAY: tl.constexpr, KEEP: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """T if KEEP, errors T V, seen T p K; the gates' products a up to t, and spans to the end."""
    z = tl.program_id(0).to(tl.int64)
    t, c, gates = tl.arange(0, BL), tl.arange(0, BK), z * length
    inside = t < length
    logs = tl.log(vector(alpha + gates, t, length, 1.0))
    after = t[:, None] > t[None, :]
    tl.store(ends + gates + t, tl.exp(tl.sum(tl.where(after, logs[:, None], 0.0), 0)), mask=inside)
    whole = tl.sum(tl.where(t[:, None] <= t[None, :], logs[:, None], 0.0), 0)
    tl.store(kept + gates + t, tl.exp(whole), mask=inside)
    before = tl.exp(tl.sum(tl.where((t + DELAY)[:, None] <= t[None, :], logs[:, None], 0.0), 0))
    k = tile(keys + z * length * D_K, t, c, length, D_K)
    share = vector(rate + gates, t, length, 0.0)[None, :]
    share *= spans_of(alpha + gates, length, DELAY, BL)
    t_inverse = invert(tl.where(after, share * dot(k, tl.trans(k), DOT), 0.0), BL, DOT)
    if KEEP:
        put(inverse + z * length * length, t_inverse, t, t, length, length)
    read = dot_split(t_inverse * before[None, :], k, DOT)
    put(seen + z * length * D_K, read, t, c, length, D_K)
    for first in range(0, D_V, BV):
        o = first + tl.arange(0, BV)
        v = tile(values + z * length * D_V, t, o, length, D_V)
        put(errors + z * length * D_V, dot_split(t_inverse, v, DOT), t, o, length, D_V)


@triton.jit
def carry(
    keys, rate, errors, seen, kept, ends, begins, initial, start, entered, written, final, pieces,
    rows, heads, length,
    D_K: tl.constexpr, D_V: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    RESETS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """W as it enters every piece and leaves the last, and what every piece writes, U."""
    row = tl.program_id(0).to(tl.int64)
    t, c, o = tl.arange(0, BL), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    matrix = c[:, None] * D_V + o[None, :]
    inside = (c < D_K)[:, None] & (o < D_V)[None, :]
    w = tile(start + row * D_K * D_V, c, o, D_K, D_V)
    for n in range(pieces):
        z = row + n * rows
        if RESETS:
            begin = tl.load(begins + z // heads) != 0
            at = initial + (row % heads) * D_K * D_V + matrix
            w = tl.where(begin, tl.load(at, mask=inside & begin, other=0.0), w)
        put(entered + z * D_K * D_V, w, c, o, D_K, D_V)
        u = tile(errors + z * length * D_V, t, o, length, D_V)
        u -= dot(tile(seen + z * length * D_K, t, c, length, D_K), w, DOT)
        put(written + z * length * D_V, u, t, o, length, D_V)
        end = vector(ends + z * length, t, length, 0.0) * vector(rate + z * length, t, length, 0.0)
        k = tile(keys + z * length * D_K, t, c, length, D_K).to(tl.float32)
        keep = tl.load(kept + z * length + length - 1)
        w = keep * w + dot(tl.trans(end[:, None] * k), u, DOT)
    put(final + row * D_K * D_V, w, c, o, D_K, D_V)


@triton.jit
def read(
    queries, keys, alpha, rate, kept, entered, written, y, length,
    D_K: tl.constexpr, D_V: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Y of every piece from the memory that enters it and what it writes."""
    z = tl.program_id(0).to(tl.int64)
    t, c, gates = tl.arange(0, BL), tl.arange(0, BK), z * length
    q = tile(queries + z * length * D_K, t, c, length, D_K)
    k = tile(keys + z * length * D_K, t, c, length, D_K)
    share = spans_of(alpha + gates, length, NOW, BL) * vector(rate + gates, t, length, 0.0)[None, :]
    during = (share * dot(q, tl.trans(k), DOT)).to(DOT)
    before = vector(kept + gates, t, length, 0.0)
    for first in range(0, D_V, BV):
        o = first + tl.arange(0, BV)
        w = tile(entered + z * D_K * D_V, c, o, D_K, D_V)
        u = tile(written + z * length * D_V, t, o, length, D_V)
        value = before[:, None] * dot(q, w, DOT) + dot(during, u, DOT)
        put(y + z * length * D_V, value, t, o, length, D_V)


@triton.jit
def read_backward(
    d_y, queries, keys, alpha, rate, kept, entered, written, d_queries, d_keys_read, d_written,
    d_logs, d_rate_read, length,
    D_K: tl.constexpr, D_V: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """All gradients of the read but that of W: of the queries whole, of the others this part."""
    z = tl.program_id(0).to(tl.int64)
    t, gates, inputs, outputs = tl.arange(0, BL), z * length, z * length * D_K, z * length * D_V
    spans = spans_of(alpha + gates, length, NOW, BL)
    share = spans * vector(rate + gates, t, length, 0.0)[None, :]
    alike = alike_of(queries + inputs, keys + inputs, length, D_K, BL, BC, DOT)
    mixed = tl.trans((share * alike).to(DOT))
    d_mixed = tl.zeros((BL, BL), tl.float32)
    for first in range(0, D_V, BV):
        o = first + tl.arange(0, BV)
        dy = tile(d_y + outputs, t, o, length, D_V)
        d_mixed += dot(dy, tl.trans(tile(written + outputs, t, o, length, D_V)), DOT)
        put(d_written + outputs, dot(mixed, dy, DOT), t, o, length, D_V)
    d_share = d_mixed * alike
    tl.store(d_rate_read + gates + t, tl.sum(d_share * spans, 0), mask=t < length)
    later = gates_of_spans(d_share * share, NOW, BL)
    d_alike = (d_mixed * share).to(DOT)
    before, d_before = vector(kept + gates, t, length, 0.0), tl.zeros((BL,), tl.float32)
    for first in range(0, D_K, BC):
        c = first + tl.arange(0, BC)
        d_read = tl.zeros((BL, BC), tl.float32)
        for second in range(0, D_V, BV):
            o = second + tl.arange(0, BV)
            w = tile(entered + z * D_K * D_V, c, o, D_K, D_V)
            d_read += dot(tile(d_y + outputs, t, o, length, D_V), tl.trans(w), DOT)
        q = tile(queries + inputs, t, c, length, D_K)
        put(d_keys_read + inputs, dot(tl.trans(d_alike), q, DOT), t, c, length, D_K)
        d_before += tl.sum(d_read * q.to(tl.float32), 1)
        dq = dot(d_alike, tile(keys + inputs, t, c, length, D_K), DOT)
        put(d_queries + inputs, dq + before[:, None] * d_read, t, c, length, D_K)
    rest, first_gate = gates_of_products(d_before * before, NOW, BL)
    tl.store(d_logs + gates + t + 1, later + rest, mask=t + 1 < length)
    tl.store(d_logs + gates, first_gate)


@triton.jit
def carry_backward(
    d_y, queries, keys, rate, seen, kept, ends, begins, d_final, d_written, leaving, d_initial,
    d_start, pieces, rows, heads, length,
    D_K: tl.constexpr, D_V: tl.constexpr, BL: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    RESETS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """From the last piece to the first: the gradient of W as it leaves each; completes dU."""
    row = tl.program_id(0).to(tl.int64)
    t, c, o = tl.arange(0, BL), tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    d = tile(d_final + row * D_K * D_V, c, o, D_K, D_V)
    for i in range(pieces):
        z = row + (pieces - 1 - i) * rows
        put(leaving + z * D_K * D_V, d, c, o, D_K, D_V)
        end = vector(ends + z * length, t, length, 0.0) * vector(rate + z * length, t, length, 0.0)
        k = tile(keys + z * length * D_K, t, c, length, D_K).to(tl.float32)
        du = tile(d_written + z * length * D_V, t, o, length, D_V)
        du += dot(end[:, None] * k, d, DOT)
        put(d_written + z * length * D_V, du, t, o, length, D_V)
        q = tile(queries + z * length * D_K, t, c, length, D_K)
        dy = tile(d_y + z * length * D_V, t, o, length, D_V).to(tl.float32)
        faded = vector(kept + z * length, t, length, 0.0)[:, None] * dy
        d = tl.load(kept + z * length + length - 1) * d + dot(tl.trans(q), faded, DOT)
        d -= dot(tl.trans(tile(seen + z * length * D_K, t, c, length, D_K)), du, DOT)
        if RESETS:
            begin = tl.load(begins + z // heads) != 0
            at = d_initial + row * D_K * D_V + c[:, None] * D_V + o[None, :]
            here = (c < D_K)[:, None] & (o < D_V)[None, :] & begin
            tl.store(at, tl.load(at, mask=here, other=0.0) + d, mask=here)
            d = tl.where(begin, 0.0, d)
    put(d_start + row * D_K * D_V, d, c, o, D_K, D_V)


@triton.jit
def _through_memory(
    g, written, entered, leaving, c, length,
    D_K: tl.constexpr, D_V: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """In the columns c of the keys: gradients of p K, -g W, of end K, U D, and of a_end."""
    t = tl.arange(0, BL)
    d_seen = tl.zeros((BL, BC), tl.float32)
    d_end = tl.zeros((BL, BC), tl.float32)
    d_keep = tl.zeros((BC,), tl.float32)
    for first in range(0, D_V, BV):
        o = first + tl.arange(0, BV)
        w = tile(entered, c, o, D_K, D_V)
        d = tile(leaving, c, o, D_K, D_V)
        d_seen -= dot(tile(g, t, o, length, D_V), tl.trans(w), DOT)
        d_end += dot(tile(written, t, o, length, D_V), tl.trans(d), DOT)
        d_keep += tl.sum(w.to(tl.float32) * d.to(tl.float32), 1)
    return d_seen, d_end, d_keep


@triton.jit
def solve_backward(
    keys, alpha, rate, kept, ends, inverse, entered, leaving, written, d_written, d_keys_read,
    d_logs, d_rate_read, d_keys, d_values, d_alpha, d_rate, length,
    D_K: tl.constexpr, D_V: tl.constexpr, BL: tl.constexpr, BC: tl.constexpr, BV: tl.constexpr,
    DELAY: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Gradients of the solved system and of the write, added to those of the read."""
    z = tl.program_id(0).to(tl.int64)
    t, gates, inputs, outputs = tl.arange(0, BL), z * length, z * length * D_K, z * length * D_V
    keys, alpha, written, d_values = (
        keys + inputs,
        alpha + gates,
        written + outputs,
        d_values + outputs,
    )
    entered, leaving = entered + z * D_K * D_V, leaving + z * D_K * D_V
    turned = tl.trans(tile(inverse + z * length * length, t, t, length, length))
    d_system = tl.zeros((BL, BL), tl.float32)
    for first in range(0, D_V, BV):
        o = first + tl.arange(0, BV)
        g = dot_full(turned, tile(d_written + outputs, t, o, length, D_V), DOT)
        put(d_values, g, t, o, length, D_V)
        d_system -= dot(g, tl.trans(tile(written, t, o, length, D_V)), DOT)
    # the gradient of the values is read back below, by other threads
    tl.debug_barrier()
    r, end = vector(rate + gates, t, length, 0.0), vector(ends + gates, t, length, 0.0)
    d_system = tl.where(t[:, None] > t[None, :], d_system, 0.0)
    d_system *= spans_of(alpha, length, DELAY, BL)
    d_alike = d_system * r[None, :]
    d_alike = (d_alike + tl.trans(d_alike)).to(DOT)
    d_system *= alike_of(keys, keys, length, D_K, BL, BC, DOT)
    dr, later = tl.sum(d_system, 0), gates_of_spans(d_system * r[None, :], DELAY, BL)
    before = vector(kept + gates, t - DELAY, length, 1.0)
    whole, to_end = tl.zeros((BL,), tl.float32), tl.zeros((BL,), tl.float32)
    d_keep = tl.zeros((BC,), tl.float32)
    for first in range(0, D_K, BC):
        c = first + tl.arange(0, BC)
        d_seen, d_end, d_kept = _through_memory(
            d_values, written, entered, leaving, c, length, D_K, D_V, BL, BC, BV, DOT
        )
        k = tile(keys, t, c, length, D_K)
        dk = tile(d_keys_read + inputs, t, c, length, D_K) + dot(d_alike, k, DOT)
        dk += before[:, None] * d_seen + (end * r)[:, None] * d_end
        put(d_keys + inputs, dk, t, c, length, D_K)
        whole += tl.sum(d_seen * k.to(tl.float32), 1) * before
        to_end += tl.sum(d_end * k.to(tl.float32), 1) * end
        d_keep += d_kept
    dr += to_end + vector(d_rate_read + gates, t, length, 0.0)
    tl.store(d_rate + gates + t, dr, mask=t < length)
    all_kept = tl.sum(d_keep, 0) * tl.load(kept + gates + length - 1)
    rest, first_gate = gates_of_products(whole, DELAY, BL)
    # the span to the end counts alpha_s for every step before s, and a_end all of them
    later += rest + tl.sum(tl.where(t[:, None] <= t[None, :], (to_end * r)[:, None], 0.0), 0)
    later += all_kept + vector(d_logs + gates, t + 1, length, 0.0)
    later /= vector(alpha, t + 1, length, 1.0)
    tl.store(d_alpha + gates + t + 1, later, mask=t + 1 < length)
    first_gate += all_kept + tl.load(d_logs + gates)
    tl.store(d_alpha + gates, first_gate / tl.load(alpha))
