"""Newton-Schulz on chip, one matrix at a time: values, exact gradients, and both from a momentum.

Matrices lie with the short side first, padded with zeros, which stay zeros; TALL says that memory
holds the transpose. A matrix is a tuple of NB blocks `[BR, BC]` side by side: it is only ever
multiplied from the left or summed over its columns, and the products of a block need the registers
of a block. The plain form only: in bfloat16 the form that iterates on the Gram matrix is off by 0.3
to 15,000 for matrices of low rank, where this one is off by 0.03.
"""
# Compile-time values are plain Python values to Triton, and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false

import triton
import triton.language as tl

from atlas_lm.ops.triton.tiles import dot, tile


@triton.jit
def _layout(
    block: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TALL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Where the elements of a block lie in memory, and which there are."""
    rows, columns = tl.arange(0, BR)[:, None], block * BC + tl.arange(0, BC)[None, :]
    inside = (rows < ROWS) & (columns < COLUMNS)
    return columns * ROWS + rows if TALL else rows * COLUMNS + columns, inside


@triton.jit
def _load(
    base,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TALL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    NB: tl.constexpr,
):
    """The matrix at `base` in float32."""
    xs = ()
    for n in tl.static_range(NB):
        offsets, inside = _layout(n, ROWS, COLUMNS, TALL, BR, BC)
        xs += (tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32),)
    return xs


@triton.jit
def _store(
    base,
    values,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TALL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    NB: tl.constexpr,
):
    for n in tl.static_range(NB):
        offsets, inside = _layout(n, ROWS, COLUMNS, TALL, BR, BC)
        tl.store(base + offsets, values[n].to(base.dtype.element_ty), mask=inside)


@triton.jit
def _scaled(xs, scale, NB: tl.constexpr):
    made = ()
    for n in tl.static_range(NB):
        made += (xs[n] * scale,)
    return made


@triton.jit
def _plus(xs, ys, scale, NB: tl.constexpr):
    """xs + scale ys"""
    made = ()
    for n in tl.static_range(NB):
        made += (xs[n] + scale * ys[n],)
    return made


@triton.jit
def _inner(xs, ys, NB: tl.constexpr):
    """The sum of all products, <X, Y>."""
    products = xs[0] * ys[0]
    for n in tl.static_range(1, NB):
        products += xs[n] * ys[n]
    return tl.sum(tl.sum(products, 1), 0)


@triton.jit
def _inverse_norm(xs, NB: tl.constexpr):
    return 1.0 / tl.sqrt(_inner(xs, xs, NB) + 1e-12)


@triton.jit
def _coefficient(i, WHICH: tl.constexpr, SCHEDULE: tl.constexpr):
    """a, b or c of step i, which only the running program knows."""
    value = tl.full((), SCHEDULE[0][WHICH], tl.float32)
    for j in tl.static_range(1, len(SCHEDULE)):
        value = tl.where(i == j, SCHEDULE[j][WHICH], value)
    return value


@triton.jit
def _abc(i, SCHEDULE: tl.constexpr):
    a = _coefficient(i, 0, SCHEDULE)
    b = _coefficient(i, 1, SCHEDULE)
    return a, b, _coefficient(i, 2, SCHEDULE)


@triton.jit
def _squares(xs, i, SCHEDULE: tl.constexpr, DOT: tl.constexpr, NB: tl.constexpr):
    """X X^T, rounded, and the matrix that a step multiplies X by, but for a."""
    _, b, c = _abc(i, SCHEDULE)
    gram = dot(xs[0], tl.trans(xs[0].to(DOT)), DOT)
    for n in tl.static_range(1, NB):
        gram += dot(xs[n], tl.trans(xs[n].to(DOT)), DOT)
    return gram.to(DOT), (b * gram + c * dot(gram, gram, DOT)).to(DOT)


@triton.jit
def _step(xs, inner, i, SCHEDULE: tl.constexpr, DOT: tl.constexpr, NB: tl.constexpr):
    a, _, _ = _abc(i, SCHEDULE)
    made = ()
    for n in tl.static_range(NB):
        made += (a * xs[n] + dot(inner, xs[n], DOT),)
    return made


@triton.jit
def _steps(xs, SCHEDULE: tl.constexpr, DOT: tl.constexpr, NB: tl.constexpr):
    """NS of the matrix."""
    xs = _scaled(xs, _inverse_norm(xs, NB), NB)
    for i in range(len(SCHEDULE)):
        _, inner = _squares(xs, i, SCHEDULE, DOT, NB)
        xs = _step(xs, inner, i, SCHEDULE, DOT, NB)
    return xs


@triton.jit
def _kept(scratch, i, block, ROOM: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """Where a block of iterate i is kept."""
    at = scratch + i * ROOM + block * (BR * BC)
    return at + tl.arange(0, BR)[:, None] * BC + tl.arange(0, BC)[None, :]


@triton.jit
def _square(scratch, i, WHICH: tl.constexpr, ROOM: tl.constexpr, BR: tl.constexpr):
    """Where one of the two `_squares` of iterate i is kept, if they are."""
    at = scratch + (i + 1) * ROOM - (2 - WHICH) * (BR * BR)
    return at + tl.arange(0, BR)[:, None] * BR + tl.arange(0, BR)[None, :]


@triton.jit
def _iterate(
    scratch,
    xs,
    SCHEDULE: tl.constexpr,
    DOT: tl.constexpr,
    ROOM: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    NB: tl.constexpr,
):
    """The last iterate; those before it, rounded, go to `scratch`.

    Kept in registers instead they spill: up to 70 KB a thread for 64 x 256. The squares of several
    blocks are kept too; of one they are made again in less time than they take there and back.
    """
    # the matrix before this one may still be read there
    tl.debug_barrier()
    for i in range(len(SCHEDULE)):
        for n in tl.static_range(NB):
            tl.store(_kept(scratch, i, n, ROOM, BR, BC), xs[n].to(DOT))
        gram, inner = _squares(xs, i, SCHEDULE, DOT, NB)
        if NB > 1:
            tl.store(_square(scratch, i, 0, ROOM, BR), gram)
            tl.store(_square(scratch, i, 1, ROOM, BR), inner)
        xs = _step(xs, inner, i, SCHEDULE, DOT, NB)
    tl.debug_barrier()
    return xs


@triton.jit
def _outer(
    scratch,
    grads,
    i,
    DOT: tl.constexpr,
    ROOM: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    NB: tl.constexpr,
):
    """dY X^T of iterate i, and its transpose added."""
    outer = tl.zeros((BR, BR), tl.float32)
    for n in tl.static_range(NB):
        x = tl.load(_kept(scratch, i, n, ROOM, BR, BC))
        outer += dot(grads[n], tl.trans(x), DOT)
    return outer + tl.trans(outer)


@triton.jit
def _iterate_backward(
    scratch,
    grads,
    scale,
    SCHEDULE: tl.constexpr,
    DOT: tl.constexpr,
    ROOM: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    NB: tl.constexpr,
):
    """The gradient of the matrix from that of the last iterate, through the normalisation too.

    After barriers iterates are read again: held, they would spill.
    """
    for j in range(len(SCHEDULE)):
        i = len(SCHEDULE) - 1 - j
        a, b, c = _abc(i, SCHEDULE)
        if NB > 1:
            gram = tl.load(_square(scratch, i, 0, ROOM, BR))
            inner = tl.load(_square(scratch, i, 1, ROOM, BR))
        else:
            x = (tl.load(_kept(scratch, i, 0, ROOM, BR, BC)),)
            gram, inner = _squares(x, i, SCHEDULE, DOT, NB)
        rounded, made = (), ()
        for n in tl.static_range(NB):
            rounded += (grads[n].to(DOT),)
            made += (a * grads[n] + dot(inner, rounded[n], DOT),)
        grads = made
        tl.debug_barrier()
        outer = _outer(scratch, rounded, i, DOT, ROOM, BR, BC, NB)
        mixed = dot(outer, gram, DOT)
        through = (b * outer + c * (mixed + tl.trans(mixed))).to(DOT)
        tl.debug_barrier()
        made = ()
        for n in tl.static_range(NB):
            made += (grads[n] + dot(through, tl.load(_kept(scratch, i, n, ROOM, BR, BC)), DOT),)
        grads = made
    start = ()
    for n in tl.static_range(NB):
        start += (tl.load(_kept(scratch, 0, n, ROOM, BR, BC)).to(tl.float32),)
    grads = _plus(grads, start, -_inner(grads, start, NB), NB)
    return _scaled(grads, scale, NB)


@triton.jit
def _written(
    sums,
    short,
    long,
    share,
    START: tl.constexpr,
    PAIRS_AT_ONCE: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    NB: tl.constexpr,
    DOT: tl.constexpr,
):
    """With sum_i share_i short_i long_i^T over some pairs."""
    pairs = START + tl.arange(0, PAIRS_AT_ONCE)
    weight = tl.load(share + pairs, mask=pairs < PAIRS, other=0.0)
    left = tile(short, pairs, tl.arange(0, BR), PAIRS, ROWS).to(tl.float32) * weight[:, None]
    left = tl.trans(left.to(DOT))
    made = ()
    for n in tl.static_range(NB):
        right = tile(long, pairs, n * BC + tl.arange(0, BC), PAIRS, COLUMNS)
        made += (sums[n] + dot(left, right, DOT),)
    return made


@triton.jit
def _momentum(
    entering,
    short,
    long,
    share,
    kept,
    index,
    points,
    SIZE: tl.constexpr,
    PAIRS: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TALL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    NB: tl.constexpr,
    DOT: tl.constexpr,
):
    """kept S + sum_i share_i u_i x_i^T at stride point `index`: 64 pairs at a time, then TAIL."""
    memory = (index // points).to(tl.int64)
    entered = _load(entering + memory * SIZE, ROWS, COLUMNS, TALL, BR, BC, NB)
    s = _scaled(entered, tl.load(kept + index), NB)
    share += index.to(tl.int64) * PAIRS
    short += memory * (PAIRS * ROWS)
    long += memory * (PAIRS * COLUMNS)
    FULL: tl.constexpr = PAIRS // 64 * 64
    for start in tl.static_range(0, FULL, 64):
        s = _written(s, short, long, share, start, 64, PAIRS, ROWS, COLUMNS, BR, BC, NB, DOT)
    if PAIRS > FULL:
        s = _written(s, short, long, share, FULL, TAIL, PAIRS, ROWS, COLUMNS, BR, BC, NB, DOT)
    return s


@triton.jit
def forward(
    matrix,
    out,
    SCHEDULE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TALL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    NB: tl.constexpr,
    DOT: tl.constexpr,
):
    """NS of matrix `[n, ., .]`, one a program."""
    at = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    xs = _load(matrix + at, ROWS, COLUMNS, TALL, BR, BC, NB)
    xs = _steps(xs, SCHEDULE, DOT, NB)
    _store(out + at, xs, ROWS, COLUMNS, TALL, BR, BC, NB)


@triton.jit
def backward(
    matrix,
    grad_out,
    grad_matrix,
    scratch,
    count,
    SCHEDULE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TALL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    NB: tl.constexpr,
    DOT: tl.constexpr,
    ROOM: tl.constexpr,
):
    """The gradient of `count` matrices, shared out among the programs."""
    scratch += tl.program_id(0).to(tl.int64) * (len(SCHEDULE) * ROOM)
    for turn in range(tl.program_id(0), count, tl.num_programs(0)):
        at = tl.full((), turn, tl.int64) * (ROWS * COLUMNS)
        s = _load(matrix + at, ROWS, COLUMNS, TALL, BR, BC, NB)
        scale = _inverse_norm(s, NB)
        _iterate(scratch, _scaled(s, scale, NB), SCHEDULE, DOT, ROOM, BR, BC, NB)
        grads = _load(grad_out + at, ROWS, COLUMNS, TALL, BR, BC, NB)
        grads = _iterate_backward(scratch, grads, scale, SCHEDULE, DOT, ROOM, BR, BC, NB)
        _store(grad_matrix + at, grads, ROWS, COLUMNS, TALL, BR, BC, NB)


@triton.jit
def _momentum_step(
    entering, short, long, share, kept, out, index, points, SIZE: tl.constexpr,
    SCHEDULE: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TALL: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    NB: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """NS of the momentum at stride point `index`."""
    s = _momentum(
        entering, short, long, share, kept, index, points, SIZE,
        PAIRS, TAIL, ROWS, COLUMNS, TALL, BR, BC, NB, DOT,
    )  # fmt: skip
    xs = _steps(s, SCHEDULE, DOT, NB)
    _store(out + index.to(tl.int64) * SIZE, xs, ROWS, COLUMNS, TALL, BR, BC, NB)


@triton.jit(do_not_specialize=["points"])
def momentum_forward(
    entering, short_1, long_1, short_2, long_2, short_3, long_3, share, kept, out, points,
    SIZE: tl.constexpr, PLACES: tl.constexpr, SCHEDULE: tl.constexpr, PAIRS: tl.constexpr,
    TAIL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TALLS: tl.constexpr,
    BR: tl.constexpr, BC: tl.constexpr, NB: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """NS of the momentum of one matrix at one stride point a program; neighbours read the same
    pairs.

    A memory has as many matrices as there are PLACES, at most three, all of one size: where each
    begins among its weights, SIZE of them. TALLS: which are transposed there.
    """
    shorts, longs = (short_1, short_2, short_3), (long_1, long_2, long_3)
    index = tl.program_id(0) // len(PLACES)
    for n in tl.static_range(len(PLACES)):
        if tl.program_id(0) % len(PLACES) == n:
            _momentum_step(
                entering + PLACES[n], shorts[n], longs[n], share, kept, out + PLACES[n], index,
                points, SIZE, SCHEDULE, PAIRS, TAIL, ROWS, COLUMNS, TALLS[n], BR, BC, NB, DOT,
            )  # fmt: skip


@triton.jit
def _momentum_gradient(
    entering, short, long, share, kept, grad_out, last, grad_weights, grad_momentum, grad_last,
    grad_kept, scratch, index, points, SIZE: tl.constexpr, SCHEDULE: tl.constexpr,
    PAIRS: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TALL: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, NB: tl.constexpr, DOT: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """The gradient of the momentum at stride point `index`, <grad_weights, NS(S)> and <dS, S>."""
    memory = index // points
    s = _momentum(
        entering, short, long, share, kept, index, points, SIZE,
        PAIRS, TAIL, ROWS, COLUMNS, TALL, BR, BC, NB, DOT,
    )  # fmt: skip
    scale = _inverse_norm(s, NB)
    step = _iterate(scratch, _scaled(s, scale, NB), SCHEDULE, DOT, ROOM, BR, BC, NB)
    of_weights = _load(grad_weights + memory * SIZE, ROWS, COLUMNS, TALL, BR, BC, NB)
    tl.store(grad_last + index, _inner(of_weights, step, NB))
    grads = _load(grad_out + index * SIZE, ROWS, COLUMNS, TALL, BR, BC, NB)
    grads = _plus(grads, of_weights, tl.load(last + index), NB)
    grads = _iterate_backward(scratch, grads, scale, SCHEDULE, DOT, ROOM, BR, BC, NB)
    at = grad_momentum + (index + memory) * SIZE
    _store(at, grads, ROWS, COLUMNS, TALL, BR, BC, NB)
    entered = _load(entering + memory * SIZE, ROWS, COLUMNS, TALL, BR, BC, NB)
    tl.store(grad_kept + index, _inner(grads, entered, NB))


@triton.jit(do_not_specialize=["points", "count"])
def momentum_backward(
    entering, short_1, long_1, short_2, long_2, short_3, long_3, share, kept, grad_out, last,
    grad_weights, grad_momentum, grad_last, grad_kept, scratch, points, count, SIZE: tl.constexpr,
    PLACES: tl.constexpr, SCHEDULE: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TALLS: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr, NB: tl.constexpr, DOT: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Gradients of the momenta at `count` stride points, <grad_weights, NS(S)> and <dS, S> of each,
    of the matrices at all PLACES (see `momentum_forward`).

    The last is nearly 0, since steps do not depend on the length of a momentum: dS is not rounded.
    grad_momentum has room for one matrix more after the stride points of each memory.
    """
    shorts, longs = (short_1, short_2, short_3), (long_1, long_2, long_3)
    scratch += tl.program_id(0).to(tl.int64) * (len(SCHEDULE) * ROOM)
    for turn in range(tl.program_id(0), count * len(PLACES), tl.num_programs(0)):
        index = tl.full((), turn // len(PLACES), tl.int64)
        for n in tl.static_range(len(PLACES)):
            if turn % len(PLACES) == n:
                _momentum_gradient(
                    entering + PLACES[n], shorts[n], longs[n], share, kept, grad_out + PLACES[n],
                    last, grad_weights + PLACES[n], grad_momentum + PLACES[n],
                    grad_last + n * count, grad_kept + n * count, scratch, index, points, SIZE,
                    SCHEDULE, PAIRS, TAIL, ROWS, COLUMNS, TALLS[n], BR, BC, NB, DOT, ROOM,
                )  # fmt: skip
