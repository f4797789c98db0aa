"""The nonlinear parts of a memory: gelu, layer norm, and the gradients of both."""

import triton
import triton.language as tl


@triton.jit
def normal(z):
    """The normal distribution up to z, and its density there, to 5e-7 with one exponential.

    Abramowitz and Stegun 7.1.26; the library's erf takes three times as many instructions. exp2 and
    rsqrt are one instruction each, an exponential five and a division eight.
    """
    bell = tl.exp2(-0.7213475204444817 * z * z)
    root = tl.rsqrt(1.0 + 0.2316418882 * tl.abs(z))
    t = root * root
    poly = -0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))
    tail = bell * t * (0.127414796 + t * poly)
    return tl.where(z >= 0, 1.0 - tail, tail), 0.3989422804014327 * bell


@triton.jit
def gelu(z):
    return z * normal(z)[0]


@triton.jit
def gelu_slope(z):
    up_to, density = normal(z)
    return up_to + z * density


@triton.jit
def gelu_bend(z):
    """The second derivative."""
    return normal(z)[1] * (2.0 - z * z)


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
