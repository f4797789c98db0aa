"""Memories of gd and momentum in kernels, forward and backward, a few pieces at a time.

Forward: write the pieces of a segment one after the other, then read them all at once. Only the
state at the beginning of a segment is kept; the backward writes the segment again from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from atlas_lm.ops.triton.layout import DOTS, monomials
from atlas_lm.ops.triton.reading import read_kernel
from atlas_lm.ops.triton.reading_backward import read_backward_kernel
from atlas_lm.ops.triton.sizes import Sizes
from atlas_lm.ops.triton.writing import write_kernel
from atlas_lm.ops.triton.writing_backward import write_backward_kernel

ROOM = 2**29
"""Bytes of states, factors and their gradients that one segment may take."""


class Mixed(NamedTuple):
    """How much of what is in every token's memory: `[n z l]`, share `[n z l p]`, push `[n z p]`."""

    kept: Tensor
    carried: Tensor | None
    share: Tensor
    push_kept: Tensor | None
    push: Tensor | None


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
    own: bool
    """The first piece is in the middle of a chunk, and brings its anchor along."""

    @property
    def rows_and_heads(self) -> int:
        return self.marks.shape[1]

    def segments(self, dtype: torch.dtype) -> list[slice]:
        """Runs of pieces that are computed together."""
        s, count = self.sizes, self.marks.shape[0]
        matrices = 2 * s.size * (1 + s.terms)
        factors = 2 * s.pairs * (s.d_v + s.d_k + 3 * s.hidden)
        size = max(1, ROOM // (self.rows_and_heads * (matrices + factors) * dtype.itemsize))
        first = 1 if self.own else 0
        parts = [slice(0, 1)] if self.own else []
        return parts + [slice(a, min(a + size, count)) for a in range(first, count, size)]


class Factors(NamedTuple):
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
        nothing = torch.zeros(sizes.heads, sizes.d_v, device=like.device)
        gain = nothing if slow.gain is None else slow.gain.contiguous()
        residual = nothing if slow.residual is None else slow.residual.contiguous()
        if slow.coefficients is None:
            return cls(gain, residual, nothing, nothing, nothing, nothing)
        left, right, degree, weight = monomials(sizes.d_k, like.device)
        scale = slow.coefficients.sqrt()[:, degree] * weight
        return cls(gain, residual, slow.coefficients.contiguous(), left, right, scale.contiguous())


class Written(NamedTuple):
    """A segment after writing: the state entering every piece, rounded, and the pairs' factors."""

    states: Tensor
    entered: Tensor
    factors: Factors


def warps(sizes: Sizes) -> int:
    return 4


def write(plan: Plan, k, v, mixed: Mixed, tables: Tables, part: slice, carry, anchor, initial):
    """Write a segment. `carry`: weights, momentum, kept anchors, float32, changed in place."""
    weights, momentum, anchors = carry
    s, count = plan.sizes, k.shape[0]
    states = k.new_empty(count, plan.rows_and_heads, s.size)
    states[0] = weights
    entered = states
    if mixed.push is not None:
        entered = torch.empty_like(states)
        entered[0] = momentum
    factors = Factors.room(count, plan, k)
    own = plan.own and part.start == 0
    write_kernel[(plan.rows_and_heads,)](
        k, v, mixed.share, _or(mixed.push, mixed.share), mixed.kept, _or(mixed.carried, mixed.kept),
        _or(mixed.push_kept, mixed.kept), plan.marks[part.start :],
        weights, _or(momentum, weights), states, entered, anchor if own else states, initial,
        anchors, tables.gain, tables.residual, *factors, tables.left, tables.right, tables.scale,
        count, len(plan.marks) - part.start, plan.rows_and_heads, OWN=own, S=s, DOT=DOTS[k.dtype],
        num_warps=warps(s), num_stages=1,
    )  # fmt: skip
    return Written(states, entered, factors)


def read(plan: Plan, q, k, mixed: Mixed, tables: Tables, written: Written, y, branch):
    s, count = plan.sizes, k.shape[0]
    read_kernel[(plan.rows_and_heads, count)](
        q, k, mixed.share, mixed.kept, _or(mixed.carried, mixed.kept), written.states,
        written.entered, *written.factors, tables.gain, tables.residual, tables.coefficients,
        tables.left, tables.right, tables.scale, y, branch, plan.rows_and_heads,
        S=s, DOT=DOTS[k.dtype], num_warps=warps(s), num_stages=1,
    )  # fmt: skip


def _or(x: Tensor | None, other: Tensor) -> Tensor:
    """Something to point at where a kernel never looks."""
    return other if x is None else x


class Chunks(torch.autograd.Function):
    """Pieces `[n z . .]` through memories `[z size]`, everything flat and contiguous."""

    @staticmethod
    def forward(ctx, plan: Plan, q, k, v, *rest):
        mixed, slow = Mixed(*rest[:5]), Slow(*rest[5:8])
        weights, momentum, anchor, initial = rest[8:]
        tables = Tables.of(slow, plan.sizes, q)
        y = torch.empty(*q.shape[:3], v.shape[-1], dtype=q.dtype, device=q.device)
        branch = torch.empty(y.shape if plan.sizes.norm else (1,), device=q.device)
        carry = [weights.clone(), None if momentum is None else momentum.clone(), weights.clone()]
        rounded = None if anchor is None else anchor.to(k.dtype)
        checkpoints = []
        for part in plan.segments(k.dtype):
            checkpoints.append([None if x is None else x.clone() for x in carry[:2]])
            here = Mixed(*(None if x is None else x[part] for x in mixed))
            written = write(plan, k[part], v[part], here, tables, part, carry, rounded, initial)
            out = branch[part] if plan.sizes.norm else branch
            read(plan, q[part], k[part], here, tables, written, y[part], out)
        ctx.plan, ctx.checkpoints, ctx.tables = plan, checkpoints, tables
        ctx.save_for_backward(q, k, v, *mixed, *slow, anchor, initial, branch)
        return y, *carry

    @staticmethod
    def backward(ctx, dy, g_weights, g_momentum, g_anchors):
        plan = ctx.plan
        q, k, v, *rest = ctx.saved_tensors
        mixed, slow, (anchor, initial, branch) = Mixed(*rest[:5]), Slow(*rest[5:8]), rest[8:]
        back = _Backward(plan, q, k, v, mixed, ctx.tables, initial)
        back.begin(g_weights, g_momentum, g_anchors, anchor)
        for part, checkpoint in reversed(
            list(zip(plan.segments(k.dtype), ctx.checkpoints, strict=True))
        ):
            out = branch[part] if plan.sizes.norm else branch
            back.segment(part, dy[part].contiguous(), checkpoint, out)
        return None, *back.gradients(dy, slow)


class _Backward:
    """The gradients of one call, gathered segment by segment from the last to the first."""

    def __init__(self, plan: Plan, q, k, v, mixed: Mixed, tables: Tables, initial):
        self.plan, self.q, self.k, self.v, self.mixed = plan, q, k, v, mixed
        self.tables, self.initial = tables, initial
        s, (count, z) = plan.sizes, plan.marks.shape
        new = torch.zeros if s.network == 0 else torch.empty
        wide = {"device": q.device, "dtype": torch.float32}
        self.dq, self.dk, self.dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        self.d_kept = torch.empty(count, z, s.length, **wide)
        self.d_steps = torch.empty(count, z, s.length, max(1, s.terms), **wide)
        self.d_share = torch.empty(count, z, s.length, s.pairs, **wide)
        self.d_push = torch.empty(count, z, s.pairs, **wide)
        self.d_push_kept = torch.empty(count, z, **wide)
        self.d_gain = new(count, z, s.d_v, **wide)
        self.d_gain_write = torch.zeros(z, s.d_v, **wide)
        self.d_degrees = torch.zeros(count, z, 8, **wide)
        self.d_degrees_write = torch.zeros(z, 4, **wide)
        self.scratch = torch.empty(z, 4 * s.pairs * max(1, s.hidden), **wide)

    def begin(self, g_weights, g_momentum, g_anchors, anchor) -> None:
        """From the gradients of the state at the end."""
        s, (_, z) = self.plan.sizes, self.plan.marks.shape
        blank = torch.zeros(z, s.size, device=self.q.device)
        self.g_weights = blank.clone() if g_weights is None else g_weights.float().clone()
        self.g_momentum = blank.clone() if g_momentum is None else g_momentum.float().clone()
        self.g_anchors = blank if g_anchors is None else g_anchors.float().contiguous()
        self.g_initial = torch.zeros_like(blank)
        self.anchor = None if anchor is None else anchor.to(self.k.dtype)
        self.g_anchor = torch.zeros_like(blank)
        both = [self.g_weights, self.g_momentum][: s.pulls]
        self.pushes = torch.stack(both, 1).to(self.k.dtype)

    def segment(self, part: slice, dy: Tensor, checkpoint, branch: Tensor) -> None:
        plan, s = self.plan, self.plan.sizes
        q, k, v = self.q[part], self.k[part], self.v[part]
        here = Mixed(*(None if x is None else x[part] for x in self.mixed))
        weights, momentum = checkpoint
        carry = [weights, momentum, torch.empty_like(weights)]
        written = write(plan, k, v, here, self.tables, part, carry, self.anchor, self.initial)
        d_states = torch.empty_like(written.states)
        d_entered = d_states if s.terms == 0 else torch.empty_like(d_states)
        d_factors = Factors.room(k.shape[0], plan, k)
        dk = torch.empty(k.shape, device=k.device)
        self._read_backward(
            part, dy, q, k, here, written, branch, d_states, d_entered, d_factors, dk
        )
        self._write_backward(part, k, v, here, written, d_states, d_entered, d_factors, dk)
        self.dk[part] = dk

    def _read_backward(
        self, part, dy, q, k, here, written, branch, d_states, d_entered, d_factors, dk
    ):
        plan, s, t = self.plan, self.plan.sizes, self.tables
        read_backward_kernel[(plan.rows_and_heads, k.shape[0])](
            dy, q, k, here.share, here.kept, _or(here.carried, here.kept), written.states,
            written.entered, *written.factors, t.gain, t.residual, t.coefficients, t.left, t.right,
            t.scale, branch, self.dq[part], dk, self.d_share[part], self.d_kept[part],
            self.d_steps[part], d_states, d_entered, *d_factors, self.d_gain[part],
            self.d_degrees[part], plan.rows_and_heads,
            S=s, DOT=DOTS[k.dtype], num_warps=warps(s), num_stages=1,
        )  # fmt: skip

    def _write_backward(self, part, k, v, here, written, d_states, d_entered, d_factors, dk):
        plan, s, t = self.plan, self.plan.sizes, self.tables
        own = plan.own and part.start == 0
        last = here.share[:, :, -1]
        pulls = last.unsqueeze(2) if here.push is None else torch.stack([last, here.push], 2)
        d_pulls = torch.empty_like(pulls)
        d_last = torch.empty(*pulls.shape[:2], 3, device=k.device)
        write_backward_kernel[(plan.rows_and_heads,)](
            k, v, here.kept, _or(here.carried, here.kept), _or(here.push_kept, here.kept),
            pulls.contiguous(), plan.marks[part], written.states, written.entered,
            self.anchor if own else written.states, self.g_anchor, t.gain, t.residual,
            *written.factors, t.left, t.right, t.scale, d_states, d_entered, *d_factors,
            self.g_weights, self.g_momentum, self.g_initial, self.g_anchors, self.pushes,
            dk, self.dv[part], d_pulls, d_last, self.d_gain_write, self.d_degrees_write,
            self.scratch, k.shape[0], plan.rows_and_heads,
            OWN=own, S=s, DOT=DOTS[k.dtype],
            num_warps=warps(s), num_stages=1,
        )  # fmt: skip
        self.d_kept[part][..., -1] += d_last[..., 0]
        self.d_share[part][:, :, -1] += d_pulls[:, :, 0]
        if here.push is not None:
            self.d_steps[part][..., -1, 0] += d_last[..., 1]
            self.d_push_kept[part] = d_last[..., 2]
            self.d_push[part] = d_pulls[:, :, 1]

    def gradients(self, dy: Tensor, slow: Slow) -> tuple[Tensor | None, ...]:
        """In the order of the arguments of `Chunks`."""
        momentum = self.mixed.push is not None
        s = self.plan.sizes
        d_gain = d_residual = d_coefficients = None
        if slow.gain is not None:
            d_gain = by_head(self.d_gain.sum(0) + self.d_gain_write, s.heads)
        if slow.residual is not None:
            d_residual = residual_gradient(dy, self.q, s.heads)
            if s.objective == 0:
                d_residual = d_residual - residual_gradient(self.dv, self.k, s.heads)
        if slow.coefficients is not None:
            direct, through = self.d_degrees.sum(0).split(4, -1)
            through = by_head(through + self.d_degrees_write, s.heads)[:, :3]
            direct = by_head(direct, s.heads)[:, :3]
            d_coefficients = direct + through / (2 * slow.coefficients)
        return (
            self.dq, self.dk, self.dv,
            self.d_kept, self.d_steps[..., 0] if momentum else None, self.d_share,
            self.d_push_kept if momentum else None, self.d_push if momentum else None,
            d_gain, d_residual, d_coefficients,
            self.g_weights, self.g_momentum if momentum else None,
            self.g_anchor if self.anchor is not None else None,
            by_head(self.g_initial, s.heads),
        )  # fmt: skip


def by_head(x: Tensor, heads: int) -> Tensor:
    """Summed over the batch: `[b*h ...] -> [h ...]`."""
    return x.unflatten(0, (-1, heads)).sum(0)


def residual_gradient(grad: Tensor, raw: Tensor, heads: int) -> Tensor:
    """`[h v k]` from `[n b*h l v]` and `[n b*h l k]`."""
    grad, raw = (x.unflatten(1, (-1, heads)) for x in (grad, raw))
    return torch.einsum("nbhlv,nbhlk->hvk", grad, raw.to(grad.dtype)).float()
