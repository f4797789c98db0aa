"""Newton-Schulz on chip, one matrix at a time: values, exact gradients, and both from a momentum.

Matrices lie with the short side first, `[BR, BC]` padded with zeros, which stay zeros. TALL says
that memory holds the transpose. The plain form only: in bfloat16 the form that iterates on the Gram
matrix is off by 0.3 to 15,000 for matrices of low rank, where this one is off by 0.03.
"""
# Compile-time values are plain Python values to Triton, and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false

import triton
import triton.language as tl

from atlas_lm.ops.triton.tiles import dot, tile


@triton.jit
def _layout(
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TALL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    """Where the elements of a matrix lie in memory, and which there are."""
    rows, columns = tl.arange(0, BR)[:, None], tl.arange(0, BC)[None, :]
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
):
    """The matrix at `base` in float32."""
    offsets, inside = _layout(ROWS, COLUMNS, TALL, BR, BC)
    return tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store(
    base,
    value,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TALL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
):
    offsets, inside = _layout(ROWS, COLUMNS, TALL, BR, BC)
    tl.store(base + offsets, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def _total(x):
    return tl.sum(tl.sum(x, 1), 0)


@triton.jit
def _inverse_norm(x):
    return 1.0 / tl.sqrt(_total(x * x) + 1e-12)


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
def _step(x, i, SCHEDULE: tl.constexpr, DOT: tl.constexpr):
    a, b, c = _abc(i, SCHEDULE)
    rounded = x.to(DOT)
    gram = dot(rounded, tl.trans(rounded), DOT)
    inner = b * gram + c * dot(gram, gram, DOT)
    return a * x + dot(inner, rounded, DOT)


@triton.jit
def _kept(scratch, i, BR: tl.constexpr, BC: tl.constexpr):
    """Where iterate i is kept."""
    return scratch + i * (BR * BC) + tl.arange(0, BR)[:, None] * BC + tl.arange(0, BC)[None, :]


@triton.jit
def _iterate(
    scratch, x, SCHEDULE: tl.constexpr, DOT: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """The last iterate; those before it, rounded, go to `scratch`.

    Kept in registers instead they spill: up to 70 KB a thread for 64 x 256.
    """
    # the matrix before this one may still be read there
    tl.debug_barrier()
    for i in range(len(SCHEDULE)):
        tl.store(_kept(scratch, i, BR, BC), x.to(DOT))
        x = _step(x, i, SCHEDULE, DOT)
    tl.debug_barrier()
    return x


@triton.jit
def _iterate_backward(
    scratch,
    grad,
    scale,
    SCHEDULE: tl.constexpr,
    DOT: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    RELOAD: tl.constexpr,
):
    """The gradient of the matrix from that of the last iterate, through the normalisation too.

    RELOAD reads iterates again instead of holding them: what is large does not fit in registers.
    """
    for j in range(len(SCHEDULE)):
        i = len(SCHEDULE) - 1 - j
        a, b, c = _abc(i, SCHEDULE)
        x = tl.load(_kept(scratch, i, BR, BC))
        gram = dot(x, tl.trans(x), DOT)
        inner = b * gram + c * dot(gram, gram, DOT)
        rounded = grad.to(DOT)
        grad = a * grad + dot(inner, rounded, DOT)
        if RELOAD:
            tl.debug_barrier()
            x = tl.load(_kept(scratch, i, BR, BC))
        outer = dot(rounded, tl.trans(x), DOT)
        outer += tl.trans(outer)
        mixed = dot(outer, gram, DOT)
        through = b * outer + c * (mixed + tl.trans(mixed))
        if RELOAD:
            tl.debug_barrier()
            x = tl.load(_kept(scratch, i, BR, BC))
        grad += dot(through, x, DOT)
    start = tl.load(_kept(scratch, 0, BR, BC)).to(tl.float32)
    return scale * (grad - start * _total(grad * start))


@triton.jit
def _written(
    short,
    long,
    share,
    START: tl.constexpr,
    BLOCK: tl.constexpr,
    PAIRS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DOT: tl.constexpr,
):
    """sum_i share_i short_i long_i^T over BLOCK pairs."""
    pairs = START + tl.arange(0, BLOCK)
    weight = tl.load(share + pairs, mask=pairs < PAIRS, other=0.0)
    left = tile(short, pairs, tl.arange(0, BR), PAIRS, ROWS).to(tl.float32) * weight[:, None]
    right = tile(long, pairs, tl.arange(0, BC), PAIRS, COLUMNS)
    return dot(tl.trans(left.to(DOT)), right, DOT)


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
    DOT: tl.constexpr,
):
    """kept S + sum_i share_i u_i x_i^T at stride point `index`: 64 pairs at a time, then TAIL."""
    memory = (index // points).to(tl.int64)
    s = tl.load(kept + index) * _load(entering + memory * SIZE, ROWS, COLUMNS, TALL, BR, BC)
    share += index.to(tl.int64) * PAIRS
    short += memory * (PAIRS * ROWS)
    long += memory * (PAIRS * COLUMNS)
    FULL: tl.constexpr = PAIRS // 64 * 64
    for start in tl.static_range(0, FULL, 64):
        s += _written(short, long, share, start, 64, PAIRS, ROWS, COLUMNS, BR, BC, DOT)
    if PAIRS > FULL:
        s += _written(short, long, share, FULL, TAIL, PAIRS, ROWS, COLUMNS, BR, BC, DOT)
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
    DOT: tl.constexpr,
):
    """NS of matrix `[n, ., .]`, one a program."""
    at = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    x = _load(matrix + at, ROWS, COLUMNS, TALL, BR, BC)
    x = x * _inverse_norm(x)
    for i in range(len(SCHEDULE)):
        x = _step(x, i, SCHEDULE, DOT)
    _store(out + at, x, ROWS, COLUMNS, TALL, BR, BC)


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
    DOT: tl.constexpr,
    RELOAD: tl.constexpr,
):
    """The gradient of `count` matrices, shared out among the programs."""
    scratch += tl.program_id(0).to(tl.int64) * (len(SCHEDULE) * BR * BC)
    for turn in range(tl.program_id(0), count, tl.num_programs(0)):
        at = tl.full((), turn, tl.int64) * (ROWS * COLUMNS)
        s = _load(matrix + at, ROWS, COLUMNS, TALL, BR, BC)
        scale = _inverse_norm(s)
        _iterate(scratch, s * scale, SCHEDULE, DOT, BR, BC)
        grad = _load(grad_out + at, ROWS, COLUMNS, TALL, BR, BC)
        grad = _iterate_backward(scratch, grad, scale, SCHEDULE, DOT, BR, BC, RELOAD)
        _store(grad_matrix + at, grad, ROWS, COLUMNS, TALL, BR, BC)


@triton.jit(do_not_specialize=["points"])
def momentum_forward(
    entering,
    short,
    long,
    share,
    kept,
    out,
    points,
    SIZE: tl.constexpr,
    SCHEDULE: tl.constexpr,
    PAIRS: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TALL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DOT: tl.constexpr,
):
    """NS of the momentum at one stride point a program; neighbours read the same pairs.

    Matrices stand SIZE apart: they may be parts of all the weights of a memory.
    """
    index = tl.program_id(0)
    s = _momentum(
        entering, short, long, share, kept, index, points, SIZE,
        PAIRS, TAIL, ROWS, COLUMNS, TALL, BR, BC, DOT,
    )  # fmt: skip
    x = s * _inverse_norm(s)
    for i in range(len(SCHEDULE)):
        x = _step(x, i, SCHEDULE, DOT)
    _store(out + index.to(tl.int64) * SIZE, x, ROWS, COLUMNS, TALL, BR, BC)


@triton.jit(do_not_specialize=["points", "count"])
def momentum_backward(
    entering,
    short,
    long,
    share,
    kept,
    grad_out,
    last,
    grad_weights,
    grad_momentum,
    grad_last,
    grad_kept,
    scratch,
    points,
    count,
    SIZE: tl.constexpr,
    SCHEDULE: tl.constexpr,
    PAIRS: tl.constexpr,
    TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TALL: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DOT: tl.constexpr,
    RELOAD: tl.constexpr,
):
    """Gradients of the momenta at `count` stride points, <grad_weights, NS(S)> and <dS, S> of each.

    The last is nearly 0, since steps do not depend on the length of a momentum: dS is not rounded.
    grad_momentum has room for one matrix more after the stride points of each memory.
    """
    scratch += tl.program_id(0).to(tl.int64) * (len(SCHEDULE) * BR * BC)
    for turn in range(tl.program_id(0), count, tl.num_programs(0)):
        index = tl.full((), turn, tl.int64)
        memory = index // points
        s = _momentum(
            entering, short, long, share, kept, index, points, SIZE,
            PAIRS, TAIL, ROWS, COLUMNS, TALL, BR, BC, DOT,
        )  # fmt: skip
        scale = _inverse_norm(s)
        step = _iterate(scratch, s * scale, SCHEDULE, DOT, BR, BC)
        of_weights = _load(grad_weights + memory * SIZE, ROWS, COLUMNS, TALL, BR, BC)
        tl.store(grad_last + index, _total(of_weights * step))
        grad = _load(grad_out + index * SIZE, ROWS, COLUMNS, TALL, BR, BC)
        grad += tl.load(last + index) * of_weights
        grad = _iterate_backward(scratch, grad, scale, SCHEDULE, DOT, BR, BC, RELOAD)
        _store(grad_momentum + (index + memory) * SIZE, grad, ROWS, COLUMNS, TALL, BR, BC)
        entered = _load(entering + memory * SIZE, ROWS, COLUMNS, TALL, BR, BC)
        tl.store(grad_kept + index, _total(grad * entered))
