"""Muon: the steps of a piece by many programs at once, piece after piece from the host."""

from __future__ import annotations

from functools import cache

import torch
import triton
from torch import Tensor

from atlas_lm.ops.triton.launch import NUMBER, Each, Repeated, processors
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
    Prepared,
    ReadGradients,
    Tables,
    Way,
    Written,
    constants,
    in_room,
)
from atlas_lm.ops.triton.rows import ROWS
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


def from_place(x: Tensor, sizes: Sizes) -> list[Tensor]:
    """x `[... size]` from the first element of each matrix on."""
    return [x[..., at:] for at in places(sizes)]


class Segment:
    """Pieces written one after the other, and everything that the way back needs of them.

    Unless `keep`, the float32 state has one place, where it stays in the cache: that of `carry`,
    weights and momentum before the first piece.
    """

    def __init__(
        self, plan: Plan, k, v, mixed: Mixed, tables: Tables, part: slice, carry, anchor, keep,
        steps,
    ):  # fmt: skip
        self.plan, self.tables, self.first = plan, tables, part.start
        s, count, z = plan.sizes, part.stop - part.start, plan.rows_and_heads
        self.constants, self.count = constants(plan, k), count
        # one more than there are pieces: the last is where the next segment starts
        self.all_states = k.new_empty(count + 1, z, s.size)
        self.all_terms = k.new_empty(count, z, s.terms, s.size) if steps is None else steps
        self.all_weights, self.all_momenta = (
            in_room(x, (count + 1, z, s.size)) if keep else x.expand(count + 1, -1, -1)
            for x in carry
        )
        self.all_states[0] = carry[0]
        self.all_factors = Factors.room(count, plan, k)
        self.prepared = Prepared.of(plan, k[part], v[part], tables)
        phi = self.prepared.phi
        anchors = anchor if plan.own and part.start == 0 else self.all_states
        self.momenta = self._momenta(phi, mixed)
        self.launches = [
            *self._make_factors(k[part], v[part], anchors),
            *(self._make_steps() if steps is None else ()),
            self._advance(phi, mixed),
        ]

    def _make_factors(self, k: Tensor, v: Tensor, anchor: Tensor) -> list[Repeated]:
        """What is launched for the factors of a piece's pairs, one after the other."""
        plan, f, z = self.plan, self.all_factors, k.shape[1]
        s = by_blocks(plan.sizes, z, processors(k.device))
        parts = torch.empty(z, s.team * s.pairs * s.d_v if s.network else 1, device=k.device)
        phi, rest = self.prepared
        blocks = z * s.team, 2 if s.tail else 1
        options = self.constants | {"S": s._replace(heads=0)}
        hidden = Repeated(hidden_kernel, blocks, phi, anchor, f.h, parts, NUMBER, z, **options)
        branch = Repeated(
            branch_kernel, (z, triton.cdiv(s.pairs, s.few)),
            k, v, rest, self.tables.gain, parts, f.u1, NUMBER, z, s.heads, **options,
        )  # fmt: skip
        factors = Repeated(
            factors_kernel, blocks, phi, v, anchor, f.u1, f.u2, f.u3, NUMBER, z, **options
        )
        return [factors] if s.network == 0 else [hidden, branch, factors]

    def _momenta(self, phi: Tensor, mixed: Mixed) -> list[Momenta]:
        """For matrices of one size at a time: what their momenta are made of."""
        s, f = self.plan.sizes, self.all_factors
        assert mixed.push is not None
        assert mixed.push_kept is not None
        share, kept = (x[:, :, : s.terms].contiguous() for x in (mixed.push, mixed.push_kept))
        deep = (f.u1, f.h), (f.u2, phi), (f.u3, phi)
        pairs = ((f.u1, phi),) if s.network == 0 else deep
        entering = from_place(self.all_momenta[:-1], s)
        return [
            Momenta(entering[group.start], pairs[group], begins, share, kept)
            for group, begins in same_size(s)
        ]

    def _make_steps(self) -> list[Repeated]:
        """Newton-Schulz at the stride points of a piece, from the pairs' factors."""
        plan, outs = self.plan, from_place(self.all_terms, self.plan.sizes)
        return [
            launch
            for momenta, (group, _) in zip(self.momenta, same_size(plan.sizes), strict=True)
            for launch in momentum_steps(
                momenta, plan.sizes.size, plan.steps, plan.coefficients, outs[group.start]
            )
        ]

    def _advance(self, phi: Tensor, mixed: Mixed) -> Repeated:
        """From the state before a piece to the state after it."""
        s, (weights, momenta) = self.plan.sizes, (self.all_weights, self.all_momenta)
        blocks = 1 if s.network == 0 else triton.cdiv(s.hidden, s.block_f)
        gates = (x for x in (mixed.kept, mixed.steps, mixed.push_kept, mixed.push) if x is not None)
        after = weights[1:], momenta[1:], self.all_states[1:]
        return Repeated(
            advance_kernel, (self.plan.rows_and_heads, blocks),
            *map(Each, (weights, momenta, self.all_terms, *after, *self.all_factors, phi, *gates)),
            **self.constants,
        )  # fmt: skip

    def stood(self) -> Stood:
        return Stood(
            self.all_states, self.all_weights, self.all_momenta, self.all_factors, self.prepared
        )

    def written(self) -> Written:
        return Written(self.all_states[:-1], self.all_terms, self.all_factors)

    def write(self, anchors: Tensor, initial: Tensor) -> None:
        """All pieces, from the state before the first to that after the last."""
        begin = 0
        for n in range(self.count):
            marked = self._marked(n + 1)
            if marked or n + 1 == self.count:
                ROWS.launch(self.launches, range(begin, n + 1))
                begin = n + 1
            if marked:
                self._settle(n, anchors, initial)

    def _marked(self, n: int) -> bool:
        """Whether something is done before piece n, of this segment or the first after it."""
        number = self.first + n
        return number < len(self.plan.marked) and self.plan.marked[number]

    def _settle(self, n: int, anchors: Tensor, initial: Tensor) -> None:
        """Before the piece after n: begin documents, keep anchors."""
        marks = self.plan.marks[self.first + n + 1][:, None]
        fresh, keep = (marks & 1) != 0, (marks & 2) != 0
        weights = self.all_weights[n + 1]
        start = initial.repeat(len(weights) // len(initial), 1)
        weights.copy_(torch.where(fresh, start, weights))
        self.all_states[n + 1].copy_(weights)
        self.all_momenta[n + 1].masked_fill_(fresh, 0.0)
        anchors.copy_(torch.where(keep, weights, anchors))


def written_segment(
    plan, k, v, mixed, tables, part, carry, anchor, initial, *, keep: bool, steps: Tensor | None
) -> Segment:
    """All pieces of a segment. `carry`: weights, momentum, kept anchors.

    Where `keep` is set the float32 state before every piece is there afterwards; else `carry` has
    become that after the last. `steps`: those of muon, where they were kept, `[n z m size]`.
    """
    *state, anchors = carry
    segment = Segment(plan, k, v, mixed, tables, part, state, anchor, keep, steps)
    segment.write(anchors, initial)
    return segment


def write(*args, keep: bool) -> tuple[Written, Tensor | None]:
    """Of a segment its steps are kept, which took longest to make."""
    written = written_segment(*args, keep=False, steps=None).written()
    return written, written.terms if keep else None


def piece_bytes(plan: Plan, width: int) -> int:
    """Of a piece's steps."""
    return plan.rows_and_heads * plan.sizes.terms * plan.sizes.size * width


class MuonBackward(Backward):
    pushes: Tensor

    def begin(self, g_weights, g_momentum, g_anchors, anchor) -> None:
        super().begin(g_weights, g_momentum, g_anchors, anchor)
        s = self.plan.sizes
        self.pushes = self.k.new_empty(self.plan.rows_and_heads, s.pulls, s.size)
        self.pushes[:, -1] = self.g_momentum

    def segment(self, part: slice, dy: Tensor, checkpoint: list) -> None:
        weights, momentum, steps = checkpoint
        checkpoint[-1] = None  # room for the next; another backward makes them again
        carry = [weights, momentum, torch.empty_like(weights)]
        here = self.mixed.at(part)
        args = self.plan, self.k, self.v, here, self.tables, part, carry
        segment = written_segment(*args, self.anchor, self.initial, keep=True, steps=steps)
        found = self.read_backward(part, dy, segment.written())
        s, z, count = self.plan.sizes, self.plan.rows_and_heads, segment.count
        of_steps = torch.empty(count, 2, len(places(s)), z, s.terms, device=self.k.device)
        assert here.push is not None
        back = WriteGradients(self, part, here, here.push, segment.stood(), found, self.pushes)
        steps_back = self._steps_backward(segment, here, found, of_steps)
        ROWS.launch([*steps_back, *back.launches], range(count)[::-1])
        self._leave(part, back.sums(), of_steps)

    def _steps_backward(
        self, segment: Segment, here: Mixed, found: ReadGradients, of_steps: Tensor
    ) -> list[Repeated]:
        """From the gradients of weights and steps of a piece to those of its momenta."""
        plan, s = self.plan, self.plan.sizes
        assert here.steps is not None
        made, reads, pushed, weights = (
            from_place(x, s) for x in (segment.all_terms, found.terms, self.pushes, self.g_weights)
        )
        last = here.steps[:, :, -1].contiguous()
        return [
            launch
            for momenta, (group, _) in zip(segment.momenta, same_size(s), strict=True)
            for launch in momentum_steps_backward(
                momenta, s.size, plan.steps, plan.coefficients, made[group.start],
                StepGradients(reads[group.start], last, weights[group.start]),
                pushed[group.start], of_steps[:, 0, group], of_steps[:, 1, group],
            )
        ]  # fmt: skip

    def _leave(self, part: slice, sums: Sums, of_steps: Tensor) -> None:
        """What the pieces left, to where it belongs."""
        self.dk[part] = sums.dk
        d_kept, d_steps, _, d_push_kept, d_push = self.d_mixed.at(part)
        assert d_steps is not None
        assert d_push_kept is not None
        assert d_push is not None
        of_last, of_kept = of_steps.sum(2).unbind(1)
        d_steps[:, :, -1].add_(of_last)
        d_push_kept[:, :, :-1] = of_kept
        d_push_kept[:, :, -1] = sums.last[..., 2]
        d_kept[:, :, -1].add_(sums.last[..., 0])
        d_push.copy_(sums.pulls)


MUON = Way(write, MuonBackward, piece_bytes, most_kept=3 * 2**27)
