"""gd and momentum: steps add up, so a program can write all pieces of a row and head."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atlas_lm.ops.triton.launch import launch
from atlas_lm.ops.triton.reads import (
    Backward,
    Factors,
    Meeting,
    Mixed,
    Plan,
    Prepared,
    Tables,
    Way,
    Written,
    constants,
    either,
    in_room,
)
from atlas_lm.ops.triton.rows import ROWS
from atlas_lm.ops.triton.sizes import LINEAR, resident_registers
from atlas_lm.ops.triton.write_gradients import Stood, Sums, WriteGradients, all_pieces
from atlas_lm.ops.triton.writing import write_kernel
from atlas_lm.ops.triton.writing_resident import resident_kernel


class Segment(NamedTuple):
    """The state before every piece and after the last, `[n+1 z size]`, and the pairs' factors."""

    weights: Tensor
    """float32"""
    states: Tensor
    """The weights, rounded."""
    entered: Tensor
    """The momenta, rounded."""
    factors: Factors
    prepared: Prepared | None
    """Where writing has just asked for it."""

    def written(self) -> Written:
        return Written(self.states[:-1], self.entered[:-1], self.factors)


def written_segment(
    plan: Plan, k, v, mixed: Mixed, tables: Tables, part: slice, carry, anchor, initial, keep: bool
) -> Segment:
    """Write a segment. `carry`: weights, momentum, kept anchors, float32, changed in place.

    Only where `keep` is set are the float32 weights before every piece there afterwards, and
    `carry` as it was but for the momentum.
    """
    weights, momentum, anchors = carry
    k, v, t = k[part], v[part], tables
    shape = k.shape[0] + 1, plan.rows_and_heads, plan.sizes.size
    states = k.new_empty(shape)
    states[0] = weights
    all_weights = in_room(weights, shape) if keep else weights
    entered = states
    if momentum is not None:
        entered = torch.empty_like(states)
        entered[0] = momentum
    factors = Factors.room(k.shape[0], plan, k)
    own = plan.own and part.start == 0
    gates = mixed.share, either(mixed.push, mixed.kept), mixed.kept, either(mixed.steps, mixed.kept)
    here = either(momentum, weights), states, entered, anchor if own else states
    counts = k.shape[0], len(plan.marks) - part.start, plan.rows_and_heads, plan.sizes.heads
    resident = plan.sizes.resident
    prepared = Prepared.of(plan, k, v, t) if resident else None
    first = prepared or (t.left, t.right, t.scale)
    launch(
        resident_kernel if resident else write_kernel, (plan.rows_and_heads * plan.sizes.team,),
        k, v, *first, *gates, either(mixed.push_kept, mixed.kept), plan.marks[part.start :],
        all_weights, *here, initial, anchors, t.gain, *(() if resident else (t.residual,)),
        *factors, *Meeting.of(plan), *counts, OWN=own, KEEP=keep, **constants(plan, k),
        registers=resident_registers(plan.sizes) if resident else None,
    )  # fmt: skip
    return Segment(all_weights, states, entered, factors, prepared)


def write(
    plan: Plan, k, v, mixed: Mixed, tables: Tables, part: slice, carry, anchor, initial, keep: bool
) -> tuple[Written, Segment | None]:
    segment = written_segment(plan, k, v, mixed, tables, part, carry, anchor, initial, keep)
    if keep:
        carry[0].copy_(segment.weights[-1])
    # what was prepared is quickly made again
    return segment.written(), segment._replace(prepared=None) if keep else None


def piece_bytes(plan: Plan, width: int) -> int:
    """Of a piece of `Segment`, without what is prepared."""
    s = plan.sizes
    factors = s.d_v if s.network == LINEAR else s.d_v + (1 + s.network) * s.hidden
    state = s.size * (4 + width * (1 + s.terms)) + s.pairs * factors * width
    return plan.rows_and_heads * state


class AdditiveBackward(Backward):
    pushes: Tensor

    @property
    def in_one_launch(self) -> bool:
        """Whether all pieces of a segment take one launch."""
        return self.plan.sizes.resident and self.plan.sizes.network == LINEAR

    def begin(self, g_weights, g_momentum, g_anchors, anchor) -> None:
        super().begin(g_weights, g_momentum, g_anchors, anchor)
        if self.in_one_launch:
            return
        both = [self.g_weights, self.g_momentum][: self.plan.sizes.pulls]
        self.pushes = torch.stack(both, 1).to(self.k.dtype)

    def segment(self, part: slice, dy: Tensor, checkpoint: list) -> None:
        here, segment = self.mixed.at(part), checkpoint[-1] or self._again(part, checkpoint)
        checkpoint[-1] = None  # room for the next; another backward makes it again
        found = self.read_backward(part, dy, segment.written())
        prepared = segment.prepared or Prepared.of(
            self.plan, self.k[part], self.v[part], self.tables
        )
        stood = Stood(segment.states, segment.weights, segment.entered, segment.factors, prepared)
        assert here.share is not None
        pulls = here.share[:, :, -1:]
        if here.push is not None:
            pulls = torch.cat([pulls, here.push], 2)
        args = self, part, here, pulls.contiguous(), stood, found
        if self.in_one_launch:
            self._leave(part, all_pieces(*args))
            return
        back = WriteGradients(*args, self.pushes)
        ROWS.launch(back.launches, range(len(pulls))[::-1])
        self._leave(part, back.sums())

    def _again(self, part: slice, checkpoint: list) -> Segment:
        weights, momentum, _ = checkpoint
        # a checkpoint may be needed again, and momentum is changed in place
        momentum = None if momentum is None else momentum.clone()
        carry = [weights, momentum, torch.empty_like(weights)]
        args = self.plan, self.k, self.v, self.mixed.at(part), self.tables, part, carry
        return written_segment(*args, self.anchor, self.initial, keep=True)

    def _leave(self, part: slice, sums: Sums) -> None:
        """What the pieces left, to where it belongs."""
        self.dk[part] = sums.dk
        d_kept, d_steps, d_share, d_push_kept, d_push = self.d_mixed.at(part)
        assert d_share is not None
        d_kept[..., -1].add_(sums.last[..., 0])
        d_share[:, :, -1].add_(sums.pulls[:, :, 0])
        if d_steps is not None and d_push is not None and d_push_kept is not None:
            d_steps[..., -1, 0].add_(sums.last[..., 1])
            d_push_kept[..., 0] = sums.last[..., 2]
            d_push[:, :, 0] = sums.pulls[:, :, 1]


ADDITIVE = Way(write, AdditiveBackward, piece_bytes, most_kept=15 * 2**26)
