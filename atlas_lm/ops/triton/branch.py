"""The nonlinear parts of a memory: gelu, layer norm, and the gradients of both."""

import triton
import triton.language as tl


@triton.jit
def gelu(z):
    return 0.5 * z * (1.0 + tl.math.erf(z * 0.7071067811865476))


@triton.jit
def gelu_slope(z):
    density = tl.exp(-0.5 * z * z) * 0.3989422804014327
    return 0.5 * (1.0 + tl.math.erf(z * 0.7071067811865476)) + z * density


@triton.jit
def gelu_bend(z):
    """The second derivative."""
    return tl.exp(-0.5 * z * z) * 0.3989422804014327 * (2.0 - z * z)


@triton.jit
def normalise(branch, columns, WIDTH: tl.constexpr):
    """LN without affine over the first WIDTH columns, and 1 / its scale."""
    here = (columns < WIDTH)[None, :]
    mean = tl.sum(tl.where(here, branch, 0.0), 1) / WIDTH
    centred = tl.where(here, branch - mean[:, None], 0.0)
    scale = tl.math.rsqrt(tl.sum(centred * centred, 1) / WIDTH + 1e-6)
    return centred * scale[:, None], scale


@triton.jit
def through_norm(grad, unit, scale, columns, WIDTH: tl.constexpr):
    """The gradient before a layer norm from the gradient after it."""
    here = (columns < WIDTH)[None, :]
    grad = tl.where(here, grad, 0.0)
    mean = tl.sum(grad, 1) / WIDTH
    along = tl.sum(grad * unit, 1) / WIDTH
    return tl.where(here, (grad - mean[:, None] - unit * along[:, None]) * scale[:, None], 0.0)
