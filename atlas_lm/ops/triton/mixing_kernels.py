"""Kernels of the mixing matrices: one program makes those of one piece of one row and head.

What is left of a pair's gradients follows the recurrence itself: S_t = theta_t S_{t-1} + its weight
at t, W_t = alpha_t W_{t-1} + S_t. So a program walks along the tokens and holds one row, P pairs
side by side (padded): no product, no logarithm, no quotient, and nothing larger than the result.
The backward walks back, with the rows that the forward wrote and momenta made again in `scratch`.
"""

# What Triton compiles is not what Python would run.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportOperatorIssue=false

import triton
import triton.language as tl

AHEAD = tl.constexpr(3)
"""Rows on their way from memory at a time: a walk would wait for each one otherwise. Not in the
loops over stride points, where the next address depends on what was loaded."""


@triton.jit
def weights_at(gamma, t, pairs, window):
    """gamma of token t at every pair: token t - j is pair t + window - 1 - j."""
    j = t + window - 1 - pairs
    return tl.load(gamma + t * window + j, mask=(j >= 0) & (j < window), other=0.0)


@triton.jit
def put_weights_at(d_gamma, value, t, pairs, window):
    j = t + window - 1 - pairs
    tl.store(d_gamma + t * window + j, value, mask=(j >= 0) & (j < window))


@triton.jit
def row_before(rows, t, columns, width):
    """Row t-1, zeros before the first."""
    return tl.load(rows + (t - 1) * width + columns, mask=(columns < width) & (t > 0), other=0.0)


@triton.jit
def before(base, t, first):
    """Number t-1, `first` before the first."""
    return tl.load(base + t - 1, mask=t > 0, other=first)


@triton.jit
def additive_forward(
    alpha, eta, theta, gamma, filled, kept, carried, share, momentum_kept, momentum_share,
    length, window, P: tl.constexpr,
):  # fmt: skip
    """gd (theta None) and momentum: what is left of what entered and of each pair."""
    z = tl.program_id(0).to(tl.int64)
    at = z * length
    width = length + window - 1
    pairs = tl.arange(0, P)
    inside = pairs < width
    written = tl.zeros((P,), tl.float32)
    pushed = tl.zeros((P,), tl.float32)
    left, persisted, entered = 1.0, 1.0, 0.0
    for t in tl.range(length, num_stages=AHEAD):
        retention = tl.load(alpha + at + t)
        left *= retention
        tl.store(kept + at + t, left)
        weight = -tl.load(eta + at + t) * weights_at(gamma + at * window, t, pairs, window)
        if theta is None:
            written = retention * written + weight
        else:
            persistence = tl.load(theta + at + t)
            pushed = persistence * pushed + weight
            persisted *= persistence
            # no gate is neutral here: a momentum moves the weights wherever it is added
            moves = 1.0 if filled is None else tl.load(filled + at + t)
            written = retention * written + moves * pushed
            entered = retention * entered + moves * persisted
            tl.store(carried + at + t, entered)
        tl.store(share + (at + t) * width + pairs, written, mask=inside)
    if theta is not None:
        tl.store(momentum_kept + z, persisted)
        tl.store(momentum_share + z * width + pairs, pushed, mask=inside)


@triton.jit
def gd_backward(
    alpha, eta, gamma, kept, share, d_alpha, d_eta, d_gamma, d_kept, d_share,
    length, window, P: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * length
    width = length + window - 1
    pairs = tl.arange(0, P)
    inside = pairs < width
    d_written = tl.zeros((P,), tl.float32)
    d_left = 0.0
    for i in tl.range(length, num_stages=AHEAD):
        t = length - 1 - i
        d_left += tl.load(d_kept + at + t)
        d_written += tl.load(d_share + (at + t) * width + pairs, mask=inside, other=0.0)
        weight = weights_at(gamma + at * window, t, pairs, window)
        rate = tl.load(eta + at + t)
        put_weights_at(d_gamma + at * window, -rate * d_written, t, pairs, window)
        tl.store(d_eta + at + t, -tl.sum(weight * d_written, 0))
        d_retention = tl.sum(row_before(share + at * width, t, pairs, width) * d_written, 0)
        tl.store(d_alpha + at + t, d_retention + before(kept + at, t, 1.0) * d_left)
        retention = tl.load(alpha + at + t)
        d_written *= retention
        d_left *= retention


@triton.jit
def remember_momenta(
    theta, eta, gamma, scratch, length, window, WEIGHED: tl.constexpr, P: tl.constexpr
):
    """S after every token into scratch `[length width+1]`: each pair's share, what entered last."""
    width = length + window - 1
    pairs = tl.arange(0, P)
    pushed = tl.zeros((P,), tl.float32)
    persisted = 1.0
    for t in range(length):
        persistence = tl.load(theta + t)
        weight = -weights_at(gamma, t, pairs, window)
        if WEIGHED:
            weight *= tl.load(eta + t)
        pushed = persistence * pushed + weight
        persisted *= persistence
        at = scratch + t * (width + 1)
        tl.store(at + pairs, pushed, mask=pairs < width)
        tl.store(at + width, persisted)
    tl.debug_barrier()


@triton.jit
def momentum_gradients_at(
    eta, gamma, scratch, d_eta, d_theta, d_gamma, d_pushed, d_persisted, t, length, window,
    WEIGHED: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Those of theta, gamma and, if it weighs gradients, eta, at one token."""
    width = length + window - 1
    pairs = tl.arange(0, P)
    scale = -1.0
    if WEIGHED:
        scale = -tl.load(eta + t)
        weight = weights_at(gamma, t, pairs, window)
        tl.store(d_eta + t, -tl.sum(weight * d_pushed, 0))
    put_weights_at(d_gamma, scale * d_pushed, t, pairs, window)
    here = (pairs < width) & (t > 0)
    at = scratch + (t - 1) * (width + 1)
    pushed = tl.load(at + pairs, mask=here, other=0.0)
    persisted = tl.load(at + width, mask=t > 0, other=1.0)
    tl.store(d_theta + t, tl.sum(pushed * d_pushed, 0) + persisted * d_persisted)


@triton.jit
def momentum_backward(
    alpha, eta, theta, gamma, filled, kept, carried, share, scratch,
    d_alpha, d_eta, d_theta, d_gamma, d_kept, d_carried, d_share, d_momentum_kept, d_momentum_share,
    length, window, total, programs, P: tl.constexpr,
):  # fmt: skip
    """Programs take turns, so that their scratch stays in the cache."""
    program = tl.program_id(0)
    width = length + window - 1
    pairs = tl.arange(0, P)
    inside = pairs < width
    scratch += program.to(tl.int64) * length * (width + 1)
    for turn in range(program, total, programs):
        z = tl.cast(turn, tl.int64)
        at = z * length
        weights = gamma + at * window
        remember_momenta(theta + at, eta + at, weights, scratch, length, window, True, P)
        d_written = tl.zeros((P,), tl.float32)
        d_pushed = tl.load(d_momentum_share + z * width + pairs, mask=inside, other=0.0)
        d_persisted = tl.load(d_momentum_kept + z)
        d_left, d_entered = 0.0, 0.0
        for i in tl.range(length, num_stages=AHEAD):
            t = length - 1 - i
            d_left += tl.load(d_kept + at + t)
            d_entered += tl.load(d_carried + at + t)
            d_written += tl.load(d_share + (at + t) * width + pairs, mask=inside, other=0.0)
            moves = 1.0 if filled is None else tl.load(filled + at + t)
            d_pushed += moves * d_written
            d_persisted += moves * d_entered
            momentum_gradients_at(
                eta + at, weights, scratch, d_eta + at, d_theta + at, d_gamma + at * window,
                d_pushed, d_persisted, t, length, window, True, P,
            )  # fmt: skip
            written = row_before(share + at * width, t, pairs, width)
            d_retention = before(kept + at, t, 1.0) * d_left
            d_retention += before(carried + at, t, 0.0) * d_entered
            tl.store(d_alpha + at + t, d_retention + tl.sum(written * d_written, 0))
            retention = tl.load(alpha + at + t)
            persistence = tl.load(theta + at + t)
            d_written *= retention
            d_left *= retention
            d_entered *= retention
            d_pushed *= persistence
            d_persisted *= persistence
        tl.debug_barrier()


@triton.jit
def stepping_forward(
    alpha, eta, theta, gamma, points, live, kept, steps, momentum_kept, momentum_share,
    length, window, count, stride, INSIDE: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """muon: what is left of each stride point's step, and the momentum of each point.

    INSIDE: eta weighs the gradients, not the steps. `stride` between the points of two programs.
    """
    z = tl.program_id(0).to(tl.int64)
    at = z * length
    points += z * stride
    s = tl.arange(0, M)
    slots = tl.load(points + s, mask=s < count, other=-1)
    rate = tl.load(live + z * stride + s, mask=s < count, other=0.0)
    alive = tl.sum(rate, 0).to(tl.int32)
    if not INSIDE:
        rate *= tl.load(eta + at + slots, mask=s < count, other=0.0)
    left = 1.0
    made = tl.zeros((M,), tl.float32)
    for t in tl.range(length, num_stages=AHEAD):
        retention = tl.load(alpha + at + t)
        left *= retention
        made = retention * made + tl.where(slots == t, rate, 0.0)
        tl.store(kept + at + t, left)
        tl.store(steps + (at + t) * count + s, made, mask=s < count)
    width = length + window - 1
    put_momenta(
        theta + at, eta + at, gamma + at * window, points, momentum_kept + z * (count + 1),
        momentum_share + z * (count + 1) * width, length, window, count, alive, INSIDE, P,
    )  # fmt: skip


@triton.jit
def put_momenta(
    theta, eta, gamma, points, momentum_kept, momentum_share, length, window, count, alive,
    INSIDE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """S at the stride points that live, zeros for the others, and S after the last token."""
    width = length + window - 1
    pairs = tl.arange(0, P)
    inside = pairs < width
    pushed = tl.zeros((P,), tl.float32)
    persisted = 1.0
    made = 0
    for t in range(length):
        persistence = tl.load(theta + t)
        weight = -weights_at(gamma, t, pairs, window)
        if INSIDE:
            weight *= tl.load(eta + t)
        pushed = persistence * pushed + weight
        persisted *= persistence
        now = tl.load(points + made, mask=made < alive, other=-1) == t
        tl.store(momentum_share + made * width + pairs, pushed, mask=inside & now)
        tl.store(momentum_kept + made, persisted, mask=now)
        made += now.to(tl.int32)
    for dead in range(alive, count):
        tl.store(momentum_share + dead * width + pairs, tl.zeros((P,), tl.float32), mask=inside)
        tl.store(momentum_kept + dead, 0.0)
    tl.store(momentum_share + count * width + pairs, pushed, mask=inside)
    tl.store(momentum_kept + count, persisted)


@triton.jit
def steps_backward(
    alpha, kept, steps, d_alpha, d_eta, d_kept, d_steps, slots, lives, length, count,
    INSIDE: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    s = tl.arange(0, M)
    d_left = 0.0
    d_made = tl.zeros((M,), tl.float32)
    for i in tl.range(length, num_stages=AHEAD):
        t = length - 1 - i
        d_left += tl.load(d_kept + t)
        d_made += tl.load(d_steps + t * count + s, mask=s < count, other=0.0)
        if not INSIDE:
            tl.store(d_eta + t, tl.sum(tl.where(slots == t, lives * d_made, 0.0), 0))
        d_retention = tl.sum(row_before(steps, t, s, count) * d_made, 0)
        tl.store(d_alpha + t, d_retention + before(kept, t, 1.0) * d_left)
        retention = tl.load(alpha + t)
        d_made *= retention
        d_left *= retention


@triton.jit
def momenta_backward(
    theta, eta, gamma, points, scratch, d_eta, d_theta, d_gamma, d_momentum_kept, d_momentum_share,
    length, window, count, alive, INSIDE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    width = length + window - 1
    pairs = tl.arange(0, P)
    inside = pairs < width
    remember_momenta(theta, eta, gamma, scratch, length, window, INSIDE, P)
    d_pushed = tl.load(d_momentum_share + count * width + pairs, mask=inside, other=0.0)
    d_persisted = tl.load(d_momentum_kept + count)
    made = alive - 1
    for i in range(length):
        t = length - 1 - i
        now = tl.load(points + made, mask=made >= 0, other=-1) == t
        d_pushed += tl.load(d_momentum_share + made * width + pairs, mask=inside & now, other=0.0)
        d_persisted += tl.load(d_momentum_kept + made, mask=now, other=0.0)
        made -= now.to(tl.int32)
        momentum_gradients_at(
            eta, gamma, scratch, d_eta, d_theta, d_gamma, d_pushed, d_persisted, t, length, window,
            INSIDE, P,
        )  # fmt: skip
        persistence = tl.load(theta + t)
        d_pushed *= persistence
        d_persisted *= persistence


@triton.jit
def stepping_backward(
    alpha, eta, theta, gamma, points, live, kept, steps, scratch,
    d_alpha, d_eta, d_theta, d_gamma, d_kept, d_steps, d_momentum_kept, d_momentum_share,
    length, window, count, stride, total, programs,
    INSIDE: tl.constexpr, M: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Programs take turns, so that their scratch stays in the cache."""
    program = tl.program_id(0)
    width = length + window - 1
    s = tl.arange(0, M)
    scratch += program.to(tl.int64) * length * (width + 1)
    for turn in range(program, total, programs):
        z = tl.cast(turn, tl.int64)
        at = z * length
        slots = tl.load(points + z * stride + s, mask=s < count, other=-1)
        lives = tl.load(live + z * stride + s, mask=s < count, other=0.0)
        steps_backward(
            alpha + at, kept + at, steps + at * count, d_alpha + at, d_eta + at, d_kept + at,
            d_steps + at * count, slots, lives, length, count, INSIDE, M,
        )  # fmt: skip
        momenta_backward(
            theta + at, eta + at, gamma + at * window, points + z * stride, scratch,
            d_eta + at, d_theta + at, d_gamma + at * window, d_momentum_kept + z * (count + 1),
            d_momentum_share + z * (count + 1) * width, length, window, count,
            tl.sum(lives, 0).to(tl.int32), INSIDE, P,
        )  # fmt: skip
        tl.debug_barrier()
