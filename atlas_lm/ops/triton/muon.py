"""Muon: the steps of a piece by many programs at once, piece after piece from the host."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
from torch import Tensor

from atlas_lm.ops.triton.launch import launch
from atlas_lm.ops.triton.muon_kernels import (
    advance_kernel,
    carry_kernel,
    factors_backward_kernel,
    factors_kernel,
)
from atlas_lm.ops.triton.newton_schulz import (
    Momenta,
    StepGradients,
    momentum_steps,
    momentum_steps_backward,
)
from atlas_lm.ops.triton.reads import (
    Backward,
    Factors,
    Mixed,
    Plan,
    Tables,
    Way,
    Written,
    constants,
)
from atlas_lm.ops.triton.sizes import Sizes


def matrices(sizes: Sizes, factors: Factors, phi: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Where each matrix of a memory begins, and the factors u, x of its gradients."""
    if sizes.network == 0:
        yield 0, factors.u1, phi
        return
    second, first = sizes.d_v * sizes.hidden, sizes.hidden * sizes.pitch
    yield 0, factors.u1, factors.h
    yield second, factors.u2, phi
    if sizes.network == 2:
        yield second + first, factors.u3, phi


class Segment:
    """Pieces written one after the other, and everything that the way back needs of them."""

    def __init__(self, plan: Plan, k, v, mixed: Mixed, tables: Tables, part: slice, anchor):
        self.plan, self.tables, self.first = plan, tables, part.start
        self.k, self.v = k[part], v[part]
        s, count, z = plan.sizes, part.stop - part.start, plan.rows_and_heads
        self.own = anchor if plan.own and part.start == 0 else None
        # one more than there are pieces: the last is where the next segment starts
        self.states = k.new_empty(count + 1, z, s.size)
        self.weights = torch.empty(count + 1, z, s.size, device=k.device)
        self.momenta = torch.empty_like(self.weights)
        self.terms = k.new_empty(count, z, s.terms, s.size)
        self.factors = Factors.room(count, plan, k)
        self.mixed = mixed.pieces(count)
        assert mixed.push is not None
        assert mixed.push_kept is not None
        self.shares = mixed.push[:, :, : s.terms].contiguous().unbind(0)
        self.kept = mixed.push_kept[:, :, : s.terms].contiguous().unbind(0)
        self.phi = self.k
        if s.features != s.d_k:
            self.phi = k.new_empty(count, z, s.pairs, s.pitch)

    def anchor(self, n: int) -> Tensor:
        return self.states[n] if self.own is None else self.own

    def steps_of(self, n: int) -> Iterator[tuple[int, Momenta]]:
        """Of piece n: each matrix, and what its momenta at the stride points are made of."""
        for at, u, x in matrices(self.plan.sizes, self.factors.at(n), self.phi[n]):
            yield at, Momenta(self.momenta[n, :, at:], u, x, self.shares[n], self.kept[n])

    def write(self, n: int) -> None:
        """Piece n, from the state before it to the state after it."""
        plan, s, t = self.plan, self.plan.sizes, self.tables
        z, factors, here = plan.rows_and_heads, self.factors.at(n), self.mixed[n]
        launch(
            factors_kernel, (z,),
            self.k[n], self.v[n], self.anchor(n), t.gain, t.residual, *factors, self.phi[n],
            t.left, t.right, t.scale, s.heads, **constants(plan, self.k),
        )  # fmt: skip
        for at, momenta in self.steps_of(n):
            out = self.terms[n, :, :, at:]
            momentum_steps(momenta, s.size, plan.steps, plan.coefficients, out)
        blocks = 1 if s.network == 0 else triton.cdiv(s.hidden, s.block_f)
        launch(
            advance_kernel, (z, blocks),
            self.weights[n], self.momenta[n], self.terms[n], self.weights[n + 1],
            self.momenta[n + 1], self.states[n + 1], *factors, self.phi[n], here.kept, here.steps,
            here.push_kept, here.push, **constants(plan, self.k),
        )  # fmt: skip

    def settle(self, n: int, anchors: Tensor, initial: Tensor) -> None:
        """Before the piece after n: begin documents, keep anchors."""
        number = self.first + n + 1
        if number >= len(self.plan.marked) or not self.plan.marked[number]:
            return
        marks = self.plan.marks[number][:, None]
        fresh, keep = (marks & 1) != 0, (marks & 2) != 0
        weights = self.weights[n + 1]
        start = initial.repeat(len(weights) // len(initial), 1)
        weights.copy_(torch.where(fresh, start, weights))
        self.states[n + 1] = weights
        self.momenta[n + 1].masked_fill_(fresh, 0.0)
        anchors.copy_(torch.where(keep, weights, anchors))


def written_segment(plan, k, v, mixed, tables, part, carry, anchor, initial) -> Segment:
    """All pieces of a segment; `carry`, weights, momentum and kept anchors, is changed in place."""
    weights, momentum, anchors = carry
    segment = Segment(plan, k, v, mixed, tables, part, anchor)
    segment.states[0], segment.weights[0], segment.momenta[0] = weights, weights, momentum
    for n in range(len(segment.k)):
        segment.write(n)
        segment.settle(n, anchors, initial)
    weights.copy_(segment.weights[-1])
    momentum.copy_(segment.momenta[-1])
    return segment


def write(*args) -> Written:
    segment = written_segment(*args)
    return Written(segment.states[:-1], segment.terms, segment.factors)


class MuonBackward(Backward):
    def segment(self, part: slice, dy: Tensor, checkpoint: list) -> None:
        weights, momentum = checkpoint
        carry = [weights, momentum, torch.empty_like(weights)]
        args = self.plan, self.k, self.v, self.mixed.at(part), self.tables, part
        segment = written_segment(*args, carry, self.anchor, self.initial)
        written = Written(segment.states[:-1], segment.terms, segment.factors)
        found = self.read_backward(part, dy, written)
        for n in reversed(range(len(segment.k))):
            self._piece(part.start + n, segment, n, found.states[n], found.terms[n])

    def _piece(self, number: int, segment: Segment, n: int, d_state: Tensor, d_terms: Tensor):
        """From after the piece to before it."""
        pushes = self._through_steps(number, segment, n, d_terms)
        self._through_carry(number, segment, n, d_state, pushes)
        self._through_factors(number, segment, n, pushes)
        if self.plan.marked[number]:
            marks = self.plan.marks[number][:, None]
            fresh, keep = (marks & 1) != 0, (marks & 2) != 0
            self.g_weights += torch.where(keep, self.g_anchors, 0.0)
            self.g_initial += torch.where(fresh, self.g_weights, 0.0)
            self.g_weights.masked_fill_(fresh, 0.0)
            self.g_momentum.masked_fill_(fresh, 0.0)

    def _through_steps(self, number: int, segment: Segment, n: int, d_terms: Tensor) -> Tensor:
        """The gradients of the momenta at the stride points; room for the last one behind."""
        plan, s = self.plan, self.plan.sizes
        pushes = self.k.new_empty(plan.rows_and_heads, s.pulls, s.size)
        steps, d_here = self.mixed.at(number).steps, self.d_mixed.at(number)
        d_steps, d_push_kept = d_here.steps, d_here.push_kept
        assert steps is not None
        assert d_steps is not None
        assert d_push_kept is not None
        last = steps[:, -1].contiguous()
        count = 1 if s.network == 0 else 1 + s.network
        sums = torch.zeros(2, count, *last.shape, device=last.device)
        for i, (at, momenta) in enumerate(segment.steps_of(n)):
            grads = StepGradients(d_terms[:, :, at:], last, self.g_weights[:, at:])
            momentum_steps_backward(
                momenta,
                s.size,
                plan.steps,
                plan.coefficients,
                grads,
                pushes[:, :, at:],
                *sums[:, i],
            )
        of_last, of_kept = sums.sum(1)
        d_steps[:, -1] += of_last
        d_push_kept[:, : s.terms] = of_kept
        return pushes

    def _through_carry(self, number: int, segment: Segment, n: int, d_state, pushes: Tensor):
        plan, s = self.plan, self.plan.sizes
        here, d_here = self.mixed.at(number), self.d_mixed.at(number)
        block = min(1024, triton.next_power_of_2(s.size))
        blocks = triton.cdiv(s.size, block)
        sums = torch.empty(plan.rows_and_heads, blocks, 2, device=self.k.device)
        launch(
            carry_kernel, (plan.rows_and_heads, blocks),
            self.g_weights, self.g_momentum, segment.weights[n], segment.momenta[n], d_state,
            pushes, here.kept, here.push_kept, sums, blocks, BLOCK=block, S=s._replace(heads=0),
        )  # fmt: skip
        total = sums.sum(1)
        assert d_here.push_kept is not None
        d_here.push_kept[:, -1] = total[:, 0]
        d_here.kept[:, -1] += total[:, 1]

    def _through_factors(self, number: int, segment: Segment, n: int, pushes: Tensor):
        plan, t, k = self.plan, self.tables, segment.k
        here, d_here = self.mixed.at(number), self.d_mixed.at(number)
        dk = torch.empty(k.shape[1:], device=k.device)
        d_anchor = self.g_weights if segment.own is None else self.g_anchor
        launch(
            factors_backward_kernel, (plan.rows_and_heads,),
            k[n], segment.v[n], segment.anchor(n), d_anchor, t.gain, t.residual,
            *segment.factors.at(n), pushes, here.push, dk, self.dv[number], d_here.push,
            self.d_gain_write, self.d_degrees_write, self.scratch, t.left, t.right, t.scale,
            plan.sizes.heads, **constants(plan, k),
        )  # fmt: skip
        self.dk[number] = dk


MUON = Way(write, MuonBackward)
