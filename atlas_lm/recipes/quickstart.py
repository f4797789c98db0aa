"""The first run of anybody: recall, learned from nothing while one watches."""

from __future__ import annotations

from dataclasses import replace

from atlas_lm.models.config import ModelConfig
from atlas_lm.rules import RULES
from atlas_lm.train.config import RecallData, TrainConfig
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def quickstart() -> TrainConfig:
    """One layer of Atlas is told 4 to 8 pairs and asked for them; tested with 16 and 32.

    The rule is the table's but for shorter chunks, and one step of the memory in each: a row of
    training then has several of both. Rows begin with 4 pairs: fewer than a chunk holds would be
    asked for before anything is written.
    """
    rule = replace(RULES["atlas"], chunk=8, stride=8)
    return TrainConfig(
        model=ModelConfig(vocab=64, dim=64, depth=1, heads=2, rule=rule, expansion=2),
        data=RecallData(longer=(48, 96), shortest=12, growth=600, vary=True),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0),
        schedule=Schedule(warmup=30, floor=0.02),
        steps=2000,
        batch=16,
        length=24,
        evaluate_every=100,
        evaluate_batches=8,
        checkpoint_every=200,
        log_every=20,
    )
