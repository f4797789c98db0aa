"""Muon in parallel: the momenta of all stride points of a piece at once, then their steps.

    S_s = (prod theta) S - sum_i C[s,i] u_i x_i^T          for every stride point s
    W_s = (prod alpha) W + sum_{j <= s} L_alpha[s,j] eta_j NS(S_j)

Between two stride points the weights only fade, so a token reads the matrix of the last one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from atlas_lm.ops.decay import decay, spread
from atlas_lm.ops.features import features_of
from atlas_lm.ops.networks import Lin, add_residual, network_of
from atlas_lm.ops.newton_schulz import newton_schulz
from atlas_lm.ops.segments import Carry, Form, Inputs, Outer
from atlas_lm.ops.strides import Strides, strides_of
from atlas_lm.shapes import Product, Weights


class Muon(Form):
    """A step over one piece: Newton-Schulz keeps matrices for every stride point it runs over."""

    def __call__(self, first: int, inputs: Inputs, carry: Carry, outer: Outer):
        y, carry = self._piece(first, inputs.pieces()[0], carry, outer)
        return y.unsqueeze(0), carry

    def _piece(self, piece: int, inputs: Inputs, carry: Carry, outer: Outer):
        carry = self.begin(piece, carry, outer)
        phi = features_of(self.rule, outer.coefficients)
        x, f = add_residual(inputs.k, outer.slow, self.product), phi(inputs.k)
        xs, us = self.factors(inputs, carry, outer, x, f)
        strides, (kept, spans) = self._strides(piece), decay(inputs.alpha)
        retained = torch.cat([kept.unsqueeze(-1), spans], -1)
        steps, momentum = self._steps(inputs, carry, xs, us, strides)
        memories, weights = self._memories(carry, retained, steps, strides)
        fade = _at(retained, strides.cells).gather(
            -1, _index(strides.since, retained).unsqueeze(-1)
        )
        lin = _Between(outer.slow, self.product, memories, fade, strides.groups)
        q = inputs.q if strides.aligned else _at(inputs.q, strides.cells)
        y = network_of(self.rule)(lin, add_residual(q, outer.slow, self.product), phi(q))
        y = y if strides.aligned else _at(y, strides.place)
        return y, self.end(piece, weights, momentum, carry)

    def _strides(self, piece: int) -> Strides:
        pieces, stride = self.pieces, self.rule.stride
        phase = tuple((pieces.start[:, piece] % stride).tolist())
        length = tuple(pieces.length[:, piece].tolist())
        return strides_of(phase, length, pieces.width, stride, pieces.position.device)

    def _steps(self, inputs: Inputs, carry: Carry, xs: Weights, us: Weights, strides: Strides):
        """eta NS(S) at the stride points, `[b h m out in]`, and S after the last token."""
        rule = self.rule
        assert inputs.theta is not None
        kept, persisted = decay(inputs.theta)
        weight = inputs.gamma * inputs.eta.unsqueeze(-1) if rule.eta_inside else inputs.gamma
        share = spread(persisted, weight)
        share_s, kept_s = _at(share, strides.points), _at(kept.unsqueeze(-1), strides.points)
        rate = strides.live.to(kept.dtype).unsqueeze(1)
        if not rule.eta_inside:
            rate = rate * _at(inputs.eta.unsqueeze(-1), strides.points).squeeze(-1)
        steps, momentum = {}, {}
        for name, s in carry.momentum.items():
            x, u = xs[name], us[name]
            (written,) = self.weighted_sums([share[..., -1, :, None]], u, x)
            momentum[name] = kept[..., -1, None, None] * s - written
            if strides.points.shape[1] == 0:
                continue
            mixed = (share_s.unsqueeze(-1) * u.unsqueeze(2)).mT.flatten(2, 3)
            written = self.product(mixed, x).unflatten(2, (-1, u.shape[-1]))
            s_s = kept_s.unsqueeze(-1) * s.unsqueeze(2) - written
            step = newton_schulz(s_s, rule.ns_steps, rule.ns_coefficients, self.product)
            steps[name] = rate[..., None, None] * step
        return steps, momentum

    def _memories(self, carry: Carry, retained: Tensor, steps: Weights, strides: Strides):
        """W after each step (before the first too, if read) `[b h g out in]`, and W at the end."""
        ends = retained[..., -1:, :]
        if not steps:
            faded = {n: ends[..., 0, 0, None, None] * w for n, w in carry.weights.items()}
            return {n: w.unsqueeze(2) for n, w in carry.weights.items()}, faded
        rows = torch.cat([_at(retained, strides.points), ends], 2)
        columns = _index(strides.points + 1, rows).unsqueeze(2).expand(*rows.shape[:3], -1)
        between, entry = rows.gather(-1, columns), rows[..., 0, None, None]
        memories, weights = {}, {}
        for name, w in carry.weights.items():
            step = steps[name]
            made = (between @ step.flatten(3)).unflatten(-1, step.shape[3:])
            made = made + entry * w.unsqueeze(2)
            memories[name], weights[name] = made[:, :, :-1], made[:, :, -1]
            if not strides.skips_entry:
                memories[name] = torch.cat([w.unsqueeze(2), memories[name]], 2)
        return memories, weights


class _Between(Lin):
    """The memory of each stretch between two steps, for the tokens that read it."""

    def __init__(
        self, slow: Weights, product: Product, memories: Weights, fade: Tensor, groups: int
    ):
        super().__init__(slow)
        self.product, self.memories, self.fade, self.groups = product, memories, fade, groups

    def __call__(self, name: str, x: Tensor) -> Tensor:
        cells = x.unflatten(2, (self.groups, -1))
        read = self.fade * self.product(cells, self.memories[name].mT).flatten(2, 3)
        return self.with_start(name, x, read, self.product)


def _index(slots: Tensor, like: Tensor) -> Tensor:
    """Slots of each row `[r s]` for all rows and heads `[b h s]`."""
    return slots.unsqueeze(1).expand(like.shape[0], like.shape[1], -1)


def _at(x: Tensor, slots: Tensor) -> Tensor:
    """x `[b h l d]` at the slots `[r s]` of each row: `[b h s d]`."""
    if slots.shape[0] == 1:
        return x.index_select(2, slots[0])
    index = _index(slots, x).unsqueeze(-1)
    return x.gather(2, index.expand(*index.shape[:3], x.shape[-1]))
