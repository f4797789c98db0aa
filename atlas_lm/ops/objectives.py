"""What a memory is trained on at test time: the loss of one pair, from prediction and value."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from atlas_lm.rules import Rule

Objective = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def objective_of(rule: Rule) -> Objective:
    """The loss of each pair: `(prediction [... v], value [... v], threshold [...]) -> [...]`."""
    objective = rule.objective
    if callable(objective):
        return lambda prediction, value, threshold: objective(prediction, value)
    if objective == "l2":
        return lambda prediction, value, threshold: l2(prediction, value)
    if objective == "dot":
        return lambda prediction, value, threshold: dot(prediction, value)
    if objective == "lp":
        return lambda prediction, value, threshold: lp(prediction, value, rule.power)
    return lambda prediction, value, threshold: huber(
        prediction, value, rule.delta if threshold is None else threshold.unsqueeze(-1)
    )


def l2(prediction: Tensor, value: Tensor) -> Tensor:
    return (prediction - value).square().sum(-1) / 2


def dot(prediction: Tensor, value: Tensor) -> Tensor:
    return -(prediction * value).sum(-1)


def lp(prediction: Tensor, value: Tensor, power: float) -> Tensor:
    return (prediction - value).abs().pow(power).sum(-1) / power


def huber(prediction: Tensor, value: Tensor, delta: float | Tensor) -> Tensor:
    size = (prediction - value).abs()
    return torch.where(size <= delta, size.square() / 2, delta * (size - delta / 2)).sum(-1)
