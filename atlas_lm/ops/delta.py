"""The exact online delta rule in parallel: linear memory, l2, gd, a new anchor at every token.

Every error depends on all writes before it, u_t = v_t - W_{t-1} k_t, which inside a tile is
one triangular system

    (I + tril(L[t-1,i] eta_i <k_t, k_i>, -1)) U = V - a_{t-1} K W^T

solved for V and K at once before W is known. With `decay_first` the error is taken at
alpha_t W_{t-1}, and t-1 becomes t. No decay is ever divided by.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from atlas_lm.ops.decay import decay
from atlas_lm.ops.features import features_of, kernel_of
from atlas_lm.ops.pieces import Pieces, cut_into_pieces
from atlas_lm.ops.segments import Inputs, Outer, begin_rows, finish, plan_groups, prepare, run
from atlas_lm.ops.state import MemoryState, Tokens
from atlas_lm.ops.step import looking_is_free
from atlas_lm.rules import Rule
from atlas_lm.shapes import Product, Values, Weights

TILE = 64
"""Tokens solved together. Not part of the model: any value gives the same numbers."""


def is_delta_rule(rule: Rule) -> bool:
    """Whether the parallel form exists: the error must be linear in the weights."""
    online = rule.chunk == 1 and rule.window == 1
    linear = rule.network == "linear" and rule.features != "exponential"
    return online and linear and rule.objective == "l2" and rule.optimizer == "gd"


def memorize_delta(
    tokens: Tokens, outer: Outer, state: MemoryState, product: Product, closed: bool
) -> tuple[Values, MemoryState]:
    rule = state.rule
    if stands_still(tokens):
        return _read(tokens, outer, state, product)
    pieces = cut_into_pieces(
        state.position, tokens.q.shape[1], tokens.mask, tokens.reset, TILE, rule.window
    )
    inputs = prepare(pieces, state, tokens)
    groups = plan_groups(inputs, state.weights)
    y, weights = run(_Delta(rule, pieces, product), inputs, state.weights, outer, groups, closed)
    state = finish(pieces, state, tokens, weights=weights, anchor=dict(weights))
    return pieces.join(y), state


def stands_still(tokens: Tokens) -> bool:
    """Whether the memory stays as it is, as far as the host can tell without waiting. Where there
    is a graph, gates have gradients although they are closed."""
    if torch.is_grad_enabled() or not looking_is_free(tokens.q.device):
        return False
    return tokens.mask is None and tokens.reset is None and not tokens.gates.open.any()


def _read(
    tokens: Tokens, outer: Outer, state: MemoryState, product: Product
) -> tuple[Values, MemoryState]:
    """Every query at the one memory there is."""
    x = tokens.q.transpose(1, 2)
    y = product(features_of(state.rule, outer.coefficients)(x), state.weights["w"].mT)
    return y.transpose(1, 2), replace(state, position=state.position + tokens.q.shape[1])


@dataclass(frozen=True)
class _Delta:
    rule: Rule
    pieces: Pieces
    product: Product

    def __call__(self, first: int, inputs: Inputs, weights: Weights, outer: Outer):
        phi = features_of(self.rule, outer.coefficients)
        kernel = kernel_of(self.rule, outer.coefficients, self.product)
        fq, fk = phi(inputs.q), phi(inputs.k)
        rate = inputs.eta * inputs.gamma[..., 0]
        kept, spans = decay(inputs.alpha)
        alike = kernel(inputs.k, inputs.k, fk, fk)
        errors, seen = self._solve(kept, spans, rate, alike, inputs.v, fk)
        share, entered, grads = spans * rate.unsqueeze(-2), [], []
        ends = share[..., -1, :].unsqueeze(-1) * fk
        parts = (x.unbind(0) for x in (errors, seen, kept[..., -1, None, None], ends))
        for i, (error, read, keep, end) in enumerate(zip(*parts, strict=True)):
            weights = begin_rows(self.pieces.begins[first + i], outer.initial, weights)
            w = weights["w"]
            u = error - self.product(read, w.mT)
            entered.append(w)
            grads.append(u)
            weights = {"w": keep * w + self.product(u.mT, end)}
        before = kept.unsqueeze(-1) * self.product(fq, torch.stack(entered).mT)
        during = self.product(share * kernel(inputs.q, inputs.k, fq, fk), torch.stack(grads))
        return before + during, weights

    def _solve(self, kept: Tensor, spans: Tensor, rate: Tensor, alike: Tensor, v, fk):
        """U = errors - seen W^T, whatever the entering W."""
        if not self.rule.decay_first:
            # one token earlier: before the first, all of W and nothing written yet
            kept = functional.pad(kept[..., :-1], (1, 0), value=1.0)
            spans = functional.pad(spans[..., :-1, :], (0, 0, 1, 0))
        system = (spans * rate.unsqueeze(-2) * alike).tril(-1)
        right = torch.cat([v, kept.unsqueeze(-1) * fk], -1)
        solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        return solved.split([v.shape[-1], fk.shape[-1]], -1)
