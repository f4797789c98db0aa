"""The definition: the recurrence token by token, inner gradients by autograd of the stated loss.

One head; t = 0, 1, 2, ...; A_t is the memory as it stood when the chunk of t began.

    G_t = sum_{j < c} gamma[t,j] * grad_W loss(A_t; k_{t-j}, v_{t-j})
    gd        W_t = alpha_t W_{t-1} - eta_t G_t
    momentum  S_t = theta_t S_{t-1} - eta_t G_t      W_t = alpha_t W_{t-1} + S_t
    muon      S_t = theta_t S_{t-1} - G_t            W_t = alpha_t W_{t-1} + [r | t+1] eta_t NS(S_t)
    read      y_t = M_{W_t}(q_t)

Exponential features phi*, <phi*(q), phi*(k)> = exp(q.k), have no finite weights. There the layer
that reads phi* is kept as W_t phi*(x) = F_t [1; x] + sum_i u_i(t) exp(k_i.x), and the step on it,
-eta gamma g_i phi*(k_i)^T, moves the coefficient u_i of the key by -eta gamma g_i.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from atlas_lm.ops.features import features_of
from atlas_lm.ops.networks import Frozen, Lin, Recorded, add_residual, network_of, normalized
from atlas_lm.ops.newton_schulz import newton_schulz
from atlas_lm.ops.objectives import objective_of
from atlas_lm.ops.segments import Outer
from atlas_lm.ops.state import Gates, MemoryState
from atlas_lm.shapes import Keys, TokenFlag, Values, Weights


def memorize_reference(
    q: Keys,
    k: Keys,
    v: Values,
    gates: Gates,
    outer: Outer,
    state: MemoryState,
    mask: TokenFlag | None,
    reset: TokenFlag | None,
) -> tuple[Values, MemoryState]:
    """Every row by itself, every token in turn."""
    outputs, states = [], []
    for row in range(q.shape[0]):
        memory = _Row(state[row], outer)
        y = []
        for t in range(q.shape[1]):
            if mask is not None and not mask[row, t]:
                y.append(torch.zeros_like(v[row, t]))
                continue
            if reset is not None and reset[row, t]:
                memory.begin_document()
            token = _Token(q[row, t], k[row, t], v[row, t], *(g if g is None else g[row, t] for g in gates))
            memory.write(token)
            y.append(memory.read(token.q))
        outputs.append(torch.stack(y) if y else v[row])
        states.append(memory.state())
    return torch.stack(outputs), MemoryState.stack(states)


class _Token(NamedTuple):
    """One token of one row: vectors `[h d]`, gates `[h]`."""

    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    eta: Tensor
    theta: Tensor | None
    gamma: Tensor
    threshold: Tensor | None


class _Snapshot(NamedTuple):
    """Everything a read depends on: weights `[1 h out in]`, coefficients of past keys `[1 h n f]`."""

    weights: Weights
    coefficients: Weights

    def scaled(self, factor: Tensor) -> _Snapshot:
        return _Snapshot(*({n: factor * x for n, x in part.items()} for part in self))


class _Maps(Frozen):
    """A snapshot as the linear maps of a network; the keys are those of its coefficients."""

    def __init__(self, snapshot: _Snapshot, slow: Weights, keys: Tensor):
        super().__init__(snapshot.weights, slow)
        self.coefficients, self.keys = snapshot.coefficients, keys

    def __call__(self, name: str, x: Tensor) -> Tensor:
        if name not in self.coefficients:
            return super().__call__(name, x)
        u = self.coefficients[name]
        learned = (x[..., 1:] @ self.keys[:, :, : u.shape[2]].mT).exp() @ u
        finite = self.weights[name]
        return learned if u.shape[3] > finite.shape[2] else super().__call__(name, x) + learned


class _Row:
    """The memory of one row."""

    def __init__(self, state: MemoryState, outer: Outer):
        self.rule, self.slow = state.rule, outer.slow
        self.network, self.objective = network_of(self.rule), objective_of(self.rule)
        self.phi = features_of(self.rule, outer.coefficients)
        self.blank = state.reset([0], outer.initial)
        self._take(state)

    def begin_document(self) -> None:
        self._take(self.blank)

    def _take(self, state: MemoryState) -> None:
        self.position, c = int(state.position), self.rule.window
        known = min(self.position, c - 1)
        stored = zip(*(x[0] for x in (state.keys, state.values, state.thresholds) if x is not None), strict=True)
        self.pairs = list(stored)[c - 1 - known :]
        past = {n: p[:, : self.position].transpose(1, 2) for n, p in state.past.items()}
        self.keys = past.pop("keys", None)
        self.now = _Snapshot(dict(state.weights), _part(past, "now."))
        self.anchor = _Snapshot(dict(state.anchor), _part(past, "anchor."))
        self.momentum = dict(state.momentum)

    def write(self, token: _Token) -> None:
        rule, alpha, eta = self.rule, token.alpha[:, None, None], token.eta[:, None, None]
        if self.position % rule.chunk == 0:
            self.anchor = self.now
        pair = (token.k, token.v, token.threshold) if rule.objective == "huber" else (token.k, token.v)
        self.pairs = [*self.pairs, pair][-rule.window :]
        anchor = self.anchor.scaled(alpha) if rule.decay_first else self.anchor
        gradient = self._gradient(anchor, token.gamma)
        old, self.now = self.now, self.now.scaled(alpha)
        if self.keys is not None:
            self._append_key(token.k)
        for name, grad in gradient.items():
            if name in old.coefficients:
                u = functional.pad(self.now.coefficients[name], (0, 0, 0, 1))
                step = functional.pad(eta * grad, (0, 0, u.shape[2] - grad.shape[2], 0))
                self.now.coefficients[name] = u - step
            elif rule.optimizer == "gd":
                self.now.weights[name] = self.now.weights[name] - eta * grad
            else:
                self.now.weights[name] = self.now.weights[name] + self._step(name, grad, token)
        self.position += 1

    def _step(self, name: str, grad: Tensor, token: _Token) -> Tensor | int:
        """Move the momentum; what it adds to the weights."""
        rule, eta = self.rule, token.eta[:, None, None]
        assert token.theta is not None
        inside = eta if rule.optimizer == "momentum" or rule.eta_inside else 1
        s = self.momentum[name] = token.theta[:, None, None] * self.momentum[name] - inside * grad
        if rule.optimizer == "momentum":
            return s
        if (self.position + 1) % rule.stride:
            return 0
        step = newton_schulz(s, rule.ns_steps, rule.ns_coefficients)
        return step if rule.eta_inside else eta * step

    def _gradient(self, anchor: _Snapshot, gamma: Tensor) -> Weights:
        """Of the window's loss: by the weights, or by the output of a layer that reads phi*."""
        keep_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            weights = {n: _tracked(w, keep_graph) for n, w in anchor.weights.items()}
            lin = Recorded(_Maps(anchor._replace(weights=weights), self.slow, self.keys))
            k, v, *rest = (torch.stack(x, 1)[None] for x in zip(*self.pairs, strict=True))
            losses = self.objective(self._predict(lin, k), self._target(v), rest[0] if rest else None)
            loss = (gamma[:, : len(self.pairs)].flip(-1) * losses).sum()
            wanted = {n: lin.outputs[n] if n in anchor.coefficients else w for n, w in weights.items()}
            grads = torch.autograd.grad(
                loss, list(wanted.values()), create_graph=keep_graph, materialize_grads=True
            )
        return dict(zip(wanted, grads, strict=True))

    def _predict(self, lin: Lin, x: Tensor) -> Tensor:
        return self.network(lin, add_residual(x, self.slow, torch.matmul), self.phi(x))

    def _target(self, v: Tensor) -> Tensor:
        """A normalised memory also stores a 1 with every value, and divides by what it reads of it."""
        return functional.pad(v, (0, 1), value=1.0) if self.rule.normalize else v

    def read(self, q: Tensor) -> Tensor:
        """M at the weights of now; `[h v]`."""
        q = q[None, :, None]
        if not self.rule.normalize:
            return self._predict(_Maps(self.now, self.slow, self.keys), q)[0, :, 0]
        assert self.keys is not None
        scores = q @ self.keys.mT
        y = (scores - scores.amax(-1, keepdim=True)).exp() @ self.now.coefficients["w"]
        return normalized(y)[0, :, 0]

    def _append_key(self, k: Tensor) -> None:
        assert self.keys is not None
        self.keys = torch.cat([self.keys, k[None, :, None]], 2)

    def state(self) -> MemoryState:
        c, closed = self.rule.window, self.position % self.rule.chunk == 0
        anchor = self.now if closed else self.anchor
        recent = [torch.stack(x)[None] for x in zip(*self.pairs[max(0, len(self.pairs) - c + 1) :], strict=True)]
        blank = [x for x in (self.blank.keys, self.blank.values, self.blank.thresholds) if x is not None]
        if recent:
            blank = [torch.cat([z[:, r.shape[1] :], r], 1) for z, r in zip(blank, recent, strict=True)]
        past = {}
        if self.keys is not None:
            past = {"keys": self.keys, **_named("now.", self.now.coefficients)}
            full = {n: functional.pad(u, (0, 0, 0, self.keys.shape[2] - u.shape[2])) for n, u in anchor.coefficients.items()}
            past |= _named("anchor.", full)
        return replace(
            self.blank,
            weights=self.now.weights,
            anchor=anchor.weights,
            momentum=self.momentum,
            keys=blank[0],
            values=blank[1],
            thresholds=blank[2] if len(blank) > 2 else None,
            position=torch.full_like(self.blank.position, self.position),
            past={n: p.transpose(1, 2) for n, p in past.items()},
        )


def _tracked(weight: Tensor, keep_graph: bool) -> Tensor:
    """The weight as something a gradient can be taken by."""
    if keep_graph and weight.requires_grad:
        return weight
    return weight.detach().requires_grad_()


def _part(tensors: Weights, prefix: str) -> Weights:
    return {n.removeprefix(prefix): x for n, x in tensors.items() if n.startswith(prefix)}


def _named(prefix: str, tensors: Weights) -> Weights:
    return {prefix + n: x for n, x in tensors.items()}
