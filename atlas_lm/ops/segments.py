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

from atlas_lm.ops.gradients import pair_gradients
from atlas_lm.ops.host import to_device
from atlas_lm.ops.networks import Frozen
from atlas_lm.ops.pieces import Flags, Pieces
from atlas_lm.ops.recompute import recompute
from atlas_lm.ops.state import MemoryState, Tokens
from atlas_lm.rules import Rule
from atlas_lm.shapes import Product, Weights

CACHED, KEPT = 2**18, 2**20
"""Elements of the widest activation in a group, and in the groups that keep their graph."""


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

    def pieces(self) -> list[Inputs]:
        """One by one: the backward of `unbind` is one stack, that of indexing n fills of zeros."""
        count = self.q.shape[0]
        return [Inputs(*x) for x in zip(*(unbound(x, count) for x in self), strict=True)]


def unbound(x: Tensor | None, count: int) -> tuple[Tensor | None, ...]:
    """The pieces of x, or as many Nones."""
    return (None,) * count if x is None else x.unbind(0)


class Outer(NamedTuple):
    """What the outer loop learns and every piece sees."""

    initial: Weights
    slow: Weights
    coefficients: Tensor | None


def prepare(pieces: Pieces, state: MemoryState, tokens: Tokens) -> Inputs:
    """Cut everything into pieces, with gates that change nothing where there is no token."""
    q, k, v, (alpha, eta, theta, gamma, threshold), *_ = tokens
    filled, reach = pieces.filled, pieces.reach
    if threshold is not None and state.thresholds is not None:
        threshold = pieces.split_pairs(state.thresholds, threshold)

    def by_piece(flags: Tensor) -> Tensor:
        return flags.transpose(0, 1).unsqueeze(2)

    def neutral(gate: Tensor, value: float) -> Tensor:
        split = pieces.split(gate)
        return split if filled is None else torch.where(by_piece(filled), split, value)

    return Inputs(
        q=pieces.split(q),
        k=pieces.split_pairs(state.keys, k),
        v=pieces.split_pairs(state.values, v),
        threshold=threshold,
        alpha=neutral(alpha, 1.0),
        eta=neutral(eta, 0.0),
        theta=None if theta is None else neutral(theta, 1.0),
        gamma=pieces.split(gamma) * by_piece(reach),
        filled=None
        if filled is None
        else by_piece(filled).expand(-1, q.shape[0], -1, -1).to(q.dtype),
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

    def begin(self, piece: int, carry: Carry, outer: Outer) -> Carry:
        """Forget in the rows whose document begins with this piece."""
        flags = self.pieces.begins[piece]
        return Carry(
            begin_rows(flags, outer.initial, carry.weights),
            begin_rows(flags, outer.initial, carry.anchor),
            begin_rows(flags, None, carry.momentum),
        )

    def end(self, piece: int, weights: Weights, momentum: Weights, carry: Carry) -> Carry:
        """Where the chunk is over, the weights of now are the next anchor."""
        flags = self.pieces.ends_chunk[piece]
        anchor = {n: flags.select(w, carry.anchor[n]) for n, w in weights.items()}
        return Carry(weights, anchor, momentum)

    def factors(self, inputs: Inputs, carry: Carry, outer: Outer, x: Tensor, f: Tensor):
        """The gradients of one piece's pairs at the anchor: inputs x_i and gradients u_i."""
        anchor = carry.anchor
        if self.rule.decay_first:
            anchor = {n: inputs.alpha[..., None] * w for n, w in anchor.items()}
        lin = Frozen(anchor, outer.slow, self.product)
        return pair_gradients(self.rule, lin, x, f, inputs.v, inputs.threshold)

    def weighted_sums(self, shares: list[Tensor], u: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        """sum_i share_i u_i x_i^T for every share `[b h i 1]`, in one product."""
        if x.shape[-1] <= u.shape[-1]:
            scaled = torch.cat([s * x for s in shares], -1)
            return self.product(u.mT, scaled).split(x.shape[-1], -1)
        scaled = torch.cat([s * u for s in shares], -1)
        return self.product(scaled.mT, x).split(u.shape[-1], -2)


Step = Callable[[int, Inputs, Any, Any], tuple[Tensor, Any]]
"""(number of the first piece, a group of pieces, carried state, outer) -> outputs, state."""


def run(step: Step, inputs: Inputs, carry: Any, outer: Any, plan: Groups, closed: bool):
    """All pieces, group by group. A step that is not closed hides tensors: keep its graph."""
    count = -(-inputs.q.shape[0] // plan.size)
    if count == 1:  # its graph is always kept
        return step(0, inputs, carry, outer)
    outputs = []
    parts = [[None] * count if x is None else x.split(plan.size) for x in inputs]
    for i, group in enumerate(zip(*parts, strict=True)):
        here = partial(step, i * plan.size)
        call = partial(recompute, here) if closed and i < count - plan.kept else here
        y, carry = call(Inputs(*group), carry, outer)
        outputs.append(y)
    return torch.cat(outputs), carry


class Groups(NamedTuple):
    size: int
    """Pieces a group."""
    kept: int
    """Groups at the end that keep their graph: the backward begins there, one is always alive."""


def plan_groups(inputs: Inputs, weights: Weights) -> Groups:
    """Groups small enough for a cache, and few enough that their states do not add up."""
    widest = max(max(w.shape[-2:]) for w in weights.values())
    elements = inputs.k[0, ..., 0].numel() * widest
    size = max(1, isqrt(inputs.k.shape[0]) // 2, CACHED // elements)
    return Groups(size, max(1, KEPT // (elements * size)))


def begin_rows(flags: Flags, fresh: Weights | None, current: Weights) -> Weights:
    """Initial weights, or zeros, in the rows that begin a document."""
    if flags.none:
        return current
    # a copy: a state must not be a view of what an optimiser moves
    new = {
        n: torch.zeros_like(x) if fresh is None else fresh[n].expand_as(x).clone()
        for n, x in current.items()
    }
    return {n: flags.select(new[n], x) for n, x in current.items()}


def finish(pieces: Pieces, state: MemoryState, tokens: Tokens, **changes) -> MemoryState:
    """The state after the last token: a new window and position, and what the form changed."""
    thresholds, threshold = state.thresholds, tokens.gates.threshold
    if thresholds is not None and threshold is not None:
        thresholds = pieces.last_pairs(thresholds, threshold)
    return replace(
        state,
        keys=pieces.last_pairs(state.keys, tokens.k),
        values=pieces.last_pairs(state.values, tokens.v),
        thresholds=thresholds,
        position=to_device(pieces.end.expand(state.batch).clone(), pieces.device),
        **changes,
    )
