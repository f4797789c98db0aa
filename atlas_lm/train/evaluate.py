"""How good a model is: its loss on text it never saw, what it recalls at lengths it never saw."""

from __future__ import annotations

from math import exp

import torch
from torch import nn

from atlas_lm.train.config import RecallData, TrainConfig
from atlas_lm.train.ranks import Ranks
from atlas_lm.train.sources import Material
from atlas_lm.train.step import precision

MOST_NATS = 700.0
"""exp of more is infinite, which JSON does not know."""


@torch.no_grad()
def evaluate(
    config: TrainConfig, ranks: Ranks, objective: nn.Module, material: Material
) -> dict[str, float]:
    """`loss` and `perplexity`; of recall, `accuracy` at the length of training and
    `accuracy@LENGTH` at every one. Nothing where there is nothing to evaluate on."""
    judge = isinstance(config.data, RecallData)
    found: dict[str, float] = {}
    for length, works in material.tests(config, ranks).items():
        nats = count = right = torch.zeros((), dtype=torch.float64, device=ranks.device)
        state = None
        for work in works:
            if not config.carry:
                state = None
            for segment in work.segments(config.segment):
                with precision(config, ranks):
                    tokens, targets, reset = segment.to(ranks.device)
                    made = objective(tokens, targets, state, reset, judge)
                state = made[2]
                nats, count = nats + made[0], count + made[1]
                if judge:
                    right = right + made[3]
        nats, count, right = ranks.sum(torch.stack([nats, count, right])).tolist()
        if not found:
            loss = nats / count
            found |= {"loss": loss, "perplexity": exp(min(loss, MOST_NATS))}
        if judge:
            found.setdefault("accuracy", right / count)
            found[f"accuracy@{length}"] = right / count
    return found
