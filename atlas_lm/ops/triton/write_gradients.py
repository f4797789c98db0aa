"""Gradients of writing a segment, piece by piece from the last: what all optimisers share."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from atlas_lm.ops.triton.launch import NUMBER, Repeated, launch
from atlas_lm.ops.triton.reads import (
    Backward,
    Factors,
    Mixed,
    Prepared,
    ReadGradients,
    constants,
    either,
    product,
)
from atlas_lm.ops.triton.sizes import L2, LINEAR, in_narrow_tiles, prepares, resident_registers
from atlas_lm.ops.triton.writing_backward import error_kernel, pull_kernel
from atlas_lm.ops.triton.writing_resident_backward import (
    linear_keys_kernel,
    resident_backward_kernel,
)
from atlas_lm.ops.triton.writing_settle import settle_kernel


class Stood(NamedTuple):
    """How a segment's memories stood before every piece."""

    states: Tensor
    """`[n z size]`, rounded."""
    weights: Tensor
    """float32"""
    momenta: Tensor
    factors: Factors
    prepared: Prepared


class Sums(NamedTuple):
    """Gradients of a segment's keys and gates."""

    dk: Tensor
    """`[n z p k]`"""
    pulls: Tensor
    """`[n z j p]`"""
    last: Tensor
    """`[n z 3]`: of kept, of carried, and of push_kept, each at the last token."""


class WriteGradients:
    """Takes the gradients of the state from after a piece to before it."""

    launches: list[Repeated]
    """Of a piece; the last comes first."""

    def __init__(
        self, back: Backward, part: slice, here: Mixed, pulls: Tensor, stood: Stood,
        found: ReadGradients, pushes: Tensor,
    ):  # fmt: skip
        """`pulls` `[n z j p]`: weights of the pairs in what `pushes` are the gradients of."""
        plan, s, t, (count, z, *_) = back.plan, back.blocks, back.tables, pulls.shape
        k, v, dv, device = back.k[part], back.v[part], back.dv[part], pulls.device
        own = plan.own and part.start == 0
        anchor = back.anchor if own else stood.states
        matrices, (phi, rest) = s.network + 1, stood.prepared
        self.reads_dk, self.dv, self.residual = found.dk, dv, None
        if s.objective == L2 and prepares(s)[1]:
            self.residual = t.residual
        self.dk = torch.empty(s.team * max(1, s.network), *k.shape, device=device)
        self.d_pulls = torch.empty(s.team * matrices, *pulls.shape, device=device)
        self.d_last = torch.empty(s.team * matrices, count, z, 3, device=device)
        known = k.new_empty(z, 6 * s.pairs * s.hidden)
        parts = torch.empty(z, s.team * 2 * s.pairs * s.d_v, device=device)
        do = k.new_empty(z, s.pairs, s.d_v)
        f, d, tables = stood.factors, found.factors, (t.left, t.right, t.scale)
        options = constants(plan, k) | {"S": s._replace(heads=0)}
        narrow = options | {"S": in_narrow_tiles(options["S"])}
        pull = Repeated(
            pull_kernel, (z * s.team, 2 if s.tail else 1),
            phi, anchor, f.u1, f.h, *d, pushes, pulls, self.d_pulls, known, parts,
            NUMBER, count, z, **options,
        )  # fmt: skip
        error = Repeated(
            error_kernel, (z, triton.cdiv(s.pairs, s.few)),
            k, v, rest, t.gain, parts, do, dv, found.dk, back.d_gain_write,
            NUMBER, z, s.heads, **options,
        )  # fmt: skip
        settle = Repeated(
            settle_kernel, (z * s.team, matrices),
            k, phi, here.kept, either(here.steps, here.kept), either(here.push_kept, here.kept),
            pulls, plan.marks[part], anchor, back.g_anchor if own else back.g_weights,
            stood.weights, stood.momenta, *f, *tables, d.u1, found.states, found.terms,
            back.g_weights, back.g_momentum, back.g_initial, back.g_anchors, pushes, do, known,
            self.dk, dv, self.d_pulls, self.d_last, back.d_degrees_write,
            NUMBER, count, z, s.heads, OWN=own, **narrow,
        )  # fmt: skip
        self.launches = [settle] if s.network == LINEAR else [pull, error, settle]

    def sums(self) -> Sums:
        dk = self.reads_dk + self.dk.sum(0)
        if self.residual is not None:
            dk -= through_residual(self.dv, self.residual)
        return Sums(dk, self.d_pulls.sum(0), self.d_last.sum(0))


def through_residual(grad: Tensor, residual: Tensor) -> Tensor:
    """`[n b*h p k]` in float32, from `[n b*h p v]` through `[h v k]`, rounded alike."""
    count, z = grad.shape[:2]
    residual = residual.to(grad.dtype).repeat(count * z // len(residual), 1, 1)
    return product(grad.flatten(0, 1), residual).unflatten(0, (count, z))


def all_pieces(
    back: Backward, part: slice, here: Mixed, pulls: Tensor, stood: Stood, found: ReadGradients
) -> Sums:
    """What `WriteGradients` does, for linear memories whose state stays in registers.

    What `found` has of states and momenta is taken, and their pushes put there.
    """
    plan, s, t, (count, z, *_) = back.plan, back.plan.sizes, back.tables, pulls.shape
    own, phi = plan.own and part.start == 0, stood.prepared.phi
    k, dv, options = back.k[part], back.dv[part], constants(back.plan, back.k)
    d_last = torch.empty(s.team, count, z, 3, device=pulls.device)
    d_pulls = torch.empty_like(pulls)
    launch(
        resident_backward_kernel, (z * s.team,),
        phi, here.kept, either(here.steps, here.kept), either(here.push_kept, here.kept),
        pulls, plan.marks[part], back.g_anchor, stood.weights, stood.momenta, found.factors.u1,
        found.states, found.terms, back.g_weights, back.g_momentum, back.g_initial, back.g_anchors,
        dv, d_last, count, z, OWN=own, registers=resident_registers(s), **options,
    )  # fmt: skip
    launch(
        linear_keys_kernel, (z, count),
        k, phi, stood.factors.u1, back.anchor if own else stood.states, found.states,
        found.terms, pulls, t.left, t.right, t.scale, dv, found.dk, d_pulls, back.d_degrees[part],
        z, s.heads, **options,
    )  # fmt: skip
    return Sums(found.dk, d_pulls, d_last.sum(0))
