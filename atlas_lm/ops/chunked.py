"""The recurrence in parallel: a piece of a chunk at a time, never one matrix a token.

Inside a chunk every gradient is taken at the anchor, so it is a sum of rank-one terms u_i x_i^T
known up front, and with C = L_theta Gamma, P = L_alpha C (`ops.decay`)

    S_t = (prod theta) S - sum_i C[t,i] u_i x_i^T
    W_t = (prod alpha) W + m_t S - sum_i P[t,i] u_i x_i^T          m = L_alpha cumprod(theta)

A read of W_t is then three products. Muon moves W at stride points only: one matrix for each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from atlas_lm.ops.decay import decay, spread
from atlas_lm.ops.features import features_of, kernel_of
from atlas_lm.ops.muon import Muon
from atlas_lm.ops.networks import Lin, add_residual, network_of
from atlas_lm.ops.pieces import cut_into_pieces
from atlas_lm.ops.segments import Carry, Form, Inputs, Outer, finish, prepare, run
from atlas_lm.ops.state import Gates, MemoryState
from atlas_lm.shapes import Keys, Product, TokenFlag, Values, Weights


def memorize_chunked(
    q: Keys,
    k: Keys,
    v: Values,
    gates: Gates,
    outer: Outer,
    state: MemoryState,
    mask: TokenFlag | None,
    reset: TokenFlag | None,
    product: Product,
    closed: bool,
) -> tuple[Values, MemoryState]:
    """Any rule with finite weights. `closed`: the rule's own functions hide no learned tensor."""
    rule = state.rule
    pieces = cut_into_pieces(state.position, q.shape[1], rule.chunk, rule.window, mask, reset)
    inputs = prepare(pieces, state, q, k, v, gates)
    carry = Carry(state.weights, state.anchor, state.momentum)
    form = Muon if rule.optimizer == "muon" else Additive
    size = form.group_size(pieces.number)
    y, carry = run(form(rule, pieces, product), inputs, carry, outer, size, closed)
    return pieces.join(y), finish(pieces, state, k, v, gates, **carry._asdict())


class Mixing(NamedTuple):
    """How entering state and gradients make up S_t and W_t, `[n b h l]` and `[n b h l pairs]`."""

    kept: Tensor
    """prod alpha: of W in W_t."""
    carried: Tensor | None
    """m: of S in W_t."""
    share: Tensor
    """P: of each pair in W_t."""
    momentum_kept: Tensor | None
    """prod theta: of S in S_t."""
    momentum_share: Tensor | None
    """C: of each pair in S_t."""

    def piece(self, i: int) -> Mixing:
        return Mixing(*(m if m is None else m[i] for m in self))

    @classmethod
    def of(cls, inputs: Inputs) -> Mixing:
        retained = decay(inputs.alpha)
        weight = inputs.gamma * inputs.eta.unsqueeze(-1)
        if inputs.theta is None:
            return cls(retained[..., 0], None, spread(retained, weight), None, None)
        persisted = decay(inputs.theta)
        share = spread(persisted, weight)
        steps = retained[..., 1:]
        if inputs.filled is not None:
            # no gate is neutral here: a momentum moves the weights wherever it is added
            steps = steps * inputs.filled.unsqueeze(-2)
        carried = (steps @ persisted[..., :1]).squeeze(-1)
        return cls(retained[..., 0], carried, steps @ share, persisted[..., 0], share)


class Additive(Form):
    """gd and momentum: steps add up, so all pieces are written first and read together after."""

    def __call__(self, first: int, inputs: Inputs, carry: Carry, outer: Outer):
        phi = features_of(self.rule, outer.coefficients)
        x, f = add_residual(inputs.k, outer.slow, self.product), phi(inputs.k)
        mixing = Mixing.of(inputs)
        entered, ins, grads = [], [], []
        for i in range(inputs.q.shape[0]):
            carry = self.begin(first + i, carry, outer)
            xs, us = self.factors(inputs.piece(i), carry, outer, x[i], f[i])
            entered.append(carry)
            ins.append(xs)
            grads.append(us)
            carry = self._write(first + i, carry, xs, us, mixing.piece(i))
        fq = phi(inputs.q)
        kernel = kernel_of(self.rule, outer.coefficients, self.product)(inputs.q, inputs.k, fq, f)
        weights, momentum = _stacked([c.weights for c in entered]), _stacked([c.momentum for c in entered])
        lin = _EveryToken(
            outer.slow, self.product, mixing, weights, momentum, _stacked(ins), _stacked(grads), fq, kernel
        )
        y = network_of(self.rule)(lin, add_residual(inputs.q, outer.slow, self.product).flatten(0, 1), lin.features)
        return y.unflatten(0, inputs.q.shape[:2]), carry

    def _write(self, piece: int, carry: Carry, xs: Weights, us: Weights, mixing: Mixing) -> Carry:
        kept, carried, share, momentum_kept, momentum_share = (m if m is None else m[:, :, -1] for m in mixing)
        weights, momentum = {}, {}
        for name, w in carry.weights.items():
            weights[name] = kept[..., None, None] * w - self.weighted_sum(share, us[name], xs[name])
            if carried is None:
                continue
            s = carry.momentum[name]
            weights[name] = weights[name] + carried[..., None, None] * s
            momentum[name] = momentum_kept[..., None, None] * s - self.weighted_sum(
                momentum_share, us[name], xs[name]
            )
        return self.end(piece, weights, momentum, carry)


class _EveryToken(Lin):
    """Each token's own memory W_t, without forming it."""

    def __init__(self, slow, product, mixing: Mixing, weights, momentum, ins, grads, features, kernel):
        super().__init__(slow)
        self.product = product
        self.kept, self.carried, self.share = (m if m is None else m.flatten(0, 1) for m in mixing[:3])
        self.weights, self.momentum, self.ins, self.grads = weights, momentum, ins, grads
        self.features, self.kernel = features.flatten(0, 1), kernel.flatten(0, 1)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        out = self.kept.unsqueeze(-1) * self.product(x, self.weights[name].mT)
        if self.carried is not None:
            out = out + self.carried.unsqueeze(-1) * self.product(x, self.momentum[name].mT)
        alike = self.kernel if x is self.features else self.product(x, self.ins[name].mT)
        return out - self.product(self.share * alike, self.grads[name])


def _stacked(pieces: list[Weights]) -> Weights:
    """One tensor a name, pieces and batch in one axis."""
    return {n: torch.stack([p[n] for p in pieces]).flatten(0, 1) for n in pieces[0]}


