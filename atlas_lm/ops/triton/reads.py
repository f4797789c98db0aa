"""What all optimisers share: the plan of a call, what kernels look up, and reading, both ways."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas_lm.ops.triton.launch import launch, memory_of, processors
from atlas_lm.ops.triton.layout import DOTS, monomials
from atlas_lm.ops.triton.reading import read_kernel
from atlas_lm.ops.triton.reading_backward import (
    read_inputs_backward_kernel,
    read_pairs_backward_kernel,
)
from atlas_lm.ops.triton.reading_hidden import read_hidden_backward_kernel
from atlas_lm.ops.triton.sizes import GATED, LINEAR, Sizes, by_blocks, prepares
from atlas_lm.ops.triton.writing_resident import prepare_kernel

ROOM = 2**29
"""Bytes of states, factors and their gradients that one segment may take."""
KEPT_SHARE = 128
"""One call may keep this part of a GPU's memory, at most what its `Way` says, from forward to
backward instead of making it again: a model does for every layer, unless its blocks are computed
again."""


class Mixed(NamedTuple):
    """How much of what is in every token's memory, and in every momentum that is asked for."""

    kept: Tensor
    """`[n z l]`: of the weights that enter a piece."""
    steps: Tensor | None
    """`[n z l m]`: of the momentum that enters (m = 1), or of muon's steps; None under gd."""
    share: Tensor | None
    """`[n z l p]`: of each pair's gradient; None under muon."""
    push_kept: Tensor | None
    """`[n z j]`: of the momentum that enters, in the last momentum (muon: the stride points')."""
    push: Tensor | None
    """`[n z j p]`: of each pair's gradient in them."""

    def map(self, function: Callable[[Tensor], Tensor]) -> Mixed:
        made = (None if x is None else function(x) for x in self)
        return Mixed(*made)  # pyright: ignore[reportArgumentType]

    def at(self, part: slice | int) -> Mixed:
        return self.map(lambda x: x[part])

    def pieces(self, count: int) -> list[Mixed]:
        parts = [[None] * count if x is None else x.unbind(0) for x in self]
        return [Mixed(*x) for x in zip(*parts, strict=True)]


class Slow(NamedTuple):
    """What the outer loop learns and the kernels see, by head."""

    gain: Tensor | None
    residual: Tensor | None
    coefficients: Tensor | None
    """`[h 3]`"""


@dataclass(frozen=True)
class Plan:
    sizes: Sizes
    marks: Tensor
    """`[n z]` int32: 1, the piece begins a document; 2, its weights are kept as an anchor."""
    marked: tuple[bool, ...]
    """Pieces with a mark in any row: known without asking a GPU."""
    own: bool
    """The first piece is in the middle of a chunk, and brings its anchor along."""
    graded: bool
    """A backward may come."""
    steps: int = 0
    coefficients: str = "muon"

    @property
    def rows_and_heads(self) -> int:
        return self.marks.shape[1]

    def segments(self, dtype: torch.dtype) -> list[slice]:
        """Runs of pieces that are computed together."""
        s, count = self.sizes, self.marks.shape[0]
        matrices = 2 * s.size * (1 + s.terms)
        factors = 2 * s.pairs * (s.d_v + s.d_k + 3 * s.hidden)
        sums = 8 * s.pulls * s.pairs
        size = max(1, ROOM // (self.rows_and_heads * (matrices + factors + sums) * dtype.itemsize))
        first = 1 if self.own else 0
        parts = [slice(0, 1)] if self.own else []
        return parts + [slice(a, min(a + size, count)) for a in range(first, count, size)]


class Factors(NamedTuple):
    """Of the gradients of a segment's pairs, or of what has their shapes."""

    u1: Tensor
    h: Tensor
    u2: Tensor
    u3: Tensor

    @classmethod
    def room(cls, count: int, plan: Plan, like: Tensor) -> Factors:
        s, shape = plan.sizes, (count, plan.rows_and_heads, plan.sizes.pairs)
        wide = like.new_empty(*shape, s.d_v)
        if s.network == 0:
            return cls(wide, wide, wide, wide)
        h, u2 = (like.new_empty(*shape, s.hidden) for _ in range(2))
        return cls(wide, h, u2, like.new_empty(*shape, s.hidden) if s.network == 2 else u2)

    def at(self, piece: int) -> Factors:
        return Factors(*(x[piece] for x in self))


class Tables(NamedTuple):
    """What the kernels look up: gain, residual, coefficients, and how features are made."""

    gain: Tensor
    residual: Tensor
    coefficients: Tensor
    left: Tensor
    right: Tensor
    scale: Tensor

    @classmethod
    def of(cls, slow: Slow, sizes: Sizes, like: Tensor) -> Tables:
        nothing = torch.empty(sizes.heads, sizes.d_v, device=like.device)
        gain = nothing if slow.gain is None else slow.gain.contiguous()
        residual = nothing if slow.residual is None else slow.residual.contiguous()
        if slow.coefficients is None:
            return cls(gain, residual, nothing, nothing, nothing, nothing)
        left, right, degree, weight = monomials(sizes.d_k, like.device)
        scale = slow.coefficients.sqrt()[:, degree] * weight
        return cls(gain, residual, slow.coefficients.contiguous(), left, right, scale.contiguous())


class Prepared(NamedTuple):
    """Of a segment's keys and values, what does not wait for a memory."""

    phi: Tensor
    """`[n z p pitch]`: features of the keys, rounded; where they are the keys, the keys."""
    rest: Tensor
    """`[n z p v]`, float32: errors without the branch; something to point at where kernels have
    them from keys and values."""

    @classmethod
    def of(cls, plan: Plan, k: Tensor, v: Tensor, tables: Tables) -> Prepared:
        s, t, (polynomial, residual) = plan.sizes, tables, prepares(plan.sizes)
        phi = k.new_empty(*k.shape[:3], s.pitch) if polynomial else k
        rest = torch.empty(v.shape, device=v.device) if residual else k
        if polynomial or residual:
            launch(
                prepare_kernel, (k.shape[1], k.shape[0]), k, v, t.residual, phi, rest,
                t.left, t.right, t.scale, k.shape[1], s.heads, **constants(plan, k),
            )  # fmt: skip
        return cls(phi, rest)


class Written(NamedTuple):
    """A segment after writing: the state entering every piece, rounded, and the pairs' factors."""

    states: Tensor
    """`[n z size]`"""
    terms: Tensor
    """`[n z m size]`: the momentum that entered, or muon's steps."""
    factors: Factors


def constants(plan: Plan, like: Tensor) -> dict[str, Any]:
    """How all kernels of memories are compiled."""
    s = plan.sizes
    return {"S": s._replace(heads=0), "DOT": DOTS[like.dtype], "wgmma": takes_wgmma(s)}


def takes_wgmma(sizes: Sizes) -> bool:
    """Deep memories on polynomial features under gd and momentum do without: with it, Triton 3.6
    gives keys a gradient that is off by 0.26 (ptxas 12.8 and 13.0, not with their optimiser off).
    """
    deep, polynomial = sizes.network != 0, sizes.features != sizes.d_k
    return not (sizes.written and deep and polynomial)


def inputs_registers(sizes: Sizes) -> int | None:
    """Of the gradients of the first layer's matrices: four fewer than they would take let three
    programs run on a processor of Hopper, and spill 24 bytes."""
    return 168 if sizes.features == sizes.d_k and sizes.terms <= 1 else None


class Meeting(NamedTuple):
    """Where the programs that write a memory together meet (`team`)."""

    room: Tensor
    arrived: Tensor

    @classmethod
    def of(cls, plan: Plan) -> Meeting:
        s, z, device = plan.sizes, plan.rows_and_heads, plan.marks.device
        meet = s.team > 1 and s.network != LINEAR
        arrived = (torch.zeros if meet else torch.empty)(z, dtype=torch.int32, device=device)
        return cls(torch.empty(z, meet * 4 * s.team * s.pairs * s.d_v, device=device), arrived)


def either(x: Tensor | None, other: Tensor) -> Tensor:
    """Something to point at where a kernel never looks."""
    return other if x is None else x


def in_room(first: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Room for all states, the first filled in."""
    room = torch.empty(shape, device=first.device)
    room[0] = first
    return room


def read(plan: Plan, q, k, mixed: Mixed, tables: Tables, written: Written, y, branch) -> None:
    """y `[n z l v]`, and what goes into the norm, if there is one."""
    kept, t = mixed.kept, tables
    launch(
        read_kernel, (plan.rows_and_heads, k.shape[0]),
        q, k, either(mixed.share, kept), kept, either(mixed.steps, kept), written.states,
        written.terms, *written.factors, t.gain, t.residual, t.coefficients, t.left, t.right,
        t.scale, y, branch, plan.rows_and_heads, plan.sizes.heads, **constants(plan, k),
    )  # fmt: skip


class ReadGradients(NamedTuple):
    """What reading a segment gives back to what was written."""

    states: Tensor
    terms: Tensor
    factors: Factors
    dk: Tensor
    """`[n z p k]`, float32."""


class Backward:
    """The gradients of one call, gathered segment by segment from the last to the first."""

    def __init__(self, plan: Plan, q, k, v, mixed: Mixed, tables: Tables, initial, branch):
        self.plan, self.q, self.k, self.v, self.mixed = plan, q, k, v, mixed
        self.tables, self.initial, self.branch = tables, initial, branch
        s, (count, z) = plan.sizes, plan.marks.shape
        wide = {"device": q.device, "dtype": torch.float32}
        by_gain, by_degree = (
            torch.zeros if used else torch.empty for used in (s.norm, s.features != s.d_k)
        )
        self.dq, self.dk, self.dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.d_mixed = mixed.map(torch.empty_like)
        self.d_gain = torch.empty(count, z, s.d_v, **wide)
        self.d_gain_write = by_gain(z, -(-s.pairs // s.few), s.d_v, **wide)
        self.d_degrees = by_degree(count, z, 8, **wide)
        self.blocks = by_blocks(s, z, processors(q.device))
        self.d_degrees_write = by_degree(z, self.blocks.team * (s.network + 1), 4, **wide)

    def begin(self, g_weights, g_momentum, g_anchors, anchor) -> None:
        """From the gradients of the state at the end."""
        s, own, (_, z) = self.plan.sizes, self.plan.own, self.plan.marks.shape
        moving = s.terms > 0 or not s.written
        room = torch.zeros(3 + moving + own, z, s.size, device=self.q.device)
        self.g_weights, self.g_initial, self.g_anchors, *more = room.unbind()
        # where there is none, something to point at
        self.g_momentum = more[0] if moving else self.g_weights
        self.g_anchor = more[-1] if own else self.g_weights
        for mine, given in (
            (self.g_weights, g_weights), (self.g_momentum, g_momentum), (self.g_anchors, g_anchors)
        ):  # fmt: skip
            if given is not None:
                mine.copy_(given)
        self.anchor = None if anchor is None else anchor.to(self.k.dtype)

    def segment(self, part: slice, dy: Tensor, checkpoint: list) -> None:
        raise NotImplementedError

    def read_backward(self, part: slice, dy: Tensor, written: Written) -> ReadGradients:
        plan, s, t = self.plan, self.plan.sizes, self.tables
        q, k, here, d_here = self.q[part], self.k[part], self.mixed.at(part), self.d_mixed.at(part)
        d_states = torch.empty_like(written.states)
        found = ReadGradients(
            states=d_states,
            terms=d_states if s.terms == 0 and s.written else torch.empty_like(written.terms),
            factors=Factors.room(k.shape[0], plan, k) if s.written else written.factors,
            dk=(torch.empty if s.written else torch.zeros)(k.shape, device=k.device),
        )
        kept, steps = here.kept, either(here.steps, here.kept)
        d_kept, d_steps = d_here.kept, either(d_here.steps, d_here.kept)
        rooms, degrees = self._rooms(q, dy), self.d_degrees[part]
        share, branch = either(here.share, kept), self.branch[part] if s.norm else self.branch
        grid, sizes = (plan.rows_and_heads, k.shape[0]), (plan.rows_and_heads, s.heads)
        if s.network != LINEAR:
            launch(
                read_hidden_backward_kernel, grid,
                dy, q, k, share, kept, steps, written.states, written.terms, *written.factors,
                t.gain, t.coefficients, t.left, t.right, t.scale, branch, *rooms, d_kept, d_steps,
                found.states, found.terms, self.d_gain[part], *sizes, **constants(plan, k),
            )  # fmt: skip
        if s.written:
            launch(
                read_pairs_backward_kernel, grid,
                q, k, share, *written.factors, t.coefficients, *rooms, found.dk,
                either(d_here.share, d_kept), *found.factors, degrees, *sizes,
                **constants(plan, k),
            )  # fmt: skip
        _, own, _, _, dz, dz3 = rooms
        launch(
            read_inputs_backward_kernel, grid,
            dy, q, k, kept, steps, written.states, written.terms, t.residual, t.left, t.right,
            t.scale, own, dz, dz3, self.dq[part], d_kept, d_steps, found.states, found.terms,
            degrees, *sizes, registers=inputs_registers(s), **constants(plan, k),
        )  # fmt: skip
        return found

    def _rooms(self, q: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """What the three kernels leave for each other: the gradient at the branch, two tiles of
        pairs, the hidden layer, and the gradients at its inputs."""
        s, memories = self.plan.sizes, q.shape[:2]
        tiles = *memories, s.block_length, s.block_length + s.block_tail
        own = q.new_empty(tiles) if s.written else dy
        if s.network == LINEAR:
            return dy, own, own, dy, dy, dy
        do = q.new_empty(*memories, s.block_length, s.block_v)
        dz = q.new_empty(*q.shape[:3], s.hidden)
        dz3 = torch.empty_like(dz) if s.network == GATED else dz
        if not s.written:
            return do, own, own, dz, dz, dz3
        return do, own, torch.empty_like(own), torch.empty_like(dz), dz, dz3

    def gradients(self, dy: Tensor, slow: Slow) -> tuple[Tensor | None, ...]:
        """Of q, k, v, mixing, slow weights, weights, momentum, own anchor, initial weights."""
        s = self.plan.sizes
        d_gain = d_residual = d_coefficients = None
        if slow.gain is not None:
            d_gain = by_head(self.d_gain.sum(0) + self.d_gain_write.sum(1), s.heads)
        if slow.residual is not None:
            d_residual = residual_gradient(dy, self.q, s.heads)
            if s.objective == 0:
                d_residual = d_residual - residual_gradient(self.dv, self.k, s.heads)
        if slow.coefficients is not None:
            direct, through = self.d_degrees.sum(0).split(4, -1)
            through = by_head(through + self.d_degrees_write.sum(1), s.heads)[:, :3]
            direct = by_head(direct, s.heads)[:, :3]
            d_coefficients = direct + through / (2 * slow.coefficients)
        return (
            self.dq, self.dk, self.dv, *self.d_mixed, d_gain, d_residual, d_coefficients,
            self.g_weights, None if self.mixed.push is None else self.g_momentum,
            None if self.anchor is None else self.g_anchor, by_head(self.g_initial, s.heads),
        )  # fmt: skip


def by_head(x: Tensor, heads: int) -> Tensor:
    """Summed over the batch: `[b*h ...] -> [h ...]`."""
    return x.unflatten(0, (-1, heads)).sum(0)


def residual_gradient(grad: Tensor, raw: Tensor, heads: int) -> Tensor:
    """`[h v k]` from `[n b*h l v]` and `[n b*h l k]`, in float32."""
    products = product(grad.mT.flatten(0, 1), raw.flatten(0, 1))
    return products.unflatten(0, (grad.shape[0], -1, heads)).sum((0, 1))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Of batches of matrices, in float32."""
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


class Run(torch.autograd.Function):
    """Pieces `[n z . .]` through memories `[z size]`, everything flat and contiguous.

    A segment at a time: written, then read. Only the state at the beginning of a segment is kept,
    from which the backward writes it again, and as much more of the last as there is room for.
    `way`: how an optimiser writes, both ways.
    """

    @staticmethod
    def forward(ctx, way, plan: Plan, q, k, v, *rest):
        mixed, slow = Mixed(*rest[:5]), Slow(*rest[5:8])
        weights, momentum, anchor, initial = rest[8:]
        tables = Tables.of(slow, plan.sizes, q)
        y = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
        branch = torch.empty(y.shape if plan.sizes.norm else (1,), device=q.device)
        carry = [
            weights.clone(),
            None if momentum is None else momentum.clone(),
            torch.empty_like(weights),
        ]
        rounded = None if anchor is None else anchor.to(k.dtype)
        checkpoints, parts = [], plan.segments(k.dtype)
        for part, keep in zip(parts, way.keeps(plan, parts, k), strict=True):
            checkpoint = [None if x is None else x.clone() for x in carry[:2]]
            here = mixed.at(part)
            args = plan, k, v, here, tables, part, carry, rounded, initial
            written, kept = way.write(*args, keep=keep)
            checkpoints.append([*checkpoint, kept])
            out = branch[part] if plan.sizes.norm else branch
            read(plan, q[part], k[part], here, tables, written, y[part], out)
        ctx.way, ctx.plan, ctx.checkpoints, ctx.tables = way, plan, checkpoints, tables
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, *mixed, *slow, anchor, initial, branch)
        return y, *carry

    @staticmethod
    def backward(ctx, *grads):
        dy, g_weights, g_momentum, g_anchors = grads
        plan = ctx.plan
        q, k, v, *rest = ctx.saved_tensors
        mixed, slow, (anchor, initial, branch) = Mixed(*rest[:5]), Slow(*rest[5:8]), rest[8:]
        if dy is None:
            dy = q.new_zeros(*q.shape[:3], v.shape[-1])
        back = ctx.way.backward(plan, q, k, v, mixed, ctx.tables, initial, branch)
        back.begin(g_weights, g_momentum, g_anchors, anchor)
        parts = list(zip(plan.segments(k.dtype), ctx.checkpoints, strict=True))
        for part, checkpoint in reversed(parts):
            back.segment(part, dy[part].contiguous(), checkpoint)
        return None, None, *back.gradients(dy, slow)


class Way(NamedTuple):
    """How an optimiser writes a segment, and the gradients of that."""

    write: Any
    """Gives what was written, and what is kept of it, if `keep`, for a backward to take."""
    backward: type[Backward]
    piece_bytes: Callable[[Plan, int], int]
    """Of what is kept of a piece, by the bytes of a number in products."""
    most_kept: int
    """Bytes"""

    def keeps(self, plan: Plan, parts: list[slice], like: Tensor) -> list[bool]:
        """Of each segment, whether it is kept: the last ones, which the backward takes first."""
        left = min(self.most_kept, memory_of(like.device) // KEPT_SHARE) if plan.graded else 0
        sizes = [part.stop - part.start for part in parts]
        sizes = [pieces * self.piece_bytes(plan, like.element_size()) for pieces in sizes]
        return [sum(sizes[i:]) <= left for i in range(len(sizes))]
