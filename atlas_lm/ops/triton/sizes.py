"""The sizes a kernel is compiled for, and where a memory's parts lie in the flat arrays.

The fast weights of one row and head are one flat array: w1 `[v f]`, w2 `[f pitch]`, w3 alike; or w
`[v pitch]`. The pitch is D filled up to whole blocks, with zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import triton

LINEAR, MLP, GATED = 0, 1, 2
L2, DOT_PRODUCT = 0, 1


class Sizes(NamedTuple):
    """Compile-time constants of one rule at one shape."""

    network: int
    norm: bool
    objective: int
    heads: int
    """0 in kernels, which are told when they run: one compilation serves any number."""
    d_k: int
    d_v: int
    features: int
    pitch: int
    hidden: int
    length: int
    """Slots of a piece."""
    tail: int
    """Pairs before the piece that its windows reach: c - 1."""
    terms: int
    """Matrices that a read mixes with the entering weights: the momentum, or muon's steps."""
    written: bool
    """Whether a read sees the pairs of its piece as they are: not under muon, which sees steps."""
    pulls: int
    """Sums over the pairs that are pushed into matrices."""
    block_length: int
    block_tail: int
    block_k: int
    block_v: int
    block_f: int
    block_d: int
    blocks: int
    """Of features."""
    block_share: int
    """Of a share, what is computed at once."""
    block_terms: int
    block_pulls: int
    team: int
    """Programs that share the writing of one memory."""
    share: int
    """Of its hidden layer, or of a linear memory's values: what one of them has."""
    few: int
    """Pairs of a program that only adds up what others left."""
    pairs: int
    """Those before the piece and its own. A field: Triton 3.8 makes a plain tuple of constants,
    without properties."""
    size: int
    """Fast weights of one row and head."""
    resident: bool
    """Whether a share of the state stays in registers while pieces are written."""
    tiles: int
    """That a share of the state is then in."""


def block(width: int) -> int:
    """The smallest block a product takes that holds this many."""
    return max(16, triton.next_power_of_2(width))


def feature_block(d_k: int, features: int) -> int:
    """Identity: all at once. Else the largest block that fills up to few zeros."""
    if features == d_k:
        return block(d_k)
    return 64 if -features % 64 <= 16 else 32


def stays_in_registers(
    network: int, share: int, outs: int, ins: int, length: int, terms: int
) -> bool:
    """Whether a share of a memory's state, and of its momentum, has room in the registers of a
    program beside the features of a piece: all sizes in whole blocks."""
    state = (1 + terms) * registers(share, ins)
    if network != LINEAR:
        state = (1 + terms) * (registers(outs, share) + network * registers(share, ins))
    narrow = max(share, length, outs if network != LINEAR else 0) <= 64
    return narrow and state + registers(length, ins) // 2 <= 144


def registers(rows: int, columns: int) -> int:
    """That a float32 tile takes of each of 128 threads, which have 64 rows at least."""
    return max(64, rows) * columns // 128


def prepares(sizes: Sizes) -> tuple[bool, bool]:
    """Whether features of keys, and errors without the branch, take more than a look at keys and
    values: then they are made for all pieces at once."""
    residual = sizes.network != LINEAR and sizes.d_k != sizes.d_v
    return sizes.features != sizes.d_k, residual


def team_for(outs: int, least: int, memories: int, processors: int) -> int:
    """How many programs write a memory of `outs` hidden units together, each at least so many.

    One a processor, or two where each still has much to do.
    """
    for team in (8, 4, 2):
        share, programs = outs // team, memories * team
        whole = share * team == outs and share == triton.next_power_of_2(share)
        enough = least if programs <= processors else MUCH
        if whole and share >= enough and programs <= 2 * processors:
            return team
    return 1


def linear_team(outs: int, memories: int, processors: int) -> int:
    """How many programs write a linear memory of `outs` values whose state stays in registers: they
    need not meet, and four with 16 values each have room on a processor."""
    for team in (8, 4, 2):
        share = outs // team
        whole = share * team == outs and share == triton.next_power_of_2(share)
        if whole and share >= 16 and memories * team <= 4 * processors:
            return team
    return 1


def resident_registers(sizes: Sizes) -> int | None:
    """Of programs that have 16 values of a linear memory: four of them on a processor of Hopper."""
    return 128 if sizes.network == LINEAR and sizes.block_share == 16 else None


def by_blocks(sizes: Sizes, memories: int, processors: int) -> Sizes:
    """For kernels whose programs have a block of a memory each and need not meet: blocks as large
    as leave work for all processors, and at most 64."""
    outs = sizes.hidden or sizes.d_v
    share = min(64, block(outs))
    while share > 16 and memories * triton.cdiv(outs, share) < 3 * processors // 2:
        share //= 2
    return sizes._replace(team=triton.cdiv(outs, share), share=share, block_share=share)


def in_narrow_tiles(sizes: Sizes) -> Sizes:
    """For a kernel that reads much of the state beside each product."""
    return sizes._replace(block_d=min(32, sizes.block_d))


MUCH = 128
