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
    if objective == "lp":
        return lambda prediction, value, threshold: lp(prediction, value, rule.power)
    if objective == "huber":
        return huber
    plain = {"l2": l2, "dot": dot}[objective]
    return lambda prediction, value, threshold: plain(prediction, value)


def l2(prediction: Tensor, value: Tensor) -> Tensor:
    return (prediction - value).square().sum(-1) / 2


def dot(prediction: Tensor, value: Tensor) -> Tensor:
    return -(prediction * value).sum(-1)


def lp(prediction: Tensor, value: Tensor, power: float) -> Tensor:
    return (prediction - value).abs().pow(power).sum(-1) / power


def huber(prediction: Tensor, value: Tensor, threshold: Tensor | None) -> Tensor:
    delta, size = _column(threshold), (prediction - value).abs()
    return torch.where(size <= delta, size.square() / 2, delta * (size - delta / 2)).sum(-1)


def error_of(rule: Rule) -> Objective:
    """The gradient of a named loss by the prediction, in the same form."""
    if rule.objective == "l2":
        return lambda prediction, value, threshold: prediction - value
    if rule.objective == "dot":
        return lambda prediction, value, threshold: -value
    if rule.objective == "lp":
        return lambda prediction, value, threshold: _signed_power(
            prediction - value, rule.power - 1
        )
    return lambda prediction, value, threshold: (prediction - value).clamp(
        -_column(threshold), _column(threshold)
    )


def _signed_power(error: Tensor, power: float) -> Tensor:
    return error.sign() * error.abs().pow(power)


def _column(threshold: Tensor | None) -> Tensor:
    assert threshold is not None, "huber needs the threshold every pair is stored with"
    return threshold.unsqueeze(-1)
