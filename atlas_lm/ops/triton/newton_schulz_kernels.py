"""Newton-Schulz on chip, one matrix at a time: values, exact gradients, and both from a momentum.

Matrices lie with the short side first, padded with zeros, which stay zeros; `tall` says that memory
holds the transpose. The plain form only: in bfloat16 the form that iterates on the Gram matrix is
off by 0.3 to 15,000 for matrices of low rank, where this one is off by 0.03. For the same reason
iterates stay in float32 between steps: rounded to bfloat16 there, the result for a matrix of rank 1
is off by 1.1 of its length, of rank 16 by 0.25.

A matrix is a tuple of BLOCKS side by side, each given by its first column and its width: it is only
ever multiplied from the left or summed over its columns. Iterates are divided by all a so far, so
that a step is X <- X + (b A + c A A) X with the b and c of SCHEDULE; GAIN is the product of all a.
"""
# Compile-time values are plain Python values to Triton, and `constexpr` to a type checker.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportIndexIssue=false

import triton
import triton.language as tl

from atlas_lm.ops.triton.tiles import dot, tile


@triton.jit
def _places(
    base, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BEGIN: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Where the elements of a block are, in a matrix as it is and transposed; which there are."""
    rows, columns = tl.arange(0, BR)[:, None], BEGIN + tl.arange(0, WIDTH)[None, :]
    inside = (rows < ROWS) & (columns < COLUMNS)
    return base + (rows * COLUMNS + columns), base + (columns * ROWS + rows), inside


@triton.jit
def _load_block(
    base, tall, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BEGIN: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    wide, transposed, inside = _places(base, ROWS, COLUMNS, BR, BEGIN, WIDTH)
    if tall:
        x = tl.load(transposed, mask=inside, other=0.0)
    else:
        x = tl.load(wide, mask=inside, other=0.0)
    return x.to(tl.float32)


@triton.jit
def _load(base, tall, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BLOCKS):
    """The matrix at `base` in float32."""
    xs = ()
    for n in tl.static_range(len(BLOCKS)):
        xs += (_load_block(base, tall, ROWS, COLUMNS, BR, BLOCKS[n][0], BLOCKS[n][1]),)
    return xs


@triton.jit
def _store(base, xs, tall, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BLOCKS):
    for n in tl.static_range(len(BLOCKS)):
        wide, transposed, inside = _places(base, ROWS, COLUMNS, BR, BLOCKS[n][0], BLOCKS[n][1])
        if tall:
            tl.store(transposed, xs[n].to(base.dtype.element_ty), mask=inside)
        else:
            tl.store(wide, xs[n].to(base.dtype.element_ty), mask=inside)


@triton.jit
def _rounded(xs, DOT: tl.constexpr):
    made = ()
    for n in tl.static_range(len(xs)):
        made += (xs[n].to(DOT),)
    return made


@triton.jit
def _scaled(xs, scale):
    made = ()
    for n in tl.static_range(len(xs)):
        made += (xs[n] * scale,)
    return made


@triton.jit
def _plus(xs, ys, scale):
    """xs + scale ys"""
    made = ()
    for n in tl.static_range(len(xs)):
        made += (xs[n] + scale * ys[n].to(tl.float32),)
    return made


@triton.jit
def _plus_product(xs, left, rights, DOT: tl.constexpr):
    """xs + left rights"""
    made = ()
    for n in tl.static_range(len(xs)):
        made += (xs[n] + dot(left, rights[n], DOT),)
    return made


@triton.jit
def _product(xs, ys, DOT: tl.constexpr):
    """X Y^T"""
    made = dot(xs[0], tl.trans(ys[0]), DOT)
    for n in tl.static_range(1, len(xs)):
        made += dot(xs[n], tl.trans(ys[n]), DOT)
    return made


@triton.jit
def _inner(xs, ys):
    """The sum of all products, <X, Y>."""
    total = tl.sum(xs[0] * ys[0].to(tl.float32))
    for n in tl.static_range(1, len(xs)):
        total += tl.sum(xs[n] * ys[n].to(tl.float32))
    return total


@triton.jit
def _halved(x):
    """The left and the right half of a block."""
    x = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
    return tl.split(tl.permute(x, (0, 2, 1)))


@triton.jit
def _inner_block(
    x, base, tall, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr,
    BEGIN: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """<X, Y> with a block of the matrix at `base`; of a wide one half at a time has room."""
    if WIDTH > 128:
        left, right = _halved(x)
        HALF: tl.constexpr = WIDTH // 2
        total = tl.sum(left * _load_block(base, tall, ROWS, COLUMNS, BR, BEGIN, HALF))
        total += tl.sum(right * _load_block(base, tall, ROWS, COLUMNS, BR, BEGIN + HALF, HALF))
    else:
        total = tl.sum(x * _load_block(base, tall, ROWS, COLUMNS, BR, BEGIN, WIDTH))
    return total


@triton.jit
def _inner_with(
    xs, base, tall, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BLOCKS
):
    """<X, Y> with the matrix at `base`."""
    total = 0.0
    for n in tl.static_range(len(BLOCKS)):
        total += _inner_block(xs[n], base, tall, ROWS, COLUMNS, BR, BLOCKS[n][0], BLOCKS[n][1])
    return total


@triton.jit
def _inverse_norm(xs):
    return 1.0 / tl.sqrt(_inner(xs, xs) + 1e-12)


@triton.jit
def _coefficient(i, WHICH: tl.constexpr, SCHEDULE: tl.constexpr):
    """b or c of step i, which only the running program knows."""
    value = tl.full((), SCHEDULE[0][WHICH], tl.float32)
    for j in tl.static_range(1, len(SCHEDULE)):
        value = tl.where(i == j, SCHEDULE[j][WHICH], value)
    return value


@triton.jit
def _squares(xs, i, SCHEDULE: tl.constexpr, DOT: tl.constexpr):
    """X X^T, rounded, and the matrix whose product with X a step adds to it; of a rounded X.

    Sums begin with what is added to them: that takes fewer registers.
    """
    b, c = _coefficient(i, 0, SCHEDULE), _coefficient(i, 1, SCHEDULE)
    gram = _product(xs, xs, DOT)
    return gram.to(DOT), (b * gram + dot(c * gram, gram, DOT)).to(DOT)


@triton.jit
def _step(xs, rounded, i, SCHEDULE: tl.constexpr, DOT: tl.constexpr):
    _, inner = _squares(rounded, i, SCHEDULE, DOT)
    return _plus_product(xs, inner, rounded, DOT)


@triton.jit
def _steps(xs, SCHEDULE: tl.constexpr, GAIN: tl.constexpr, DOT: tl.constexpr):
    """NS of the matrix."""
    xs = _scaled(xs, _inverse_norm(xs))
    for i in range(len(SCHEDULE)):
        xs = _step(xs, _rounded(xs, DOT), i, SCHEDULE, DOT)
    return _scaled(xs, GAIN)


@triton.jit
def _kept(scratch, i, BR: tl.constexpr, BLOCKS, n: tl.constexpr):
    """Where block n of iterate i is kept."""
    rows, columns = tl.arange(0, BR)[:, None], tl.arange(0, BLOCKS[n][1])[None, :]
    at = i * (BR * (BLOCKS[-1][0] + BLOCKS[-1][1])) + BR * BLOCKS[n][0]
    return scratch + at + (rows * BLOCKS[n][1] + columns)


@triton.jit
def _kept_iterate(scratch, i, BR: tl.constexpr, BLOCKS):
    xs = ()
    for n in tl.static_range(len(BLOCKS)):
        xs += (tl.load(_kept(scratch, i, BR, BLOCKS, n)),)
    return xs


@triton.jit
def _keep(scratch, rounded, i, BR: tl.constexpr, BLOCKS):
    for n in tl.static_range(len(BLOCKS)):
        tl.store(_kept(scratch, i, BR, BLOCKS, n), rounded[n])


@triton.jit
def _iterate(scratch, xs, SCHEDULE: tl.constexpr, DOT: tl.constexpr, BR: tl.constexpr, BLOCKS):
    """All iterates before the last, rounded, to `scratch`: held, they would spill."""
    # the matrix before this one may still be read there
    tl.debug_barrier()
    for i in range(len(SCHEDULE) - 1):
        rounded = _rounded(xs, DOT)
        _keep(scratch, rounded, i, BR, BLOCKS)
        xs = _step(xs, rounded, i, SCHEDULE, DOT)
    _keep(scratch, _rounded(xs, DOT), len(SCHEDULE) - 1, BR, BLOCKS)
    tl.debug_barrier()


@triton.jit
def _through(outer, gram, i, SCHEDULE: tl.constexpr, DOT: tl.constexpr):
    """The matrix whose product with iterate i, X, is the gradient of X by way of its squares: with
    Q = dY X^T and A = X X^T, b Q + c (Q A + A Q) and its transpose."""
    b, c = _coefficient(i, 0, SCHEDULE), _coefficient(i, 1, SCHEDULE)
    rounded = (c * outer).to(DOT)
    half = b * outer + dot(rounded, gram, DOT) + dot(gram, rounded, DOT)
    return (half + tl.trans(half)).to(DOT)


@triton.jit
def _iterate_backward(
    scratch, grads, scale, SCHEDULE: tl.constexpr, DOT: tl.constexpr, BR: tl.constexpr, BLOCKS
):
    """The gradient of the matrix from that of the last iterate, through the normalisation too.

    The iterate before is asked for as soon as there are registers for it; X_0 once more, at last.
    """
    xs = _kept_iterate(scratch, len(SCHEDULE) - 1, BR, BLOCKS)
    for j in range(len(SCHEDULE)):
        i = len(SCHEDULE) - 1 - j
        rounded = _rounded(grads, DOT)
        gram, inner = _squares(xs, i, SCHEDULE, DOT)
        grads = _plus_product(grads, inner, rounded, DOT)
        through = _through(_product(xs, rounded, DOT), gram, i, SCHEDULE, DOT)
        before = _kept_iterate(scratch, tl.maximum(i - 1, 0), BR, BLOCKS)
        grads = _plus_product(grads, through, xs, DOT)
        xs = before
    return _scaled(_plus(grads, xs, -_inner(grads, xs)), scale)


@triton.jit
def _left(
    short, START: tl.constexpr, AT_ONCE: tl.constexpr, PAIRS: tl.constexpr, ROWS: tl.constexpr,
    BR: tl.constexpr,
):  # fmt: skip
    """The short sides of some pairs, side by side."""
    pairs, rows = START + tl.arange(0, AT_ONCE)[None, :], tl.arange(0, BR)[:, None]
    inside = (rows < ROWS) & (pairs < PAIRS)
    return tl.load(short + (pairs * ROWS + rows), mask=inside, other=0.0)


@triton.jit
def _written(
    s, left, long, share, START: tl.constexpr, AT_ONCE: tl.constexpr, PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCKS, DOT: tl.constexpr,
):  # fmt: skip
    """With sum_i share_i short_i long_i^T over some pairs."""
    pairs, rights = START + tl.arange(0, AT_ONCE), ()
    weight = tl.load(share + pairs, mask=pairs < PAIRS, other=0.0)
    for n in tl.static_range(len(BLOCKS)):
        columns = BLOCKS[n][0] + tl.arange(0, BLOCKS[n][1])
        rights += (tile(long, pairs, columns, PAIRS, COLUMNS),)
    return _plus_product(s, left.to(tl.float32) * weight[None, :], rights, DOT)


@triton.jit
def _momentum(
    entering, short, long, share, kept, index, points, tall, SIZE: tl.constexpr,
    PAIRS: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BR: tl.constexpr, BLOCKS, DOT: tl.constexpr,
):  # fmt: skip
    """kept S + sum_i share_i u_i x_i^T at stride point `index`: 64 pairs at a time, then TAIL."""
    memory = (index // points).to(tl.int64)
    share += index.to(tl.int64) * PAIRS
    short += memory * (PAIRS * ROWS)
    long += memory * (PAIRS * COLUMNS)
    FIRST: tl.constexpr = 64 if PAIRS >= 64 else TAIL
    left = _left(short, 0, FIRST, PAIRS, ROWS, BR)
    s = _load(entering + memory * SIZE, tall, ROWS, COLUMNS, BR, BLOCKS)
    s = _scaled(s, tl.load(kept + index))
    s = _written(s, left, long, share, 0, FIRST, PAIRS, COLUMNS, BLOCKS, DOT)
    FULL: tl.constexpr = PAIRS // 64 * 64
    for start in tl.static_range(64, FULL, 64):
        left = _left(short, start, 64, PAIRS, ROWS, BR)
        s = _written(s, left, long, share, start, 64, PAIRS, COLUMNS, BLOCKS, DOT)
    if FULL > 0 and PAIRS > FULL:
        left = _left(short, FULL, TAIL, PAIRS, ROWS, BR)
        s = _written(s, left, long, share, FULL, TAIL, PAIRS, COLUMNS, BLOCKS, DOT)
    return s


@triton.jit
def forward(
    matrix, out, SCHEDULE: tl.constexpr, GAIN: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, TALL: tl.constexpr, BR: tl.constexpr, BLOCKS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """NS of matrix `[n, ., .]`, one a program."""
    at = tl.program_id(0).to(tl.int64) * (ROWS * COLUMNS)
    xs = _steps(_load(matrix + at, TALL, ROWS, COLUMNS, BR, BLOCKS), SCHEDULE, GAIN, DOT)
    _store(out + at, xs, TALL, ROWS, COLUMNS, BR, BLOCKS)


@triton.jit
def backward(
    matrix, grad_out, grad_matrix, scratch, count, SCHEDULE: tl.constexpr, GAIN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TALL: tl.constexpr, BR: tl.constexpr,
    BLOCKS: tl.constexpr, DOT: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """The gradient of `count` matrices, shared out among the programs."""
    scratch += tl.program_id(0).to(tl.int64) * ROOM
    for turn in range(tl.program_id(0), count, tl.num_programs(0)):
        at = tl.full((), turn, tl.int64) * (ROWS * COLUMNS)
        s = _load(matrix + at, TALL, ROWS, COLUMNS, BR, BLOCKS)
        scale = _inverse_norm(s)
        _iterate(scratch, _scaled(s, scale), SCHEDULE, DOT, BR, BLOCKS)
        grads = _load(grad_out + at, TALL, ROWS, COLUMNS, BR, BLOCKS)
        grads = _iterate_backward(scratch, grads, scale * GAIN, SCHEDULE, DOT, BR, BLOCKS)
        _store(grad_matrix + at, grads, TALL, ROWS, COLUMNS, BR, BLOCKS)


@triton.jit
def chosen(n, values):
    """values[n], of up to three, where only the running program knows n."""
    value = values[0]
    for j in tl.static_range(1, len(values)):
        value = tl.where(n == j, values[j], value)
    return value


@triton.jit(do_not_specialize=["points"])
def momentum_forward(
    entering, short_1, long_1, short_2, long_2, short_3, long_3, share, kept, out, points,
    SIZE: tl.constexpr, PLACES: tl.constexpr, SCHEDULE: tl.constexpr, GAIN: tl.constexpr,
    PAIRS: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TALLS: tl.constexpr, BR: tl.constexpr, BLOCKS: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """NS of the momentum of one matrix at one stride point a program; neighbours read the same
    pairs.

    A memory has as many matrices as there are PLACES, at most three, all of one size: where each
    begins among its weights, SIZE of them. TALLS: which are transposed there.
    """
    index, n = tl.program_id(0) // len(PLACES), tl.program_id(0) % len(PLACES)
    short, long = chosen(n, (short_1, short_2, short_3)), chosen(n, (long_1, long_2, long_3))
    place, tall = chosen(n, PLACES), chosen(n, TALLS)
    s = _momentum(
        entering + place, short, long, share, kept, index, points, tall, SIZE,
        PAIRS, TAIL, ROWS, COLUMNS, BR, BLOCKS, DOT,
    )  # fmt: skip
    xs = _steps(s, SCHEDULE, GAIN, DOT)
    _store(out + place + index.to(tl.int64) * SIZE, xs, tall, ROWS, COLUMNS, BR, BLOCKS)


@triton.jit
def _step_gradient(
    weights, made, reads, last, tall, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr,
    BLOCKS,
):  # fmt: skip
    """<weights, made>, and the gradient of a step: reads + last weights."""
    of_weights = _load(weights, tall, ROWS, COLUMNS, BR, BLOCKS)
    of_last = _inner(of_weights, _load(made, tall, ROWS, COLUMNS, BR, BLOCKS))
    grads = _load(reads, tall, ROWS, COLUMNS, BR, BLOCKS)
    return of_last, _plus(grads, of_weights, tl.load(last))


@triton.jit
def _momentum_gradient(
    entering, short, long, share, kept, made, grad_out, last, grad_weights, grad_momentum,
    grad_last, grad_kept, scratch, index, points, tall, SIZE: tl.constexpr,
    SCHEDULE: tl.constexpr, GAIN: tl.constexpr, PAIRS: tl.constexpr, TAIL: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BR: tl.constexpr, BLOCKS, DOT: tl.constexpr,
):  # fmt: skip
    """The gradient of the momentum at stride point `index`, <grad_weights, made> and <dS, S>."""
    memory = index // points
    s = _momentum(
        entering, short, long, share, kept, index, points, tall, SIZE,
        PAIRS, TAIL, ROWS, COLUMNS, BR, BLOCKS, DOT,
    )  # fmt: skip
    scale = _inverse_norm(s)
    _iterate(scratch, _scaled(s, scale), SCHEDULE, DOT, BR, BLOCKS)
    at, weights = index * SIZE, grad_weights + memory * SIZE
    # what is bfloat16 takes twice the registers from one branch to the next: here it ends in each
    if tall:
        of_last, grads = _step_gradient(
            weights, made + at, grad_out + at, last + index, True, ROWS, COLUMNS, BR, BLOCKS
        )
    else:
        of_last, grads = _step_gradient(
            weights, made + at, grad_out + at, last + index, False, ROWS, COLUMNS, BR, BLOCKS
        )
    tl.store(grad_last + index, of_last)
    grads = _iterate_backward(scratch, grads, scale * GAIN, SCHEDULE, DOT, BR, BLOCKS)
    _store(grad_momentum + (index + memory) * SIZE, grads, tall, ROWS, COLUMNS, BR, BLOCKS)
    entered = entering + memory * SIZE
    tl.store(grad_kept + index, _inner_with(grads, entered, tall, ROWS, COLUMNS, BR, BLOCKS))


@triton.jit(do_not_specialize=["points", "count"])
def momentum_backward(
    entering, short_1, long_1, short_2, long_2, short_3, long_3, share, kept, made, grad_out,
    last, grad_weights, grad_momentum, grad_last, grad_kept, scratch, points, count,
    SIZE: tl.constexpr, PLACES: tl.constexpr, SCHEDULE: tl.constexpr, GAIN: tl.constexpr,
    PAIRS: tl.constexpr, TAIL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    TALLS: tl.constexpr, BR: tl.constexpr, BLOCKS: tl.constexpr, DOT: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    """Gradients of the momenta at `count` stride points, <grad_weights, NS(S)> and <dS, S> of each,
    of the matrices at all PLACES (see `momentum_forward`, whose results `made` are).

    The last is nearly 0, since steps do not depend on the length of a momentum: dS is not rounded.
    grad_momentum has room for one matrix more after the stride points of each memory.
    """
    scratch += tl.program_id(0).to(tl.int64) * ROOM
    for turn in range(tl.program_id(0), count * len(PLACES), tl.num_programs(0)):
        index, n = tl.full((), turn // len(PLACES), tl.int64), turn % len(PLACES)
        short, long = chosen(n, (short_1, short_2, short_3)), chosen(n, (long_1, long_2, long_3))
        place, tall = chosen(n, PLACES), chosen(n, TALLS)
        _momentum_gradient(
            entering + place, short, long, share, kept, made + place, grad_out + place, last,
            grad_weights + place, grad_momentum + place, grad_last + n * count,
            grad_kept + n * count, scratch, index, points, tall, SIZE, SCHEDULE, GAIN, PAIRS, TAIL,
            ROWS, COLUMNS, BR, BLOCKS, DOT,
        )  # fmt: skip
