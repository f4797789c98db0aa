"""What every kernel is made of: products, tiles of matrices, tiles of features."""

import triton
import triton.language as tl


@triton.jit
def dot(a, b, DOT: tl.constexpr):
    """a @ b of operands rounded to DOT, summed in float32."""
    return tl.dot(a.to(DOT), b.to(DOT), input_precision="ieee")


@triton.jit
def times(x, w, DOT: tl.constexpr):
    """x w^T of `[rows k]` and `[outs k]`; of one row without a product, which takes 16."""
    return tl.sum(x * w, 1)[None, :] if x.shape[0] == 1 else dot(x, tl.trans(w), DOT)


@triton.jit
def tile(base, rows, columns, height, width):
    """A tile of a contiguous matrix `[height, width]`, zeros outside."""
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    return tl.load(base + rows[:, None] * width + columns[None, :], mask=inside, other=0.0)


@triton.jit
def put(base, value, rows, columns, height, width):
    """Write a tile of a contiguous matrix `[height, width]`."""
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    value = value.to(base.dtype.element_ty)
    tl.store(base + rows[:, None] * width + columns[None, :], value, mask=inside)


@triton.jit
def only(value, column, COUNT: tl.constexpr):
    """A vector as one column of a matrix of zeros."""
    return tl.where((tl.arange(0, COUNT) == column)[None, :], value[:, None], 0.0)


@triton.jit
def monomials(keys, rows, columns, height, left, right, scale, D_K: tl.constexpr, D: tl.constexpr):
    """Of features `columns`: which numbers of a key they multiply, their weight, both factors."""
    here = columns < D
    one = tl.load(left + columns, mask=here, other=D_K)
    two = tl.load(right + columns, mask=here, other=D_K)
    weight = tl.load(scale + columns, mask=here, other=0.0)
    inside = (rows < height)[:, None]
    at = keys + rows[:, None] * D_K
    first = tl.load(at + one[None, :], mask=inside & (one < D_K)[None, :], other=1.0)
    second = tl.load(at + two[None, :], mask=inside & (two < D_K)[None, :], other=1.0)
    return one, two, weight, first.to(tl.float32), second.to(tl.float32)


@triton.jit
def features(keys, rows, columns, height, left, right, scale, D_K: tl.constexpr, D: tl.constexpr):
    """phi of keys `[height, D_K]`, a tile `[rows, columns]` in float32.

    Identity where D == D_K; else feature j is scale[j] x[left[j]] x[right[j]], and x[D_K] is 1.
    """
    if D == D_K:
        value = tile(keys, rows, columns, height, D_K).to(tl.float32)
    else:
        _, _, weight, first, second = monomials(
            keys, rows, columns, height, left, right, scale, D_K, D
        )
        value = tl.where((rows < height)[:, None], first * second * weight[None, :], 0.0)
    return value


@triton.jit
def keep_features(k, phi, rows, height, left, right, scale, S: tl.constexpr):
    """phi of the keys `rows`, written out."""
    PITCH: tl.constexpr = S.pitch
    STEP: tl.constexpr = S.block_d
    for d in range(0, PITCH, STEP):
        ds = d + tl.arange(0, STEP)
        f = features(k, rows, ds, height, left, right, scale, S.d_k, S.features)
        put(phi, f, rows, ds, height, S.pitch)


@triton.jit
def features_backward(
    grad, keys, rows, columns, height, left, right, scale, D_K: tl.constexpr, D: tl.constexpr,
    BLOCK_K: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """From the gradient of a tile of phi, its share of the gradient of the keys `[rows, BLOCK_K]`.

    What each factor gets is summed by a product with one-hot rows, in tf32 or better.
    """
    if D == D_K:
        total = grad
    else:
        ks = tl.arange(0, BLOCK_K)
        one, two, weight, first, second = monomials(
            keys, rows, columns, height, left, right, scale, D_K, D
        )
        grad = grad * weight[None, :]
        PRECISION: tl.constexpr = "ieee" if tl.float32 == DOT else "tf32"
        to_first = ((one[:, None] == ks[None, :]) & (ks < D_K)[None, :]).to(tl.float32)
        to_second = ((two[:, None] == ks[None, :]) & (ks < D_K)[None, :]).to(tl.float32)
        total = tl.dot(grad * second, to_first, input_precision=PRECISION)
        total += tl.dot(grad * first, to_second, input_precision=PRECISION)
    return total


@triton.jit
def by_degree(product, columns, D_K: tl.constexpr):
    """Sums of a tile `[rows, features]` over the monomials of each degree, `[4]`."""
    degree = (columns > 0).to(tl.int32) + (columns > D_K).to(tl.int32)
    here = degree[:, None] == tl.arange(0, 4)[None, :]
    return tl.sum(tl.where(here, tl.sum(product, 0)[:, None], 0.0), 0)
