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
from torch.autograd.function import once_differentiable

from atlas_lm.ops.decay import decay, spread
from atlas_lm.ops.features import features_of, kernel_of
from atlas_lm.ops.mlp_writes import Written, write_mlp, writes_at_once
from atlas_lm.ops.muon import Muon
from atlas_lm.ops.networks import Lin, add_residual, network_of
from atlas_lm.ops.pieces import Pieces, cut_into_pieces
from atlas_lm.ops.precision import add_product
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

    def steps(self) -> tuple[Tensor, Tensor]:
        """In what leaves each piece, W or W and S: of its pairs `[n b h pairs r]`, and of what
        entered `[n b h r r]`."""
        shares = [m[..., -1, :] for m in (self.share, self.momentum_share) if m is not None]
        kept = self.kept[..., -1]
        if self.carried is None or self.momentum_kept is None:
            return torch.stack(shares, -1), kept[..., None, None]
        rows = kept, self.carried[..., -1], torch.zeros_like(kept), self.momentum_kept[..., -1]
        return torch.stack(shares, -1), torch.stack(rows, -1).unflatten(-1, (2, 2))

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
        group = range(first, first + inputs.q.shape[0])
        if writes_at_once(self.rule, self.product, self.pieces, group, carry.weights):
            written = write_mlp(x, f, inputs.v, *mixing.steps(), carry, outer.slow)
            written = written._replace(carry=self._ended(group[-1], written, f.shape[1]))
        else:
            written = self._one_by_one(first, inputs, carry, outer, x, f, mixing)
        fq = phi(inputs.q)
        kernel = kernel_of(self.rule, outer.coefficients, self.product)(inputs.q, inputs.k, fq, f)
        lin = _EveryToken(outer.slow, self.product, mixing, written, fq, kernel)
        y = network_of(self.rule)(
            lin, add_residual(inputs.q, outer.slow, self.product).flatten(0, 1), lin.features
        )
        return y.unflatten(0, inputs.q.shape[:2]), written.carry

    def _ended(self, piece: int, written: Written, batch: int) -> Carry:
        """What was written at once leaves the last piece with the weights of now as its anchor."""
        carry = written.carry
        if self.pieces.ends_chunk[piece].all:
            return carry
        # a copy: a state must not keep what a whole group found
        found = {
            n: w[0][-batch:].clone(memory_format=torch.contiguous_format)
            for n, w in written.entered.items()
        }
        return self.end(piece, carry.weights, carry.momentum, carry._replace(anchor=found))

    def _one_by_one(self, first: int, inputs: Inputs, carry: Carry, outer: Outer, x, f, mixing):
        entered, ins, grads = [], [], []
        parts = (inputs.pieces(), x.unbind(0), f.unbind(0), mixing.ends())
        for i, (piece, x_i, f_i, end) in enumerate(zip(*parts, strict=True)):
            carry = self.begin(first + i, carry, outer)
            xs, us = self.factors(piece, carry, outer, x_i, f_i)
            entered.append(carry)
            ins.append({n: x for n, x in xs.items() if x is not f_i})
            grads.append(us)
            carry = self._write(first + i, carry, xs, us, end)
        weights, momentum = (_stacked([c[part] for c in entered]) for part in (0, 2))
        before = {n: [w, momentum[n]] if n in momentum else [w] for n, w in weights.items()}
        return Written(before, _stacked(ins), _stacked(grads), carry)

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

    def __init__(self, slow, product, mixing: Mixing, written: Written, features, kernel):
        super().__init__(slow)
        self.product, self.written = product, written
        scales = [m for m in (mixing.kept, mixing.carried) if m is not None]
        self.scales = [m.flatten(0, 1).unsqueeze(-1) for m in scales]
        self.share = mixing.share.flatten(0, 1)
        self.features, self.kernel = features.flatten(0, 1), kernel.flatten(0, 1)

    def __call__(self, name: str, x: Tensor) -> Tensor:
        written, states = self.written, self.written.entered[name]
        seen = (self.kernel, None) if x is self.features else (None, written.ins[name])
        out = _Read.apply(
            self.product, x, *seen, self.share, written.grads[name], *self.scales, *states
        )
        return self.with_start(name, x, out, self.product)


class _Read(torch.autograd.Function):
    """(prod alpha W + m S) x + the piece's writes, scaled on whichever side is narrower.

    How alike x is to what was written is its kernel, or its product with what went in there.
    """

    @staticmethod
    def forward(ctx, product, x, kernel, ins, share, grads, *scales_and_states):
        half = len(scales_and_states) // 2
        alike = product(x, ins.mT) if kernel is None else kernel
        out, reads = product(share * alike, grads), []
        for scale, w in zip(scales_and_states[:half], scales_and_states[half:], strict=True):
            if w.shape[-2] > x.shape[-1]:
                add_product(product, out, scale * x, w.mT)
            else:
                reads.append(product(x, w.mT))
                out.addcmul_(scale, reads[-1])
        ctx.product, ctx.half = product, half
        ctx.save_for_backward(x, alike, ins, share, grads, *scales_and_states, *reads)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (up,), product, half = grads, ctx.product, ctx.half
        x, alike, ins, share, written, *others = ctx.saved_tensors
        scales, states, reads = others[:half], others[half : 2 * half], others[2 * half :]
        if reads:
            to_x, to_scales, to_states = _back_scaling_outputs(
                product, up, x, scales, states, reads
            )
        else:
            to_x, to_scales, to_states = _back_scaling_inputs(product, up, x, scales, states)
        to_grads = product((share * alike).mT, up)
        at_mixed = product(up, written.mT)
        to_share, to_alike, to_ins = at_mixed * alike, at_mixed.mul_(share), None
        if ins is not None:
            add_product(product, to_x, to_alike, ins)
            to_alike, to_ins = None, product(to_alike.mT, x)
        return None, to_x, to_alike, to_ins, to_share, to_grads, *to_scales, *to_states


def _back_scaling_inputs(product: Product, up: Tensor, x: Tensor, scales, states):
    """Gradients of sum_i (scale_i x) W_i^T."""
    at_scaled = [product(up, w) for w in states]
    to_scales = [(at * x).sum(-1, keepdim=True) for at in at_scaled]
    to_states = [product(up.mT, scale * x) for scale in scales]
    to_x = at_scaled[0].mul_(scales[0])
    for at, scale in zip(at_scaled[1:], scales[1:], strict=True):
        to_x.addcmul_(at, scale)
    return to_x, to_scales, to_states


def _back_scaling_outputs(product: Product, up: Tensor, x: Tensor, scales, states, reads):
    """Gradients of sum_i scale_i (x W_i^T)."""
    scaled = [scale * up for scale in scales]
    to_scales = [(read * up).sum(-1, keepdim=True) for read in reads]
    to_states = [product(s.mT, x) for s in scaled]
    to_x = product(scaled[0], states[0])
    for s, w in zip(scaled[1:], states[1:], strict=True):
        add_product(product, to_x, s, w)
    return to_x, to_scales, to_states


def _stacked(pieces: list[Weights]) -> Weights:
    """One tensor a name, pieces and batch in one axis."""
    return {n: torch.stack([p[n] for p in pieces]).flatten(0, 1) for n in pieces[0]}
