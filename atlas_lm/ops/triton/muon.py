"""Muon: the steps of a piece by many programs at once, piece after piece from the host."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
import triton
from torch import Tensor

from atlas_lm.ops.triton.launch import NUMBER, Repeated, launch, processors
from atlas_lm.ops.triton.muon_kernels import (
    advance_kernel,
    branch_kernel,
    factors_kernel,
    hidden_kernel,
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
    ReadGradients,
    Tables,
    Way,
    Written,
    constants,
)
from atlas_lm.ops.triton.sizes import Sizes, by_blocks
from atlas_lm.ops.triton.write_gradients import Stood, Sums, WriteGradients


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
        self.constants, self.count = constants(plan, k), count
        # one more than there are pieces: the last is where the next segment starts
        self.all_states = k.new_empty(count + 1, z, s.size)
        self.stepped = steps is not None
        self.all_terms = k.new_empty(count, z, s.terms, s.size) if steps is None else steps
        rooms = torch.empty(2, count + 1 if keep else 1, z, s.size, device=k.device)
        self.all_weights, self.all_momenta = rooms.expand(-1, count + 1, -1, -1)
        self.states, self.weights = self.all_states.unbind(0), self.all_weights.unbind(0)
        self.momenta, self.terms = self.all_momenta.unbind(0), self.all_terms.unbind(0)
        self.all_factors = Factors.room(count, plan, k)
        self.factors = [
            Factors(*x) for x in zip(*(f.unbind(0) for f in self.all_factors), strict=True)
        ]
        phi = k[part] if s.features == s.d_k else k.new_empty(count, z, s.pairs, s.pitch)
        self.phi, self.mixed = phi.unbind(0), mixed.pieces(count)
        own = plan.own and part.start == 0
        at = anchor if own else self.all_states
        self.make_factors = self._make_factors(k[part], v[part], at, phi)
        self.groups = same_size(s)
        self.steps_to = from_place(self.all_terms, s)
        self.sources = self._sources(from_place(self.all_momenta[:-1], s), mixed)

    def _make_factors(self, k: Tensor, v: Tensor, anchor: Tensor, phi: Tensor) -> list[Repeated]:
        """What is launched for the factors of a piece's pairs, one after the other."""
        plan, t, f, z = self.plan, self.tables, self.all_factors, k.shape[1]
        s = by_blocks(plan.sizes, z, processors(k.device))
        parts = torch.empty(z, s.team * s.pairs * s.d_v if s.network else 1, device=k.device)
        tables, blocks = (t.left, t.right, t.scale), (z * s.team, 2 if s.tail else 1)
        number = NUMBER, z, s.heads
        options = self.constants | {"S": s._replace(heads=0)}
        hidden = Repeated(hidden_kernel, blocks, k, anchor, f.h, parts, *tables, *number, **options)
        branch = Repeated(
            branch_kernel, (z, triton.cdiv(s.pairs, 16)),
            k, v, t.gain, t.residual, parts, f.u1, phi, *tables, *number, **options,
        )  # fmt: skip
        factors = Repeated(
            factors_kernel, blocks, k, v, anchor, f.u1, f.u2, f.u3, *tables, *number, **options
        )
        if s.network != 0:
            return [hidden, branch, factors]
        return [factors] if s.features == s.d_k else [branch, factors]

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

    def stood(self) -> Stood:
        return Stood(self.all_states, self.all_weights, self.all_momenta, self.all_factors)

    def written(self) -> Written:
        return Written(self.all_states[:-1], self.all_terms, self.all_factors)

    def write(self, n: int) -> None:
        """Piece n, from the state before it to the state after it."""
        s, z = self.plan.sizes, self.plan.rows_and_heads
        factors, here = self.factors[n], self.mixed[n]
        for repeated in self.make_factors:
            repeated(n)
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
    for n in range(segment.count):
        segment.write(n)
        segment.settle(n, anchors, initial)
    weights.copy_(segment.weights[-1])
    momentum.copy_(segment.momenta[-1])
    return segment


def write(*args) -> Written:
    return written_segment(*args, keep=False, steps=None).written()


class MuonBackward(Backward):
    def begin(self, g_weights, g_momentum, g_anchors, anchor) -> None:
        super().begin(g_weights, g_momentum, g_anchors, anchor)
        s = self.plan.sizes
        self.pushes = self.k.new_empty(self.plan.rows_and_heads, s.pulls, s.size)
        self.pushes[:, -1] = self.g_momentum

    def segment(self, part: slice, dy: Tensor, checkpoint: list) -> None:
        weights, momentum, steps = checkpoint
        carry = [weights, momentum, torch.empty_like(weights)]
        here = self.mixed.at(part)
        args = self.plan, self.k, self.v, here, self.tables, part, carry
        segment = written_segment(*args, self.anchor, self.initial, keep=True, steps=steps)
        found = self.read_backward(part, dy, segment.written())
        s, z, count = self.plan.sizes, self.plan.rows_and_heads, segment.count
        of_steps = torch.empty(count, 2, len(places(s)), z, s.terms, device=self.k.device)
        assert here.push is not None
        back = WriteGradients(self, part, here, here.push, segment.stood(), found, self.pushes)
        step_back = self._steps_backward(segment, here, found, of_steps)
        for n in reversed(range(count)):
            step_back(n)
            back(n)
        self._leave(part, back.sums(), of_steps)

    def _steps_backward(
        self, segment: Segment, here: Mixed, found: ReadGradients, of_steps: Tensor
    ) -> Callable[[int], None]:
        """From the gradients of weights and steps of a piece to those of its momenta."""
        s = self.plan.sizes
        assert here.steps is not None
        pushed = from_place(self.pushes[None], s)[0]
        g_weights = from_place(self.g_weights[None], s)[0]
        reads, last = from_place(found.terms, s), here.steps[:, :, -1].contiguous().unbind(0)

        def step_back(n: int) -> None:
            for momenta, (group, _) in zip(segment.sources[n], segment.groups, strict=True):
                grads = StepGradients(reads[n][group.start], last[n], g_weights[group.start])
                out = pushed[group.start], of_steps[n, 0, group], of_steps[n, 1, group]
                made = segment.steps_to[n][group.start]
                momentum_steps_backward(
                    momenta, s.size, self.plan.steps, self.plan.coefficients, made, grads, *out
                )

        return step_back

    def _leave(self, part: slice, sums: Sums, of_steps: Tensor) -> None:
        """What the pieces left, to where it belongs."""
        self.dk[part] = sums.dk
        d_kept, d_steps, _, d_push_kept, d_push = self.d_mixed.at(part)
        assert d_steps is not None
        assert d_push_kept is not None
        assert d_push is not None
        of_last, of_kept = of_steps.sum(2).unbind(1)
        d_steps[:, :, -1] += of_last
        d_push_kept[:, :, :-1] = of_kept
        d_push_kept[:, :, -1] = sums.last[..., 2]
        d_kept[:, :, -1] += sums.last[..., 0]
        d_push.copy_(sums.pulls)


MUON = Way(write, MuonBackward, keeps_steps=True)
