"""How much a layer keeps, writes and listens to: gates made from its input.

Every token gets its own, through a narrow map with a bias. Two of them can close: a rate of exactly
0 writes nothing and a retention of exactly 1 forgets nothing, so that a memory can stand still over
any number of tokens that are not worth it. A sigmoid never gets there.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from atlas_lm.ops.precision import state_dtype
from atlas_lm.ops.state import Gates
from atlas_lm.rules import Rule

FORGET = 0.01
"""What one unit of the map forgets: steps of an optimiser move 1 - alpha by little."""
MOST_FORGOTTEN = 0.99
MARGIN = 0.25
"""How far below closed a gate is closed for good: what is only just closed in the text that it
learned with opens now and then in another."""
TOLD = 0.003
"""What a unit from being about to open counts where something is told, beside a unit of being open
where nothing is. Open, it has to be worth it; closed any further, it would have no gradient."""
NORMED = 4
"""How much further a memory with a normalised branch may step: the longer its weights, the less
they turn, so it cannot run away. Recall of small models: 30 % at 1, 47 % at 4, 45 % at 8
(docs/log.md)."""

LEAST_MOMENTUM = 1e-6
"""A sigmoid far below rounds to 0, of which there is no logarithm."""


@dataclass(frozen=True)
class Part:
    """One gate: how many numbers a head and token needs, and the bias they start from."""

    name: str
    width: int
    bias: float
    first: float | None = None
    """The bias of the first of them, where it starts from another."""

    def start(self) -> list[float]:
        first = self.bias if self.first is None else self.first
        return [first] + [self.bias] * (self.width - 1)


def parts_of(rule: Rule, retention: float, newest: float | None = None) -> list[Part]:
    """The gates a rule learns. At a window of 1 there is nothing to weigh.

    `newest`: what the newest pair of a window weighs to begin with; None: what each other does.
    """
    parts = [Part("rate", 1, 0.5)]
    if rule.retention == "learned":
        parts.append(Part("retention", 1, (1 - retention) / FORGET))
    if rule.uses_momentum:
        parts.append(Part("momentum", 1, log(0.9 / 0.1)))
    if rule.window > 1:
        first = None if newest is None else log(newest / (1 - newest) * (rule.window - 1))
        parts.append(Part("importance", rule.window, 0.0, first))
    if rule.objective == "huber":
        parts.append(Part("threshold", 1, log(exp(rule.delta) - 1)))
    return parts


class GateMaps(nn.Module):
    """`Gates` of a rule from embeddings `[b t dim]`, in float32 or better."""

    def __init__(
        self,
        rule: Rule,
        dim: int,
        heads: int,
        rank: int,
        retention: float,
        newest: float | None = None,
    ):
        super().__init__()
        self.rule, self.heads = rule, heads
        self.parts = parts_of(rule, retention, newest)
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, heads * sum(p.width for p in self.parts))

    def initial_bias(self) -> Tensor:
        """Of `up`: every gate where it starts."""
        return torch.tensor([bias for p in self.parts for bias in self.heads * p.start()])

    def forward(self, x: Tensor, coefficients: Tensor | None) -> Gates:
        made = self._divided(self.up(self.down(x)))
        one = torch.ones_like(made["rate"][..., 0])
        momentum = None
        if "momentum" in made:
            momentum = made["momentum"][..., 0].sigmoid().clamp(min=LEAST_MOMENTUM)
        rate = made["rate"][..., 0].clamp(0, 1) * self.highest_rate(coefficients)
        if momentum is not None and self.rule.optimizer == "momentum":
            rate = rate * (1 - momentum)
        threshold = made.get("threshold")
        return Gates(
            retention=self._retention(made.get("retention"), one),
            rate=rate,
            momentum=momentum,
            importance=made["importance"].softmax(-1) if "importance" in made else one[..., None],
            threshold=None if threshold is None else softplus(threshold[..., 0]) + 1e-3,
        )

    def astray(self, raw: Tensor, plain: Tensor | None = None) -> Tensor:
        """How far gates are from where they belong, in each head `[b t h]`, by what `up` has made
        for them: what writes and what forgets from closed for good. Where a token is not plain
        `[b t]`, what writes from being about to open, which counts little. A memory that fades by
        itself has none astray."""
        made = self._divided(raw)
        rate = made["rate"][..., 0]
        if self.rule.retention == "fixed":
            return torch.zeros_like(rate)
        away = (rate + MARGIN).clamp(min=0)
        if "retention" in made:
            away = away + (made["retention"][..., 0] + MARGIN).clamp(min=0)
        if plain is None:
            return away
        return torch.where(plain[..., None], away, TOLD * rate.abs())

    def _divided(self, raw: Tensor) -> dict[str, Tensor]:
        """What the gates are made from `[b t h .]`, by name."""
        raw = raw.to(state_dtype(raw.dtype))
        parts = raw.split([self.heads * p.width for p in self.parts], -1)
        return {
            p.name: r.unflatten(-1, (self.heads, p.width))
            for p, r in zip(self.parts, parts, strict=True)
        }

    def highest_rate(self, coefficients: Tensor | None) -> Tensor | float:
        """The step that a token repeated through a whole chunk survives, given unit keys.

        gd on squared errors diverges beyond b eta |phi(k)|^2 = 2, muon moves by its rate whatever
        the gradient. A linear memory on the dot product has no such bound.
        """
        rule = self.rule
        if rule.optimizer == "muon":
            return rule.stride / rule.chunk
        if rule.network == "linear" and rule.objective == "dot":
            return 1.0
        most = (NORMED if rule.norm else 1) / rule.chunk
        if rule.features == "exponential":
            return most / exp(1)
        return most if coefficients is None else most / coefficients.sum(-1)

    def _retention(self, raw: Tensor | None, one: Tensor) -> Tensor:
        if raw is not None:
            return 1 - (FORGET * raw[..., 0]).clamp(0, MOST_FORGOTTEN)
        if self.rule.retention == "none":
            return one
        # RetNet: from 1 - 1/32 on, every head keeps twice as long as the one before
        heads = torch.arange(self.heads, device=one.device, dtype=one.dtype)
        return one * (1 - 2 ** (-5 - heads))
