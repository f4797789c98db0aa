"""Gradients of Newton-Schulz from a momentum on Hopper, in Gluon, for matrices of up to 64 x 256:
what `newton_schulz_kernels.momentum_backward` computes, laid out by hand.

Triton gives the warps of a program rows alone where products follow each other, so that eight warps
would do the work of four, and four hold a matrix of 64 x 256 only by spilling. Here two groups of
four warps have half of the columns each, a sum stays in the registers that a product adds to, and
iterates wait in shared memory for the way back. Gluon has no interpreter: CPU tests compile this
kernel, and run it with a language of their own (tests/gluon_on_cpu.py).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from atlas_lm.ops.triton.newton_schulz_kernels import chosen

WARPS = 8
MOST_STEPS = 5
"""Whose iterates have room in shared memory."""
MATRIX = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 128, 16]))
"""Who holds what of a matrix `[64, 256]`."""
SQUARE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 2], [16, 32, 16]))
"""Of a matrix `[64, 64]`."""
STREAM = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
NARROW_STREAM = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0]))
"""Of pairs `[64, 256]` and `[64, 64]` on their way from memory to shared memory."""
OPERAND = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
"""How what is multiplied lies in shared memory."""


@gluon.constexpr_function
def mixed(talls):
    """Whether memory holds some matrices as they are and others transposed."""
    return len(set(talls)) > 1


@gluon.constexpr_function
def ratios(schedule):
    """b / c of every step, and c."""
    return tuple((b / c, c) for b, c in schedule)


@gluon.jit
def _places(TALL: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Where the elements of a matrix are, TALL if it is transposed; which there are."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, MATRIX))[:, None]
    columns = gl.arange(0, 256, gl.SliceLayout(0, MATRIX))[None, :]
    at = columns * ROWS + rows if TALL else rows * COLUMNS + columns
    return at, (rows < ROWS) & (columns < COLUMNS)


@gluon.jit
def _load_as(base, TALL: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    at, inside = _places(TALL, ROWS, COLUMNS)
    return gl.load(base + at, mask=inside, other=0.0)


@gluon.jit
def _load(base, n, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TALLS: gl.constexpr):
    """Matrix n of a memory, which is at `base`.

    Addresses are made in each branch: made before, those of both would be held.
    """
    if mixed(TALLS):
        if chosen(n, TALLS):
            x = _load_as(base, True, ROWS, COLUMNS)
        else:
            x = _load_as(base, False, ROWS, COLUMNS)
    else:
        x = _load_as(base, TALLS[0], ROWS, COLUMNS)
    return x


@gluon.jit
def _store_as(base, x, TALL: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    at, inside = _places(TALL, ROWS, COLUMNS)
    gl.store(base + at, x.to(base.dtype.element_ty), mask=inside)


@gluon.jit
def _store(base, x, n, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TALLS: gl.constexpr):
    if mixed(TALLS):
        if chosen(n, TALLS):
            _store_as(base, x, True, ROWS, COLUMNS)
        else:
            _store_as(base, x, False, ROWS, COLUMNS)
    else:
        _store_as(base, x, TALLS[0], ROWS, COLUMNS)


@gluon.jit
def _operand(COLUMNS: gl.constexpr):
    """Shared memory for a matrix of 64 rows."""
    return gl.allocate_shared_memory(gl.bfloat16, [64, COLUMNS], OPERAND)


@gluon.jit
def _inner(x, y):
    """The sum of all products, <X, Y>."""
    return gl.sum(gl.sum(x.to(gl.float32) * y.to(gl.float32), 1), 0)


@gluon.jit
def _begun(x, y):
    """X Y^T of operands in shared memory, not waited for."""
    zeros = gl.zeros((64, 64), gl.float32, SQUARE)
    return warpgroup_mma(x, y.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _coefficient(i, WHICH: gl.constexpr, SCHEDULE: gl.constexpr):
    """b / c or c of step i, which only the running program knows."""
    RATIOS: gl.constexpr = ratios(SCHEDULE)
    value = gl.to_tensor(RATIOS[0][WHICH])
    for j in gl.static_range(1, len(SCHEDULE)):
        value = gl.where(i == j, RATIOS[j][WHICH], value)
    return value


@gluon.jit
def _step(x, kept, i, gram_at, inner_at, SCHEDULE: gl.constexpr):
    """X + (b A + c A A) X with A = X X^T; leaves X in `kept`."""
    kept.store(x.to(gl.bfloat16))
    fence_async_shared()
    gram = warpgroup_mma_wait(0, deps=(_begun(kept, kept),))
    gram_at.store(gram.to(gl.bfloat16))
    fence_async_shared()
    square = warpgroup_mma(gram_at, gram_at, gram * _coefficient(i, 0, SCHEDULE))
    inner_at.store((square * _coefficient(i, 1, SCHEDULE)).to(gl.bfloat16))
    fence_async_shared()
    return warpgroup_mma_wait(0, deps=(warpgroup_mma(inner_at, kept, x, is_async=True),))


@gluon.jit
def _step_backward(grad, kept, rounded, i, gram_at, inner_at, outer_at, SCHEDULE: gl.constexpr):
    """The gradient of X = `kept` from that of the step's result.

    Through the squares, with Q = X dY^T: T = b Q + c (Q A + A Q), and its transpose, times X.
    """
    ratio, c = _coefficient(i, 0, SCHEDULE), _coefficient(i, 1, SCHEDULE)
    rounded.store(grad.to(gl.bfloat16))
    fence_async_shared()
    gram, outer = _begun(kept, kept), _begun(kept, rounded)
    gram = warpgroup_mma_wait(1, deps=(gram,))
    gram_at.store(gram.to(gl.bfloat16))
    fence_async_shared()
    square = warpgroup_mma(gram_at, gram_at, gram * ratio, is_async=True)
    outer = warpgroup_mma_wait(1, deps=(outer,))
    outer_at.store(outer.to(gl.bfloat16))
    square = warpgroup_mma_wait(0, deps=(square,))
    inner_at.store((square * c).to(gl.bfloat16))
    fence_async_shared()
    half = warpgroup_mma(outer_at, gram_at, outer * ratio, is_async=True)
    half = warpgroup_mma(gram_at, outer_at, half, is_async=True)
    grad = warpgroup_mma(inner_at, rounded, grad, is_async=True)
    half = c * warpgroup_mma_wait(1, deps=(half,))
    outer_at.store(half.to(gl.bfloat16))
    turned = outer_at.permute((1, 0)).load(SQUARE)
    gram_at.store((half + turned.to(gl.float32)).to(gl.bfloat16))
    fence_async_shared()
    return warpgroup_mma_wait(0, deps=(warpgroup_mma(gram_at, kept, grad, is_async=True),))


@gluon.jit
def _left(short, share, START: gl.constexpr, PAIRS: gl.constexpr, ROWS: gl.constexpr):
    """The short sides of 64 pairs times their shares."""
    pairs = START + gl.arange(0, 64, gl.SliceLayout(1, NARROW_STREAM))
    rows = gl.arange(0, 64, gl.SliceLayout(0, NARROW_STREAM))
    inside = (pairs < PAIRS)[:, None] & (rows < ROWS)[None, :]
    left = gl.load(short + (pairs[:, None] * ROWS + rows[None, :]), mask=inside, other=0.0)
    weight = gl.load(share + pairs, mask=pairs < PAIRS, other=0.0)
    return left, weight


@gluon.jit
def _right(long, START: gl.constexpr, PAIRS: gl.constexpr, COLUMNS: gl.constexpr):
    """The long sides of 64 pairs."""
    pairs = START + gl.arange(0, 64, gl.SliceLayout(1, STREAM))[:, None]
    columns = gl.arange(0, 256, gl.SliceLayout(0, STREAM))[None, :]
    inside = (pairs < PAIRS) & (columns < COLUMNS)
    return gl.load(long + pairs * COLUMNS + columns, mask=inside, other=0.0)


@gluon.jit
def _momentum(
    entered, n, short, long, share, kept, left_at, right_at, PAIRS: gl.constexpr,
    ROWS: gl.constexpr, COLUMNS: gl.constexpr, TALLS: gl.constexpr,
):  # fmt: skip
    """kept S + sum_i share_i u_i x_i^T, 64 pairs at a time."""
    s = _load(entered, n, ROWS, COLUMNS, TALLS).to(gl.float32) * gl.load(kept)
    for start in gl.static_range(0, PAIRS, 64):
        left, weight = _left(short, share, start, PAIRS, ROWS)
        right_at.store(_right(long, start, PAIRS, COLUMNS))
        left_at.store((left.to(gl.float32) * weight[:, None]).to(gl.bfloat16))
        fence_async_shared()
        made = warpgroup_mma(left_at.permute((1, 0)), right_at, s, is_async=True)
        s = warpgroup_mma_wait(0, deps=(made,))
    return s


@gluon.jit(do_not_specialize=["points", "count"])
def momentum_backward(
    entering, short_1, long_1, short_2, long_2, short_3, long_3, share, kept, grad_out,
    last, grad_weights, grad_momentum, grad_last, grad_kept, points, count,
    SIZE: gl.constexpr, PLACES: gl.constexpr, SCHEDULE: gl.constexpr, GAIN: gl.constexpr,
    PAIRS: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr, TALLS: gl.constexpr,
):  # fmt: skip
    """Gradients of the momenta at `count` stride points, <grad_weights, NS(S)> and <dS, S> of each,
    of the matrices at all PLACES: one of them at one stride point a program.

    grad_momentum has room for one matrix more after the stride points of each memory.
    """
    STEPS: gl.constexpr = len(SCHEDULE)
    gram_at, inner_at, outer_at, rounded = _operand(64), _operand(64), _operand(64), _operand(256)
    iterates = gl.allocate_shared_memory(gl.bfloat16, [STEPS, 64, 256], OPERAND)
    turn = gl.program_id(0)
    index, n = (turn // len(PLACES)).to(gl.int64), turn % len(PLACES)
    short, long = chosen(n, (short_1, short_2, short_3)), chosen(n, (long_1, long_2, long_3))
    memory, place = index // points, chosen(n, PLACES)
    entered = entering + place + memory * SIZE
    x = _momentum(
        entered, n, short + memory * (PAIRS * ROWS), long + memory * (PAIRS * COLUMNS),
        share + index * PAIRS, kept + index, inner_at, rounded, PAIRS, ROWS, COLUMNS, TALLS,
    )  # fmt: skip
    scale = 1.0 / gl.sqrt(_inner(x, x) + 1e-12)
    x *= scale
    for i in range(STEPS):
        x = _step(x, iterates.index(i), i, gram_at, inner_at, SCHEDULE)
    weights = _load(grad_weights + place + memory * SIZE, n, ROWS, COLUMNS, TALLS)
    reads = _load(grad_out + place + index * SIZE, n, ROWS, COLUMNS, TALLS)
    gl.store(grad_last + n * count + index, GAIN * _inner(weights, x))
    grad = reads.to(gl.float32) + gl.load(last + index) * weights
    for j in range(STEPS):
        i = STEPS - 1 - j
        grad = _step_backward(
            grad, iterates.index(i), rounded, i, gram_at, inner_at, outer_at, SCHEDULE
        )
    first = iterates.index(0).load(MATRIX).to(gl.float32)
    grad = (grad - _inner(grad, first) * first) * (scale * GAIN)
    after = grad_momentum + place + (index + memory) * SIZE
    _store(after, grad, n, ROWS, COLUMNS, TALLS)
    s = _load(entered, n, ROWS, COLUMNS, TALLS)
    gl.store(grad_kept + n * count + index, _inner(grad, s))
