"""The first run of anybody: recall, learned from nothing while one watches."""

from __future__ import annotations

from dataclasses import replace

from atlas_lm.models.config import ModelConfig
from atlas_lm.rules import RULES
from atlas_lm.train.config import TrainConfig
from atlas_lm.train.data import RecallData
from atlas_lm.train.optimizers import OptimizerConfig
from atlas_lm.train.schedules import Schedule


def quickstart() -> TrainConfig:
    """One layer of Atlas is told 8 pairs and asked for them; tested with 16 and 32.

    The rule is the table's but for shorter chunks, and one step of the memory in each, so that a
    row of training has several of both. A pair can be recalled once its chunk is full: of 4, 8 or
    16 pairs all can, of 5 the last one never. Rows grow from 4 pairs, which are learned sooner.
    """
    rule = replace(RULES["atlas"], chunk=8, stride=8)
    return TrainConfig(
        model=ModelConfig(vocab=64, dim=64, depth=1, heads=2, rule=rule, expansion=2),
        data=RecallData(longer=(48, 96), shortest=12, growth=400),
        optimizer=OptimizerConfig(lr=3e-3, weight_decay=0.0),
        schedule=Schedule(warmup=30, floor=0.02),
        threads=1,
        steps=1200,
        batch=16,
        length=24,
        evaluate_every=50,
        evaluate_batches=4,
        checkpoint_every=200,
        log_every=20,
    )
