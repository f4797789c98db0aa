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
from atlas_lm.ops.pieces import Pieces, cut_into_pieces
from atlas_lm.ops.segments import (
    Carry,
    Form,
    Groups,
    Inputs,
    Outer,
    finish,
    plan_groups,
    prepare,
    run,
    unbound,
)
from atlas_lm.ops.state import MemoryState, Tokens
from atlas_lm.shapes import Product, Values, Weights


def memorize_chunked(
    tokens: Tokens, outer: Outer, state: MemoryState, product: Product, closed: bool
) -> tuple[Values, MemoryState]:
    """Any rule with finite weights. `closed`: the rule's own functions hide no learned tensor."""
    rule = state.rule
    pieces = cut_into_pieces(
        state.position, tokens.q.shape[1], tokens.mask, tokens.reset, rule.chunk, rule.window
    )
    inputs = prepare(pieces, state, tokens)
    carry = Carry(state.weights, opened(pieces, state), state.momentum)
    if rule.optimizer == "muon":
        form, groups = Muon(rule, pieces, product), Groups(size=1, kept=1)
    else:
        form, groups = Additive(rule, pieces, product), plan_groups(inputs, state.weights)
    y, carry = run(form, inputs, carry, outer, groups, closed)
    return pieces.join(y), finish(pieces, state, tokens, **carry._asdict())


def opened(pieces: Pieces, state: MemoryState) -> Weights:
    """The anchor; at the beginning of a chunk it is the weights, which then get its gradient."""
    flags = pieces.opens_chunk[0]
    return {n: flags.select(w, state.anchor[n]) for n, w in state.weights.items()}


class Mixing(NamedTuple):
    """How entering state and gradients make up S_t and W_t, `[n b h l]` and `[n b h l pairs]`."""

    kept: Tensor
    """prod alpha: of W in W_t."""
    carried: Tensor | None
    """m: of S in W_t."""
    share: Tensor
    """-P: of each pair in W_t."""
    momentum_kept: Tensor | None
    """prod theta: of S in S_t."""
    momentum_share: Tensor | None
    """-C: of each pair in S_t."""

    def ends(self) -> list[Mixing]:
        """At the last token of each piece, ready to scale matrices or pairs."""
        count = self.kept.shape[0]
        scale = [
            None if m is None else m[..., -1, None, None]
            for m in (self.kept, self.carried, self.momentum_kept)
        ]
        share = [
            None if m is None else m[..., -1, :, None] for m in (self.share, self.momentum_share)
        ]
        parts = (scale[0], scale[1], share[0], scale[2], share[1])
        return [Mixing(*x) for x in zip(*(unbound(x, count) for x in parts), strict=True)]

    @classmethod
    def of(cls, inputs: Inputs) -> Mixing:
        kept, steps = decay(inputs.alpha)
        weight = inputs.gamma * -inputs.eta.unsqueeze(-1)
        if inputs.theta is None:
            return cls(kept, None, spread(steps, weight), None, None)
        momentum_kept, persisted = decay(inputs.theta)
        share = spread(persisted, weight)
        if inputs.filled is not None:
            # no gate is neutral here: a momentum moves the weights wherever it is added
            steps = steps * inputs.filled.unsqueeze(-2)
        carried = (steps @ momentum_kept.unsqueeze(-1)).squeeze(-1)
        return cls(kept, carried, steps @ share, momentum_kept, share)


class Additive(Form):
    """gd and momentum: steps add up, so all pieces are written first and read together after."""

    def __call__(self, first: int, inputs: Inputs, carry: Carry, outer: Outer):
        phi = features_of(self.rule, outer.coefficients)
        x, f = add_residual(inputs.k, outer.slow, self.product), phi(inputs.k)
        mixing = Mixing.of(inputs)
        entered, ins, grads = [], [], []
        parts = (inputs.pieces(), x.unbind(0), f.unbind(0), mixing.ends())
        for i, (piece, x_i, f_i, end) in enumerate(zip(*parts, strict=True)):
            carry = self.begin(first + i, carry, outer)
            xs, us = self.factors(piece, carry, outer, x_i, f_i)
            entered.append(carry)
            ins.append({n: x for n, x in xs.items() if x is not f_i})
            grads.append(us)
            carry = self._write(first + i, carry, xs, us, end)
        fq = phi(inputs.q)
        kernel = kernel_of(self.rule, outer.coefficients, self.product)(inputs.q, inputs.k, fq, f)
        weights, momentum = (_stacked([c[part] for c in entered]) for part in (0, 2))
        before = {n: [w, momentum[n]] if n in momentum else [w] for n, w in weights.items()}
        lin = _EveryToken(
            outer.slow, self.product, mixing, before, _stacked(ins), _stacked(grads), fq, kernel
        )
        y = network_of(self.rule)(
            lin, add_residual(inputs.q, outer.slow, self.product).flatten(0, 1), lin.features
        )
        return y.unflatten(0, inputs.q.shape[:2]), carry

    def _write(self, piece: int, carry: Carry, xs: Weights, us: Weights, end: Mixing) -> Carry:
        shares = [s for s in (end.share, end.momentum_share) if s is not None]
        weights, momentum = {}, {}
        for name, w in carry.weights.items():
            written, *pushed = self.weighted_sums(shares, us[name], xs[name])
            weights[name] = torch.addcmul(written, end.kept, w)
            if end.carried is not None and end.momentum_kept is not None:
                s = carry.momentum[name]
                weights[name] = torch.addcmul(weights[name], end.carried, s)
                momentum[name] = torch.addcmul(pushed[0], end.momentum_kept, s)
        return self.end(piece, weights, momentum, carry)


class _EveryToken(Lin):
    """Each token's own memory W_t, without forming it."""

    def __init__(self, slow, product, mixing: Mixing, entered, ins, grads, features, kernel):
        super().__init__(slow)
        self.product, self.entered, self.ins, self.grads = product, entered, ins, grads
        scales = [m for m in (mixing.kept, mixing.carried) if m is not None]
        self.scales = [m.flatten(0, 1).unsqueeze(-1) for m in scales]
        self.share = mixing.share.flatten(0, 1)
        self.features, self.kernel = features.flatten(0, 1), kernel.flatten(0, 1)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        """(prod alpha W + m S) x + the piece's writes, scaled on whichever side is narrower."""
        alike = self.kernel if x is self.features else self.product(x, self.ins[name].mT)
        out = self.product(self.share * alike, self.grads[name])
        for scale, w in zip(self.scales, self.entered[name], strict=True):
            if w.shape[-2] > x.shape[-1]:
                out = out + self.product(scale * x, w.mT)
            else:
                out = torch.addcmul(out, scale, self.product(x, w.mT))
        return self.with_start(name, x, out, self.product)


def _stacked(pieces: list[Weights]) -> Weights:
    """One tensor a name, pieces and batch in one axis."""
    return {n: torch.stack([p[n] for p in pieces]).flatten(0, 1) for n in pieces[0]}
