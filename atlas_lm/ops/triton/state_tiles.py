"""A share of a memory's state as a tuple of tiles, for kernels that have it in registers.

w1 `[v f]`, then w2 `[f d]` and w3 in blocks of features; or a linear memory's w `[v d]` in such
blocks.
"""

import triton
import triton.language as tl

from atlas_lm.ops.triton.tiles import tile


@triton.jit
def place(n: tl.constexpr, member, S: tl.constexpr):
    """Where tile n of a share lies among all weights of a memory, and what of it there is."""
    F: tl.constexpr = S.block_share
    STEP: tl.constexpr = S.block_d
    V: tl.constexpr = S.block_v
    BLOCKS: tl.constexpr = S.blocks
    hs, first = tl.arange(0, F), member * S.share
    if S.network == 0:
        ds = n * STEP + tl.arange(0, STEP)
        at = (first + hs)[:, None] * S.pitch + ds[None, :]
        inside = (hs < S.share)[:, None] & (ds < S.pitch)[None, :]
    elif n == 0:
        vs = tl.arange(0, V)
        at = vs[:, None] * S.hidden + first + hs[None, :]
        inside = (vs < S.d_v)[:, None] & (hs < S.share)[None, :]
    else:
        ds = (n - 1) % BLOCKS * STEP + tl.arange(0, STEP)
        skip = S.d_v * S.hidden + (n - 1) // BLOCKS * S.hidden * S.pitch
        at = skip + (first + hs)[:, None] * S.pitch + ds[None, :]
        inside = (hs < S.share)[:, None] & (ds < S.pitch)[None, :]
    return at, inside


@triton.jit
def load_tiles(base, member, S: tl.constexpr):
    TILES: tl.constexpr = S.tiles
    made = ()
    for n in tl.static_range(TILES):
        at, inside = place(n, member, S)
        made += (tl.load(base + at, mask=inside, other=0.0),)
    return made


@triton.jit
def store_tile(base, value, n: tl.constexpr, member, S: tl.constexpr):
    at, inside = place(n, member, S)
    tl.store(base + at, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def store_tiles(base, tiles, member, S: tl.constexpr):
    TILES: tl.constexpr = S.tiles
    for n in tl.static_range(TILES):
        store_tile(base, tiles[n], n, member, S)


@triton.jit
def mixed(xs, a, ys, b, S: tl.constexpr):
    """a xs + b ys"""
    TILES: tl.constexpr = S.tiles
    made = ()
    for n in tl.static_range(TILES):
        made += (a * xs[n] + b * ys[n],)
    return made


@triton.jit
def scaled(xs, a, S: tl.constexpr):
    TILES: tl.constexpr = S.tiles
    made = ()
    for n in tl.static_range(TILES):
        made += (a * xs[n],)
    return made


@triton.jit
def added(xs, ys, S: tl.constexpr):
    TILES: tl.constexpr = S.tiles
    made = ()
    for n in tl.static_range(TILES):
        made += (xs[n] + ys[n],)
    return made


@triton.jit
def rounded(xs, S: tl.constexpr, DOT: tl.constexpr):
    TILES: tl.constexpr = S.tiles
    made = ()
    for n in tl.static_range(TILES):
        made += (xs[n].to(DOT),)
    return made


@triton.jit
def load_features(phi, rows, height, S: tl.constexpr):
    """A tile of phi `[height, pitch]` for each block of features."""
    STEP: tl.constexpr = S.block_d
    BLOCKS: tl.constexpr = S.blocks
    made = ()
    for b in tl.static_range(BLOCKS):
        made += (tile(phi, rows, b * STEP + tl.arange(0, STEP), height, S.pitch),)
    return made
