"""Muon: the steps of a piece by many programs at once, piece after piece from the host."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

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
    Meeting,
    Mixed,
    Plan,
    ReadGradients,
    Tables,
    Way,
    Written,
    backward_warps,
    constants,
)
from atlas_lm.ops.triton.sizes import Sizes

BLOCK = 1024
"""Weights that one program of `carry_kernel` takes."""


def places(sizes: Sizes) -> list[int]:
    """Where each matrix of a memory begins among all of its weights."""
    if sizes.network == 0:
        return [0]
    second, first = sizes.d_v * sizes.hidden, sizes.hidden * sizes.pitch
    return [0, second, second + first][: 1 + sizes.network]


@cache
def same_size(sizes: Sizes) -> list[tuple[slice, tuple[int, ...]]]:
    """Runs of matrices of one size, short side and long, and where each of them begins from the
    first on: their steps are made by one launch."""
    begins = places(sizes)
    second, first = sorted((sizes.d_v, sizes.hidden)), sorted((sizes.hidden, sizes.pitch))
    alike = [slice(0, len(begins))]
    if len(begins) > 1 and second != first:
        alike = [slice(0, 1), slice(1, len(begins))]
    return [(run, tuple(at - begins[run.start] for at in begins[run])) for run in alike]


def from_place(x: Tensor, sizes: Sizes) -> list[tuple[Tensor, ...]]:
    """Of every piece, x `[n ... size]` from the first element of each matrix on."""
    return list(zip(*(x[..., at:].unbind(0) for at in places(sizes)), strict=True))


class Segment:
    """Pieces written one after the other, and everything that the way back needs of them.

    Unless `keep`, the float32 state has one place, where it stays in the cache. Tensors are taken
    apart piece by piece once: a slice costs the host as much as a launch.
    """

    def __init__(
        self, plan: Plan, k, v, mixed: Mixed, tables: Tables, part: slice, anchor, keep, steps
    ):
        self.plan, self.tables, self.first = plan, tables, part.start
        s, count, z = plan.sizes, part.stop - part.start, plan.rows_and_heads
        self.constants, self.meeting = constants(plan, k), Meeting.of(plan)
        self.meetings = 2 if s.tail else 1
        self.k, self.v = k[part].unbind(0), v[part].unbind(0)
        # one more than there are pieces: the last is where the next segment starts
        self.all_states = k.new_empty(count + 1, z, s.size)
        self.stepped = steps is not None
        self.all_terms = k.new_empty(count, z, s.terms, s.size) if steps is None else steps
        rooms = torch.empty(2, count + 1 if keep else 1, z, s.size, device=k.device)
        all_weights, all_momenta = rooms.expand(-1, count + 1, -1, -1)
        self.states, self.weights = self.all_states.unbind(0), all_weights.unbind(0)
        self.momenta, self.terms = all_momenta.unbind(0), self.all_terms.unbind(0)
        self.own = plan.own and part.start == 0
        self.anchors = (anchor,) if self.own else self.states
        self.all_factors = Factors.room(count, plan, k)
        self.factors = [
            Factors(*x) for x in zip(*(f.unbind(0) for f in self.all_factors), strict=True)
        ]
        phi = k[part] if s.features == s.d_k else k.new_empty(count, z, s.pairs, s.pitch)
        self.phi, self.mixed = phi.unbind(0), mixed.pieces(count)
        self.groups = same_size(s)
        self.steps_to = from_place(self.all_terms, s)
        self.sources = self._sources(from_place(all_momenta[:-1], s), mixed)

    def _sources(self, entering: list[tuple[Tensor, ...]], mixed: Mixed) -> list[list[Momenta]]:
        """Of each piece, for matrices of one size at a time: what their momenta are made of."""
        m = self.plan.sizes.terms
        assert mixed.push is not None
        assert mixed.push_kept is not None
        shares = mixed.push[:, :, :m].contiguous().unbind(0)
        kept = mixed.push_kept[:, :, :m].contiguous().unbind(0)
        made = []
        for n, (f, phi) in enumerate(zip(self.factors, self.phi, strict=True)):
            deep = (f.u1, f.h), (f.u2, phi), (f.u3, phi)
            pairs = ((f.u1, phi),) if self.plan.sizes.network == 0 else deep
            made.append(
                [
                    Momenta(entering[n][group.start], pairs[group], begins, shares[n], kept[n])
                    for group, begins in self.groups
                ]
            )
        return made

    def written(self) -> Written:
        return Written(self.all_states[:-1], self.all_terms, self.all_factors)

    def write(self, n: int) -> None:
        """Piece n, from the state before it to the state after it."""
        plan, s, t = self.plan, self.plan.sizes, self.tables
        z, factors, here = plan.rows_and_heads, self.factors[n], self.mixed[n]
        launch(
            factors_kernel, (z * s.team, 2 if s.tail and s.team == 1 else 1),
            self.k[n], self.v[n], self.anchors[n], t.gain, t.residual, *factors, self.phi[n],
            t.left, t.right, t.scale, *self.meeting, n * self.meetings + 1, s.heads,
            **self.constants,
        )  # fmt: skip
        if not self.stepped:
            self.step(n)
        blocks = 1 if s.network == 0 else triton.cdiv(s.hidden, s.block_f)
        launch(
            advance_kernel, (z, blocks),
            self.weights[n], self.momenta[n], self.terms[n], self.weights[n + 1],
            self.momenta[n + 1], self.states[n + 1], *factors, self.phi[n], here.kept, here.steps,
            here.push_kept, here.push, **self.constants,
        )  # fmt: skip

    def step(self, n: int) -> None:
        """Newton-Schulz at the stride points of piece n, from the pairs' factors."""
        plan = self.plan
        for momenta, (group, _) in zip(self.sources[n], self.groups, strict=True):
            out = self.steps_to[n][group.start]
            momentum_steps(momenta, plan.sizes.size, plan.steps, plan.coefficients, out)

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
        self.states[n + 1].copy_(weights)
        self.momenta[n + 1].masked_fill_(fresh, 0.0)
        anchors.copy_(torch.where(keep, weights, anchors))


def written_segment(
    plan, k, v, mixed, tables, part, carry, anchor, initial, *, keep: bool, steps: Tensor | None
) -> Segment:
    """All pieces of a segment; `carry`, weights, momentum and kept anchors, is changed in place.

    Only where `keep` is set is the float32 state before every piece there afterwards. `steps`:
    those of muon, where they were kept, `[n z m size]`.
    """
    weights, momentum, anchors = carry
    segment = Segment(plan, k, v, mixed, tables, part, anchor, keep, steps)
    for room, first in (
        (segment.states, weights),
        (segment.weights, weights),
        (segment.momenta, momentum),
    ):
        room[0].copy_(first)
    for n in range(len(segment.k)):
        segment.write(n)
        segment.settle(n, anchors, initial)
    weights.copy_(segment.weights[-1])
    momentum.copy_(segment.momenta[-1])
    return segment


def write(*args) -> Written:
    return written_segment(*args, keep=False, steps=None).written()


class Sums(NamedTuple):
    """Gradients of gates that the pieces of a segment leave, each a share of a sum."""

    steps: Tensor
    """`[n 2 matrices z m]`: of the last steps, and of push_kept at the stride points."""
    carry: Tensor
    """`[n z blocks 2]`: of the last push_kept, and of the last kept."""
    dk: Tensor
    """`[n team z p k]`, float32"""
    push: Tensor
    """`[n team z j p]`"""


class MuonBackward(Backward):
    def segment(self, part: slice, dy: Tensor, checkpoint: list) -> None:
        weights, momentum, steps = checkpoint
        carry = [weights, momentum, torch.empty_like(weights)]
        args = self.plan, self.k, self.v, self.mixed.at(part), self.tables, part, carry
        segment = written_segment(*args, self.anchor, self.initial, keep=True, steps=steps)
        found = self.read_backward(part, dy, segment.written())
        s, z, count = self.plan.sizes, self.plan.rows_and_heads, len(segment.k)
        wide = {"device": self.k.device}
        sums = Sums(
            steps=torch.empty(count, 2, len(places(s)), z, s.terms, **wide),
            carry=torch.empty(count, z, triton.cdiv(s.size, BLOCK), 2, **wide),
            dk=torch.empty(count, s.team, *self.k.shape[1:], **wide),
            push=torch.empty(count, s.team, z, s.pulls, s.pairs, **wide),
        )
        self._pieces(part, segment, found, sums)
        self._leave(part, sums)

    def _pieces(self, part: slice, segment: Segment, found: ReadGradients, sums: Sums) -> None:
        """From after the last piece to before the first."""
        s, here = self.plan.sizes, self.mixed.at(part)
        assert here.steps is not None
        pushes = self.k.new_empty(self.plan.rows_and_heads, s.pulls, s.size)
        pushed = from_place(pushes[None], s)[0]
        g_weights = from_place(self.g_weights[None], s)[0]
        reads, last = from_place(found.terms, s), here.steps[:, :, -1].contiguous().unbind(0)
        rest = [x.unbind(0) for x in (found.states, *sums, self.dv[part])]
        meeting = Meeting.of(self.plan)
        for n in reversed(range(len(segment.k))):
            d_state, of_steps, of_carry, dk, d_push, dv = (x[n] for x in rest)
            for momenta, (group, _) in zip(segment.sources[n], segment.groups, strict=True):
                grads = StepGradients(reads[n][group.start], last[n], g_weights[group.start])
                out = pushed[group.start], of_steps[0, group], of_steps[1, group]
                made = segment.steps_to[n][group.start]
                momentum_steps_backward(
                    momenta, s.size, self.plan.steps, self.plan.coefficients, made, grads, *out
                )
            self._through_carry(segment, n, d_state, pushes, of_carry)
            self._through_factors(segment, n, pushes, dk, dv, d_push, meeting)
            self._begin(part.start + n)

    def _begin(self, number: int) -> None:
        """Where the piece began a document, its gradients go to the initial weights."""
        if not self.plan.marked[number]:
            return
        marks = self.plan.marks[number][:, None]
        fresh, keep = (marks & 1) != 0, (marks & 2) != 0
        self.g_weights += torch.where(keep, self.g_anchors, 0.0)
        self.g_initial += torch.where(fresh, self.g_weights, 0.0)
        self.g_weights.masked_fill_(fresh, 0.0)
        self.g_momentum.masked_fill_(fresh, 0.0)

    def _through_carry(self, segment: Segment, n: int, d_state, pushes: Tensor, sums: Tensor):
        z, here, blocks = self.plan.rows_and_heads, segment.mixed[n], sums.shape[1]
        launch(
            carry_kernel, (z, blocks),
            self.g_weights, self.g_momentum, segment.weights[n], segment.momenta[n], d_state,
            pushes, here.kept, here.push_kept, sums, blocks,
            BLOCK=BLOCK, S=segment.constants["S"],
        )  # fmt: skip

    def _through_factors(self, segment: Segment, n: int, pushes, dk, dv, d_push, meeting: Meeting):
        plan, t, k, z = self.plan, self.tables, segment.k[n], self.plan.rows_and_heads
        number = (len(segment.k) - 1 - n) * segment.meetings + 1
        d_anchor = self.g_anchor if segment.own else self.g_weights
        launch(
            factors_backward_kernel, (z * plan.sizes.team,),
            k, segment.v[n], segment.anchors[n], d_anchor, t.gain, t.residual,
            *segment.factors[n], pushes, segment.mixed[n].push, dk, dv, d_push,
            self.d_gain_write, self.d_degrees_write, self.scratch, t.left, t.right, t.scale,
            *meeting, number, z, plan.sizes.heads,
            warps=backward_warps(plan.sizes), **segment.constants,
        )  # fmt: skip

    def _leave(self, part: slice, sums: Sums) -> None:
        """What the pieces left, to where it belongs."""
        d_kept, d_steps, _, d_push_kept, d_push = self.d_mixed.at(part)
        assert d_steps is not None
        assert d_push_kept is not None
        assert d_push is not None
        of_last, of_kept = sums.steps.sum(2).unbind(1)
        of_carry = sums.carry.sum(2)
        d_steps[:, :, -1] += of_last
        d_push_kept[:, :, :-1] = of_kept
        d_push_kept[:, :, -1] = of_carry[..., 0]
        d_kept[:, :, -1] += of_carry[..., 1]
        d_push.copy_(sums.push.sum(1))
        self.dk[part] = sums.dk.sum(1)


MUON = Way(write, MuonBackward, keeps_steps=True)
