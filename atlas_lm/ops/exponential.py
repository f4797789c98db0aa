"""Memories on the exponential map, <phi*(q), phi*(k)> = exp(q.k): attention that learns.

phi* is infinite, so the layer that reads it is kept in the span of what was written,

    W_t phi*(x) = F_t [1; x] + sum_i u_i(t) exp(k_i.x)

and the state holds every past key with its coefficients u_i. Everything else of the network is
finite and moves as in `ops.chunked`. O(t) a token, like attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from atlas_lm.ops.decay import decay, spread
from atlas_lm.ops.features import with_one
from atlas_lm.ops.gradients import pair_gradients
from atlas_lm.ops.host import on_host
from atlas_lm.ops.networks import Lin, add_residual, network_of, normalized
from atlas_lm.ops.pieces import Pieces, cut_into_pieces, take_rows
from atlas_lm.ops.segments import Inputs, Outer, begin_rows, finish, plan_groups, prepare, run
from atlas_lm.ops.snapshot import Snapshot, SnapshotMaps
from atlas_lm.ops.state import MemoryState, Tokens, extended, part_of
from atlas_lm.rules import Rule
from atlas_lm.shapes import Product, Values, Weights


class Carry(NamedTuple):
    now: Snapshot
    anchor: Snapshot


class Context(NamedTuple):
    """What every piece sees: the outer loop's weights, and all keys by time `[b h s k]`."""

    outer: Outer
    keys: Tensor


def memorize_exponential(
    tokens: Tokens, outer: Outer, state: MemoryState, product: Product, closed: bool
) -> tuple[Values, MemoryState]:
    rule = state.rule
    pieces = cut_into_pieces(
        state.position, tokens.q.shape[1], tokens.mask, tokens.reset, rule.chunk, rule.window
    )
    inputs = prepare(pieces, state, tokens)
    length = int(on_host(state.position).max())
    stored = {n: p[:, :length].transpose(1, 2) for n, p in state.past.items()}
    carry = Carry(
        Snapshot(state.weights, part_of(stored, "now.")),
        Snapshot(state.anchor, part_of(stored, "anchor.")),
    )
    keys = torch.cat([stored["keys"], tokens.k.transpose(1, 2)], 2)
    form = _Exponential(rule, pieces, product, state.position, length)
    y, carry = run(
        form, inputs, carry, Context(outer, keys), plan_groups(inputs, state.weights), closed
    )
    past = {"keys": keys} | {
        f"{when}.{n}": extended(u, keys.shape[2])
        for when, snapshot in carry._asdict().items()
        for n, u in snapshot.coefficients.items()
    }
    past = form.by_document({n: p.transpose(1, 2) for n, p in past.items()})
    changes = {"weights": carry.now.weights, "anchor": carry.anchor.weights, "past": past}
    return pieces.join(y), finish(pieces, state, tokens, **changes)


@dataclass
class _Exponential:
    rule: Rule
    pieces: Pieces
    product: Product
    position: Tensor
    stored: int
    """Length of the past that came with the state."""

    def __call__(self, first: int, inputs: Inputs, carry: Carry, context: Context):
        outputs = []
        for i, piece in enumerate(inputs.pieces()):
            y, carry = self._piece(first + i, piece, carry, context)
            outputs.append(y)
        return torch.stack(outputs), carry

    def _piece(self, piece: int, inputs: Inputs, carry: Carry, context: Context):
        outer, (kept, spans) = context.outer, decay(inputs.alpha)
        carry = self._begin(piece, carry, outer)
        xs, us = self._factors(inputs, carry, context)
        share = spread(spans, inputs.gamma * inputs.eta.unsqueeze(-1))
        lin = _EveryToken(self, inputs, carry.now, context, kept.unsqueeze(-1), share, xs, us)
        y = lin.read_normalized() if self.rule.normalize else lin.read()
        return y, self._write(piece, carry, kept[..., -1:], share[..., -1, :], xs, us)

    def _begin(self, piece: int, carry: Carry, outer: Outer) -> Carry:
        flags = self.pieces.begins[piece]

        def begun(s: Snapshot) -> Snapshot:
            weights = begin_rows(flags, outer.initial, s.weights)
            return Snapshot(weights, begin_rows(flags, None, s.coefficients))

        return Carry(begun(carry.now), begun(carry.anchor))

    def _factors(self, inputs: Inputs, carry: Carry, context: Context):
        anchor = carry.anchor
        if self.rule.decay_first:
            anchor = anchor.scaled(inputs.alpha[..., None])
        lin = SnapshotMaps(anchor, context.outer.slow, context.keys, self.product)
        x = add_residual(inputs.k, context.outer.slow, self.product)
        v = functional.pad(inputs.v, (0, 1), value=1.0) if self.rule.normalize else inputs.v
        return pair_gradients(self.rule, lin, x, with_one(inputs.k), v, inputs.threshold)

    def _write(
        self, piece: int, carry: Carry, kept: Tensor, share: Tensor, xs: Weights, us: Weights
    ) -> Carry:
        """The memory after the piece: finite weights step, coefficients fade and are added to."""
        now = carry.now.scaled(kept.unsqueeze(-1))
        length = self._length(piece + 1)
        slots = self._slots[:, piece].clamp(max=length - 1)
        weights, coefficients = dict(now.weights), {}
        for name, u in us.items():
            step = share.unsqueeze(-1) * u
            if name not in now.coefficients:
                weights[name] = weights[name] - self.product(step.mT, xs[name])
                continue
            index = slots[:, None, :, None].expand_as(step)
            coefficients[name] = extended(now.coefficients[name], length).scatter_add(
                2, index, -step
            )
        flags = self.pieces.ends_chunk[piece]
        old = {n: extended(u, length) for n, u in carry.anchor.coefficients.items()}
        anchor = Snapshot(
            {n: flags.select(w, carry.anchor.weights[n]) for n, w in weights.items()},
            {n: flags.select(u, old[n]) for n, u in coefficients.items()},
        )
        return Carry(Snapshot(weights, coefficients), anchor)

    def _length(self, piece: int) -> int:
        """Keys there are, stored and read, before this piece."""
        return self.stored + self._seen[piece]

    @cached_property
    def _seen(self) -> list[int]:
        last, filled = on_host(self.pieces.index), self.pieces.filled
        if filled is not None:
            last = torch.where(on_host(filled), last, -1)
        return [0, *(last.amax((0, 2)) + 1).cummax(0).values.tolist()]

    @cached_property
    def _slots(self) -> Tensor:
        """`[r n pairs]`: which key of the past, in order of time, each pair is."""
        pairs, before = self.pieces.pairs, self.rule.window - 1
        start = self.position[: pairs.shape[0], None, None]
        return torch.where(
            pairs < before, start + pairs - before, self.stored + pairs - before
        ).clamp(min=0)

    def by_document(self, past: Weights) -> Weights:
        """The past of each row's last document from its first token on; zeros after the last."""
        pieces = self.pieces
        if pieces.alike:
            return past
        device, length = pieces.index.device, int(pieces.end.max())
        document = torch.stack([flags.rows for flags in pieces.begins], 1).cumsum(1)
        current = (document == document[:, -1:])[..., None].expand_as(pieces.index)
        if pieces.filled is not None:
            current = current & pieces.filled
        row = torch.arange(document.shape[0], device=device)[:, None, None].expand_as(pieces.index)
        place = torch.arange(length, device=device)
        index = place.clamp(max=max(self.stored - 1, 0)).repeat(document.shape[0], 1)
        index[row[current], pieces.position[current]] = self.stored + pieces.index[current]
        known = (place < pieces.end.to(device)[:, None])[..., None, None]
        return {n: torch.where(known, take_rows(p, index), 0) for n, p in past.items()}


class _EveryToken(Lin):
    """Each token's own memory: what entered the piece, faded, and the piece's writes up to it."""

    def __init__(
        self, form, inputs: Inputs, entry: Snapshot, context: Context, kept, share, xs, us
    ):
        super().__init__(context.outer.slow)
        self.form, self.product = form, form.product
        self.q, self.k, self.kept, self.share = inputs.q, inputs.k, kept, share
        self.entry = SnapshotMaps(entry, context.outer.slow, context.keys, form.product)
        self.xs, self.us = xs, us

    def read(self) -> Tensor:
        x = add_residual(self.q, self.entry.slow, self.product)
        return network_of(self.form.rule)(self, x, with_one(self.q))

    def __call__(self, name: str, x: Tensor) -> Tensor:
        before = self.kept * self.entry(name, x)
        alike = self.product(x, self.xs[name].mT)
        if name in self.entry.coefficients:
            alike = self.product(self.q, self.k.mT).exp()
        return before - self.product(self.share * alike, self.us[name])

    def read_normalized(self) -> Tensor:
        """Softmax: the largest exponent of each row is taken out of numerator and denominator."""
        u = self.entry.coefficients["w"]
        past = self.entry.scores(self.q, u)
        recent = self.product(self.q, self.k.mT)
        past = past.masked_fill((u[..., -1] == 0).unsqueeze(-2), float("-inf"))
        recent = recent.masked_fill(self.share == 0, float("-inf"))
        top = torch.cat([past, recent], -1).amax(-1, keepdim=True).detach().clamp(min=-1e30)
        before = self.kept * self.product((past - top).exp(), u)
        return normalized(before - self.product(self.share * (recent - top).exp(), self.us["w"]))
