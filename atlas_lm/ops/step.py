"""One token at a time: the recurrence itself, for all rows at once, whatever their positions.

    pairs     the window and this one, those before the document weighed by 0
    G         sum_j gamma_j u_j x_j^T at the anchor
    W, S      one step of gd, momentum or muon
    anchor    W in the rows whose chunk is over

Nothing is cut, so nothing has to be known about the numbers: a GPU never waits for the CPU, and
the calls are the same for every token, as a CUDA graph needs them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from atlas_lm.ops.features import features_of
from atlas_lm.ops.gradients import pair_gradients
from atlas_lm.ops.networks import Frozen, add_residual, network_of
from atlas_lm.ops.newton_schulz import newton_schulz
from atlas_lm.ops.pieces import Flags
from atlas_lm.ops.segments import Outer
from atlas_lm.ops.state import Gates, MemoryState, Tokens
from atlas_lm.rules import Rule
from atlas_lm.shapes import Position, Product, Values, Weights


def is_step(rule: Rule, tokens: Tokens) -> bool:
    """Whether there is one token in every row, and weights that can be stepped."""
    one = tokens.q.shape[1] == 1 and tokens.mask is None and tokens.reset is None
    return one and rule.features != "exponential"


def memorize_step(
    tokens: Tokens, outer: Outer, state: MemoryState, product: Product, by_kernel: bool = False
) -> tuple[Values, MemoryState]:
    """Exactly one token a row, none masked and none that begins a document.

    by_kernel: in one launch, but for muon's steps. Nothing of it is on a graph then.
    """
    rule = state.rule
    pairs, kept = _window(tokens, state)
    ends = rows_at(state.position, rule.chunk, ahead=1)
    live = rows_at(state.position, rule.stride, ahead=1) if rule.optimizer == "muon" else None
    if by_kernel and (live is None or live.none):
        from atlas_lm.ops.triton.step import step

        y, *moved = step(
            tokens.q, pairs["keys"], pairs["values"], tokens.gates, outer, state, ends,
            in_place=_in_place.get(),
        )  # fmt: skip
    else:
        seen = _Seen.of(pairs, tokens.gates.importance, state)
        weights, momentum = _written(state, outer, product, seen, tokens.gates, live)
        anchor = {n: ends.select(w, state.anchor[n]) for n, w in weights.items()}
        y, moved = _read(tokens.q, weights, outer, rule, product), (weights, anchor, momentum)
    weights, anchor, momentum = moved
    position = state.position + 1
    return y, replace(
        state, weights=weights, anchor=anchor, momentum=momentum, position=position, **kept
    )


def _read(q: Tensor, weights: Weights, outer: Outer, rule: Rule, product: Product) -> Tensor:
    """What the memory says of the queries, `[b 1 h v]`."""
    x, lin = q.transpose(1, 2), Frozen(weights, outer.slow, product)
    f = features_of(rule, outer.coefficients)(x)
    return network_of(rule)(lin, add_residual(x, outer.slow, product), f).transpose(1, 2)


@contextmanager
def in_place(allowed: bool = True) -> Iterator[None]:
    """Inside, a step on a GPU may move a memory where it is, or may not: whoever allows it has no
    other use for the state, and looks at what is returned."""
    token = _in_place.set(allowed)
    try:
        yield
    finally:
        _in_place.reset(token)


_in_place: ContextVar[bool] = ContextVar("a step moves the state in place", default=False)


class KnownPositions:
    """Where all rows are, for whoever records a step: `kind` tells apart steps that differ by it.

    What steps ask is noted, so that it is known what they may differ by.
    """

    def __init__(self, rows: Iterable[int], asked: set[tuple[int, int]]):
        self.rows, self.asked = frozenset(rows), asked

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Inside, `rows_at` asks here."""
        token = _known.set(self)
        try:
            yield
        finally:
            _known.reset(token)

    def at(self, multiple: int, ahead: int) -> tuple[bool, bool]:
        """Whether all rows are at a multiple, and whether none is, so many tokens ahead."""
        self.asked.add((multiple, ahead))
        found = {(position + ahead) % multiple == 0 for position in self.rows}
        return False not in found, True not in found

    def kind(self) -> tuple[tuple[bool, bool], ...]:
        """The answers to all that was ever asked."""
        return tuple(self.at(*question) for question in sorted(self.asked))

    def moved_on(self) -> KnownPositions:
        """After one more token in every row."""
        return KnownPositions((position + 1 for position in self.rows), self.asked)


_known: ContextVar[KnownPositions | None] = ContextVar("known positions", default=None)


def rows_at(position: Position, multiple: int, ahead: int = 0) -> Flags:
    """Rows at a multiple of this many tokens, once they have read some more. On a CPU looking is
    free, and spares work."""
    if multiple == 1:
        return Flags(torch.ones_like(position, dtype=torch.bool), all=True, none=False)
    known = _known.get()
    if known is not None:
        every, none = known.at(multiple, ahead)
        if every or none:
            return Flags(torch.full_like(position, every, dtype=torch.bool), every, none)
    rows = (position + ahead) % multiple == 0
    if known is not None or not looking_is_free(position.device):
        return Flags(rows, all=False, none=False)
    found = rows.tolist()
    return Flags(rows, all=all(found), none=not any(found))


def looking_is_free(device: torch.device) -> bool:
    """Whether Python may ask for values without keeping a device waiting."""
    return device.type == "cpu"


def _window(tokens: Tokens, state: MemoryState) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The pairs that a step is taken on, oldest first, `[b c h .]`, and those of the next token."""
    pairs = {"keys": tokens.k, "values": tokens.v}
    if tokens.gates.threshold is not None:
        pairs["thresholds"] = tokens.gates.threshold
    if state.rule.window == 1:
        return pairs, {}
    pairs = {n: torch.cat([getattr(state, n), x], 1) for n, x in pairs.items()}
    return pairs, {n: x[:, 1:] for n, x in pairs.items()}


class _Seen(NamedTuple):
    """The pairs as sums take them, `[b h c .]`."""

    k: Tensor
    v: Tensor
    threshold: Tensor | None
    weight: Tensor
    """gamma, 0 before the document, `[b h c 1]`."""

    @classmethod
    def of(cls, pairs: dict[str, Tensor], gamma: Tensor, state: MemoryState) -> _Seen:
        c = state.rule.window
        if c > 1:
            reach = torch.arange(c, device=gamma.device) <= state.position[:, None]
            gamma = (gamma * reach[:, None, None]).flip(-1)
        by_head = {n: x.transpose(1, 2) for n, x in pairs.items()}
        weight = gamma.squeeze(1).unsqueeze(-1)
        return cls(by_head["keys"], by_head["values"], by_head.get("thresholds"), weight)


def _written(
    state: MemoryState, outer: Outer, product: Product, seen: _Seen, gates: Gates,
    live: Flags | None,
) -> tuple[Weights, Weights]:  # fmt: skip
    """The weights and the momentum after the token. `live`: rows where muon steps."""
    rule = state.rule
    alpha, eta = (g.mT.unsqueeze(-1) for g in (gates.retention, gates.rate))
    xs, us = _factors(state, outer, product, seen, alpha)
    inside = live is None or rule.eta_inside
    share = seen.weight * -eta if inside else -seen.weight
    pushed = {n: _outer_sum(share, us[n], xs[n], product) for n in state.weights}
    if gates.momentum is None:
        return {n: torch.addcmul(pushed[n], alpha, w) for n, w in state.weights.items()}, {}
    theta = gates.momentum.mT.unsqueeze(-1)
    momentum = {n: torch.addcmul(pushed[n], theta, s) for n, s in state.momentum.items()}
    steps = momentum
    if live is not None:
        if live.none:
            return {n: alpha * w for n, w in state.weights.items()}, momentum
        steps = _muon_steps(rule, live, momentum, torch.ones_like(eta) if inside else eta, product)
    return {n: torch.addcmul(steps[n], alpha, w) for n, w in state.weights.items()}, momentum


def _factors(state: MemoryState, outer: Outer, product: Product, seen: _Seen, alpha: Tensor):
    """The gradients of the pairs at the anchor: inputs x_i and gradients u_i."""
    rule, anchor = state.rule, state.anchor
    if rule.decay_first:
        anchor = {n: alpha * w for n, w in anchor.items()}
    lin = Frozen(anchor, outer.slow, product)
    f = features_of(rule, outer.coefficients)(seen.k)
    x = add_residual(seen.k, outer.slow, product)
    return pair_gradients(rule, lin, x, f, seen.v, seen.threshold)


def _outer_sum(share: Tensor, u: Tensor, x: Tensor, product: Product) -> Tensor:
    """sum_i share_i u_i x_i^T, `[b h out in]`, scaled on the narrower side."""
    if x.shape[-1] <= u.shape[-1]:
        return product(u.mT, share * x)
    return product((share * u).mT, x)


def _muon_steps(
    rule: Rule, live: Flags, momentum: Weights, rate: Tensor, product: Product
) -> Weights:
    """What the stride points among the rows add to their weights."""
    rate = live.select(rate, torch.zeros_like(rate))
    return {
        n: rate * newton_schulz(s, rule.ns_steps, rule.ns_coefficients, product)
        for n, s in momentum.items()
    }
