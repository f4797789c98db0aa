"""The definition: the recurrence token by token, inner gradients by autograd of the stated loss.

One head; t = 0, 1, 2, ...; A_t is the memory as it stood when the chunk of t began.

    G_t = sum_{j < c} gamma[t,j] * grad_W loss(A_t; k_{t-j}, v_{t-j})
    gd        W_t = alpha_t W_{t-1} - eta_t G_t
    momentum  S_t = theta_t S_{t-1} - eta_t G_t      W_t = alpha_t W_{t-1} + S_t
    muon      S_t = theta_t S_{t-1} - G_t            W_t = alpha_t W_{t-1} + [r | t+1] eta_t NS(S_t)
    read      y_t = M_{W_t}(q_t)

With fades_to="start" what is kept is D = W - W_0, and W_0 + D stands for W wherever it is used.

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
from atlas_lm.ops.gradients import Recorded
from atlas_lm.ops.networks import Lin, add_residual, network_of, normalized
from atlas_lm.ops.newton_schulz import newton_schulz
from atlas_lm.ops.objectives import objective_of
from atlas_lm.ops.segments import Outer
from atlas_lm.ops.snapshot import Snapshot, SnapshotMaps
from atlas_lm.ops.state import Gates, MemoryState, Tokens, extended, part_of
from atlas_lm.shapes import Values, Weights


def memorize_reference(
    tokens: Tokens, outer: Outer, state: MemoryState
) -> tuple[Values, MemoryState]:
    """Every row by itself, every token in turn."""
    q, k, v, gates, mask, reset = tokens
    outputs, states = [], []
    for row in range(q.shape[0]):
        memory, y = _Row(state[row], outer), []
        for t in range(q.shape[1]):
            if mask is not None and not mask[row, t]:
                y.append(torch.zeros_like(v[row, t]))
                continue
            if reset is not None and reset[row, t]:
                memory.begin_document()
            memory.write(k[row, t], v[row, t], gates.map(lambda g, at=(row, t): g[at]))
            y.append(memory.read(q[row, t]))
        outputs.append(torch.stack(y))
        states.append(memory.state())
    return torch.stack(outputs), MemoryState.stack(states)


class _Pair(NamedTuple):
    """What was to be remembered at one token, `[h d]` and `[h]`."""

    k: Tensor
    v: Tensor
    threshold: Tensor | None


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

    def write(self, k: Tensor, v: Tensor, gates: Gates) -> None:
        rule, alpha, eta = self.rule, gates.retention[:, None, None], gates.rate[:, None, None]
        if self.position % rule.chunk == 0:
            self.anchor = self.now
        self.pairs = [*self.pairs, _Pair(k, v, gates.threshold)][-rule.window :]
        anchor = self.anchor.scaled(alpha) if rule.decay_first else self.anchor
        gradient = self._gradient(anchor, gates.importance)
        self.now = self.now.scaled(alpha)
        weights, coefficients = self.now
        for name, grad in gradient.items():
            if name in coefficients:
                coefficients[name] = _added(coefficients[name], -eta * grad)
            elif rule.optimizer == "gd":
                weights[name] = weights[name] - eta * grad
            else:
                weights[name] = weights[name] + self._step(name, grad, eta, gates.momentum)
        if self.keys is not None:
            self.keys = torch.cat([self.keys, k[None, :, None]], 2)
        self.position += 1

    def read(self, q: Tensor) -> Tensor:
        """M at the weights of now; `[h v]`."""
        x = q[None, :, None]
        if not self.rule.normalize:
            return self._predict(SnapshotMaps(self.now, self.slow, self.keys), x)[0, :, 0]
        u = self.now.coefficients["w"]
        scores = SnapshotMaps(self.now, self.slow, self.keys).scores(x, u)
        y = (scores - scores.amax(-1, keepdim=True)).exp() @ u
        return normalized(y)[0, :, 0]

    def _gradient(self, anchor: Snapshot, gamma: Tensor) -> Weights:
        """Of the window's loss: by the weights, or by the output of a layer that reads phi*."""
        keep_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            weights = {n: _tracked(w, keep_graph) for n, w in anchor.weights.items()}
            lin = Recorded(SnapshotMaps(anchor._replace(weights=weights), self.slow, self.keys))
            k, v = self._recent("k"), self._recent("v")
            threshold = self._recent("threshold") if self.rule.objective == "huber" else None
            if self.rule.normalize:
                v = functional.pad(v, (0, 1), value=1.0)
            losses = self.objective(self._predict(lin, k), v, threshold)
            loss = (gamma[:, : len(self.pairs)].flip(-1) * losses).sum()
            by = {n: lin.outputs[n] if n in anchor.coefficients else w for n, w in weights.items()}
            grads = torch.autograd.grad(
                loss, list(by.values()), create_graph=keep_graph, materialize_grads=True
            )
        return dict(zip(by, grads, strict=True))

    def _recent(self, part: str) -> Tensor:
        """Keys, values or thresholds of the window, `[1 h n ...]`."""
        return torch.stack([getattr(pair, part) for pair in self.pairs], 1)[None]

    def _predict(self, lin: Lin, x: Tensor) -> Tensor:
        return self.network(lin, add_residual(x, self.slow, torch.matmul), self.phi(x))

    def _step(self, name: str, grad: Tensor, eta: Tensor, theta: Tensor | None) -> Tensor:
        """Move the momentum; what it adds to the weights."""
        rule = self.rule
        assert theta is not None
        inside = eta if rule.optimizer == "momentum" or rule.eta_inside else 1
        s = self.momentum[name] = theta[:, None, None] * self.momentum[name] - inside * grad
        if rule.optimizer == "momentum":
            return s
        if (self.position + 1) % rule.stride:
            return torch.zeros_like(s)
        step = newton_schulz(s, rule.ns_steps, rule.ns_coefficients)
        return step if rule.eta_inside else eta * step

    def _take(self, state: MemoryState) -> None:
        self.position = int(state.position)
        known = min(self.position, self.rule.window - 1)
        thresholds = state.thresholds
        self.pairs = [
            _Pair(
                state.keys[0, i],
                state.values[0, i],
                None if thresholds is None else thresholds[0, i],
            )
            for i in range(self.rule.window - 1 - known, self.rule.window - 1)
        ]
        past = {n: p[:, : self.position].transpose(1, 2) for n, p in state.past.items()}
        self.keys = past.get("keys")
        self.now = Snapshot(dict(state.weights), part_of(past, "now."))
        self.anchor = Snapshot(dict(state.anchor), part_of(past, "anchor."))
        self.momentum = dict(state.momentum)

    def state(self) -> MemoryState:
        blank, count = self.blank, min(len(self.pairs), self.rule.window - 1)
        anchor = self.now if self.position % self.rule.chunk == 0 else self.anchor
        past = {}
        if self.keys is not None:
            length = self.keys.shape[2]
            past = {"keys": self.keys}
            past |= {f"now.{n}": u for n, u in self.now.coefficients.items()}
            past |= {f"anchor.{n}": extended(u, length) for n, u in anchor.coefficients.items()}
        recent = self.pairs[len(self.pairs) - count :]
        thresholds = blank.thresholds
        if thresholds is not None:
            thresholds = _filled(
                thresholds, [p.threshold for p in recent if p.threshold is not None]
            )
        return replace(
            blank,
            weights=self.now.weights,
            anchor=anchor.weights,
            momentum=self.momentum,
            keys=_filled(blank.keys, [p.k for p in recent]),
            values=_filled(blank.values, [p.v for p in recent]),
            thresholds=thresholds,
            position=torch.full_like(blank.position, self.position),
            past={n: p.transpose(1, 2) for n, p in past.items()},
        )


def _tracked(weight: Tensor, keep_graph: bool) -> Tensor:
    """The weight as something a gradient can be taken by."""
    if keep_graph and weight.requires_grad:
        return weight
    return weight.detach().requires_grad_()


def _added(u: Tensor, step: Tensor) -> Tensor:
    """Coefficients with one more key, and a step on the last of them."""
    before = u.shape[2] + 1 - step.shape[2]
    return extended(u, u.shape[2] + 1) + functional.pad(step, (0, 0, before, 0))


def _filled(blank: Tensor, recent: list[Tensor]) -> Tensor:
    """The window `[1 c-1 ...]` with these entries last."""
    return torch.cat([blank[:, len(recent) :], *(x[None, None] for x in recent)], 1)
