"""Run a parallel form over the pieces of a batch, a few at a time.

Between groups only the state is kept; the backward computes each group again from it. So memory
grows with the number of groups times the state, plus what one group needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import isqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor

from atlas_lm.ops.networks import Frozen, network_of, rank_one_factors
from atlas_lm.ops.objectives import objective_of
from atlas_lm.ops.pieces import Pieces
from atlas_lm.ops.recompute import recompute
from atlas_lm.ops.state import Gates, MemoryState
from atlas_lm.rules import Rule
from atlas_lm.shapes import Keys, Product, Values, Weights


class Inputs(NamedTuple):
    """Pieces, piece first: q `[n b h l k]`, pairs with the c-1 before them, gates `[n b h l]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    threshold: Tensor | None
    alpha: Tensor
    eta: Tensor
    theta: Tensor | None
    gamma: Tensor
    filled: Tensor | None
    """`[n b 1 l]`: 0 in slots without a token."""

    def piece(self, i: int) -> Inputs:
        return Inputs(*(x if x is None else x[i] for x in self))


class Outer(NamedTuple):
    """What the outer loop learns and every piece sees."""

    initial: Weights
    slow: Weights
    coefficients: Tensor | None


def prepare(pieces: Pieces, state: MemoryState, q: Keys, k: Keys, v: Values, gates: Gates) -> Inputs:
    """Cut everything into pieces, with gates that leave the memory alone where there is no token."""
    alpha, eta, theta, gamma, threshold = gates
    reach = torch.arange(gamma.shape[-1], device=q.device) <= pieces.position[..., None]
    filled = pieces.filled
    if filled is not None:
        reach = reach & filled[..., None]

    def by_piece(flags: Tensor) -> Tensor:
        return flags.transpose(0, 1).unsqueeze(2)

    def neutral(gate: Tensor | None, value: float) -> Tensor | None:
        if gate is None:
            return None
        split = pieces.split(gate)
        return split if filled is None else torch.where(by_piece(filled), split, value)

    return Inputs(
        q=pieces.split(q),
        k=pieces.split_pairs(state.keys, k),
        v=pieces.split_pairs(state.values, v),
        threshold=None if threshold is None else pieces.split_pairs(state.thresholds, threshold),
        alpha=neutral(alpha, 1.0),
        eta=neutral(eta, 0.0),
        theta=neutral(theta, 1.0),
        gamma=pieces.split(gamma) * by_piece(reach),
        filled=None if filled is None else by_piece(filled).expand(-1, q.shape[0], -1, -1).to(q.dtype),
    )


class Carry(NamedTuple):
    """What goes from piece to piece, `[b h out in]`."""

    weights: Weights
    anchor: Weights
    momentum: Weights


@dataclass(frozen=True)
class Form:
    """A step over a group of pieces; subclasses say how the optimiser moves and how to read."""

    rule: Rule
    pieces: Pieces
    product: Product

    @staticmethod
    def group_size(pieces: int) -> int:
        return group_size(pieces)

    def begin(self, piece: int, carry: Carry, outer: Outer) -> Carry:
        """Forget in the rows whose document begins with this piece."""
        flags = self.pieces.begins[:, piece]
        zeros = {n: torch.zeros_like(s) for n, s in carry.momentum.items()}
        return Carry(
            begin_rows(flags, outer.initial, carry.weights),
            begin_rows(flags, outer.initial, carry.anchor),
            begin_rows(flags, zeros, carry.momentum),
        )

    def end(self, piece: int, weights: Weights, momentum: Weights, carry: Carry) -> Carry:
        """Where the chunk is over, the weights of now are the next anchor."""
        flags = self.pieces.ends_chunk[:, piece]
        anchor = {n: select_rows(flags, w, carry.anchor[n]) for n, w in weights.items()}
        return Carry(weights, anchor, momentum)

    def factors(self, inputs: Inputs, carry: Carry, outer: Outer, x: Tensor, f: Tensor):
        """The gradients of one piece's pairs at the anchor: inputs x_i and gradients u_i."""
        anchor = carry.anchor
        if self.rule.decay_first:
            anchor = {n: inputs.alpha[..., None] * w for n, w in anchor.items()}
        network, objective = network_of(self.rule), objective_of(self.rule)
        lin = Frozen(anchor, outer.slow, self.product)
        return rank_one_factors(network, objective, lin, x, f, inputs.v, inputs.threshold)

    def weighted_sum(self, share: Tensor, u: Tensor, x: Tensor) -> Tensor:
        """sum_i share_i u_i x_i^T, for shares `[b h i]`"""
        return self.product((share.unsqueeze(-1) * u).mT, x)


Step = Callable[[int, Inputs, Any, Outer], tuple[Tensor, Any]]
"""(number of the first piece, a group of pieces, carried state, outer) -> outputs, carried state."""


def run(step: Step, inputs: Inputs, carry: Any, outer: Outer, size: int, closed: bool):
    """All pieces in groups of `size`. A step that is not closed hides tensors: keep its graph."""
    outputs = []
    count = -(-inputs.q.shape[0] // size)
    parts = [[None] * count if x is None else x.split(size) for x in inputs]
    for i, group in enumerate(zip(*parts, strict=True)):
        here = partial(step, i * size)
        call = partial(recompute, here) if closed else here
        y, carry = call(Inputs(*group), carry, outer)
        outputs.append(y)
    return torch.cat(outputs), carry


def group_size(pieces: int) -> int:
    """Pieces a group: as many states are kept between groups as inside one."""
    return max(1, isqrt(pieces))


def begin_rows(flags: Tensor, fresh: Weights, current: Weights) -> Weights:
    """Initial weights in the rows (or all, `[r]`) that begin a document."""
    if not bool(flags.any()):
        return current
    return {n: select_rows(flags, fresh[n].expand_as(x), x) for n, x in current.items()}


def select_rows(flags: Tensor, chosen: Tensor, other: Tensor) -> Tensor:
    """`chosen` in the flagged rows; flags are on the CPU, so all or none costs nothing."""
    if bool(flags.all()):
        return chosen
    if not bool(flags.any()):
        return other
    return torch.where(flags.to(other.device).view(-1, *[1] * (other.ndim - 1)), chosen, other)


def finish(pieces: Pieces, state: MemoryState, k: Keys, v: Values, gates: Gates, **changes) -> MemoryState:
    """The state after the last token: a new window and position, and what the form changed."""
    thresholds = state.thresholds
    if thresholds is not None and gates.threshold is not None:
        thresholds = pieces.last_pairs(thresholds, gates.threshold)
    return replace(
        state,
        keys=pieces.last_pairs(state.keys, k),
        values=pieces.last_pairs(state.values, v),
        thresholds=thresholds,
        position=pieces.end.expand_as(state.position).clone(),
        **changes,
    )
