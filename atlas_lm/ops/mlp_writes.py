"""All writes of a group of pieces into two-layer memories as one autograd function.

What `gradients` and `chunked` do piece by piece for any network, by hand for the commonest one: l2,
a norm, no document that begins inside. The backward walks back through the pieces only for what the
memory hands on; gradients of keys, values and gates are products over the whole group after it.

Leading axes are n pieces and H = b h; of a memory `[H r out in]`: W alone, or W and S (r = 1, 2).
The second index of w2 is its output: both memories then have the hidden axis last.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from atlas_lm.ops.gradients import curvature, through_norm
from atlas_lm.ops.networks import START
from atlas_lm.ops.pieces import Pieces
from atlas_lm.ops.precision import batched_product
from atlas_lm.ops.segments import Carry
from atlas_lm.rules import Rule
from atlas_lm.shapes import Product, Weights


class Written(NamedTuple):
    """What a group of writes leaves behind, pieces and batch in one axis."""

    entered: dict[str, list[Tensor]]
    """W, or W and S, as each piece found them."""
    ins: Weights
    """What went into each map, where that is not phi of the keys."""
    grads: Weights
    carry: Carry


def writes_at_once(
    rule: Rule, product: Product, pieces: Pieces, group: range, weights: Weights
) -> bool:
    """Whether `write_mlp` can write these pieces."""
    named = rule.network == "mlp" and rule.objective == "l2" and rule.norm and not rule.decay_first
    if not named or product is not batched_product:
        return False
    # w2 scales its inputs, which pays where they are narrower than its outputs
    narrow = weights["w2"].shape[-1] <= weights["w2"].shape[-2]
    return narrow and all(pieces.begins[i].none and pieces.opens_chunk[i].all for i in group)


def write_mlp(
    x: Tensor, f: Tensor, v: Tensor, shares: Tensor, blend: Tensor, carry: Carry, slow: Weights
) -> Written:
    """x, f, v `[n b h p .]`; of every pair in what leaves its piece: shares `[n b h p r]`; of what
    enters a piece in what leaves it: blend `[n b h r r]`."""
    count, batch, heads = f.shape[:3]

    def each_head(weight: Tensor) -> Tensor:
        return weight.expand(batch, *weight.shape).flatten(0, 1)

    states = [s for s in (carry.weights, carry.momentum) if s]
    w1 = torch.stack([s["w1"].flatten(0, 1) for s in states], 1)
    w2 = torch.stack([s["w2"].flatten(0, 1).mT for s in states], 1)
    start1, start2 = (slow.get(START + n) for n in ("w1", "w2"))
    *entered, h, u1, u2, end1, end2 = _Writes.apply(
        f.flatten(1, 2),
        (x - v).flatten(1, 2),
        shares.flatten(1, 2).unsqueeze(-1),
        blend.flatten(1, 2),
        each_head(slow["gain"]).unsqueeze(1),
        w1,
        w2,
        None if start1 is None else each_head(start1),
        None if start2 is None else each_head(start2.mT),
    )

    def stacked(made: Tensor) -> Tensor:
        return made.view(count * batch, heads, *made.shape[2:])

    found1, found2 = entered[: len(states)], entered[len(states) :]
    left1, left2 = (end.unflatten(0, (batch, heads)).unbind(2) for end in (end1, end2))
    both = [
        {"w1": a.contiguous(), "w2": b.mT.contiguous()} for a, b in zip(left1, left2, strict=True)
    ]
    # in the order they came: a state says in its file which it has
    left = [{n: w[n] for n in carry.weights} for w in both]
    return Written(
        entered={"w1": [stacked(w) for w in found1], "w2": [stacked(w).mT for w in found2]},
        ins={"w1": stacked(h)},
        grads={"w1": stacked(u1), "w2": stacked(u2)},
        carry=Carry(left[0], left[0], left[1] if len(left) > 1 else {}),
    )


class _Saved(NamedTuple):
    """For the backward: `[n H p .]`, and memories as pieces found them, `[n H r . m]`."""

    f: Tensor
    shares: Tensor
    blend: Tensor
    gain: Tensor
    start1: Tensor | None
    start2: Tensor | None
    entered1: Tensor
    entered2: Tensor
    scaled_f: Tensor
    h: Tensor
    slope: Tensor
    bent: Tensor | None
    """The gradient at h times the second derivative; None where there is no backward."""
    branch: Tensor
    unit: Tensor
    mean: Tensor
    scale: Tensor
    error: Tensor
    u1: Tensor
    scaled_u1: Tensor
    u2: Tensor

    def anchor(self, i: int) -> Tensor:
        """Of w1."""
        w = self.entered1[i, :, 0]
        return w if self.start1 is None else w + self.start1


class _Writes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, f, target, shares, blend, gain, w1, w2, start1, start2):
        given = f, target, shares, blend, gain, w1, w2, start1, start2
        saved, end1, end2 = _forward(*given, tracked=any(ctx.needs_input_grad))
        ctx.save_for_backward(*saved)
        entered = *saved.entered1.unbind(2), *saved.entered2.unbind(2)
        return *entered, saved.h, saved.u1, saved.u2, end1, end2

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = _Saved(*ctx.saved_tensors)
        *at_entered, at_h, at_u1, at_u2, at_end1, at_end2 = grads
        half = len(at_entered) // 2
        walk = _Walk(saved, at_end1, at_end2)
        for i in reversed(range(len(saved.f))):
            walk.back(
                i,
                at_h[i],
                at_u1[i],
                at_u2[i],
                [g[i] for g in at_entered[:half]],
                [g[i] for g in at_entered[half:]],
            )
        return walk.gradients()


def _forward(f, target, shares, blend, gain, w1, w2, start1, start2, *, tracked: bool):
    count, hidden, r = f.shape[0], w1.shape[-1], w1.shape[1]
    scaled_f = (f.unsqueeze(-2) * shares).flatten(-2)
    h, slope, u2 = (f.new_empty(*f.shape[:-1], hidden) for _ in range(3))
    bent = torch.empty_like(h) if tracked else None
    # used again for every piece, so that they stay in a cache
    z, back, ones = torch.empty_like(h[0]), torch.empty_like(h[0]), torch.ones_like(h[0])
    scaled_u1 = f.new_empty(*f.shape[:-1], r * target.shape[-1])
    entered1, entered2 = (w.new_empty(count, *w.shape) for w in (w1, w2))
    entered1[0], entered2[0] = w1, w2
    ends = torch.empty_like(w1), torch.empty_like(w2)
    small = []
    for i in range(count):
        now1, now2 = entered1[i], entered2[i]
        a1 = now1[:, 0] if start1 is None else now1[:, 0] + start1
        torch.bmm(f[i], now2[:, 0] if start2 is None else now2[:, 0] + start2, out=z)
        torch.ops.aten.gelu.out(z, out=h[i])
        torch.ops.aten.gelu_backward.grad_input(ones, z, grad_input=slope[i])
        branch = torch.bmm(h[i], a1.mT)
        unit, mean, scale = torch.native_layer_norm(branch, branch.shape[-1:], None, None, 1e-6)
        error = torch.addcmul(target[i], gain, unit)
        u1 = through_norm(gain * error, branch, mean, scale)
        torch.bmm(u1, a1, out=back)
        torch.mul(back, slope[i], out=u2[i])
        if bent is not None:
            torch.mul(back, curvature(z), out=bent[i])
        for out, share in zip(scaled_u1[i].chunk(r, -1), shares[i].unbind(-2), strict=True):
            torch.mul(u1, share, out=out)
        next1, next2 = (entered1[i + 1], entered2[i + 1]) if i + 1 < count else ends
        _step(next1, scaled_u1[i], h[i], blend[i], now1)
        _step(next2, scaled_f[i], u2[i], blend[i], now2)
        small.append((branch, unit, mean, scale, error, u1))
    branch, unit, mean, scale, error, u1 = map(torch.stack, zip(*small, strict=True))
    given = f, shares, blend, gain, start1, start2, entered1, entered2, scaled_f
    norm = branch, unit, mean, scale
    return _Saved(*given, h, slope, bent, *norm, error, u1, scaled_u1, u2), *ends


def _step(out: Tensor, scaled: Tensor, other: Tensor, blend: Tensor, now: Tensor) -> None:
    """What leaves a piece: its writes and what is kept of what entered, all of W and S at once."""
    torch.bmm(scaled.mT, other, out=out.flatten(1, 2))
    out.flatten(2).baddbmm_(blend, now.flatten(2))


class _Walk:
    """The backward: from piece to piece, then over all of them."""

    def __init__(self, saved: _Saved, at_end1: Tensor, at_end2: Tensor):
        self.saved = saved
        self.left1, self.left2 = (torch.empty_like(e) for e in (saved.entered1, saved.entered2))
        self.left1[-1], self.left2[-1] = at_end1, at_end2
        self.begin1, self.begin2 = torch.empty_like(at_end1), torch.empty_like(at_end2)
        self.start1 = None if saved.start1 is None else torch.zeros_like(saved.start1)
        self.start2 = None if saved.start2 is None else torch.zeros_like(saved.start2)
        self.at_unit = saved.gain * saved.error
        # sums over the width times this are means times -scale
        self.less_scale = saved.scale / -saved.unit.shape[-1]
        self.along = (self.at_unit * saved.unit).sum(-1, keepdim=True).mul_(self.less_scale)
        self.to_z = torch.empty_like(saved.h)
        # used again for every piece, so that they stay in a cache
        self.up_h, self.up_u2, self.to_back = saved.h.new_empty(3, *saved.h.shape[1:])
        self.to_shares = torch.empty_like(saved.scaled_u1)
        self.to_at_unit = torch.empty_like(saved.u1)

    def back(self, i: int, up_h, up_u1, up_u2, at_entered1: list, at_entered2: list) -> None:
        """Through piece i, from the gradients at what left it to those at what entered."""
        s, anchor = self.saved, self.saved.anchor(i)
        left1, left2 = self.left1[i].flatten(1, 2), self.left2[i].flatten(1, 2)
        up_u2 = torch.baddbmm(up_u2, s.scaled_f[i], left2, out=self.up_u2)
        up_h = torch.baddbmm(up_h, s.scaled_u1[i], left1, out=self.up_h)
        unscaled = torch.bmm(s.h[i], left1.mT, out=self.to_shares[i])
        for part, share in zip(
            unscaled.chunk(s.shares.shape[-2], -1), s.shares[i].unbind(-2), strict=True
        ):
            up_u1 = torch.addcmul(up_u1, share, part)
        to_back = torch.mul(up_u2, s.slope[i], out=self.to_back)
        up_u1 = torch.baddbmm(up_u1, to_back, anchor.mT)
        to_branch = self._through_gradient_of_norm(i, up_u1)
        up_h.baddbmm_(to_branch, anchor)
        assert s.bent is not None, "a backward of what was not tracked"
        to_z = torch.mul(up_h, s.slope[i], out=self.to_z[i]).addcmul_(up_u2, s.bent[i])
        to_anchor1 = torch.bmm(s.u1[i].mT, to_back).baddbmm_(to_branch.mT, s.h[i])
        to_anchor2 = torch.bmm(s.f[i].mT, to_z)
        enter1, enter2 = (self.left1[i - 1], self.left2[i - 1]) if i else (self.begin1, self.begin2)
        _step_back(enter1, s.blend[i], self.left1[i], at_entered1, to_anchor1)
        _step_back(enter2, s.blend[i], self.left2[i], at_entered2, to_anchor2)
        if self.start1 is not None:
            self.start1 += to_anchor1
        if self.start2 is not None:
            self.start2 += to_anchor2

    def _through_gradient_of_norm(self, i: int, up: Tensor) -> Tensor:
        """Both ways from u1 to the branch: by the slope of the norm and by its input's gradient."""
        s = self.saved
        norm = s.branch[i], s.mean[i], s.scale[i]
        along_unit, along_u1 = (
            (up * x[i]).sum(-1, keepdim=True).mul_(self.less_scale[i]) for x in (s.unit, s.u1)
        )
        to_at_unit = self.to_at_unit[i].copy_(through_norm(up, *norm))
        to_unit = (s.gain * s.gain * to_at_unit).addcmul_(up, self.along[i])
        to_unit.addcmul_(self.at_unit[i], along_unit)
        return through_norm(to_unit, *norm).addcmul_(along_u1, s.unit[i])

    def gradients(self) -> tuple[Any, ...]:
        """Of everything that went in, in its order."""
        s, r = self.saved, self.saved.shares.shape[-2]
        anchor2 = s.entered2[:, :, 0] if s.start2 is None else s.entered2[:, :, 0] + s.start2
        scaled = batched_product(s.u2, self.left2.flatten(2, 3).mT).unflatten(-1, (r, -1))
        to_f = torch.addcmul(
            batched_product(self.to_z, anchor2.mT), scaled[..., 0, :], s.shares[..., 0, :]
        )
        for j in range(1, r):
            to_f.addcmul_(scaled[..., j, :], s.shares[..., j, :])
        to_shares = (scaled * s.f.unsqueeze(-2)).sum(-1, keepdim=True)
        unscaled = self.to_shares.unflatten(-1, (r, -1))
        to_shares += (unscaled * s.u1.unsqueeze(-2)).sum(-1, keepdim=True)
        to_blend = batched_product(self.left1.flatten(3), s.entered1.flatten(3).mT)
        to_blend += batched_product(self.left2.flatten(3), s.entered2.flatten(3).mT)
        at_gain = torch.addcmul(s.error, s.gain, s.unit).mul_(self.to_at_unit)
        to_gain = at_gain.sum((0, 2)).unsqueeze(1)
        to_target = self.to_at_unit * s.gain
        to_states = self.begin1, self.begin2, self.start1, self.start2
        return to_f, to_target, to_shares, to_blend, to_gain, *to_states


def _step_back(out: Tensor, blend: Tensor, left: Tensor, found: list, to_anchor: Tensor) -> None:
    """Gradients at what entered: by what was kept of it, by the reads and by the anchor."""
    torch.bmm(blend.mT, left.flatten(2), out=out.flatten(2))
    for part, read in zip(out.unbind(1), found, strict=True):
        part += read
    out[:, 0] += to_anchor
